"""DeepSpeed's JSON with the script that launches it."""
