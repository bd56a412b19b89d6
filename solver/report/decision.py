"""How safe the choice of a layout is: rivals within the uncertainty, the measurement that would decide, the neighbourhood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from profiler.units import GIB
from solver.report.describe import describe
from solver.report.explain import TIE_THRESHOLD, Explanation, explain
from solver.report.uncertainty import errors_of, normal_cdf, own_stds
from solver.report.words import seconds
from solver.search.neighbours import Neighbourhood, Step, neighbours
from solver.search.search import SearchResult
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.memory import OUT_OF_MEMORY
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

_SHOWN = 8  #: rivals that a Decision prints
#: Two layouts closer than this are one for any purpose.
SAME = 0.005
#: A rival that one kind of time would have to be further off for, in standard deviations, is not named.
MOST_DEVIATIONS = 3.0
#: Kind of time -> (what it is, what to measure for it).
MEASUREMENTS = {
    "linear": ("GEMM times", "measure the GEMMs of the machine: foretrain measure"),
    "grouped_linear": ("grouped GEMM times", "measure the experts' GEMMs of the machine: foretrain measure"),
    "flash_attn": ("attention times", "time attention on the machine itself: foretrain measure, or search on it"),
    "state_space": ("state-space times", "compare a log or a trace of a run with it: foretrain import"),
    "chunk_scan": ("linear attention times", "compare a log or a trace of a run with it: foretrain import"),
    "memory_bound": ("memory-bound kernels", "measure the memory-bound kernels of the machine: foretrain measure"),
    "links": ("collectives inside a node", "measure collectives inside a node: foretrain measure, or nccl-tests"),
    "network": ("collectives between nodes", "run nccl-tests between nodes, or state the bus bandwidth in the cluster file"),
    "host": ("host", "measure the host's launches: foretrain measure"),
    "host_link": ("link to the host", "measure copies to the host, and state them in the cluster file"),
    "host_memory": ("memory of the host", "measure the host's memory, and state it in the cluster file"),
    "stragglers": ("waiting for the slowest rank", "read the spread of step times from a log: foretrain health"),
}


@dataclass(frozen=True)
class Sensitivity:
    """What the uncertainty about one kind of time does to the chosen layout.

    seconds: of the step. relative_std: of that time. step_change: of the whole step, where the kind is one standard deviation
    slower. deviations: how many standard deviations the kind must be off, slower (above 0) or faster, until another of the
    layouts is the fastest; None where none is within MOST_DEVIATIONS. rival: which one that is.
    """

    kind: str
    seconds: float
    relative_std: float
    step_change: float
    deviations: float | None
    rival: int | None


@dataclass(frozen=True, repr=False)
class Decision:
    """A layout (index 0 of ``rivals``), the best layouts of other sizes, and what lies around it."""

    rivals: Solutions
    why: tuple[Explanation, ...]
    around: Neighbourhood

    def __repr__(self) -> str:
        lines = [
            f"{probability:.0%} the fastest, {seconds(one.seconds)} a step: {describe(self.rivals, i)}"
            for i, (one, probability) in enumerate(zip(self.why, self.chances, strict=True))
        ]
        return "\n".join(["<Decision among", *lines[:_SHOWN]]) + ">"

    @cached_property
    def chances(self) -> np.ndarray:
        """With which probability each of the rivals is the fastest: [layouts], which add up to 1."""
        errors = [errors_of(self.rivals, index, why.kind_uncertainties()) for index, why in enumerate(self.why)]
        return chances(self.rivals.times.seconds, own_stds(errors))

    @cached_property
    def rows(self) -> list[Sensitivity]:
        return sensitivities(self.why)


def decision_of(problem: Problem, first: Strategy, others: Sequence[Strategy] = ()) -> Decision:
    """Return what there is to decide about ``first``. others: layouts of other sizes (tp, cp, pp) than its own are rivals."""
    sizes = (first.tp, first.cp, first.pp)
    different = [one for one in others if (one.tp, one.cp, one.pp) != sizes]
    rivals = estimate_layouts(problem, Layouts.of([first, *different]))
    return Decision(rivals, tuple(explain(rivals, i) for i in range(len(rivals))), neighbours(problem, first))


def decision_of_search(result: SearchResult) -> Decision:
    """Return what there is to decide about the best layout of a search; the best ones of other sizes are its rivals."""
    sizes, run = result.best_of_sizes, result.problem.run
    return decision_of(
        result.problem, result.best.layouts.strategy(0, run), [sizes.layouts.strategy(i, run) for i in range(len(sizes))]
    )


def chances(seconds: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return with which probability each layout is the fastest of all: [layouts], which add up to 1.

    The errors of log(time) of layouts of one model on one machine are independent normals of ``std`` (own_stds):
    P(i) = integral of phi(x) * product over j != i of Phi((log t_j - log t_i + std_i x) / std_j), over x from -8 to 8.
    """
    y, x = np.log(np.asarray(seconds, dtype=float)), np.linspace(-8.0, 8.0, 801)
    apart = y[None, :, None] - y[:, None, None] + std[:, None, None] * x
    slower = normal_cdf(apart / std[None, :, None])  # [i, j, x]: j is slower than i
    slower[np.arange(len(y)), np.arange(len(y))] = 1.0
    values = np.exp(-(x**2) / 2) * slower.prod(axis=1)
    found: np.ndarray = ((values[:, 1:] + values[:, :-1]) * np.diff(x)).sum(axis=1)
    return found / found.sum()


