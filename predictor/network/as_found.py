"""The network as a user found it: bandwidths that the law between nodes needs to give a measured all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from predictor.estimate import Estimate

#: Bytes of the all-reduce that a stated bus bandwidth is taken to be of: large enough that latency does not count.
PROBE_BYTES = 2.0**32
#: Uncertainty of messages between nodes where the bus bandwidth that they reached is stated (assumed; else that of the fit).
FOUND_STD = 0.15
_LEAST, _MOST = 1e-3, 10.0  #: of the nominal bandwidth
_STEPS = 40

#: Bytes, ranks in a node, nodes, bandwidth between nodes -> estimate of an all-reduce.
AllReduce = Callable[[float, int, int, float], Estimate]


@dataclass(frozen=True)
class FoundNetwork:
    """A network that gave groups of ``nodes`` nodes ``share`` of its nominal bandwidth."""

    nodes: int
    share: float

    def over(self, nodes: int, nominal: float) -> float:
        """Return the bandwidth [bytes/s per accelerator] of groups that span ``nodes`` nodes, of a ``nominal`` one.

        A power of the nodes: the nominal bandwidth within one, the found share over all. So it fell where it was measured: on
        32 to 512 H100 of one cluster, jobs of 4, 8, 16, 32 and 64 nodes found 0.46, 0.28, 0.16, 0.08 and 0.04 (medians).
        """
        return float(nominal * self.share ** (np.log(nodes) / np.log(self.nodes)))


def bus_bandwidth(seconds: float, size: float, ranks: int) -> float:
    """Return bytes/s on the bus as nccl-tests prints them for an all-reduce: 2 (n - 1) / n of the buffer over its time."""
    return 2 * (ranks - 1) / ranks * size / seconds


def found_network_bandwidth(all_reduce: AllReduce, intra: int, inter: int, busbw: float, nominal: float) -> float:
    """Return the bandwidth between nodes [bytes/s per accelerator] with which an all-reduce reaches ``busbw`` [bytes/s].

    Bisection, because a wider network never takes longer; at least a thousandth and at most ten times ``nominal``.
    """
    low, high = np.log(_LEAST * nominal), np.log(_MOST * nominal)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        seconds = float(all_reduce(PROBE_BYTES, intra, inter, float(np.exp(middle))).seconds)
        low, high = (middle, high) if bus_bandwidth(seconds, PROBE_BYTES, intra * inter) < busbw else (low, middle)
    return float(np.exp((low + high) / 2))
