"""Estimate every layout of a space in chunks, keep the best, count why the other layouts are rejected."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from profiler.errors import InputError
from profiler.profile.profile import GIB
from solver.search.fixed import check_fixed, check_most, fixed_layouts, fixed_splits
from solver.search.space import cross, enumerate_splits
from solver.spec.bounds import whole_number
from solver.spec.strategy import TpMode
from solver.step.distinct import distinct
from solver.step.layouts import Layouts, Splits
from solver.step.memory import peak_memory
from solver.step.problem import LayerTable, Problem, layer_table
from solver.step.solutions import Solutions, estimate_layouts

CHUNK_SPLITS = 16384  #: splits estimated at once; with about 13 to 18 times as many layouts they take about 150 MB
_SAMPLE = 1000  #: layouts whose Pareto front is found before that of all
_SIZES_KEPT = 10  #: of (tp, cp, pp), whose best layouts are kept
OUT_OF_MEMORY = "does not fit in memory"


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
    most: Mapping[str, int]  #: limits of sizes

    @property
    def layouts_per_second(self) -> float:
        return self.layouts_estimated / self.seconds


@dataclass
class _Kept:
    """Layouts kept of the chunks so far, with their seconds and device bytes; subclasses say which."""

    parts: list[Layouts] = field(default_factory=list)
    seconds: np.ndarray = field(default_factory=lambda: np.empty(0))
    memory: np.ndarray = field(default_factory=lambda: np.empty(0))

    def _join(self, layouts: Layouts, index: np.ndarray, seconds: np.ndarray, memory: np.ndarray) -> None:
        """Add the layouts ``index`` of a chunk, then keep those that ``_chosen`` names, in its order."""
        if not len(index):
            return
        merged = concatenate([*self.parts, layouts.take(index)])
        s, m = np.concatenate([self.seconds, seconds[index]]), np.concatenate([self.memory, memory[index]])
        keep = self._chosen(merged, s, m)
        self.parts, self.seconds, self.memory = [merged.take(keep)], s[keep], m[keep]

    def _chosen(self, layouts: Layouts, seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@dataclass
class _Best(_Kept):
    """The fastest ``keep`` layouts, less memory first where times are equal."""

    keep: int = 1

    def offer(self, layouts: Layouts, index: np.ndarray, seconds: np.ndarray, memory: np.ndarray) -> None:
        bound = np.inf if len(self.seconds) < self.keep else self.seconds.max()
        index = index[seconds[index] <= bound]
        if len(index) > self.keep:  # sorting all of them would cost more than estimating them
            kth = np.partition(seconds[index], self.keep - 1)[self.keep - 1]
            index = index[seconds[index] <= kth]
        self._join(layouts, index[np.lexsort((memory[index], seconds[index]))[: self.keep]], seconds, memory)

    def _chosen(self, layouts: Layouts, seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
        return np.lexsort((memory, seconds))[: self.keep]


def concatenate(parts: list[Layouts]) -> Layouts:
    """Return one Layouts from several, splits and rows appended in order."""
    starts = np.cumsum([0, *(len(p.splits) for p in parts[:-1])])
    return Layouts(
        Splits.concatenate([p.splits for p in parts]),
        np.concatenate([p.row + start for p, start in zip(parts, starts, strict=True)]),
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("zero", "recompute", "recompute_layers")),
    )


def search(
    problem: Problem,
    global_batch_sequences: int | None = None,
    top: int = 10,
    progress: Callable[[int, int], None] | None = None,
    *,
    global_batch_tokens: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    most: Mapping[str, int] | None = None,
    **unknown: Any,
) -> SearchResult:
    """Estimate every layout of ``problem.run.world_size`` ranks and a global batch of sequences, or of tokens.

    top: number of best layouts to keep. progress(done, total) is called with numbers of splits. fixed: axes that do not vary,
    by name (solver.search.fixed.AXES). most: largest tp, cp or pp. Raises InputError if nothing divides or nothing fits.
    """
    sequences = _sequences(problem, global_batch_sequences, global_batch_tokens, unknown)
    fixed, most = fixed or {}, most or {}
    check_fixed(fixed)
    check_most(most)
    start = time.perf_counter()
    space = enumerate_splits(problem, sequences)
    splits = fixed_splits(space.splits, fixed, most)
    table = layer_table(problem, splits.layer_keys()[0])
    found = _Found(_Best(keep=top))
    for begin in range(0, len(splits), CHUNK_SPLITS):
        layouts = fixed_layouts(cross(problem, splits.take(slice(begin, begin + CHUNK_SPLITS))), fixed)
        if len(layouts):
            _offer_fitting(problem, layouts, table, found)
        if progress:
            progress(min(begin + CHUNK_SPLITS, len(splits)), len(splits))
    if not found.estimated:
        raise InputError(f"no layout of this search has {', '.join(f'{name} {value}' for name, value in fixed.items())}")
    if not found.feasible:
        raise InputError(_nothing_fits(problem, found.estimated, found.least_memory))
    rejected = Counter({**space.rejected, OUT_OF_MEMORY: found.estimated - found.feasible})
    elapsed = time.perf_counter() - start
    modes = {
        mode.name.lower(): estimate_layouts(problem, kept.parts[0], table) for mode, kept in found.modes.items() if kept.parts
    }
    sizes = found.sizes.parts[0]
    return SearchResult(
        problem, estimate_layouts(problem, found.best.parts[0], table),
        estimate_layouts(problem, sizes.take(np.arange(min(top, _SIZES_KEPT, len(sizes)))), table), modes,
        estimate_layouts(problem, found.pareto.parts[0], table), found.estimated, found.feasible, elapsed, rejected,
        fixed, most,
    )  # fmt: skip


def _offer_fitting(problem: Problem, layouts: Layouts, table: LayerTable, found: _Found) -> None:
    """Estimate the memory of all layouts of a chunk, and the time of those that fit, and keep the best."""
    memory = peak_memory(problem, table, table.rows_of(layouts.splits), layouts)
    fits = np.flatnonzero(memory.device <= problem.cluster.memory_bytes)
    found.estimated += len(layouts)
    found.least_memory = min(found.least_memory, float(memory.device.min()))
    if len(fits):
        found.offer(estimate_layouts(problem, layouts.take(fits), table, memory.take(fits)))


def _sequences(problem: Problem, sequences: int | None, tokens: int | None, unknown: Mapping[str, Any]) -> int:
    """Return the global batch in sequences, from whichever unit was given."""
    if unknown:
        hint = "; give global_batch_sequences or global_batch_tokens" if "global_batch_size" in unknown else ""
        raise InputError(f"search has no argument {next(iter(unknown))}{hint}")
    if (sequences is None) == (tokens is None):
        raise InputError("give the global batch either as global_batch_sequences or as global_batch_tokens")
    if tokens is None:
        return whole_number("global_batch_sequences", sequences)
    count, rest = divmod(whole_number("global_batch_tokens", tokens), problem.run.seq_len)
    if rest:
        raise InputError(f"global_batch_tokens {tokens} is not a whole number of sequences of {problem.run.seq_len} tokens")
    return count


def _nothing_fits(problem: Problem, estimated: int, least: float) -> str:
    return (
        f"{problem.model.name} fits on {problem.run.world_size} accelerators in none of {estimated} layouts: the leanest "
        f"needs {least / GIB:.1f} GiB of {problem.cluster.memory_bytes / GIB:.1f} GiB each; use more accelerators "
        "or more memory"
    )


@dataclass
class _ParetoFront(_Kept):
    """The running Pareto front of (seconds, memory): after a sort by time, only new minima of memory stay."""

    def offer(self, layouts: Layouts, index: np.ndarray, seconds: np.ndarray, memory: np.ndarray) -> None:
        if len(index) > _SAMPLE:  # the front of a few layouts leaves few of the others to sort
            self._offer(layouts, index[:: len(index) // _SAMPLE], seconds, memory)
        if len(self.seconds):
            faster = np.searchsorted(self.seconds, seconds[index], side="right")
            least = np.concatenate([[np.inf], self.memory])[faster]  # of the front, memory falls with time
            index = index[memory[index] < least]
        self._offer(layouts, index, seconds, memory)

    def _offer(self, layouts: Layouts, index: np.ndarray, seconds: np.ndarray, memory: np.ndarray) -> None:
        self._join(layouts, index[pareto(seconds[index], memory[index])], seconds, memory)

    def _chosen(self, layouts: Layouts, seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
        return pareto(seconds, memory)


@dataclass
class _BestOfSizes(_Kept):
    """The fastest layout of each (tp, cp, pp), in order; less memory first where times are equal."""

    def offer(self, layouts: Layouts, index: np.ndarray, seconds: np.ndarray, memory: np.ndarray) -> None:
        sizes = distinct((layouts.splits.tp, layouts.splits.cp, layouts.splits.pp))[1]
        size = sizes[layouts.row[index]]
        fastest = np.full(int(sizes.max()) + 1, np.inf)
        np.minimum.at(fastest, size, seconds[index])
        self._join(layouts, index[seconds[index] == fastest[size]], seconds, memory)

    def _chosen(self, layouts: Layouts, seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
        splits, row, order = layouts.splits, layouts.row, np.lexsort((memory, seconds))
        first, _ = distinct((splits.tp[row][order], splits.cp[row][order], splits.pp[row][order]))  # of each in this order
        return order[np.sort(first)]


@dataclass
class _Found:
    """What a search keeps of the chunks that it has estimated; least_memory: bytes of the smallest layout, fitting or not."""

    best: _Best
    sizes: _BestOfSizes = field(default_factory=_BestOfSizes)
    modes: dict[TpMode, _Best] = field(default_factory=lambda: {mode: _Best() for mode in TpMode})
    pareto: _ParetoFront = field(default_factory=_ParetoFront)
    estimated: int = 0
    feasible: int = 0
    least_memory: float = np.inf

    def offer(self, solutions: Solutions) -> None:
        """Keep the best of one chunk's layouts, which all fit."""
        layouts, seconds, memory = solutions.layouts, solutions.times.seconds, solutions.memory.device
        fits = np.arange(len(solutions))
        self.feasible += len(fits)
        self.best.offer(layouts, fits, seconds, memory)
        self.sizes.offer(layouts, fits, seconds, memory)
        mode_of = layouts.splits.mode[layouts.row[fits]]
        for mode, kept in self.modes.items():
            kept.offer(layouts, fits[mode_of == mode], seconds, memory)
        self.pareto.offer(layouts, fits, seconds, memory)


def pareto(seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Return the indexes of the Pareto-optimal points, ordered by time; equal points count once."""
    if not len(seconds):
        return np.empty(0, dtype=np.int64)
    order = np.argsort(seconds)  # equal times are in any order: the sort of the few remaining points settles it
    order = order[memory[order] <= np.minimum.accumulate(memory[order])]
    order = order[np.lexsort((memory[order], seconds[order]))]
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], memory[order][:-1]]))
    return order[memory[order] < lowest]
