"""AICB's kernel-time files (``aiob_outputs``): for each kernel of a layer the microseconds of one forward pass on one GPU.

A finished file holds max, min and avg of each kernel; a raw one the JSON lists of samples from which AICB makes these. Source
of the format: AICB's utils.py (Apache-2.0), as read, and a file that AICB ships.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.errors import InputError, shown
from profiler.files import write_text
from profiler.text_file import read_text

WHAT = "an aiob kernel-time file"
_MOST_BYTES = 1 << 28
#: Samples above this multiple of the fastest are left out of max and avg.
OUTLIER = 3
PARAM_TIME = "param_time"
_SECTION = re.compile(r"(\w+):")
_TIME = re.compile(r"\s+time_gpu_(max|min|avg):\s+(\S+)")
#: Rows of DeepSeek's attention, whose times AICB takes from sections of their own names, and as 0 where there are none.
LATENT_ROWS = (
    "attention_linear_q_lora",
    "attention_q_column",
    "attention_linear_kv_lora",
    "attention_kv_column",
    "attention_o_row",
)

Number = int | float


@dataclass(frozen=True)
class Kernel:
    """One section. Microseconds of one forward pass; avg and max without samples above 3 times min."""

    name: str
    max: Number
    min: Number
    avg: Number


@dataclass(frozen=True)
class KernelTimes:
    """A file. first: its first line, such as ``train_iter:10``."""

    kernels: tuple[Kernel, ...]
    first: str = "train_iter:1"

    def average(self, name: str) -> Number:
        """Return the average of a kernel [us]; 0 where the file has none of the name."""
        return next((kernel.avg for kernel in self.kernels if kernel.name == name), 0)


def read_kernel_times(path: Path) -> KernelTimes:
    """Read a file, finished or raw. Raises InputError, with the line's number, for what is neither."""
    return parse_kernel_times(read_text(path, WHAT, _MOST_BYTES), str(path))


def parse_kernel_times(text: str, where: str) -> KernelTimes:
    """Read the text of a file. where: its name in messages."""
    first, _, rest = text.partition("\n")
    if not re.fullmatch(r"\w+:.*", first.strip()):
        raise InputError(f"{where}, line 1: is {shown(first)}; {WHAT} starts with a line such as train_iter:10")
    raw = rest.lstrip().startswith(("{", "["))
    kernels = tuple(_raw(rest, where) if raw else _finished(rest.splitlines(), where))
    if not kernels:
        raise InputError(f"{where}: holds no kernel; a kernel is a line such as Emb: and its time_gpu_max, _min and _avg")
    names = [kernel.name for kernel in kernels]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise InputError(f"{where}: has two sections {twice}; leave one out")
    return KernelTimes(kernels, first.strip())


def _finished(lines: Sequence[str], where: str) -> Iterator[Kernel]:
    name, found = "", dict[str, Number]()
    for number, line in enumerate([*lines, "end:"], 2):
        if not line.strip():
            continue
        section, time = _SECTION.fullmatch(line.rstrip()), _TIME.fullmatch(line.rstrip())
        if section:
            if name:
                missing = [key for key in ("max", "min", "avg") if key not in found]
                if missing:
                    raise InputError(f"{where}, line {number}: {name} has no time_gpu_{missing[0]}; give max, min and avg")
                yield Kernel(name, **found)
            name, found = section[1], {}
        elif time and name:
            found[time[1]] = _microseconds(time[2], f"{where}, line {number}: time_gpu_{time[1]}")
        else:
            raise InputError(
                f"{where}, line {number}: is {shown(line)}; it must be a kernel's name or its indented time_gpu_avg: 12"
            )


def _microseconds(value: Any, where: str) -> Number:
    try:
        number: Number = int(value) if isinstance(value, str) and value.isdecimal() else value
        number = float(number) if isinstance(number, str) else number
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number) and 0 <= number < 1e15:
            return number
    except (ValueError, OverflowError):
        pass
    raise InputError(f"{where} is {shown(value)}; it must be a number of microseconds")


def _raw(text: str, where: str) -> Iterator[Kernel]:
    """Yield the kernels of lists of samples, as AICB's process_all_keys reduces them."""
    samples: dict[str, list[Number]] = {}
    for entry in _entries(text, where):
        for name, measured in entry.items():
            values = (
                [m["time_gpu"] for m in measured if isinstance(m, dict) and "time_gpu" in m]
                if isinstance(measured, list)
                else []
            )
            if not values:
                raise InputError(f'{where}: {shown(name)} has no samples; it must be a list of {{"time_gpu": microseconds}}')
            samples.setdefault(name, []).extend(_microseconds(value, f"{where}: {name}: time_gpu") for value in values)
    for name, values in samples.items():
        least = min(values)
        kept = [value for value in values if value <= OUTLIER * least]
        yield Kernel(name, max(kept), least, sum(kept) / len(kept))


def _entries(text: str, where: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a text that holds one, several in a row, or a list of them."""
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    try:
        while at < len(text):
            if text[at].isspace() or text[at] == ",":
                at += 1
                continue
            value, at = decoder.raw_decode(text, at)
            found += value if isinstance(value, list) else [value]
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: is no valid JSON after its first line ({error}); it must hold lists of samples by kernel"
        ) from None
    if not all(isinstance(entry, dict) for entry in found):
        raise InputError(
            f'{where}: holds JSON that names no kernels; it must be objects such as {{"Emb": [{{"time_gpu": 799}}]}}'
        )
    return found


def kernel_times_text(times: KernelTimes) -> str:
    """Return the finished form of a file."""
    lines = [times.first]
    for kernel in times.kernels:
        lines += [f"{kernel.name}:", *(f"    time_gpu_{key}: {getattr(kernel, key)}" for key in ("max", "min", "avg"))]
    return "\n".join([*lines, ""])


def write_kernel_times(path: Path, times: KernelTimes) -> None:
    """Write the finished form, atomically."""
    write_text(path, kernel_times_text(times))


def compute_cache(times: KernelTimes, recompute: bool = False) -> Mapping[str, int]:
    """Return AICB's nanoseconds by stage, in AICB's order (its extract_averages).

    Attention and MLP are sums of averages; a backward pass takes as long as its forward pass; the gradient's forward is the
    fastest, its backward the average of param_time. recompute: flash attention counts twice.
    """
    attention = mlp = 0.0
    gradient, others = (0, 0), dict[str, int]()
    for kernel in times.kernels:
        ns = kernel.avg * 1000.0
        if kernel.name == PARAM_TIME:
            gradient = round(kernel.min * 1000.0), round(ns)
        elif "atten" in kernel.name and kernel.name not in LATENT_ROWS or kernel.name == "layernorm":
            attention += ns * (2 if recompute and "flash" in kernel.name else 1)
        elif "mlp" in kernel.name or kernel.name == "layernorm2":
            mlp += ns
        else:
            others[kernel.name] = round(ns)
    stages = {"attention": round(attention), "mlp": round(mlp)}
    both = {f"{stage}_{way}": ns for stage, ns in stages.items() for way in ("forward", "backward")}
    return {**both, "grad_forward": gradient[0], "grad_backward": gradient[1], **others}
