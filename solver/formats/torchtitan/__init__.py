"""torchtitan's TOML files."""
