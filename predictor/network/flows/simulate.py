"""Time of collectives on a topology, by simulating their flows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictor.network.flows.bottlenecks import choices
from predictor.network.flows.collective import Collective, pattern
from predictor.network.flows.events import Ends, run
from predictor.network.flows.lanes import Plan, make_bundles
from predictor.network.flows.merge import merged
from predictor.network.flows.pattern import Pattern, together
from predictor.network.flows.routes import HEADER, PACKET, Router, router
from predictor.network.topology.types import Topology
from profiler.errors import InputError

#: Seconds between the decision to send and the first byte, of NCCL with GPU-driven RDMA in order of magnitude.
LATENCY = 2e-6
DRAWS = 5


@dataclass(frozen=True)
class FlowResult:
    """seconds: median over draws of hashes of the time until all is received. spread: half the range of the draws [s], 0 where
    hashes do not matter. groups: median for every group, those of the first collective first. flows: that were simulated as one
    draw."""

    seconds: float
    spread: float
    groups: tuple[float, ...]
    flows: int


def simulate(
    topology: Topology, what: Collective | Sequence[Collective], latency: float = LATENCY, seed: int = 0, draws: int = DRAWS
) -> FlowResult:
    """Return the time of one collective, or of several that start together.

    latency: seconds from the moment that a flow may start to its first byte. draws: how many networks that differ in their
    hashes are simulated, where hashes matter, from ``seed`` on. Raises InputError for what the topology cannot carry.
    """
    if not 0 <= latency < 1 or draws < 1:
        raise InputError(f"latency {latency} s, {draws} draws; the latency must be below a second, and draws at least 1")
    each = [what] if isinstance(what, Collective) else list(what)
    if not each:
        raise InputError("no collective to simulate; give at least one")
    parts = [pattern(topology, one) for one in each]
    first = np.cumsum([0, *(len(one.groups) for one in each)])
    whole = together(parts, [0] * len(parts))
    groups = np.concatenate([part.group + offset for part, offset in zip(parts, first, strict=False)])
    ends = _ends(topology, whole, latency, range(seed, seed + draws))
    of_groups = np.zeros((len(ends), int(first[-1])))
    for row, end in zip(of_groups, ends, strict=True):
        np.maximum.at(row, groups, end)
    total = of_groups.max(axis=1)
    return FlowResult(
        float(np.median(total)), float(np.ptp(total) / 2), tuple(np.median(of_groups, axis=0).tolist()), whole.flows
    )


def _ends(topology: Topology, whole: Pattern, latency: float, seeds: Sequence[int]) -> list[np.ndarray]:
    """Return the end of every lane [s], for every draw, or once where hashes do not matter."""
    way = router(topology, whole.target)
    free = choices(way, whole)
    rows, tail = _fixed_routes(way, whole, seeds[0])
    if not (free.varies & ~free.alone).any():
        plan, color = merged(whole, np.where(free.harmless[rows], -1, rows), way.links.rate, latency, tail)
        ends = run(plan)
        if not _met(plan, ends, free.alone, color):
            return [ends.end[color]]
    return [run(_hashed(way, whole, free.harmless, latency, seed)).end for seed in seeds]


def _met(plan: Plan, ends: Ends, alone: np.ndarray, color: np.ndarray) -> bool:
    """Return whether two flows of a lane that may take several links were under way together."""
    return bool((ends.most[plan.bundle[np.unique(color[alone])]] > 1).any())


def _fixed_routes(way: Router, whole: Pattern, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rows = way.routes(whole.source, whole.target, np.zeros(len(whole), dtype=np.int64), seed)
    return rows, tails(way, rows, whole.size)


def tails(way: Router, rows: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the seconds from a flow's last byte leaving its source to the source's knowledge that it has arrived.

    That is the propagation there and back, and on every hop but the first the time to receive a packet before passing it on.
    rows: links [flows, hops], -1: none. size: bytes of each flow.
    """
    there = rows >= 0
    delay = np.where(there, way.links.delay[rows], 0.0).sum(axis=1)
    packet = np.minimum(size, PACKET)[:, None]
    forward = np.where(there, packet / way.links.rate[rows], 0.0)[:, 1:].sum(axis=1)
    back: np.ndarray = 2 * delay + forward
    return back


def _hashed(way: Router, whole: Pattern, harmless: np.ndarray, latency: float, seed: int) -> Plan:
    """Return the plan of one draw: every flow takes the route that its own hash chooses."""
    lane = np.repeat(np.arange(len(whole)), whole.steps)
    count = _earlier(whole, lane)
    rows = way.routes(whole.source[lane], whole.target[lane], count, seed)
    first = np.cumsum(whole.steps) - whole.steps
    tail = tails(way, rows[first], whole.size)
    bundles, bundle = make_bundles(np.where((rows >= 0) & ~harmless[rows], rows, -1), way.links.rate)
    return Plan(whole, bundles, bundle, latency, tail)


def _earlier(whole: Pattern, lane: np.ndarray) -> np.ndarray:
    """Return for every flow how many flows its pair of nodes has before it: by step, then by lane."""
    step = np.arange(len(lane)) - np.repeat(np.cumsum(whole.steps) - whole.steps, whole.steps)
    pair = whole.source[lane] * (int(whole.target.max()) + 1) + whole.target[lane]
    order = np.lexsort((lane, step, pair))
    new = np.concatenate([[True], np.diff(pair[order]) != 0])
    begin = np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))
    count = np.empty(len(order), dtype=np.int64)
    count[order] = np.arange(len(order)) - begin
    return count
