"""Megatron-LM's arguments: as a script, as YAML, and as a log prints them."""
