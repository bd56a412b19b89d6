"""Time attention calls that are missing from the cache, on this machine's device. Imports torch: import it only to time."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from profiler.errors import InputError
from profiler.measure.arena import DTYPES, Arena
from profiler.measure.hardware import attention_kernels, cache_bytes
from profiler.measure.kernels import workload
from profiler.measure.power import preheat
from profiler.measure.session import Session
from profiler.measure.timing import Measurement
from profiler.measure.try_kernel import try_kernel
from profiler.profile.attention_times import Call, source
from profiler.profile.item import Item
from profiler.profile.local_device import Gpu, LocalDevice, is_device
from profiler.profile.recorder import NOT_RUN, Recorder
from profiler.units import GIB

_LEAST_SECONDS, _MOST_SECONDS = 0.05, 0.5  #: per shape
_LONG_CALL = 1e-3  #: shorter calls [s] say nothing about how slow others are: launching may be most of their time
_FREE = 0.9  #: share of a GPU's memory that must be free: another job on it would affect the times


@contextlib.contextmanager
def timing_alone(folder: Path, console: Console) -> Iterator[None]:
    """Hold a lock so that one process times at a time: two at once would slow each other down.

    Raises InputError if nothing can be kept in ``folder``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "timing.lock").open("w")
    except OSError as error:
        raise InputError(f"{folder}: times of attention cannot be kept there: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            console.print("another run is timing attention on this machine; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def time_calls(recorder: Recorder, target: LocalDevice, calls: Sequence[Call], console: Console, seconds: float) -> None:
    """Time ``calls`` into ``recorder`` for about ``seconds``, by decreasing worth; skip calls that would take longer.

    Times are written every few seconds and at the end, also after an error. Raises InputError, before anything is timed, if
    PyTorch here is not that of ``target`` or finds another device.
    """
    end = time.monotonic() + seconds
    with _said_in_a_sentence():
        device = _open_device(target)
    most_bytes = _most_bytes(target, device)
    arena = Arena(device, cache_bytes(device))
    each = float(np.clip(seconds / max(len(calls), 1), _LEAST_SECONDS, _MOST_SECONDS))
    slower, longest = 1.0, 0.0  # how many times slower than expected the longest call so far was
    with _said_in_a_sentence(), _threads(target.threads), _progress(console, len(calls)) as advance:
        try:
            preheat(Session(0, 1, 1, device, "", dist.HashStore()), quick=False)  # type: ignore[attr-defined]
            for call in sorted(calls, key=lambda c: -c.worth):
                if _operand_bytes(call.item) > most_bytes:
                    recorder.add(call.item, None)
                elif time.monotonic() + call.cost(slower) < end:
                    outcome = _outcome(call.item, arena, each, target)
                    recorder.add(call.item, outcome)
                    if outcome and "seconds" in outcome and call.expected > longest:
                        longest = call.expected
                        slower = max(outcome["seconds"] / max(longest, _LONG_CALL), 1.0)
                advance()
        finally:
            with contextlib.suppress(RuntimeError):
                arena.release()
            recorder.write()


@contextlib.contextmanager
def _said_in_a_sentence() -> Iterator[None]:
    """Turn errors of the device or its driver, which no measurement caused, into an InputError."""
    try:
        yield
    except RuntimeError as error:
        message = str(error).partition("\n")[0]
        raise InputError(f"timing attention failed ({message}); the rest is estimated by the fit") from None


def _open_device(target: LocalDevice) -> torch.device:
    """Return the device to time on, after a second check by what PyTorch itself sees."""
    if target.torch != str(torch.__version__):
        raise InputError(f"PyTorch is {torch.__version__} by its own word and {target.torch} by its files")
    if target.threads:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(f"this build of PyTorch ({target.torch}) does not see the GPU")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    seen = torch.cuda.get_device_properties(device)
    gpu = Gpu(seen.name, float(seen.total_memory), seen.major, sliced=False)
    if not is_device(gpu, target.device) or seen.multi_processor_count != target.device.num_sms:
        raise InputError(f"the first GPU that PyTorch sees is {seen.name} with {seen.multi_processor_count} multiprocessors")
    free, whole = torch.cuda.mem_get_info(device)
    if free < _FREE * whole:
        raise InputError(
            f"the GPU is in use ({(whole - free) / GIB:.1f} GiB of its memory are taken): nothing is timed while others run"
        )
    if attention_kernels(device)[0] != target.kernel:
        raise InputError(f"PyTorch runs attention by {attention_kernels(device)[0]} on this GPU, not by {target.kernel}")
    return device


def _most_bytes(target: LocalDevice, device: torch.device) -> float:
    """Return the most operand bytes of one measurement: outputs, gradients and a workspace must fit too."""
    if device.type == "cuda":
        return target.device.memory_bytes / 8
    return min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 8.0, GIB)  # other processes share a CPU's memory


def _operand_bytes(item: Item) -> float:
    queries = math.prod(item.number(c) for c in ("batch", "seq_q", "heads", "head_dim"))
    keys = math.prod(item.number(c) for c in ("batch", "seq_kv", "kv_heads", "head_dim"))
    return 2.0 * (queries + keys) * DTYPES[str(item.columns["dtype"])].itemsize


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set a CPU's kernel threads to those of a rank of the profile (``count`` 0: no change)."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Any]:
    columns = (TextColumn("timing attention on this machine"), BarColumn(), MofNCompleteColumn(), TextColumn("shapes"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _outcome(item: Item, arena: Arena, seconds: float, target: LocalDevice) -> dict[str, Any] | None:
    """Return the times of ``item``; None if it does not fit in memory, a reason if no kernel takes the shape."""
    found = try_kernel(lambda: workload(item, arena), arena, seconds)
    if not isinstance(found, Measurement):
        return found if found is None else {NOT_RUN: found}
    # rounded as in the file, so that this run and the next use the same numbers
    median, spread = float(np.float32(found.median)), float(np.float32(found.spread))
    return {"seconds": median, "spread": spread, "repeats": found.count, "source": source(target)}
