"""How much of a large simulation is run: all of it, its first steps, or only its busiest link.

Merging makes most collectives of thousands of GPUs small. What hashes scatter cannot be merged. Then the first steps are
simulated and the time of the second half of them is taken for that of the others too; ``share`` says how much was simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from predictor.network.flows.events import run
from predictor.network.flows.lanes import Ends, Plan
from predictor.network.flows.pattern import Pattern
from profiler.errors import InputError

#: Work that one simulation may take, as Ends counts it: about two seconds.
MOST_WORK = 500_000
_MOST_FLOWS = 150_000  # of a pattern that is simulated whole
_PART_FLOWS = 60_000  # of the first steps of a larger one
_LEAST_STEPS = 4


@dataclass(frozen=True)
class Extent:
    """groups: seconds until each group has ended. share: part of the flows that were simulated. work, most: as in Ends."""

    groups: np.ndarray
    share: float
    work: int
    most: np.ndarray


def run_within(pattern: Pattern, make: Callable[[Pattern], Plan], lane: np.ndarray, group: np.ndarray) -> Extent:
    """Simulate ``pattern``, or as many of its steps as MOST_WORK allows.

    make: returns the plan of the pattern with fewer steps. lane: lane of the plan that stands for each original lane, whose
    ``group`` is given. Raises InputError where even two steps are too much, unless there is only one: then all flows are under
    way at once, and the answer is the time that the busiest link needs, a lower bound.
    """
    if pattern.flows <= _MOST_FLOWS:
        whole = run(make(pattern), MOST_WORK)
        if whole:
            return Extent(_ends(whole, pattern.steps, pattern.steps, lane, group), 1.0, whole.work, whole.most)
    steps = int(pattern.steps.max())
    count = min(max(_PART_FLOWS // len(pattern) // 2 * 2, _LEAST_STEPS), (steps - 1) // 2 * 2)
    while count >= 2 and count * len(pattern) <= _MOST_FLOWS:
        part = run(make(_first_steps(pattern, count)), MOST_WORK)
        if part:
            return _continued(pattern, count, part, lane, group)
        count = count // 4 * 2
    return _busiest(make(pattern), lane, group)


def _first_steps(pattern: Pattern, count: int) -> Pattern:
    return replace(pattern, steps=np.minimum(pattern.steps, count))


def _ends(ends: Ends, run_steps: np.ndarray, at: np.ndarray, lane: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return when each group has received the flows of step ``at`` (of each lane of the plan, counted from 1)."""
    last = np.cumsum(run_steps) - run_steps + np.minimum(at, run_steps) - 1
    found = np.zeros(int(group.max()) + 1)
    np.maximum.at(found, group, ends.received[last][lane])
    return found


def _continued(pattern: Pattern, count: int, part: Ends, lane: np.ndarray, group: np.ndarray) -> Extent:
    """Return the time of all steps if those after the first ``count`` take as long as the second half of them."""
    steps = np.minimum(pattern.steps, count)
    now = _ends(part, steps, steps, lane, group)
    half = _ends(part, steps, np.full_like(steps, count // 2), lane, group)
    total = np.zeros(len(now))
    np.maximum.at(total, group, pattern.steps[lane].astype(float))
    each = (now - half) / (count - count // 2)
    return Extent(now + np.maximum(total - count, 0) * each, float(steps.sum() / pattern.flows), part.work, part.most)


def _busiest(plan: Plan, lane: np.ndarray, group: np.ndarray) -> Extent:
    """Return the time of flows that all start at once, from the bytes on the busiest link of each group's flows."""
    pattern, bundles = plan.pattern, plan.bundles
    if len(pattern.parent) or int(pattern.steps.max()) > 1:
        raise InputError(
            f"{len(pattern)} pairs of nodes share links in ways that differ too much to simulate; take fewer GPUs, or a ring"
        )
    count = [len(uses) for uses in bundles.uses]
    link = np.array([one for uses in bundles.uses for one, _ in uses])
    weight = np.array([one for uses in bundles.uses for _, one in uses])
    size = np.bincount(plan.bundle, weights=pattern.size, minlength=len(count))
    busy = np.bincount(link, weights=np.repeat(size, count) * weight, minlength=len(bundles.rate)) / bundles.rate
    slowest = np.maximum.reduceat(busy[link], np.concatenate([[0], np.cumsum(count)[:-1]]))
    ends = plan.start + slowest[plan.bundle] + plan.tail
    found = np.zeros(int(group.max()) + 1)
    np.maximum.at(found, group, ends[lane])
    return Extent(found, 0.0, pattern.flows, np.zeros(0))
