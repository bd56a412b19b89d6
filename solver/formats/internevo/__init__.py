"""InternEvo's Python configuration files."""
