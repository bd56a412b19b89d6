"""LLaMA-Factory's files of settings."""
