"""Constructors of ops: a linear with its three passes, memory-bound kernels, and the collectives of each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from predictor.kernels.dtypes import BLOCKWISE
from predictor.kernels.gemm_layout import GemmLayout
from solver.layers.casts import gradient_casts, input_casts, weight_casts
from solver.layers.program import (
    FORWARD,
    INPUT_GRAD,
    LINEAR,
    MEMORY_BOUND,
    QKV_LINEARS,
    UP_LINEARS,
    VOCABULARY,
    WEIGHT_GRAD,
    Array,
    Op,
    message,
)
from solver.layers.shapes import Shapes
from solver.spec.choices import Recompute
from solver.spec.recipes import FP32, HALF

WHOLE_LAYER = (Recompute.FULL,)
ATTENTION_CORE = (Recompute.SELECTIVE, Recompute.FULL)

_LAYOUTS = {FORWARD: GemmLayout.TN, INPUT_GRAD: GemmLayout.NN, WEIGHT_GRAD: GemmLayout.NT}


def linear(
    shapes: Shapes, name: str, module: str, n: Array, k: Array, tokens: Array | None = None, quantised: bool = True
) -> list[Op]:
    """Return Y = X W^T and its two gradients: GEMMs m x n x k, m x k x n and n x k x m over the tokens m of one rank.

    quantised: in fp8 where the run is (all linears except the head's).
    """
    m = shapes.linear_tokens if tokens is None else tokens
    dtype = gemm_dtype(shapes, quantised)
    accumulate = shapes.run.grad_dtype == "fp32" and dtype not in ("fp32", "tf32") and shapes.accumulates

    def gemm(phase: str, m: Array, n: Array, k: Array) -> Op:
        dims = {
            "m": m,
            "n": n,
            "k": k,
            "batch": 1,
            "layout": _LAYOUTS[phase],
            "accumulate": accumulate and phase == WEIGHT_GRAD,
        }
        return Op(name, module, LINEAR, phase, dims, dtype=dtype)

    forward = replace(gemm(FORWARD, m, n, k), recomputed_by=WHOLE_LAYER)
    return [
        *_autocast(shapes, name, module, n * k, m * k, dtype),
        forward,
        gemm(INPUT_GRAD, m, k, n),
        gemm(WEIGHT_GRAD, n, k, m),
        *filled(shapes, name, module, {FORWARD: m * n, INPUT_GRAD: m * k, WEIGHT_GRAD: 0 if accumulate else n * k}),
    ]


#: Linears that read a norm's output.
_AFTER_NORMS = (*QKV_LINEARS, *UP_LINEARS, VOCABULARY)


def _autocast(shapes: Shapes, name: str, module: str, weights: Array, inputs: Array, dtype: str) -> list[Op]:
    """Return the casts of a weight held in fp32 to 16 bits and, in the backward pass, of its gradient to fp32; and the same of
    an input that a norm made in fp32.

    weights, inputs: elements of each.
    """
    if not shapes.framework.memory.fp32_weights or dtype in ("fp32", "tf32"):
        return []
    casts = memory_bound(f"{name}.autocast", module, "copy", weights, HALF + FP32, HALF + FP32)
    if shapes.wide_stream and name in _AFTER_NORMS:
        casts += memory_bound(f"{name}.input_autocast", module, "copy", inputs, HALF + FP32, HALF + FP32)
    return [replace(op, launches=0.0) for op in casts]  # the host launches them as a part of the linear


def filled(
    shapes: Shapes,
    name: str,
    module: str,
    elements: Mapping[str, Array],
    count: Array = 1.0,
    recomputed_by: tuple[Recompute, ...] = WHOLE_LAYER,
) -> list[Op]:
    """Return the kernels that fill the new tensors of each pass before it writes them, in deterministic runs.

    Source: torch.utils.deterministic.fill_uninitialized_memory, which torch.use_deterministic_algorithms turns on. elements: of
    these tensors, by pass. Of tensors that kernels of torch itself write nothing is filled. count, recomputed_by: as of the op
    that writes them.
    """
    if not shapes.run.deterministic:
        return []
    return [
        Op(
            f"{name}.fill",
            module,
            MEMORY_BOUND,
            phase,
            {"bytes": 1.0 * new * shapes.element},
            count=count,
            variant="copy",
            launches=0.0,
            recomputed_by=recomputed_by if phase == FORWARD else (),
        )
        for phase, new in elements.items()
    ]


#: Parts in which a GEMM runs whose output is reduce-scattered part by part (NeMo's user buffers: num_splits of its pipelined
#: overlaps).
SCATTERED_PARTS = 4


def _in_parts(shapes: Shapes, ops: list[Op], phase: str, parts: Array) -> list[Op]:
    """Return ``ops`` with the GEMM of ``phase`` run in ``parts`` over the tokens, where its communication is pipelined with it.

    An all-gathered operand is used as each rank's share arrives, this rank's own first, beside which the next one is sent
    (Transformer Engine's user buffers, CommOverlapP2PBase::split_overlap_ag); a product is scattered part by part, of which the
    last has no GEMM beside it. The GEMMs are smaller, which costs some of what the overlap saves.
    """
    if not shapes.run.tp_comm_overlap:
        return ops
    spread = {"parts": np.where(shapes.sequence_split & (shapes.keys.tp > 1), parts, 1)}
    return [replace(op, dims={**op.dims, **spread}) if op.phase == phase else op for op in ops]


def gemm_dtype(shapes: Shapes, quantised: bool) -> str:
    precision = shapes.run.precision
    if precision == "fp32":
        return shapes.framework.kernels.arithmetic(precision)
    if not quantised or shapes.recipe is None:
        return "bf16"
    return BLOCKWISE if (precision, shapes.run.fp8_recipe) == ("fp8", "blockwise") else precision


def memory_bound(
    name: str,
    module: str,
    kind: str,
    elements: Array,
    forward: float,
    backward: float,
    recomputed_by: tuple[Recompute, ...] = WHOLE_LAYER,
    fused: bool = True,
    gradient: str = "",
) -> list[Op]:
    """Return the ops of an element-wise kernel; ``forward``, ``backward``: bytes read and written per element of ``elements``.

    fused: False where the framework runs a chain of eager kernels instead (see predictor.kernels.memory_bound). gradient: the
    kind of the fused backward kernel, where it is another one.
    """
    kinds = (kind, gradient or kind) if fused else (f"{kind}_eager", f"{kind}_eager_grad")
    passes = [(FORWARD, forward, recomputed_by, kinds[0]), (INPUT_GRAD, backward, (), kinds[1])]
    return [
        Op(name, module, MEMORY_BOUND, phase, {"bytes": elements * per_element}, variant=ran, recomputed_by=by)
        for phase, per_element, by, ran in passes
        if per_element
    ]


def bias_ops(shapes: Shapes, name: str, module: str, elements: Array, has_bias: bool, apart: bool = False) -> list[Op]:
    """Return the kernels of a linear's bias for ``elements`` outputs of one rank.

    Forward, where apart: each output is read and written once more. Backward: the gradient of the bias, a sum over the tokens
    that reads each output's gradient once, at the rate of kernels that reduce rows. The host launches them inside the linear's
    function, whose time includes it.
    """
    kernels, ops = shapes.framework.kernels, []
    if has_bias and apart:
        ops += memory_bound(f"{name}.bias", module, "residual", elements, 2.0 * shapes.element, 0.0)
    if has_bias and not kernels.bias_gradient_fused:
        ops += memory_bound(f"{name}.bias", module, "row", elements, 0.0, 1.0 * shapes.element)
    return [replace(op, launches=0.0) for op in ops]


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


def with_sequence_copies(shapes: Shapes, ops: Sequence[Op]) -> list[Op]:
    """Return ``ops`` and the copies that torch's collectives make over the sequence, which is not a tensor's first dimension:
    what is all-gathered is joined along it, what is reduce-scattered is cut along it before (read and written).

    Source: torch/distributed/_functional_collectives.py (all_gather_tensor with gather_dim, reduce_scatter_tensor with
    scatter_dim); asynchronous tensor parallelism lays its operands out without them.
    """
    if not shapes.framework.tensor_parallel.copies_sequence:
        return list(ops)
    fused = shapes.run.tp_comm_overlap  # all but what no GEMM alone produces
    copies = [
        Op(
            f"{op.name}.copy",
            op.module,
            MEMORY_BOUND,
            op.phase,
            {"bytes": 2.0 * op.dims["bytes"]},
            count=op.count,
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


def gradient_sums(shapes: Shapes, name: str, module: str, readers: int) -> list[Op]:
    """Return the additions of the gradients of a norm's output that several modules read: autograd adds them one to the other.

    Two reads and a write each; compiled, the kernel of the norm's backward pass reads one more. Where the readers share their
    collectives the whole input's gradients are added, else each rank's part.
    """
    shared = shapes.framework.tensor_parallel.shares_input | _gathered_by_norm(shapes)
    tokens = np.where(shared, shapes.linear_tokens, shapes.norm_tokens)
    passes, elements = 1 if shapes.run.compile else 3, (readers - 1) * tokens * shapes.model.hidden_size
    sums = memory_bound(f"{name}.gradients", module, "residual", elements, 0.0, (readers > 1) * passes * shapes.stream_element)
    return [replace(op, launches=readers - 1.0) for op in sums]


def _gathered_by_norm(shapes: Shapes) -> np.ndarray:
    """Return where the norm all-gathers what its linears read."""
    return shapes.sequence_split & shapes.framework.tensor_parallel.norm_gathers


def column_linears(shapes: Shapes, module: str, k: Array, widths: Mapping[str, Array], normed: bool = True) -> list[Op]:
    """Return linears of one input split by columns, with the communication that their mode needs.

    widths: columns of each linear by name. normed: a norm comes directly before. Frameworks that exploit the shared input
    communicate once for all of them, other frameworks once for each; where the norm all-gathers, the first of them has its
    collectives.
    """
    together = [widths] if shapes.framework.tensor_parallel.shares_input else [{name: n} for name, n in widths.items()]
    later = shapes.sequence_split & ~_gathered_by_norm(shapes)
    return [
        op
        for number, group in enumerate(together)
        for op in _column_group(shapes, module, k, group, later if number else shapes.sequence_split, normed)
    ]


def _column_group(
    shapes: Shapes, module: str, k: Array, widths: Mapping[str, Array], split: np.ndarray, normed: bool
) -> list[Op]:
    """Return linears that share their collectives, with those collectives.

    Where ``split``, sequence-split input is all-gathered before the linears (exposed unless the framework pipelines it with the
    GEMM); reducing the input gradient overlaps with the weight-gradient GEMMs; a kept shard is all-gathered again, overlapped
    with the input-gradient GEMMs. Source: Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2; InternEvo's linear.py.
    """
    everywhere = ~shapes.sequence_split & (shapes.split > 1)
    beside, late = shapes.overlaps_backward_collectives, shapes.exposed_backward
    # torch's pass fuses a reduce-scatter with the one GEMM that produces its input, and here that is a sum of several
    # (torch/_inductor/fx_passes/micro_pipeline_tp.py, fuse_matmul_reduce_scatter: "Not matmul")
    scattered = beside and not (_compiles_overlap(shapes) and len(widths) > 1)
    name, overlap = next(iter(widths)), shapes.run.tp_comm_overlap

    def under(phase: str, hides: bool) -> tuple[str, ...]:
        return tuple(f"{linear_name}.{phase}" for linear_name in widths) if hides else ()

    whole = shapes.tokens * k
    operand, gradient = whole * shapes.gathered_element, whole * shapes.element

    def collective(what: str, op: str, phase: str, where: Array, overlaps_with: tuple[str, ...], late: Array = 0.0) -> Op:
        size = operand if op == "all_gather" else gradient
        return tp_collective(shapes, f"{name}.{what}", module, op, phase, where, overlaps_with, late, size)

    return [
        *input_casts(shapes, name, module, shapes.linear_tokens, k, split, normed),
        collective("all_gather", "all_gather", FORWARD, split, under("forward", overlap)),
        *_in_parts(
            shapes,
            [op for linear_name, n in widths.items() for op in linear(shapes, linear_name, module, n, k)],
            FORWARD,
            shapes.keys.tp,
        ),
        *gradient_casts(shapes, name, module, shapes.linear_tokens, sum(widths.values())),
        *weight_casts(shapes, name, module, k * sum(widths.values())),
        collective("reduce_scatter", "reduce_scatter", INPUT_GRAD, split, under("weight_grad", scattered), late),
        *(_partial_sums(shapes, name, module, INPUT_GRAD, whole, split) if scattered else []),
        collective("all_reduce", "all_reduce", INPUT_GRAD, everywhere, under("weight_grad", beside), shapes.exposed_all_reduce),
        collective("regather", "all_gather", INPUT_GRAD, shapes.keeps_shard, under("input_grad", beside), late),
    ]


def _compiles_overlap(shapes: Shapes) -> bool:
    """Return whether tensor parallelism overlaps by torch's compiled pass."""
    return shapes.run.tp_comm_overlap and shapes.framework.can_run.compiles_tp_overlap


def _partial_sums(shapes: Shapes, name: str, module: str, phase: str, whole: Array, where: Array) -> list[Op]:
    """Return the kernel that sums what all ranks sent of a product, after torch's overlapped reduce-scatter, which is an
    all-to-all: it reads as much as the whole product and writes a rank's part
    (torch/distributed/_symmetric_memory, _fused_matmul_reduce_scatter_impl: stacked_partials)."""
    if not _compiles_overlap(shapes):
        return []
    there = np.where(where & (shapes.keys.tp > 1), 1.0, 0.0)
    dims = {"bytes": whole * shapes.element * (1 + 1 / shapes.keys.tp)}
    again = WHOLE_LAYER if phase == FORWARD else ()
    return [Op(f"{name}.partials", module, MEMORY_BOUND, phase, dims, count=there, variant="residual", recomputed_by=again)]


def row_linear(shapes: Shapes, name: str, module: str, n: Array, k: Array) -> list[Op]:
    """Return a linear split by rows.

    Its output is summed over the group; under a sequence split its gradient is all-gathered.
    """
    split, everywhere = shapes.sequence_split, ~shapes.sequence_split & (shapes.split > 1)
    forward = (f"{name}.forward",) if shapes.run.tp_comm_overlap else ()
    backward = (f"{name}.input_grad",) if shapes.run.tp_comm_overlap else ()
    parts = shapes.keys.tp if _compiles_overlap(shapes) else SCATTERED_PARTS
    whole, gemms = shapes.tokens * n, _in_parts(shapes, linear(shapes, name, module, n, k), FORWARD, parts)
    return [
        *input_casts(shapes, name, module, shapes.linear_tokens, k, False, normed=False),
        *_in_parts(shapes, gemms, INPUT_GRAD, shapes.keys.tp),
        *gradient_casts(shapes, name, module, shapes.linear_tokens, n, split),
        *weight_casts(shapes, name, module, n * k),
        tp_collective(shapes, f"{name}.reduce_scatter", module, "reduce_scatter", FORWARD, split, forward, 1 / parts),
        *_partial_sums(shapes, name, module, FORWARD, whole, split),
        tp_collective(shapes, f"{name}.all_reduce", module, "all_reduce", FORWARD, everywhere),
        tp_collective(
            shapes,
            f"{name}.all_gather",
            module,
            "all_gather",
            INPUT_GRAD,
            split,
            backward,
            size=whole * shapes.gathered_element,
        ),
    ]
