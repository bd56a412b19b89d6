"""The Muon optimizer: one momentum for every matrix of a layer, orthogonalised by Newton-Schulz iterations; Adam for the rest.

Sources: Jordan 2024 (kellerjordan.github.io/posts/muon); Megatron-Core's optimizer/muon.py and layer_wise_optimizer.py (0.16.1)
as read: each tensor rank works on its part of a matrix (``--muon-tp-mode blockwise``), on queries, keys and values apart;
``dist_muon`` (here ZeRO-1) sorts matrices by their size and deals them to the data-parallel ranks, to and fro, all-reduces
gradients and gathers what each rank has updated after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from predictor.kernels.gemm_layout import GemmLayout
from solver.layers.program import (
    EXPERT_MODULE,
    EXPERTS,
    FORWARD,
    GROUPED_LINEAR,
    LINEAR,
    LINEARS,
    ONCE_PER_STEP,
    ROUTER,
    VOCABULARY,
    Op,
    name_in_layer,
    weight_gemms,
)
from solver.spec.model import ModelSpec
from solver.spec.recipes import FP32
from solver.step.layer_table import EstimatedProgram, PricedSplits
from solver.step.optimizer_ops import orthogonalises
from solver.step.parameter_groups import shard_ranks, stages_of
from solver.step.problem import Problem
from solver.step.stage_kinds import StageKinds

STEPS = 5  #: Newton-Schulz iterations (--muon-num-ns-steps)


Cost = Callable[["Matrices"], np.ndarray]


class Matrices(NamedTuple):
    """Equal matrices of a layer: rows, columns and their number on one rank, [splits] each; group of parameters.

    parts: rows of what is orthogonalised apart of each, and how many of it there are.
    """

    rows: np.ndarray
    columns: np.ndarray
    number: np.ndarray
    group: str
    parts: tuple[tuple[np.ndarray, int], ...]


def muon_ops(priced: PricedSplits) -> list[Op]:
    """Return the GEMMs of the iterations on the fullest stage, of all of its matrices (``optimizer.whole``) and of those of the
    rank that gets most (``optimizer.shard``); none under Adam.

    For a matrix of s x l, s <= l, an iteration multiplies s x l by l x s, s x s by s x s and s x s by s x l.
    """
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    if problem.run.optimizer != "muon":
        return []
    stages = stages_of(problem, splits)
    matrices = [list(_matrices(problem, part, key)) for part in (*table.layers, table.head)]
    held = _held(stages)
    each = np.array([sum((found.number * _flops(found) for found in of), np.zeros(len(splits))) for of in matrices])
    fullest = np.argmax((held * each).sum(axis=1), axis=0)
    times = held[fullest, :, np.arange(len(splits))].T
    whole, ops = [found._replace(number=found.number * n) for of, n in zip(matrices, times, strict=True) for found in of], []
    for found, assigned in zip(whole, _assigned(whole, shard_ranks(problem, splits), _flops), strict=True):
        for name, number in (("optimizer.whole", found.number), ("optimizer.shard", assigned)):
            ops += _iterations(found, name, number)
    return ops


def _held(stages: StageKinds) -> np.ndarray:
    """Return the layers of each kind that stages hold, and whether they hold the head: [stages, kinds + 1, splits]."""
    return np.concatenate([stages.counts, stages.has_head[:, None]], axis=1)


def _matrices(problem: Problem, part: EstimatedProgram, key: np.ndarray) -> Iterator[Matrices]:
    model, ops = problem.model, part.estimates.ops
    for op in (*weight_gemms(ops), *(op for op in ops if op.kind == GROUPED_LINEAR and op.phase == FORWARD)):
        if op.module == ROUTER or name_in_layer(op) == VOCABULARY:
            continue
        rows, columns = (np.broadcast_to(op.dims[name], len(part.times.waits))[key] for name in ("n", "k"))
        experts = op.dims["groups"] if op.kind == GROUPED_LINEAR else 1.0
        number = np.broadcast_to(np.asarray(op.count * experts, dtype=float), len(part.times.waits))[key]
        parts = query_key_value(model, rows) if name_in_layer(op) == "wqkv" else ((rows, 1),)
        yield Matrices(rows, columns, number, EXPERTS if op.module == EXPERT_MODULE else LINEARS, parts)


def query_key_value(model: ModelSpec, rows: np.ndarray) -> tuple[tuple[np.ndarray, int], ...]:
    """Return (rows, number of such matrices) of the queries, with the gate that is as wide as they, and of keys and values."""
    queries, others = model.num_attention_heads * (1 + model.attention_gate), model.num_key_value_heads
    head = rows // (queries + 2 * others)
    return (head * queries, 1), (head * others, 2)


def _assigned(whole: Sequence[Matrices], shards: Mapping[str, np.ndarray], cost: Cost) -> list[np.ndarray]:
    """Return how many of the matrices the rank updates to which most is dealt: [splits] each.

    shards: ranks, by group of parameters. cost: of one matrix, by which ranks are compared.
    """
    found: list[np.ndarray] = [np.zeros(0)] * len(whole)
    for group in {matrices.group for matrices in whole}:
        alike = [i for i, matrices in enumerate(whole) if matrices.group == group]
        numbers = np.array([whole[i].number for i in alike])
        sizes = np.array([whole[i].rows * whole[i].columns for i in alike])
        costs = np.array([cost(whole[i]) for i in alike])
        order = np.argsort(sizes, axis=0, kind="stable")
        dealt = _dealt(np.take_along_axis(numbers, order, 0), np.take_along_axis(costs, order, 0), shards[group])
        for place, i in enumerate(alike):
            found[i] = dealt[np.argmax(order == place, axis=0), np.arange(dealt.shape[1])]
    return found


def _dealt(numbers: np.ndarray, costs: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return what the rank gets that has most when matrices are dealt 0, 1, ... R - 1, R - 1, ... 1, 0, 0, 1, ...: the number
    of each kind, [kinds, splits].

    numbers, costs: of each kind, in the order in which they are dealt, [kinds, splits]. ranks: R, [splits].
    """
    end = np.cumsum(numbers, axis=0)
    last = ranks - 1.0
    places = np.concatenate([0.0 * end[:1], end]) % (2 * ranks)
    near = np.minimum(places, 2 * ranks - 1 - places)  # only here does the number of one kind change from rank to rank
    candidates = np.clip(np.concatenate([near - 1, near, near + 1]), 0, last)  # [candidates, splits]

    def before(place: np.ndarray) -> np.ndarray:
        turn = place[:, None] % (2 * ranks)
        return 2 * (place[:, None] // (2 * ranks)) + (turn > candidates) + (turn > 2 * ranks - 1 - candidates)

    each = before(end) - before(end - numbers)  # [kinds, candidates, splits]
    most = (each * costs[:, None]).sum(axis=0).argmax(axis=0)
    return each[:, most, np.arange(len(ranks))]


def _elements(found: Matrices) -> np.ndarray:
    return 1.0 * found.rows * found.columns


def _products(found: Matrices) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """Yield m, n and k of the products of one iteration on one matrix, and how many of each there are."""
    for rows, times in found.parts:
        small, large = np.minimum(rows, found.columns), np.maximum(rows, found.columns)
        for m, n, k in ((small, small, large), (small, small, small), (small, large, small)):
            yield m, n, k, times


def _flops(found: Matrices) -> np.ndarray:
    return np.sum([1.0 * m * n * k * times for m, n, k, times in _products(found)], axis=0)


def _iterations(found: Matrices, name: str, number: np.ndarray) -> list[Op]:
    return [
        Op(
            name,
            "optimizer",
            LINEAR,
            ONCE_PER_STEP,
            {"m": m, "n": n, "k": k, "batch": 1, "layout": GemmLayout.TN, "accumulate": 0},
            count=STEPS * times * number,
        )
        for m, n, k, times in _products(found)
    ]


def momentum_saved(problem: Problem, name: str) -> float:
    """Return the bytes per parameter by which Muon's states of a group are smaller than Adam's."""
    return FP32 * orthogonalises(problem, name)


def more_than_even(priced: PricedSplits, name: str, ranks: np.ndarray, stages: StageKinds, stage: int) -> np.ndarray:
    """Return the elements of a group's matrices on a stage that the rank updates to which most is dealt, beyond an even share,
    [splits]; 0 under Adam. ranks: of that group."""
    problem, table, key = priced.problem, priced.table, priced.key
    if not orthogonalises(problem, name):
        return np.zeros(len(key))
    held = _held(stages)[stage]
    whole = [
        found._replace(number=found.number * times)
        for part, times in zip((*table.layers, table.head), held, strict=True)
        for found in _matrices(problem, part, key)
        if found.group == name
    ]
    if not whole:
        return np.zeros(len(key))
    assigned = _assigned(whole, {name: ranks}, _elements)
    sizes, numbers = np.array([_elements(found) for found in whole]), np.array([found.number for found in whole])
    return (sizes * (np.array(assigned) - numbers / ranks)).sum(axis=0)
