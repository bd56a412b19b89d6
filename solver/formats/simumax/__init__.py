"""SimuMax's model and strategy files."""
