"""Measure this machine: kernels, collectives, and both overlapped."""
