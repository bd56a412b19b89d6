"""The best layout of a search without what it was estimated from, so that the answers of many searches fit in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from solver.search.search import SearchResult
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.memory import AT_RISK, FITS
from solver.step.solutions import Solutions, estimate_layouts

#: How much longer than the fastest layout's a step may be that is sure to fit, to be launched in its stead.
_AS_FAST = 0.01


@dataclass(frozen=True)
class BestLayout:
    """The fastest layout of a search, without the tables that it was estimated from, of which a thousand do not fit in memory.

    tgs: tokens per GPU per second. memory: peak bytes on the device. layouts_estimated, search_seconds, fixed: of the search.
    """

    layout: Strategy
    seconds: float
    tgs: float
    memory: float
    layouts_estimated: int
    search_seconds: float
    fixed: Mapping[str, Any]

    @classmethod
    def of(cls, result: SearchResult) -> BestLayout:
        best = result.best
        return cls(
            best.layouts.strategy(0, result.problem.run),
            float(best.times.seconds[0]),
            float(best.tgs[0]),
            float(best.memory.device[0]),
            result.layouts_estimated,
            result.seconds,
            result.fixed,
        )


@dataclass(frozen=True)
class SureLayout:
    """The fastest layout that is sure to fit. memory, bound: bytes on the device, expected and at most."""

    layout: Strategy
    seconds: float
    memory: float
    bound: float


def surest(result: SearchResult) -> SureLayout | None:
    """Return the fastest layout that a search kept and that is sure to fit in memory, or None."""
    sure = [(float(found.times.seconds[i]), found, i) for found, i in result.kept() if found.verdict(i) == FITS]
    if not sure:
        return None
    taken, found, index = min(sure, key=lambda one: one[0])
    memory = float(found.memory.device[index]), float(found.memory.bound[index])
    return SureLayout(found.layouts.strategy(index, found.problem.run), taken, *memory)


def to_launch(result: SearchResult) -> Solutions:
    """Return the fastest layouts of a search, or one that takes as long as the first and, unlike it, is sure to fit."""
    sure = surest(result) if result.best.verdict(0) == AT_RISK else None
    if sure is None or sure.seconds > (1 + _AS_FAST) * float(result.best.times.seconds[0]):
        return result.best
    return estimate_layouts(result.problem, Layouts.of([sure.layout]))


@dataclass(frozen=True)
class Variant:
    """One combination of constants: the best layout that the search with it found, or why there is none, and the best that is
    sure to fit."""

    constants: Mapping[str, Any]
    best: BestLayout | None
    reason: str = ""
    sure: SureLayout | None = None

    @property
    def seconds(self) -> float:
        return self.best.seconds if self.best else float("inf")


def variant_of(result: SearchResult, **constants: Any) -> Variant:
    """Return what a search with these constants found."""
    return Variant(constants, BestLayout.of(result), sure=surest(result))
