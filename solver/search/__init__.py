"""Every layout of a world size: the space, and the search through it."""
