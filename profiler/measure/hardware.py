"""Facts about this machine: names and sizes that it states, rates that are measured."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import torch

from profiler.measure.session import Session
from profiler.measure.timing import Work, measure
from profiler.profile.devices import DEVICES
from profiler.profile.item import Limits
from profiler.profile.local_device import cpu_model, datasheet_key
from profiler.profile.plan import KIB
from profiler.profile.profile import Device
from profiler.units import GIB

CPU_CACHE_BYTES = 32 * 2**20  #: operands rotate through more than this, which is at least the L3 share of a core
_NVML_FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu", "driver_version")


def cache_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return CPU_CACHE_BYTES


def device_facts(session: Session, quick: bool = False) -> Device:
    """Return the device of one rank. On a CPU that is the cores a rank computes with, while all ranks measure at once.

    A known accelerator keeps its datasheet's peaks; any other gets the rates of the best GEMM and copy measured here. Links are
    assumed to be copies through memory, until the p2p measurements give their rates.
    """
    device = session.device
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        key = datasheet_key(properties.name)
        if key is not None:
            total = float(properties.total_memory)
            return replace(DEVICES[key], memory_bytes=total, gpus_per_node=session.ranks_per_node)
        name, memory, processors = properties.name, float(properties.total_memory), properties.multi_processor_count
    else:
        name, memory, processors = _cpu_name(), _cpu_memory() / session.ranks_per_node, torch.get_num_threads()
    rates = {dtype: session.agree(_gemm_rate(device, kind, quick)) for dtype, kind in _DTYPES.items()}
    peaks = {dtype: rate for dtype, rate in rates.items() if rate > 0}
    bandwidth = session.agree(_copy_rate(device, quick))
    kind = "" if device.type == "cuda" else "shared memory and sockets"
    return Device(name, peaks, memory, bandwidth, processors, session.ranks_per_node, bandwidth / 2, bandwidth / 2, kind)


_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LONGEST_PROBE = 0.25  #: seconds of one GEMM: CPUs without instructions for bf16 are a hundred times slower in it than in fp32


def _gemm_rate(device: torch.device, dtype: torch.dtype, quick: bool) -> float:
    """Return the FLOP/s of the best of some square GEMMs, smallest first; 0 where the dtype is not supported.

    A larger one that would take too long is left out.
    """
    best = 0.0
    for size in (256,) if quick else (4096, 8192) if device.type == "cuda" else (256, 1024, 2048):
        if best and 2.0 * size**3 / best > _LONGEST_PROBE:
            break
        try:
            a = torch.randn(size, size, device=device).to(dtype)
            times = measure(_square(a), device, 0.02 if quick else 0.5)
        except RuntimeError:
            continue
        best = max(best, 2.0 * size**3 / min(times.times))
    return best


def _square(a: torch.Tensor) -> Work:
    def call(_: int) -> None:
        torch.matmul(a, a)

    return call


def _copy_rate(device: torch.device, quick: bool) -> float:
    """Return bytes/s, read plus written, of the best copy of a buffer far larger than the cache: a hardware peak."""
    source = torch.ones(cache_bytes(device) // 4 * (1 if quick else 4), dtype=torch.float32, device=device)
    target = torch.empty_like(source)

    def copy(_: int) -> None:
        target.copy_(source)

    times = measure(copy, device, 0.05 if quick else 0.5)
    return 2.0 * source.nbytes / min(times.times)


def _cpu_name() -> str:
    return f"{cpu_model()} ({torch.get_num_threads()} of {os.cpu_count()} cores a rank)"


def _cpu_memory() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def limits(session: Session, device: Device, quick: bool) -> Limits:
    """Return the sizes to measure. quick: only sizes that take milliseconds, to check that everything runs."""
    slowest = min(device.peak_flops.values())  # of the dtypes measured on a CPU
    if quick:
        return Limits(32, 128, 64, 256 * KIB, 16 * KIB, 2.0**24, 0.05, slowest, grid_rows=12)
    if session.device.type == "cuda":
        free = device.memory_bytes / 8  # for one measurement: operand sets, outputs and a framework's workspace fit too
        return Limits(256, 65536, 65536, int(GIB), int(GIB), free, 0.1, device.half_peak)
    return Limits(64, 4096, 4096, 64 * KIB * KIB, int(GIB) // 4, min(device.memory_bytes / 8, GIB), 1.0, slowest, 8.0)


def attention_kernels(device: torch.device) -> tuple[str, ...]:
    """Return PyTorch's fused attention kernels for ``device``, fastest first: cuDNN's on Hopper and newer."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return "torch_cudnn", "torch_flash"
    return ("torch_flash",)


def sensors() -> dict[str, str]:
    """Return clocks, power and temperature of every local GPU if nvidia-smi answers: field -> one word per GPU."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(_NVML_FIELDS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    columns = zip(*(line.split(", ") for line in answer.strip().splitlines()), strict=False)
    return {name: "; ".join(column) for name, column in zip(_NVML_FIELDS, columns, strict=False)}


def versions(session: Session) -> dict[str, Any]:
    """Return the software versions that determine the times."""
    found: dict[str, Any] = {"torch": str(torch.__version__), "backend": session.backend}
    if session.device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found
