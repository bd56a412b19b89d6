"""What was measured of a training job: a JSON object, or the log of a trainer or of nccl-tests.

Lines that are read: Megatron-LM and NeMo (``elapsed time per iteration (ms)`` or ``(s)``, ``max allocated``,
``train_step_timing in s``), torchtitan (``tps``, ``memory``), InternEvo (``tgs (tokens/gpu/second)``), nanotron
(``time_per_iteration_ms``), DeepSpeed (``iter time (s)``, ``CurrSamplesPerSec``, ``MaxMemAllocated``), transformers
(``train_steps_per_second``), progress bars of Lightning and others (``5/50 [00:10<01:35, 0.47it/s]``, by their clock, a step
of the bar being one of the optimizer), nccl-tests' tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import InputError
from profiler.published.nccl_rows import read_log
from profiler.text_file import read_text
from profiler.units import GB, GIB, MIB
from solver.formats.cases.reading import MEMORY_KINDS
from solver.formats.logs.statements import check_statements
from solver.formats.megatron.log import jobs_in
from solver.spec.bounds import number
from solver.spec.strategy import Strategy

_NUMBER = r"[:=\s|]*([0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(K?)"


#: A line of transformers' trainer: a dict of Python, which no JSON object looks like.
_PRINTED_DICT = re.compile(r"\s*\{'")


@dataclass(frozen=True)
class Batch:
    """Of a step: tokens of a GPU, sequences of all; for logs that print a rate."""

    tokens_per_gpu: float
    sequences: float


#: Trainer's words before a number, and how it becomes seconds of a step.
_STEPS: tuple[tuple[str, Callable[[float, Batch], float]], ...] = (
    (r"elapsed time per iteration \(ms\)", lambda value, batch: value / 1e3),
    (r"elapsed time per iteration \(s\)", lambda value, batch: value),  # Megatron-DeepSpeed of BLOOM
    (r"time_per_iteration_ms", lambda value, batch: value / 1e3),
    (r"train_step_timing in s", lambda value, batch: value),
    (r"\btps", lambda value, batch: batch.tokens_per_gpu / value),
    (r"\btgs \(tokens/gpu/second\)", lambda value, batch: batch.tokens_per_gpu / value),
    (r"\biter time \(s\)", lambda value, batch: value),
    (r"\bCurrSamplesPerSec", lambda value, batch: batch.sequences / value),
)
#: Steps a second of the whole run, which transformers' trainer prints at its end.
_AVERAGE = re.compile(r"'train_steps_per_second': ([0-9]+(?:\.[0-9]+)?)\b")
#: Most memory, in units of bytes, by its kind: of nanotron (two lines), NeMo, torchtitan, Megatron-LM and DeepSpeed.
_PEAKS = (
    (re.compile(r"\bPeak reserved[:=\s]*([0-9]+(?:\.[0-9]+)?)MiB"), MIB, "reserved"),
    (re.compile(r"\bcuda_max_memory_reserved[:=\s]*([0-9]+(?:\.[0-9]+)?)G\b"), GIB, "reserved"),
    (re.compile(r"\bmax_memory_allocated[:=\s]*([0-9]+(?:\.[0-9]+)?(?:e\+?\d+)?)\b"), 1.0, "allocated"),
    (re.compile(r"\bmemory[:=\s]*([0-9]+(?:\.[0-9]+)?)GiB"), GIB, "reserved"),
    (re.compile(r"\bmax allocated:\s*([0-9]+(?:\.[0-9]+)?)"), MIB, "allocated"),
    (re.compile(r"\bMaxMemAllocated=([0-9]+(?:\.[0-9]+)?)\s*GB"), GIB, "allocated"),
)
#: Of a progress bar: the steps that are done, all of them, and its clock.
_BAR = re.compile(r"\b(\d{1,9})/(\d+) \[(\d{1,4}(?::\d\d){1,2})<[\d:?]+,\s*[0-9.?]+(?:it/s|s/it)")
_PERCENT = re.compile(r"\d{1,3}%\|[^|]*\|\s*$")  #: the bar itself, between its label and its steps
_LONGEST_LABEL = 400  #: characters of label and bar
_TRAINS = re.compile(r"\b(?:epochs?|train\w*|steps?|iterations?)\b", re.IGNORECASE)  #: in the label of a bar
#: Of a line of Megatron-LM's that has its time too.
_BATCH = re.compile(r"iteration\s+\d+/.*global batch size:\s*(\d+)\b")
_VALIDATION = re.compile(r"^.*\bvalidate step:.*$", re.MULTILINE)  #: a line of torchtitan's that is no training step
_CLEAR_SECONDS = 20.0  #: on a clock that shows whole ones
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: A job's first steps wait for compilation, communicators and data; they count where there are few others.
WARM_UP, LEAST = 5, 5
_MOST_BYTES = 256 << 20
_RATE = "tgs"  #: tokens per GPU per second, in place of step_s
_KEYS = ("step_s", "peak_memory_gib", "memory_kind", "all_reduce_busbw_gb_s", "all_reduce_busbw_in_node_gb_s", _RATE)


#: Of Megatron-LM and its kin, and of torchtitan.
_TFLOPS = re.compile(r"(?:throughput per GPU \(TFLOP/s/GPU\)|\btflops):\s*([\d.,]*\d)", re.IGNORECASE)
_OUT_OF_MEMORY = re.compile(r"\bOutOfMemoryError\b|CUDA out of memory")


@dataclass(frozen=True)
class Collectives:
    """Measured times [s] of one op over a group: arrays of bytes (whole buffer) and seconds."""

    op: str
    intra: int
    inter: int
    size: np.ndarray
    seconds: np.ndarray


@dataclass(frozen=True)
class Observation:
    """What was measured. steps: seconds of steps after warm-up, maybe none. busbw: bytes/s of a large all-reduce.

    warm_up: the job's first steps are among them, of which a log has too few others. flops: model FLOP/s of a GPU that a log
    prints, by its trainer's own count.
    """

    steps: np.ndarray
    peak_memory: float | None = None
    memory_kind: str = "allocated"
    busbw: float | None = None
    busbw_in_node: float | None = None
    collectives: tuple[Collectives, ...] = ()
    warm_up: bool = False
    flops: float | None = None


def read_observation(path: Path, run: Strategy, hardware: str) -> Observation:
    """Read what was measured of ``run`` on ``hardware`` (the profile's name) from a file.

    Raises InputError for a file that holds nothing of what is read, and for the log of another run.
    """
    text = read_text(path, "a log or a JSON object", _MOST_BYTES, replacing=True)
    if text.lstrip().startswith("{") and not _PRINTED_DICT.match(text):
        return _from_json(text, path, run.tokens / run.world_size)
    text = jobs_in(text)[-1]
    batch = Batch(run.tokens / run.world_size, run.global_batch_sequences)
    steps, warm_up = step_seconds(text, batch)
    collectives = _from_nccl_tests(path) if "nThread" in text else ()
    if not len(steps) and not collectives:
        if _OUT_OF_MEMORY.search(text):
            raise InputError(
                f"{path}: it ended out of memory before it printed a step; foretrain predict says what its layout needs"
            )
        raise InputError(
            f"{path}: no step times and no table of nccl-tests; a trainer's log has lines such as "
            "'elapsed time per iteration (ms): 512.3' or 'tps: 5,762', or a progress bar of 20 s; a JSON file has "
            '{"step_s": 0.512}'
        )
    try:
        for extreme in (steps.min(), steps.max()) if len(steps) else ():
            number("step_s", float(extreme))
    except InputError as error:
        raise InputError(f"{path}: of a step {error}") from None
    check_statements(_ANSI.sub("", text), path, run, hardware)
    return Observation(steps, *_peak(_of_training(text)), collectives=collectives, warm_up=warm_up, flops=_printed_flops(text))


def _of_training(text: str) -> str:
    """Return a log without colours and without lines of validation."""
    return _VALIDATION.sub("", _ANSI.sub("", text))


def _peak(text: str) -> tuple[float | None, str]:
    """Return the most memory that a trainer's log prints, of any rank, and its kind."""
    for words, unit, kind in _PEAKS:
        found = [float(value) for value in words.findall(text)]
        if found:
            return max(found) * unit, kind
    return None, "allocated"


def _printed_flops(text: str) -> float | None:
    """Return the median of the FLOP/s of a GPU that a trainer's log prints."""
    found = [float(value.replace(",", "")) for value in _TFLOPS.findall(_of_training(text))]
    return float(np.median(found)) * 1e12 if found else None


def _of_batch(text: str, batch: Batch) -> str:
    """Return a log without the steps that it prints with another batch, which grew (Megatron-LM's --rampup-batch-size)."""
    lines = [(_BATCH.search(line), line) for line in text.splitlines()]
    if not any(found and float(found[1]) == batch.sequences for found, _ in lines):
        return text
    return "\n".join(line for found, line in lines if not found or float(found[1]) == batch.sequences)


def step_seconds(text: str, batch: Batch) -> tuple[np.ndarray, bool]:
    """Return the step times of a trainer's log in order, without those of its warm-up where there are enough others, else
    without the first one, and whether others of its warm-up are among them."""
    text = _of_batch(_of_training(text), batch)
    for words, seconds in _STEPS:
        found = [float(value.replace(",", "")) * (1e3 if kilo else 1.0) for value, kilo in re.findall(words + _NUMBER, text)]
        steps = np.array([seconds(value, batch) for value in found if value > 0])
        if len(steps):
            enough = len(steps) >= WARM_UP + LEAST
            return steps[WARM_UP if enough else min(len(steps) - 1, 1) :], not enough
    of_bar = _bar_seconds(text)
    if len(of_bar):
        return of_bar, False
    averages = [float(rate) for rate in _AVERAGE.findall(text)]
    return np.array([1 / rate for rate in averages if rate > 0]), True


def _bar_seconds(text: str) -> np.ndarray:
    """Return the step times that a progress bar's clock shows, over stretches of which it can tell the length to 5%.

    Bars round their rate and average it over what came before, warm-up included; their clock shows whole seconds. Of several
    bars the one that takes longest is the training's; one with a label that does not say so (shards that are loaded, a dataset
    that is mapped) is not.
    """
    bars: dict[str, list[tuple[int, float]]] = {}  # by the number of all steps
    end = 0
    for bar in _BAR.finditer(text):
        label = _label(text[max(end, bar.start() - _LONGEST_LABEL) : bar.start()])
        end, (done, every, elapsed) = bar.end(), bar.groups()
        if not label or _TRAINS.search(label):
            bars.setdefault(every, []).append((int(done), _clock(elapsed)))
    read = max(bars.values(), key=_bar_time, default=[])
    stretches: list[list[tuple[int, float]]] = []  # from where a bar begins anew
    for point in read:
        if not stretches or point[0] < stretches[-1][-1][0]:
            stretches.append([])
        stretches[-1].append(point)
    found = []
    for points in stretches:
        late = [point for point in points if point[0] > WARM_UP] or points
        start = late[0]
        for done, elapsed in late[1:]:
            if elapsed - start[1] >= _CLEAR_SECONDS and done > start[0]:
                found.append((elapsed - start[1]) / (done - start[0]))
                start = (done, elapsed)
    return np.array(found)


def _label(before: str) -> str:
    """Return the label of a progress bar from what stands before its steps; "" where it has none."""
    line = _PERCENT.sub("", re.split(r"[\r\n]", before)[-1]).rstrip()
    return re.split(r"[|%]", line)[-1].removesuffix(":").strip() if line.endswith(":") else ""


def _bar_time(points: Sequence[tuple[int, float]]) -> float:
    """Return the seconds that a bar's clock has run, begun anew or not."""
    return sum(max(late - early, 0.0) for (_, early), (_, late) in pairwise(points))


def _clock(text: str) -> float:
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


def _from_json(text: str, path: Path, tokens: float) -> Observation:
    """Return what a JSON object states; tokens: of a GPU in a step."""
    try:
        values: Mapping[str, Any] = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path} is no JSON object: {error}") from None
    if not isinstance(values, Mapping):
        raise InputError(f"{path} is no JSON object; known keys are {', '.join(_KEYS)}")
    if "log_history" in values:
        return _from_trainer_state(values["log_history"], path)
    unknown = sorted(set(values) - set(_KEYS))
    if unknown or not values:
        wrong = f"unknown key {unknown[0]!r}" if unknown else "it is empty"
        raise InputError(f"{path}: {wrong}; known keys are {', '.join(_KEYS)}")
    kind = values.get("memory_kind", "allocated")
    if kind not in MEMORY_KINDS:
        raise InputError(f"{path}: memory_kind is {kind!r}; it must be one of {', '.join(MEMORY_KINDS)}")
    if _RATE in values and "step_s" in values:
        raise InputError(f"{path}: step_s and {_RATE} both say how long a step takes; leave one out")
    given = values.get("step_s", values.get(_RATE, []))
    listed = given if isinstance(given, list) else [given]
    steps = np.array([tokens / number(_RATE, each) if _RATE in values else number("step_s", each) for each in listed])
    peak, world, node = (number(key, values[key]) if key in values else None for key in (_KEYS[1], *_KEYS[3:5]))
    return Observation(steps, peak * GIB if peak else None, kind, world * GB if world else None, node * GB if node else None)


def _from_trainer_state(history: Any, path: Path) -> Observation:
    """Return what transformers' trainer_state.json says: the rate over the whole run, which its last entry has."""
    entries = [entry for entry in history if isinstance(entry, Mapping)] if isinstance(history, list) else []
    rates = [entry["train_steps_per_second"] for entry in entries if "train_steps_per_second" in entry]
    if not rates:
        raise InputError(f"{path}: no entry of log_history has train_steps_per_second, which is written when training ends")
    return Observation(np.array([1 / number("train_steps_per_second", rates[-1])]), warm_up=True)


def _from_nccl_tests(path: Path) -> tuple[Collectives, ...]:
    found = []
    for op, table in read_log(path).tables.items():
        for intra, inter in sorted(set(zip(table["intra"].tolist(), table["inter"].tolist(), strict=True))):
            rows = table.where((table["intra"] == intra) & (table["inter"] == inter))
            found.append(Collectives(op, intra, inter, rows["bytes"].astype(float), rows["seconds"]))
    return tuple(found)
