"""Megatron-Bridge's YAML files."""
