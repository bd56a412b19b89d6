"""Find whether this machine has a profile's device, and which kernel times its attention here, without importing torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from profiler.profile.devices import DEVICES
from profiler.profile.profile import Device, Profile
from profiler.units import GIB

#: Datasheet key -> words that the driver's name of a device must contain. Whole words: a GH200 is not an H200.
_WORDS = {
    "h100_sxm": ("H100", "HBM3"),
    "h200_sxm": ("H200",),
    "b200_sxm": ("B200",),
    "a100_sxm_80gb": ("A100", "SXM4", "80GB"),
    "a100_sxm_40gb": ("A100", "SXM4", "40GB"),
    "a100_pcie_80gb": ("A100", "PCIE", "80GB"),
}
_OTHER_BUILD = frozenset({"NVL", "MIG"})  #: words of a slower build of the same chip, and of a slice of one
_MEMORY_TOLERANCE = 0.05  #: the driver counts up to 2% that programs cannot use; the next memory size differs by a quarter
_QUERY = ("name", "memory.total", "compute_cap", "mig.mode.current")
_CPU_NAME = re.compile(r"(?P<model>.+) \((?P<threads>\d+) of (?P<cores>\d+) cores a rank\)")
_CUDNN_FROM = 9  #: compute capability from which cuDNN's attention is the fastest in PyTorch
_DTYPE_NAMES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "float32": "fp32"}


@dataclass(frozen=True)
class LocalDevice:
    """All that determines the time of attention of one shape here. threads: of a CPU's kernels; 0 on a GPU."""

    device: Device
    dtype: str
    kernel: str
    torch: str
    threads: int = 0

    @property
    def key(self) -> dict[str, str]:
        """Settings that times must have been measured with to be valid for this target."""
        return {"device": self.device.name, "dtype": self.dtype, "kernel": self.kernel, "torch": self.torch}


class Gpu(NamedTuple):
    """One GPU as the driver describes it. memory_bytes: all of it. capability: the major compute capability."""

    name: str
    memory_bytes: float
    capability: int
    sliced: bool  #: into MIG instances, which programs see instead of the full GPU


def find_local_device(profile: Profile) -> tuple[LocalDevice | None, str]:
    """Return (what attention is timed with here, ""), or (None, reason); no reason if this machine lacks the device."""
    cpu = _CPU_NAME.fullmatch(profile.device.name)
    threads, kernel, why = (
        _cpu(cpu["model"], int(cpu["threads"]), int(cpu["cores"])) if cpu is not None else _gpu(profile.device)
    )
    if not kernel:
        return None, why
    version = torch_version()
    if not version:
        return None, "PyTorch, which times attention, is not installed"
    return LocalDevice(profile.device, attention_dtype(profile), kernel, version, threads), ""


def attention_dtype(profile: Profile) -> str:
    """Return the dtype of most of the profile's attention measurements (bf16, fp16 or fp32); bf16 where it has none."""
    names = [_DTYPE_NAMES[str(name)] for name in profile.table("flash_attn")["dtype"] if str(name) in _DTYPE_NAMES]
    kinds, counts = np.unique(names, return_counts=True)
    return str(kinds[counts.argmax()]) if len(kinds) else "bf16"


def torch_version() -> str:
    """Return the release that ``import torch`` would load, "" if none; read from its files, as importing takes a second."""
    try:
        found = importlib.util.find_spec("torch")
        folder = found.submodule_search_locations if found is not None else None
        text = (Path(folder[0]) / "version.py").read_text() if folder else ""
    except (OSError, ValueError):
        return ""
    version = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.M)
    return version[1] if version else ""


def cpu_model() -> str:
    """Return the name that the processor states; "CPU" where it states none."""
    try:
        stated = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:
        stated = None
    return stated[1].strip() if stated else "CPU"


def _cpu(model: str, threads: int, cores: int) -> tuple[int, str, str]:
    """Return (threads, kernel, ""), or no kernel and the reason. CPU models are compared by the name the processor states."""
    if cpu_model() != model or os.cpu_count() != cores:
        return 0, "", ""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    if usable < threads:
        return 0, "", f"this process may use {usable} of the {threads} cores that the profile's ranks compute with"
    return threads, "torch_flash", ""


def _gpu(device: Device) -> tuple[int, str, str]:
    """Return (0, kernel, ""), or no kernel and the reason. All GPUs here must match: which one a program gets is unknown."""
    gpus = gpus_here()
    if not any(is_device(gpu, device) for gpu in gpus):
        return 0, "", ""
    others = sorted({gpu.name for gpu in gpus if not is_device(gpu, device)})
    if others:
        return 0, "", f"there are GPUs of other kinds here too ({', '.join(others)})"
    if any(gpu.sliced for gpu in gpus):
        return 0, "", "the GPUs here are sliced (MIG)"
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1", "NoDevFiles"):
        return 0, "", "CUDA_VISIBLE_DEVICES hides the GPUs"
    return 0, "torch_cudnn" if gpus[0].capability >= _CUDNN_FROM else "torch_flash", ""


def gpus_here() -> list[Gpu]:
    """Return this machine's NVIDIA GPUs by nvidia-smi; none if there is no driver or it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return [_parsed(line) for line in answer.splitlines() if line.strip()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _parsed(line: str) -> Gpu:
    name, mebibytes, capability, mig = (word.strip() for word in line.rsplit(",", 3))
    return Gpu(name, float(mebibytes) * GIB / 1024, int(capability.split(".")[0]), mig == "Enabled")


def datasheet_key(name: str) -> str | None:
    """Return the key in DEVICES of the GPU that its driver calls ``name``; None if it has no datasheet there."""
    words = set(re.split(r"[\s-]+", name.upper()))
    if words & _OTHER_BUILD:
        return None
    return next((key for key, needed in _WORDS.items() if words.issuperset(needed)), None)


def is_device(gpu: Gpu, device: Device) -> bool:
    """Return whether ``gpu`` is ``device``: by datasheet name (by driver name if it has no datasheet), and by memory."""
    key = datasheet_key(gpu.name)
    name = DEVICES[key].name if key is not None else gpu.name
    return name == device.name and abs(gpu.memory_bytes / device.memory_bytes - 1) < _MEMORY_TOLERANCE
