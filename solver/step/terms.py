"""All terms of a step's time that depend only on the split, estimated for distinct layers, groups and messages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.schedule.kinds import splits_backward
from solver.step.amax_reduction import amax_seconds
from solver.step.deferred_head import projection_seconds
from solver.step.distinct import distinct
from solver.step.host import restart_seconds
from solver.step.layer_table import LayerTable, PricedSplits
from solver.step.layouts import Splits
from solver.step.once_terms import OnceTerms, once_terms
from solver.step.op_estimates import OpEstimates, estimate_ops
from solver.step.parameter_groups import stages_of
from solver.step.pipeline_ops import send_recv_ops
from solver.step.problem import Problem
from solver.step.stage_kinds import StageKinds


@dataclass(frozen=True)
class LayerTerms:
    """Of one layer and micro batch; float64 arrays. S: splits. Kinds of layers as in Problem.kinds, streams as in
    solver.step.op_estimates.STREAMS, levels as in Recompute."""

    forward: np.ndarray  #: [kinds, streams, S] seconds
    backward: np.ndarray  #: [kinds, streams, S]
    recompute: np.ndarray  #: [kinds, levels, S] all streams together
    weight_grad: np.ndarray  #: [kinds, S]
    saved: np.ndarray  #: [kinds, levels, S] bytes of activations that a layer keeps
    offloaded: np.ndarray  #: [kinds, levels, S] those of them that wait on the host; empty without offloaded modules
    postponed: np.ndarray  #: [kinds, S] bytes that weight gradients need
    paired: np.ndarray  #: [kinds, 2, S] both passes beside each other, as EstimatedProgram.paired; empty where they never are


@dataclass(frozen=True)
class EndTerms:
    """Of embedding and head and one micro batch; float64 arrays of seconds. S: splits, streams and levels as of layers."""

    embedding: np.ndarray  #: [streams, S] forward and backward
    embedding_forward: np.ndarray  #: [S] all streams together
    head: np.ndarray  #: [streams, S] forward and backward
    head_forward: np.ndarray  #: [S] all streams together
    head_weight_grad: np.ndarray  #: [S]
    projection_weight_grad: np.ndarray  #: [S] of it the projection to the vocabulary
    head_recompute: np.ndarray  #: [levels, S] of what follows the layers, all streams together
    embedding_parameters: np.ndarray  #: [S] of one rank


@dataclass(frozen=True)
class SplitTerms:
    """Terms of each split. key: [S] index into the layer table. send_recv: [S] one activation between neighbouring stages.
    amax: [S] seconds that each pass of a chunk waits for largest values of others (solver.step.amax_reduction)."""

    splits: Splits
    key: np.ndarray
    stages: StageKinds
    layers: LayerTerms
    ends: EndTerms
    send_recv: np.ndarray
    amax: np.ndarray
    once: OnceTerms


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


def layer_terms(problem: Problem, table: LayerTable, key: np.ndarray) -> LayerTerms:
    """Look up the layers of splits."""
    parts = table.layers
    return LayerTerms(
        forward=np.array([part.times.forward[:, key] for part in parts]),
        backward=np.array([part.times.backward[:, key] for part in parts]),
        recompute=np.array([part.times.recompute.sum(axis=1)[:, key] for part in parts]),
        weight_grad=np.array([part.times.weight_grad[key] for part in parts]),
        saved=np.array([part.saved[:, key] for part in parts]),
        offloaded=np.array([part.offloaded[:, key] for part in parts] if problem.run.offload_modules else []),
        postponed=np.array([part.postponed[key] for part in parts]),
        paired=np.array([part.paired[:, key] for part in parts] if problem.run.moe_exchange_overlap else []),
    )


def end_terms(table: LayerTable, key: np.ndarray) -> EndTerms:
    """Look up embedding and head of splits."""
    embedding, head = table.embedding.times, table.head.times
    return EndTerms(
        embedding=(embedding.forward + embedding.backward)[:, key],
        embedding_forward=embedding.forward.sum(axis=0)[key],
        head=(head.forward + head.backward)[:, key],
        head_forward=head.forward.sum(axis=0)[key],
        head_weight_grad=head.weight_grad[key],
        projection_weight_grad=projection_seconds(table.head)[key],
        head_recompute=head.recompute.sum(axis=1)[:, key],
        embedding_parameters=table.embedding.parameters[key],
    )


def split_terms(priced: PricedSplits) -> SplitTerms:
    """Look up the estimated layers of splits and estimate their messages."""
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    pairs, pair = distinct((splits.mode, splits.tp, splits.cp, splits.dp, splits.pp, splits.micro_batch_size))
    send_recv = estimate_send_recv(problem, splits.take(pairs)).row("send_recv")[pair]
    return SplitTerms(
        splits,
        key,
        stages_of(problem, splits),
        layer_terms(problem, table, key),
        end_terms(table, key),
        np.where(splits.pp > 1, send_recv + _restart(problem, splits), 0.0),
        amax_seconds(problem, splits),
        once_terms(priced),
    )
