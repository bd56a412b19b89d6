"""Buckets of gradients of torch's DistributedDataParallel, which are of whole tensors.

Source: torch/csrc/distributed/c10d/reducer.cpp (compute_bucket_assignment_by_size), as read: tensors in the reverse order of
the model fill a bucket until it holds at least 25 MiB, the first one until it holds 1 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from solver.spec.kernels import Kernels
from solver.spec.model import ModelSpec
from solver.spec.recipes import HALF
from solver.step.layouts import Splits

FIRST_BYTES, BYTES = 1 << 20, 25 << 20


def ddp_buckets(model: ModelSpec, kernels: Kernels, splits: Splits) -> np.ndarray:
    """Return the buckets of the first stage's 16-bit gradients, float64 [splits]."""
    pairs = zip(splits.tp.tolist(), splits.pp.tolist(), strict=True)
    return np.array([_count(model, kernels.fused_qkv, kernels.fused_gate_up, tp, pp) for tp, pp in pairs], dtype=float)


def bucket_sizes(elements: Sequence[int]) -> list[int]:
    """Return the elements of each bucket that tensors of ``elements``, in the order of the model, make."""
    found, held, limit = list[int](), 0, FIRST_BYTES
    for size in reversed(elements):
        held += size
        if held * HALF >= limit:
            found.append(held)
            held, limit = 0, BYTES
    return [*found, held] if held else found


@lru_cache(maxsize=4096)
def _count(model: ModelSpec, fused_qkv: bool, fused_gate_up: bool, tp: int, pp: int) -> int:
    return len(bucket_sizes(tensors_in_order(model, fused_qkv, fused_gate_up, tp, pp)))


def tensors_in_order(model: ModelSpec, fused_qkv: bool, fused_gate_up: bool, tp: int, pp: int) -> list[int]:
    """Return the elements of the weights of one rank of the first stage, in the order of the model."""
    h, f = model.hidden_size, model.intermediate_size // tp
    q, kv = (heads * model.head_dim // tp for heads in (model.num_attention_heads, model.num_key_value_heads))
    ups = [h * f] * model.up_matrices
    qkv = [h * q, h * kv, h * kv]
    layer = [h, *([sum(qkv)] if fused_qkv else qkv), h * q, h, *([sum(ups)] if fused_gate_up else ups), h * f]
    table = model.vocab_size * h // tp
    ends = [h] + [table] * (not model.tie_word_embeddings) if pp == 1 else []
    return [table, *layer * max(model.num_hidden_layers // pp, 1), *ends]
