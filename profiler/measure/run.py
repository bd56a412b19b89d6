"""One measuring run: prepare, measure sweep by sweep within the budget, and keep every measurement whatever happens."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from profiler.errors import InputError
from profiler.measure.attention import fused_kernels
from profiler.measure.ending import SAID, StoppedError, broken, end_rank, handle_signals, stopped
from profiler.measure.grouped import grouped_items, lacking
from profiler.measure.hardware import cache_bytes, device_facts, limits, sensors, versions
from profiler.measure.host import host_items
from profiler.measure.memory_bound import COMPILED_KINDS
from profiler.measure.overlap import measure_overlap
from profiler.measure.power import power_slowdown, preheat
from profiler.measure.session import Session, leave, open_session, watch
from profiler.measure.sweeps import Bench, Report, measure_collectives, measure_kernels
from profiler.measure.wanted import Wanted, measured_here
from profiler.measure.work_queue import WorkQueue
from profiler.profile.item import WORK, Item, Limits
from profiler.profile.merge import check_same_machine, kept_aside
from profiler.profile.plan import DEFAULT_MINUTES, KINDS, ModelDims, attention_items, linear_items, memory_bound_items
from profiler.profile.profile import POWER_SLOWDOWN, QUICK, UNITS, Device, Profile
from profiler.profile.profiles import OWN_PROFILE
from profiler.profile.recorder import NOT_RUN, OUT_OF_MEMORY, Recorder
from profiler.profile.store import read_profile

#: Share of the budget: GEMMs are most of a training step, collectives most of the difference between layouts.
WEIGHTS = {
    "host": 0.01,
    "linear": 0.3,
    "flash_attn": 0.15,
    "memory_bound": 0.15,
    "grouped_linear": 0.05,
    "overlap": 0.05,
    "collectives": 0.3,
}


@dataclass(frozen=True)
class Options:
    """User options. resume: skip measurements that the file holds; append: keep them, measure again and replace."""

    output: Path
    budget_seconds: float = DEFAULT_MINUTES * 60
    models: Sequence[ModelDims] = ()
    resume: bool = False
    append: bool = False
    quick: bool = False
    command: str = ""
    wanted: Wanted = Wanted()  #: measured before all others of their tables

    @property
    def path(self) -> Path:
        return self.output / OWN_PROFILE


def run(options: Options) -> int:
    """Measure this machine into ``options.path``; return the exit status. Called by every rank of the job.

    Raises InputError for options that cannot be followed. A lost rank ends the process with a message that names it.
    """
    session = open_session()
    handle_signals(session)
    recorder: Recorder | None = None
    end = time.monotonic() + options.budget_seconds
    try:
        if session.leads:
            print("measuring the peak rates of this machine", file=sys.stderr)
        device = device_facts(session, options.quick)
        if session.device.type == "cuda" and "bf16" not in device.peak_flops:
            raise InputError(f"{device.name} does not multiply in bf16, which GPUs are measured in")
        recorder, done = _prepare(session, device, options)
        kept = recorder
        watch(session, lambda message: end_rank(session, kept, message, 1))
        _measure(session, device, options, recorder, done, end)
    except StoppedError as stop:
        stopped(session, recorder, stop)
    except InputError:
        if session.world > 1 and not session.leads:
            leave("", 2)  # rank 0 prints it
        if session.world > 1:
            session.store.set(SAID, "why")
        raise
    except RuntimeError as error:
        if session.world == 1:
            raise
        broken(session, recorder, error)
    session.close()
    return 0


def _prepare(session: Session, device: Device, options: Options) -> tuple[Recorder | None, frozenset[str]]:
    """Return rank 0's recorder, and the labels of items not to measure again. All ranks raise what rank 0 raises."""
    recorder, told = None, ("", frozenset[str]())
    if session.leads:
        try:
            _lock(options.output)
            recorder = Recorder(options.path, _name(options.path), device, _meta(session, options))
            _take_over(recorder, options)
            told = ("", recorder.settled() if options.resume else frozenset())
        except InputError as error:
            told = (str(error), frozenset())
    message, done = session.gather(told)[0]
    if message:
        raise InputError(message)
    return recorder, done


