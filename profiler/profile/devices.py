"""Datasheet values of the accelerators whose measurements are shipped."""

from __future__ import annotations

from profiler.errors import InputError
from profiler.profile.profile import GIB, Device


def _a100(name: str, memory_gib: float, memory_bandwidth: float, link_bandwidth: float, link_kind: str) -> Device:
    """Return an A100: 108 SMs at up to 312 TFLOP/s; the parts differ in memory, links and power (NVIDIA A100 datasheet)."""
    peaks = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}  # no fp8 units
    return Device(name, peaks, memory_gib * GIB, memory_bandwidth, 108, 8, link_bandwidth, 25e9, link_kind)


def _hopper(name: str, memory_gib: float, memory_bandwidth: float) -> Device:
    """Return an H100 or H200 SXM: one chip, two memories (NVIDIA H100 and H200 datasheets, without sparsity)."""
    peaks = {"bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12, "tf32": 494.7e12, "fp32": 66.9e12}
    return Device(name, peaks, memory_gib * GIB, memory_bandwidth, 132, 8, 450e9, 50e9, "NVLink 4, NVSwitch", 3)


#: Device by profile name. Dense peaks; memory is what a CUDA program can use (torch's total_memory), a little less than printed
#: on the part. Network: the usual node of 8 GPUs, 200 Gbit/s per A100 and 400 Gbit/s per newer GPU.
DEVICES: dict[str, Device] = {
    "h100_sxm": _hopper("NVIDIA H100 SXM 80GB", 79.1, 3.35e12),
    "h200_sxm": _hopper("NVIDIA H200 SXM 141GB", 139.8, 4.8e12),
    "b200_sxm": Device(
        "NVIDIA B200 SXM 180GB",
        {"bf16": 2250e12, "fp16": 2250e12, "fp8": 4500e12, "mxfp8": 4500e12, "nvfp4": 9000e12, "tf32": 1125e12, "fp32": 75e12},
        178.3 * GIB, 8e12, 148, 8, 900e9, 50e9, "NVLink 5, NVSwitch", 4,
    ),
    "a100_sxm_80gb": _a100("NVIDIA A100 SXM 80GB", 79.15, 2.039e12, 300e9, "NVLink 3, NVSwitch"),
    "a100_sxm_40gb": _a100("NVIDIA A100 SXM 40GB", 39.4, 1.555e12, 300e9, "NVLink 3, NVSwitch"),
    "a100_pcie_80gb": _a100("NVIDIA A100 PCIe 80GB", 79.15, 1.935e12, 32e9, "PCIe 4.0 x16, no NVLink bridge"),
}  # fmt: skip


def device(name: str) -> Device:
    """Return the datasheet of profile ``name``; raise InputError for an unknown name."""
    if name not in DEVICES:
        raise InputError(f"no datasheet of a device {name!r}; known are {', '.join(DEVICES)}")
    return DEVICES[name]
