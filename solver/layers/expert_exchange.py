"""The exchange of tokens between the ranks of an expert group: permutation, dispatch and combine, by each kind of dispatcher.

alltoall, allgather: NCCL's collectives between permutations, as Megatron-Core's token_dispatcher.py; an all-gather brings all
tokens to all ranks and takes as long however they are routed. deepep, hybridep: kernels that send a token once to each rank
(and once to each node) that it goes to (github.com/deepseek-ai/DeepEP).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from predictor.network.expert_exchange import DISPATCHERS
from solver.layers.expert_rows import arriving_rows, blocks_of_token, expert_rows, reached_ranks, router_choice, sent_rows
from solver.layers.ops import WHOLE_LAYER, memory_bound
from solver.layers.program import COMBINE, DISPATCH, DOWN_LINEAR, EXCHANGE, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Array, Op, message
from solver.layers.shapes import Shapes
from solver.spec.cluster import Placement

#: Dispatchers that hand the routers' probabilities on in fp32; else they have the type of activations, unless the router's is
#: stated (Megatron-Core's moe_utils.py, DeepEP's fused_a2a.py).
WIDE_PROBABILITIES = DISPATCHERS
#: Reads and writes of the rows that torchtitan sorts, forward and backward (models/moe/utils.py of 0.2.2). There: zeros are
#: joined on, then rows are indexed; gradients are added up in zeros. Back: put in place; the gradient gets that row again.
EAGER_SORTS = {"sort": (4.0, 4.0), "unsort": (2.0, 5.0)}


def dispatch_ops(shapes: Shapes) -> list[Op]:
    """Return the ops that bring tokens to their experts, and in backward the gradients back to the tokens."""
    return [*_permutation(shapes, "permute"), *_sends(shapes, DISPATCH), *_chosen_map(shapes), *_sorts(shapes, "sort")]


#: Small kernels that turn DeepEP's indices into a map of rows by local expert: zeros, a comparison, selections by mask and a
#: repetition, for which the host waits, two scatters by index and a cast; backward a gather, its zeros and their scatter.
MAP_KERNELS = {FORWARD: 20.0, INPUT_GRAD: 8.0}


def _chosen_map(shapes: Shapes) -> list[Op]:
    """Return those kernels, which write an 8-byte map and fp32 probabilities of each arrived token and local expert.

    Source: Megatron-Core's token_dispatcher.py, _indices_to_multihot; with its experimental features one kernel does it, which
    Megatron-Bridge turns on for latent attention.
    """
    kernels, model = shapes.framework.kernels, shapes.model
    fused = kernels.fused_latent_rope and model.has_latent_attention
    if shapes.run.moe_dispatcher != "deepep" or not kernels.transformer_engine or fused:
        return []
    local = np.maximum(model.num_experts // shapes.keys.ep, 1)
    ops = memory_bound("permute.map", EXCHANGE, "residual", arriving_rows(shapes) * local / MAP_KERNELS[FORWARD], 24.0, 24.0)
    away = np.where(holds_all_experts(shapes), 0.0, 1.0)
    return [replace(op, count=away * MAP_KERNELS[op.phase], launches=MAP_KERNELS[op.phase]) for op in ops]


def combine_ops(shapes: Shapes) -> list[Op]:
    """Return the ops that bring the experts' outputs back and add them up for each token."""
    unpermuted = _weighted_sum(shapes) if combines_in_fp32(shapes) else _permutation(shapes, "unpermute")
    return [*_sorts(shapes, "unsort"), *_sends(shapes, COMBINE), *unpermuted]


def _row(shapes: Shapes) -> int:
    """Return the bytes of one row: a token's hidden vector."""
    return shapes.model.hidden_size * shapes.element


def _permutation(shapes: Shapes, name: str) -> list[Op]:
    """Return the permutation of tokens to rows, or of rows to tokens; backward it is the other one.

    Rows that DeepEP, hybrid-EP (its dispatch_with_permute, in a kernel after that of the dispatch) or an all-gather deliver are
    copied to each of the local experts that they go to. Without moe_permute_fusion the copies go through an index kernel and,
    where rows are added, fp32 sums; hybrid-EP has fused kernels in any case.
    """
    run = shapes.run
    rows = sent_rows(shapes) if run.moe_dispatcher == "alltoall" else expert_rows(shapes)
    hybridep = (run.moe_dispatcher == "hybridep") & ~holds_all_experts(shapes)
    size = (arriving_rows(shapes) + rows) * _row(shapes) * np.where(run.moe_permute_fusion | hybridep, 1.0, 2.0)
    return memory_bound(name, EXCHANGE, "permute", size, 1.0, 1.0, gradient="permute_grad")


def holds_all_experts(shapes: Shapes) -> np.ndarray:
    """Return whether a rank holds all experts unsplit: bool [keys].

    Nothing is exchanged then, and any dispatcher sorts as all-to-alls do; Megatron-Core's flex dispatcher refuses that
    (token_dispatcher.py, MoEFlexTokenDispatcher).
    """
    return np.asarray(shapes.keys.ep * shapes.keys.etp == 1)


