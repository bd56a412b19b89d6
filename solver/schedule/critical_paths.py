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
    ratios = RATIOS if pp <= 8 else FEWER_RATIOS
    ends = np.array([_longest(schedule, pp, last, ratio) for ratio in ratios])
    if micro_batches > last:
        before = np.array([_longest(schedule, pp, last - pp, ratio) for ratio in ratios])
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


def _longest(schedule: str, pp: int, micro_batches: int, ratio: tuple[float, float]) -> list[np.ndarray]:
    """Return the counts of F, B and W on the path that ends last, and on the one of the stage with the longest span."""
    b, w = ratio
    line = simulate(schedule, [2.0] * pp, [2 * (b + w)] * pp, micro_batches, 2, 0.0, [2 * w] * pp)
    first = np.flatnonzero(np.diff(line.stage, prepend=-1))
    final = np.append(first[1:], len(line.stage)) - 1
    stage = int(np.argmax(line.span))
    whole, of_stage = (_counts(line, int(final[s])) for s in (int(np.argmax(line.end[final])), stage))
    of_stage[0] -= stage  # a stage's span begins when its first input has passed the stages before it
    return [whole, of_stage]


def _counts(line: Timeline, at: int) -> np.ndarray:
    """Return the counts of F, B and W on the path that ends with pass ``at``."""
    counts = np.zeros(3)
    each = {"F": (1, 0, 0), "B": (0, 1, 0), "W": (0, 0, 1), "BW": (0, 1, 1)}
    while at >= 0:
        counts += each[line.kind[at]]
        at = line.waits_for(at)
    return counts
