"""Inputs of a prediction: model, strategy, cluster, framework, number formats, and which layouts are feasible."""
