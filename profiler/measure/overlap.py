"""GEMMs and collectives in flight at once: how much each slows the other down.

GEMMs and messages are repeated until both take about as long without overlap. Then both run together, on a GPU on two
streams, on a CPU in two threads. Only the time in which both were in flight counts. Work before or after it runs at its
rate without overlap, so

    slowdown = time together / (time without overlap - (time taken - time together))

for each, over all its calls. The times without overlap are measured again in every round, so that clock drift cancels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from profiler.measure.arena import Arena
from profiler.measure.collectives import Group, collective_work
from profiler.measure.hardware import cache_bytes
from profiler.measure.kernels import workload
from profiler.measure.session import Session
from profiler.measure.sweeps import Bench, measure_groups
from profiler.measure.timing import Work, hold_device
from profiler.measure.try_kernel import is_out_of_memory
from profiler.profile.item import Item, Limits
from profiler.profile.plan import KIB, whole_buffer
from profiler.profile.recorder import NOT_RUN

OPS = ("all_reduce", "all_gather", "reduce_scatter")
_SIZES = (16, 4, 64, 256)  # MiB
_PARTS_OF_LARGEST = (16, 32, 8)  # GEMMs are cubes; their sizes are the device's largest divided by these
_LEAST_SECONDS = {"cuda": 1e-3, "cpu": 20e-3}  # of either side, without overlap
_MOST_CALLS, _FEWEST_ROUNDS, _MOST_ROUNDS = 2000, 3, 15
_LEAST_SHARE = 0.3  # share of a side's work and time that must lie where both ran, to distinguish its slowdown from noise
_START_SECONDS, _LAUNCH_SECONDS = 1e-3, 40e-6  # more than the host takes before the first call, and for each
_LEAST_ROW_SECONDS, _MOST_ROW_SECONDS = 0.2, 3.0

Span = tuple[float, float]  #: start and end, seconds on one clock


@dataclass(frozen=True)
class Pair:
    """What one rank runs at once: ``gemms`` and ``messages`` calls take about equally long without overlap."""

    gemm: Work
    message: Work
    gemms: int = 1
    messages: int = 1


@dataclass(frozen=True)
class Round:
    """One rank's outcome: seconds of one GEMM during messages, and both slowdowns; NaN where they hardly overlapped."""

    seconds: float
    gemm_slowdown: float
    collective_slowdown: float


