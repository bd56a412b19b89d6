"""Max-min fair rates of bundles of flows on links (progressive filling).

All rates rise together until a link is full; the flows on it keep their rate and the others rise on. A flow then has a link
that is full and on which no other flow is faster, and there is only one such set of rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

#: Above this many bundles, arrays are faster than dictionaries.
_MANY = 40
_NONE = 1e-9  # flows on a link that count as none, after sums and differences of weights


def fair_rates(
    bundles: Sequence[int],
    flows: Sequence[int],
    links: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    capacity: Sequence[float],
) -> list[float]:
    """Return the rate of one flow of each of ``bundles`` [bytes/s].

    flows: number of flows of every bundle; links, weights: of every bundle, as in Bundles; capacity: of every link [bytes/s].
    """
    if len(bundles) > _MANY:
        return _fill_arrays(bundles, flows, links, weights, capacity)
    if len(bundles) == 1:
        alone = bundles[0]
        return [
            min(capacity[link] / (flows[alone] * weight) for link, weight in zip(links[alone], weights[alone], strict=True))
        ]
    load: dict[int, float] = {}
    users: dict[int, list[int]] = {}
    for index, bundle in enumerate(bundles):
        for link, weight in zip(links[bundle], weights[bundle], strict=True):
            load[link] = load.get(link, 0.0) + flows[bundle] * weight
            users.setdefault(link, []).append(index)
    left = {link: capacity[link] for link in load}
    rates = [0.0] * len(bundles)
    frozen = [False] * len(bundles)
    while load:
        link, share = _tightest(load, left)
        for index in users[link]:
            if frozen[index]:
                continue
            frozen[index] = True
            rates[index] = share
            bundle = bundles[index]
            for other, weight in zip(links[bundle], weights[bundle], strict=True):
                used = flows[bundle] * weight
                load[other] -= used
                left[other] -= used * share
        for done in [link for link, flow in load.items() if flow <= _NONE]:
            del load[done]
    return rates


def _tightest(load: Mapping[int, float], left: Mapping[int, float]) -> tuple[int, float]:
    best, least = -1, float("inf")
    for link, flow in load.items():
        share = left[link] / flow
        if share < least:
            best, least = link, share
    return best, max(least, 0.0)


def _fill_arrays(
    bundles: Sequence[int],
    flows: Sequence[int],
    links: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    capacity: Sequence[float],
) -> list[float]:
    """Fill with arrays; every round settles all links that are the tightest of each of their flows."""
    count = [len(links[b]) for b in bundles]
    row = np.repeat(np.arange(len(bundles)), count)
    names, link = np.unique(_flat(links[b] for b in bundles), return_inverse=True)
    use = np.array([w * flows[b] for b in bundles for w in weights[b]])
    left = np.array([capacity[name] for name in names.tolist()])
    rates = np.zeros(len(bundles))
    first = np.concatenate([[0], np.cumsum(count)[:-1]])
    return _rounds(rates, row, link, use, left, first).tolist()


def _flat(parts: Iterable[Sequence[int]]) -> np.ndarray:
    return np.array([link for part in parts for link in part], dtype=np.int64)


def _rounds(
    rates: np.ndarray, row: np.ndarray, link: np.ndarray, use: np.ndarray, left: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Fill ``rates``; row, link, use: an entry for every link of every bundle, by bundle, from ``first`` on."""
    free = np.ones(len(rates), dtype=bool)
    use = use.copy()
    while free.any():
        load = np.bincount(link, weights=use, minlength=len(left))
        share = np.where(load > _NONE, np.maximum(left, 0.0) / np.maximum(load, _NONE), np.inf)
        least = np.minimum.reduceat(share[link], first)
        least[~free] = np.inf
        lowest = np.full(len(left), np.inf)
        np.minimum.at(lowest, link, least[row])
        settled = (share <= lowest * (1 + 1e-12)) & (load > _NONE)
        now = np.logical_or.reduceat(settled[link], first) & free
        rates[now] = least[now]
        taken = now[row]
        left = left - np.bincount(link[taken], weights=(use * rates[row])[taken], minlength=len(left))
        use[taken] = 0.0
        free &= ~now
    return rates
