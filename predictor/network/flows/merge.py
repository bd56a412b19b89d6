"""Merge lanes that behave alike, so that thousands of GPUs are simulated as a few.

Lanes get a colour, and links too, such that lanes of one colour have the same size, steps and latency, take links of the same
colours, and wait for lanes of the same colours; and links of one colour have the same rate and carry equally many lanes of each
colour (an equitable partition, found by colour refinement). Then, by induction over the events, all flows of a colour and step
start together, have the same max-min fair rate, and end together: one lane stands for its colour, and one link, with the number
of lanes that it carries as weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from predictor.network.flows.lanes import Bundles, Plan
from predictor.network.flows.pattern import Pattern


def merged(pattern: Pattern, rows: np.ndarray, rate: np.ndarray, start: float, tail: np.ndarray) -> tuple[Plan, np.ndarray]:
    """Return a plan with one lane for each colour, and the colour of every lane.

    rows: links of each lane [lanes, hops], -1: none. rate: of every link [bytes/s]. start, tail: as in Plan.
    """
    color, link_color = _refine(pattern, rows, rate, tail)
    _, first = np.unique(color, return_index=True)
    lane, link = _uses(rows)
    pairs, count = np.unique(np.stack([color[lane], link]), axis=1, return_counts=True)
    weight = {(c, n): float(k) for c, n, k in zip(*pairs.tolist(), count.tolist(), strict=True)}
    uses = []
    for index, representative in enumerate(first.tolist()):
        chosen = {int(link_color[n]): weight[index, n] for n in rows[representative].tolist() if n >= 0}
        uses.append(tuple(chosen.items()))
    keys = {key: i for i, key in enumerate(dict.fromkeys(uses))}
    bundle = np.array([keys[key] for key in uses], dtype=np.int64)
    link_rate = np.zeros(int(link_color.max()) + 1)
    link_rate[link_color] = rate
    return Plan(_representatives(pattern, color, first), Bundles(tuple(keys), link_rate), bundle, start, tail[first]), color


def recolored(plan: Plan) -> Callable[[Pattern], Plan]:
    """Return a function to the plan of the same lanes with fewer steps."""
    return lambda pattern: replace(plan, pattern=pattern)


def _representatives(pattern: Pattern, color: np.ndarray, first: np.ndarray) -> Pattern:
    waits = np.stack([color[pattern.parent], color[pattern.child], pattern.lag, pattern.sent.astype(np.int64)])
    parent, child, lag, sent = np.unique(waits, axis=1) if waits.size else waits
    chosen = {name: getattr(pattern, name)[first] for name in ("source", "target", "size", "steps", "group")}
    return replace(pattern, **chosen, parent=parent, child=child, lag=lag, sent=sent.astype(bool))


def _refine(pattern: Pattern, rows: np.ndarray, rate: np.ndarray, tail: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the coarsest colours of lanes and links that are equitable."""
    lane, link = _uses(rows)
    color = _number(pattern.size, pattern.steps, _grains(tail))
    link_color = _number(rate)
    single = _only_parent(pattern)
    counts = (-1, -1)
    while counts != (counts := (int(color.max()), int(link_color.max()))):
        link_color = _number(link_color, _sums(link, _mix(color[lane]), len(rate)))
        wait = _mix(color[pattern.parent] * 4 + pattern.lag * 2 + pattern.sent)
        color = _number(
            color, _sums(lane, _mix(link_color[link] + (1 << 40)), len(color)), _sums(pattern.child, wait, len(color))
        )
        if single is not None:
            color = _along_chains(color, single)
    return color, link_color


def _along_chains(color: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Tell apart lanes whose ancestors have different colours, in steps of 1, 2, 4 ... ancestors."""
    reach = 1
    while reach < len(color):
        before = int(color.max())
        color = _number(color, color[parent])
        if int(color.max()) == before:
            break
        parent, reach = parent[parent], reach * 2
    return color


def _only_parent(pattern: Pattern) -> np.ndarray | None:
    """Return the parent of every lane, itself where it has none; None where a lane has several."""
    if len(pattern.parent) and np.bincount(pattern.child).max() > 1:
        return None
    parent = np.arange(len(pattern))
    parent[pattern.child] = pattern.parent
    return parent


def _uses(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    lane, hop = np.nonzero(rows >= 0)
    return lane, rows[lane, hop]


def _grains(time: np.ndarray) -> np.ndarray:
    """Round times to femtoseconds, so that sums in another order count as equal."""
    return np.rint(time * 1e15)


def _number(*columns: np.ndarray) -> np.ndarray:
    """Return numbers from 0 up, equal where all columns are equal."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        part = np.unique(column, return_inverse=True)[1]
        number = np.unique(number * (int(part.max(initial=0)) + 1) + part, return_inverse=True)[1]
    return number


def _mix(values: np.ndarray) -> np.ndarray:
    """Return 64 random-looking bits for every number (the finaliser of splitmix64): sums of them identify multisets."""
    with np.errstate(over="ignore"):
        x = (values.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _sums(place: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    """Return the sum of ``values`` at every place, modulo 2^64."""
    total = np.zeros(length, dtype=np.uint64)
    np.add.at(total, place, values)
    return total
