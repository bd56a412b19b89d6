"""Seconds of compute kernels: GEMMs, attention and memory-bound kernels."""
