"""What a layer does, holds and keeps: ops, weights, saved tensors; one file a part of a layer."""
