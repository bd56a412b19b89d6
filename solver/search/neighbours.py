"""The layouts one step away from a layout: each axis at its next lower and next higher value, or at another choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from solver.search.divisions import DIVIDING
from solver.search.fixed import stated_ends
from solver.search.space import cross, enumerate_splits
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts, Splits
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

#: Axis -> the columns that may change with it, because the new value may not run with what they were. dp and the number of
#: micro batches always fill the world and the batch; ranks of ZeRO, schedule and end stages must divide what the others are.
_FOLLOWING = {
    "tp": ("mode", "etp", "wp"),
    "cp": ("wp",),
    "pp": ("vpp", "zero"),
    "vpp": (),
    "ep": ("etp",),
    "etp": (),
    "mode": ("wp",),
    "wp": (),
    "micro_batch_size": (),
    "zero": ("wp",),
    "zero_shard_size": ("zero",),
    "schedule": ("vpp",),
    "recompute": (),
}
_CHOICES = ("mode", "schedule")  #: axes without an order: every other value is one step away
_NAMES = {"mode": "tp_mode"}
AXES = tuple(_NAMES.get(axis, axis) for axis in _FOLLOWING)
_SHARE = 0.13  #: shares of recomputed layers that are closer than this are one: stages of other sizes round them

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Step:
    """One step along an axis: what it changes, in words, and the layout that it leads to (an index of the neighbourhood)."""

    axis: str
    before: str
    after: str
    index: int


@dataclass(frozen=True)
class Neighbourhood:
    """A layout (the first of ``solutions``) and what lies one step away from it, whether it fits in memory or not."""

    solutions: Solutions
    steps: tuple[Step, ...]

    def change(self, step: Step) -> float:
        """Return the step time there over the time here, minus 1."""
        times = self.solutions.times.seconds
        return float(times[step.index] / times[0] - 1)


def neighbours(problem: Problem, layout: Strategy) -> Neighbourhood:
    """Return the neighbourhood of a layout with its own batch.

    At each new value of an axis every other axis is kept where the framework runs it so; of the layouts that keep equally much
    the fastest is taken. Raises InputError as solver.search.space.enumerate_splits.
    """
    end_stages = {(0, 0), stated_ends(vars(layout))}  # other numbers of stages divide the layers as a search does
    splits = Splits.concatenate(
        [enumerate_splits(problem, layout.global_batch_sequences, ends).splits for ends in sorted(end_stages)]
    )
    own = Layouts.of([layout])
    near = _near(_columns(own), {name: getattr(splits, name) for name in vars(splits)})
    layouts = cross(problem, splits.take(np.flatnonzero(near)))
    mine, theirs = _columns(own), _columns(layouts)
    found = [(axis, _along(axis, mine, theirs)) for axis in _FOLLOWING]
    used = np.unique(np.concatenate([index for _, index in found]))
    candidates = estimate_layouts(problem, layouts.take(used)) if len(used) else None
    chosen: list[tuple[str, int]] = []
    for axis, index in found:
        if candidates is not None and len(index):
            seconds = candidates.times.seconds[np.searchsorted(used, index)]
            chosen += [(axis, i) for i in _nearest(axis, mine, {name: c[index] for name, c in theirs.items()}, index, seconds)]
    reached = [layouts.strategy(i, problem.run) for _, i in chosen]
    solutions = estimate_layouts(problem, Layouts.of([layout, *reached]))
    steps = [
        Step(_NAMES.get(axis, axis), _word(axis, layout), _word(axis, other), number)
        for number, ((axis, _), other) in enumerate(zip(chosen, reached, strict=True), 1)
    ]
    return Neighbourhood(solutions, tuple(steps))


def _columns(layouts: Layouts) -> Columns:
    """Return every axis as an array over the layouts; level and covered are the level of
    recomputation and the layers of a stage that it is of."""
    splits = layouts.splits
    found = {name: getattr(splits, name)[layouts.row] for name in vars(splits)}
    layers = np.where(layouts.recompute_layers < 0, np.inf, layouts.recompute_layers)
    found["zero"], found["level"], found["covered"] = layouts.zero, layouts.recompute, layers
    return found


def _kept(axis: str) -> Iterator[str]:
    """Yield the columns that a step along ``axis`` does not change."""
    free = {axis, *_FOLLOWING[axis], *DIVIDING, "recompute"}
    yield from (name for name in _FOLLOWING if name not in free)


def _near(mine: Columns, theirs: Columns) -> np.ndarray:
    """Return which splits may be one step away: bool [splits]."""
    found = np.zeros(len(theirs["tp"]), dtype=bool)
    for axis in _FOLLOWING:
        same = np.ones(len(found), dtype=bool)
        for name in _kept(axis):
            same &= theirs[name] == mine[name] if name in theirs else True
        found |= same
    return found


def _along(axis: str, mine: Columns, theirs: Columns) -> np.ndarray:
    """Return the layouts that differ from mine in ``axis`` and in what may follow it only: indexes."""
    same = _recomputed(theirs) != _recomputed(mine) if axis == "recompute" else theirs[axis] != mine[axis]
    for name in _kept(axis):
        same &= theirs[name] == mine[name]
    if axis != "recompute":
        same &= (theirs["level"] == mine["level"]) & _same_share(mine, theirs)
    else:
        for name in DIVIDING:
            same &= theirs[name] == mine[name]
        same &= theirs["zero"] == mine["zero"]
    return np.flatnonzero(same)


def _recomputed(columns: Columns) -> np.ndarray:
    """Return recomputation as one number that grows with what is recomputed."""
    return columns["level"] * 1e6 + np.minimum(columns["covered"], 1e5)


def _same_share(mine: Columns, theirs: Columns) -> np.ndarray:
    own = float(mine["covered"][0] * mine["pp"][0])
    return np.isinf(theirs["covered"]) if np.isinf(own) else np.abs(theirs["covered"] * theirs["pp"] / own - 1) < _SHARE


def _nearest(axis: str, mine: Columns, theirs: Columns, index: np.ndarray, seconds: np.ndarray) -> Iterator[int]:
    """Yield, for the next value on either side (every value of a choice), the layout that keeps most, then the fastest."""
    values = _recomputed(theirs) if axis == "recompute" else theirs[axis]
    own = (_recomputed(mine) if axis == "recompute" else mine[axis])[0]
    if axis in _CHOICES:
        wanted = np.unique(values)
    else:
        below, above = values[values < own], values[values > own]
        wanted = np.array([*([below.max()] if len(below) else []), *([above.min()] if len(above) else [])])
    changed = sum((theirs[name] != mine[name]).astype(int) for name in (*_FOLLOWING[axis], *DIVIDING) if name != axis)
    order = np.lexsort((seconds, changed))
    for value in wanted:
        yield int(index[next(i for i in order if values[i] == value)])


def _word(axis: str, layout: Strategy) -> str:
    if axis != "recompute":
        return str(getattr(layout, "tp_mode" if axis == "mode" else axis))
    return layout.recompute + ("" if layout.recompute_layers < 0 else f" {layout.recompute_layers} layers")
