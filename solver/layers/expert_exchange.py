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
from solver.layers.program import COMBINE, DISPATCH, DOWN_LINEAR, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Array, Op, message
from solver.layers.shapes import Shapes
from solver.spec.cluster import Placement

MODULE = "expert_exchange"
#: Dispatchers that hand the routers' probabilities on in fp32; else they have the type of activations, unless the router's is
#: stated (Megatron-Core's moe_utils.py, DeepEP's fused_a2a.py).
WIDE_PROBABILITIES = DISPATCHERS
#: Reads and writes of the rows that torchtitan sorts, forward and backward (models/moe/utils.py of 0.2.2). There: zeros are
#: joined on, then rows are indexed; gradients are added up in zeros. Back: put in place; the gradient gets that row again.
EAGER_SORTS = {"sort": (4.0, 4.0), "unsort": (2.0, 5.0)}


def dispatch_ops(shapes: Shapes) -> list[Op]:
    """Return the ops that bring tokens to their experts, and in backward the gradients back to the tokens."""
    return [*_permutation(shapes, "permute"), *_sends(shapes, DISPATCH), *_sorts(shapes, "sort")]


def combine_ops(shapes: Shapes) -> list[Op]:
    """Return the ops that bring the experts' outputs back and add them up for each token."""
    home = _weighted_sum(shapes) if weighs_in_fp32(shapes) else _permutation(shapes, "unpermute")
    return [*_sorts(shapes, "unsort"), *_sends(shapes, COMBINE), *home]


def _row(shapes: Shapes) -> int:
    """Bytes of one row."""
    return shapes.model.hidden_size * shapes.element


def _permutation(shapes: Shapes, name: str) -> list[Op]:
    """Tokens are read and their rows written, or the other way round; backward does the opposite.

    What DeepEP, hybrid-EP (its dispatch_with_permute, in a kernel after that of the dispatch) or an all-gather brings is spread
    to the local experts. Without fusion the copies go through an index kernel and, where rows are added, fp32 sums
    (moe_permute_fusion); hybrid-EP has kernels of its own.
    """
    run = shapes.run
    rows = sent_rows(shapes) if run.moe_dispatcher == "alltoall" else expert_rows(shapes)
    own_kernels = (run.moe_dispatcher == "hybridep") & ~stays_home(shapes)
    size = (arriving_rows(shapes) + rows) * _row(shapes) * np.where(run.moe_permute_fusion | own_kernels, 1.0, 2.0)
    return memory_bound(name, MODULE, "permute", size, 1.0, 1.0, gradient="permute_grad")


def stays_home(shapes: Shapes) -> np.ndarray:
    """Return whether a rank holds all experts whole, [keys]: nothing is exchanged, and any dispatcher sorts as all-to-alls do;
    Megatron-Core's flex dispatcher refuses that (token_dispatcher.py, MoEFlexTokenDispatcher)."""
    return np.asarray(shapes.keys.ep * shapes.keys.etp == 1)


