"""What logs of collectives reached between nodes, beside what the network that they are said to be of carries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from predictor.network.collective_points import sent_share
from profiler.profile.profile import COLLECTIVES, Device, Table
from profiler.units import GB, GBIT

_OVER = 1.05  #: rates beyond the possible one by more are not of this network
_SLOW = 0.2  #: a share of a ring's rate below which a network is hardly used


@dataclass(frozen=True)
class Reached:
    """The best bus bandwidth [bytes/s] of one collective over ``nodes`` nodes of ``ranks`` ranks.

    ring: of a ring that fills every NIC (of an all-to-all: of ranks that do). most: of the best algorithm.
    """

    op: str
    ranks: int
    nodes: int
    bandwidth: float
    ring: float
    most: float

    def text(self, network: float) -> str:
        """Return it in words. network: bytes/s per GPU between nodes."""
        sentence = (
            f"{self.op} over {self.nodes} nodes x {self.ranks}: at best {self.bandwidth / GB:,.3g} GB/s of bus bandwidth; "
            f"full NICs of {network / GBIT:,.4g} Gbit/s per GPU carry {self.ring / GB:,.3g}"
        )
        if self.bandwidth > _OVER * self.most:
            return f"{sentence}, so the logs are of a faster network: state it with --cluster"
        if self.bandwidth < _SLOW * self.ring:
            return f"{sentence}, so hardly any of it is used: is that the network, and did the test use every NIC?"
        return sentence


def reached(tables: Mapping[str, Table], device: Device) -> Iterator[Reached]:
    """Yield the best of each collective over the most nodes that it was measured on.

    A node's k ranks send what leaves it by a NIC each. Of n ranks, a ring passes a node's border with all the traffic of its
    bus, so that it reaches k NICs. Where nodes first reduce or last gather inside, only (n - k) / (n - 1) of that passes; where
    switches add (SHARP), an all-reduce passes once instead of 2 (n - 1) / n times. Of an all-to-all's traffic, which has no
    ring, (n - k) / (n - 1) leaves a rank's node by that rank's NIC.
    """
    for op in COLLECTIVES:
        table = tables.get(op)
        if table is None or not len(far := table.where((table["inter"] > 1) & (table["bytes"] > 0))):
            continue
        widest = far.where(far["inter"] == far["inter"].max())
        widest = widest.where(widest["intra"] == widest["intra"].max())
        ranks, nodes = int(widest["intra"][0]), int(widest["inter"][0])
        every, nic = ranks * nodes, device.network_bandwidth
        rates = sent_share(op, every) * widest["bytes"] / widest["seconds"]
        leaving = (every - ranks) / (every - 1)
        ring = nic / leaving if op == "all2all" else ranks * nic
        best = {"all_reduce": 2 * (every - 1) / every, "all_gather": 1 / leaving, "reduce_scatter": 1 / leaving}.get(op, 1.0)
        yield Reached(op, ranks, nodes, float(np.max(rates)), ring, best * ring)
