"""What other settings of a run would do to the layouts that a search kept: large gains that the search itself cannot find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.errors import InputError
from solver.search.search import SearchResult
from solver.spec.feasibility import check_layout
from solver.spec.model_attention import attention_of
from solver.spec.rules.experts import suggested_dispatchers
from solver.spec.rules.recomputation import modules_of
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

#: Modules of a layer that are cheap to run again beside what they hold.
_CHEAP = ("layernorm", "mla_up_proj", "moe_act")
#: Layouts of a search that are tried with each setting.
_MOST = 40


@dataclass(frozen=True)
class Hint:
    """A setting, as --set takes it, and the fastest of the kept layouts that fits with it. change: of the step, below 0."""

    setting: str
    change: float
    solutions: Solutions
    index: int


def faster_settings(result: SearchResult, least: float) -> list[Hint]:
    """Return the settings that shorten the fastest step by ``least`` or more on one of the kept layouts, the best first.

    A search with the setting finds that layout or a faster one.
    """
    layouts = _kept(result)
    found = [hint for change in _changes(result.problem, layouts[0]) if (hint := _tried(result, layouts, change)) is not None]
    return sorted((hint for hint in found if hint.change <= -least), key=lambda hint: hint.change)


def _changes(problem: Problem, best: Strategy) -> Iterator[dict[str, Any]]:
    run, model, framework = problem.run, problem.model, problem.framework
    runs_flash = problem.cost.device.flash_version and "attention" not in attention_of(framework, model)
    if run.attention == "unfused" and runs_flash:
        yield {"attention": "flash"}
    if model.is_mixture_of_experts:
        yield from ({"moe_dispatcher": how} for how in dispatchers_on(problem) if how != run.moe_dispatcher)
        if framework.can_run.overlaps_exchange and not run.moe_exchange_overlap:
            yield {"moe_exchange_overlap": True}
    offered = [name for name in modules_of(framework, model) if name in framework.can_run.recompute_modules and name in _CHEAP]
    if best.recompute != "none" and offered:
        yield {"recompute_modules": "+".join(offered)}


def dispatchers_on(problem: Problem) -> tuple[str, ...]:
    """Return the dispatchers that a search suggests on the problem's device."""
    cluster, vendor = problem.cluster, problem.cost.device.name.split()[0]
    return suggested_dispatchers(
        problem.framework.can_run, problem.model, vendor, cluster.nvlink_domain > cluster.gpus_per_node
    )


def _kept(result: SearchResult) -> list[Strategy]:
    """Return the fastest layouts of a search and of its sizes, and the Pareto-optimal ones; the fastest first."""
    run = result.problem.run
    found = [(float(one.times.seconds[i]), one.layouts.strategy(i, run)) for one, i in result.kept()]
    return list(dict.fromkeys(layout for _, layout in sorted(found, key=lambda pair: pair[0])))[:_MOST]


def _tried(result: SearchResult, layouts: list[Strategy], change: dict[str, Any]) -> Hint | None:
    problem = result.problem
    also = {"recompute": "selective", "recompute_layers": -1} if "recompute_modules" in change else {}
    if also and result.fixed.get("recompute", "selective") != "selective":
        return None
    try:
        other = problem.with_run(**change)
    except InputError:
        return None
    runs = [run for layout in layouts if (run := _changed(other, layout, change | also)) is not None]
    if not runs:
        return None
    found = estimate_layouts(other, Layouts.of(runs))
    seconds = np.where(found.fits, found.times.seconds, np.inf)
    index = int(np.argmin(seconds))
    text = ",".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in change.items())
    return Hint(text, float(seconds[index] / result.best.times.seconds[0]) - 1, found, index) if found.fits[index] else None


def _changed(problem: Problem, layout: Strategy, change: dict[str, Any]) -> Strategy | None:
    """Return a layout with other settings, or None where its framework does not run it."""
    try:
        changed = layout.replace(**change)
        check_layout(problem.model, problem.cluster, changed)
    except InputError:
        return None
    return changed
