"""NeMo 1's YAML files."""
