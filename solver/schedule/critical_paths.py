"""The time of a V-shaped schedule as the longest of its critical paths, for many layouts at once.

With equal stages the time of a step is convex, piecewise linear and homogeneous in the seconds of F, B and W: the longest of
all paths through the order of passes. The event simulation, run at a few ratios of the three, gives the path that is longest
there; the maximum over these paths is exact at those ratios and a lower bound between them.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np

from solver.schedule.event_simulation import Timeline, in_flight, simulate
from solver.schedule.wave_orders import wave_order

#: Seconds of B and W of a chunk, in those of F, for short and for long pipelines. B is the input gradient, with what it
#: recomputes.
RATIOS = tuple(product((0.8, 1.0, 1.3, 1.8, 3.0), (0.35, 0.6, 0.8, 1.0, 1.2)))
FEWER_RATIOS = tuple(product((0.8, 1.2, 1.8, 3.0), (0.5, 0.8, 1.1)))
#: More micro batches than these, in units of pp, only repeat the steady state.
_STEADY = 4


def wave_seconds(schedule: str, pp: int, micro_batches: int, passes: np.ndarray, waits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of a step of equal stages, and of a further micro batch in their steady state: [layouts] each.

    passes: the seconds of F, B and W of one chunk, [3, layouts].

    waits: stages wait for each other at the end of a step; otherwise the longest span of a stage is the time of a step.
    """

    def longest(count: int) -> np.ndarray:
        paths = critical_paths(schedule, pp, count)[0 if waits else 1]
        seconds: np.ndarray = np.max([path @ passes for path in paths], axis=0)
        return seconds

    steady = (longest(_STEADY * pp) - longest((_STEADY - 1) * pp)) / pp
    return longest(micro_batches), steady


@lru_cache(maxsize=1024)
def critical_paths(schedule: str, pp: int, micro_batches: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the passes on the longest paths, of the makespan and of the longest span: [paths, 3], counts of F, B and W."""
    last = min(micro_batches, _STEADY * pp)
    ratios = np.array(RATIOS if pp <= 8 else FEWER_RATIOS)
    ends = _longest(schedule, pp, last, ratios)
    if micro_batches > last:
        before = _longest(schedule, pp, last - pp, ratios)
        ends = ends + (ends - before) * (micro_batches - last) / pp
    makespan, span = ends.transpose(1, 0, 2)
    return np.unique(makespan, axis=0), np.unique(span, axis=0)


@lru_cache(maxsize=4096)
def wave_in_flight(schedule: str, pp: int, micro_batches: int) -> np.ndarray:
    """Return the micro batches whose activations each stage holds at its peak, in units of whole stages: [pp]."""
    last = min(micro_batches, _STEADY * pp)
    orders = [wave_order(schedule, stage, pp, last) for stage in range(pp)]
    found = in_flight(schedule, orders, 2)
    found.flags.writeable = False  # the cache shares it
    return found


def _longest(schedule: str, pp: int, micro_batches: int, ratios: np.ndarray) -> np.ndarray:
    """Return the counts of F, B and W on the path that ends last, and on the one of the stage with the longest span, at each
    ratio: [ratios, 2, 3]."""
    line = simulate(schedule, [2.0] * pp, [4.0] * pp, micro_batches, 2, 0.0, [2.0] * pp)
    before = np.where(np.diff(line.stage, prepend=-1) == 0, np.arange(len(line.stage)) - 1, -1)
    kinds = np.searchsorted(_KINDS, line.kind)
    each = _COUNTS[kinds]
    end = _ends(line, before, each @ np.column_stack([np.ones(len(ratios)), ratios]).T)
    first = np.flatnonzero(before < 0)
    final = np.append(first[1:], len(before)) - 1
    found = np.zeros((len(ratios), 2, 3))
    needs, previous, kind = line.needs.tolist(), before.tolist(), kinds.tolist()  # a walk through lists is the fastest
    for r in range(len(ratios)):
        last, ends = end[final, r], end[:, r].tolist()
        whole, stage = int(np.argmax(last)), int(np.argmax(last - np.arange(pp)))
        for i, at in enumerate((whole, stage)):
            found[r, i] = _path(int(final[at]), ends, previous, needs, kind) @ _COUNTS
        found[r, 1, 0] -= stage  # a stage's span begins when its first input has passed the stages before it
    return found


_KINDS = np.array(["B", "BW", "F", "W"])
#: Passes of these kinds as counts of F, B and W.
_COUNTS = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])


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
    counts = [0] * len(_KINDS)
    while at >= 0:
        counts[kind[at]] += 1
        previous, needed = before[at], needs[at]
        at = max(previous, needed) if previous < 0 or needed < 0 else needed if end[needed] > end[previous] else previous
    return counts
