"""Links and networks whose all-reduce bus bandwidth a user states: the bandwidths with which the model reproduces it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from predictor.estimate import Estimate
from predictor.network.collective_points import sent_share
from predictor.network.leaf_switches import LeafSwitches
from profiler.units import GB

#: Bytes of the all-reduce that a stated bus bandwidth is taken to be of: large enough that latency does not count.
PROBE_BYTES = 2.0**32
#: Standard deviation of log(time) between nodes where the bus bandwidth that they reach is stated (assumed; else the fit's).
STATED_STD = 0.15
#: Up to this difference of log(time), stated links count as the profile's: bus bandwidths are rounded, and vary by as much.
LINKS_ALIKE = 0.05
PAIR = 2  #: nodes that exchange directly
#: Bandwidth that pairs of nodes reach over that of larger jobs, where both were measured: 0.96 over 0.48 of nominal (medians
#: of 4 to 64 nodes: 0.53, 0.48, 0.45, 0.49 and 0.47), on 16 to 512 H100 of one cluster.
PAIR_GAIN = 2.0
_LEAST = 1e-6  #: of the nominal bandwidth, which is the most
_STEPS = 60
_TOLERANCE = 0.01

#: Bytes, ranks in a node, nodes, bandwidth between nodes -> estimate of an all-reduce.
AllReduce = Callable[[float, int, int, float], Estimate]


@dataclass(frozen=True)
class StatedNetwork:
    """A network of which groups of ``nodes`` nodes reach ``share`` of the nominal bandwidth.

    stated, reached: bus bandwidths [bytes/s] of an all-reduce, as the user measured it and as predicted with that share.
    """

    nodes: int
    share: float
    stated: float = 0.0
    reached: float = 0.0

    @property
    def of_pairs(self) -> float:
        """The share of the nominal bandwidth that groups of two nodes get."""
        return self.share if self.nodes <= PAIR else min(PAIR_GAIN * self.share, 1.0)

    @property
    def is_reached(self) -> bool:
        """Whether the network as predicted gives what was stated."""
        return self.stated <= self.reached * (1 + _TOLERANCE)

    def text(self) -> str:
        """Return in words what the stated all-reduce makes of the network."""
        if self.is_reached:
            groups, pairs = ("nodes", "") if self.nodes <= PAIR else ("more than two nodes", f", pairs {self.of_pairs:.0%}")
            return (
                f"the stated all-reduce of {self.stated / GB:,.3g} GB/s over all ranks: groups of {groups} get "
                f"{self.share:.0%} of the network's nominal bandwidth{pairs}"
            )
        return (
            f"the stated all-reduce of {self.stated / GB:,.0f} GB/s is faster than the {self.reached / GB:,.0f} GB/s "
            "predicted at the network's nominal bandwidth, which is used"
        )

    def over(self, nodes: int, nominal: float) -> float:
        """Return the bandwidth [bytes/s per accelerator] of groups that span ``nodes`` nodes, of a ``nominal`` one.

        In larger jobs pairs get more of it than larger groups, by what was measured (PAIR_GAIN).
        """
        return nominal * (self.of_pairs if nodes <= PAIR else self.share)


@dataclass(frozen=True)
class StatedLinks:
    """What a user stated of links and network, in addition to their nominal bandwidths.

    link_slowdown: times inside a node over the profile's. network: None where no all-reduce between nodes was stated.
    leaf_switches: None unless their uplinks are a bottleneck.
    """

    link_slowdown: float = 1.0
    network: StatedNetwork | None = None
    leaf_switches: LeafSwitches | None = None

    @property
    def is_nominal(self) -> bool:
        """Whether all groups get the nominal bandwidth between nodes."""
        return self.network is None and self.leaf_switches is None

    @property
    def link_std(self) -> float:
        """Standard deviation of log(time) that a stated all-reduce, where it differs from the profile's, adds inside a node."""
        return min(abs(math.log(self.link_slowdown)), STATED_STD)

    def bandwidths(self, op: str, inter: np.ndarray, strided: np.ndarray, nominal: float) -> np.ndarray:
        """Return bytes/s per accelerator between nodes for groups that span ``inter`` nodes, ``strided`` nodes apart."""
        reached_bandwidth = np.full(inter.shape, nominal)
        if self.network is not None:
            for nodes in np.unique(inter):
                reached_bandwidth[inter == nodes] = self.network.over(int(nodes), nominal)
        if self.leaf_switches is not None:
            reached_bandwidth *= self.leaf_switches.share(op, inter, strided)
        return reached_bandwidth

    def sentences(self) -> tuple[str, ...]:
        """Return in words what stated all-reduces and leaf switches make of the network and of the links, a sentence each."""
        sentences = [part.text() for part in (self.network, self.leaf_switches) if part is not None]
        if self.link_slowdown != 1.0:
            which = "collectives" if self.link_slowdown > 1 else "all-reduces, and no other collectives,"
            times = f"{self.link_slowdown:.2f} times the profile's time"
            sentences.append(f"{which} inside a node or NVLink domain take {times}, as the stated all-reduce does")
        return tuple(sentences)


def bus_bandwidth(seconds: float, size: float, ranks: int) -> float:
    """Return bytes/s on the bus as nccl-tests prints them for an all-reduce: 2 (n - 1) / n of the buffer over its time."""
    return float(sent_share("all_reduce", ranks)) * size / seconds


def fit_stated_network(all_reduce: AllReduce, intra: int, inter: int, busbw: float, nominal: float) -> StatedNetwork:
    """Return the share of the ``nominal`` bandwidth per accelerator with which an all-reduce reaches ``busbw`` [bytes/s both].

    Bisection, because a wider network never takes longer. Links carry no more than nominal: where an all-reduce of all their
    bandwidth is predicted to be slower than stated, the rest is something else's (NVLink SHARP, say) and no link's.
    """

    def reached(share: float) -> float:
        seconds = float(all_reduce(PROBE_BYTES, intra, inter, share * nominal).seconds)
        return bus_bandwidth(seconds, PROBE_BYTES, intra * inter)

    if (most := reached(1.0)) <= busbw:
        return StatedNetwork(inter, 1.0, busbw, most)
    low, high = np.log(_LEAST), 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if reached(float(np.exp(middle))) < busbw else (low, middle)
    share = float(np.exp((low + high) / 2))
    return StatedNetwork(inter, share, busbw, reached(share))
