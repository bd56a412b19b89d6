"""Accuracy check: predict measured runs and compare."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from predictor.cost_model import CostModel
from profiler.errors import InputError, closest, shown
from profiler.profile.devices import DATASHEETS
from profiler.units import GBIT
from solver.formats.cases.reading import LAST_RANK, Case
from solver.report.explain import Explanation, explain
from solver.report.uncertainty import unstated_std
from solver.spec.cluster import FIGURES, cluster_of
from solver.spec.soft_caps import without_soft_caps
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.per_stage import memory_of_stages
from solver.step.problem import Problem, problem_of
from solver.step.solutions import Solutions, estimate_layouts

#: (hardware name, network bandwidth per accelerator) -> cost model; None where no profile is known.
CostModels = Callable[[str, float | None], CostModel | None]


@dataclass(frozen=True)
class Alternative:
    """What a setting that a run does not state may have been, and the step time that it would have had."""

    setting: str
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Prediction:
    """The prediction for one case; ``solutions[index]`` holds everything about it. All None where skipped."""

    case: Case
    skipped: str | None
    solutions: Solutions | None = None
    index: int = 0
    explained: Explanation | None = None  #: in place of the explanation of the layout
    alternatives: tuple[Alternative, ...] = ()  #: what the run may have had instead of what is taken
    unstated_std: float = 0.0  #: standard deviation of log(step time) that the alternatives add

    @cached_property
    def explanation(self) -> Explanation | None:
        """The step and its interval; made when it is asked for, since a run without a step time needs none."""
        if self.explained is not None or self.solutions is None:
            return self.explained
        why = explain(self.solutions, self.index)
        return replace(why, system_std=math.hypot(why.system_std, self.unstated_std))

    @property
    def seconds(self) -> float:
        if self.explained is not None or self.solutions is None:
            return self.explained.seconds if self.explained else float("nan")
        return float(self.solutions.times.seconds[self.index])

    @property
    def memory_bytes(self) -> float:
        """Peak bytes of the kind that was measured (allocated, reserved or device)."""
        if self.solutions is None:
            return float("nan")
        kind = self.case.measured.get("memory_kind", "allocated")
        if self.case.measured.get("memory_of") == LAST_RANK:
            return float(getattr(memory_of_stages(self.solutions, self.index), kind)[-1])
        return float(getattr(self.solutions.memory, kind)[self.index])

    @property
    def fits(self) -> bool | None:
        if self.solutions is None:
            return None
        return bool(self.solutions.fits[self.index])

    @property
    def verdict(self) -> str | None:
        """Whether the run fits: one of solver.step.memory.VERDICTS."""
        if self.solutions is None:
            return None
        return self.solutions.verdict(self.index)


def predict_cases(
    cases: Sequence[Case],
    cost_models: CostModels,
    progress: Callable[[int, int], None] | None = None,
    approximate: bool = False,
) -> list[Prediction]:
    """Predict every case, in order; cases that differ only in their layout are predicted together.

    progress(done, total) is called with numbers of cases. approximate: without the models' soft caps.
    """
    out: dict[int, Prediction] = {}
    groups: dict[Any, list[tuple[int, Case]]] = defaultdict(list)
    for place, case in enumerate(cases):
        if case.skipped or case.model is None or case.strategy is None:
            out[place] = Prediction(case, case.skipped or "not expressible")
        else:
            cluster = tuple((key, case.cluster[key]) for key in FIGURES if key in case.cluster)
            groups[case.hardware, cluster, case.model, case.strategy.run].append((place, case))
    for (hardware, cluster, model, run), members in groups.items():
        if progress:
            progress(len(out), len(cases))
        gbit = dict(cluster).get("inter_node_gbit_per_gpu")
        cost = cost_models(hardware, gbit * GBIT if gbit else None)
        if cost is None:
            reason = f"no profile of {hardware}{closest(hardware, list(DATASHEETS))}"
            out.update({place: Prediction(case, reason) for place, case in members})
            continue
        try:
            model = without_soft_caps(model) if approximate else model
            machine = cluster_of(cost.device, dict(cluster), usual_network=hardware in DATASHEETS)
            problem = problem_of(model, run, machine, cost)
        except InputError as error:  # what this device cannot run, for example fp8 on an A100
            out.update({place: Prediction(case, str(error)) for place, case in members})
            continue
        out.update(_predict_together(problem, members))
    return [out[place] for place in range(len(cases))]


def _predict_together(problem: Problem, members: Sequence[tuple[int, Case]]) -> dict[int, Prediction]:
    """Return the predictions of cases of one problem by place; where they fail together each is tried alone.

    A published layout may be one that no framework runs, and one such case must not lose the others of its file.
    """
    layouts = [_layouts(case) for _, case in members]
    try:
        solutions = estimate_layouts(problem, Layouts.of([layout for several in layouts for layout in several]))
        starts = np.cumsum([0, *map(len, layouts)])
        return {
            place: _prediction(case, solutions, np.arange(start, start + len(several)))
            for (place, case), several, start in zip(members, layouts, starts[:-1], strict=True)
        }
    except (InputError, ArithmeticError, LookupError, ValueError) as error:
        if len(members) == 1:
            why = str(error) if isinstance(error, InputError) else f"its layout cannot be estimated: {shown(error)}"
            return {place: Prediction(case, why) for place, case in members}
        return {place: one for member in members for place, one in _predict_together(problem, [member]).items()}


def _layouts(case: Case) -> tuple[Strategy, ...]:
    return case.alternatives or ((case.strategy,) if case.strategy else ())


def _prediction(case: Case, solutions: Solutions, indexes: np.ndarray) -> Prediction:
    """Return the prediction of a run that may have had any of some layouts.

    The run was made, so it fitted, and published runs are tuned, so what costs little comes first: the fastest is taken of
    the first group in which the framework's recomputation fits (with more chunks a stage, some recomputation may be faster).
    Groups: those with the framework's ZeRO stage that fit, then those of any; both again among those that fit if the allocator
    leaves no gaps. Then those of any recomputation that fit, with gaps and without. Others that can have
    fitted widen the interval, the less the slower they are. Where nothing fits, the one that comes nearest is taken.
    """
    memory, seconds, run = solutions.memory, solutions.times.seconds[indexes], solutions.problem.run
    limit, outside = solutions.problem.cluster.memory_bytes, (memory.device - memory.reserved)[indexes]
    safe, fits = memory.device[indexes] <= limit, memory.allocated[indexes] + outside <= limit
    nearest = memory.allocated[indexes] <= memory.allocated[indexes].min()
    level, zero = (
        np.array([getattr(layout, key) == getattr(case.strategy, key) for layout in _layouts(case)])
        for key in ("recompute", "zero")
    )
    groups = (
        (safe & zero, level),
        (safe, level),
        (fits & zero, level),
        (fits, level),
        (safe, safe),
        (fits, fits),
        (nearest, nearest),
    )
    allowed = next(group for group, needed in groups if (group & needed).any())
    best = int(np.argmin(np.where(allowed, seconds, np.inf)))
    index = int(indexes[best])
    if len(indexes) == 1:
        return Prediction(case, None, solutions, index)
    chosen = solutions.layouts.strategy(index, run)
    found = tuple(
        Alternative(_difference(solutions.layouts.strategy(int(indexes[i]), run), chosen), float(seconds[i]), bool(fits[i]))
        for i in range(len(indexes))
        if i != best
    )
    off = np.array([math.log(other.seconds / seconds[best]) for other in found if other.fits])
    return Prediction(case, None, solutions, index, None, found, unstated_std(off))


def _difference(layout: Strategy, other: Strategy) -> str:
    keys = ("recompute", "recompute_modules", "recompute_layers", "zero", "vpp")
    return ", ".join(f"{key} {getattr(layout, key)}" for key in keys if getattr(layout, key) != getattr(other, key))


def timed(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions whose step time was measured."""
    return [p for p in predictions if not p.skipped and "step_s" in p.case.measured]


def as_json(predictions: Sequence[Prediction]) -> list[Mapping[str, Any]]:
    """Return the ``cases`` list of the JSON output."""
    return [
        {
            "id": p.case.id,
            "predicted_step_s": p.explanation.seconds if p.explanation else None,
            "interval_s": list(p.explanation.interval) if p.explanation else None,
            "predicted_peak_memory_bytes": p.memory_bytes if p.solutions else None,
            "fits": p.fits,
            "verdict": p.verdict,
            "skipped": p.skipped,
            "assumptions": [*p.case.assumptions, *(p.solutions.problem.inferred_network if p.solutions else ())],
            "alternatives": [{"setting": a.setting, "step_s": a.seconds, "fits": a.fits} for a in p.alternatives],
        }
        for p in predictions
    ]
