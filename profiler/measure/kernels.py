"""Kernels to measure: GEMMs, attention and memory-bound kernels; each makes operands and returns the work to time."""

from __future__ import annotations

import math

import torch

from profiler.measure.arena import DTYPES, Arena, drop
from profiler.measure.attention import fused_attention
from profiler.measure.memory_bound import ACCESSES, MAKERS
from profiler.measure.timing import Work
from profiler.profile.item import Item


def workload(item: Item, arena: Arena) -> Work:
    """Return the work of a linear, flash_attn or memory_bound item."""
    if item.op == "memory_bound":
        kind, dtype = str(item.columns["kind"]), DTYPES[str(item.columns["dtype"])]
        elements = item.number("bytes") // (ACCESSES.get(kind, 2) * dtype.itemsize)
        return MAKERS[kind](max(elements, 1), dtype, arena)
    return {"linear": _linear, "flash_attn": _attention}[item.op](item, arena)


def _linear(item: Item, arena: Arena) -> Work:
    m, n, k = (item.number(c) for c in "mnk")
    layout, dtype = item.columns["layout"], DTYPES[str(item.columns["dtype"])]
    left = (k, m) if layout == "NT" else (m, k)
    right = (n, k) if layout == "TN" else (k, n)
    sets = arena.sets(dtype, left, right)
    pairs = [(a.t() if layout == "NT" else a, b.t() if layout == "TN" else b) for a, b in sets]
    if item.number("accumulate"):
        return _accumulating(pairs, arena)
    return lambda i: drop(torch.matmul(*pairs[i % len(pairs)]))


def _accumulating(pairs: list[tuple[torch.Tensor, torch.Tensor]], arena: Arena) -> Work:
    """Return GEMMs added to separate fp32 buffers: sums in the arena would grow beyond the range of its dtype."""
    shape = (pairs[0][0].shape[0], pairs[0][1].shape[1])
    count = min(max(arena.cache_bytes // (2 * math.prod(shape)), 1), len(pairs))  # twice the cache
    sums = torch.zeros((count, *shape), dtype=torch.float32, device=arena.device)

    def add(i: int) -> None:
        total, (left, right) = sums[i % count], pairs[i % len(pairs)]
        wider = () if left.dtype == total.dtype else (total.dtype,)
        torch.addmm(total, left, right, *wider, out=total)

    return add


def _attention(item: Item, arena: Arena) -> Work:
    """Return the work of a flash_attn item.

    Without a mask, there may be more or fewer keys than queries. A causal call has as many keys as queries (PyTorch aligns
    other masks at the first key, training at the last).
    """
    batch, seq, keys, heads, kv_heads, dim = (
        item.number(c) for c in ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim")
    )
    causal = bool(item.number("causal"))
    dtype = DTYPES[str(item.columns["dtype"])]
    shapes = [(batch, heads, seq, dim), *2 * [(batch, kv_heads, keys, dim)], (batch, heads, seq, dim)]
    forward = fused_attention(str(item.columns["kernel"]), causal)
    sets = arena.sets(dtype, *shapes)
    if item.columns["pass"] == "forward":
        return lambda i: drop(forward(*sets[i % len(sets)][:3]))
    sets = sets[: max(2 if batch * seq * heads * dim < 2**24 else 1, 1)]  # their autograd graphs hold outputs
    inputs = [[t.detach().requires_grad_() for t in chosen[:3]] for chosen in sets]
    outputs = [forward(*chosen) for chosen in inputs]

    def backward(i: int) -> None:
        j = i % len(sets)
        torch.autograd.grad(outputs[j], inputs[j], sets[j][3], retain_graph=True)

    return backward
