"""Commands that launch a trainer: the words of its script and the ranks that they start."""
