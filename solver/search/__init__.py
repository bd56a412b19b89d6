"""The space of layouts of a world size, and the search through it."""
