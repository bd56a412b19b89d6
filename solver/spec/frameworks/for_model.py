"""A framework as it runs one model: stacks of hybrid layers have less than what it else offers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from solver.spec.framework import Framework
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec


def framework_for(name: str, model: ModelSpec) -> Framework:
    """Return the framework that a run names, with what it runs of this model."""
    return _of_hybrids(name) if model.is_hybrid else framework_of(name)


@cache
def _of_hybrids(name: str) -> Framework:
    """Return the framework with what its stack of hybrid layers has, or what is described of it."""
    framework = framework_of(name)
    can = framework.can_run
    narrowed = replace(
        can,
        schedules=("1f1b",),
        uneven_stages=False,
        counts_embedding_and_loss=False,
        pipeline_layout=False,
        cp_comms=(),
        recompute=tuple(level for level in can.recompute if level != "full"),
        recompute_shares=(),
        recomputes_by_stage=False,
        overlaps_exchange=False,
        cuda_graph_modules=(),
        offloads=tuple(part for part in can.offloads if part == "optimizer"),
    )
    return replace(framework, can_run=narrowed)
