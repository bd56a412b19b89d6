"""What the event simulation works on: lanes with the bundles that carry their flows.

A bundle is a set of links that a flow takes at once. All flows of one bundle have the same rate at any time, so that the
simulation keeps one rate and one clock for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictor.network.flows.pattern import Pattern


@dataclass(frozen=True)
class Bundles:
    """links: link numbers of each bundle. rate: of every link [bytes/s].

    weights: how many flows like that of the bundle each link carries for one of it, above 1 where equal lanes are merged.
    """

    links: tuple[tuple[int, ...], ...]
    weights: tuple[tuple[float, ...], ...]
    rate: np.ndarray


@dataclass(frozen=True)
class Plan:
    """Lanes ready to be simulated.

    pattern: sizes, steps, dependencies. bundle: index into bundles, int64 [lanes] where all steps of a lane take one, else
    [flows], lane by lane. start: seconds from the moment that a flow may start to its first byte. tail: seconds from its last
    byte to the sender's knowledge that it arrived [lanes].
    """

    pattern: Pattern
    bundles: Bundles
    bundle: np.ndarray
    start: float
    tail: np.ndarray


def make_bundles(rows: np.ndarray, rate: np.ndarray) -> tuple[Bundles, np.ndarray]:
    """Return the bundles of routes [flows, hops] (-1: no link) and the bundle of each row."""
    ordered = np.sort(rows, axis=1)
    number = np.zeros(len(rows), dtype=np.int64)
    for column in ordered.T:
        number = np.unique(number * (len(rate) + 1) + column + 1, return_inverse=True)[1]
    _, first = np.unique(number, return_index=True)
    links = tuple(tuple(link for link in row if link >= 0) for row in ordered[first].tolist())
    return Bundles(links, tuple((1.0,) * len(row) for row in links), rate), number
