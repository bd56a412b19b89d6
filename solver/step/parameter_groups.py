"""Parameters of the fullest stage, by the group of ranks that holds copies of them, and the layers of the stages.

Three groups of ranks hold copies of a parameter: those of the weights that ``wp`` shards (ISP: world / pp / wp ranks that are
wp apart), those of experts (world / pp / ep / etp ranks that are ep * etp apart) and those of all other parameters (dp * cp
ranks that are tp apart). Without ISP the first and the last are the same group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from solver.layers.program import ADAPTERS, EXPERTS, LINEARS, OTHERS
from solver.schedule.stages import (
    StageLayers,
    stage_layers,
    stage_layers_by_cost,
    stage_layers_counting_ends,
    stage_layers_last_first,
    v_shaped_stages,
)
from solver.spec.choices import TpMode
from solver.spec.model_size import mlp_matrices
from solver.spec.strategy import expert_replicas, replicas
from solver.step.ddp_buckets import tensors_in_order
from solver.step.distinct import distinct
from solver.step.layer_table import EstimatedProgram, LayerTable, PricedSplits
from solver.step.layouts import Splits
from solver.step.problem import Problem
from solver.step.stage_kinds import StageKinds, over_kinds, stage_kinds


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the same group of ranks holds.

    elements: on one rank, shape [splits]. quantised: of these, those of linears that are quantised where the run's are. size,
    stride: shape of that group of ranks.
    """

    elements: np.ndarray
    quantised: np.ndarray
    size: np.ndarray
    stride: np.ndarray


def parameter_groups(priced: PricedSplits) -> dict[str, ParameterGroup]:
    """Return the parameters of the fullest stage by group (PARAMETER_GROUPS; experts only where the model has them).

    Embedding and head are with the others.
    """
    problem, splits = priced.problem, priced.splits
    stages = stages_of(problem, splits)
    of_ranks = rank_groups(problem, splits)
    every = range(len(stages.counts))
    held = {name: np.array([elements_of(priced, stages, at, name) for at in every]) for name in of_ranks}
    narrow = {name: np.array([quantised_elements(priced, stages, at, name) for at in every]) for name in of_ranks}
    fullest = (np.sum(list(held.values()), axis=0).argmax(axis=0), np.arange(len(splits)))
    return {name: ParameterGroup(held[name][fullest], narrow[name][fullest], *of) for name, of in of_ranks.items()}


def elements_of(priced: PricedSplits, stages: StageKinds, stage: int, name: str) -> np.ndarray:
    """Return the parameters of a group that one rank of a stage holds, [splits]: of its layers, and of its ends embedding and
    head, or what multi-token prediction has beside them."""
    at_head = stages.has_head[stage] * priced.table.head.parameters_of[name][priced.key]
    end = end_elements(priced, stages, stage) if name == OTHERS else at_head
    return over_kinds(stages.counts[stage], of_layers(priced.table, priced.key, name)) + end


def quantised_elements(priced: PricedSplits, stages: StageKinds, stage: int, name: str) -> np.ndarray:
    """Return those of ``elements_of`` that are of linears which are quantised where the run's are, [splits]; the layer of
    multi-token prediction is of the last kind."""
    problem, table, key = priced.problem, priced.table, priced.key
    if name == OTHERS or problem.weight_recipe is None:  # which alone would ask for them
        return np.zeros(len(key))
    quantised = np.array([[kind.quantised] for kind in problem.kinds.kinds])
    predicting = table.head.parameters_of[name][key] * quantised[problem.kinds.of_layer[-1]] * stages.has_head[stage]
    return over_kinds(stages.counts[stage] * quantised, of_layers(table, key, name)) + predicting


def of_layers(table: LayerTable, key: np.ndarray, name: str) -> np.ndarray:
    """Return the parameters of a group in a layer of each kind on one rank, [kinds, splits]."""
    return np.array([part.parameters_of[name][key] for part in table.layers])


def trained_elements(problem: Problem, part: EstimatedProgram, key: np.ndarray) -> np.ndarray:
    """Return the parameters of a layer on one rank that are trained, [splits]."""
    return part.parameters_of[ADAPTERS][key] if problem.is_frozen(LINEARS) else part.parameters[key]


