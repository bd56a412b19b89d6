"""Train a real transformer for some steps, as a case to validate predictions with."""
