"""RMSNorm and LayerNorm: one fused kernel, or the chain of element-wise kernels that eager code runs."""

from __future__ import annotations

from solver.ops import memory_bound
from solver.program import BF16, FP32, Op, Saved
from solver.shapes import Shapes


def norm_ops(shapes: Shapes, name: str) -> list[Op]:
    """fused: read and write once, backward reads input and gradient and writes one. Unfused: some ten fp32 kernels."""
    elements = shapes.norm_tokens * shapes.model.hidden_size
    if shapes.run.fused_norm or shapes.run.compile:
        return memory_bound(name, "norm", "norm", elements, 2 * BF16, 3 * BF16)
    # to fp32 6, square 8, mean 4, scale 8, to 16 bits 6, times weight 4 bytes an element; their gradients: weight 12,
    # casts 12, scale 8 and 16, mean 8, square 20, the sum of both paths 12
    return memory_bound(name, "norm", "residual", elements, 36, 88)


def unfused_norm_saved(shapes: Shapes) -> list[Saved]:
    """Eager norms keep the fp32 copy of their input and the fp32 normalised value."""
    if shapes.run.fused_norm or shapes.run.compile:
        return []
    return [Saved("norms_fp32", 2 * shapes.norm_tokens * shapes.model.hidden_size * 2 * FP32)]
