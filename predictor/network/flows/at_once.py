"""Many flows that start together, as an all_to_all sends them: all rates anew each time that flows end."""

from __future__ import annotations

import numpy as np

from predictor.network.flows.lanes import Ends, Plan
from predictor.network.flows.max_min import fill

_CLOSE = 1e-9  # flows whose ends differ by this share of the time so far end together
_MANY, _CLOSE_OF_MANY = 4000, 1e-3  # with thousands of flows few end at the same instant: they end up to a thousandth early


def run_at_once(plan: Plan) -> Ends:
    """Simulate a plan of lanes of one step that wait for nothing."""
    bundle, size = plan.bundle, plan.pattern.size
    count = [len(uses) for uses in plan.bundles.uses]
    row = np.repeat(np.arange(len(count)), count)
    link = np.array([one for uses in plan.bundles.uses for one, _ in uses], dtype=np.int64)
    weight = np.array([one for uses in plan.bundles.uses for _, one in uses])
    names, link = np.unique(link, return_inverse=True)
    capacity = plan.bundles.rate[names]
    flows = np.bincount(bundle, minlength=len(count))
    most = flows.copy()
    end, sent, clock = np.zeros(len(size)), np.zeros(len(count)), 0.0
    under_way = np.arange(len(size))
    close = _CLOSE if len(size) <= _MANY else _CLOSE_OF_MANY
    work = 0
    while len(under_way):
        on = flows[row] > 0
        rates = np.zeros(len(count))
        active = np.flatnonzero(flows > 0)
        place = np.cumsum(flows > 0) - 1
        rates[active] = fill(place[row[on]], link[on], (weight * flows[row])[on], capacity)
        left = (size[under_way] - sent[bundle[under_way]]) / rates[bundle[under_way]]
        step = float(left.min())
        clock += step
        sent += rates * step
        done = left <= step + close * clock
        end[under_way[done]] = clock
        flows = flows - np.bincount(bundle[under_way[done]], minlength=len(count))
        under_way = under_way[~done]
        work += len(active) // 4  # arrays are faster than events
    return Ends(plan.start + end + plan.tail, most, work)
