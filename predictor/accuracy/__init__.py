"""How well the fits predict rows they have not seen: cross-validation, scores and pictures."""
