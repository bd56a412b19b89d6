"""Which schedules of a pipeline run together with the other constants of a run."""

from __future__ import annotations

from solver.spec.can_run import CanRun
from solver.spec.choices import SPLIT_BACKWARD
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy


def split_backward_broken(can_run: CanRun, run: Strategy, zero: int = 0) -> str:
    """Return what of a run with a ZeRO stage (0: with any) keeps the framework from splitting the backward pass, or ""."""
    if run.compile and not can_run.compiles_split_backward:
        return "torch.compile"
    if run.overlap_grad_reduce and not can_run.overlaps_split_backward:
        return "overlap_grad_reduce"
    if run.overlap_param_gather and zero and not can_run.overlaps_split_backward:
        return "overlap_param_gather"
    return ""


def schedule_broken(framework: Framework, model: ModelSpec, run: Strategy, schedule: str, zero: int = 0) -> str:
    """Return why a schedule that the framework offers does not run with the rest and a ZeRO stage (0: with any), or ""."""
    can = framework.can_run
    if schedule not in SPLIT_BACKWARD or schedule not in can.schedules:
        return ""
    if wrong := split_backward_broken(can, run, zero):
        return f"{framework.name} does not run {wrong} with schedule {schedule}, which splits the backward pass"
    tied = model.tie_word_embeddings and not can.splits_backward_tied
    return f"{framework.name} does not run schedule {schedule} with tied embeddings" if tied else ""


def schedules_run(framework: Framework, model: ModelSpec, run: Strategy) -> tuple[str, ...]:
    """Return the schedules that the framework runs with the constants of ``run``."""
    return tuple(name for name in framework.can_run.schedules if not schedule_broken(framework, model, run, name))
