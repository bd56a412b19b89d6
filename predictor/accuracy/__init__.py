"""How well the fits predict measurements they have not seen: cross-validation, scores and pictures."""
