"""Time of collectives on a topology, by simulating their flows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from predictor.network.flows.bottlenecks import choices
from predictor.network.flows.collective import Collective, pattern
from predictor.network.flows.extent import MOST_WORK, Extent, run_within
from predictor.network.flows.lanes import Plan, make_bundles
from predictor.network.flows.merge import merged, recolored
from predictor.network.flows.pattern import Pattern, together
from predictor.network.flows.routes import PACKET, Router, router
from predictor.network.topology.types import Topology
from profiler.errors import InputError

#: Seconds from the decision to send to the first byte: the order of magnitude of a kernel that posts an RDMA write.
LATENCY = 2e-6
DRAWS = 3


@dataclass(frozen=True)
class FlowResult:
    """Times of groups in seconds, float64 [draws, groups], those of the first collective first; one draw where hashes do not
    matter. flows: of one draw. share: part of them that was simulated, below 1 where that would take too long."""

    times: np.ndarray
    flows: int
    share: float

    @property
    def seconds(self) -> float:
        """Median over draws of the time until all groups have ended."""
        return float(np.median(self.times.max(axis=1)))

    @property
    def spread(self) -> float:
        """Standard deviation of that time over draws."""
        return float(self.times.max(axis=1).std())

    @property
    def group_seconds(self) -> float:
        """Time of one group: the mean over groups, of which some have worse luck with hashes, and the median over draws."""
        return float(np.median(self.times.mean(axis=1)))

    @property
    def group_spread(self) -> float:
        """Standard deviation of the time of a group over groups and draws."""
        return float(self.times.std())


def simulate(
    topology: Topology, what: Collective | Sequence[Collective], latency: float = LATENCY, seed: int = 0, draws: int = DRAWS
) -> FlowResult:
    """Return the time of one collective, or of several that start together.

    latency: seconds from the moment that a flow may start to its first byte. draws: how many networks that differ in their
    hashes are simulated, where hashes matter, from ``seed`` on; fewer where one takes long. Raises InputError for what the
    topology cannot carry.
    """
    if not 0 <= latency < 1 or draws < 1 or seed < 0:
        raise InputError(f"latency {latency} s, {draws} draws from seed {seed}; they must be 0 to 1 s, 1 or more, 0 or more")
    each = [what] if isinstance(what, Collective) else list(what)
    if not each:
        raise InputError("no collective to simulate; give at least one")
    parts = [pattern(topology, one) for one in each]
    first = np.cumsum([0, *(len(one.groups) for one in each)])
    whole = together(parts, [0] * len(parts))
    groups = np.concatenate([part.group + offset for part, offset in zip(parts, first, strict=False)])
    found = _draw_all(topology, whole, groups, latency, seed, draws)
    return FlowResult(np.array([one.groups for one in found]), whole.flows, min(one.share for one in found))


def _draw_all(topology: Topology, whole: Pattern, groups: np.ndarray, latency: float, seed: int, draws: int) -> list[Extent]:
    """Return the outcome of every draw, or one where hashes do not matter."""
    way = router(topology, whole.target)
    rows = way.routes(whole.source, whole.target, np.zeros(len(whole), dtype=np.int64), seed)  # raises where there are none
    free = choices(way, whole)
    tail = tails(way, rows, whole.size)
    if not (free.varies & ~free.alone).any():
        plan, color = merged(whole, np.where(free.harmless[rows], -1, rows), way.links.rate, latency, tail)
        one = run_within(plan.pattern, recolored(plan), color, groups)
        alone = plan.bundle[np.unique(color[free.alone])]
        if not (
            len(one.most) and (one.most[alone] > 1).any()
        ):  # no two flows of a lane that had the choice were under way together
            return [one]
    found: list[Extent] = []
    while len(found) < draws and (not found or _affordable(found)):
        make = _hashed(way, free.harmless, latency, tail, seed + len(found))
        found.append(run_within(whole, make, np.arange(len(whole)), groups))
    return found


def _affordable(found: Sequence[Extent]) -> bool:
    """Return whether another draw, as much work as the first, keeps all within a few seconds."""
    most = MOST_WORK if found[0].share == 1 else MOST_WORK // 3
    return (len(found) + 1) * found[0].work < most


def tails(way: Router, rows: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the seconds from a flow's last byte leaving its source to the source's knowledge that it has arrived.

    That is the propagation there and back, and on every hop but the first the time to receive a packet before passing it on.
    rows: links [flows, hops], -1: none. size: bytes of each flow.
    """
    there = rows >= 0
    delay = np.where(there, way.links.delay[rows], 0.0).sum(axis=1)
    packet = np.minimum(size, PACKET)[:, None]
    forward = np.where(there, packet / way.links.rate[rows], 0.0)[:, 1:].sum(axis=1)
    return 2 * delay + forward


def _hashed(way: Router, harmless: np.ndarray, latency: float, tail: np.ndarray, seed: int) -> Callable[[Pattern], Plan]:
    """Return a function to the plan of one draw: every flow takes the route that its own hash chooses."""

    def make(whole: Pattern) -> Plan:
        lane = np.repeat(np.arange(len(whole)), whole.steps)
        rows = way.routes(whole.source[lane], whole.target[lane], _earlier(whole, lane), seed)
        bundles, bundle = make_bundles(np.where((rows >= 0) & ~harmless[rows], rows, -1), way.links.rate)
        return Plan(whole, bundles, bundle, latency, tail)

    return make


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
