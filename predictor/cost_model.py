"""The cost model of one machine: its kernels, messages and host (predictor.fitted makes it)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from predictor.corrections import Corrections
from predictor.host_costs import HostCosts
from predictor.kernel_costs import KernelCosts
from predictor.learned import Learned
from predictor.network_costs import NetworkCosts
from profiler.profile.profile import Device


@dataclass(frozen=True)
class CostModel:
    """The cost model of one device: a method for each kind of op in its three parts, of arrays of shapes, which returns an
    Estimate (seconds, uncertainty, basis), and methods here that return the same device under other conditions."""

    device: Device
    kernels: KernelCosts
    network: NetworkCosts
    host: HostCosts = HostCosts()

    @property
    def corrections(self) -> Corrections:
        """What all three parts get beside their fits."""
        return self.kernels.corrections

    @property
    def origin(self) -> str:
        """Whether the device's own kernels were measured: "measured" or "derived"."""
        return "measured" if self.corrections.uncertainty is None else "derived"

    def with_corrections(self, corrections: Corrections) -> CostModel:
        """The same device with other uncertainty or other factors of own runs."""
        kernels, network = replace(self.kernels, corrections=corrections), replace(self.network, corrections=corrections)
        return replace(self, kernels=kernels, network=network, host=replace(self.host, corrections=corrections))

    def with_learned(self, learned: Learned | None) -> CostModel:
        """The same device with factors of own training runs."""
        return self.with_corrections(replace(self.corrections, learned=learned))

    def with_network(self, bandwidth: float | None) -> CostModel:
        """The same device on a network of ``bandwidth`` bytes/s per accelerator (None: the device's default)."""
        return replace(self, network=replace(self.network, bandwidth=bandwidth or self.device.network_bandwidth))

    def with_flash_version(self, version: int, deterministic: bool = False, own: bool = True) -> CostModel:
        """The same device under a framework's FlashAttention, as KernelCosts.with_flash_version."""
        return replace(self, kernels=self.kernels.with_flash_version(version, deterministic, own))
