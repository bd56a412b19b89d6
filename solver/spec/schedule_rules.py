"""Which schedules of a pipeline run together with the other constants of a run."""

from __future__ import annotations

from solver.spec.framework import CanRun
from solver.spec.strategy import SPLIT_BACKWARD, Strategy


def split_backward_broken(can_run: CanRun, run: Strategy) -> str:
    """Return what of a run keeps the framework from splitting the backward pass, or ""."""
    if run.compile and not can_run.compiles_split_backward:
        return "torch.compile"
    if run.overlap_grad_reduce and not can_run.overlaps_split_backward:
        return "overlap_grad_reduce"
    if run.overlap_param_gather and run.zero and not can_run.overlaps_split_backward:
        return "overlap_param_gather"
    return ""


def schedules_run(can_run: CanRun, run: Strategy) -> tuple[str, ...]:
    """Return the schedules that the framework runs with the constants of ``run``."""
    whole = bool(split_backward_broken(can_run, run))
    return tuple(name for name in can_run.schedules if not whole or name not in SPLIT_BACKWARD)
