"""The gap between what a job reaches and what its layout could: which switches are off, and what each of them costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiler.errors import InputError
from solver.report.explain import explain
from solver.report.words import seconds
from solver.spec.choices import TpMode
from solver.spec.feasibility import check_layout
from solver.spec.strategy import CONSTANTS, Strategy
from solver.step.layouts import Layouts
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

#: Settings that a job of any layout may have: field -> (the value that costs least as a rule, what is wrong, in words).
_SWITCHES: tuple[tuple[str, Any, str], ...] = (
    ("overlap_grad_reduce", True, "gradients are reduced after the backward pass: overlap_grad_reduce is off"),
    ("overlap_param_gather", True, "parameters are gathered before the forward pass: overlap_param_gather is off"),
    ("zero", 1, "every rank updates all parameters: the distributed optimizer is off"),
    ("tp_mode", "msp", "norms and residuals are repeated on every tensor-parallel rank: sequence_parallel is off"),
    ("tp_comm_overlap", True, "tensor-parallel communication waits for the GEMMs: tp_comm_overlap is off"),
    ("attention", "flash", "attention writes its scores to memory: no fused attention kernel"),
    ("cross_entropy_fusion", True, "the loss runs in several kernels: cross_entropy_fusion is off"),
    ("gradient_accumulation_fusion", True, "kernels of their own add weight gradients: gradient_accumulation_fusion is off"),
    ("fused_norm", True, "norms run in several kernels: fused_norm is off"),
    ("p2p_overlap", True, "pipeline transfers wait for the passes: p2p_overlap is off"),
    ("moe_grouped_gemm", True, "experts run one after the other: moe_grouped_gemm is off"),
    ("moe_permute_fusion", True, "rows are put in the order of experts by several kernels: moe_permute_fusion is off"),
    ("moe_router_fusion", True, "experts are chosen by several kernels: moe_router_fusion is off"),
    ("moe_shared_expert_overlap", True, "shared experts wait for the exchange of tokens: moe_shared_expert_overlap is off"),
    ("moe_exchange_overlap", True, "compute waits for the exchange of tokens: moe_exchange_overlap is off"),
    ("delay_wgrad_compute", True, "gradients of inputs are sent after weight gradients: delay_wgrad_compute is off"),
    ("recompute", "none", "activations are recomputed"),
    ("launch_blocking", False, "every launch waits for the last: CUDA_LAUNCH_BLOCKING is set"),
    ("collective_checks", False, "torch checks each collective: TORCH_DISTRIBUTED_DEBUG=DETAIL is set"),
)
#: A switch that saves less of the step is not named.
_LEAST = 0.003


@dataclass(frozen=True)
class Switch:
    """A setting of the job that costs time. seconds: of the step that changing it alone saves. fits: in memory, then."""

    field: str
    text: str
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Gap:
    """A measured step beside its prediction, and what of the difference each setting of the job is.

    measured, predicted: seconds of a step, and as predicted with the job's own settings. best: with all that fit changed.
    """

    measured: float
    predicted: float
    best: float
    highest: float  #: seconds: the end of the prediction's 90% interval
    flops: float  #: model FLOPs of a step per GPU
    switches: tuple[Switch, ...]

    def share(self, part: float) -> float:
        """Return which share of the way from the best prediction to what was measured ``part`` seconds are."""
        return part / max(self.measured - self.best, 1e-30)


def gap(problem: Problem, layout: Strategy, measured: float) -> Gap:
    """Return what the settings of a job cost, the most expensive first. measured: seconds of a step."""
    now = estimate_layouts(problem, Layouts.of([layout]))
    here = float(now.times.seconds[0])
    found: list[Switch] = []
    changes: dict[str, Any] = {}
    for field, value, text in _SWITCHES:
        if not _offered(problem, field, value):
            continue
        then = _changed(problem, layout, {field: value})
        if then is None:
            continue
        saved = here - float(then.times.seconds[0])
        if saved > _LEAST * here:
            # of a job that ran although it is predicted not to fit, what needs no more memory runs too
            fits = bool(then.fits[0]) or bool(then.memory.device[0] <= now.memory.device[0])
            found.append(Switch(field, text, saved, fits))
            changes |= {field: value} if fits else {}
    best = _changed(problem, layout, changes) if changes else None
    least = min(here, float(best.times.seconds[0])) if best is not None else here
    flops = float(now.flops_per_second[0]) * here
    highest = explain(now, 0).interval[1]
    return Gap(measured, here, least, highest, flops, tuple(sorted(found, key=lambda switch: -switch.seconds)))


def _offered(problem: Problem, field: str, value: Any) -> bool:
    """Whether the framework of the job has the setting: its release can run it, or its best practice is to have it."""
    framework, can = problem.framework, problem.framework.can_run
    special = {
        "zero": value in can.zero_stages,
        "tp_mode": TpMode.MSP in can.tp_modes,
        "tp_comm_overlap": can.tp_comm_overlap,
        "gradient_accumulation_fusion": framework.data_parallel.fused_gradient_accumulation,
        "moe_exchange_overlap": can.overlaps_exchange,
        "delay_wgrad_compute": problem.run.moe_exchange_overlap,
        "attention": True,
        "recompute": True,
        "launch_blocking": True,
        "collective_checks": problem.checks_collectives,
    }
    if field in special:
        return special[field]
    if field.startswith("moe_") and not problem.model.is_mixture_of_experts:
        return False
    best = {**framework.flags, **framework.best_practice}
    return bool(best.get(field, getattr(Strategy, field)) == value)


def _changed(problem: Problem, layout: Strategy, changes: Mapping[str, Any]) -> Solutions | None:
    """Return the estimate with other settings; None where nothing changes, or the framework does not run that."""
    changes = {name: value for name, value in changes.items() if getattr(layout, name) != value}
    if "zero" in changes:
        if layout.zero > 1:
            changes.pop("zero")
        elif layout.dp * layout.cp > 1:
            changes["zero_shard_size"] = layout.dp * layout.cp
    if "tp_mode" in changes and (layout.tp == 1 or layout.tp_mode != "mtp"):
        changes.pop("tp_mode")
    if changes.get("recompute") == "none":
        changes["recompute_layers"] = -1
    if "gradient_accumulation_fusion" in changes and problem.fused_accumulation:
        changes.pop("gradient_accumulation_fusion")
    if not changes:
        return None
    try:
        other = layout.replace(**changes)
        constants = {name: value for name, value in changes.items() if name in CONSTANTS}
        there = problem.with_run(**constants, recompute_stage_layers=other.recompute_stage_layers)
        check_layout(there.model, there.cluster, other)
        return estimate_layouts(there, Layouts.of([other]))
    except InputError:
        return None


def gap_lines(found: Gap, given: str = "your settings") -> list[str]:
    """Return the gap in words, a line each. given: what of the job the prediction has."""
    rates = [found.flops / taken / 1e12 for taken in (found.best, found.predicted, found.measured)]
    whole = found.measured - found.best
    lines = [
        f"You get {rates[2]:,.0f} TFLOP/s per GPU ({seconds(found.measured)} a step); predicted with {given} "
        f"{rates[1]:,.0f} ({seconds(found.predicted)})"
        + (f", with the switches below {rates[0]:,.0f} ({seconds(found.best)})" if found.best < found.predicted else "")
        + (f": a gap of {seconds(whole)}" if whole > 1e-3 * found.best else "")
    ]
    for switch in found.switches:
        room = "" if switch.fits else " (and it does not fit in memory without)"
        part = f", {found.share(switch.seconds):.0%} of the gap" if whole > 1e-3 * found.best and switch.fits else ""
        lines.append(f"  {seconds(switch.seconds)} a step{part}: {switch.text}{room}")
    rest = found.measured - found.predicted
    if rest > 0:
        within = ", and it is within the prediction's uncertainty" if found.measured <= found.highest else ""
        text = f"  {seconds(rest)} a step, {found.share(rest):.0%} of the gap: not explained by any setting{within}"
        lines.append(text)
    return lines


def named(switches: Sequence[Switch]) -> list[dict[str, Any]]:
    """Return switches as plain values."""
    return [{"setting": switch.field, "seconds": switch.seconds, "fits": switch.fits} for switch in switches]
