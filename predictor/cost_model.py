"""The cost model of one machine: for an op it gives the time, its uncertainty and its basis (predictor.fitted makes it)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.kernels.attn_physics import mean_keys
from predictor.kernels.block_scaled import block_scaled
from predictor.kernels.chunk_scan import chunk_scan
from predictor.kernels.derating import Derating
from predictor.kernels.device_uncertainty import DeviceUncertainty
from predictor.kernels.dtypes import BLOCKWISE, ELEMENT_BYTES, FAMILIES, HALF_BYTES
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.fp8_attention import RATIO_STD, fp8_attention_ratio
from predictor.kernels.grouped_linear import GroupedLinearModel
from predictor.kernels.linear import LinearModel
from predictor.kernels.measured_attention import MeasuredAttention
from predictor.kernels.memory_bound import MemoryBoundModel
from predictor.kernels.state_space import state_space
from predictor.learned import Learned
from predictor.network.as_found import FOUND_STD, PROBE_BYTES, FoundNetwork, bus_bandwidth, found_network
from predictor.network.collective import CollectiveModel
from predictor.network.expert_exchange import CALL_SECONDS, ExpertExchangeModel
from predictor.network.leaf_switches import LeafSwitches
from predictor.network.overlap import Contention
from predictor.network.rank_skew import MOST_RANKS, SKEWED_COLLECTIVES
from profiler.profile.profile import Device

if TYPE_CHECKING:
    from predictor.network.simulated import SimulatedNetwork

#: Generation of FlashAttention -> speed of the next generation relative to it, on hardware that runs both, for long sequences:
#: 2 over 1 from Dao 2023 (arXiv 2307.08691, figures 4 to 7, A100), 3 over 2 from Shah et al. 2024 (arXiv 2407.08608, figures 5
#: and 6, H100; the published bars shipped with the H100 profile have a median of 1.49 and reach 1.76 at 16k tokens), 4 over 3
#: derived, because the instructions of generation 2 take as many cycles on both: cuDNN 9.19 on GB200 over H200, for each
#: multiprocessor and clock, at 4k to 16k tokens, both passes (1.93 to 2.15; predictor.kernels.fp8_attention has its source).
FLASH_SPEEDUP = {1: 1.75, 2: 1.6, 3: 2.05}
#: How much longer a backward pass of attention takes that adds its parts in a fixed order. Published: up to 37.9% fewer FLOPs
#: per second (arXiv 2601.21824, FlashAttention 3 on H800); assumed: half of that.
DETERMINISTIC_BACKWARD = 1 / (1 - 0.379 / 2)
#: Standard deviation of log(time) of what the host does: its bandwidths are stated, not measured.
HOST_STD = 0.3


@dataclass(frozen=True)
class CostModel:
    """The cost model of one device: a method for each kind of op, of arrays of shapes, which returns an Estimate (seconds,
    uncertainty, basis), and methods that return the same device under other conditions (with_..., for_world).

    network_bandwidth: bytes/s per accelerator between nodes. derating: how much longer GEMM and attention kernels take in a
    training run than in the profile's loops (clocks under the power limit, laboratory, framework); 1 means as profiled.
    attention_derating: of attention alone, 0 where it is that of GEMMs. power_slowdown: above 1 where what the power limit
    costs was measured: this is the derating, and beside other work less is left of it (solver.step.power).
    attention_generation: the FlashAttention that ``attention`` stands for (0: the device's newest). attention_scale: how much
    slower the framework's attention kernel is than that; backward_scale: its backward pass further. shared_links: (op, ranks in
    the node) -> buffer bytes/s when all groups of strided ranks in the node communicate at once. contention: see
    network.overlap.
    rank_skew: seconds that a collective waits in a training step for each further rank of a node (predictor.network.rank_skew).
    measured: attention calls timed on the device itself, under the load of a training run; these times already include the
    derating, but for power_slowdown. exchanges: dispatch and combine of experts over ranks. host_rates: bytes/s of the link
    to the host and of the host's memory, by name. plain_layer_launch: seconds in which the host launches both passes of one
    layer of plain PyTorch (0: not measured). link_slowdown, found: see with_found_network. leaf_switches: where the uplinks
    of these are a bottleneck. uncertainty: set where nothing was measured on this device; base_derating: then that of GEMMs on
    the measured one that it is derived from, as its laboratory found it.
    learned: from own training runs.
    """

    device: Device
    linears: LinearModel
    grouped: GroupedLinearModel
    attention: FlashAttnModel
    kernels: MemoryBoundModel
    collectives: CollectiveModel | SimulatedNetwork
    network_bandwidth: float
    contention: Contention
    rank_skew: float = 0.0
    derating: float = 1.0
    attention_derating: float = 0.0
    quantised_derating: Derating = Derating(1.0, 0.0)
    power_slowdown: float = 1.0
    link_slowdown: float = 1.0
    found: FoundNetwork | None = None
    leaf_switches: LeafSwitches | None = None
    attention_generation: int = 0
    attention_scale: float = 1.0
    backward_scale: float = 1.0
    shared_links: Mapping[tuple[str, int], float] = field(default_factory=dict)
    measured: MeasuredAttention | None = None
    exchanges: ExpertExchangeModel = field(default_factory=ExpertExchangeModel)
    uncertainty: DeviceUncertainty | None = None
    base_derating: float = 0.0
    host_rates: Mapping[str, float] = field(default_factory=dict)
    plain_layer_launch: float = 0.0
    learned: Learned | None = None

    @property
    def measured_collectives(self) -> CollectiveModel:
        """The collectives of the profile, without a simulated network."""
        return self.collectives.measured

    def factor(self, name: str) -> float:
        """Return by how much longer times of one kind are than in the profile, as learned (predictor.learned.FACTORS)."""
        return self.learned.factor(name) if self.learned is not None else 1.0

    def linear(
        self, m: Any, n: Any, k: Any, batch: Any = 1, layout: Any = 0, accumulate: Any = False, dtype: str = "bf16",
        parts: Any = 1,
    ) -> Estimate:  # fmt: skip
        """A GEMM of m x n outputs over k, ``batch`` times; layout and accumulate as in predictor.kernels.linear.

        parts: kernels over which m is spread, which together take no less time than one.
        """

        def of(rows: Any) -> Estimate:
            alone = self.linears.predict(rows, n, k, batch, layout, dtype, accumulate)
            return self._gemm(alone, layout, dtype)

        whole = of(m)
        if np.max(parts, initial=1) == 1:
            return whole
        part = of(np.maximum(m // parts, 1))
        return whole._replace(seconds=np.maximum(whole.seconds, parts * part.seconds))

    def grouped_linear(
        self, groups: Any, tokens_per_group: Any, n: Any, k: Any, passes: Any = 0, accumulate: Any = False, dtype: str = "bf16",
        launched: bool = True,
    ) -> Estimate:  # fmt: skip
        """GEMMs of ``groups`` experts; arguments as in predictor.kernels.grouped_linear.

        launched: the host launches one for each group, for which it needs a time that the device's clocks do not change;
        otherwise they are one kernel.
        """
        found = self._gemm(self.grouped.predict(groups, tokens_per_group, n, k, passes, dtype, accumulate), passes, dtype)
        return found._replace(seconds=np.maximum(found.seconds, self.grouped.launch_seconds(groups) * launched))

    def _gemm(self, alone: Estimate, layout: Any, dtype: str) -> Estimate:
        scaled = block_scaled(alone, layout, self.device) if dtype == BLOCKWISE else alone
        return self._learned(self._derated(scaled, dtype), "gemm")

    def flash_attn(
        self,
        batch: Any,
        seq_q: Any,
        seq_kv: Any,
        heads: Any,
        kv_heads: Any,
        head_dim: Any,
        v_head_dim: Any,
        causal: Any = True,
        backward: Any = False,
        dtype: str = "",
    ) -> Estimate:
        """Fused attention, forward or backward: the measured time where there is one, else the fit.

        dtype: "fp8", "mxfp8", or "" for 16 bits.
        """
        shape = (batch, seq_q, seq_kv, heads, kv_heads, head_dim, v_head_dim, causal, backward)
        best = self._derated(self.attention.predict(*shape), of="attention")
        if self.measured is not None:
            # calls are timed as a profile's kernels are, so that the power limit costs them as much
            alone = best._replace(seconds=best.seconds / self.power_slowdown)
            found = self.measured.instead_of(alone, *shape)
            best = found._replace(seconds=found.seconds * self.power_slowdown)
        scale = self.attention_scale * np.where(backward, self.backward_scale, 1.0)
        if dtype:
            keys, dims = mean_keys(seq_q, seq_kv, causal), np.add(head_dim, v_head_dim)
            best = best._replace(relative_std=np.hypot(best.relative_std, RATIO_STD))
            scale = scale * fp8_attention_ratio(self.device, dtype, keys, dims, causal, backward)
        return self._learned(best._replace(seconds=best.seconds * scale), "attention")

    def chunk_scan(self, batch: Any, seq: Any, heads: Any, key_dim: Any, value_dim: Any, backward: Any = False) -> Estimate:
        """The gated delta rule, forward or backward; arguments as in predictor.kernels.chunk_scan."""
        alone = chunk_scan(self.device, batch, seq, heads, key_dim, value_dim, backward)
        return self._learned(self._less_certain(alone, "attention"), "attention")

    def state_space(
        self, batch: Any, seq: Any, heads: Any, head_dim: Any, state_dim: Any, groups: Any, chunk: Any, backward: Any = False
    ) -> Estimate:
        """Mamba-2's state-space kernels, forward or backward; arguments as in predictor.kernels.state_space."""
        alone = state_space(self.device, batch, seq, heads, head_dim, state_dim, groups, chunk, backward)
        return self._learned(self._less_certain(alone, "attention"), "attention")

    def memory_bound(self, kind: str, size: Any) -> Estimate:
        """A kernel that moves ``size`` bytes, read plus written; no transposes where fp8 GEMMs read operands in both orders."""
        if kind == "transpose" and not self.device.transposes_fp8:
            none = np.zeros(np.shape(size))
            return Estimate(none, none, np.full(np.shape(size), np.int8(Basis.MEASURED)))
        return self._learned(self._less_certain(self.kernels.predict(kind, size), "memory_bound"), "memory_bound")

    def host(self, what: str, size: Any) -> Estimate:
        """Bytes over the link to the host or through its memory (``host_rates``, stated by the cluster)."""
        seconds = np.asarray(size, dtype=float) / self.host_rates[what] * self.factor("host")
        return Estimate(seconds, np.full(seconds.shape, HOST_STD), np.full(seconds.shape, np.int8(Basis.ROOFLINE)))

    def collective(self, op: str, size: Any, intra: Any, inter: Any, strided: Any = 0, waits: bool = True) -> Estimate:
        """A collective (or p2p) on a whole buffer of ``size`` bytes over ``intra`` ranks in each of ``inter`` nodes.

        strided: 0 where the ranks are neighbours, else nodes from one of the group's nodes to the next, at least 1; several
        such groups share the node's links at once. Behind an NVSwitch this costs nothing; across a PCIe tree it does, where the
        profile states how much. waits: for the last rank of a node, as predictor.network.rank_skew says; not where another
        collective of the same ranks follows at once, which is then charged for it.
        """
        alone = self._alone(op, size, intra, inter, strided)
        seconds, far = alone.seconds, np.asarray(inter) > 1
        if self.link_slowdown != 1.0:
            # one all-reduce was stated: other ops, sizes and latencies are taken to be as much slower, but not as much faster
            slower = self.link_slowdown if op == "all_reduce" else max(self.link_slowdown, 1.0)
            seconds = np.where(far, seconds, seconds * slower)
            std = np.where(far, alone.relative_std, np.hypot(alone.relative_std, FOUND_STD))
            basis = np.where(far, alone.basis, np.maximum(alone.basis, np.int8(Basis.EXTRAPOLATED))).astype(np.int8)
            alone = alone._replace(relative_std=std, basis=basis)
        if self.found is not None and self.found.is_reached:
            std = np.where(far, np.minimum(alone.relative_std, FOUND_STD), alone.relative_std)
            alone = alone._replace(relative_std=std)
        if op in SKEWED_COLLECTIVES and waits:
            seconds = seconds + self.rank_skew * (np.minimum(intra, MOST_RANKS) - 1)
        for (shared, ranks), rate in self.shared_links.items():
            if shared == op:
                together = (np.asarray(strided) > 0) & (np.asarray(intra) == ranks)
                seconds = np.where(together, np.maximum(seconds, np.asarray(size) / rate), seconds)
        return self._less_certain(alone._replace(seconds=seconds * self._between(inter)), "collective")

    def _alone(self, op: str, size: Any, intra: Any, inter: Any, strided: Any) -> Estimate:
        """A collective that waits for nobody, on the network as it was found, or as its leaf switches leave it."""
        if self.found is None and self.leaf_switches is None:
            return self.collectives.predict(op, size, intra, inter, self.network_bandwidth)
        size, intra, inter, strided = np.broadcast_arrays(size, intra, inter, strided)
        bandwidths = self._bandwidths(op, inter, strided)
        out: list[np.ndarray] = [np.zeros(size.shape), np.zeros(size.shape), np.zeros(size.shape, dtype=np.int8)]
        for bandwidth in np.unique(bandwidths):
            at = bandwidths == bandwidth
            part = self.collectives.predict(op, size[at], intra[at], inter[at], float(bandwidth))
            for whole, values in zip(out, part, strict=True):
                whole[at] = values
        return Estimate(*out)

    def _bandwidths(self, op: str, inter: np.ndarray, strided: np.ndarray) -> np.ndarray:
        """Return bytes/s between nodes of each group."""
        found = np.full(inter.shape, self.network_bandwidth)
        if self.found is not None:
            for nodes in np.unique(inter):
                found[inter == nodes] = self.found.over(int(nodes), self.network_bandwidth)
        if self.leaf_switches is not None:
            found *= self.leaf_switches.share(op, inter, strided)
        return found

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
        bandwidth = self._bandwidths("all2all", nodes, np.zeros_like(nodes))  # ranks of experts are neighbours
        alone = self.exchanges.predict(op, *shape, bandwidth, dispatcher, groups, chosen)
        called = np.where(alone.seconds > 0, CALL_SECONDS[dispatcher], 0.0)
        return self._less_certain(alone._replace(seconds=alone.seconds * self._between(inter) + called), "collective")

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

    def for_world(self, world: int, per_domain: int) -> CostModel:
        """The same device for a job of ``world`` GPUs, ``per_domain`` in a node or NVLink domain: simulations ask for it."""
        return replace(self, collectives=self.collectives.for_world(world, per_domain))

    def with_link_peers(self, peers: int) -> CostModel:
        """The same device, of which each GPU's links are split among ``peers`` others of its node (0: behind a switch)."""
        return replace(
            self, collectives=self.collectives.with_link_peers(peers), exchanges=self.exchanges.with_link_peers(peers)
        )

    def with_network(self, network_bandwidth: float | None) -> CostModel:
        """The same device on a network of ``network_bandwidth`` bytes/s per accelerator (None: the device's default)."""
        return replace(self, network_bandwidth=network_bandwidth or self.device.network_bandwidth)

    def with_found_network(self, ranks: int, node: int, busbw: float | None, busbw_in_node: float | None) -> CostModel:
        """The same device on links that reach stated all-reduces: bus bandwidths [bytes/s] over ``ranks`` ranks, and in a node.

        node: the most of them that share a node or NVLink domain. The network's bandwidth becomes what the law needs for the
        first (FoundNetwork); times inside a node are scaled to the second, or to the first where all ranks are in one. None:
        not stated.
        """
        found = self
        inside, of_links = (node, busbw_in_node) if busbw_in_node or ranks > node else (ranks, busbw)
        if of_links and inside > 1:
            seconds = float(self.collectives.predict("all_reduce", PROBE_BYTES, inside, 1, self.network_bandwidth).seconds)
            slowdown = bus_bandwidth(seconds, PROBE_BYTES, inside) / of_links
            found = replace(found, link_slowdown=slowdown, exchanges=self.exchanges.with_slower_links(max(slowdown, 1.0)))
        if busbw and ranks > node:

            def all_reduce(size: float, intra: int, inter: int, bandwidth: float) -> Estimate:
                return self.collectives.predict("all_reduce", size, intra, inter, bandwidth)

            found = replace(found, found=found_network(all_reduce, node, -(-ranks // node), busbw, self.network_bandwidth))
        return found

    def as_found(self) -> tuple[str, ...]:
        """Return in words what stated all-reduces and leaf switches make of the network and of the links, a sentence each."""
        said = [each.text() for each in (self.found, self.leaf_switches) if each is not None]
        if self.link_slowdown != 1.0:
            which = "collectives" if self.link_slowdown > 1 else "all-reduces, and no other collectives,"
            times = f"{self.link_slowdown:.2f} times the profile's time"
            said.append(f"{which} inside a node or NVLink domain take {times}, as the stated all-reduce does")
        return tuple(said)

    @property
    def derating_of_attention(self) -> float:
        """The derating of attention: its own, else that of GEMMs."""
        return self.attention_derating or self.derating

    @property
    def origin(self) -> str:
        """Whether the device's own kernels were measured: "measured" or "derived"."""
        return "measured" if self.uncertainty is None else "derived"

    def with_flash_version(self, version: int, deterministic: bool = False) -> CostModel:
        """The same device under a framework whose FlashAttention is of generation ``version`` (0: the device's best).

        deterministic: its results repeat to the bit.
        """
        steps = range(version or self.device.flash_version, self.attention_generation or self.device.flash_version)
        scale = float(np.prod([FLASH_SPEEDUP.get(v, 1.0) for v in steps]))
        return replace(self, attention_scale=scale, backward_scale=DETERMINISTIC_BACKWARD if deterministic else 1.0)

    def _learned(self, estimate: Estimate, name: str) -> Estimate:
        return estimate if self.learned is None else estimate._replace(seconds=estimate.seconds * self.factor(name))

    def _between(self, inter: Any) -> Any:
        """Return the factor of messages between nodes where there are several, else of those inside one."""
        return np.where(np.asarray(inter) > 1, self.factor("network"), self.factor("links"))

    def _less_certain(self, estimate: Estimate, kind: str) -> Estimate:
        """Return an estimate with the uncertainty of a device that was not measured."""
        if self.uncertainty is None:
            return estimate
        std = np.hypot(estimate.relative_std, getattr(self.uncertainty, kind))
        return estimate._replace(relative_std=std, basis=np.maximum(estimate.basis, np.int8(Basis.EXTRAPOLATED)))

    def _derated(self, estimate: Estimate, dtype: str = "bf16", of: str = "linear") -> Estimate:
        if ELEMENT_BYTES[FAMILIES.get(dtype, dtype)] >= HALF_BYTES:
            factor = self.derating_of_attention if of == "attention" else self.derating
            return self._less_certain(estimate._replace(seconds=estimate.seconds * factor), of)
        factor, spread = self.quantised_derating
        estimate = self._less_certain(estimate, "quantised")
        return estimate._replace(seconds=estimate.seconds * factor, relative_std=np.hypot(estimate.relative_std, spread))
