"""Collective operations of groups of GPUs, and the pattern of flows of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictor.network.flows.direct import all_to_all, nvls, point_to_point
from predictor.network.flows.pattern import Pattern, together
from predictor.network.flows.ring import ring, ring_broadcast
from predictor.network.flows.tree import tree_all_reduce
from predictor.network.topology.types import Topology
from profiler.errors import InputError, closest, shown

#: Algorithms of each operation, the default first.
ALGORITHMS = {
    "all_reduce": ("ring", "tree", "nvls"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "broadcast": ("ring",),
    "all_to_all": ("direct",),
    "p2p": ("direct",),
}


@dataclass(frozen=True)
class Collective:
    """One operation that all ``groups`` run at the same time.

    groups: GPUs of each group. bytes: the whole tensor of a rank, as nccl-tests counts it: what all_gather ends with, what
    reduce_scatter starts with. pxn: ring hops between servers keep to one rail, with a detour over NVLink before. A broadcast
    and a p2p message start at the first GPU of a group.
    """

    op: str
    groups: tuple[tuple[int, ...], ...]
    bytes: float
    algorithm: str
    pxn: bool = False


def collective(
    op: str, groups: Sequence[Sequence[int]] | np.ndarray, size: float, algorithm: str | None = None, pxn: bool = False
) -> Collective:
    """Return a collective; raise InputError for an unknown operation or algorithm and for groups that cannot run it."""
    if op not in ALGORITHMS:
        raise InputError(f"no collective is called {shown(op)}{closest(op, ALGORITHMS)}; they are {', '.join(ALGORITHMS)}")
    chosen = ALGORITHMS[op][0] if algorithm is None else algorithm
    if chosen not in ALGORITHMS[op]:
        raise InputError(
            f"{op} has no algorithm {shown(chosen)}{closest(chosen, ALGORITHMS[op])}; it has {', '.join(ALGORITHMS[op])}"
        )
    if not 0 < size < 1e18:
        raise InputError(f"{op} of {shown(size)} bytes; the size must be positive")
    if pxn and chosen != "ring":
        raise InputError(f"pxn is a way of rings; {op} by {chosen} has none")
    ranks = tuple(tuple(int(rank) for rank in group) for group in groups)
    if not ranks:
        raise InputError(f"{op} without groups; give at least one")
    for group in ranks:
        if len(group) < 2 or len(set(group)) < len(group):
            raise InputError(f"{op} of the group {shown(str(group))}; a group has two or more different GPUs")
        if op == "p2p" and len(group) != 2:
            raise InputError(f"p2p of {len(group)} GPUs; a message has one sender and one receiver")
    return Collective(op, ranks, float(size), chosen, pxn)


def pattern(topology: Topology, what: Collective) -> Pattern:
    """Return the flows of all groups of ``what``; raise InputError for GPUs that ``topology`` does not have."""
    for group in what.groups:
        if not 0 <= min(group) <= max(group) < topology.gpus:
            raise InputError(f"GPU {max(group)} is not on {topology.name}, which has GPUs 0 to {topology.gpus - 1}")
    return together([_pattern(topology, what, np.array(group)) for group in what.groups])


def _pattern(topology: Topology, what: Collective, ranks: np.ndarray) -> Pattern:
    per_server = topology.gpus_per_server
    if what.op == "all_to_all":
        return all_to_all(ranks, what.bytes)
    if what.op == "p2p":
        return point_to_point(ranks, what.bytes)
    if what.op == "broadcast":
        return ring_broadcast(ranks, per_server, what.bytes)
    if what.algorithm == "tree":
        return tree_all_reduce(ranks, per_server, what.bytes)
    if what.algorithm == "nvls":
        return nvls(ranks, _nvswitches(topology, ranks), what.bytes)
    return ring(ranks, per_server, what.bytes, 2 if what.op == "all_reduce" else 1, what.pxn)


def _nvswitches(topology: Topology, ranks: np.ndarray) -> np.ndarray:
    """Return the NVSwitches that all ``ranks`` are linked to."""
    nvswitch = topology.is_nvswitch()
    ends = np.concatenate([topology.source, topology.target]), np.concatenate([topology.target, topology.source])
    joined = np.isin(ends[0], ranks) & nvswitch[ends[1]]
    switches, count = np.unique(ends[1][joined], return_counts=True)
    shared: np.ndarray = switches[count == len(ranks)]
    if not len(shared):
        raise InputError(f"nvls reduces in an NVSwitch, and the {len(ranks)} GPUs of a group share none; use ring or tree")
    return shared
