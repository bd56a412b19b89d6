"""Output for people and programs: terminal, JSON, CSV, pictures, explanation, validation."""
