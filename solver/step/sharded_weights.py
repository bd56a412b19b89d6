"""ZeRO-3 (FSDP): weights that are all-gathered for each layer and pass, and gradients that are reduce-scattered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from solver.layers.program import EXPERTS, LINEARS, MEMORY_BOUND, ONCE_PER_STEP, OTHERS, Op
from solver.spec.choices import Recompute
from solver.spec.recipes import FP32, HALF
from solver.step.data_parallel_ops import copy_ops, gather_ops, group_ops
from solver.step.layer_table import EstimatedProgram, PricedSplits
from solver.step.layouts import Layouts, Splits
from solver.step.message_counts import linear_tensors
from solver.step.op_estimates import OpEstimates
from solver.step.parameter_groups import ParameterGroup, joined_ends, shard_ranks, trained_elements
from solver.step.problem import Problem
from solver.step.side_stream import SideStreamWork, host_work, side_stream_work

_PREDICTING = "predicting"  #: the layers of multi-token prediction, units behind the last layer
#: How the names of units begin whose weights are gathered and whose gradients are reduced at once.
UNITS = ("layer", "root", "head", _PREDICTING)
_ACROSS = "across"  #: messages between groups of shards that are sent once a step


class Neighbours(NamedTuple):
    """The kinds of the layers before and after a layer, and the share of the layers of its kind that stand between these."""

    before: int
    after: int
    share: float


def neighbours_of(of_layer: np.ndarray, kinds: int) -> tuple[tuple[Neighbours, ...], ...]:
    """Return between which kinds of layers those of each kind stand; of_layer: kind of each layer. At an end of the model a
    layer of its own kind stands for the one that is not there."""
    before, after = np.append(of_layer[:1], of_layer[:-1]), np.append(of_layer[1:], of_layer[-1:])
    found = []
    for kind in range(kinds):
        pairs, counts = np.unique(np.stack([before, after])[:, of_layer == kind], axis=1, return_counts=True)
        shares = (counts / counts.sum()).tolist()
        found.append(
            tuple(Neighbours(first, last, share) for (first, last), share in zip(pairs.T.tolist(), shares, strict=True))
        )
    return tuple(found)


@dataclass(frozen=True)
class ShardedWeights:
    """Seconds per micro batch of what ZeRO-3 sends; S: splits."""

    gather: tuple[SideStreamWork, ...]  #: weights of a layer of each kind, [S] each
    scatter: tuple[SideStreamWork, ...]  #: gradients of a layer of each kind, [S] each
    neighbours: tuple[tuple[Neighbours, ...], ...]  #: of the layers of each kind
    root: np.ndarray  #: both of embedding and head, exposed, [S]
    head: tuple[SideStreamWork, SideStreamWork] | None  #: both of a head that is gathered as a layer is, apart from the root
    predicting: tuple[SideStreamWork, SideStreamWork] | None  #: both of the layers of multi-token prediction
    by_tensor: bool  #: as DataParallel.zero3_by_tensor
    regathered: float  #: share of the weights that is then gathered again after recomputation
    reducing: np.ndarray  #: share of the micro batches that reduce gradients, [S]
    last_kind: int  #: kind of the last layer
    gathers_overlap: bool  #: weights are gathered beside compute
    reduces_overlap: bool  #: gradients are reduced beside compute


def sharded_weight_ops(priced: PricedSplits, groups: Mapping[str, ParameterGroup]) -> list[Op]:
    """Return the ZeRO-3 messages of a layer of each kind (layer0.*, ...) and of embedding, head and final norm (root.*).

    A head that is a unit of its own has messages of its own (head.*), and so have layers of multi-token prediction
    (predicting.*).
    """
    problem, splits = priced.problem, priced.splits
    sizes, sync, ops = problem.element_bytes, problem.framework.data_parallel, list[Op]()
    shards = shard_ranks(problem, splits)
    for name, elements, gathered, trained, of in _units(priced):
        group, shard = groups[of], shards[of]
        gathers, reductions = messages(problem, name, gathered / sizes.activation, trained)
        ops += gather_ops(f"{name}.all_gather", "all_gather", gathered, group, shard, gathers, problem)
        reduced = group_ops(problem, name, trained * sizes.gradient, group, shard, 0.0, reductions)
        ops += [replace(op, name=_of_reduction(problem, name, op), count=op.count * (trained > 0)) for op in reduced]
        ops += copy_ops(f"{name}.all_gather", gathered * (sync.all_gather_copies + sync.sharded_gather_copies), group)
        ops += copy_ops(f"{name}.all_gather", _shard_casts(problem, elements, gathered) / shard, group)
        copied = sizes.gradient * sync.reduce_scatter_copies + _before_reducing(problem)
        if sync.joins_before_cast and sizes.gradient > sizes.activation:
            copied -= 2.0 * (sizes.gradient - sizes.activation)
            cast = copy_ops(f"{name}.reduce_scatter", trained * (sizes.activation + sizes.gradient), group)
            ops += [replace(op, variant="cast") for op in cast]
        ops += copy_ops(f"{name}.reduce_scatter", trained * copied, group)
        if of == EXPERTS and sync.wraps_lone_experts:
            ops += _lone_casts(name, elements, trained, group)
    return ops


def _shard_casts(problem: Problem, elements: np.ndarray, gathered: np.ndarray) -> np.ndarray:
    """Return the bytes that casts of ``elements`` weights move before they are gathered as ``gathered`` bytes: those that are
    quantised are read twice, since their largest value must be known first (torchao's fsdp_pre_all_gather), and copied into
    the message too."""
    sync, wide, narrow = problem.framework.data_parallel, problem.element_bytes.activation, problem.fp8_shards
    if not (narrow and sync.shard_cast_bytes):
        return gathered / wide * sync.shard_cast_bytes
    quantised = (elements * wide - gathered) / (wide - narrow)
    return (elements - quantised) * sync.shard_cast_bytes + quantised * (2.0 * FP32 + 3.0 * narrow)


def _of_reduction(problem: Problem, unit: str, op: Op) -> str:
    """Return the name of a message of a unit's gradients: Megatron-FSDP sums those of hybrid sharding over the groups of shards
    once a step, others with every micro batch (megatron_fsdp.py, outer_fsdp_group_grad_reduce)."""
    once = problem.framework.uses_megatron_fsdp and op.kind == "all_reduce"
    return f"{unit}.{_ACROSS if once else 'reduce_scatter'}"


def _before_reducing(problem: Problem) -> float:
    """Return the bytes per parameter that Megatron-FSDP moves before it reduces gradients: 16-bit ones are divided in place,
    and those that no GEMM adds are copied to the buffer (param_and_grad_buffer.py, gradient_reduce_preprocessing;
    megatron_fsdp.py, _grad_acc)."""
    sizes = problem.element_bytes
    if not problem.framework.uses_megatron_fsdp:
        return 0.0
    divided = 2.0 * HALF * (sizes.gradient == HALF)
    return divided + (0.0 if problem.fused_accumulation else sizes.activation + sizes.gradient)


def _lone_casts(name: str, weights: np.ndarray, trained: np.ndarray, group: ParameterGroup) -> list[Op]:
    """Return the kernels of FSDP2 around ``weights`` parameters that one rank holds alone, of which ``trained`` have gradients:
    casts to 16 bits and a copy for each pass, casts of the gradients (_fsdp_param_group.py, wait_for_unshard)."""
    alone, cast = (group.size == 1) * 1.0, HALF + FP32
    return [
        Op(f"{name}.{way}", "data parallel", MEMORY_BOUND, ONCE_PER_STEP, {"bytes": size}, count=alone, variant="copy")
        for way, size in (("all_gather", weights * (cast + 2 * HALF)), ("reduce_scatter", trained * cast))
    ]


def _units(priced: PricedSplits) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray, str]]:
    """Yield what is gathered and reduced together: its name, its parameters, the bytes that are gathered of them, the
    parameters that have gradients, each [splits], and their group.

    Experts are sharded over their own group (FSDP2 with expert parallelism, as torchtitan and NeMo Automodel do).
    """
    problem, table, key = priced.problem, priced.table, priced.key
    embedding, head = table.embedding.parameters[key], table.head.parameters_of[OTHERS][key]
    ends = [("root", embedding), ("head", head)] if _head_alone(problem) else [("root", joined_ends(problem, embedding, head))]
    for name, elements in ends:
        gathered = elements * problem.element_bytes.activation
        yield name, elements, gathered, elements * (not problem.is_frozen(OTHERS)), OTHERS
    kinds = problem.kinds
    layers = [(f"layer{number}", part, kinds.kinds[number]) for number, part in enumerate(table.layers)]
    if problem.model.num_nextn_predict_layers:
        layers.append((_PREDICTING, table.head, kinds.kinds[kinds.of_layer[-1]]))
    for name, part, kind in layers:
        apart = (EXPERTS, OTHERS) if part is table.head else (EXPERTS,)  # the head's own parameters are of the root
        dense = [group for group in part.parameters_of if group not in apart]
        trained = trained_elements(problem, part, key) - sum(part.parameters_of[group][key] for group in apart)
        of_dense = sum((part.parameters_of[group][key] for group in dense), np.zeros(len(key)))
        yield name, of_dense, gathered_bytes(problem, part, key, kind.quantised, dense), trained, LINEARS
        if kind.experts:
            experts = part.parameters_of[EXPERTS][key]
            yield name, experts, gathered_bytes(problem, part, key, kind.quantised, [EXPERTS]), experts, EXPERTS


def sharded_weights(problem: Problem, estimates: OpEstimates, group: np.ndarray, splits: Splits) -> ShardedWeights:
    """Return the terms of ``splits`` from the estimated ops of sharded_weight_ops (``group``: each split's column)."""
    sync = problem.framework.data_parallel
    ranks = shard_ranks(problem, splits)[OTHERS]

    def work(name: str, way: str) -> SideStreamWork:
        found = side_stream_work(estimates, f"{name}.{way}").take(group)
        if way == "reduce_scatter":
            found += side_stream_work(estimates, f"{name}.{_ACROSS}").take(group) * (1.0 / splits.num_micro_batches)
        lists = _tensors(problem, name) * sync.list_seconds_per_rank * np.where(ranks > 1, ranks, 0)
        return found + host_work(lists)

    ways = ("all_gather", "reduce_scatter")
    gather, scatter = (tuple(work(f"layer{kind}", way) for kind in range(len(problem.kinds.kinds))) for way in ways)
    reducing = 1.0 / splits.num_micro_batches if problem.defers_sync else np.ones(len(splits))
    root = work("root", ways[0]).exposed * (1 + sync.regathers_root) + work("root", ways[1]).exposed * reducing
    head = (work("head", ways[0]), work("head", ways[1])) if _head_alone(problem) else None
    predicts = problem.model.num_nextn_predict_layers > 0
    predicting = (work(_PREDICTING, ways[0]), work(_PREDICTING, ways[1])) if predicts else None
    regathered = 1.0 - 1.0 / linear_tensors(problem)  # the last one's backward pass follows at once
    neighbours = neighbours_of(problem.kinds.of_layer, len(problem.kinds.kinds))
    return ShardedWeights(
        gather,
        scatter,
        neighbours,
        root,
        head,
        predicting,
        sync.zero3_by_tensor,
        regathered,
        reducing,
        int(problem.kinds.of_layer[-1]),
        problem.run.overlap_param_gather,
        problem.overlaps_sharded_reduction,
    )


def gathered_bytes(
    problem: Problem, part: EstimatedProgram, key: np.ndarray, quantised: bool, groups: Iterable[str]
) -> np.ndarray:
    """Return the bytes of a layer's weights of some groups in an all-gather, [splits].

    quantised: whether its linears are, which are then gathered so if they are held so.
    """
    kept, whole = problem.weight_recipe, problem.element_bytes.activation
    narrow = ((kept.unit if kept else problem.fp8_shards) if quantised else 0.0) or whole
    found = (part.parameters_of[name][key] * (whole if name == OTHERS else narrow) for name in groups)
    return sum(found, np.zeros(len(key)))


def _head_alone(problem: Problem) -> bool:
    """Whether the head is a unit of its own, which stays gathered until its backward pass (torchtitan's parallelize.py)."""
    return problem.framework.memory.root_stays == ("head",) and not problem.model.tie_word_embeddings


def _tensors(problem: Problem, name: str) -> int:
    """Return the matrices of a layer, or of embedding and head."""
    return linear_tensors(problem) if name != "root" else 1 + (not problem.model.tie_word_embeddings)


def messages(problem: Problem, name: str, gathered: np.ndarray, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the collectives that carry the weights of a unit and those of its gradients, [splits]: of all of it, of each
    tensor, or of as many tensors as it takes, where gradients of several layers may share one (a fraction).

    gathered, trained: its parameters, [splits]. Source: DeepSpeed 0.19, partitioned_param_coordinator.py (fetch_sub_module, run
    over the modules of Llama models: 3.8 all-gathers a layer of 8B, 6.0 of 70B; here 4.4 and 7) and stage3.py.
    """
    sync, hidden, tensors = problem.framework.data_parallel, problem.model.hidden_size, _tensors(problem, name)
    one = np.ones(len(gathered))
    if sync.zero3_by_tensor:
        return tensors * one, tensors * one
    if not (least := sync.gathered(hidden)):
        return one, one
    reductions = np.where(trained > 0, np.minimum(trained / sync.bucket(hidden), tensors), 1.0)
    return np.clip(gathered / least, 1.0, tensors), reductions


def exposed_by_sharding(
    weights: ShardedWeights, layouts: Layouts, forward: np.ndarray, backward: np.ndarray, recompute: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the exposed seconds of ZeRO-3 per layer of each kind and micro batch, what recomputation adds to them, both
    [kinds, layouts], and those of embedding and head, [layouts]; zero for other layouts.

    A layer's parameters are all-gathered while the layer before it computes, in forward and again in backward, where the
    gradients of the layer after it are reduce-scattered at the same time.
    Source: Zhao et al. 2023 (PyTorch FSDP, arXiv 2304.11277). Without overlap_param_gather the all-gather is exposed,
    without overlap_grad_reduce the reduce-scatter. Where tensors are gathered one by one nothing overlaps, because the device
    is waited for before each. A head that is a unit of its own is gathered beside the last layer, and reduced beside its
    backward pass.
    """
    layer, recomputing, root = np.zeros(forward.shape), np.zeros(forward.shape), np.zeros(forward.shape[1])
    chosen = np.flatnonzero(layouts.zero == 3)
    if not len(chosen):
        return layer, recomputing, root
    row = layouts.row[chosen]
    reducing = weights.reducing[row]
    for kind in range(len(forward)):
        if weights.by_tensor:
            gather, scatter = weights.gather[kind].take(row), weights.scatter[kind].take(row)
            layer[kind, chosen] = 2 * gather.exposed + scatter.exposed * reducing
            recomputing[kind, chosen] = weights.regathered * gather.exposed * (layouts.recompute[chosen] == Recompute.FULL)
            continue
        passes = backward[kind, chosen], (backward + recompute)[kind, chosen]
        for before, after, share in weights.neighbours[kind]:
            gather, scatter = weights.gather[before].take(row), weights.scatter[after].take(row)
            once, again = (_in_backward(gather, scatter, weights, compute, reducing) for compute in passes)
            following = weights.gather[after].take(row)
            first = following.added_to(forward[kind, chosen], weights.gathers_overlap)
            layer[kind, chosen] += share * (first + once)
            recomputing[kind, chosen] += share * (again - once)  # a second forward pass hides more of the all-gather
    # no compute runs before the first layer's all-gather; where nothing overlaps it is among the exposed ones already
    exposed_already = weights.by_tensor or not weights.gathers_overlap
    root[chosen] = weights.root[row] + (0.0 if exposed_already else weights.gather[0].communication[row])
    # nor behind its reduce-scatter, for which the end of the backward pass waits (_fsdp_param_group.py, finalize_backward)
    if weights.reduces_overlap and not weights.by_tensor:
        root[chosen] += weights.scatter[0].communication[row] * reducing
    if weights.predicting is not None:
        root[chosen] += _behind_the_last_layer(weights, row, forward[:, chosen], backward[:, chosen], reducing)
    if weights.head is not None:
        gather, scatter = (work.take(row) for work in weights.head)
        root[chosen] += gather.added_to(forward[weights.last_kind, chosen], weights.gathers_overlap)
        root[chosen] += scatter.added_to(backward[weights.last_kind, chosen], weights.reduces_overlap) * reducing
    return layer, recomputing, root


def _behind_the_last_layer(
    weights: ShardedWeights, row: np.ndarray, forward: np.ndarray, backward: np.ndarray, reducing: np.ndarray
) -> np.ndarray:
    """Return the exposed seconds of the layers of multi-token prediction, [layouts]: units like the last layer, beside whose
    passes they are gathered and reduced. forward, backward: [kinds, layouts]."""
    assert weights.predicting is not None
    gather, scatter = (work.take(row) for work in weights.predicting)
    if weights.by_tensor:
        return 2 * gather.exposed + scatter.exposed * reducing
    once = _in_backward(gather, scatter, weights, backward[weights.last_kind], reducing)
    return gather.added_to(forward[weights.last_kind], weights.gathers_overlap) + once


def _in_backward(
    gather: SideStreamWork, scatter: SideStreamWork, weights: ShardedWeights, compute: np.ndarray, reducing: np.ndarray
) -> np.ndarray:
    """Return the exposed seconds of a layer's all-gather and reduce-scatter beside ``compute``, on average over micro batches
    of which a share is ``reducing``."""
    alone = gather.added_to(compute, weights.gathers_overlap)
    if weights.gathers_overlap and weights.reduces_overlap:
        both = (gather + scatter).overlapped_with(compute)
    else:
        both = alone + scatter.added_to(compute, weights.reduces_overlap)
    return alone + reducing * (both - alone)
