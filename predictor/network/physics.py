"""Physical model of a collective that spans nodes, similar to NCCL's own tuning model.

With S bytes, N nodes of k ranks, n = N k, and node egress E = min(k * bandwidth per GPU, link bandwidth) * efficiency, an
algorithm has a latency (its steps) and a transfer time, ``wire`` (its bytes over the slowest link). NCCL takes the fastest
algorithm:

* ring: r (n - 1) steps, r (n - 1) / n S / E; r is 2 for all_reduce, else 1. N - 1 of n - 1 steps cross the network, the others
  take ``inside_step`` of its time (NCCL's tuning: 3.4 of 14 us). Each step waits for a chunk from the neighbour, so steps
  overlap with the transfer of other chunks: (latency^p + wire^p)^(1/p), where p is the ring's sharpness.
* broadcast: the ring's chain, in which slices follow each other: its latency, the time in which one slice passes all NICs, and
  the transfer add up. A slice is 512 KiB of a channel (NCCL_BUFFSIZE over NCCL_STEPS; BROADCAST_SLICESTEPS is 1), and a channel
  has a NIC, of 200 Gbit/s or, where a GPU has more, of that (assumed).
* tree (all_reduce): 2 log2 N network hops and 2 S / E, since every inner node of the tree sends the buffer up once and down
  twice, half of it in each of two trees. Two nodes exchange directly: ``two_node_share`` S / E.
* ring and tree in the low-latency protocol, whose shorter steps send flags with the data at a fraction of the rate.
* all2all: S (n - k) / n over the rank's own NIC, and one message to each of n - k peers.
* p2p: one message over one NIC.

No time is below that of the part inside the node. A ring cannot use reduction in the switch, so its all_reduce inside a node
is a reduce_scatter and an all_gather.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from profiler.errors import InputError, closest

BROADCAST_SLICE = 512 * 1024.0  #: bytes of each channel
NIC = 25e9  #: bytes/s


@dataclass(frozen=True)
class NetworkParameters:
    """Constants of one network; latencies in seconds, efficiencies as fractions of the nominal rate.

    The defaults are orders of magnitude from public logs of InfiniBand clusters; estimates that use them have basis roofline.
    """

    start: float = 8e-6  # every collective
    simple_start: float = 30e-6  # in addition, outside the low-latency protocol
    tree_hop: float = 25e-6
    tree_hop_low_latency: float = 8e-6
    ring_step: float = 8e-6
    ring_step_low_latency: float = 3e-6
    ring_sharpness: float = 1.5
    inside_step: float = 0.25  # relative to a step between nodes; not fitted, few groups differ in ranks per node
    link_efficiency: float = 0.9
    tree_efficiency: float = 0.8  # relative to the rate after link_efficiency
    low_latency_efficiency: float = 0.06  # relative to the same rate
    two_node_share: float = 1.4
    peer_latency: float = 5e-6
    all2all_efficiency: float = 0.8
    p2p_latency: float = 15e-6
    p2p_efficiency: float = 0.8

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> NetworkParameters:
        unknown = sorted(values.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise InputError(f"the network has no constant {unknown[0]}{closest(unknown[0], [f.name for f in fields(cls)])}")
        chosen = {name: float(value) for name, value in values.items()}
        bad = [name for name, value in chosen.items() if not (np.isfinite(value) and value >= 0)]
        if bad:
            raise InputError(f"the network's constant {bad[0]} is {chosen[bad[0]]}; it must be finite and not negative")
        return cls(**chosen)


def join(latency: np.ndarray, wire: np.ndarray, sharpness: float) -> np.ndarray:
    """(latency^p + wire^p)^(1/p), p = ``sharpness``, for arrays that are >= 0, at least one of them positive."""
    large, small = np.maximum(latency, wire), np.minimum(latency, wire)
    return large * (1.0 + (small / np.maximum(large, 1e-30)) ** sharpness) ** (1.0 / sharpness)


@dataclass(frozen=True)
class Groups:
    """Messages between nodes as float64 arrays of one shape.

    size: bytes of the whole buffer. intra, inter: ranks in a node, nodes (>= 2). bandwidth: bytes/s per GPU between nodes.
    link_bandwidth: bytes/s of one GPU inside a node (number or array). inside: least seconds of the part inside a node (0
    where intra is 1); inside_ring: the same for a ring's all_reduce.
    """

    size: np.ndarray
    intra: np.ndarray
    inter: np.ndarray
    bandwidth: np.ndarray
    link_bandwidth: np.ndarray | float
    inside: np.ndarray
    inside_ring: np.ndarray

    @property
    def ranks(self) -> np.ndarray:
        return self.intra * self.inter

    def egress(self, physics: NetworkParameters) -> np.ndarray:
        """Bytes/s that a node sends: each rank has its own NIC, and one ring passes through every rank's links."""
        return np.minimum(self.intra * self.bandwidth, self.link_bandwidth) * physics.link_efficiency


