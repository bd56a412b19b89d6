"""What people and programs read: terminal, JSON, CSV, pictures, explanation, validation."""
