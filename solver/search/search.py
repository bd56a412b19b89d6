"""Estimate every layout of a space in chunks, keep the best, count why the other layouts are rejected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_all_start_methods, get_context
from typing import TYPE_CHECKING, Any

import numpy as np

from profiler.errors import InputError, counted
from profiler.units import GIB
from solver.search.fixed import agreeing, check_fixed, check_max_sizes, fixed_layouts, stated_ends, within_max_sizes
from solver.search.kept import Best, SearchState, Selection
from solver.search.reasons import why_no_layout, why_none
from solver.search.space import cross, enumerate_splits
from solver.spec.bounds import whole_number
from solver.spec.rules.schedules import schedule_broken
from solver.step.layer_table import LayerTable, layer_table
from solver.step.layouts import Layouts, Splits
from solver.step.peak_memory import least_memory, peak_memory
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

CHUNK_SPLITS = 32768  #: splits estimated at once; with about 6 times as many layouts they take about 100 MB
_EVERY = 61  #: of so many layouts one is in the sample that tells whether many are too large
_SIZES_KEPT = 10  #: of (tp, cp, pp), whose best layouts are kept
DOES_NOT_FIT = "does not fit in memory"


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    best: the fastest feasible layouts, in order (less memory first where times are equal). best_of_sizes: the fastest for each
    (tp, cp, pp), in order. best_of_mode: the fastest per tp_mode. pareto: layouts that are Pareto-optimal in time and memory.
    rejected: reason -> number; structural reasons count splits that were never expanded into layouts, "does not fit in memory"
    counts estimated layouts.
    """

    problem: Problem
    best: Solutions
    best_of_sizes: Solutions
    best_of_mode: dict[str, Solutions]
    pareto: Solutions
    layouts_estimated: int
    feasible: int
    seconds: float
    rejected: Counter[str]
    fixed: Mapping[str, Any]  #: axes that did not vary
    max_sizes: Mapping[str, int]  #: limits of sizes

    def kept(self) -> Iterator[tuple[Solutions, int]]:
        """Yield the layouts that the search kept: where they are, and their index there."""
        yield from ((found, i) for found in (self.best, self.best_of_sizes, self.pareto) for i in range(len(found)))

    @property
    def layouts_per_second(self) -> float:
        return self.layouts_estimated / self.seconds


def search(
    problem: Problem,
    global_batch_sequences: int | None = None,
    top: int = 10,
    progress: Callable[[int, int], None] | None = None,
    *,
    global_batch_tokens: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    max_sizes: Mapping[str, int] | None = None,
    jobs: int = 1,
) -> SearchResult:
    """Estimate every layout of ``problem.run.world_size`` ranks and a global batch of sequences, or of tokens.

    top: number of best layouts to keep, at most 1000. progress(done, total) is called with numbers of splits. fixed: axes that
    do not vary, by name (solver.search.fixed.AXES). max_sizes: largest tp, cp or pp. jobs: processes that share
    the work. Raises InputError if nothing divides or nothing fits.
    """
    sequences = batch_sequences(problem, global_batch_sequences, global_batch_tokens)
    fixed, max_sizes = fixed or {}, max_sizes or {}
    _check_options(problem, fixed, max_sizes, top, jobs)
    start = time.perf_counter()
    space = enumerate_splits(problem, sequences, stated_ends(fixed))
    keep = agreeing(space.splits, fixed) & within_max_sizes(space.splits, max_sizes)
    if not keep.any():
        raise InputError(why_none(problem, sequences, space.splits, fixed, max_sizes))
    splits = space.splits.take(keep)
    table = layer_table(problem, splits.layer_keys()[0])
    part = partial(_search_part, problem, table, fixed, top)
    state = _search_all(part, splits, jobs, progress)
    if not state.estimated:
        raise InputError(why_no_layout(problem, sequences, fixed))
    if not state.feasible:
        least = _search_all(partial(part, prunes=False), splits, jobs).least_memory
        raise InputError(_nothing_fits(problem, state.estimated, least, fixed))
    rejected = Counter({**space.rejected, DOES_NOT_FIT: state.estimated - state.feasible})
    elapsed = time.perf_counter() - start

    def estimated(kept: Selection, most: int | None = None) -> Solutions:
        assert kept.layouts is not None, "a layout that fits is the best, of its size, and on the front"
        layouts = kept.layouts if most is None else kept.layouts.take(np.arange(min(most, len(kept.layouts))))
        return estimate_layouts(problem, layouts, table)

    return SearchResult(
        problem,
        estimated(state.best),
        estimated(state.sizes, min(top, _SIZES_KEPT)),
        {mode.name.lower(): estimated(best) for mode, best in state.modes.items() if best.layouts is not None},
        estimated(state.pareto),
        state.estimated,
        state.feasible,
        elapsed,
        rejected,
        fixed,
        max_sizes,
    )


def _check_options(problem: Problem, fixed: Mapping[str, Any], max_sizes: Mapping[str, int], top: int, jobs: int) -> None:
    """Raise InputError for options of a search that cannot be."""
    check_fixed(fixed)
    if broken := schedule_broken(problem.framework, problem.model, problem.run, str(fixed.get("schedule", ""))):
        raise InputError(broken)
    check_max_sizes(max_sizes)
    whole_number("top", top)
    whole_number("jobs", jobs)


