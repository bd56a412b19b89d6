"""Linears that are split over the tensor-parallel group, with the collectives that their mode needs.

Sources: Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2 for sequence parallelism; InternEvo's linear.py for its modes;
Transformer Engine's user buffers and torch's micro_pipeline_tp.py for collectives that are pipelined with a GEMM, as read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from solver.layers.casts import gradient_casts, input_casts, weight_casts
from solver.layers.ops import WHOLE_LAYER, linear
from solver.layers.program import (
    FORWARD,
    INPUT_GRAD,
    MEMORY_BOUND,
    Array,
    Op,
    message,
)
from solver.layers.shapes import Shapes

#: Chunks of a GEMM whose output is reduce-scattered chunk by chunk (NeMo's user buffers: num_splits of its pipelined overlaps).
SCATTERED_CHUNKS = 4


def column_linears(shapes: Shapes, module: str, k: Array, widths: Mapping[str, Array], normed: bool = True) -> list[Op]:
    """Return linears of one input split by columns, with the communication that their mode needs.

    widths: columns of each linear by name. normed: a norm comes directly before. Frameworks that exploit the shared input
    communicate once for all of them, other frameworks once for each; where the norm all-gathers, the first of them has its
    collectives.
    """
    groups = [widths] if shapes.framework.tensor_parallel.shares_input else [{name: n} for name, n in widths.items()]
    later = shapes.sequence_split & ~shapes.gathered_by_norm
    return [
        op
        for number, group in enumerate(groups)
        for op in _column_group(shapes, module, k, group, later if number else shapes.sequence_split, normed)
    ]


def _column_group(
    shapes: Shapes, module: str, k: Array, widths: Mapping[str, Array], split: np.ndarray, normed: bool
) -> list[Op]:
    """Return linears that share their collectives, with those collectives.

    Where ``split``, sequence-split input is all-gathered before the linears (exposed unless the framework pipelines it with the
    GEMM); reducing the input gradient overlaps with the weight-gradient GEMMs; a kept shard is all-gathered again, overlapped
    with the input-gradient GEMMs.
    """
    overlapped, exposed = shapes.overlaps_backward_collectives, shapes.exposed_backward
    # torch's pass fuses a reduce-scatter with the one GEMM that produces its input, and here that is a sum of several
    # (torch/_inductor/fx_passes/micro_pipeline_tp.py, fuse_matmul_reduce_scatter: "Not matmul")
    scatter_overlapped = overlapped and not (_compiles_overlap(shapes) and len(widths) > 1)
    name, overlap = next(iter(widths)), shapes.run.tp_comm_overlap

    def gemms_of(phase: str, overlapped: bool) -> tuple[str, ...]:
        return tuple(f"{linear_name}.{phase}" for linear_name in widths) if overlapped else ()

    whole = shapes.tokens * k
    operand, gradient = whole * shapes.gathered_element, whole * shapes.element

    def collective(what: str, op: str, phase: str, where: Array, overlaps_with: tuple[str, ...], exposed: Array = 0.0) -> Op:
        size = operand if op == "all_gather" else gradient
        return tp_collective(shapes, f"{name}.{what}", module, op, phase, where, overlaps_with, exposed, size)

    return [
        *input_casts(shapes, name, module, shapes.linear_tokens, k, split, normed=normed),
        collective("all_gather", "all_gather", FORWARD, split, gemms_of("forward", overlap)),
        *_pipelined(
            shapes,
            [op for linear_name, n in widths.items() for op in linear(shapes, linear_name, module, n, k)],
            FORWARD,
            shapes.keys.tp,
        ),
        *gradient_casts(shapes, name, module, shapes.linear_tokens, sum(widths.values())),
        *weight_casts(shapes, name, module, k * sum(widths.values())),
        collective("reduce_scatter", "reduce_scatter", INPUT_GRAD, split, gemms_of("weight_grad", scatter_overlapped), exposed),
        *(_partial_sums(shapes, name, module, INPUT_GRAD, whole, split) if scatter_overlapped else []),
        collective(
            "all_reduce",
            "all_reduce",
            INPUT_GRAD,
            _all_reduced(shapes),
            gemms_of("weight_grad", overlapped),
            shapes.exposed_all_reduce,
        ),
        collective("regather", "all_gather", INPUT_GRAD, shapes.keeps_shard, gemms_of("input_grad", overlapped), exposed),
    ]


def row_linear(shapes: Shapes, name: str, module: str, n: Array, k: Array) -> list[Op]:
    """Return a linear split by rows.

    Its output is summed over the group; under a sequence split its gradient is all-gathered.
    """
    split = shapes.sequence_split
    forward = (f"{name}.forward",) if shapes.run.tp_comm_overlap else ()
    backward = (f"{name}.input_grad",) if shapes.run.tp_comm_overlap else ()
    chunks = shapes.keys.tp if _compiles_overlap(shapes) else SCATTERED_CHUNKS
    whole, gemms = shapes.tokens * n, _pipelined(shapes, linear(shapes, name, module, n, k), FORWARD, chunks)
    return [
        *input_casts(shapes, name, module, shapes.linear_tokens, k, False, normed=False),
        *_pipelined(shapes, gemms, INPUT_GRAD, shapes.keys.tp),
        *gradient_casts(shapes, name, module, shapes.linear_tokens, n, split),
        *weight_casts(shapes, name, module, n * k),
        tp_collective(shapes, f"{name}.reduce_scatter", module, "reduce_scatter", FORWARD, split, forward, 1 / chunks),
        *_partial_sums(shapes, name, module, FORWARD, whole, split),
        tp_collective(shapes, f"{name}.all_reduce", module, "all_reduce", FORWARD, _all_reduced(shapes)),
        tp_collective(
            shapes,
            f"{name}.all_gather",
            module,
            "all_gather",
            INPUT_GRAD,
            split,
            backward,
            size=whole * shapes.gathered_element * _orders(shapes),
        ),
    ]


def _orders(shapes: Shapes) -> int:
    """Return how many copies of a row-parallel linear's gradient are all-gathered: where scales lie along the axis that a GEMM
    sums over, one for the input gradient and one for the weight gradient (Transformer Engine's linear.py, which asks for both
    usages, and distributed.py)."""
    return 2 if shapes.gathers_quantised and shapes.recipe is not None and shapes.recipe.by_axis else 1


def _all_reduced(shapes: Shapes) -> np.ndarray:
    """Return where row-parallel outputs and column-parallel input gradients are all-reduced: bool [keys]."""
    return ~shapes.sequence_split & (shapes.split > 1)


def tp_collective(
    shapes: Shapes,
    name: str,
    module: str,
    op: str,
    phase: str,
    where: Array,
    overlaps_with: tuple[str, ...] = (),
    exposed_share: Array = 0.0,
    size: Array | None = None,
) -> Op:
    """Return a collective over the tensor-parallel group, where ``where`` is true.

    By default it is on the whole (micro batch, sequence, hidden) activation; size: bytes of another buffer.
    """
    whole = shapes.tokens * shapes.model.hidden_size * shapes.element if size is None else size
    return Op(
        name,
        module,
        op,
        phase,
        message(whole, shapes.groups.tp),
        stream="tp",
        count=np.where(where & (shapes.keys.tp > 1), 1.0, 0.0),
        overlaps_with=overlaps_with,
        exposed_share=exposed_share,
        recomputed_by=WHOLE_LAYER if phase == FORWARD else (),
    )


def _pipelined(shapes: Shapes, ops: list[Op], phase: str, chunks: Array) -> list[Op]:
    """Return ``ops`` with the GEMM of ``phase`` in ``chunks`` of the tokens, where its communication is pipelined with it.

    An all-gathered operand is multiplied as each rank's share arrives, this rank's own first, while the next one is sent
    (CommOverlapP2PBase::split_overlap_ag); a product is scattered chunk by chunk, the last of which overlaps with no GEMM.
    The GEMMs are smaller, which costs some of what the overlap saves.
    """
    if not shapes.run.tp_comm_overlap:
        return ops
    parts = np.where(shapes.sequence_split & (shapes.keys.tp > 1), chunks, 1)
    return [replace(op, dims={**op.dims, "parts": parts}) if op.phase == phase else op for op in ops]


def _compiles_overlap(shapes: Shapes) -> bool:
    """Return whether tensor parallelism overlaps by torch's compiled pass."""
    return shapes.run.tp_comm_overlap and shapes.framework.can_run.compiles_tp_overlap


