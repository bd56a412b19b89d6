"""Readers for the file formats of other programs and of this one, one module per format."""
