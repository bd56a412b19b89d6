"""Profiles: their tables, their file, the devices, and what to measure."""
