"""What a search keeps of the layouts that it has estimated: the fastest, those of each size and mode, the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from solver.spec.choices import TpMode
from solver.step.distinct import distinct
from solver.step.layouts import Layouts
from solver.step.solutions import Solutions

_SAMPLE = 1000  #: layouts whose Pareto front is found before that of all


@dataclass
class Selection:
    """Layouts kept of the chunks so far (None before the first), with their seconds and device bytes; subclasses say which."""

    layouts: Layouts | None = None
    seconds: np.ndarray = field(default_factory=lambda: np.empty(0))
    memory: np.ndarray = field(default_factory=lambda: np.empty(0))

    def _join(self, layouts: Layouts, index: np.ndarray, seconds: np.ndarray, memory: np.ndarray) -> None:
        """Add the layouts ``index`` of a chunk, then keep those that ``_chosen`` names, in its order."""
        if not len(index):
            return
        offered = layouts.take(index)
        merged = offered if self.layouts is None else Layouts.concatenate([self.layouts, offered])
        s, m = np.concatenate([self.seconds, seconds[index]]), np.concatenate([self.memory, memory[index]])
        keep = self._chosen(merged, s, m)
        self.layouts, self.seconds, self.memory = merged.take(keep), s[keep], m[keep]

    def offer(self, layouts: Layouts, index: np.ndarray, seconds: np.ndarray, memory: np.ndarray) -> None:
        """Keep those of the layouts ``index`` that are among the best so far."""
        raise NotImplementedError

    def _chosen(self, layouts: Layouts, seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
        raise NotImplementedError


@dataclass
class Best(Selection):
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


@dataclass
class ParetoFront(Selection):
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
class BestOfSizes(Selection):
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
class SearchState:
    """What a search keeps of the chunks that it has estimated; least_memory: bytes of the smallest layout, fitting or not."""

    best: Best
    sizes: BestOfSizes = field(default_factory=BestOfSizes)
    modes: dict[TpMode, Best] = field(default_factory=lambda: {mode: Best() for mode in TpMode})
    pareto: ParetoFront = field(default_factory=ParetoFront)
    estimated: int = 0
    feasible: int = 0
    least_memory: float = np.inf

    def offer(self, solutions: Solutions, fits: np.ndarray) -> None:
        """Keep the best of one chunk's layouts; fits: indexes of those that fit in memory."""
        layouts, seconds, memory = solutions.layouts, solutions.times.seconds, solutions.memory.device
        self.feasible += len(fits)
        self.best.offer(layouts, fits, seconds, memory)
        self.sizes.offer(layouts, fits, seconds, memory)
        mode_of = layouts.splits.mode[layouts.row[fits]]
        for mode, kept in self.modes.items():
            kept.offer(layouts, fits[mode_of == mode], seconds, memory)
        self.pareto.offer(layouts, fits, seconds, memory)

    def merge(self, other: SearchState) -> None:
        """Add what another part of the search has kept."""
        self.estimated, self.feasible = self.estimated + other.estimated, self.feasible + other.feasible
        self.least_memory = min(self.least_memory, other.least_memory)
        pairs = [(self.best, other.best), (self.sizes, other.sizes), (self.pareto, other.pareto)]
        for mine, theirs in [*pairs, *((kept, other.modes[mode]) for mode, kept in self.modes.items())]:
            if theirs.layouts is not None:
                mine.offer(theirs.layouts, np.arange(len(theirs.layouts)), theirs.seconds, theirs.memory)


def pareto(seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Return the indexes of the Pareto-optimal points, ordered by time; equal points count once."""
    if not len(seconds):
        return np.empty(0, dtype=np.int64)
    order = np.argsort(seconds)  # equal times are in any order: the sort of the few remaining points settles it
    order = order[memory[order] <= np.minimum.accumulate(memory[order])]
    order = order[np.lexsort((memory[order], seconds[order]))]
    lowest = np.minimum.accumulate(np.concatenate([[np.inf], memory[order][:-1]]))
    return order[memory[order] < lowest]
