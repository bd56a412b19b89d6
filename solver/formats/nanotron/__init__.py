"""nanotron's YAML files."""
