"""The messages of one device in seconds: collectives, the exchange of experts' tokens, and how they delay compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from predictor.corrections import Corrections
from predictor.estimate import Basis, Estimate
from predictor.network.collective import CollectiveModel
from predictor.network.expert_exchange import CALL_SECONDS, ExpertExchangeModel
from predictor.network.leaf_switches import LeafSwitches
from predictor.network.overlap import Contention
from predictor.network.rank_skew import MOST_RANKS, SKEWED_COLLECTIVES
from predictor.network.stated_busbw import LINKS_ALIKE, PROBE_BYTES, STATED_STD, StatedLinks, bus_bandwidth, fit_stated_network
from profiler.profile.profile import Device

if TYPE_CHECKING:
    from predictor.network.simulated import SimulatedNetwork


@dataclass(frozen=True)
class NetworkCosts:
    """The links of one device and the network between its nodes.

    exchanges: dispatch and combine of experts over ranks. bandwidth: bytes/s per accelerator between nodes. contention: see
    network.overlap. rank_skew: seconds that a collective waits in a training step for each further rank of a node
    (predictor.network.rank_skew). shared_links: (op, ranks in the node) -> buffer bytes/s when all groups of strided ranks in
    the node communicate at once. stated: bus bandwidths and leaf switches that the user stated.
    """

    device: Device
    collectives: CollectiveModel | SimulatedNetwork
    bandwidth: float
    contention: Contention
    exchanges: ExpertExchangeModel = field(default_factory=ExpertExchangeModel)
    rank_skew: float = 0.0
    shared_links: Mapping[tuple[str, int], float] = field(default_factory=dict)
    stated: StatedLinks = StatedLinks()
    corrections: Corrections = Corrections()

    @property
    def measured_collectives(self) -> CollectiveModel:
        """The collectives of the profile, without a simulated network."""
        return self.collectives.measured

    def collective(self, op: str, size: Any, intra: Any, inter: Any, strided: Any = 0, waits: bool = True) -> Estimate:
        """A collective (or p2p) on a whole buffer of ``size`` bytes over ``intra`` ranks in each of ``inter`` nodes.

        strided: 0 where the ranks are neighbours, else nodes from one of the group's nodes to the next, at least 1; several
        such groups share the node's links at once. Behind an NVSwitch this costs nothing; across a PCIe tree it does, where the
        profile states how much. waits: for the last rank of a node, as predictor.network.rank_skew says; not where another
        collective of the same ranks follows at once, which is then charged for it.
        """
        alone = self._alone(op, size, intra, inter, strided)
        seconds, far = alone.seconds, np.asarray(inter) > 1
        if self.stated.link_slowdown != 1.0:
            # one all-reduce was stated: other ops, sizes and latencies are taken to be as much slower, but not as much faster
            slower = self.stated.link_slowdown if op == "all_reduce" else max(self.stated.link_slowdown, 1.0)
            seconds = np.where(far, seconds, seconds * slower)
            added = self.stated.link_std  # they may differ by as much as the all-reduce differs from the profile's
            std = np.where(far, alone.relative_std, np.hypot(alone.relative_std, added))
            alone = alone._replace(relative_std=std)
            if added > LINKS_ALIKE:
                basis = np.where(far, alone.basis, np.maximum(alone.basis, np.int8(Basis.EXTRAPOLATED))).astype(np.int8)
                alone = alone._replace(basis=basis)
        if self.stated.network is not None and self.stated.network.is_reached:
            std = np.where(far, np.minimum(alone.relative_std, STATED_STD), alone.relative_std)
            alone = alone._replace(relative_std=std)
        if op in SKEWED_COLLECTIVES and waits:
            seconds = seconds + self.rank_skew * (np.minimum(intra, MOST_RANKS) - 1)
        for (shared, ranks), rate in self.shared_links.items():
            if shared == op:
                together = (np.asarray(strided) > 0) & (np.asarray(intra) == ranks)
                seconds = np.where(together, np.maximum(seconds, np.asarray(size) / rate), seconds)
        return self.corrections.less_certain(alone._replace(seconds=seconds * self._between(inter)), "collective")

    def _alone(self, op: str, size: Any, intra: Any, inter: Any, strided: Any) -> Estimate:
        """A collective without rank skew, at the stated bandwidths and below leaf switches."""
        if self.stated.is_nominal:
            return self.collectives.predict(op, size, intra, inter, self.bandwidth)
        size, intra, inter, strided = np.broadcast_arrays(size, intra, inter, strided)
        bandwidths = self.stated.bandwidths(op, inter, strided, self.bandwidth)
        out: list[np.ndarray] = [np.zeros(size.shape), np.zeros(size.shape), np.zeros(size.shape, dtype=np.int8)]
        for bandwidth in np.unique(bandwidths):
            at = bandwidths == bandwidth
            part = self.collectives.predict(op, size[at], intra[at], inter[at], float(bandwidth))
            for whole, values in zip(out, part, strict=True):
                whole[at] = values
        return Estimate(*out)

    def expert_exchange(
        self,
        op: str,
        tokens: Any,
        row_bytes: Any,
        top_k: Any,
        experts: Any,
        intra: Any,
        inter: Any,
        dispatcher: str = "deepep",
        groups: Any = 0,
        chosen: Any = 0,
    ) -> Estimate:
        """Dispatch or combine (``op``) of ``tokens`` per rank; arguments as in predictor.network.expert_exchange."""
        shape = (tokens, row_bytes, top_k, experts, intra, inter)
        nodes = np.asarray(inter)
        neighbours = np.zeros_like(nodes)
        bandwidth = self.stated.bandwidths("all2all", nodes, neighbours, self.bandwidth)
        alone = self.exchanges.predict(op, *shape, bandwidth, dispatcher, groups, chosen)
        called = np.where(alone.seconds > 0, CALL_SECONDS[dispatcher], 0.0)
        return self.corrections.less_certain(
            alone._replace(seconds=alone.seconds * self._between(inter) + called), "collective"
        )

    def contention_seconds(self, op: str, size: Any, inter: Any, seconds: Any) -> np.ndarray:
        """Seconds by which an overlapped collective of ``seconds`` over ``inter`` nodes delays the compute.

        Where it was measured what a second between nodes costs, each costs that, except for the sends of a ring, which run
        beside attention on few channels. Else the collective takes multiprocessors and memory bandwidth in proportion to the
        bytes it moves: a network slower than the links inside a node moves the same bytes over a longer time (NCCL opens fewer
        channels), so they cost what they would inside a node. This does not hold where the delay exceeds the collective's own
        time, as on a CPU, whose cores drive the network.
        """
        passing = np.array(np.broadcast_to(seconds, np.broadcast_shapes(np.shape(size), np.shape(inter), np.shape(seconds))))
        far = np.broadcast_to(inter, passing.shape) > 1
        per_second = self.contention.over(np.where(op == "p2p", 1, inter))
        per_byte = self.contention.inside < 1 and (op == "p2p" or not self.contention.between)
        if far.any() and per_byte and self.device.gpus_per_node > 1:
            ranks = 2 if op == "p2p" else self.device.gpus_per_node
            inside = self.collective(op, np.broadcast_to(size, passing.shape)[far], ranks, 1)
            passing[far] = np.minimum(passing[far], inside.seconds)
        return per_second * passing

    def for_world(self, world: int, per_domain: int) -> NetworkCosts:
        """The same device for a job of ``world`` GPUs, ``per_domain`` in a node or NVLink domain: simulations ask for it."""
        return replace(self, collectives=self.collectives.for_world(world, per_domain))

    def with_link_peers(self, peers: int) -> NetworkCosts:
        """The same device, of which each GPU's links are split among ``peers`` others of its node (0: behind a switch)."""
        return replace(
            self, collectives=self.collectives.with_link_peers(peers), exchanges=self.exchanges.with_link_peers(peers)
        )

    def with_leaf_switches(self, switches: LeafSwitches | None) -> NetworkCosts:
        """The same device below leaf switches whose uplinks are a bottleneck (None: they are not)."""
        return replace(self, stated=replace(self.stated, leaf_switches=switches))

    def with_stated_busbw(self, ranks: int, node: int, busbw: float | None, busbw_in_node: float | None) -> NetworkCosts:
        """The same device at stated all-reduce bus bandwidths [bytes/s]: over ``ranks`` ranks, and in a node.

        node: the most of them that share a node or NVLink domain. The network's bandwidth becomes what the law needs for the
        first (StatedNetwork); times inside a node are scaled to the second, or to the first where all ranks are in one. None:
        not stated.
        """
        stated, exchanges = self.stated, self.exchanges
        inside, of_links = (node, busbw_in_node) if busbw_in_node or ranks > node else (ranks, busbw)
        if of_links and inside > 1:
            seconds = float(self.collectives.predict("all_reduce", PROBE_BYTES, inside, 1, self.bandwidth).seconds)
            slowdown = bus_bandwidth(seconds, PROBE_BYTES, inside) / of_links
            stated = replace(stated, link_slowdown=slowdown)
            exchanges = exchanges.with_slower_links(max(slowdown, 1.0))
        if busbw and ranks > node:

            def all_reduce(size: float, intra: int, inter: int, bandwidth: float) -> Estimate:
                return self.collectives.predict("all_reduce", size, intra, inter, bandwidth)

            stated = replace(stated, network=fit_stated_network(all_reduce, node, -(-ranks // node), busbw, self.bandwidth))
        return replace(self, stated=stated, exchanges=exchanges)

    def _between(self, inter: Any) -> Any:
        """Return the factor of messages between nodes where there are several, else of those inside one."""
        return np.where(np.asarray(inter) > 1, self.corrections.factor("network"), self.corrections.factor("links"))