def network_seconds(op: str, at: Groups, physics: NetworkParameters, ring_only: bool = False) -> np.ndarray:
    """Seconds of ``op`` for each of the groups; ``ring_only``: the user forbids NCCL the tree."""
    if op == "all2all":
        return _all2all(at, physics)
    if op == "p2p":
        return _p2p(at, physics)
    ring = _ring(op, at, physics)
    return np.minimum(ring, _tree(at, physics)) if op == "all_reduce" and not ring_only else ring


def _ring(op: str, at: Groups, physics: NetworkParameters) -> np.ndarray:
    rounds = 2.0 if op == "all_reduce" else 1.0
    steps = rounds * (at.ranks - 1.0)
    crossing = rounds * (at.inter - 1.0)
    hops = crossing + (steps - crossing) * physics.inside_step
    share = 1.0 if op == "broadcast" else steps / at.ranks  # before a broadcast no receiver holds a part
    wire = share * at.size / at.egress(physics)
    quick = physics.start + hops * physics.ring_step_low_latency + np.maximum(wire / physics.low_latency_efficiency, at.inside)
    latency, bulk = physics.start + physics.simple_start + hops * physics.ring_step, np.maximum(wire, at.inside_ring)
    if op == "broadcast":
        return np.minimum(quick, latency + _fill(at, crossing, physics) + bulk)
    return np.minimum(quick, join(latency, bulk, physics.ring_sharpness))


def _fill(at: Groups, crossing: np.ndarray, physics: NetworkParameters) -> np.ndarray:
    """Seconds until the first slice of a channel has passed the NICs of a broadcast's chain before the last one: the last rank
    receives nothing before. ``crossing`` links are between nodes; those inside a node are quick beside them."""
    nic = np.maximum(at.bandwidth, NIC) * physics.link_efficiency
    return (crossing - 1.0) * np.minimum(BROADCAST_SLICE, at.size) / nic


def _tree(at: Groups, physics: NetworkParameters) -> np.ndarray:
    hops = 2.0 * np.log2(at.inter)
    wire = np.where(at.inter > 2, 2.0, physics.two_node_share) * at.size / at.egress(physics)
    quick = hops * physics.tree_hop_low_latency + np.maximum(wire / physics.low_latency_efficiency, at.inside)
    bulk = physics.simple_start + hops * physics.tree_hop + np.maximum(wire / physics.tree_efficiency, at.inside)
    return physics.start + np.minimum(quick, bulk)


def _all2all(at: Groups, physics: NetworkParameters) -> np.ndarray:
    peers = at.ranks - at.intra
    wire = at.size * peers / at.ranks / (at.bandwidth * physics.all2all_efficiency)
    return physics.start + peers * physics.peer_latency + np.maximum(wire, at.inside)


def _p2p(at: Groups, physics: NetworkParameters) -> np.ndarray:
    wire = at.size / (at.bandwidth * physics.p2p_efficiency)
    return np.maximum(physics.start + physics.p2p_latency + wire, at.inside)  # no faster than between two ranks of a node
