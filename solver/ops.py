"""Constructors of ops: a linear with its three passes, memory-bound kernels, and the collectives of each group."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.program import (
    BF16,
    FORWARD,
    INPUT_GRAD,
    LINEAR,
    MEMORY_BOUND,
    WEIGHT_GRAD,
    Array,
    Op,
    message,
)  # fmt: skip
from solver.shapes import Shapes
from solver.strategy import Recompute

WHOLE_LAYER = (Recompute.FULL,)
ATTENTION_CORE = (Recompute.SELECTIVE, Recompute.FULL)
_LAYOUTS = {FORWARD: 0, INPUT_GRAD: 1, WEIGHT_GRAD: 2}  #: TN, NN, NT as in predictor.linear.Layout


def linear(
    shapes: Shapes, name: str, module: str, n: Array, k: Array, tokens: Array | None = None, dtype: str | None = None
) -> list[Op]:
    """Y = X W^T and its two gradients: GEMMs m x n x k, m x k x n and n x k x m over the tokens m of one rank."""
    m = shapes.linear_tokens if tokens is None else tokens
    dtype = dtype or ("fp8" if shapes.run.precision == "fp8" else "bf16")
    accumulate = shapes.run.grad_dtype == "fp32"

    def gemm(phase: str, m: Array, n: Array, k: Array) -> Op:
        dims = {"m": m, "n": n, "k": k, "batch": 1, "layout": _LAYOUTS[phase],
                "accumulate": accumulate and phase == WEIGHT_GRAD}  # fmt: skip
        return Op(name, module, LINEAR, phase, dims, dtype=dtype)

    forward = replace(gemm(FORWARD, m, n, k), recomputed_by=WHOLE_LAYER)
    return [forward, gemm(INPUT_GRAD, m, k, n), gemm(WEIGHT_GRAD, n, k, m)]


def memory_bound(
    name: str,
    module: str,
    kind: str,
    elements: Array,
    forward: float,
    backward: float,
    recomputed_by: tuple[Recompute, ...] = WHOLE_LAYER,
) -> list[Op]:
    """An element-wise kernel: ``forward`` and ``backward`` are bytes read and written per element of ``elements``."""
    passes = [(FORWARD, forward, recomputed_by), (INPUT_GRAD, backward, ())]
    return [
        Op(name, module, MEMORY_BOUND, phase, {"bytes": elements * per_element}, memory_kind=kind, recomputed_by=by)
        for phase, per_element, by in passes
        if per_element
    ]  # fmt: skip


def tp_collective(
    shapes: Shapes,
    name: str,
    module: str,
    op: str,
    phase: str,
    where: Array,
    hides_under: tuple[str, ...] = (),
    tail: Array = 0.0,
    size: Array | None = None,
) -> Op:
    """A collective over the tensor-parallel group on the whole (micro batch, sequence, hidden) activation, where asked."""
    whole = shapes.tokens * shapes.model.hidden_size * BF16 if size is None else size
    return Op(
        name, module, op, phase, message(whole, shapes.groups.tp), stream="tp",
        count=np.where(where & (shapes.keys.tp > 1), 1.0, 0.0), hides_under=hides_under, tail=tail,
        recomputed_by=WHOLE_LAYER if phase == FORWARD else (),
    )  # fmt: skip


def column_linear(shapes: Shapes, name: str, module: str, n: Array, k: Array) -> list[Op]:
    """A linear split by columns, with what its mode must communicate.

    Sequence-split input is gathered before it (exposed unless the framework pipelines it with the GEMM); the input
    gradient is reduced under the weight-gradient GEMM; a kept shard is gathered again under the input-gradient GEMM.
    Source: Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2; InternEvo's linear.py for the modes.
    """
    split, everywhere = shapes.sequence_split, ~shapes.sequence_split & (shapes.split > 1)
    pipelined = (f"{name}.forward",) if shapes.run.tp_comm_overlap else ()
    beside = shapes.framework.async_tp_reduce or shapes.run.tp_comm_overlap
    under_weight_grad = (f"{name}.weight_grad",) if beside else ()
    under_input_grad = (f"{name}.input_grad",) if beside else ()
    return [
        tp_collective(shapes, f"{name}.gather", module, "all_gather", FORWARD, split, pipelined, 1 / shapes.keys.tp),
        *linear(shapes, name, module, n, k),
        tp_collective(shapes, f"{name}.reduce", module, "reduce_scatter", INPUT_GRAD, split, under_weight_grad),
        tp_collective(shapes, f"{name}.all_reduce", module, "all_reduce", INPUT_GRAD, everywhere, under_weight_grad),
        tp_collective(shapes, f"{name}.regather", module, "all_gather", INPUT_GRAD, shapes.keeps_shard, under_input_grad),
    ]


def row_linear(shapes: Shapes, name: str, module: str, n: Array, k: Array) -> list[Op]:
    """A linear split by rows: its output is summed over the group; under a sequence split its gradient is gathered."""
    split, everywhere = shapes.sequence_split, ~shapes.sequence_split & (shapes.split > 1)
    forward = (f"{name}.forward",) if shapes.run.tp_comm_overlap else ()
    backward = (f"{name}.input_grad",) if shapes.run.tp_comm_overlap else ()
    tail = 1 / shapes.keys.tp
    return [
        *linear(shapes, name, module, n, k),
        tp_collective(shapes, f"{name}.reduce", module, "reduce_scatter", FORWARD, split, forward, tail),
        tp_collective(shapes, f"{name}.all_reduce", module, "all_reduce", FORWARD, everywhere),
        tp_collective(shapes, f"{name}.gather", module, "all_gather", INPUT_GRAD, split, backward, tail),
    ]
