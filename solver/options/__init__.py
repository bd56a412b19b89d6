"""What the options of the commands say: their declaration, and the config, machine and batch that they name."""
