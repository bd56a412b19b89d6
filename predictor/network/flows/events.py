"""Event simulation: flows start when what they wait for is done, share links fairly while they last, and let others start.

A lane may have several flows under way: each is a connection of its own, as in SimAI's simulation.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np

from predictor.network.flows.at_once import run_at_once
from predictor.network.flows.lanes import Ends, Plan
from predictor.network.flows.max_min import fair_rates

_TOGETHER = 1e-12  # seconds; events that are this close are one
_MANY = 200  # flows that start together
_SHARED = 4  # times the work of a flow that shares links with others


def run(plan: Plan, most_work: int | None = None) -> Ends | None:
    """Simulate ``plan`` from its first to its last event; return None if that would need more than ``most_work`` new rates."""
    if _all_at_once(plan):
        return run_at_once(plan)
    flows = _Flows(plan)
    traffic = _Traffic(plan)
    events: list[Any] = [(plan.start, flow) for flow in flows.first()]
    events.sort()
    while events:
        now = events[0][0]
        until = now + _TOGETHER
        touched: dict[int, None] = {}
        while events and events[0][0] <= until:
            event = heappop(events)
            what = event[1]
            if what >= 0:
                bundle = flows.bundle[what]
                traffic.add(bundle, what, flows.size[flows.lane[what]], now)
                touched[bundle] = None
            elif event[2] == traffic.version[~what]:
                for flow in traffic.take(~what, now):
                    flows.done(flow, now, events)
                touched[~what] = None
        traffic.share(touched, now, events)
        if most_work is not None and traffic.work > most_work:
            return None
    return Ends(np.array(flows.received), np.array(traffic.most), traffic.work)


def _all_at_once(plan: Plan) -> bool:
    """Return whether all flows start together and are so many that arrays are faster."""
    return not len(plan.pattern.parent) and plan.pattern.flows == len(plan.pattern) > _MANY


class _Flows:
    """What every flow waits for. Flow numbers count lane by lane, step by step."""

    def __init__(self, plan: Plan) -> None:
        pattern = plan.pattern
        steps = pattern.steps.tolist()
        offset = (np.cumsum(pattern.steps) - pattern.steps).tolist()
        self.lane = np.repeat(np.arange(len(pattern)), pattern.steps).tolist()
        fixed = len(plan.bundle) == len(pattern)
        self.bundle = (np.repeat(plan.bundle, pattern.steps) if fixed else plan.bundle).tolist()
        self.size = pattern.size.tolist()
        self.tail = plan.tail.tolist()
        self.start = plan.start
        self.received = [0.0] * len(self.lane)
        self.ready = [0.0] * len(self.lane)
        at_once = np.bincount(pattern.child[pattern.lag == 0], minlength=len(pattern)).tolist()
        later = np.bincount(pattern.child, minlength=len(pattern)).tolist()
        self.missing: list[int] = []
        for count, first, then in zip(steps, at_once, later, strict=True):
            self.missing += [first] + [then] * (count - 1)
        self.waiting: list[list[tuple[int, int, bool]]] = [[] for _ in steps]
        rows = zip(*(getattr(pattern, name).tolist() for name in ("parent", "child", "lag", "sent")), strict=True)
        for parent, child, lag, sent in rows:  # (its flow is that of the parent plus the first number, below the second, sent)
            shift = offset[child] + lag - offset[parent]
            self.waiting[parent].append((shift, offset[child] + steps[child], sent))

    def first(self) -> list[int]:
        """Return the flows that wait for nothing."""
        return [flow for flow, missing in enumerate(self.missing) if not missing]

    def done(self, flow: int, now: float, events: list[Any]) -> None:
        """Note that a flow has left its source, and add to ``events`` the start of those that waited for it alone."""
        lane = self.lane[flow]
        received = now + self.tail[lane]
        self.received[flow] = received
        for shift, limit, sent in self.waiting[lane]:
            other = flow + shift
            if other < limit:
                time = now if sent else received
                if time > self.ready[other]:
                    self.ready[other] = time
                self.missing[other] -= 1
                if not self.missing[other]:
                    heappush(events, (self.ready[other] + self.start, other))


class _Traffic:
    """Bundles under way. Every bundle has a clock of the bytes that each of its flows has sent since the bundle last was empty:
    a flow ends when the clock shows what it showed at its start plus the flow's size."""

    def __init__(self, plan: Plan) -> None:
        bundles = plan.bundles
        self.uses = bundles.uses
        self.links = [tuple(link for link, _ in uses) for uses in self.uses]
        self.capacity = bundles.rate.tolist()
        self.alone = [min(self.capacity[link] / weight for link, weight in uses) for uses in self.uses]
        count = len(self.links)
        self.on: list[dict[int, None]] = [{} for _ in self.capacity]
        self.flows = [0] * count
        self.most = [0] * count
        self.clock = [0.0] * count
        self.seen = [0.0] * count
        self.rate = [0.0] * count
        self.version = [0] * count
        self.ends: list[list[tuple[float, int]]] = [[] for _ in range(count)]
        self.work = 0

    def add(self, bundle: int, flow: int, size: float, now: float) -> None:
        """Start a flow of ``size`` bytes."""
        if not self.flows[bundle]:
            self.clock[bundle] = 0.0
            for link in self.links[bundle]:
                self.on[link][bundle] = None
        else:
            self.clock[bundle] += self.rate[bundle] * (now - self.seen[bundle])
        self.seen[bundle] = now
        self.flows[bundle] += 1
        if self.flows[bundle] > self.most[bundle]:
            self.most[bundle] = self.flows[bundle]
        heappush(self.ends[bundle], (self.clock[bundle] + size, flow))

    def take(self, bundle: int, now: float) -> list[int]:
        """Return the flows of a bundle that end now."""
        rate = self.rate[bundle]
        self.clock[bundle] += rate * (now - self.seen[bundle])
        self.seen[bundle] = now
        until = self.clock[bundle] * (1 + 1e-12) + 2 * _TOGETHER * rate
        queue, found = self.ends[bundle], []
        while queue and queue[0][0] <= until:
            found.append(heappop(queue)[1])
        self.flows[bundle] -= len(found)
        if not self.flows[bundle]:
            for link in self.links[bundle]:
                del self.on[link][bundle]
        return found

    def share(self, touched: dict[int, None], now: float, events: list[Any]) -> None:
        """Give new rates to the touched bundles and to all that share links with them, directly or through others."""
        settled: set[int] = set()
        on = self.on
        for bundle in touched:
            if bundle in settled:
                continue
            count = self.flows[bundle]
            if not count:
                for link in self.links[bundle]:
                    for other in list(on[link]):
                        if other not in settled:
                            self._settle(other, touched, settled, now, events)
                continue
            for link in self.links[bundle]:
                if len(on[link]) > 1:
                    self._settle(bundle, touched, settled, now, events)
                    break
            else:
                self.work += 1
                self._schedule(bundle, self.alone[bundle] / count, now, events)

    def _settle(self, bundle: int, touched: dict[int, None], settled: set[int], now: float, events: list[Any]) -> None:
        sharing = self._connected(bundle)
        settled.update(sharing)
        self.work += _SHARED * len(sharing)
        rates = fair_rates(sharing, self.flows, self.uses, self.capacity)
        for other, rate in zip(sharing, rates, strict=True):
            if other in touched or abs(rate - self.rate[other]) > 1e-9 * rate:
                self._schedule(other, rate, now, events)

    def _connected(self, bundle: int) -> list[int]:
        found = {bundle: None}
        links: set[int] = set()
        stack = [bundle]
        while stack:
            for link in self.links[stack.pop()]:
                if link not in links:
                    links.add(link)
                    for other in self.on[link]:
                        if other not in found:
                            found[other] = None
                            stack.append(other)
        return list(found)

    def _schedule(self, bundle: int, rate: float, now: float, events: list[Any]) -> None:
        clock = self.clock[bundle] + self.rate[bundle] * (now - self.seen[bundle])
        self.clock[bundle] = clock
        self.seen[bundle] = now
        self.rate[bundle] = rate
        version = self.version[bundle] + 1
        self.version[bundle] = version
        heappush(events, (now + (self.ends[bundle][0][0] - clock) / rate, ~bundle, version))