def end_elements(priced: PricedSplits, stages: StageKinds, stage: int) -> np.ndarray:
    """Return the parameters of embedding, head and final norm that one rank of a stage holds, shape [splits].

    Under a V-shaped schedule the first stage holds both; with multi-token prediction the last one embeds tokens again.
    """
    problem, table, key = priced.problem, priced.table, priced.key
    has_head = stages.has_head[stage]
    copied = has_head * (problem.model.num_nextn_predict_layers > 0)
    embedding = table.embedding.parameters[key] * np.maximum(stages.has_embedding[stage], copied)
    head = table.head.parameters_of[OTHERS][key] * has_head
    return joined_ends(problem, embedding, head)


def share_of_first_layer(priced: PricedSplits, stages: StageKinds, stage: int, names: Iterable[str]) -> np.ndarray:
    """Return the share of a stage's parameters, of the groups ``names``, whose gradients come last: those of its first layer
    and of the embedding (of a tied one the head's are there before); [splits]."""
    every = sum((elements_of(priced, stages, stage, name) for name in names), np.zeros(len(priced.key)))
    ends = end_elements(priced, stages, stage)
    alone = stages.has_embedding[stage] * (not priced.problem.model.tie_word_embeddings)
    first = (every - ends) / np.maximum(stages.counts[stage].sum(axis=0), 1) + alone * priced.table.embedding.parameters[
        priced.key
    ]
    return np.asarray(first / np.maximum(every, 1.0))


def joined_ends(problem: Problem, embedding: np.ndarray, head: np.ndarray) -> np.ndarray:
    """Return the parameters of embedding and head together: tied ones share the table."""
    return np.maximum(embedding, head) if problem.model.tie_word_embeddings else embedding + head


