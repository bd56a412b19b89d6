"""Measured training runs (cases) as models and layouts."""
