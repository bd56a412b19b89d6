"""All terms of a step's time that depend only on the split, estimated for distinct layers, groups and messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from solver.schedule.kinds import splits_backward
from solver.step.collective_checks import with_checks
from solver.step.data_parallel_ops import synchronisation_ops
from solver.step.deferred_head import projection_seconds
from solver.step.distinct import distinct
from solver.step.host import restart_seconds
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Splits
from solver.step.message_counts import linears_of_stage, list_seconds
from solver.step.muon import muon_ops
from solver.step.offload import TO_HOST
from solver.step.op_estimates import OpEstimates, estimate_ops
from solver.step.parameter_groups import ParameterGroup, parameter_groups, stages_of
from solver.step.pipeline_ops import send_recv_ops, tied_embedding_op
from solver.step.problem import Problem
from solver.step.sharded_weights import ShardedWeights, sharded_weight_ops, sharded_weights
from solver.step.side_stream import SideStreamWork, host_work, side_stream_work
from solver.step.stage_kinds import StageKinds


@dataclass(frozen=True)
class SplitTerms:
    """Terms of each split; float64 arrays. S: splits. Kinds of layers as in Problem.kinds, streams as in
    solver.step.op_estimates.STREAMS, levels as in Recompute.

    Seconds per micro batch for layer, embedding and head; seconds per step for the synchronisation.
    """

    splits: Splits
    key: np.ndarray  #: [S] index into the layer table
    stages: StageKinds
    forward: np.ndarray  #: [kinds, streams, S] of one layer
    backward: np.ndarray  #: [kinds, streams, S]
    recompute: np.ndarray  #: [kinds, levels, S] all streams together
    weight_grad: np.ndarray  #: [kinds, S]
    saved: np.ndarray  #: [kinds, levels, S] bytes of activations that a layer keeps of a micro batch
    offloaded: np.ndarray  #: [kinds, levels, S] those of them that wait on the host; empty without offloaded modules
    postponed: np.ndarray  #: [kinds, S] bytes of a micro batch that a layer's weight gradients need
    paired: np.ndarray  #: [kinds, 2, S] both passes beside each other, as Part.paired; empty where they never are
    embedding: np.ndarray  #: [streams, S] forward and backward
    embedding_forward: np.ndarray  #: [S] all streams together
    head: np.ndarray  #: [streams, S]
    head_forward: np.ndarray  #: [S] all streams together
    head_weight_grad: np.ndarray  #: [S]
    projection_weight_grad: np.ndarray  #: [S] of it the projection to the vocabulary
    head_recompute: np.ndarray  #: [levels, S] of what follows the layers, all streams together
    send_recv: np.ndarray  #: [S] one activation between neighbouring stages
    all_reduce: SideStreamWork  #: [S] of gradients over all copies
    reduce_scatter: SideStreamWork  #: [S] of gradients inside shard groups and across
    all_gather: SideStreamWork  #: [S] of parameters inside shard groups
    sharded: ShardedWeights
    accumulation: np.ndarray  #: [S] adding one micro batch's gradients to the buffer, where a separate kernel does it
    to_host: np.ndarray  #: [S] gradients of one micro batch on their way to the host
    optimizer_whole: np.ndarray
    optimizer_shard: np.ndarray
    buffer_whole: np.ndarray  #: [S] passes over the buffer of all gradients
    buffer_shard: np.ndarray  #: [S] over that of a rank's shard
    once: np.ndarray  #: [S] gradient norm, tied embedding, and what else is done once after the last pass
    weight_casts: np.ndarray  #: [S] of all quantised weights of a rank that are kept
    parameters: np.ndarray  #: [S] of one rank on the fullest stage
    embedding_parameters: np.ndarray  #: [S] of one rank
    synchronisation: OpEstimates  #: the once-per-step ops of distinct splits
    synchronisation_row: np.ndarray  #: [S] index into them


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


def estimate_send_recv(problem: Problem, splits: Splits) -> OpEstimates:
    """Return the estimated send and receive of one micro batch between neighbouring stages; shape [ops, splits]."""
    return estimate_ops(send_recv_ops(problem, splits), len(splits), problem.cost)


def _restart(problem: Problem, splits: Splits) -> np.ndarray:
    """Return the seconds that each message costs beyond its transfer.

    None where sends overlap with the next chunk's compute, and in the schedules of the zero-bubble authors, whose runtime waits
    for handles only (zb_schedules.py).
    """
    asynchronous = overlapping_sends(problem, splits) | splits_backward(splits.schedule)
    return np.where(asynchronous, 0.0, restart_seconds(problem.framework, problem.cost))


def overlapping_sends(problem: Problem, splits: Splits) -> np.ndarray:
    """Return whether each split's sends run beside the next chunk's compute."""
    return (splits.vpp > 1) & problem.run.p2p_overlap & ~splits.v_shaped


def split_terms(priced: PricedSplits) -> SplitTerms:
    """Look up the estimated layers of splits and estimate their messages."""
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    first, group = synchronisation_groups(splits)
    some = priced.take(first)
    groups = parameter_groups(some)
    sync = estimate_synchronisation(some, groups)
    pairs, pair = distinct((splits.mode, splits.tp, splits.cp, splits.dp, splits.pp, splits.micro_batch_size))
    send_recv = estimate_send_recv(problem, splits.take(pairs)).row("send_recv")[pair]
    layers, embedding, head = [part.times for part in table.layers], table.embedding.times, table.head.times

    def once(*names: str) -> np.ndarray:
        return sum((sync.row(name) for name in names), np.zeros(len(first)))[group]

    def side(name: str) -> SideStreamWork:
        return side_stream_work(sync, name).take(group)

    gathered = side("parameters.all_gather")
    if problem.framework.data_parallel.seconds_per_part:
        gathered += host_work(list_seconds(problem, splits))
    forward = np.array([layer.forward[:, key] for layer in layers])
    backward = np.array([layer.backward[:, key] for layer in layers])
    return SplitTerms(
        splits=splits, key=key, stages=stages_of(problem, splits), forward=forward, backward=backward,
        recompute=np.array([layer.recompute.sum(axis=1)[:, key] for layer in layers]),
        weight_grad=np.array([layer.weight_grad[key] for layer in layers]),
        saved=np.array([part.saved[:, key] for part in table.layers]),
        offloaded=np.array([part.offloaded[:, key] for part in table.layers] if problem.run.offload_modules else []),
        postponed=np.array([part.postponed[key] for part in table.layers]),
        paired=np.array([part.paired[:, key] for part in table.layers] if problem.run.moe_exchange_overlap else []),
        embedding=(embedding.forward + embedding.backward)[:, key], head=(head.forward + head.backward)[:, key],
        embedding_forward=embedding.forward.sum(axis=0)[key], head_forward=head.forward.sum(axis=0)[key],
        head_weight_grad=head.weight_grad[key],
        projection_weight_grad=projection_seconds(table.head)[key],
        head_recompute=head.recompute.sum(axis=1)[:, key],
        send_recv=np.where(splits.pp > 1, send_recv + _restart(problem, splits), 0.0),
        all_reduce=side("gradients.all_reduce"), reduce_scatter=side("gradients.reduce_scatter"),
        all_gather=gathered,
        sharded=sharded_weights(problem, sync, group, splits),
        accumulation=once("accumulation"), to_host=once(*([TO_HOST] if problem.run.offload_gradients else [])),
        optimizer_whole=once("optimizer.whole"), optimizer_shard=once("optimizer.shard"),
        once=once("gradient_norm", "tied_embedding"),
        buffer_whole=once("gradient_buffer.whole"), buffer_shard=once("gradient_buffer.shard"),
        weight_casts=once(*(["weight_casts"] if problem.weight_recipe else [])),
        parameters=np.sum([one.elements for one in groups.values()], axis=0)[group],
        embedding_parameters=table.embedding.parameters[key], synchronisation=sync, synchronisation_row=group,
    )  # fmt: skip
