"""Seconds of collectives inside a node and between nodes."""