def _sorts(shapes: Shapes, name: str) -> list[Op]:
    """Return the sort of received rows, which are ordered by rank and then by expert, by expert, if the rank holds several.

    With ep 1, too: Megatron-Core's dispatch_postprocess sorts rows that no other rank sent, and torchtitan's
    indices_padding_wrapper copies them to padded rows. Padded to a capacity, every expert has equally many rows, which a
    transposition sorts (dispatch_postprocess with drop_and_pad).
    """
    if shapes.run.moe_dispatcher == "allgather":
        return []
    in_order = (shapes.run.moe_dispatcher != "alltoall") & ~holds_all_experts(shapes)
    several = np.where((shapes.model.num_experts // shapes.keys.ep > 1) & ~in_order, 1.0, 0.0)
    size = expert_rows(shapes) * _row(shapes)
    if shapes.run.moe_capacity_factor:
        copies = memory_bound(name, EXCHANGE, "copy", size, 2.0, 2.0)
    else:
        passes = EAGER_SORTS[name] if combines_in_fp32(shapes) else (2.0, 2.0)
        copies = memory_bound(name, EXCHANGE, "permute", size, *passes, gradient="permute_grad")
    return [replace(op, count=several) for op in copies]


def combines_in_fp32(shapes: Shapes) -> bool:
    """Whether torch's own kernels weight and add the rows that all-to-alls return, in fp32."""
    return shapes.framework.kernels.combines_in_fp32 and shapes.run.moe_dispatcher == "alltoall"


def _weighted_sum(shapes: Shapes) -> list[Op]:
    """Return torchtitan's weighted sum of returned rows: they are scattered into zeros for all tokens of the tensor group, cast
    to fp32, and a batched GEMM weights and adds those of each token. Bytes of a value, forward: zeros 2, the cast 6, the GEMM
    4; backward: its two gradients 4 each, the cast to 16 bits 6 (models/moe/moe.py of 0.2.2).
    """
    whole = sent_rows(shapes) * shapes.keys.tp * shapes.model.hidden_size
    return [
        *memory_bound("unpermute", EXCHANGE, "permute", sent_rows(shapes) * _row(shapes), 2.0, 2.0, gradient="permute_grad"),
        *memory_bound("weigh", EXCHANGE, "copy", whole, 12.0, 14.0),
    ]


def syncs_before_dispatch(shapes: Shapes) -> np.ndarray:
    """Return whether the host synchronises to read the numbers of rows before it sends them, bool [keys]; with a capacity they
    are equal.

    Source: Megatron-Core's token_dispatcher.py, MoEAlltoAllTokenDispatcher._maybe_update_cuda_sync_point.
    """
    run, keys = shapes.run, shapes.keys
    counts_rows = run.moe_dispatcher == "alltoall" and not run.moe_capacity_factor
    return np.asarray((keys.ep * keys.etp > 1) & counts_rows)


def _side_messages(shapes: Shapes, phase: str) -> tuple[list[Op], list[Op]]:
    """Return what is sent before and after the rows: forward the number of each expert's rows, all-gathered, and the rows'
    probabilities; backward the probabilities' gradients (token_dispatcher.py: preprocess, token_dispatch).

    With the all-gather dispatcher these are every token's probabilities of all experts, and a byte each that flags the chosen.
    """
    keys, groups, experts = shapes.keys, shapes.groups, shapes.model.num_experts
    again = WHOLE_LAYER if phase == FORWARD else ()
    several, gathering = keys.ep * keys.etp > 1, "all_gather" if phase == FORWARD else "reduce_scatter"

    def op(suffix: str, kind: str, size: Array, place: Placement, where: Array) -> Op:
        count = np.where(where, 1.0, 0.0)
        return Op(f"{DISPATCH}.{suffix}", EXCHANGE, kind, phase, message(size, place), "ep", count, recomputed_by=again)

    if shapes.run.moe_dispatcher == "allgather":
        scores = shapes.norm_tokens * keys.ep * keys.etp * experts
        chosen = op("choices", "all_gather", 1.0 * scores, groups.experts, several)
        return [chosen] * (phase == FORWARD), [op("probabilities", gathering, scores * shapes.element, groups.experts, several)]
    counts = op("counts", "all_gather", 8.0 * keys.ep * keys.etp * experts, groups.experts, several)
    size = expert_rows(shapes) * shapes.element
    if not shapes.framework.kernels.probabilities_in_activation:  # the token's own rank applies them
        return [counts] * (phase == FORWARD and not shapes.run.moe_capacity_factor), []
    scored = [
        op("probabilities", "all2all", size / keys.etp, groups.ep, keys.ep > 1),
        op("etp.probabilities", gathering, size, groups.etp, keys.etp > 1),
    ]
    return [counts] * (phase == FORWARD and not shapes.run.moe_capacity_factor), scored


def _sends(shapes: Shapes, what: str) -> list[Op]:
    """Return the exchange over the expert group and the expert-tensor group, forward and mirrored in backward."""
    mirrored = COMBINE if what == DISPATCH else DISPATCH
    return [*_send(shapes, what, FORWARD, what), *_send(shapes, what, INPUT_GRAD, mirrored)]


def _send(shapes: Shapes, name: str, phase: str, direction: str) -> list[Op]:
    keys, groups, run = shapes.keys, shapes.groups, shapes.run
    again = WHOLE_LAYER if phase == FORWARD else ()
    overlapped = _overlapped_compute(shapes, phase)

    def op(suffix: str, kind: str, dims: dict[str, Array], where: Array, variant: str = "") -> Op:
        count = np.where(where, 1.0, 0.0)
        return Op(f"{name}{suffix}", EXCHANGE, kind, phase, dims, "ep", count, overlapped, recomputed_by=again, variant=variant)

    gathering = "all_gather" if direction == DISPATCH else "reduce_scatter"
    collective = run.moe_dispatcher in ("alltoall", "allgather")
    before, after = _side_messages(shapes, phase) if collective and name == DISPATCH else ([], [])
    if run.moe_dispatcher == "alltoall":
        received = expert_rows(shapes) * _row(shapes)  # by the rank with most rows, for which the exchange waits
        within = op(".etp", gathering, message(received, groups.etp), keys.etp > 1)
        rows = op("", "all2all", message(received / keys.etp, groups.ep), keys.ep > 1)
        if name != DISPATCH:
            return [rows, within]
        syncs = syncs_before_dispatch(shapes) & (phase == FORWARD)
        return [
            *before,
            replace(rows, after_host_sync=syncs & (keys.ep > 1)),
            replace(within, after_host_sync=syncs & (keys.ep == 1)),
            *after,
        ]
    if run.moe_dispatcher == "allgather":
        whole = shapes.norm_tokens * keys.ep * keys.etp * _row(shapes)
        rows = op("", gathering, message(whole, groups.experts), keys.ep * keys.etp > 1)
        return [*before, rows, *after]
    if run.moe_dispatcher == "hybridep" and name == DISPATCH and phase == FORWARD:
        before = _routing_map(shapes)
    place = groups.experts  # DeepEP's group spans ep and etp
    tokens = shapes.norm_tokens * np.where(keys.ep > 1, run.moe_imbalance, 1.0)  # received by the rank with most rows
    dims = {"tokens": tokens, "row_bytes": _row(shapes), "intra": place.intra, "inter": place.inter, **_choices(shapes)}
    return [*before, op("", direction, dims, keys.ep * keys.etp > 1, run.moe_dispatcher)]


def _routing_map(shapes: Shapes) -> list[Op]:
    """Return what precedes hybrid-EP's dispatch: the all-gather of the routing map, and the kernel that scans it.

    The map has a byte for each token and expert of the group. The backward pass uses the result of the scan.

    Source: Megatron-Core's fused_a2a.py (HybridEPDispatch, which passes no handle) and DeepEP's hybrid_ep_buffer.py
    (dispatch_with_permute, metadata_preprocessing), as read. It explains why published calls of the dispatch take 0.24, 0.47
    and 0.97 ms longer than its kernel and copies on 16, 32 and 64 H100, whose maps have 8, 34 and 134 MB.
    """
    keys, experts = shapes.keys, shapes.groups.experts
    several = keys.ep * keys.etp > 1
    size = 1.0 * shapes.norm_tokens * keys.ep * keys.etp * shapes.model.num_experts * keys.etp
    count = np.where(several, 1.0, 0.0)
    gathered = Op(
        f"{DISPATCH}.routing", EXCHANGE, "all_gather", FORWARD, message(size, experts), "ep", count, recomputed_by=WHOLE_LAYER
    )
    scan = memory_bound(f"{DISPATCH}.scan", EXCHANGE, "copy", size, 1.0, 0.0)
    return [gathered, *(replace(op, stream="ep", count=count) for op in scan)]


def _choices(shapes: Shapes) -> dict[str, Array]:
    """Return the dims of a dispatch that describe routing: experts of a token, all experts, groups, chosen groups (0: any).

    Consecutive experts are on as few ranks as hold them, so that ranks are chosen instead of experts, of neighbouring nodes.
    """
    model, keys, nodes = shapes.model, shapes.keys, shapes.groups.experts.inter
    if shapes.run.moe_routing == "consecutive":
        ranks = reached_ranks(shapes) * keys.etp
        return {"top_k": ranks, "experts": keys.ep * keys.etp, "groups": nodes, "chosen": blocks_of_token(shapes, nodes)}
    groups, chosen = router_choice(model)
    return {
        "top_k": model.num_experts_per_tok * keys.etp,
        "experts": model.num_experts * keys.etp,
        "groups": groups * keys.etp,
        "chosen": chosen * keys.etp,
    }


def _overlapped_compute(shapes: Shapes, phase: str) -> tuple[str, ...]:
    """Return the compute that the exchange overlaps with: the shared experts, where the run overlaps them."""
    model = shapes.model
    if not (shapes.run.moe_shared_expert_overlap and model.shared_expert_intermediate_size):
        return ()
    names = (*shapes.up_linears, DOWN_LINEAR)
    passes = (FORWARD,) if phase == FORWARD else (INPUT_GRAD, WEIGHT_GRAD)
    return tuple(f"shared.{name}.{which}" for which in passes for name in names)
