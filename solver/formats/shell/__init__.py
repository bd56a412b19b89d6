"""Shell scripts, read without running them."""
