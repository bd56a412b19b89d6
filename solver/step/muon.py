"""The Muon optimizer: one momentum for every matrix of a layer, orthogonalised by Newton-Schulz iterations; Adam for the rest.

Sources: Jordan 2024 (kellerjordan.github.io/posts/muon); Megatron-Core's optimizer/muon.py and layer_wise_optimizer.py as read:
each tensor rank works on its part of a matrix (``--muon-tp-mode blockwise``); ``dist_muon`` (here ZeRO-1) assigns whole
matrices to the data-parallel ranks, all-reduces gradients and gathers what each rank has updated after the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from solver.layers.moe import MODULE, ROUTER
from solver.layers.program import EXPERTS, FORWARD, GROUPED_LINEAR, LINEAR, LINEARS, Op
from solver.layers.recompute import weight_gemms
from solver.spec.recipes import FP32
from solver.step.layouts import Splits
from solver.step.parameter_groups import shard_ranks, stages_of
from solver.step.problem import LayerTable, Part, Problem
from solver.step.step_ops import orthogonalises

STEPS = 5  #: Newton-Schulz iterations (--muon-num-ns-steps)


class Matrices(NamedTuple):
    """Equal matrices of a layer: rows, columns and their number on one rank, [splits] each; group of parameters."""

    rows: np.ndarray
    columns: np.ndarray
    number: np.ndarray
    group: str


def muon_ops(problem: Problem, table: LayerTable, key: np.ndarray, splits: Splits) -> list[Op]:
    """Return the GEMMs of the iterations on the fullest stage, of all of its matrices (``optimizer.whole``) and of those of the
    rank that gets most (``optimizer.shard``); none under Adam.

    For a matrix of s x l, s <= l, an iteration multiplies s x l by l x s, s x s by s x s and s x s by s x l. Matrices are
    assigned evenly; of fewer than there are ranks, the largest alone decides.
    """
    if problem.run.optimizer != "muon":
        return []
    stages, parts = stages_of(problem, splits), (*table.layers, table.head)
    matrices = [list(_matrices(part, key)) for part in parts]
    held = np.concatenate([stages.counts, stages.has_head[:, None]], axis=1)  # [stages, parts, splits]
    each = np.array([sum((found.number * _flops(found) for found in of), np.zeros(len(splits))) for of in matrices])
    fullest = np.argmax((held * each).sum(axis=1), axis=0)
    times = held[fullest, :, np.arange(len(splits))].T
    whole, ops = [found._replace(number=found.number * n) for of, n in zip(matrices, times, strict=True) for found in of], []
    for found, assigned in zip(whole, _assigned(whole, shard_ranks(problem, splits)), strict=True):
        for name, number in (("optimizer.whole", found.number), ("optimizer.shard", assigned)):
            ops += _iterations(found, name, number)
    return ops


def _matrices(part: Part, key: np.ndarray) -> Iterator[Matrices]:
    ops = part.estimates.ops
    for op in (*weight_gemms(ops), *(op for op in ops if op.kind == GROUPED_LINEAR and op.phase == FORWARD)):
        if op.module == ROUTER or op.name.endswith(("vocab", "scores", "context")):
            continue
        rows, columns = (np.broadcast_to(op.dims[name], len(part.times.waits))[key] for name in ("n", "k"))
        experts = op.dims["groups"] if op.kind == GROUPED_LINEAR else 1.0
        number = np.broadcast_to(np.asarray(op.count * experts, dtype=float), len(part.times.waits))[key]
        yield Matrices(rows, columns, number, EXPERTS if op.module == MODULE else LINEARS)


def _assigned(whole: list[Matrices], shards: Mapping[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Yield how many of the matrices the rank that gets most updates: [splits] each; shards: ranks, by group of parameters."""
    elements = [np.where(found.number > 0, found.rows * found.columns, 0.0) for found in whole]
    for found, size in zip(whole, elements, strict=True):
        alike = [i for i, other in enumerate(whole) if other.group == found.group]
        ranks = shards[found.group]
        total = np.sum([whole[i].number for i in alike], axis=0)
        largest = size >= np.max([elements[i] for i in alike], axis=0)
        yield np.where(total >= ranks, found.number / ranks, 1.0 * largest * (found.number > 0))


def _flops(found: Matrices) -> np.ndarray:
    small, large = np.minimum(found.rows, found.columns) * 1.0, np.maximum(found.rows, found.columns) * 1.0
    flops: np.ndarray = small * small * (2 * large + small)
    return flops


def _iterations(found: Matrices, name: str, number: np.ndarray) -> list[Op]:
    small, large = np.minimum(found.rows, found.columns), np.maximum(found.rows, found.columns)
    shapes = ((small, small, large), (small, small, small), (small, large, small))
    return [
        Op(name, "optimizer", LINEAR, "step", {"m": m, "n": n, "k": k, "layout": 0, "accumulate": 0}, count=STEPS * number)
        for m, n, k in shapes
    ]


def momentum_saved(problem: Problem, name: str) -> float:
    """Return the bytes per parameter by which Muon's states of a group are smaller than Adam's."""
    return FP32 * orthogonalises(problem, name)


def largest_matrix(problem: Problem, table: LayerTable, key: np.ndarray, name: str) -> np.ndarray:
    """Return the elements of the largest matrix that one rank gets whole, [splits]; 0 under Adam."""
    if not orthogonalises(problem, name):
        return np.zeros(len(key))
    sizes = [
        found.rows * found.columns * (found.number > 0)
        for part in table.layers for found in _matrices(part, key) if found.group == name
    ]  # fmt: skip
    return np.max(sizes, axis=0) if sizes else np.zeros(len(key))
