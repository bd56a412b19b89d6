"""The time of a V-shaped schedule as the longest of its critical paths, for many layouts at once.

The time of a step is convex, piecewise linear and homogeneous in the seconds of its passes: the longest of all paths through
the order of passes. Passes are F, B and W of three kinds of chunk: the first, with the embedding, and the last, with the head,
which are both on the first stage, and all others, which are equal. The event simulation, run at some ratios of these nine,
gives the path that is longest there; the maximum over these paths is exact at those ratios and a lower bound between them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from solver.schedule.event_simulation import Timeline, in_flight, simulate
from solver.schedule.kinds import STEADY
from solver.schedule.v_shaped_orders import v_shaped_order
from solver.spec.read_only import read_only

#: Seconds of B and W of a chunk, in those of F, for short and for long pipelines. B is the input gradient, with what it
#: recomputes.
RATIOS = tuple(product((0.8, 1.0, 1.3, 1.8, 3.0), (0.35, 0.6, 0.8, 1.0, 1.2)))
FEWER_RATIOS = tuple(product((0.8, 1.2, 1.8, 3.0), (0.5, 0.8, 1.1)))
#: Seconds of the first and the last chunk, in those of the others.
ENDS = ((1.0, 1.0), (1.0, 0.7), (0.7, 1.2), (1.0, 1.3), (1.0, 1.7), (1.0, 2.5), (1.0, 5.0))
_ROUNDING = 1e-6
FIRST, LAST, OTHER = 0, 1, 2


def v_shaped_seconds(schedule: str, pp: int, micro_batches: int, passes: np.ndarray, waits: bool) -> np.ndarray:
    """Return the seconds of a step: [layouts].

    passes: the seconds of F, B and W of the first chunk, of the last and of any other: [3, 3, layouts].

    waits: stages wait for each other at the end of a step; otherwise the longest span of a stage is the time of a step.
    """
    paths = critical_paths(schedule, pp, micro_batches)
    return ((paths.makespan if waits else paths.span) @ passes.reshape(9, -1)).max(axis=0)


class Paths(NamedTuple):
    """How many passes of each kind are on the longest paths, of the makespan and of the longest span: [paths, 9] each."""

    makespan: np.ndarray
    span: np.ndarray


@lru_cache(maxsize=1024)
def critical_paths(schedule: str, pp: int, micro_batches: int) -> Paths:
    last = min(micro_batches, STEADY * pp)
    ratios = np.array(
        [
            [chunk * seconds for chunk in (*ends, 1.0) for seconds in (1.0, *of_backward)]
            for of_backward in (RATIOS if pp <= 8 else FEWER_RATIOS)
            for ends in ENDS
        ]
    )
    ends = _longest(schedule, pp, last, ratios)
    if micro_batches > last:
        before = _longest(schedule, pp, last - pp, ratios)
        repeated = ends - before
        # a negative count: another path is longest than with fewer micro batches
        ends = np.where(np.any(repeated < 0, axis=2, keepdims=True), 0.0, ends + repeated * (micro_batches - last) / pp)
    return Paths(*(_lower_bounds(paths, ratios) for paths in ends.transpose(1, 0, 2)))


def _lower_bounds(paths: np.ndarray, ratios: np.ndarray) -> np.ndarray:
    """Return the distinct ``paths``, one for each of ``ratios``, that are longer than another ratio's own path nowhere.

    Where several paths are as long, those of two numbers of micro batches may differ in kind, and what repeats between them is
    then on no path at all.
    """
    seconds = paths @ ratios.T
    longest = np.where(paths.any(axis=1), np.diagonal(seconds), np.inf)
    bounds = paths[(seconds <= longest * (1 + _ROUNDING)).all(axis=1)]
    return np.unique(bounds if len(bounds) else paths, axis=0)


@lru_cache(maxsize=4096)
def v_shaped_in_flight(schedule: str, pp: int, micro_batches: int) -> np.ndarray:
    """Return the micro batches whose activations each stage holds at its peak, in units of whole stages: [pp]."""
    last = min(micro_batches, STEADY * pp)
    orders = [v_shaped_order(schedule, stage, pp, last) for stage in range(pp)]
    found = in_flight(schedule, orders, 2)
    return read_only(found)


def _longest(schedule: str, pp: int, micro_batches: int, ratios: np.ndarray) -> np.ndarray:
    """Return the counts of passes on the path that ends last, and on the one of the stage with the longest span, at each ratio:
    [ratios, 2, 9]."""
    line = simulate(schedule, [2.0] * pp, [4.0] * pp, micro_batches, 2, 0.0, [2.0] * pp)
    before = np.where(np.diff(line.stage, prepend=-1) == 0, np.arange(len(line.stage)) - 1, -1)
    place = np.where(line.stage > 0, OTHER, np.where(line.chunk == 0, FIRST, LAST))
    kinds = 4 * place + np.searchsorted(_KINDS, line.kind)
    end = _ends(line, before, _COUNTS[kinds] @ ratios.T)
    first = np.flatnonzero(before < 0)
    final = np.append(first[1:], len(before)) - 1
    # a stage's span begins when its first input has passed the stages before it
    passed = np.zeros((pp, 9))
    passed[1:, 3 * FIRST], passed[1:, 3 * OTHER] = 1.0, np.arange(pp - 1)
    found = np.zeros((len(ratios), 2, 9))
    needs, previous, kind = line.needs.tolist(), before.tolist(), kinds.tolist()  # a walk through lists is the fastest
    for r, ratio in enumerate(ratios):
        last, ends = end[final, r], end[:, r].tolist()
        whole, stage = int(np.argmax(last)), int(np.argmax(last - passed @ ratio))
        for i, at in enumerate((whole, stage)):
            found[r, i] = _path(int(final[at]), ends, previous, needs, kind) @ _COUNTS
        found[r, 1] -= passed[stage]
    return found


_KINDS = np.array(["B", "BW", "F", "W"])
#: Passes of these kinds, of the chunks of each place, as counts of F, B and W.
_COUNTS = np.kron(np.eye(3), [[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])


def _ends(line: Timeline, before: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return when each pass ends: [passes, ratios], for passes of ``seconds`` in the order of ``line``.

    before: the pass that its stage runs before it; -1: none.
    """
    end = np.zeros((len(before) + 1, seconds.shape[1]))  # row -1: what no pass waits for
    order = np.argsort(line.start, kind="stable").tolist()  # a pass starts after those that it waits for
    needs, previous = line.needs.tolist(), before.tolist()
    for i in order:
        np.maximum(end[previous[i]], end[needs[i]], out=end[i])
        end[i] += seconds[i]
    return end


def _path(at: int, end: list[float], before: list[int], needs: list[int], kind: list[int]) -> list[int]:
    """Return how many passes of each kind are on the path that ends with pass ``at``."""
    counts = [0] * len(_COUNTS)
    while at >= 0:
        counts[kind[at]] += 1
        previous, needed = before[at], needs[at]
        at = max(previous, needed) if previous < 0 or needed < 0 else needed if end[needed] > end[previous] else previous
    return counts
