"""The mixture of experts: router, exchange of tokens, the experts' grouped GEMMs, shared experts.

Sources: Megatron-Core's moe_layer.py, router.py, token_dispatcher.py and experts.py of 0.8 to 0.14, and Transformer Engine's
permutation, as read; MoE Parallel Folding (arXiv 2504.14960) for the groups.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.expert_exchange import combine_ops, dispatch_ops
from solver.layers.expert_rows import expert_rows, sent_rows
from solver.layers.mlp import mlp_ops, mlp_saved, mlp_weights
from solver.layers.ops import WHOLE_LAYER, gemm_dtype, linear, memory_bound
from solver.layers.program import EXPERTS, FORWARD, GROUPED_LINEAR, INPUT_GRAD, WEIGHT_GRAD, Array, Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.spec.precision import FP32

MODULE, ROUTER, SHARED = "experts", "router", "shared_experts"
_PASSES = {FORWARD: 0, INPUT_GRAD: 1, WEIGHT_GRAD: 2}


def moe_ops(shapes: Shapes) -> list[Op]:
    """Return the ops of one mixture of experts, forward and backward."""
    model = shapes.model
    shared = model.shared_expert_intermediate_size
    return [
        *_router_ops(shapes),
        *dispatch_ops(shapes),
        *_expert_ops(shapes),
        *combine_ops(shapes),
        *(mlp_ops(shapes, shared, "shared.", SHARED) if shared else []),
        *(_shared_sum(shapes) if shared else []),
    ]


def _router_ops(shapes: Shapes) -> list[Op]:
    """The scores of all experts, and the choice of the best: one fused kernel each way, or a chain of small ones.

    Kernels of the chain, forward: softmax in fp32 (or sigmoid and its norm), top-k (two: select and sort), the mask and the
    map of chosen experts (two scatters), the aux loss (scores, two sums, a product), the tokens per expert: 12; a balancing
    bias adds two, groups six (top-2 of each group, their sum, top-k, mask, fill). Backward about half. Counted from the code;
    each reads or writes an fp32 score per token and expert once or twice.
    """
    model, fused = shapes.model, shapes.framework.kernels.fused_router
    tokens = shapes.norm_tokens
    scores = 2.0 * FP32 * tokens * model.num_experts
    forward = 3 if fused else 12 + 2 * model.router_bias + 6 * (model.router_groups > 1) + (model.router_score == "sigmoid")
    choice = memory_bound("routing", ROUTER, "residual", scores, 1.0, 1.0)
    counts = {FORWARD: forward, INPUT_GRAD: 2 if fused else -(-forward // 2)}
    gate = linear(shapes, "router", ROUTER, model.num_experts, model.hidden_size, tokens=tokens, quantised=False)
    return [*gate, *(replace(op, count=float(counts[op.phase]), launches=float(counts[op.phase])) for op in choice)]


def _expert_ops(shapes: Shapes) -> list[Op]:
    """Up (and gate) projection, activation and down projection of the experts that this rank holds, or holds a part of."""
    model = shapes.model
    width = model.moe_intermediate_size // shapes.keys.etp
    up = (2 if model.gated_mlp else 1) * width
    elements = expert_rows(shapes) * width
    kind, forward, backward = ("gated_act", 3, 5) if model.gated_mlp else ("act", 2, 3)
    fused, e = shapes.fused_elementwise or not model.gated_mlp, shapes.element
    return [
        *_grouped(shapes, "w13", up, model.hidden_size),
        *memory_bound("experts.activation", MODULE, kind, elements, forward * e, backward * e, fused=fused),
        *_grouped(shapes, "w2", model.hidden_size, width),
    ]


def _grouped(shapes: Shapes, name: str, n: Array, k: Array) -> list[Op]:
    """A linear of each local expert, as one grouped GEMM; of a single local expert it is a plain GEMM."""
    experts = shapes.model.num_experts // shapes.keys.ep
    rows = expert_rows(shapes)
    single, several = np.where(experts == 1, 1.0, 0.0), np.where(experts > 1, 1.0, 0.0)
    dtype = gemm_dtype(shapes, True)
    accumulate = shapes.run.grad_dtype == "fp32" and dtype != "fp32"
    each = shapes.framework.kernels.gemm_per_expert
    ops = [replace(op, count=single) for op in linear(shapes, f"expert.{name}", MODULE, n, k, tokens=rows)]
    for phase, code in _PASSES.items():
        dims = {"groups": experts, "tokens_per_group": np.maximum(rows / experts, 1), "n": n, "k": k, "passes": code,
                "accumulate": accumulate and phase == WEIGHT_GRAD}  # fmt: skip
        ops.append(
            Op(f"experts.{name}", MODULE, GROUPED_LINEAR, phase, dims, count=several, dtype=dtype,
               recomputed_by=WHOLE_LAYER if phase == FORWARD else (), launches=experts if each else 1.0)
        )  # fmt: skip
    return ops


def _shared_sum(shapes: Shapes) -> list[Op]:
    """The output of the shared experts is added to that of the others; a learned gate scales it first."""
    elements = shapes.norm_tokens * shapes.model.hidden_size
    passes = (3 + 2 * shapes.model.shared_expert_gate) * shapes.element
    backward = 2 * shapes.model.shared_expert_gate * shapes.element
    return memory_bound("shared.sum", SHARED, "residual", elements, passes, backward)


def moe_saved(shapes: Shapes) -> list[Saved]:
    """Return the saved tensors: the experts' input, the activation's input and output, the probabilities; shared ones.

    Where the probabilities are applied after the experts, the weighted sum also keeps the experts' outputs.
    """
    model, e = shapes.model, shapes.element
    rows, width = expert_rows(shapes), model.moe_intermediate_size // shapes.keys.etp
    scores = shapes.norm_tokens * model.num_experts * (FP32 + 1)  # scores in fp32 and the map of chosen experts, a byte each
    saved = [
        Saved("router_scores", scores),
        Saved("expert_input", rows * model.hidden_size * shapes.input_element),
        Saved("expert_act_input", rows * width * e * (2 if model.gated_mlp else 1)),
        Saved("expert_act_output", rows * width * shapes.input_element),
        Saved("probabilities", rows * FP32),
    ]
    if not shapes.framework.kernels.probabilities_in_activation:
        saved.append(Saved("expert_output", sent_rows(shapes) * model.hidden_size * e))
    if model.shared_expert_intermediate_size:
        shared = mlp_saved(shapes, model.shared_expert_intermediate_size)
        saved += [replace(tensor, name=f"shared_{tensor.name}") for tensor in shared]
    return saved


def moe_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients alive when the experts' first GEMM runs backward: of its output and of its input."""
    model = shapes.model
    width = model.moe_intermediate_size // shapes.keys.etp
    working: np.ndarray = expert_rows(shapes) * shapes.element * ((2 if model.gated_mlp else 1) * width + model.hidden_size)
    return working


def moe_weights(shapes: Shapes) -> list[Weight]:
    """Return the router's weights, whole on every rank, those of the local experts, and those of the shared ones."""
    model = shapes.model
    h, experts = model.hidden_size, model.num_experts // shapes.keys.ep
    width = model.moe_intermediate_size // shapes.keys.etp
    ups = 2 if model.gated_mlp else 1
    bias = model.mlp_bias * (ups * width + h)
    router = model.num_experts * (h + model.router_bias) + model.shared_expert_gate * h
    shared = model.shared_expert_intermediate_size
    return [
        Weight("router", router * np.ones(len(shapes.keys))),
        Weight("experts.w13", experts * ups * width * h, EXPERTS, alike=experts),
        Weight("experts.w2", experts * width * h, EXPERTS, alike=experts),
        *([Weight("experts.bias", experts * bias, EXPERTS, alike=experts)] if model.mlp_bias else []),
        *(mlp_weights(shapes, shared, "shared.") if shared else []),
    ]
