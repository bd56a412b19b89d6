"""A trace of torch.profiler (Chrome's JSON, also gzipped) as the kernels of one rank's steps, by what they do.

Format: github.com/pytorch/kineto, libkineto/src/output_json.cpp: complete events ("ph": "X") with times in microseconds; of the
category ``kernel`` (or gpu_memcpy, gpu_memset) on the device, with device and stream in ``args``; ``ProfilerStep#N`` marks the
steps, on the host and (category gpu_user_annotation) on the device.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import InputError

GEMM, ATTENTION, MEMORY, OPTIMIZER, COPY = "GEMM", "attention", "memory-bound kernels", "optimizer", "copies"
COMPUTE = (GEMM, ATTENTION, MEMORY, OPTIMIZER, COPY)
#: What a kernel does, by its name: the first pattern that is found. Names of NCCL, DeepEP and Hybrid-EP, cuBLAS, CUTLASS,
#: FlashAttention, cuDNN, Triton and rocBLAS, and of torch's and Apex's fused optimizers. A kernel that matches none counts as
#: memory-bound.
_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("all_reduce", r"nccl.*allreduce"),
        ("reduce_scatter", r"nccl.*reducescatter"),
        ("all_gather", r"nccl.*allgather"),
        ("send, receive, all_to_all", r"nccl.*(sendrecv|alltoall)"),
        ("broadcast", r"nccl.*(broadcast|_reduce)"),
        ("exchange of tokens", r"(deep_?|::|hybrid_?)ep::|hybrid_ep|nvshmem"),
        ("other collectives", r"nccl|rccl"),
        (ATTENTION, r"flash|fmha|sdpa|attn|attention|dot_do_o"),
        (OPTIMIZER, r"multi_tensor_apply|adam|sgd_|lamb[_f]"),
        (GEMM, r"gemm|nvjet|xmma|cublas|cijk_|gemv|dot_kernel|_mm_|triton_tem|matmul"),
    )
)
_COPIES = ("gpu_memcpy", "gpu_memset")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_MOST_BYTES = 4 << 30
_MOST_SECONDS = 1e12  #: of an event; clocks count from 1970 at most


@dataclass(frozen=True)
class Trace:
    """Kernels of one device within its steps, in order of their start.

    start, end: seconds since the first. kind: of COMPUTE, or an op that communicates. step: number of the step, from 0.
    windows: start and end of the steps, [steps, 2]. said: what was chosen in reading, in words.
    """

    names: tuple[str, ...]
    kind: np.ndarray
    start: np.ndarray
    end: np.ndarray
    step: np.ndarray
    windows: np.ndarray
    said: str
    states: str = ""  #: GPUs and ranks that it names, a line each

    @property
    def steps(self) -> np.ndarray:
        """Seconds of each step."""
        return self.windows[:, 1] - self.windows[:, 0]


def is_trace(path: Path) -> bool:
    """Whether a file looks like a trace, by its beginning."""
    try:
        with _open(path) as file:
            head = file.read(1 << 16)
    except (OSError, EOFError, zlib.error):
        return False
    return head.lstrip().startswith(b"{") and (b'"traceEvents"' in head or b'"schemaVersion"' in head)


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises InputError for a file that is none, or that holds no kernels."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise InputError(f"{path} has more than {_MOST_BYTES >> 30} GiB; trace fewer steps")
        with _open(path) as file:
            plain = json.load(file)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise InputError(f"{path} is no trace of torch.profiler: {error}") from None
    events = plain.get("traceEvents") if isinstance(plain, Mapping) else None
    if not isinstance(events, list):
        raise InputError(f"{path} is no trace of torch.profiler: it has no traceEvents")
    found = [event for event in events if isinstance(event, Mapping) and event.get("ph") == "X"]
    kernels = [event for event in found if event.get("cat") in ("kernel", *_COPIES)]
    if not kernels:
        raise InputError(f"{path} holds no kernels of a device: trace with ProfilerActivity.CUDA")
    device, several = _device(kernels)
    trace = _trace([event for event in kernels if _place(event) == device], found, device, several, path)
    return replace(trace, states=_states(plain))


def _states(plain: Mapping[str, Any]) -> str:
    """Return what a trace says of the machine, as a log would."""
    devices, job = plain.get("deviceProperties"), plain.get("distributedInfo")
    listed = devices if isinstance(devices, list) else []
    named = [str(device.get("name", "")) for device in listed if isinstance(device, Mapping)]
    ranks = [f"world_size={job['world_size']}"] if isinstance(job, Mapping) and "world_size" in job else []
    return "\n".join([*dict.fromkeys(named), *ranks])


def kind_of(name: str, category: str = "kernel") -> str:
    """Return what a kernel does: one of COMPUTE, or the op that it communicates for."""
    if category in _COPIES:
        return COPY
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), MEMORY)


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _place(event: Mapping[str, Any]) -> Any:
    args = event.get("args")
    return args.get("device", event.get("pid")) if isinstance(args, Mapping) else event.get("pid")


def _device(kernels: list[Mapping[str, Any]]) -> tuple[Any, int]:
    """Return the device with the most kernels, and how many there are."""
    counts: dict[Any, int] = defaultdict(int)
    for event in kernels:
        counts[str(_place(event))] += 1
    most = max(counts, key=lambda name: counts[name])
    return next(_place(event) for event in kernels if str(_place(event)) == most), len(counts)


def _trace(kernels: list[Mapping[str, Any]], events: list[Mapping[str, Any]], device: Any, several: int, path: Path) -> Trace:
    try:
        start = np.array([float(event["ts"]) for event in kernels]) * 1e-6
        length = np.array([float(event["dur"]) for event in kernels]) * 1e-6
        names = [str(event["name"]) for event in kernels]
        marks, where = _marks(events)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: an event without a name or its times ({error})") from None
    if not ((abs(start) < _MOST_SECONDS) & (length < _MOST_SECONDS) & (length >= 0)).all():
        raise InputError(f"{path}: an event with a time that is negative, beyond all clocks or no number")
    order = np.argsort(start, kind="stable")
    start, end, names = start[order], (start + length)[order], [names[i] for i in order]
    kinds = np.array([kind_of(names[j], str(kernels[i].get("cat"))) for j, i in enumerate(order)], dtype=object)
    windows = _windows(marks, start, end)
    step = np.searchsorted(windows[:, 0], start, side="right") - 1
    inside = (step >= 0) & (start < windows[np.maximum(step, 0), 1])
    if not inside.any():
        raise InputError(f"{path}: no kernel lies within a ProfilerStep")
    zero = windows[0, 0]
    said = (
        f"{len(windows)} step{'s' * (len(windows) > 1)} of device {device}"
        + (f" (of {several})" if several > 1 else "")
        + where
    )
    return Trace(
        tuple(name for name, kept in zip(names, inside, strict=True) if kept),
        kinds[inside],
        start[inside] - zero,
        end[inside] - zero,
        step[inside],
        windows - zero,
        said,
    )


def _marks(events: list[Mapping[str, Any]]) -> tuple[np.ndarray, str]:
    """Return start and end of the marked steps [seconds], those on the device if there are any, and where they stand."""
    by_place: dict[bool, dict[int, tuple[float, float]]] = {True: {}, False: {}}
    for event in events:
        found = _STEP.fullmatch(str(event.get("name", "")))
        if found:
            start = float(event["ts"]) * 1e-6
            by_place[event.get("cat") == "gpu_user_annotation"][int(found[1])] = (start, start + float(event["dur"]) * 1e-6)
    chosen = by_place[True] or by_place[False]
    where = ", as marked on the device" if by_place[True] else ", as marked on the host" if chosen else ", taken as one"
    return np.array([chosen[number] for number in sorted(chosen)]).reshape(-1, 2), where


def _windows(marks: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the windows of the steps: from mark to mark, so that what waits between two steps belongs to one; the last of
    several, whose kernels may run on after its mark, is left out. Without marks all kernels are one step."""
    if not len(marks):
        return np.array([[start.min(), end.max()]])
    if len(marks) == 1:
        return np.array([[marks[0, 0], max(marks[0, 1], float(end.max()))]])
    return np.stack([marks[:-1, 0], marks[1:, 0]], axis=1)
