"""The question: model, strategy, cluster, framework, precision, and which layouts are feasible."""
