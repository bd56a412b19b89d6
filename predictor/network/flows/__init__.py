"""Collectives as flows on a topology: their routes, max-min fair rates, and the events of starting and ending flows."""
