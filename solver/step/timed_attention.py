"""The attention calls that a set of layouts makes, timed on this machine where it has the profile's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from predictor.kernels.measured_attention import SHAPE, MeasuredAttention
from profiler.errors import InputError
from profiler.profile.attention_times import TIMING_SECONDS, Call, attention_item, cache_path, known_rows, open_cache
from profiler.profile.item import Item
from profiler.profile.local_device import LocalDevice, find_local_device
from profiler.profile.profile import Profile
from profiler.profile.recorder import Recorder, Row
from solver.layers.decoder import layer_program
from solver.layers.program import FLASH_ATTN
from solver.step.distinct import distinct
from solver.step.layouts import Splits
from solver.step.problem import Problem


@dataclass(frozen=True)
class AttentionCalls:
    """Distinct fused attention calls. columns: name of SHAPE -> int64 array [calls]; uses: number of times they occur."""

    columns: dict[str, np.ndarray]
    uses: np.ndarray

    def __len__(self) -> int:
        return len(self.uses)

    def shapes(self) -> list[dict[str, int]]:
        """Return the calls one by one."""
        values = [column.tolist() for column in self.columns.values()]
        return [dict(zip(self.columns, call, strict=True)) for call in zip(*values, strict=True)]


def attention_calls(problem: Problem, splits: Splits) -> AttentionCalls:
    """Return every attention call that a layer of ``splits`` makes; uses are calls per layer, added up over the splits."""
    keys, key = splits.layer_keys()
    found = problem.kinds
    programs = [layer_program(keys, problem.model, problem.run, problem.cluster, kind) for kind in found.kinds]
    times = [count / len(found.of_layer) for count in found.counts]  # of an average layer
    ops = [
        replace(op, count=op.count * share)
        for program, share in zip(programs, times, strict=True)
        for op in program.ops
        if op.kind == FLASH_ATTN
    ]
    n, occurs = len(keys), np.bincount(key, minlength=len(keys))
    none = np.zeros(0, dtype=np.int64)
    columns = [
        np.concatenate([none, *(np.broadcast_to(np.asarray(op.dims[name], dtype=np.int64), n) for op in ops)]) for name in SHAPE
    ]
    uses = np.concatenate([none, *(np.broadcast_to(np.asarray(op.count, dtype=float), n) * occurs for op in ops)])
    made = uses > 0  # an op that none of these layouts runs has a shape, but no calls
    if not made.any():
        return AttentionCalls(dict.fromkeys(SHAPE, none), none)
    columns = [column[made] for column in columns]
    first, call = distinct(columns)
    return AttentionCalls(
        {name: column[first] for name, column in zip(SHAPE, columns, strict=True)}, np.bincount(call, weights=uses[made])
    )


def with_timed_attention(
    problem: Problem,
    profile: Profile,
    splits: Callable[[], Splits],
    folder: Path,
    timing: bool = True,
    seconds: float = TIMING_SECONDS,
) -> tuple[Problem, str]:
    """Return the problem with attention as timed on this machine, and a message about it ("" where there was nothing to do).

    Where this machine has the profile's device, calls of ``splits()`` that are missing in ``folder`` are timed for about
    ``seconds`` and stored there; the rest is estimated by the fit. On other machines the problem is returned unchanged, and
    ``splits`` is not called. timing: False uses stored times and times nothing.
    """
    target, why = find_local_device(profile)
    if target is None:
        return problem, f"attention: by the fit, as {why}" if why else ""
    made = attention_calls(problem, splits())
    if not len(made):
        return problem, ""
    path, calls = cache_path(target, folder), _timeable(problem, target, made)
    recorder, trouble = open_cache(target, path, replaces=False)
    before = known_rows(recorder, target, profile)
    if timing and any(call.cost() < seconds for call in _missing(calls, before, recorder)):
        try:
            _time(calls, profile, target, path, seconds)
        except InputError as error:
            trouble = f"{trouble}\n{error}".strip()
        recorder, _ = open_cache(target, path, replaces=False)
    rows = known_rows(recorder, target, profile)
    used = {call.item: rows[call.item] for call in calls if call.item in rows}
    missing = len(_missing(calls, rows, recorder))
    summary = _sentence(len(used), len(used.keys() - before.keys()), missing, len(made) - len(used) - missing)
    kernels = replace(problem.cost.kernels, measured_attention=MeasuredAttention.of_rows(used.values()))
    return replace(problem, cost=replace(problem.cost, kernels=kernels)), "\n".join(filter(None, (summary, trouble)))


def _timeable(problem: Problem, target: LocalDevice, made: AttentionCalls) -> list[Call]:
    """Return the calls that can be timed correctly, with their seconds by the fit of the device's best kernel."""
    columns: dict[str, Any] = dict(made.columns)
    slower = problem.cost.kernels.attention_kernel.scale(columns["seq_q"], columns["head_dim"], columns["causal"])
    expected = problem.cost.kernels.flash_attn(**columns).seconds / slower
    items = (attention_item(target, shape) for shape in made.shapes())
    found = zip(items, expected.tolist(), made.uses.tolist(), strict=True)
    return [Call(item, seconds, uses) for item, seconds, uses in found if item is not None]


def _missing(calls: Sequence[Call], rows: Mapping[Item, Row], recorder: Recorder) -> list[Call]:
    """Return the calls that were neither timed nor found not to run on this machine."""
    settled = recorder.settled()
    return [call for call in calls if call.item not in rows and call.item.label not in settled]


def _time(calls: Sequence[Call], profile: Profile, target: LocalDevice, path: Path, seconds: float) -> None:
    """Time what is missing in the file at ``path`` and store it there, while no other run is timing."""
    from rich.console import Console

    from profiler.measure.attention_timing import time_calls, timing_alone  # importing torch takes a second

    console = Console(stderr=True)
    with timing_alone(path.parent, console):
        recorder, _ = open_cache(target, path, replaces=True)  # opened again: another run may have timed them meanwhile
        missing = _missing(calls, known_rows(recorder, target, profile), recorder)
        if missing:
            time_calls(recorder, target, missing, console, seconds)


def _sentence(used: int, now: int, missing: int, never: int) -> str:
    """Return the message.

    used: calls with a measured time, ``now`` of them new. missing: not timed yet. never: cannot be timed here.
    """
    reasons = [f"{missing} not timed yet"] * (missing > 0) + [f"{never} too large or without a kernel"] * (never > 0)
    fit = f"{missing + never} by the fit" + (f" ({', '.join(reasons)})" if reasons else "")
    return f"attention: {used} shape{'s' * (used != 1)} timed on this machine ({now} of them now), {fit}"
