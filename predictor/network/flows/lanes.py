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
    """uses: (link, weight) of each bundle; rate: of every link [bytes/s].

    A weight is the number of flows like that of the bundle which the link carries for one of it, above 1 where equal lanes are
    merged.
    """

    uses: tuple[tuple[tuple[int, float], ...], ...]
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


@dataclass(frozen=True)
class Ends:
    """received: seconds when each flow is received, lane by lane, step by step. most: flows of each bundle that were under way
    together. work: rates that were set, those of flows
    that share links counted several times."""

    received: np.ndarray
    most: np.ndarray
    work: int


def make_bundles(rows: np.ndarray, rate: np.ndarray) -> tuple[Bundles, np.ndarray]:
    """Return the bundles of routes [flows, hops] (-1: no link) and the bundle of each row."""
    ordered = np.sort(rows, axis=1)
    number = np.zeros(len(rows), dtype=np.int64)
    for column in ordered.T:
        number = np.unique(number * (len(rate) + 1) + column + 1, return_inverse=True)[1]
    _, first = np.unique(number, return_index=True)
    uses = tuple(tuple((link, 1.0) for link in row if link >= 0) for row in ordered[first].tolist())
    return Bundles(uses, rate), number
