"""Terms of a split that a step has once, or once per micro batch beside the layers: synchronisation, optimizer, casts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from solver.step.collective_checks import with_checks
from solver.step.data_parallel_ops import synchronisation_ops
from solver.step.distinct import distinct
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Splits
from solver.step.message_counts import linears_of_stage, list_seconds
from solver.step.muon import muon_ops
from solver.step.offload import TO_HOST
from solver.step.op_estimates import OpEstimates, estimate_ops
from solver.step.parameter_groups import ParameterGroup, parameter_groups
from solver.step.pipeline_ops import tied_embedding_op
from solver.step.sharded_weights import ShardedWeights, sharded_weight_ops, sharded_weights
from solver.step.side_stream import SideStreamWork, host_work, side_stream_work


@dataclass(frozen=True)
class OnceTerms:
    """What follows the passes of a step, or stands beside them; float64 arrays of seconds per step, S: splits."""

    all_reduce: SideStreamWork  #: [S] of gradients over all copies
    reduce_scatter: SideStreamWork  #: [S] of gradients inside shard groups and across
    all_gather: SideStreamWork  #: [S] of parameters inside shard groups
    accumulation: np.ndarray  #: [S] adding one micro batch's gradients to the buffer, where a separate kernel does it
    to_host: np.ndarray  #: [S] gradients of one micro batch on their way to the host
    optimizer_whole: np.ndarray  #: [S] of all parameters
    optimizer_shard: np.ndarray  #: [S] of a rank's shard
    buffer_whole: np.ndarray  #: [S] passes over the buffer of all gradients
    buffer_shard: np.ndarray  #: [S] over that of a rank's shard
    other: np.ndarray  #: [S] gradient norm, tied embedding, and what else is done once after the last pass
    weight_casts: np.ndarray  #: [S] of all quantised weights of a rank that are kept
    sharded: ShardedWeights
    parameters: np.ndarray  #: [S] of one rank on the fullest stage
    estimates: OpEstimates  #: the ops of all this, of distinct splits
    row: np.ndarray  #: [S] index into them


def synchronisation_groups(splits: Splits) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct rows of what the once-per-step ops depend on (micro batches do not change them)."""
    s = splits
    return distinct((s.mode, s.tp, s.wp, s.cp, s.ep, s.etp, s.dp, s.zero_shard_size, s.vpp, s.v_shaped * 1, *s.stage_columns))


def estimate_synchronisation(priced: PricedSplits, groups: Mapping[str, ParameterGroup]) -> OpEstimates:
    """Return the estimated once-per-step ops of ``splits``; shape [ops, splits]. groups: their parameters."""
    problem, splits = priced.problem, priced.splits
    ops = [
        *synchronisation_ops(problem, groups, splits),
        *sharded_weight_ops(priced, groups),
        tied_embedding_op(priced),
        *muon_ops(priced),
    ]
    estimates = estimate_ops(ops, len(splits), problem.cost)
    if not problem.checks_collectives:
        return estimates
    if problem.framework.data_parallel.buckets_of_tensors:
        return with_checks(estimates)
    return with_checks(estimates, linears_of_stage(problem, splits) + 1)


def once_terms(priced: PricedSplits) -> OnceTerms:
    """Estimate what splits do once per step, for distinct messages and groups."""
    problem, splits = priced.problem, priced.splits
    first, group = synchronisation_groups(splits)
    some = priced.take(first)
    groups = parameter_groups(some)
    sync = estimate_synchronisation(some, groups)

    def seconds(*names: str) -> np.ndarray:
        return sum((sync.row(name) for name in names), np.zeros(len(first)))[group]

    def side(name: str) -> SideStreamWork:
        return side_stream_work(sync, name).take(group)

    gathered = side("parameters.all_gather")
    if problem.framework.data_parallel.seconds_per_part:
        gathered += host_work(list_seconds(problem, splits))
    return OnceTerms(
        all_reduce=side("gradients.all_reduce"),
        reduce_scatter=side("gradients.reduce_scatter"),
        all_gather=gathered,
        accumulation=seconds("accumulation"),
        to_host=seconds(*([TO_HOST] if problem.run.offload_gradients else [])),
        optimizer_whole=seconds("optimizer.whole"),
        optimizer_shard=seconds("optimizer.shard"),
        buffer_whole=seconds("gradient_buffer.whole"),
        buffer_shard=seconds("gradient_buffer.shard"),
        other=seconds("gradient_norm", "tied_embedding"),
        weight_casts=seconds(*(["weight_casts"] if problem.weight_recipe else [])),
        sharded=sharded_weights(problem, sync, group, splits),
        parameters=np.sum([one.elements for one in groups.values()], axis=0)[group],
        estimates=sync,
        row=group,
    )
