"""Layers assigned to the stages of one layout so that none is waited for: a layout string, with a recomputation to match.

The stages with the embedding and the head get fewer layers. Found by moving single layers between chunks as long as the step
gets shorter, or memory that does not fit less; every candidate is estimated like any other layout. Where the framework can,
each stage also recomputes a number of layers of its own: the fewest with which it fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from profiler.errors import InputError
from solver.search.stage_recomputation import fewest_recomputed
from solver.spec.choices import Recompute
from solver.spec.pipeline_layout import layout_text
from solver.step.layouts import Layouts
from solver.step.per_stage import chunks_of, time_of_stages
from solver.step.solutions import Solutions, estimate_layouts
from solver.step.time import TIME_PARTS

#: Shares of the fullest stage's layers that recomputation of whole layers is tried with.
_SHARES = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
_BUBBLE = TIME_PARTS.index("bubble")


@dataclass(frozen=True)
class Balanced:
    """The best assignment of layers: its estimate (of a single layout, whose run states pipeline_layout).

    before: seconds of the evenly assigned layout. uniform: of the best assignment with the same recomputation on every stage;
    inf where none fits.
    """

    solutions: Solutions
    before: float
    uniform: float

    @property
    def seconds(self) -> float:
        return _seconds(self.solutions)

    @property
    def text(self) -> str:
        return self.solutions.problem.run.pipeline_layout


def balanced(solutions: Solutions, index: int) -> Balanced:
    """Return the best layout string for layout ``index``, and the recomputation that is best with it.

    Raises InputError where there is no pipeline, or the framework runs no layout strings.
    """
    problem, one = solutions.problem, solutions.layouts.one(index)
    if int(one.splits.pp[0]) == 1:
        raise InputError("there is one pipeline stage, so there is nothing to balance; leave --balance out")
    run = one.strategy(0, problem.run)
    can = problem.framework.can_run
    if not can.pipeline_layout or run.schedule not in can.laid_out:
        raise InputError(
            f"{problem.framework.name} assigns layers to stages itself under schedule {run.schedule}; leave --balance out"
        )
    chunks = chunks_of(solutions, index)
    pp = int(one.splits.pp[0])
    fullest = max(sum(chunks[stage::pp]) for stage in range(pp))
    starts = [_assigned(solutions, layouts, chunks) for layouts in _recomputations(solutions, one, fullest)]
    found = [_improved(start, chunks) for start in starts]
    uniform = min((_seconds(each) for each in found if each.fits[0]), default=np.inf)
    if can.recomputes_by_stage:
        whole = replace(_plain(one), recompute=np.array([int(Recompute.FULL)]), recompute_layers=np.array([-1]))
        found.append(_improved(_assigned(solutions, whole, chunks, by_stage=True), chunks, by_stage=True))
    fitting = [each for each in found if each.fits[0]]
    if not fitting:
        raise InputError("no assignment of the layers to the stages fits in memory; leave --balance out")
    return Balanced(min(fitting, key=_seconds), float(solutions.times.seconds[index]), uniform)


def _plain(one: Layouts) -> Layouts:
    """Return the layout without the ways to divide layers that a layout string replaces."""
    none = np.zeros(1, dtype=np.int64)
    names = [name for name in vars(one.splits) if name.startswith(("num_layers_in", "account_for"))]
    return replace(one, splits=replace(one.splits, **dict.fromkeys(names, none)))


def _recomputations(solutions: Solutions, one: Layouts, fullest: int) -> Iterator[Layouts]:
    """Yield the layout with other levels and amounts of recomputation that the framework runs."""
    offered, plain = solutions.problem.framework.can_run.recompute, _plain(one)
    levels = [(Recompute[name.upper()], -1) for name in offered if name != "full"]
    if "full" in offered:
        chunks = int(plain.splits.vpp[0])
        levels += [(Recompute.FULL, max(round(fullest * share / chunks), 1) * chunks) for share in _SHARES]
    for level, layers in dict.fromkeys(levels):
        yield replace(plain, recompute=np.array([int(level)]), recompute_layers=np.array([layers]))


def _assigned(solutions: Solutions, layouts: Layouts, chunks: tuple[int, ...], by_stage: bool = False) -> Solutions:
    """Return the estimate of the layout with these chunks. by_stage: each stage recomputes the fewest layers that it can."""
    text = layout_text(chunks, solutions.problem.model.num_nextn_predict_layers)
    problem = solutions.problem.with_run(pipeline_layout=text, recompute_stage_layers="")
    if by_stage:
        fewest = fewest_recomputed(problem, layouts, solutions.table)
        problem = problem.with_run(recompute_stage_layers="+".join(map(str, fewest)))
    return estimate_layouts(problem, layouts, solutions.table)


def _seconds(solutions: Solutions) -> float:
    return float(solutions.times.seconds[0])


def _cost(solutions: Solutions) -> tuple[float, float]:
    """Return what is to be less: bytes that do not fit, then seconds."""
    missing = max(float(solutions.memory.device[0]) - solutions.problem.cluster.memory_bytes, 0.0)
    return missing, _seconds(solutions)


def _improved(start: Solutions, chunks: tuple[int, ...], by_stage: bool = False) -> Solutions:
    """Return what moving single layers, from the slowest or the fullest stage to another, makes of ``start``."""
    best = start
    pp = int(start.layouts.splits.pp[0])
    for _ in range(start.problem.model.num_hidden_layers):
        bubble = time_of_stages(best, 0)[_BUBBLE]
        origin = int(best.memory.stage[0]) if not best.fits[0] else int(np.argmin(bubble))
        moved = [
            (_assigned(best, best.layouts, assigned, by_stage), assigned)
            for target in np.argsort(-bubble)[: max(4, pp // 4)].tolist()
            if target != origin
            for assigned in _moved(chunks, pp, origin, target)
        ]
        better = min(moved, key=lambda pair: _cost(pair[0]), default=None)
        if better is None or _cost(better[0]) >= _cost(best):
            return best
        best, chunks = better
    return best


def _moved(chunks: tuple[int, ...], pp: int, origin: int, target: int) -> list[tuple[int, ...]]:
    """Return the chunks with a layer of stage ``origin`` on stage ``target``: from its largest chunk to its smallest one, and
    between their last ones, which run while the last stage computes the head."""
    held, last = np.array(chunks), len(chunks) // pp - 1
    moves = dict.fromkeys([(int(np.argmax(held[origin::pp])), int(np.argmin(held[target::pp]))), (last, last)])
    found = []
    for out, into in moves:
        assigned = held.copy()
        assigned[[origin + pp * out, target + pp * into]] += (-1, 1)
        if assigned.min() >= 0:
            found.append(tuple(assigned.tolist()))
    return found