def _sorts(shapes: Shapes, name: str) -> list[Op]:
    """What arrives is ordered by rank, and by expert within it: it is sorted by expert if the rank holds several.

    With ep 1, too: Megatron-Core's dispatch_postprocess sorts rows that no other rank sent all the same, and torchtitan's
    indices_padding_wrapper copies them to padded rows. Padded to a capacity every expert has as many rows, and what sorts them
    is a transposition (dispatch_postprocess with drop_and_pad).
    """
    if shapes.run.moe_dispatcher == "allgather":
        return []
    in_order = (shapes.run.moe_dispatcher != "alltoall") & ~stays_home(shapes)
    several = np.where((shapes.model.num_experts // shapes.keys.ep > 1) & ~in_order, 1.0, 0.0)
    size = expert_rows(shapes) * _row(shapes)
    if shapes.run.moe_capacity_factor:
        copies = memory_bound(name, MODULE, "copy", size, 2.0, 2.0)
    else:
        passes = EAGER_SORTS[name] if weighs_in_fp32(shapes) else (2.0, 2.0)
        copies = memory_bound(name, MODULE, "permute", size, *passes, gradient="permute_grad")
    return [replace(op, count=several) for op in copies]


def weighs_in_fp32(shapes: Shapes) -> bool:
    """Whether the framework weighs and adds the rows that all-to-alls bring back with torch's own kernels, in fp32."""
    return shapes.framework.kernels.weighs_in_fp32 and shapes.run.moe_dispatcher == "alltoall"


def _weighted_sum(shapes: Shapes) -> list[Op]:
    """What torchtitan does with the rows that come back: it puts them into zeros for all tokens of the tensor group, makes
    those fp32, and a batched GEMM weighs and adds each token's. Bytes of a value, forward: zeros 2, fp32 6, the GEMM 4;
    backward: its two gradients 4 each, 16 bits again 6 (models/moe/moe.py of 0.2.2).
    """
    whole = sent_rows(shapes) * shapes.keys.tp * shapes.model.hidden_size
    return [
        *memory_bound("unpermute", MODULE, "permute", sent_rows(shapes) * _row(shapes), 2.0, 2.0, gradient="permute_grad"),
        *memory_bound("weigh", MODULE, "copy", whole, 12.0, 14.0),
    ]


def waits_to_send(shapes: Shapes) -> np.ndarray:
    """Return whether the host waits for the numbers of rows before it sends them, which a capacity would make equal.

    Source: Megatron-Core's token_dispatcher.py, MoEAlltoAllTokenDispatcher._maybe_update_cuda_sync_point.
    """
    run, keys = shapes.run, shapes.keys
    there = run.moe_dispatcher == "alltoall" and not run.moe_capacity_factor
    return np.asarray((keys.ep * keys.etp > 1) & there)


def _side_messages(shapes: Shapes, phase: str) -> tuple[list[Op], list[Op]]:
    """Return what is sent before and after the rows: in forward the number of each expert's rows, gathered, and the rows'
    probabilities; in the other direction their gradients (token_dispatcher.py: preprocess, token_dispatch).

    An all-gather brings every token's probabilities of all experts, and one byte each that says whether it was chosen.
    """
    keys, groups, experts = shapes.keys, shapes.groups, shapes.model.num_experts
    again = WHOLE_LAYER if phase == FORWARD else ()
    several, gathering = keys.ep * keys.etp > 1, "all_gather" if phase == FORWARD else "reduce_scatter"

    def op(suffix: str, kind: str, size: Array, place: Placement, where: Array) -> Op:
        count = np.where(where, 1.0, 0.0)
        return Op(f"{DISPATCH}.{suffix}", MODULE, kind, phase, message(size, place), "ep", count, recomputed_by=again)

    if shapes.run.moe_dispatcher == "allgather":
        scores = shapes.norm_tokens * keys.ep * keys.etp * experts
        chosen = op("choices", "all_gather", 1.0 * scores, groups.experts, several)
        return [chosen] * (phase == FORWARD), [op("probabilities", gathering, scores * shapes.element, groups.experts, several)]
    counts = op("counts", "all_gather", 8.0 * keys.ep * keys.etp * experts, groups.experts, several)
    size = expert_rows(shapes) * shapes.element
    if not shapes.framework.kernels.probabilities_in_activation:  # they are applied at home
        return [counts] * (phase == FORWARD and not shapes.run.moe_capacity_factor), []
    scored = [
        op("probabilities", "all2all", size / keys.etp, groups.ep, keys.ep > 1),
        op("etp.probabilities", gathering, size, groups.etp, keys.etp > 1),
    ]
    return [counts] * (phase == FORWARD and not shapes.run.moe_capacity_factor), scored


def _sends(shapes: Shapes, what: str) -> list[Op]:
    """The exchange over the expert group, and over the expert-tensor group, in forward and mirrored in backward."""
    mirrored = COMBINE if what == DISPATCH else DISPATCH
    return [*_send(shapes, what, FORWARD, what), *_send(shapes, what, INPUT_GRAD, mirrored)]


def _send(shapes: Shapes, name: str, phase: str, direction: str) -> list[Op]:
    keys, groups, run = shapes.keys, shapes.groups, shapes.run
    again = WHOLE_LAYER if phase == FORWARD else ()
    under = _under(shapes, phase)

    def op(suffix: str, kind: str, dims: dict[str, Array], where: Array, variant: str = "") -> Op:
        count = np.where(where, 1.0, 0.0)
        return Op(f"{name}{suffix}", MODULE, kind, phase, dims, "ep", count, under, recomputed_by=again, variant=variant)

    gathering = "all_gather" if direction == DISPATCH else "reduce_scatter"
    collective = run.moe_dispatcher in ("alltoall", "allgather")
    before, after = _side_messages(shapes, phase) if collective and name == DISPATCH else ([], [])
    if run.moe_dispatcher == "alltoall":
        hottest = expert_rows(shapes) * _row(shapes)  # the exchange ends when the rank that gets most has it
        within = op(".etp", gathering, message(hottest, groups.etp), keys.etp > 1)
        rows = op("", "all2all", message(hottest / keys.etp, groups.ep), keys.ep > 1)
        if name != DISPATCH:
            return [rows, within]
        waits = waits_to_send(shapes) & (phase == FORWARD)
        return [
            *before,
            replace(rows, after_wait=waits & (keys.ep > 1)),
            replace(within, after_wait=waits & (keys.ep == 1)),
            *after,
        ]
    if run.moe_dispatcher == "allgather":
        whole = shapes.norm_tokens * keys.ep * keys.etp * _row(shapes)
        rows = op("", gathering, message(whole, groups.experts), keys.ep * keys.etp > 1)
        return [*before, rows, *after]
    if run.moe_dispatcher == "hybridep" and name == DISPATCH and phase == FORWARD:
        before = _routing_map(shapes)
    place = groups.experts  # DeepEP's group is that of experts and their parts together
    tokens = shapes.norm_tokens * np.where(keys.ep > 1, run.moe_imbalance, 1.0)  # what the rank that gets most receives
    dims = {"tokens": tokens, "row_bytes": _row(shapes), "intra": place.intra, "inter": place.inter, **_choices(shapes)}
    return [*before, op("", direction, dims, keys.ep * keys.etp > 1, run.moe_dispatcher)]


def _routing_map(shapes: Shapes) -> list[Op]:
    """What hybrid-EP needs before it dispatches: one byte for each token and expert of the group, gathered, and a kernel that
    reads it. The backward pass uses what that found.

    Source: Megatron-Core's fused_a2a.py (HybridEPDispatch, which passes no handle) and DeepEP's hybrid_ep_buffer.py
    (dispatch_with_permute, metadata_preprocessing), as read. It is why whole calls of a published
    dispatch take 0.24, 0.47 and 0.97 ms longer than kernel and copies on 16, 32 and 64 H100, whose maps have 8, 34 and 134 MB.
    """
    keys, experts = shapes.keys, shapes.groups.experts
    several = keys.ep * keys.etp > 1
    size = 1.0 * shapes.norm_tokens * keys.ep * keys.etp * shapes.model.num_experts * keys.etp
    count = np.where(several, 1.0, 0.0)
    gathered = Op(
        f"{DISPATCH}.routing", MODULE, "all_gather", FORWARD, message(size, experts), "ep", count, recomputed_by=WHOLE_LAYER
    )
    scan = memory_bound(f"{DISPATCH}.scan", MODULE, "copy", size, 1.0, 0.0)
    return [gathered, *(replace(op, stream="ep", count=count) for op in scan)]


def _choices(shapes: Shapes) -> dict[str, Array]:
    """How many experts a token goes to, of how many, and of which groups its router chooses some; 0: any.

    Experts that follow each other are on as few ranks as hold so many, which are then what is chosen, of neighbouring nodes.
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


def _under(shapes: Shapes, phase: str) -> tuple[str, ...]:
    """The compute that the exchange overlaps with: the shared experts, where the framework runs them beside it."""
    model = shapes.model
    if not (shapes.run.moe_shared_expert_overlap and model.shared_expert_intermediate_size):
        return ()
    names = (*shapes.up_linears, DOWN_LINEAR)
    passes = (FORWARD,) if phase == FORWARD else (INPUT_GRAD, WEIGHT_GRAD)
    return tuple(f"shared.{name}.{which}" for which in passes for name in names)
