"""Estimates of a whole step: ops, overlap, work outside the layers, time and memory."""
