"""Ops, weights and saved tensors of a layer; one module per part of a layer."""
