"""Measuring this machine: kernels, collectives, and both at once."""
