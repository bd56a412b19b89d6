"""Rules of communication beside compute, and of the allocator."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.rules.kernels import compile_rule
from solver.spec.run import Run


def overlap_rules(framework: Framework, s: Run, splits_tensors: bool, shards: bool) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of overlaps and the allocator.

    splits_tensors: a layout splits tensors (tp above 1), or may do so; shards: it shards states, or may do so.
    """
    can, name = framework.can_run, framework.name
    gathers_alone = s.overlap_param_gather and s.optimizer != "muon" and not s.overlap_grad_reduce
    return (
        (
            framework.data_parallel.overlaps_sharded_unless_told or s.overlap_grad_reduce is not None,
            f"overlap_grad_reduce of {name} is true or false in all ZeRO stages",
        ),
        (
            not (splits_tensors and s.tp_comm_overlap and can.compiles_tp_overlap) or s.compile,
            f"{name}: tp_comm_overlap, the overlap of tensor parallelism, needs compile",
        ),
        (
            not (shards and gathers_alone and can.gathers_after_reducing),
            f"{name}: overlap_param_gather needs overlap_grad_reduce: turn both on or both off",
        ),
        (
            not s.expandable_segments or framework.memory.gaps(True) != framework.memory.gaps(False),
            f"expandable_segments changes nothing under {name}",
        ),
        (can.micro_batch_groups or not s.micro_batch_group, f"{name} does not offer micro_batch_group"),
        compile_rule(framework, s),
        (
            framework.data_parallel.defers_sync or framework.data_parallel.no_sync or s.defer_grad_sync is None,
            f"{name} does not offer defer_grad_sync; leave it out",
        ),
    )
