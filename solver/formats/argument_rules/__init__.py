"""Rules by which frameworks refuse arguments at their start, as data: what must hold, and where their code says so."""
