"""The two ways of measuring: kernels, assigned to the ranks by a queue, and collectives, run by all ranks together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.measure.arena import Arena
from profiler.measure.collectives import Group, join_group, leave_group, slowest, time_collective
from profiler.measure.grouped import grouped_work, operator_name
from profiler.measure.host import host_work
from profiler.measure.kernels import workload
from profiler.measure.session import Session
from profiler.measure.timing import Measurement, Work
from profiler.measure.try_kernel import try_kernel
from profiler.measure.work_queue import WorkQueue
from profiler.profile.item import Item, Limits
from profiler.profile.plan import collective_items, group_shapes
from profiler.profile.recorder import NOT_RUN, Recorder

ROW_SECONDS = 0.05, 1.0  #: least and most per measurement

#: called after every measurement: the sweep, items done and all items of the sweep
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Bench:
    """State that the sweeps share.

    exchange: the work queue. recorder: None except on rank 0. done: labels of items not to measure again. source: of every
    measurement.
    """

    session: Session
    exchange: WorkQueue
    recorder: Recorder | None
    report: Report
    done: frozenset[str]
    source: str
    environment: str  #: of collectives: backend and release
    groups: dict[tuple[int, int], Group] = field(default_factory=dict)  #: open ones by (intra, inter)

    def finished(self, sweep: str, number: int, total: int, item: Item, outcome: Mapping[str, Any] | None) -> None:
        """Record an outcome of this rank, or send it to the rank that records."""
        if self.recorder is None:
            self.exchange.post([sweep, number, outcome])
        else:
            self.recorder.add(item, outcome)
            self.report(sweep, number + 1, total)

    def group(self, intra: int, inter: int) -> Group:
        """Return this rank's group of a shape, opened if necessary. Called by all ranks.

        A closed group cannot be opened again: PyTorch would find the old one's addresses in the job's store.
        """
        if (intra, inter) not in self.groups:
            self.groups[intra, inter] = join_group(self.session, intra, inter)
        return self.groups[intra, inter]

    def collect(self, sweep: str, items: Sequence[Item]) -> None:
        """Record what other ranks sent."""
        if self.recorder is not None:
            for sent, number, outcome in self.exchange.collect():
                if sent == sweep:
                    self.finished(sweep, number, len(items), items[number], outcome)


def measure_kernels(
    bench: Bench, sweep: str, planned: Sequence[Item], seconds: float, cache_bytes: int, whole: bool = False
) -> None:
    """Time the planned items for about ``seconds``; the ranks work at once, so that they share memory and power.

    whole: all of them, however long the first ones take.
    """
    items = [item for item in planned if item.label not in bench.done]
    session = bench.session
    end = time.monotonic() + seconds
    each = float(np.clip(seconds * session.world / max(len(items), 1), *ROW_SECONDS))
    arena = Arena(session.device, cache_bytes)
    try:
        while (whole or time.monotonic() < end) and (number := bench.exchange.claim(sweep)) < len(items):
            session.beat()
            bench.finished(sweep, number, len(items), items[number], _kernel_row(bench, items[number], arena, each))
            bench.collect(sweep, items)
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the job ends: record what others sent meanwhile
            bench.collect(sweep, items)
        raise
    session.agree(0.0)  # wait until all have finished
    arena.release()
    bench.collect(sweep, items)
    if bench.recorder is not None:
        bench.recorder.write()


def _kernel_row(bench: Bench, item: Item, arena: Arena, seconds: float) -> dict[str, Any] | None:
    """Return the outcome of one item; None if it did not fit in memory."""
    found = try_kernel(lambda: _work(item, arena), arena, seconds, by_host=item.op == "host")
    if not isinstance(found, Measurement):
        return found if found is None else {NOT_RUN: found}
    source = f"{bench.source}, {operator_name(arena.device)}" if item.op == "grouped_linear" else bench.source
    return {"seconds": found.median, "spread": found.spread, "repeats": found.count, "source": source}


def _work(item: Item, arena: Arena) -> Work:
    if item.op == "host":
        return host_work(item, arena.device)
    return grouped_work(item, arena) if item.op == "grouped_linear" else workload(item, arena)


#: (item, group, seconds) -> the outcome, None if it does not fit in memory; run by all ranks together
GroupRow = Callable[[Item, Group, float], dict[str, Any] | None]


def measure_groups(
    bench: Bench,
    what: str,
    shapes: Sequence[tuple[int, int]],
    items_of: Callable[[int, int], Sequence[Item]],
    row: GroupRow,
    seconds: float,
    row_seconds: tuple[float, float],
    keep_open: bool,
) -> None:
    """Measure items that groups of ranks run together, in every (intra, inter) of ``shapes``, which share the time left.

    what: name of the sweep. row_seconds: least and most per measurement. keep_open: leave the groups' communicators to a later
    sweep.
    """
    session = bench.session
    end = time.monotonic() + seconds
    for i, (intra, inter) in enumerate(shapes):
        items = [item for item in items_of(intra, inter) if item.label not in bench.done]
        left = session.agree(max(end - time.monotonic(), 0.0))
        if items and left > 0:
            share = left / (len(shapes) - i)
            each = float(np.clip(share / len(items), *row_seconds))
            _measure_group(bench, f"{what} {intra} x {inter}", bench.group(intra, inter), items, row, share, each)
            if not keep_open:
                leave_group(bench.groups.pop((intra, inter)))
    if bench.recorder is not None:
        bench.recorder.write()


def _measure_group(
    bench: Bench, sweep: str, group: Group, items: Sequence[Item], row: GroupRow, seconds: float, each: float
) -> None:
    end = time.monotonic() + seconds
    for number, item in enumerate(items):
        bench.session.beat()
        if bench.session.agree(float(time.monotonic() > end)):
            break
        outcome = row(item, group, each)
        if bench.recorder is not None:
            bench.finished(sweep, number, len(items), item, outcome)


def measure_collectives(bench: Bench, limits: Limits, dtype: str, seconds: float, wanted: Sequence[Item] = ()) -> None:
    """Time every collective in every group shape, those of ``wanted`` first."""
    session = bench.session

    def row(item: Item, group: Group, each: float) -> dict[str, Any] | None:
        found = time_collective(session, item, group, each)
        if found is None:
            return None
        median, spread = slowest(session, found, group)
        return {"seconds": median, "spread": spread, "repeats": found.count, "source": bench.source, "env": bench.environment}

    def items_of(intra: int, inter: int) -> list[Item]:
        first = [item for item in wanted if (item.number("intra"), item.number("inter")) == (intra, inter)]
        return list(dict.fromkeys([*first, *collective_items(intra, inter, limits, dtype)]))

    shapes = group_shapes(session.ranks_per_node, session.nodes)
    measure_groups(bench, "collectives", shapes, items_of, row, seconds, ROW_SECONDS, keep_open=False)
