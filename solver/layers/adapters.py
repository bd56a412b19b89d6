"""Low-rank adapters beside frozen linears: LoRA (Hu et al. 2021, arXiv 2106.09685).

Every linear of the layers computes Y = X W^T + s (X A^T) B^T with A of r x k and B of n x r. Only A and B are trained: no other
weight has a gradient, and none of embedding and head. Kernels as read in NeMo Automodel's components/_peft/lora.py since 0.2:
two GEMMs, the scaling of X A^T and the addition forward; in backward the gradients of the scaled product, of B, of A and of X,
which is added to that of the frozen linear. A column-parallel linear has A whole and B split, a row-parallel one the reverse,
so that no collective is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from solver.layers.ops import linear, memory_bound
from solver.layers.program import ADAPTERS, FORWARD, INPUT_GRAD, LINEAR, WEIGHT_GRAD, Op, Saved, Weight, weight_gemms
from solver.layers.shapes import Shapes


def frozen_ops(shapes: Shapes, ops: Sequence[Op]) -> list[Op]:
    """Return ``ops`` without what computes gradients of weights and biases, where these are frozen."""
    if not shapes.run.lora_rank:
        return list(ops)
    kept = [op for op in ops if op.phase != WEIGHT_GRAD and not (op.phase == INPUT_GRAD and op.name.endswith(".bias"))]
    there = {op.label for op in kept}
    return [replace(op, overlaps_with=tuple(label for label in op.overlaps_with if label in there)) for op in kept]


def adapted_ops(shapes: Shapes, ops: Sequence[Op]) -> list[Op]:
    """Return the ops of a layer whose linears have adapters."""
    return [*frozen_ops(shapes, ops), *(op for gemm in _adapted(shapes, ops) for op in _adapter(shapes, gemm))]


def adapters_saved(shapes: Shapes, ops: Sequence[Op]) -> list[Saved]:
    """Return what the adapters of a layer keep: X A^T. A linear's input is kept for its A as it would be for its weight."""
    gemms = _adapted(shapes, ops)
    return [Saved("adapters", sum(op.dims["m"] for op in gemms) * shapes.run.lora_rank * shapes.element)] if gemms else []


def adapter_weights(shapes: Shapes, ops: Sequence[Op]) -> list[Weight]:
    """Return the adapters of a layer's linears on one rank."""
    rank = shapes.run.lora_rank
    return [Weight(f"{op.name}.adapter", 1.0 * rank * (op.dims["n"] + op.dims["k"]), ADAPTERS) for op in _adapted(shapes, ops)]


def _adapted(shapes: Shapes, ops: Sequence[Op]) -> list[Op]:
    """Return the GEMMs that have adapters: those of all linears, or none where all weights are trained."""
    return [*weight_gemms(ops)] if shapes.run.lora_rank else []


def _adapter(shapes: Shapes, gemm: Op) -> list[Op]:
    """Return the ops of the adapter of one linear; compiled, the scaling is part of another kernel."""
    rank, name, module = shapes.run.lora_rank, gemm.name, gemm.module
    m, n, k = (gemm.dims[size] for size in ("m", "n", "k"))
    scaling = 0 if shapes.run.compile else 2 * shapes.element
    return [
        *_after(gemm, linear(shapes, f"{name}.lora_a", module, rank, k, tokens=m, quantised=False)),
        *_after(gemm, linear(shapes, f"{name}.lora_b", module, n, rank, tokens=m, quantised=False)),
        *_after(gemm, memory_bound(f"{name}.lora_scale", module, "residual", m * rank, scaling, scaling)),
        *_after(gemm, memory_bound(f"{name}.lora_sum", module, "residual", m * n, 3 * shapes.element, 0)),
        *memory_bound(f"{name}.lora_input", module, "residual", m * k, 0, 3 * shapes.element),
    ]


def _after(gemm: Op, ops: Sequence[Op]) -> list[Op]:
    """Return the ops of an adapter, run again where its linear is: its B and what follows keep nothing that they made."""
    return [replace(op, recomputed_by=gemm.recomputed_by) if op.phase == FORWARD and op.kind != LINEAR else op for op in ops]
