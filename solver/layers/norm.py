"""RMSNorm and LayerNorm: one fused kernel, or the chain of element-wise kernels that eager code runs."""

from __future__ import annotations

from solver.layers.ops import memory_bound
from solver.layers.program import Array, Op, Saved
from solver.layers.shapes import Shapes
from solver.spec.model_size import norms_of
from solver.spec.recipes import FP32, HALF


def norm_ops(shapes: Shapes, name: str) -> list[Op]:
    """Return the ops of a norm.

    Fused: read and write once; backward reads input and gradient and writes one. Eager: about ten fp32 kernels.
    """
    elements = shapes.norm_tokens * shapes.model.hidden_size
    if shapes.fused_norm and shapes.framework.kernels.norm_kernels:
        per_half = elements * shapes.element / HALF
        return [
            op
            for kind, forward, backward in shapes.framework.kernels.norm_kernels
            for op in memory_bound(name, "norm", kind, per_half, forward, backward)
        ]
    wide = shapes.stream_element / shapes.element if shapes.fused_norm else 1.0  # the chain of kernels is in fp32 anyway
    return norm_passes(shapes, name, "norm", elements * wide)


def norm_passes(shapes: Shapes, name: str, module: str, elements: Array) -> list[Op]:
    """Return both passes of a norm of ``elements`` values in all, with the framework's backward kernel."""
    fused, e = shapes.fused_norm, shapes.element
    return memory_bound(name, module, "norm", elements, 2 * e, 3 * e, fused=fused, gradient=shapes.norm_gradient)


def unfused_norm_saved(shapes: Shapes) -> list[Saved]:
    """Return what eager norms save: an fp32 copy of their input, where fused norms keep their 16-bit input."""
    if shapes.fused_norm:
        return []
    return [Saved("norms_fp32", norms_of(shapes.model, shapes.kind) * shapes.norm_tokens * shapes.model.hidden_size * FP32)]
