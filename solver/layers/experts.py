"""The experts that a rank holds: grouped GEMMs of up and down projection, activation, padding, biases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.casts import gradient_casts, input_casts, weight_casts
from solver.layers.expert_exchange import (
    WIDE_PROBABILITIES,
    holds_all_experts,
    syncs_before_dispatch,
)
from solver.layers.expert_rows import expert_rows
from solver.layers.mlp import activation_ops
from solver.layers.ops import linear, memory_bound
from solver.layers.program import (
    EXPERT_MODULE,
    FORWARD,
    GROUPED_LINEAR,
    INPUT_GRAD,
    LINEAR,
    MEMORY_BOUND,
    ONE_KERNEL,
    WEIGHT_GRAD,
    Array,
    Op,
)
from solver.layers.shapes import Shapes


def expert_ops(shapes: Shapes) -> list[Op]:
    """Return up (and gate) projection, activation and down projection of a rank's experts, or of its shards of them (etp)."""
    hidden, width = shapes.model.hidden_size, expert_width(shapes)
    rows, columns = expert_rows(shapes), shapes.model.up_matrices * width
    between = (
        []
        if shapes.run.moe_fused_experts
        else [
            *_casts_by_expert(shapes, gradient_casts(shapes, "experts.w13", EXPERT_MODULE, rows, columns)),
            *_activation(shapes, rows, width),
            *_casts_by_expert(shapes, input_casts(shapes, "experts.w2", EXPERT_MODULE, rows, width, False, normed=False)),
        ]
    )
    return [
        *_padding(shapes, "experts.pad", rows * hidden),
        *_scaled_input(shapes, rows * hidden),
        *_casts_by_expert(shapes, input_casts(shapes, "experts.w13", EXPERT_MODULE, rows, hidden, False, normed=False)),
        *_input_projections(shapes, rows, width),
        *between,
        *_grouped(shapes, "w2", hidden, width),
        *_padding(shapes, "experts.unpad", rows * hidden),
        *_biases(shapes, rows * hidden),
        *_casts_by_expert(shapes, gradient_casts(shapes, "experts.w2", EXPERT_MODULE, rows, hidden)),
        *weight_casts(
            shapes, "experts", EXPERT_MODULE, (columns + width) * hidden * (shapes.model.num_experts // shapes.keys.ep)
        ),
    ]


def _input_projections(shapes: Shapes, rows: Array, width: Array) -> list[Op]:
    """Return up (and gate) projection: one grouped GEMM, or one each, whose input gradients are added (two reads, a write)."""
    hidden, ups = shapes.model.hidden_size, shapes.model.up_matrices
    if ups == 1 or not shapes.framework.kernels.experts_gate_apart or biased_eager(shapes):
        return _grouped(shapes, "w13", ups * width, hidden)
    sums = memory_bound("experts.gradients", EXPERT_MODULE, "residual", rows * hidden, 0.0, 3.0 * shapes.element)
    return [*_grouped(shapes, "w13", width, hidden), *_grouped(shapes, "w3", width, hidden), *sums]


def scales_input(shapes: Shapes) -> bool:
    """Whether the experts' input is multiplied by the router's probabilities, in place of their output: Llama 4's sigmoid of
    the one expert chosen (Megatron-Core's moe_apply_probs_on_input, torchtitan's score_before_experts)."""
    return shapes.model.router_score == "sigmoid" and shapes.model.num_experts_per_tok == 1


def _scaled_input(shapes: Shapes, elements: Array) -> list[Op]:
    """Return that product of ``elements`` values: read and written; backward two products, of which one is summed by row."""
    if not scales_input(shapes):
        return []
    return memory_bound("experts.scaled_input", EXPERT_MODULE, "residual", elements, 2.0 * shapes.element, 6.0 * shapes.element)


def biased_eager(shapes: Shapes) -> bool:
    """Whether experts add their biases and activate by eager kernels of their own (Kernels.biased_experts_eager)."""
    return shapes.framework.kernels.biased_experts_eager and shapes.model.mlp_bias and shapes.model.clamped_gate


def _activation(shapes: Shapes, rows: Array, width: Array) -> list[Op]:
    """Return what runs between the grouped GEMMs, in 16 bits."""
    if biased_eager(shapes):
        return _eager_activation(shapes, rows, width)
    activation = activation_ops(shapes, "experts.activation", EXPERT_MODULE, rows * width)
    return [*_clamps(shapes, rows * width), *_after_host_sync(shapes, activation)]


def _eager_activation(shapes: Shapes, rows: Array, width: Array) -> list[Op]:
    """Return the kernels between and behind the grouped GEMMs of torchtitan's GPT-OSS; each value counted by its accesses.

    Both biases, forward: repeated for each row 1, joined with padding 2, added 3; backward: the sum over an expert's rows 1 and
    a zero beside each (2). Activation, of a pair of gate and up, forward: two clamps of interleaved halves (4 strided), factor
    2, sigmoid 2, product 3, one more 2, product 3; backward: two products each (6 and 6), sigmoid 3, factor 2, the sum of the
    gate's two gradients 3, clamps 6, both halves put in place (4 and 4 strided) and added 6. The host waits for the numbers of
    rows before it repeats a bias, by some ten kernels. Source: models/gpt_oss/model/moe.py of 0.2.2, traced in torch.
    """
    pair, biased, e = rows * width, rows * (2 * width + shapes.model.hidden_size), shapes.element
    bias = memory_bound("experts.bias", EXPERT_MODULE, "residual", biased, 6.0 * e, 2.0 * e)
    strided = memory_bound("experts.activation.halves", EXPERT_MODULE, "strided", pair, 4.0 * e, 8.0 * e)
    plain = memory_bound("experts.activation", EXPERT_MODULE, "residual", pair, 12.0 * e, 32.0 * e)
    launches = {FORWARD: (24.0, 2.0, 5.0), INPUT_GRAD: (6.0, 4.0, 12.0)}
    return [
        replace(op, launches=launches[op.phase][kind], after_host_sync=kind == 0 and op.phase == FORWARD)
        for kind, ops in enumerate((bias, strided, plain))
        for op in ops
    ]


def _quantised_apart(shapes: Shapes) -> bool:
    """Whether a quantised grouped GEMM takes each expert's operands as separate tensors."""
    return shapes.framework.kernels.experts_apart and not shapes.run.moe_fused_experts


def _padding(shapes: Shapes, name: str, elements: Array) -> list[Op]:
    """Return the copy of ``elements`` values that pads each expert's rows to a multiple of 16 or 32, or removes the padding.

    Source: Megatron-Core's TEGroupedMLP in quantised runs. Rows that a capacity makes equal need none; hybrid-EP's kernels and
    fused experts pad by themselves.
    """
    if shapes.recipe is None or shapes.run.moe_capacity_factor or not _quantised_apart(shapes):
        return []
    copied = holds_all_experts(shapes) | (shapes.run.moe_dispatcher != "hybridep")
    ops = memory_bound(name, EXPERT_MODULE, "copy", elements, 2.0 * shapes.element, 2.0 * shapes.element)
    return [replace(op, count=op.count * copied) for op in ops]


def _casts_by_expert(shapes: Shapes, casts: list[Op]) -> list[Op]:
    """Return ``casts`` of the rows of all experts as a kernel for each expert, unless one kernel can cast them all.

    Source: split_quantize in Transformer Engine's csrc/extensions/cast.cpp (2.1 to 2.9), which fuses delayed scaling only.
    """
    if shapes.recipe is None or shapes.recipe.grouped or not _quantised_apart(shapes):
        return casts
    experts = np.maximum(1.0 * (shapes.model.num_experts // shapes.keys.ep), 1.0)
    return [
        replace(op, dims={"bytes": op.dims["bytes"] / experts}, count=op.count * experts, launches=op.launches * experts)
        for op in casts
    ]


def _clamps(shapes: Shapes, elements: Array) -> list[Op]:
    """Return the kernels that clamp ``elements`` outputs of gate and up projection, where the activation does not do so.

    Bytes of each pair in 16 bits, forward: a clamp of each, which are views (4 each), and their concatenation (8). Backward:
    five comparisons and selections of views (4 each), concatenations of the masks (3) and of both gradients (8).
    """
    if not (shapes.model.clamped_gate and shapes.framework.kernels.clamps_apart):
        return []
    return [
        *memory_bound("experts.activation.clamp", EXPERT_MODULE, "strided", elements, 2 * 4, 5 * 4),
        *memory_bound("experts.activation.join", EXPERT_MODULE, "residual", elements, 8, 11),
    ]


def _after_host_sync(shapes: Shapes, activation: list[Op]) -> list[Op]:
    """Return the activation, before which the host synchronises where its offset is copied to the device in every call
    (Megatron-Core's fused_bias_geglu.py: weighted_bias_quick_geglu_impl makes a tensor of it)."""
    syncs = shapes.model.clamped_gate and shapes.framework.kernels.clamps_apart
    return [replace(op, after_host_sync=syncs and op.phase == FORWARD) for op in activation]


def _biases(shapes: Shapes, elements: Array) -> list[Op]:
    """Return the kernels that add the bias of the experts' output to ``elements`` values, expert by expert.

    Launches for each expert: product and sum; backward the cast of the sum's gradient, and a product and a sum each for the
    gradients of bias and probabilities.
    """
    by_expert = shapes.framework.kernels.bias_by_expert and not shapes.run.moe_fused_experts and not shapes.run.compile
    if not (shapes.model.mlp_bias and by_expert):
        return []
    experts = shapes.model.num_experts // shapes.keys.ep
    kernels = {FORWARD: 2.0, INPUT_GRAD: 5.0}
    chosen: dict[str, Array] = {"expert_bias_half": 1.0}
    if shapes.run.moe_dispatcher in WIDE_PROBABILITIES:
        local = holds_all_experts(shapes)  # as with all-to-alls, whatever the dispatcher
        chosen = {"expert_bias": 1.0 * ~local, **({"expert_bias_half": 1.0 * local} if local.any() else {})}
    return [
        replace(op, count=1.0 * experts * where, launches=kernels[op.phase] * experts)
        for kind, where in chosen.items()
        for op in memory_bound("experts.bias", EXPERT_MODULE, kind, elements / experts, 4.0, 2.0, fused=False)
    ]


def expert_width(shapes: Shapes) -> Array:
    """Return the width of a local expert, or of this rank's shard of it."""
    return shapes.model.moe_intermediate_size // shapes.keys.etp


def _grouped(shapes: Shapes, name: str, n: Array, k: Array) -> list[Op]:
    """Return a linear of each local expert: one grouped GEMM, GEMMs one after the other, or a plain GEMM of a single expert.

    Unless a capacity makes the numbers of rows equal, the host must know them before it launches the first grouped GEMM; where
    all-to-alls send them, before it launches these (expert_exchange.py). Experts that are separate parameters cost the host
    time one by one: each weight in forward, and in backward its gradient and its hook; a bias too (Transformer Engine's
    GroupedLinear returns a gradient of each, Megatron-Core's distributed_data_parallel.py has a hook for every parameter).
    Without grouped GEMMs experts are separate modules, whose GEMMs are those that Transformer Engine launches for a group too;
    the host launches no GEMM of each expert where they are one kernel, or replayed from a CUDA graph.
    """
    experts, rows = shapes.model.num_experts // shapes.keys.ep, expert_rows(shapes)
    rows_per_expert = np.maximum(rows / experts, 1)
    is_single, is_several = np.where(experts == 1, 1.0, 0.0), np.where(experts > 1, 1.0, 0.0)
    sizes = {"groups": experts, "tokens_per_group": rows_per_expert, "n": n, "k": k}
    syncs = (name == "w13") & ~syncs_before_dispatch(shapes) & (not shapes.run.moe_capacity_factor)
    dense_ops = linear(shapes, f"expert.{name}", EXPERT_MODULE, n, k, tokens=rows)
    plain = [replace(op, after_host_sync=syncs & (op.phase == FORWARD)) for op in dense_ops if op.kind == LINEAR]
    fills = [
        replace(op, dims={"bytes": op.dims["bytes"] * (experts if op.phase == WEIGHT_GRAD else 1)})
        for op in dense_ops
        if op.kind == MEMORY_BOUND
    ]
    host_calls = {FORWARD: 1, WEIGHT_GRAD: 2 * (1 + shapes.model.mlp_bias)} if shapes.framework.kernels.experts_apart else {}
    if not shapes.run.moe_grouped_gemm:
        host_calls = {op.phase: np.maximum(op.launches, host_calls.get(op.phase, 0)) for op in plain}
        fills = [replace(op, launches=op.launches * experts) for op in fills]
    grouped = [
        replace(
            op,
            name=f"experts.{name}",
            kind=GROUPED_LINEAR,
            count=is_several,
            dims={**sizes, "passes": op.dims["layout"], "accumulate": op.dims["accumulate"]},
            launches=np.maximum(1.0 * host_calls.get(op.phase, 0) * experts, 1.0),
            variant="" if _launches_per_expert(shapes) else ONE_KERNEL,
        )
        for op in plain
    ]
    return [*(replace(op, count=is_single) for op in plain), *grouped, *fills]


def _launches_per_expert(shapes: Shapes) -> bool:
    """Whether the host launches the GEMM of each expert."""
    run = shapes.run
    one_kernel = run.moe_grouped_gemm and (shapes.framework.kernels.one_grouped_kernel or run.moe_fused_experts)
    return not one_kernel and not run.graphs_layers