def _partial_sums(shapes: Shapes, name: str, module: str, phase: str, whole: Array, where: Array) -> list[Op]:
    """Return the kernel that sums what all ranks sent of a product, after torch's overlapped reduce-scatter, which is an
    all-to-all: it reads as much as the whole product and writes a rank's part
    (torch/distributed/_symmetric_memory, _fused_matmul_reduce_scatter_impl: stacked_partials)."""
    if not _compiles_overlap(shapes):
        return []
    count = np.where(where & (shapes.keys.tp > 1), 1.0, 0.0)
    dims = {"bytes": whole * shapes.element * (1 + 1 / shapes.keys.tp)}
    again = WHOLE_LAYER if phase == FORWARD else ()
    return [Op(f"{name}.partials", module, MEMORY_BOUND, phase, dims, count=count, variant="residual", recomputed_by=again)]


def with_sequence_copies(shapes: Shapes, ops: Sequence[Op]) -> list[Op]:
    """Return ``ops`` and the copies that torch's collectives make over the sequence, which is not a tensor's first dimension:
    what is all-gathered is joined along it, what is reduce-scattered is cut along it before (read and written).

    Source: torch/distributed/_functional_collectives.py (all_gather_tensor with gather_dim, reduce_scatter_tensor with
    scatter_dim; since pull request 169404 of December 2025 _maybe_view_chunk_cat); asynchronous tensor parallelism lays its
    operands out without them.
    """
    if not shapes.framework.tensor_parallel.copies_sequence:
        return list(ops)
    several = np.where(shapes.framework.tensor_parallel.views_one_sequence & (shapes.keys.micro_batch_size == 1), 0.0, 1.0)
    fused = shapes.run.tp_comm_overlap  # all but what no GEMM alone produces
    copies = [
        Op(
            f"{op.name}.copy",
            op.module,
            MEMORY_BOUND,
            op.phase,
            {"bytes": 2.0 * op.dims["bytes"]},
            count=op.count * (several if op.kind == "all_gather" else 1.0),
            variant="copy",
            recomputed_by=op.recomputed_by,
        )
        for op in ops
        if op.stream == "tp"
        and op.kind in ("all_gather", "reduce_scatter")
        and np.any(op.count)
        and not (fused and op.overlaps_with)
    ]
    return [*ops, *copies]
