"""Hugging Face's config.json as a model, one reader per architecture."""