def _lock(folder: Path) -> None:
    """Hold ``folder`` until this process ends. Raises InputError while another measurement writes there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)  # never closed: the lock lasts as long as the process
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(f"{folder}: another measurement is writing there; wait for it or give another --output") from None
    except OSError as error:
        raise InputError(f"{folder}: cannot write there: {error.strerror}") from None


def _name(path: Path) -> str:
    return path.parent.name if path.parent.name not in ("", "prof_data") else "this machine"


def _take_over(recorder: Recorder, options: Options) -> None:
    if not (options.resume or options.append):
        aside = kept_aside(options.path)
        if aside is not None:  # kept under its old name too until it is replaced, so that there is always a profile
            with contextlib.suppress(OSError):
                os.link(aside, options.path)
    elif options.path.exists():
        old = read_profile(options.path)
        check_same_machine(old, Profile(recorder.name, recorder.device, {}, recorder.meta), ("the old", "this machine's"))
        before, now = (int(meta.get("ranks", 0)) for meta in (old.meta, recorder.meta))
        if options.resume and before and now and before != now:
            raise InputError(f"{options.path} was begun with {before} ranks; --resume goes on with as many, not with {now}")
        recorder.take_over(old)
        if options.resume:  # one set of peaks for all measurements: two runs measure slightly different peaks
            recorder.device = old.device
        else:  # a busy machine measures lower ones, which its earlier GEMMs would exceed
            known, here = old.device.peak_flops, recorder.device.peak_flops
            peaks = {dtype: max(known.get(dtype, 0.0), here.get(dtype, 0.0)) for dtype in {**known, **here}}
            recorder.device = replace(recorder.device, peak_flops=peaks)
    elif options.resume:
        print(f"nothing to resume: there is no {options.path} yet, so all of it is measured", file=sys.stderr)
    else:
        raise InputError(f"{options.path}: no profile to append to; leave out --append for a first one")


def _meta(session: Session, options: Options) -> dict[str, Any]:
    return {
        **versions(session),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": options.command,
        "hosts": session.nodes,
        "ranks": session.world,
        "units": UNITS,
        QUICK: options.quick,
        "method": "median of repeats, operands rotated beyond the cache, all ranks at once, slowest rank of a collective",
        "sensors": {"start": sensors()},
        OUT_OF_MEMORY: [],
        NOT_RUN: {},
    }


def _measure(
    session: Session, device: Device, options: Options, recorder: Recorder | None, done: frozenset[str], end: float
) -> None:
    """Measure sweep by sweep. end: of the budget, in the seconds of the monotonic clock."""
    size = limits(session, device, options.quick)
    dtypes = [d for d in ("fp32", "bf16") if device.peak_flops.get(d)] if session.device.type == "cpu" else ["bf16"]
    trained = dtypes[0]  # dtype of most of a training step's compute and communication
    wanted = measured_here(session, size, options.wanted)
    plans = {
        op: list(dict.fromkeys([*(item for item in wanted if item.op == op), *planned]))
        for op, planned in _kernel_plans(session, size, options, dtypes).items()
    }
    if recorder is not None and (reason := lacking(session.device)):
        recorder.meta[NOT_RUN]["grouped_linear"] = reason
    software = versions(session)
    environment = f"nccl {software['nccl']}" if "nccl" in software else f"gloo of torch {software['torch']}"
    sweeps = [name for name in WEIGHTS if name in plans or session.world > 1]
    with _progress(session, end) as report:
        bench = Bench(session, WorkQueue(session), recorder, report, done, f"measured, torch {software['torch']}", environment)
        for i, sweep in enumerate(sweeps):
            share = WEIGHTS[sweep] / sum(WEIGHTS[name] for name in sweeps[i:])
            seconds = session.agree(max(end - time.monotonic(), 0.0) * share)
            if sweep == "linear":
                _note_power(session, options.quick, recorder)
            elif sweep in ("flash_attn", "grouped_linear"):
                preheat(session, options.quick)
            if sweep in plans:
                measure_kernels(bench, sweep, plans[sweep], seconds, cache_bytes(session.device), whole=sweep == "host")
            elif sweep == "overlap":
                measure_overlap(bench, size, trained, seconds)
            else:
                measure_collectives(bench, size, trained, seconds, [item for item in wanted if item.op not in WORK])
            _note_sensors(recorder, sweep)
    if recorder is not None:
        recorder.write()


def _kernel_plans(session: Session, size: Limits, options: Options, dtypes: Sequence[str]) -> dict[str, list[Item]]:
    """Return the items of each kernel table. dtypes: the main dtype of a training step here first, then others."""
    kinds = [kind for kind in KINDS if not (session.device.type == "cpu" and kind in COMPILED_KINDS)]
    return {
        "host": host_items(dtypes[0]),
        "linear": linear_items(size, options.models, dtypes),
        "flash_attn": attention_items(size, options.models, dtypes[0], fused_kernels(session.device)),
        "memory_bound": memory_bound_items(size, 2048 if options.quick else 64 * 1024, kinds, dtypes[0]),
        "grouped_linear": [] if lacking(session.device) else grouped_items(size, options.models, dtypes[0]),
    }


def _note_power(session: Session, quick: bool, recorder: Recorder | None) -> None:
    found = power_slowdown(session, quick)
    if recorder is not None:
        recorder.meta[POWER_SLOWDOWN] = found


def _note_sensors(recorder: Recorder | None, sweep: str) -> None:
    if recorder is not None:
        recorder.meta["sensors"] = {**recorder.meta["sensors"], f"after {sweep}": sensors()}


@contextlib.contextmanager
def _progress(session: Session, end: float) -> Iterator[Report]:
    """Yield the report function: a progress bar for each sweep on rank 0, with the maximum time left."""
    if not session.leads:
        yield lambda *_: None
        return
    columns = (
        TextColumn("{task.description:<20}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("measurements"),
        TimeElapsedColumn(),
        TextColumn("at most {task.fields[left]} left"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        tasks: dict[str, Any] = {}

        def report(sweep: str, done: int, total: int) -> None:
            left = f"{max(end - time.monotonic(), 0) / 60:.1f} min"
            if sweep not in tasks:
                for task in tasks.values():
                    bar.stop_task(task)
                tasks[sweep] = bar.add_task(sweep, total=total, left=left)
            bar.update(tasks[sweep], completed=max(done, bar.tasks[-1].completed), left=left)

        yield report
