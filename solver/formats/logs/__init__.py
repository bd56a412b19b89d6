"""Logs and traces of training jobs."""
