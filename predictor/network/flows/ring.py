"""Rings as NCCL builds them: one channel for each rank of a node, and how all_reduce, all_gather and broadcast use them."""

from __future__ import annotations

import numpy as np

from predictor.network.flows.pattern import Pattern, lanes, together

#: Bytes of the pieces that a pipelined algorithm sends: one of 8 steps of NCCL's buffer of 4 MiB (Simple protocol).
PIECE = 2**19


def by_server(ranks: np.ndarray, per_server: int) -> list[np.ndarray]:
    """Return the ranks of each server, in order."""
    ordered = np.sort(ranks)
    _, first = np.unique(ordered // per_server, return_index=True)
    return np.split(ordered, first[1:])


def ring_order(servers: list[np.ndarray], channel: int) -> np.ndarray:
    """Return the ranks in the order in which a channel visits them.

    Channel c enters every server at its local rank c and leaves it at local rank c - 1, so that each channel uses another NIC.
    """
    return np.concatenate([np.roll(ranks, -(channel % len(ranks))) for ranks in servers])


def ring(ranks: np.ndarray, per_server: int, size: float, rounds: int, pxn: bool = False) -> Pattern:
    """Return rings that pass ``size`` bytes around ``rounds`` times: 2 for all_reduce, 1 for all_gather and reduce_scatter.

    Every rank sends a part of size / ranks / channels bytes in each step of a round, ranks - 1 of them. It sends what it
    received in the step before. pxn: the last rank of a server hands its part over NVLink to the first one, whose NIC is in the
    rail that the next server's first rank is in.
    """
    servers = by_server(ranks, per_server)
    channels = max(len(part) for part in servers)
    part = size / len(ranks) / channels
    steps = rounds * (len(ranks) - 1)
    return together([_one_ring(servers, channel, part, steps, pxn) for channel in range(channels)], [0] * channels)


def _one_ring(servers: list[np.ndarray], channel: int, part: float, steps: int, pxn: bool) -> Pattern:
    order = ring_order(servers, channel)
    following = np.roll(order, -1)
    place = np.arange(len(order))
    after = np.roll(place, -1)
    if not pxn or len(servers) == 1:
        return lanes(order, following, part, steps, [(place, after, 1, False)])
    ends = np.cumsum([len(ranks) for ranks in servers]) - 1
    starts = np.concatenate([[0], ends[:-1] + 1])
    ends, starts = ends[ends > starts], starts[ends > starts]  # a server of one rank needs no detour
    relay = len(order) + np.arange(len(ends))  # lanes from the first rank of a server to the next server
    source, target = np.concatenate([order, order[starts]]), np.concatenate([following, following[ends]])
    target[ends] = order[starts]
    arrives = place.copy()  # the lane that reaches the next rank
    arrives[ends] = relay
    return lanes(source, target, part, steps, [(arrives, after, 1, False), (ends, relay, 0, False)])


def chain(order: np.ndarray, size: float) -> Pattern:
    """Return ``size`` bytes passed along ``order``, in pieces that follow one another: broadcast of one channel."""
    pieces = max(-(-int(size) // PIECE), 1)
    place = np.arange(len(order) - 1)
    waits = [(place[:-1], place[1:], 0, False), (place, place, 1, True)]
    return lanes(order[:-1], order[1:], size / pieces, pieces, waits)


def ring_broadcast(ranks: np.ndarray, per_server: int, size: float) -> Pattern:
    """Return the broadcast of the first rank's ``size`` bytes along a ring; every channel carries a share."""
    servers = by_server(ranks, per_server)
    channels = max(len(part) for part in servers)
    orders = [ring_order(servers, channel) for channel in range(channels)]
    orders = [np.roll(order, -int(np.flatnonzero(order == ranks[0])[0])) for order in orders]
    return together([chain(order, size / channels) for order in orders], [0] * channels)
