"""The mixture of experts: router, exchange of tokens, routed experts, shared experts; what they save and hold.

Sources: Megatron-Core's moe_layer.py, router.py, token_dispatcher.py and experts.py of 0.8 to 0.14, and Transformer Engine's
permutation, as read; MoE Parallel Folding (arXiv 2504.14960) for the groups.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from solver.layers.casts import kept_input_casts
from solver.layers.expert_exchange import (
    combine_ops,
    combines_in_fp32,
    dispatch_ops,
)
from solver.layers.expert_rows import expert_rows, sent_rows
from solver.layers.experts import biased_eager, expert_ops, expert_width, scales_input
from solver.layers.mlp import mlp_ops, mlp_saved, mlp_weights
from solver.layers.ops import gradient_sums, linear, memory_bound
from solver.layers.program import (
    EXPERT_MODULE,
    EXPERTS,
    FORWARD,
    INPUT_GRAD,
    ROUTER,
    SHARED_EXPERTS,
    Op,
    Saved,
    Weight,
)
from solver.layers.shapes import Shapes
from solver.layers.tensor_parallel import tp_collective
from solver.spec.model_size import mlp_biases, router_parameters
from solver.spec.recipes import FP32


def moe_ops(shapes: Shapes) -> list[Op]:
    """Return the ops of one mixture of experts, forward and backward."""
    model = shapes.model
    shared = model.shared_expert_intermediate_size
    # router, dispatch, shared experts and their gate
    readers = 1 + _routes(shapes) + (shared > 0) + (shared > 0 and model.shared_expert_gate)
    router_tokens = np.where(shapes.keeps_shard, shapes.local_tokens, shapes.linear_tokens)  # of the input that it keeps
    return [
        *gradient_sums(shapes, "norm2", ROUTER, readers),
        *_tensor_group_ops(shapes),
        *_router_ops(shapes),
        *dispatch_ops(shapes),
        *expert_ops(shapes),
        *combine_ops(shapes),
        *(mlp_ops(shapes, shared, "shared.", SHARED_EXPERTS) if shared else []),
        *(kept_input_casts(shapes, "shared.w13", SHARED_EXPERTS, router_tokens, model.hidden_size) if shared else []),
        *(_shared_sum(shapes) if shared else []),
    ]


def _tensor_group_ops(shapes: Shapes) -> list[Op]:
    """Return the all-gather of the experts' input over the tensor group and the reduce-scatter of their output.

    Only where the framework has them; shared experts read and add to the same tensors, so that their collectives serve both
    (torchtitan's apply_moe_ep_tp).
    """
    if not shapes.framework.tensor_parallel.experts_gather or shapes.model.shared_expert_intermediate_size:
        return []
    return [
        tp_collective(shapes, f"experts.{what}", EXPERT_MODULE, what, phase, shapes.sequence_split)
        for phase, what in product((FORWARD, INPUT_GRAD), ("all_gather", "reduce_scatter"))
    ]


def _router_ops(shapes: Shapes) -> list[Op]:
    """Return the GEMM of the scores and the choice of experts: a chain of small kernels, as frameworks run it by default.

    Kernels of the chain, forward: softmax in fp32 (or sigmoid and its norm), top-k (two: select and sort), the mask and the
    map of chosen experts (two scatters, each into zeros that are filled first), the aux loss (scores, two sums, a product),
    the tokens per expert: 12; a balancing bias adds two, groups six (top-2 of each group, their sum, top-k, mask, fill).
    Backward about half. Counted from the code; each reads or writes an fp32 score per token and expert once or twice. Fused
    (Transformer Engine's fused_router): a kernel each for scores and choice, the tokens per expert, and the aux loss; backward
    one. Consecutive experts need no scores, though some frameworks compute them.
    """
    if not _routes(shapes):
        return []
    model, tokens = shapes.model, _routed_tokens(shapes)
    scores = 2.0 * FP32 * tokens * model.num_experts
    forward = 12 + 2 * model.router_bias + 6 * (model.router_groups > 1) + (model.router_score == "sigmoid")
    choice = memory_bound("routing", ROUTER, "residual", scores, 1.0, 1.0)
    counts = {FORWARD: 3, INPUT_GRAD: 1} if shapes.run.moe_router_fusion else {FORWARD: forward, INPUT_GRAD: -(-forward // 2)}
    gate = linear(shapes, "router", ROUTER, model.num_experts, model.hidden_size, tokens=tokens, quantised=False)
    return [
        *gate,
        *_wide_gradients(shapes),
        *(replace(op, count=float(counts[op.phase]), launches=float(counts[op.phase])) for op in choice),
    ]


def _wide_gradients(shapes: Shapes) -> list[Op]:
    """Return the copies of a router that works in fp32: its input is cast again in the backward pass (6 bytes a value) and read
    so (2 more), the gradient is written so (2 more) and cast back (6). The forward GEMM reads 16 bits.

    Source: Megatron-Core's moe_utils.py, RouterGatingLinearFunction.
    """
    stated, usual = shapes.run.moe_router_fp32, shapes.framework.kernels.router_fp32
    usual = usual and not (shapes.model.clamped_gate or scales_input(shapes))  # GPT-OSS and Llama 4
    if not (usual if stated is None else stated) or shapes.element == FP32:
        return []
    elements = shapes.norm_tokens * shapes.model.hidden_size
    return memory_bound("router.casts", ROUTER, "copy", elements, 0.0, 16.0)


def _routed_tokens(shapes: Shapes) -> np.ndarray:
    """Return the tokens for which a rank computes scores: all of the tensor group where that gathers the experts' input, of
    which each rank then sends its part (torchtitan's NoParallel of moe.router.gate)."""
    return shapes.tokens if shapes.framework.tensor_parallel.experts_gather else shapes.norm_tokens


def _routes(shapes: Shapes) -> bool:
    """Whether a router computes scores."""
    return shapes.run.moe_routing == "random" or shapes.framework.kernels.routes_consecutive


def _shared_sum(shapes: Shapes) -> list[Op]:
    """Return the addition of the shared experts' output to that of the routed ones; a learned gate scales it first."""
    elements = shapes.norm_tokens * shapes.model.hidden_size
    passes = (3 + 2 * shapes.model.shared_expert_gate) * shapes.element
    backward = 2 * shapes.model.shared_expert_gate * shapes.element
    return memory_bound("shared.sum", SHARED_EXPERTS, "residual", elements, passes, backward)


def moe_saved(shapes: Shapes) -> list[Saved]:
    """Return the saved tensors: the experts' input, the activation's input and output, the probabilities; also of shared ones.

    Where the probabilities are applied after the experts, the weighted sum also keeps the experts' outputs. Where they are
    applied to an activation without a gate, no kernel does both, and the activation's output is kept before and after.
    """
    model, e = shapes.model, shapes.element
    rows, width = expert_rows(shapes), expert_width(shapes)
    eager_gate = model.gated_mlp and not shapes.fused_elementwise  # which keeps the activated half too
    halves = 4 if biased_eager(shapes) else eager_gate  # both clamped ones, a sigmoid and a product
    # scores in fp32 and the map of chosen experts, a byte each
    scores = _routed_tokens(shapes) * model.num_experts * (FP32 + 1)
    saved = [
        *([Saved("router_scores", scores)] if _routes(shapes) else []),
        Saved("expert_input", rows * model.hidden_size * shapes.input_element),
        Saved("expert_act_input", rows * width * e * shapes.model.up_matrices),
        Saved("expert_act_output", rows * width * (shapes.input_element + e * halves)),
        Saved("probabilities", rows * FP32),
    ]
    if model.clamped_gate and shapes.framework.kernels.clamps_apart and not shapes.run.moe_fused_experts:
        saved.append(Saved("expert_clamped", rows * width * e * shapes.model.up_matrices))
    if shapes.framework.kernels.probabilities_in_activation and not model.gated_mlp:
        saved.append(Saved("expert_act_weighted", rows * width * e))
    if not shapes.framework.kernels.probabilities_in_activation:
        wide = shapes.keys.tp * FP32 if combines_in_fp32(shapes) else e
        saved.append(Saved("expert_output", sent_rows(shapes) * model.hidden_size * wide))
    if model.shared_expert_intermediate_size:
        shared = mlp_saved(shapes, model.shared_expert_intermediate_size)
        saved += [replace(tensor, name=f"shared_{tensor.name}") for tensor in shared]
    if model.shared_expert_gate:  # what it scales
        saved.append(Saved("shared_output", shapes.norm_tokens * model.hidden_size * e))
    return saved


def token_buffer(shapes: Shapes) -> np.ndarray:
    """Return the bytes of the buffer that holds the tokens of all ranks of a rank's expert group, [keys]."""
    ranks = shapes.keys.ep * shapes.keys.etp
    has_buffer = shapes.framework.memory.token_buffer and shapes.kind.experts and shapes.run.moe_dispatcher == "allgather"
    return shapes.norm_tokens * ranks * shapes.model.hidden_size * shapes.element * (ranks > 1) * has_buffer


def moe_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients alive when the experts' first GEMM runs backward: of its output and of its input."""
    columns = shapes.model.up_matrices * expert_width(shapes) + shapes.model.hidden_size
    return expert_rows(shapes) * shapes.element * columns


def moe_weights(shapes: Shapes) -> list[Weight]:
    """Return the router's weights, whole on every rank, those of the local experts, and those of the shared ones."""
    model = shapes.model
    h, experts = model.hidden_size, model.num_experts // shapes.keys.ep
    width, ups = expert_width(shapes), shapes.model.up_matrices
    bias = mlp_biases(model, width)
    shared = model.shared_expert_intermediate_size
    return [
        Weight("router", router_parameters(model)),
        Weight("experts.w13", experts * ups * width * h, EXPERTS, matrices=experts),
        Weight("experts.w2", experts * width * h, EXPERTS, matrices=experts),
        *([Weight("experts.bias", experts * bias, EXPERTS, matrices=experts)] if model.mlp_bias else []),
        *(mlp_weights(shapes, shared, "shared.") if shared else []),
    ]
