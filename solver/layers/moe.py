"""The mixture of experts: router, exchange of tokens, the experts' grouped GEMMs, shared experts.

Sources: Megatron-Core's moe_layer.py, router.py, token_dispatcher.py and experts.py of 0.8 to 0.14, and Transformer Engine's
permutation, as read; MoE Parallel Folding (arXiv 2504.14960) for the groups.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from solver.layers.casts import gradient_casts, input_casts, kept_input_casts, weight_casts
from solver.layers.expert_exchange import (
    WIDE_PROBABILITIES,
    combine_ops,
    dispatch_ops,
    stays_home,
    waits_to_send,
    weighs_in_fp32,
)
from solver.layers.expert_rows import expert_rows, sent_rows
from solver.layers.mlp import activation_ops, mlp_ops, mlp_saved, mlp_weights
from solver.layers.ops import gradient_sums, linear, memory_bound
from solver.layers.program import (
    EXPERTS,
    FORWARD,
    GROUPED_LINEAR,
    INPUT_GRAD,
    LINEAR,
    MEMORY_BOUND,
    ONE_KERNEL,
    WEIGHT_GRAD,
    Array,
    Op,
    Saved,
    Weight,
)
from solver.layers.shapes import Shapes
from solver.layers.tensor_parallel import tp_collective
from solver.spec.model_size import mlp_biases, router_parameters
from solver.spec.recipes import FP32

MODULE, ROUTER, SHARED = "experts", "router", "shared_experts"


def moe_ops(shapes: Shapes) -> list[Op]:
    """Return the ops of one mixture of experts, forward and backward."""
    model = shapes.model
    shared = model.shared_expert_intermediate_size
    # router, dispatch, shared experts and their gate
    readers = 1 + _routes(shapes) + (shared > 0) + (shared > 0 and model.shared_expert_gate)
    kept = np.where(shapes.keeps_shard, shapes.local_tokens, shapes.linear_tokens)  # by the router
    return [
        *gradient_sums(shapes, "norm2", ROUTER, readers),
        *_tensor_group_ops(shapes),
        *_router_ops(shapes),
        *dispatch_ops(shapes),
        *_expert_ops(shapes),
        *combine_ops(shapes),
        *(mlp_ops(shapes, shared, "shared.", SHARED) if shared else []),
        *(kept_input_casts(shapes, "shared.w13", SHARED, kept, model.hidden_size) if shared else []),
        *(_shared_sum(shapes) if shared else []),
    ]


def _tensor_group_ops(shapes: Shapes) -> list[Op]:
    """The all-gather of the experts' input over the tensor group and the reduce-scatter of their output, where the framework
    has them; those of shared experts, which read and add to the same, do for both (torchtitan's apply_moe_ep_tp)."""
    if not shapes.framework.tensor_parallel.experts_gather or shapes.model.shared_expert_intermediate_size:
        return []
    return [
        tp_collective(shapes, f"experts.{what}", MODULE, what, phase, shapes.sequence_split)
        for phase, what in product((FORWARD, INPUT_GRAD), ("all_gather", "reduce_scatter"))
    ]


def _router_ops(shapes: Shapes) -> list[Op]:
    """The scores of all experts, and the choice of the best: a chain of small kernels, as frameworks run it by default.

    Kernels of the chain, forward: softmax in fp32 (or sigmoid and its norm), top-k (two: select and sort), the mask and the
    map of chosen experts (two scatters, each into zeros that are filled first), the aux loss (scores, two sums, a product),
    the tokens per expert: 12; a balancing bias adds two, groups six (top-2 of each group, their sum, top-k, mask, fill).
    Backward about half. Counted from the code; each reads or writes an fp32 score per token and expert once or twice. Fused
    (Transformer Engine's fused_router): scores and choice, the tokens per expert and their loss one each, backward one.
    Consecutive experts need no scores, though they may be computed.
    """
    if not _routes(shapes):
        return []
    model, tokens = shapes.model, shapes.norm_tokens
    scores = 2.0 * FP32 * tokens * model.num_experts
    forward = 12 + 2 * model.router_bias + 6 * (model.router_groups > 1) + (model.router_score == "sigmoid")
    choice = memory_bound("routing", ROUTER, "residual", scores, 1.0, 1.0)
    counts = {FORWARD: 3, INPUT_GRAD: 1} if shapes.run.moe_router_fusion else {FORWARD: forward, INPUT_GRAD: -(-forward // 2)}
    gate = linear(shapes, "router", ROUTER, model.num_experts, model.hidden_size, tokens=tokens, quantised=False)
    return [*gate, *(replace(op, count=float(counts[op.phase]), launches=float(counts[op.phase])) for op in choice)]


def _routes(shapes: Shapes) -> bool:
    """Whether a router computes scores."""
    return shapes.run.moe_routing == "random" or shapes.framework.kernels.routes_consecutive


def _expert_ops(shapes: Shapes) -> list[Op]:
    """Up (and gate) projection, activation and down projection of the experts that this rank holds, or holds a part of."""
    hidden, width = shapes.model.hidden_size, _width(shapes)
    rows, columns = expert_rows(shapes), shapes.model.up_matrices * width
    between = (
        []
        if shapes.run.moe_fused_experts
        else [
            *_by_expert(shapes, gradient_casts(shapes, "experts.w13", MODULE, rows, columns)),
            *_clamps(shapes, rows * width),
            *_waiting(shapes, activation_ops(shapes, "experts.activation", MODULE, rows * width)),
            *_by_expert(shapes, input_casts(shapes, "experts.w2", MODULE, rows, width, False, normed=False)),
        ]
    )
    return [
        *_padding(shapes, "experts.pad", rows * hidden),
        *_by_expert(shapes, input_casts(shapes, "experts.w13", MODULE, rows, hidden, False, normed=False)),
        *_input_projections(shapes, rows, width),
        *between,
        *_grouped(shapes, "w2", hidden, width),
        *_padding(shapes, "experts.unpad", rows * hidden),
        *_biases(shapes, rows * hidden),
        *_by_expert(shapes, gradient_casts(shapes, "experts.w2", MODULE, rows, hidden)),
        *weight_casts(shapes, "experts", MODULE, (columns + width) * hidden * (shapes.model.num_experts // shapes.keys.ep)),
    ]


def _input_projections(shapes: Shapes, rows: Array, width: Array) -> list[Op]:
    """Up (and gate) projection: one grouped GEMM, or one each, whose input's gradients are added (two reads and a write)."""
    hidden, ups = shapes.model.hidden_size, shapes.model.up_matrices
    if ups == 1 or not shapes.framework.kernels.experts_gate_apart:
        return _grouped(shapes, "w13", ups * width, hidden)
    sums = memory_bound("experts.gradients", MODULE, "residual", rows * hidden, 0.0, 3.0 * shapes.element)
    return [*_grouped(shapes, "w13", width, hidden), *_grouped(shapes, "w3", width, hidden), *sums]


def _quantised_apart(shapes: Shapes) -> bool:
    """Whether local experts are tensors of their own in a quantised grouped GEMM."""
    return shapes.framework.kernels.experts_apart and not shapes.run.moe_fused_experts


def _padding(shapes: Shapes, name: str, elements: Array) -> list[Op]:
    """The copy of ``elements`` values by which each expert's rows become, and later cease to be, a multiple of 16 or 32.

    Source: Megatron-Core's TEGroupedMLP in quantised runs. Rows that a capacity makes equal need none; hybrid-EP's kernels and
    fused experts pad by themselves.
    """
    if shapes.recipe is None or shapes.run.moe_capacity_factor or not _quantised_apart(shapes):
        return []
    copied = stays_home(shapes) | (shapes.run.moe_dispatcher != "hybridep")
    ops = memory_bound(name, MODULE, "copy", elements, 2.0 * shapes.element, 2.0 * shapes.element)
    return [replace(op, count=op.count * copied) for op in ops]


def _by_expert(shapes: Shapes, casts: list[Op]) -> list[Op]:
    """``casts`` of the rows of all experts: each expert's alone, unless one kernel can do all.

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
    """Kernels that clamp ``elements`` outputs of the gate, and of the up projection, where the activation does not do so.

    Bytes of each pair in 16 bits: clamp one and the other, which are views (4 each), join both (8); backward compares and
    selects, compares twice and selects, of views (4 each), joins the comparisons (3) and both gradients (8).
    """
    if not (shapes.model.clamped_gate and shapes.framework.kernels.clamps_apart):
        return []
    return [
        *memory_bound("experts.activation.clamp", MODULE, "strided", elements, 2 * 4, 5 * 4),
        *memory_bound("experts.activation.join", MODULE, "residual", elements, 8, 11),
    ]


def _waiting(shapes: Shapes, activation: list[Op]) -> list[Op]:
    """The activation, before which the host waits where its offset is copied to the device for every call (Megatron-Core's
    fused_bias_geglu.py: weighted_bias_quick_geglu_impl makes a tensor of it)."""
    waits = shapes.model.clamped_gate and shapes.framework.kernels.clamps_apart
    return [replace(op, after_wait=waits and op.phase == FORWARD) for op in activation]


def _biases(shapes: Shapes, elements: Array) -> list[Op]:
    """Kernels that add the bias of the experts' output to ``elements`` values, one expert after the other.

    Launches for each expert: product and sum; backward the cast of the sum's gradient, and for bias and probabilities a product
    and its sum each.
    """
    by_expert = shapes.framework.kernels.bias_by_expert and not shapes.run.moe_fused_experts and not shapes.run.compile
    if not (shapes.model.mlp_bias and by_expert):
        return []
    experts = shapes.model.num_experts // shapes.keys.ep
    kernels = {FORWARD: 2.0, INPUT_GRAD: 5.0}
    chosen: dict[str, Array] = {"expert_bias_half": 1.0}
    if shapes.run.moe_dispatcher in WIDE_PROBABILITIES:
        home = stays_home(shapes)  # as with all-to-alls, whatever the dispatcher
        chosen = {"expert_bias": 1.0 * ~home, **({"expert_bias_half": 1.0 * home} if home.any() else {})}
    return [
        replace(op, count=1.0 * experts * there, launches=kernels[op.phase] * experts)
        for kind, there in chosen.items()
        for op in memory_bound("experts.bias", MODULE, kind, elements / experts, 4.0, 2.0, fused=False)
    ]


def _width(shapes: Shapes) -> Array:
    """Width of a local expert, or of this rank's part of it."""
    return shapes.model.moe_intermediate_size // shapes.keys.etp


def _grouped(shapes: Shapes, name: str, n: Array, k: Array) -> list[Op]:
    """A linear of each local expert, as one grouped GEMM, or one after the other; of a single local expert a plain GEMM.

    Where no token is dropped the host must know how many there are before it launches the first of them; where they are sent
    all to all, before it launches that (expert_exchange.py). Experts that are parameters of their own are handled by the host
    one by one: each weight in forward, and in backward its gradient and its hook; a bias too (Transformer Engine's
    GroupedLinear returns a gradient of each, Megatron-Core's distributed_data_parallel.py has a hook for every parameter).
    One after the other they are modules of their own, whose GEMMs are those that Transformer Engine starts for a group too;
    the host starts none of those that are one kernel, or replayed from a CUDA graph.
    """
    experts, rows = shapes.model.num_experts // shapes.keys.ep, expert_rows(shapes)
    each = np.maximum(rows / experts, 1)
    single, several = np.where(experts == 1, 1.0, 0.0), np.where(experts > 1, 1.0, 0.0)
    sizes = {"groups": experts, "tokens_per_group": each, "n": n, "k": k}
    waits = (name == "w13") & ~waits_to_send(shapes) & (not shapes.run.moe_capacity_factor)
    alone = linear(shapes, f"expert.{name}", MODULE, n, k, tokens=rows)
    plain = [replace(op, after_wait=waits & (op.phase == FORWARD)) for op in alone if op.kind == LINEAR]
    fills = [
        replace(op, dims={"bytes": op.dims["bytes"] * (experts if op.phase == WEIGHT_GRAD else 1)})
        for op in alone
        if op.kind == MEMORY_BOUND
    ]
    handled = {FORWARD: 1, WEIGHT_GRAD: 2 * (1 + shapes.model.mlp_bias)} if shapes.framework.kernels.experts_apart else {}
    if not shapes.run.moe_grouped_gemm:
        handled = {op.phase: np.maximum(op.launches, handled.get(op.phase, 0)) for op in plain}
        fills = [replace(op, launches=op.launches * experts) for op in fills]
    grouped = [
        replace(
            op,
            name=f"experts.{name}",
            kind=GROUPED_LINEAR,
            count=several,
            dims={**sizes, "passes": op.dims["layout"], "accumulate": op.dims["accumulate"]},
            launches=np.maximum(1.0 * handled.get(op.phase, 0) * experts, 1.0),
            variant="" if _launches_each(shapes) else ONE_KERNEL,
        )
        for op in plain
    ]
    return [*(replace(op, count=single) for op in plain), *grouped, *fills]


def _launches_each(shapes: Shapes) -> bool:
    """Whether the host launches the GEMM of each expert."""
    run = shapes.run
    one_kernel = run.moe_grouped_gemm and (shapes.framework.kernels.one_grouped_kernel or run.moe_fused_experts)
    return not one_kernel and not run.graphs_layers


def _shared_sum(shapes: Shapes) -> list[Op]:
    """The output of the shared experts is added to that of the others; a learned gate scales it first."""
    elements = shapes.norm_tokens * shapes.model.hidden_size
    passes = (3 + 2 * shapes.model.shared_expert_gate) * shapes.element
    backward = 2 * shapes.model.shared_expert_gate * shapes.element
    return memory_bound("shared.sum", SHARED, "residual", elements, passes, backward)


def moe_saved(shapes: Shapes) -> list[Saved]:
    """Return the saved tensors: the experts' input, the activation's input and output, the probabilities; shared ones.

    Where the probabilities are applied after the experts, the weighted sum also keeps the experts' outputs. Where they are
    applied to an activation without a gate, no kernel does both, and the activation's output is kept before and after.
    """
    model, e = shapes.model, shapes.element
    rows, width = expert_rows(shapes), _width(shapes)
    eager_gate = model.gated_mlp and not shapes.fused_elementwise  # which keeps the activated half too
    scores = shapes.norm_tokens * model.num_experts * (FP32 + 1)  # scores in fp32 and the map of chosen experts, a byte each
    saved = [
        *([Saved("router_scores", scores)] if _routes(shapes) else []),
        Saved("expert_input", rows * model.hidden_size * shapes.input_element),
        Saved("expert_act_input", rows * width * e * shapes.model.up_matrices),
        Saved("expert_act_output", rows * width * (shapes.input_element + e * eager_gate)),
        Saved("probabilities", rows * FP32),
    ]
    if model.clamped_gate and shapes.framework.kernels.clamps_apart and not shapes.run.moe_fused_experts:
        saved.append(Saved("expert_clamped", rows * width * e * shapes.model.up_matrices))
    if shapes.framework.kernels.probabilities_in_activation and not model.gated_mlp:
        saved.append(Saved("expert_act_weighted", rows * width * e))
    if not shapes.framework.kernels.probabilities_in_activation:
        wide = shapes.keys.tp * FP32 if weighs_in_fp32(shapes) else e
        saved.append(Saved("expert_output", sent_rows(shapes) * model.hidden_size * wide))
    if model.shared_expert_intermediate_size:
        shared = mlp_saved(shapes, model.shared_expert_intermediate_size)
        saved += [replace(tensor, name=f"shared_{tensor.name}") for tensor in shared]
    if model.shared_expert_gate:  # what it scales
        saved.append(Saved("shared_output", shapes.norm_tokens * model.hidden_size * e))
    return saved


def token_buffer(shapes: Shapes) -> np.ndarray:
    """Return the bytes of the buffer in which a rank has the tokens of all ranks of its experts' group, [keys]."""
    ranks = shapes.keys.ep * shapes.keys.etp
    there = shapes.framework.memory.token_buffer and shapes.kind.experts and shapes.run.moe_dispatcher == "allgather"
    return shapes.norm_tokens * ranks * shapes.model.hidden_size * shapes.element * (ranks > 1) * there


def moe_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients alive when the experts' first GEMM runs backward: of its output and of its input."""
    columns = shapes.model.up_matrices * _width(shapes) + shapes.model.hidden_size
    return expert_rows(shapes) * shapes.element * columns


def moe_weights(shapes: Shapes) -> list[Weight]:
    """Return the router's weights, whole on every rank, those of the local experts, and those of the shared ones."""
    model = shapes.model
    h, experts = model.hidden_size, model.num_experts // shapes.keys.ep
    width, ups = _width(shapes), shapes.model.up_matrices
    bias = mlp_biases(model, width)
    shared = model.shared_expert_intermediate_size
    return [
        Weight("router", router_parameters(model)),
        Weight("experts.w13", experts * ups * width * h, EXPERTS, alike=experts),
        Weight("experts.w2", experts * width * h, EXPERTS, alike=experts),
        *([Weight("experts.bias", experts * bias, EXPERTS, alike=experts)] if model.mlp_bias else []),
        *(mlp_weights(shapes, shared, "shared.") if shared else []),
    ]