def sensitivities(found: Sequence[Explanation]) -> list[Sensitivity]:
    """Return, for the first of some explained layouts, what each kind of time decides; the largest effect first.

    To first order: a kind that takes z standard deviations more takes seconds * z * relative_std more in every layout, so the
    difference to a rival vanishes at z = -(rival - first) / (std of the rival's kind - std of the first's), in seconds.
    """
    sums = [_by_kind(why) for why in found]
    rows = []
    for kind, (spent, uncertainty) in sums[0].items():
        crossings = [
            (-(why.seconds - found[0].seconds) / difference, index)
            for index, (why, other) in enumerate(zip(found[1:], sums[1:], strict=True), 1)
            if (difference := other.get(kind, (0.0, 0.0))[1] - uncertainty) and why.seconds > found[0].seconds
        ]
        nearest = min(crossings, key=lambda crossing: abs(crossing[0]), default=None)
        close = nearest if nearest is not None and abs(nearest[0]) <= MOST_DEVIATIONS else (None, None)
        rows.append(Sensitivity(kind, spent, uncertainty / spent, uncertainty / found[0].seconds, *close))
    return sorted(rows, key=lambda row: -row.step_change)


def _by_kind(why: Explanation) -> dict[str, tuple[float, float]]:
    """Return kind -> (seconds, seconds of one standard deviation): errors of ops of one kind add up."""
    found: dict[str, tuple[float, float]] = {}
    for line in why.lines:
        if line.basis is not None and line.relative_std and line.seconds > 0:
            seconds, uncertainty = found.get(line.kind, (0.0, 0.0))
            found[line.kind] = seconds + line.seconds, uncertainty + line.seconds * line.relative_std
    return found


def standing(around: Neighbourhood) -> str:
    """Return a sentence on how the layout stands among its neighbours: on a peak, in a basin, or at the edge of the memory.

    Layouts that differ in more than one axis, which may take as long, are not among them.
    """
    fit = [step for step in around.steps if around.solutions.verdict(step.index) != OUT_OF_MEMORY]
    if not fit:
        return "No layout one step away fits."
    near = sorted({step.axis for step in fit if around.change(step) <= TIE_THRESHOLD})
    best = min(fit, key=around.change)
    if around.change(best) < -SAME:
        return f"A neighbouring layout is faster: {_step(best)} makes the step {-around.change(best):.1%} shorter, and fits."
    if not near:
        return f"No single step comes close: the cheapest that fits, {_step(best)}, costs {around.change(best):.1%}."
    costs = f"costs {TIE_THRESHOLD:.0%} or less, which is within the prediction error"
    return f"Robust choice: one step along {', '.join(near)} {costs}; prefer what you know to run well."


def kept_out(around: Neighbourhood) -> list[str]:
    """Return the steps that would be faster and do not fit, in words: what they bring and what memory they miss."""
    limit = around.solutions.problem.cluster.memory_bytes
    out = [
        step for step in around.steps if around.solutions.verdict(step.index) == OUT_OF_MEMORY and around.change(step) < -SAME
    ]
    return [
        f"{_step(step)} would make the step {-around.change(step):.1%} shorter, but needs "
        f"{(float(around.solutions.memory.device[step.index]) - limit) / GIB:.1f} GiB more than the GPU has"
        for step in sorted(out, key=around.change)
    ]


def _step(step: Step) -> str:
    return f"{step.axis} {step.before} -> {step.after}"
