"""What a step would take with another setting: those that are often not stated and that matter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from solver.formats.cases.reading import MEMORY_KINDS
from solver.search.hints import dispatchers_on
from solver.spec.rules.experts import dispatch_broken, overlap_runs, predicted_beside
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.problem import Problem, attention_generation
from solver.step.solutions import SLOWER_NETWORKS, Solutions, estimate_layouts

#: A setting that changes the step by less does not matter.
LEAST = 0.02


@dataclass(frozen=True)
class OtherSetting:
    """What is otherwise, in words that complete "if ...", and the step time [s] and peak memory [bytes by kind] of it."""

    text: str
    seconds: float
    memory: Mapping[str, float]


@lru_cache(maxsize=8)  # a report is printed and written
def other_settings(solutions: Solutions, index: int) -> tuple[OtherSetting, ...]:
    """Return the settings that would change the step of layout ``index`` by LEAST or more, the largest change first."""
    problem, now = solutions.problem, float(solutions.times.seconds[index])
    layout = solutions.layouts.strategy(index, problem.run)
    found = [
        _other(text, estimate_layouts(changed, Layouts.of([other])), 0) for text, changed, other in _changes(problem, layout)
    ]
    same = _other("", solutions, index)
    found += [
        replace(
            same,
            text=f"the network, which is not stated, has {share:g} of the usual bandwidth",
            seconds=float(seconds[index]),
        )
        for share, seconds in zip(SLOWER_NETWORKS, solutions.on_slower_networks, strict=False)
    ]
    matter = [setting for setting in found if abs(setting.seconds / now - 1) >= LEAST]
    return tuple(sorted(matter, key=lambda setting: -abs(math.log(setting.seconds / now))))


def _other(text: str, solutions: Solutions, index: int) -> OtherSetting:
    memory = {kind: float(getattr(solutions.memory, kind)[index]) for kind in MEMORY_KINDS}
    return OtherSetting(text, float(solutions.times.seconds[index]), memory)


def _changes(problem: Problem, layout: Strategy) -> Iterator[tuple[str, Problem, Strategy]]:
    """Yield (words, problem, layout) of every setting that this run could have otherwise."""
    framework, device = problem.framework, problem.cost.device
    if layout.attention == "flash" and device.flash_version > 2 and not layout.flash_generation:
        second = attention_generation(problem.run, problem.cost) == 2
        version, words = (0, f"of generation {device.flash_version}") if second else (2, "2")
        own = not framework.kernels.transformer_engine
        cost = problem.cost.with_flash_version(version, problem.run.deterministic, own)
        yield f"attention is FlashAttention {words}", replace(problem, cost=cost), layout
    if layout.recompute == "none" and "full" in framework.can_run.recompute:
        yield "all layers are recomputed", problem, layout.replace(recompute="full")
    for words, change in (*_flags(problem, layout), *_exchanges(problem, layout)):
        yield words, problem.with_run(**change), layout.replace(**change)


def _exchanges(problem: Problem, layout: Strategy) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (words, changed fields) of other ways in which tokens could reach their experts."""
    can = problem.framework.can_run
    if layout.ep == 1:
        return
    for how in dispatchers_on(problem):
        if how != layout.moe_dispatcher and not dispatch_broken(layout.replace(moe_dispatcher=how)):
            yield f"tokens are exchanged by {how}", {"moe_dispatcher": how}
    overlaps = not layout.moe_exchange_overlap
    further = predicted_beside(problem.framework, problem.model)
    if can.overlaps_exchange and overlap_runs(overlaps, layout.pp, layout.vpp, layout.recompute, further):
        words = "runs beside another micro batch's compute" if overlaps else "runs alone"
        yield f"the exchange of tokens {words}", {"moe_exchange_overlap": overlaps}


def _flags(problem: Problem, layout: Strategy) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (words, changed fields) of the flags that this run could have otherwise."""
    if not layout.compile:
        norms = "not fused" if layout.fused_norm else "fused"
        yield f"norms are {norms}", {"fused_norm": not layout.fused_norm}
        if not problem.framework.kernels.fused_elementwise:
            yield "it is compiled", {"compile": True}
    if layout.dp * layout.cp > 1 and layout.overlap_grad_reduce:
        yield "gradients are reduced after the backward pass", {"overlap_grad_reduce": False}
    if layout.tp > 1 and layout.tp_mode == "msp":
        words = "not overlapped" if layout.tp_comm_overlap else "overlapped"
        yield f"tensor-parallel communication is {words}", {"tp_comm_overlap": not layout.tp_comm_overlap}
    if problem.framework.scripts_check_collectives and not problem.checks_collectives:  # of others nobody debugs a whole run
        yield "torch checks every collective (TORCH_DISTRIBUTED_DEBUG=DETAIL)", {"collective_checks": True}
