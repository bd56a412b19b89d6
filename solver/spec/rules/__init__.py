"""What a layout, a model and a framework must agree on; solver.spec.feasibility puts the rules together."""