def overlap_items(intra: int, inter: int, limits: Limits, dtype: str) -> list[Item]:
    """Return every collective at every size with every GEMM; all pairs of one size before the next size."""
    most = limits.message_bytes // 4
    sizes = [size for mib in _SIZES if (size := mib * KIB * KIB) <= most] or [most]
    sides = list(dict.fromkeys(max(limits.largest // part, limits.smallest) for part in _PARTS_OF_LARGEST))
    return [
        Item.of(
            "overlap",
            {
                "collective": op,
                "intra": intra,
                "inter": inter,
                "bytes": whole_buffer(size, intra, inter),
                "m": side,
                "n": side,
                "k": side,
                "dtype": dtype,
            },
        )
        for size, side, op in product(sizes, sides, OPS)
    ]


def measure_overlap(bench: Bench, limits: Limits, dtype: str, seconds: float) -> None:
    """Time the pairs in the group of a full node and, where there are several nodes, of the full world.

    Leaves these groups open: single collectives are timed in them too.
    """
    session = bench.session
    worlds = dict.fromkeys([(session.ranks_per_node, 1), (session.ranks_per_node, session.nodes)])
    shapes = [(intra, inter) for intra, inter in worlds if intra * inter > 1]
    arena = Arena(session.device, cache_bytes(session.device))
    measure_groups(
        bench,
        "overlap",
        shapes,
        lambda intra, inter: overlap_items(intra, inter, limits, dtype),
        lambda item, group, each: _row(bench, item, group, arena, each),
        seconds,
        (_LEAST_ROW_SECONDS, _MOST_ROW_SECONDS),
        keep_open=True,
    )
    arena.release()


def _row(bench: Bench, item: Item, group: Group, arena: Arena, seconds: float) -> dict[str, Any] | None:
    """Return the outcome of ``item``, from the slowest rank; None if it does not fit in some rank's memory."""
    session = bench.session
    pair = _pair(session, item, group, arena)
    if session.agree(float(pair is None)) or pair is None:
        arena.release()
        return None
    rounds = _rounds(session, _balanced(session, pair), seconds)
    sound = [r for r in rounds if np.isfinite([r.gemm_slowdown, r.collective_slowdown]).all()]
    if session.agree(float(len(sound) < 2)):
        return {NOT_RUN: "GEMMs and messages of these sizes were hardly in flight at once"}
    median, gemm, message = (
        session.agree(float(np.median([getattr(r, name) for r in sound])))
        for name in ("seconds", "gemm_slowdown", "collective_slowdown")
    )
    times = [r.seconds for r in sound]
    spread = session.agree((max(times) - min(times)) / 2 / float(np.median(times)))
    return {
        "seconds": median,
        "spread": spread,
        "repeats": len(sound),
        "source": bench.source,
        "gemm_slowdown": gemm,
        "collective_slowdown": message,
    }


def _pair(session: Session, item: Item, group: Group, arena: Arena) -> Pair | None:
    columns = item.columns
    gemm = {name: columns[name] for name in ("m", "n", "k", "dtype")} | {"layout": "TN", "batch": 1}
    try:
        return Pair(
            workload(Item.of("linear", gemm), arena),
            collective_work(session, Item.of(str(columns["collective"]), columns), group),
        )
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            return None
        raise


def _balanced(session: Session, pair: Pair) -> Pair:
    """Return the pair with call numbers at which both take about equally long. All ranks choose the same numbers."""
    for _ in range(3):  # the first calls choose algorithms and fault pages in, single calls are slower than many
        gemm = session.agree(_length(run(session, pair, pair.gemms, 0)[0])) / pair.gemms
        message = session.agree(_length(run(session, pair, 0, pair.messages)[1])) / pair.messages
        least = max(gemm, message, _LEAST_SECONDS[session.device.type])
        gemms, messages = (int(np.clip(round(least / max(one, 1e-7)), 1, _MOST_CALLS)) for one in (gemm, message))
        pair = replace(pair, gemms=gemms, messages=messages)
    return pair


def _rounds(session: Session, pair: Pair, seconds: float) -> list[Round]:
    rounds: list[Round] = []
    start = time.perf_counter()
    while len(rounds) < _MOST_ROUNDS:
        session.beat()
        gemm_alone = _length(run(session, pair, pair.gemms, 0)[0])
        message_alone = _length(run(session, pair, 0, pair.messages)[1])
        gemms, messages = run(session, pair, pair.gemms, pair.messages)
        gemm, message = slowdown(gemms, messages, gemm_alone), slowdown(messages, gemms, message_alone)
        rounds.append(Round(gemm_alone / pair.gemms * gemm, gemm, message))
        late = time.perf_counter() - start > seconds
        if len(rounds) >= _FEWEST_ROUNDS and session.agree(float(late)):
            break
    return rounds


def _length(span: Span) -> float:
    return span[1] - span[0]


def slowdown(own: Span, other: Span, alone: float) -> float:
    """Return how many times slower the work of ``own`` ran while ``other`` was in flight; NaN if it cannot be determined.

    alone: seconds of the same work without overlap.
    """
    together = min(own[1], other[1]) - max(own[0], other[0])
    done = alone - (_length(own) - together)  # work done while both ran, in seconds without overlap
    told = together > _LEAST_SHARE * _length(own) and done > _LEAST_SHARE * alone
    return together / done if told else float("nan")


def run(session: Session, pair: Pair, gemms: int, messages: int) -> tuple[Span, Span]:
    """Start ``gemms`` GEMMs and ``messages`` collectives at once on all ranks; return the span of each."""
    session.agree(0.0)  # wait for all ranks
    if session.device.type == "cuda":
        return _run_on_streams(session, pair, gemms, messages)
    with ThreadPoolExecutor(1) as beside:
        sent = beside.submit(_clocked, pair.message, messages)
        computed = _clocked(pair.gemm, gemms)
        return computed, sent.result()


def _clocked(work: Work, calls: int) -> Span:
    start = time.perf_counter()
    for i in range(calls):
        work(i)
    return start, time.perf_counter()


def _run_on_streams(session: Session, pair: Pair, gemms: int, messages: int) -> tuple[Span, Span]:
    """Run GEMMs on the current stream and collectives on another, both queued before the GPU may start."""
    compute, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    flag = torch.zeros(1, device=session.device)
    began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    hold_device(_START_SECONDS + (gemms + messages) * _LAUNCH_SECONDS)
    dist.all_reduce(flag)  # the GPUs leave it at the same time, whenever their hosts arrived
    began.record(compute)
    side.wait_event(began)
    with torch.cuda.stream(side):
        sent = _queued(pair.message, messages, began)
    computed = _queued(pair.gemm, gemms, began)
    torch.cuda.synchronize()
    return computed(), sent()


def _queued(work: Work, calls: int, began: torch.cuda.Event) -> Callable[[], Span]:
    """Queue the calls on the current stream between two events; return a function for the span since ``began`` [s]."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for i in range(calls):
        work(i)
    end.record()
    return lambda: (began.elapsed_time(start) * 1e-3, began.elapsed_time(end) * 1e-3)
