"""Max-min fair rates of bundles of flows on links (progressive filling).

All rates rise together until a link is full; the flows on it keep their rate and the others rise on. A flow then has a link
that is full and on which no other flow is faster, and there is only one such set of rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Links that a flow of a bundle takes, and how many such flows each carries for one of it.
Uses = Sequence[tuple[int, float]]

#: Above this many bundles, arrays are faster than dictionaries.
_MANY = 40
_NONE = 1e-9  # flows on a link that count as none, after sums and differences of weights


def fair_rates(bundles: Sequence[int], flows: Sequence[int], uses: Sequence[Uses], capacity: Sequence[float]) -> list[float]:
    """Return the rate of one flow of each of ``bundles`` [bytes/s].

    flows: number of flows of every bundle; uses: of every bundle; capacity: of every link [bytes/s].
    """
    if len(bundles) == 1:
        alone = bundles[0]
        return [min(capacity[link] / (flows[alone] * weight) for link, weight in uses[alone])]
    if len(bundles) > _MANY:
        return _fill_arrays(bundles, flows, uses, capacity)
    load: dict[int, float] = {}
    users: dict[int, list[int]] = {}
    for index, bundle in enumerate(bundles):
        count = flows[bundle]
        for link, weight in uses[bundle]:
            if link in load:
                load[link] += count * weight
                users[link].append(index)
            else:
                load[link] = count * weight
                users[link] = [index]
    left = {link: capacity[link] for link in load}
    rates = [-1.0] * len(bundles)
    while load:
        share, full = min([(left[link] / flow, link) for link, flow in load.items()])
        for index in users[full]:
            if rates[index] >= 0:
                continue
            rates[index] = share = max(share, 0.0)
            count = flows[bundles[index]]
            for link, weight in uses[bundles[index]]:
                rest = load[link] - count * weight
                if rest > _NONE:
                    load[link] = rest
                    left[link] -= count * weight * share
                else:
                    del load[link]
    return rates


def _fill_arrays(bundles: Sequence[int], flows: Sequence[int], uses: Sequence[Uses], capacity: Sequence[float]) -> list[float]:
    count = [len(uses[b]) for b in bundles]
    link = np.array([one for b in bundles for one, _ in uses[b]], dtype=np.int64)
    use = np.array([weight * flows[b] for b in bundles for _, weight in uses[b]])
    names, link = np.unique(link, return_inverse=True)
    left = np.array([capacity[name] for name in names.tolist()])
    return fill(np.repeat(np.arange(len(bundles)), count), link, use, left).tolist()


def fill(row: np.ndarray, link: np.ndarray, use: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """Return the rate of a flow of each row [bytes/s]; a round settles all links that are the tightest of each of their flows.

    row, link, use: one entry for every link that a row takes, sorted by row, whose numbers are 0 up; use: flows that the link
    carries. capacity: of every link [bytes/s].
    """
    rates = np.zeros(int(row[-1]) + 1)
    left = capacity
    while len(row):
        first = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]]))
        count = np.diff(np.append(first, len(row)))
        load = np.bincount(link, weights=use, minlength=len(left))
        share = np.where(load > _NONE, np.maximum(left, 0.0) / np.maximum(load, _NONE), np.inf)
        least = np.minimum.reduceat(share[link], first)
        each = np.repeat(least, count)
        lowest = np.full(len(left), np.inf)
        np.minimum.at(lowest, link, each)
        now = np.logical_or.reduceat((share <= lowest * (1 + 1e-12))[link], first)
        rates[row[first[now]]] = least[now]
        taken = np.repeat(now, count)
        left = left - np.bincount(link[taken], weights=use[taken] * each[taken], minlength=len(left))
        row, link, use = row[~taken], link[~taken], use[~taken]
    return rates