def rank_groups(problem: Problem, splits: Splits) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return (size, stride) of the groups of ranks that hold copies of a parameter, by group of parameters; [splits] each."""
    isp, copies = splits.mode == TpMode.ISP, splits.dp * splits.cp
    of_linears = replicas(isp, splits.tp, splits.cp, splits.dp, splits.wp)
    groups = {LINEARS: (of_linears, np.where(isp, splits.wp, splits.tp)), OTHERS: (copies, splits.tp)}
    if problem.model.is_mixture_of_experts:
        of_experts = expert_replicas(splits.tp, splits.cp, splits.dp, splits.ep, splits.etp)
        groups[EXPERTS] = (of_experts, splits.ep * splits.etp)
    if problem.run.lora_rank:
        groups[ADAPTERS] = groups[OTHERS]
    return groups


def stages_of(problem: Problem, splits: Splits, every: bool = False) -> StageKinds:
    """Return the layers of each kind that the stages hold; every: as in stage_kinds, or where they recompute different ones."""
    ends = splits.account_for_embedding_in_pipeline_split, splits.account_for_loss_in_pipeline_split
    kinds, columns = problem.kinds, (splits.pp, splits.vpp, *ends, splits.v_shaped * 1)
    every = every or bool(problem.run.recompute_stage_layers)
    covers = not problem.framework.pipeline.keeps_messages  # else stages that receive activations may be fuller
    return stage_kinds(kinds.of_layer, len(kinds.kinds), stage_sizes(problem, splits), columns, every, problem.chunks, covers)


def stage_sizes(problem: Problem, splits: Splits) -> StageLayers:
    """Return the layers of the stages as the split and the framework assign them."""
    layers, plain = problem.model.num_hidden_layers, stage_layers(problem.model.num_hidden_layers, *splits.stage_columns)
    if splits.v_shaped.any():
        plain = v_shaped_stages(plain, splits.v_shaped, splits.account_for_loss_in_pipeline_split)
    how = problem.framework.pipeline.assignment
    if how == "even":
        return plain
    if how == "cost":
        assigned = stage_layers_by_cost(layers, splits.pp, _head_cost(problem))
    else:
        assigned = (stage_layers_last_first if how == "last" else stage_layers_counting_ends)(layers, splits.pp)
    stated = np.any(splits.stage_columns[1:], axis=0) | splits.v_shaped
    ends = {end: np.where(stated, getattr(plain, end), getattr(assigned, end)) for end in ("first", "middle", "last")}
    return replace(assigned, **ends)


def _head_cost(problem: Problem) -> float:
    """Return the multiplications of the head in those of a layer's linears (nanotron's get_block_compute_costs)."""
    model = problem.model
    attention = 4 * model.num_attention_heads * model.head_dim
    return model.vocab_size / (attention + mlp_matrices(model) * model.intermediate_size)


def shares_vocabulary(problem: Problem, splits: Splits) -> np.ndarray:
    """Whether all data-parallel ranks share the states of embedding and head, under ZeRO-0 too; bool [splits]."""
    return problem.framework.shares_vocabulary(splits.mode == TpMode.ISP)


def shard_ranks(problem: Problem, splits: Splits) -> dict[str, np.ndarray]:
    """Return the ranks over which ZeRO shards one copy, by group of parameters: zero_shard_size, if the group has that many.

    Where the framework cuts the experts' states into as many copies as the others', their shards are as much narrower as
    their group is (Megatron-Core's parallel_state.py: intra_partial_expert_data_parallel_size).
    """
    sizes = {name: size for name, (size, _) in rank_groups(problem, splits).items()}
    shards = {name: np.minimum(splits.zero_shard_size, size) for name, size in sizes.items()}
    shards[OTHERS] = np.where(shares_vocabulary(problem, splits), sizes[OTHERS], shards[OTHERS])
    if EXPERTS in shards and problem.framework.can_run.shards_experts_alike:
        copies = splits.dp * splits.cp // splits.zero_shard_size
        shards[EXPERTS] = np.where(splits.zero_shard_size > 1, np.maximum(sizes[EXPERTS] // copies, 1), 1)
    return shards


def partitions(
    problem: Problem, splits: Splits, held: Mapping[str, np.ndarray], shards: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the parameters of each group that the fullest ZeRO rank updates, of those ``held`` by group; shape [splits] each.

    Where whole tensors are assigned to ranks, the fullest rank has at least one whole vocabulary matrix (of the group of
    others), which is the largest tensor of most models, and less of all else, unless embedding and head are assigned separately
    (_partition_param_list of InternEvo's hybrid_zero_optim.py). Where parameters are gathered beside the forward pass ranks are
    filled in the order of the model.
    """
    shares = {name: elements / shards[name] for name, elements in held.items()}
    if problem.framework.data_parallel.partitions_whole_tensors and OTHERS in held:
        matrix = problem.model.vocab_size * problem.model.hidden_size / splits.tp
        rest = sum((share for name, share in shares.items() if name != OTHERS), np.zeros(len(splits)))
        apart = shares_vocabulary(problem, splits)
        most = fullest_in_order(problem, splits, shards[OTHERS]) if problem.run.overlap_param_gather else matrix
        room = np.where(apart, matrix, most - rest)
        shares[OTHERS] = np.maximum(shares[OTHERS], np.minimum(room, held[OTHERS]))
    return shares


def fullest_in_order(problem: Problem, splits: Splits, ranks: np.ndarray) -> np.ndarray:
    """Return the parameters of the rank with most of ``ranks`` that are filled one after the other, [splits].

    A rank is full beyond 1.01 times an even share; the tensor that exceeds it goes to the next one, which does not count it.
    Source: InternEvo's core/parallel/comm/zero.py (ParamAsyncBcastHandler).
    """
    kernels, first, inverse = problem.framework.kernels, *distinct((splits.tp, splits.pp, ranks))
    found = [
        _filled(tuple(tensors_in_order(problem.model, kernels.fused_qkv, kernels.fused_gate_up, *sizes)), count)
        for *sizes, count in zip(splits.tp[first].tolist(), splits.pp[first].tolist(), ranks[first].tolist(), strict=True)
    ]
    return np.array(found, dtype=float)[inverse]


@lru_cache(maxsize=4096)
def _filled(tensors: tuple[int, ...], ranks: int) -> int:
    """Return what the fullest rank of fullest_in_order holds."""
    even, held, counted, rank = sum(tensors) // ranks, [0] * ranks, 0, 0
    for size in tensors:
        counted += size
        if counted > 1.01 * even and rank < ranks - 1:
            rank, counted = rank + 1, 0
        held[rank] += size
    return max(held)
