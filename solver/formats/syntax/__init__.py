"""Python, YAML and TOML as values that know their lines, and checks of their keys."""
