"""Constructors of ops on one rank: a linear with its three passes, and memory-bound kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from predictor.kernels.dtypes import BLOCKWISE
from predictor.kernels.gemm_layout import GemmLayout
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
)
from solver.layers.shapes import Shapes
from solver.spec.choices import Recompute
from solver.spec.recipes import FP32, HALF

#: Recompute levels that run an op again (Op.recomputed_by): those that recompute the whole layer, or also its attention core.
WHOLE_LAYER = (Recompute.FULL,)
ATTENTION_CORE = (Recompute.SELECTIVE, Recompute.FULL)

_LAYOUTS = {FORWARD: GemmLayout.TN, INPUT_GRAD: GemmLayout.NN, WEIGHT_GRAD: GemmLayout.NT}


def linear(
    shapes: Shapes, name: str, module: str, n: Array, k: Array, tokens: Array | None = None, *, quantised: bool = True
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
        *fill_ops(shapes, name, module, {FORWARD: m * n, INPUT_GRAD: m * k, WEIGHT_GRAD: 0 if accumulate else n * k}),
    ]


#: Linears that read a norm's output.
_AFTER_NORMS = (*QKV_LINEARS, *UP_LINEARS, VOCABULARY)


def _autocast(shapes: Shapes, name: str, module: str, weights: Array, inputs: Array, dtype: str) -> list[Op]:
    """Return torch.autocast's casts of an fp32 weight to 16 bits and, backward, of its gradient to fp32; the same of an input
    that a norm wrote in fp32.

    weights, inputs: elements of each.
    """
    if not shapes.framework.memory.fp32_weights or dtype in ("fp32", "tf32"):
        return []
    casts = memory_bound(f"{name}.autocast", module, "copy", weights, HALF + FP32, HALF + FP32)
    if shapes.wide_stream and name in _AFTER_NORMS:
        casts += memory_bound(f"{name}.input_autocast", module, "copy", inputs, HALF + FP32, HALF + FP32)
    return [replace(op, launches=0.0) for op in casts]  # the host launches them as a part of the linear


def fill_ops(
    shapes: Shapes,
    name: str,
    module: str,
    elements: Mapping[str, Array],
    count: Array = 1.0,
    recomputed_by: tuple[Recompute, ...] = WHOLE_LAYER,
) -> list[Op]:
    """Return the kernels that fill newly allocated tensors before an op writes them, in deterministic runs.

    elements: of these tensors, by pass. count, recomputed_by: of the op that writes them. Outputs of torch's own element-wise
    kernels are not filled. Source: torch.utils.deterministic.fill_uninitialized_memory, which
    torch.use_deterministic_algorithms turns on.
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


def gemm_dtype(shapes: Shapes, quantised: bool) -> str:
    """Return the arithmetic of a GEMM, as the cost model names it. quantised: whether a quantised run quantises it."""
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


def bias_ops(shapes: Shapes, name: str, module: str, elements: Array, has_bias: bool, *, apart: bool = False) -> list[Op]:
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


def gradient_sums(shapes: Shapes, name: str, module: str, readers: int) -> list[Op]:
    """Return autograd's additions of the gradients of a norm's output that ``readers`` modules read.

    Each reads two gradients and writes their sum; compiled, the kernel of the norm's backward pass reads one more instead.
    Where the readers share their collectives, gradients of the gathered input are added, else those of each rank's part.
    """
    shared = shapes.framework.tensor_parallel.shares_input | shapes.gathered_by_norm
    tokens = np.where(shared, shapes.linear_tokens, shapes.norm_tokens)
    passes, elements = 1 if shapes.run.compile else 3, (readers - 1) * tokens * shapes.model.hidden_size
    sums = memory_bound(f"{name}.gradients", module, "residual", elements, 0.0, (readers > 1) * passes * shapes.stream_element)
    return [replace(op, launches=readers - 1.0) for op in sums]