def _search_part(
    problem: Problem,
    table: LayerTable,
    fixed: Mapping[str, Any],
    top: int,
    splits: Splits,
    progress: Callable[[int, int], None] | None = None,
    prunes: bool = True,
) -> SearchState:
    """Return what is kept of all layouts of ``splits``, which are estimated in chunks.

    prunes: leave out layouts that do not fit by a lower bound of their memory; the least memory of all is then not known.
    """
    state = SearchState(Best(keep=top))
    for begin in range(0, len(splits), CHUNK_SPLITS):
        layouts = fixed_layouts(cross(problem, splits.take(slice(begin, begin + CHUNK_SPLITS))), fixed)
        state.estimated += len(layouts)
        if prunes and len(layouts) and _few_may_fit(problem, table, layouts.take(np.arange(0, len(layouts), _EVERY))):
            may_fit = np.flatnonzero(_may_fit(problem, table, layouts))
            if 2 * len(may_fit) < len(layouts):  # to pick them costs less than to estimate the others
                layouts = layouts.take(may_fit)
        if len(layouts):
            _offer_fitting(problem, layouts, table, state)
        if progress:
            progress(min(begin + CHUNK_SPLITS, len(splits)), len(splits))
    return state


def _may_fit(problem: Problem, table: LayerTable, layouts: Layouts) -> np.ndarray:
    """Return whether a lower bound of each layout's memory fits: bool [layouts]."""
    return least_memory(table.priced(problem, layouts.splits), layouts) <= problem.cluster.memory_bytes


def _few_may_fit(problem: Problem, table: LayerTable, sample: Layouts) -> bool:
    """Whether so few layouts of a sample may fit that it is worthwhile to look for them among all."""
    return 2 * np.count_nonzero(_may_fit(problem, table, sample)) < len(sample)


def _search_all(
    part: Callable[..., SearchState], splits: Splits, jobs: int, progress: Callable[[int, int], None] | None = None
) -> SearchState:
    """Return what ``part`` keeps of all ``splits``, in ``jobs`` processes."""
    return part(splits, progress) if jobs == 1 else _search_parts(part, splits, jobs, progress)


def _search_parts(
    part: Callable[[Splits], SearchState], splits: Splits, jobs: int, progress: Callable[[int, int], None] | None
) -> SearchState:
    """Return what ``part`` keeps of all ``splits``, in at most ``jobs`` processes; each takes every n-th split.

    Processes are forked where the system can, so that they share the table of layers instead of getting copies.
    """
    context = get_context("fork" if "fork" in get_all_start_methods() else None)
    receivers = []
    jobs = min(jobs, len(splits))
    for first in range(jobs):
        receiver, sender = context.Pipe(duplex=False)
        worker = context.Process(target=_send_part, args=(sender, part, splits.take(slice(first, None, jobs))), daemon=True)
        worker.start()
        sender.close()
        receivers.append(receiver)
    state: SearchState | None = None
    for done, receiver in enumerate(receivers, 1):
        other = _received(receiver)
        if state is None:
            state = other
        else:
            state.merge(other)
        if progress:
            progress(done * len(splits) // jobs, len(splits))
    assert state is not None  # jobs is at least 1
    return state


def _send_part(sender: Connection, part: Callable[[Splits], SearchState], splits: Splits) -> None:
    try:
        sender.send(part(splits))
    except Exception as error:  # raised again where the parts are put together; what kills a process leaves the pipe empty
        sender.send(error)


def _received(receiver: Connection) -> SearchState:
    try:
        received = receiver.recv()
    except EOFError:
        raise InputError("a process of the search ended early, perhaps for want of memory; use fewer --jobs") from None
    if isinstance(received, Exception):
        raise received
    result: SearchState = received
    return result


def _offer_fitting(problem: Problem, layouts: Layouts, table: LayerTable, state: SearchState) -> None:
    """Estimate the memory of all layouts of a chunk, and the time of those that fit, and keep the best."""
    memory = peak_memory(table.priced(problem, layouts.splits), layouts)
    fits = np.flatnonzero(memory.device <= problem.cluster.memory_bytes)
    state.least_memory = min(state.least_memory, float(memory.device.min()))
    if 2 * len(fits) > len(layouts):  # to pick the few that fit would cost more than to time the others
        state.offer(estimate_layouts(problem, layouts, table, memory), fits)
    elif len(fits):
        state.offer(estimate_layouts(problem, layouts.take(fits), table, memory.take(fits)), np.arange(len(fits)))


def batch_sequences(problem: Problem, sequences: int | None, tokens: int | None) -> int:
    """Return the global batch in sequences, from whichever unit was given."""
    if (sequences is None) == (tokens is None):
        raise InputError("give the global batch either as global_batch_sequences or as global_batch_tokens")
    if tokens is None:
        return whole_number("global_batch_sequences", sequences)
    count, rest = divmod(whole_number("global_batch_tokens", tokens), problem.run.seq_len)
    if rest:
        raise InputError(f"global_batch_tokens {tokens} is not a whole number of sequences of {problem.run.seq_len} tokens")
    return count


def _nothing_fits(problem: Problem, estimated: int, least: float, fixed: Mapping[str, Any]) -> str:
    gpus, single = counted(problem.run.world_size, "GPU"), [name for name in ("tp", "pp", "cp") if fixed.get(name) == 1]
    free = f"; {', '.join(single)} {'is' if len(single) == 1 else 'are'} fixed at 1: leave that free" if single else ""
    limit = problem.cluster.memory_bytes
    needed, there = (f"{size / GIB:,.0f}" if size >= 1000 * GIB else f"{size / GIB:.3g}" for size in (least, limit))
    return (
        f"none of {estimated:,} layouts of {problem.model.name} fits on {gpus}: the smallest needs {needed} GiB of {there} GiB "
        f"each; use more GPUs or more memory{free}"
    )
