"""The commands, each in the file of its name; console.py finds the one that was typed."""
