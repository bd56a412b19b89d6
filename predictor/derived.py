"""The cost model of a device that was not measured, derived from that of one that was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from predictor.corrections import Corrections
from predictor.cost_model import CostModel
from predictor.host_costs import HostCosts
from predictor.kernel_costs import KernelCosts
from predictor.kernels.derating import OTHER_LABORATORY, Deratings
from predictor.kernels.device_uncertainty import DEVICE_UNCERTAINTIES, DeviceUncertainty
from predictor.kernels.dtypes import ELEMENT_BYTES, FAMILIES, HALF_BYTES
from predictor.kernels.flash_generations import AttentionKernel
from predictor.kernels.gemm_physics import GemmPhysics
from predictor.network.overlap import contention_on
from predictor.network_costs import NetworkCosts
from profiler.profile.profile import Derivation, Device

#: Share of its peak that a chip's largest GEMMs reach where power does not hold its clocks down: the measured A100's do.
HELD_CLOCKS = 0.92
#: Time of cuDNN's training kernels on Blackwell over that of the serving kernels which B200's profile fits, as derived: median
#: of causal calls on GB200 and GB300 (predictor.kernels.fp8_attention), 0.73 to 0.93. FlashAttention 4 takes as long within 9%.
#: The longest calls, which reach the power limit, take 0.90 on GB200 and 0.77 on GB300, a derated one 0.90.
TRAINING_ATTENTION = 0.80


def derived_cost_model(base: CostModel, device: Device, derivation: Derivation, links: CostModel) -> CostModel:
    """Return the cost model of a device that was not measured, from the kernels of one that was, ``base``, and the links of
    another.

    Every kernel splits into what its units, its memory and its launch take, each rescaled by its own ratio: the physical
    models run with the other device's figures, and the learnt corrections read the regimes that result.
    """
    corrections = Corrections(_uncertainty(device, derivation, links.device))
    alike = derivation.similarity == "architecture"
    kernels = replace(_kernels(base.kernels, device, derivation), corrections=corrections)
    network = replace(_network(links.network, base, device, alike), corrections=corrections)
    return CostModel(device, kernels, network, HostCosts(corrections=corrections))  # of another machine's host nothing is known


def _kernels(base: KernelCosts, device: Device, derivation: Derivation) -> KernelCosts:
    """Return the kernels of ``device``, from those of a measured one."""
    scale = derivation.kernel_scale
    # what a laboratory's machine is slower than others is no property of its device
    derating, quantised = min(base.deratings.linear, OTHER_LABORATORY.factor), base.deratings.quantised
    parts = base.linears.parts
    most = [
        factor * _room(parts.get(name, parts["bf16"]).physics)
        for name, factor in (("bf16", derating), ("fp8", quantised.factor))
    ]
    sustained, throttled = _at_power(device, derivation.power_slowdown, *most)
    linears = base.linears.on(sustained, throttled)
    deratings = Deratings(
        linear=derating * scale.get("bf16", 1.0),
        attention=_attention_derating(base) * scale.get("bf16", 1.0),
        quantised=quantised._replace(factor=quantised.factor * scale.get("fp8", 1.0)),
        measured_on=base.deratings.linear,
    )
    generation = base.device.flash_version if derivation.similarity == "architecture" else 0
    return KernelCosts(
        device,
        linears,
        replace(base.grouped, linear=linears),
        base.attention.on(sustained, throttled.get("bf16", 1.0)),
        base.memory.on(device),
        deratings,
        AttentionKernel(generation),
    )


def _network(links: NetworkCosts, base: CostModel, device: Device, alike: bool) -> NetworkCosts:
    """Return the links of ``device``, from those of a measured one; alike: its chip is of the architecture of ``base``."""
    wider = device.link_bandwidth / links.device.link_bandwidth
    return replace(
        links,
        device=device,
        collectives=links.measured_collectives.on(device),
        exchanges=links.exchanges.on(device),
        bandwidth=device.network_bandwidth,
        contention=contention_on(device, base.device, base.network.contention, alike),
        shared_links={key: rate * wider for key, rate in links.shared_links.items()},
    )


def _attention_derating(base: KernelCosts) -> float:
    """Return the derating of attention: what training's kernels are faster, and what laboratories of others find slower."""
    kernels = TRAINING_ATTENTION if base.device.flash_version >= 4 else 1.0
    return kernels * min(base.deratings.attention / kernels, OTHER_LABORATORY.factor)


def _uncertainty(device: Device, derivation: Derivation, links: Device) -> DeviceUncertainty:
    """Return how uncertain kernels are, and links: of another kind (PCIe beside NVLink) as uncertain as another vendor's."""
    found, ours, theirs = DEVICE_UNCERTAINTIES[derivation.similarity], device.link_kind.split(), links.link_kind.split()
    alike = not ours or not theirs or ours[0] == theirs[0]
    return found if alike else replace(found, collective=DEVICE_UNCERTAINTIES[""].collective)


def _room(physics: GemmPhysics) -> float:
    """Return how much faster the largest GEMMs are where power does not hold their clocks down."""
    return max(HELD_CLOCKS / physics.efficiency, 1.0)


def _at_power(
    device: Device, slowdown: Mapping[str, float], derating: float, quantised: float
) -> tuple[Device, dict[str, float]]:
    """Return the device with the peaks that its power sustains, and by arithmetic the share of what long kernels lose to the
    power limit that they lose here too, which is less the farther power is from it.

    derating, quantised: the most that 16-bit and quantised kernels gain from power. Below its limit a chip clocks higher, until
    its own peak is what limits a derated kernel. All of this is in the peaks and none in the deratings, which are of whole
    kernels: a kernel bound by memory or launch is no slower for a higher peak, and one at the power limit is as fast as with
    a lower one. To the megaflop, so that it is as fast to the bit.
    """
    wide = slowdown.get("bf16", 1.0)
    peaks, throttled = {}, {}
    for dtype, peak in device.peak_flops.items():
        family = FAMILIES.get(dtype, dtype)
        clocks, most = (wide, derating) if ELEMENT_BYTES[family] >= HALF_BYTES else (slowdown.get("fp8", wide), quantised)
        slower, most = max(slowdown[dtype], min(clocks, 1.0)), max(most, 1.0)
        peaks[dtype] = float(round(peak / max(slower, 1 / most) / 1e6)) * 1e6
        throttled[family] = min(slower * most, 1.0)
    return replace(device, peak_flops=peaks), throttled
