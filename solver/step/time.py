"""The time of one optimizer step of every layout, as a sum of named parts of its slowest stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from solver.schedule.stages import pipeline_seconds
from solver.step.layouts import Layouts
from solver.step.problem import Problem
from solver.step.side_stream import SideStreamWork
from solver.step.step_ops import buckets
from solver.step.terms import SplitTerms

#: Parts of a step, in the order of the rows of StepTimes.parts.
PARTS = (
    "compute", "recompute", "tp_exposed", "cp_exposed", "wp_exposed", "fsdp_exposed", "pp_transfer", "bubble",
    "gradient_accumulation", "gradient_sync", "parameter_gather", "optimizer",
)  # fmt: skip


@dataclass(frozen=True)
class SlowestStage:
    """The bottleneck stage: its layers, how many of them are recomputed, and whether it holds embedding and head (0 or 1)."""

    layers: np.ndarray
    recomputed: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray


@dataclass(frozen=True)
class StepTimes:
    """seconds: [layouts]. parts: [parts, layouts], seconds of the slowest stage that add up to ``seconds``."""

    seconds: np.ndarray
    parts: np.ndarray
    slowest: SlowestStage


def step_times(problem: Problem, terms: SplitTerms, layouts: Layouts, table_parameters: np.ndarray) -> StepTimes:
    """Return the seconds of each layout. table_parameters: parameters of one rank on the fullest stage, shape [splits]."""
    row, run, model = layouts.row, problem.run, problem.model
    pp, vpp, m = terms.splits.pp[row], terms.splits.vpp[row], terms.splits.num_micro_batches[row].astype(float)
    forward, backward = terms.forward.sum(axis=0)[row], terms.backward.sum(axis=0)[row]
    recompute = terms.recompute[layouts.recompute, row]
    recomputed_layers = np.where(layouts.recompute_layers < 0, model.num_hidden_layers, layouts.recompute_layers)
    fsdp, root = _fsdp(terms, layouts, forward, backward)
    fsdp_recomputing, _ = _fsdp(terms, layouts, forward, backward + recompute)
    layer = forward + backward + fsdp
    # a recomputed layer runs its forward pass again, which overlaps with more of its all-gathers
    recomputed_layer = recompute + fsdp_recomputing - fsdp
    # Megatron's interleaved schedule overlaps sends with the next chunk's compute: only the first and last pass through all
    # chunks are exposed
    overlapped = (vpp > 1) & run.p2p_overlap
    send_recv = np.where(overlapped, 0.0, problem.framework.pipeline.blocking_sends * vpp * terms.send_recv[row])

    head_recompute = np.where(recomputed_layers > 0, terms.head_recompute[layouts.recompute, row], 0.0)
    embedding, head = terms.embedding.sum(axis=0)[row], terms.head.sum(axis=0)[row] + head_recompute
    bottleneck = _slowest_stage(terms, row, (embedding, head), layer, recomputed_layer, recomputed_layers)
    count, slowest = bottleneck.layers, bottleneck.seconds + send_recv + root
    total = (
        model.num_hidden_layers * layer + np.minimum(recomputed_layers * pp, model.num_hidden_layers) * recomputed_layer
        + embedding + head + root + send_recv * pp
    )  # fmt: skip
    pipeline = pipeline_seconds(terms.splits.schedule[row], m, pp, vpp, total, slowest, count * terms.weight_grad[row])
    pipeline = pipeline + np.where(overlapped, 2.0 * (pp * vpp - 1), 0.0) * terms.send_recv[row]
    accumulation = np.where(layouts.zero < 2, (m - 1) * terms.accumulation[row], 0.0)

    recomputed = np.minimum(recomputed_layers, count) * recompute + bottleneck.has_head * head_recompute
    fsdp_stage = count * fsdp + np.minimum(recomputed_layers, count) * (fsdp_recomputing - fsdp)
    sync, gather = _synchronisation(problem, terms, layouts, count * backward + recomputed, count * forward, table_parameters)
    optimizer = np.where(layouts.zero == 0, terms.optimizer_whole[row], terms.optimizer_shard[row]) + terms.once[row]
    streams = [m * seconds for seconds in _by_stream(terms, row, bottleneck)]
    parts = np.array([
        streams[0], m * recomputed, *streams[1:], m * (fsdp_stage + root), m * send_recv, pipeline - m * slowest,
        accumulation, sync, gather, optimizer,
    ])  # fmt: skip
    stage = SlowestStage(count, np.minimum(recomputed_layers, count), bottleneck.has_embedding, bottleneck.has_head)
    return StepTimes(pipeline + accumulation + sync + gather + optimizer, parts, stage)


class _Bottleneck(NamedTuple):
    """Seconds of one micro batch on the slowest stage, and what it holds (embedding, head: 0 or 1); arrays over layouts."""

    seconds: np.ndarray
    layers: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray


def _by_stream(terms: SplitTerms, row: np.ndarray, bottleneck: _Bottleneck) -> list[np.ndarray]:
    """Return the seconds of one micro batch on the slowest stage, forward and backward, for each stream."""
    return [
        bottleneck.layers * (terms.forward[s] + terms.backward[s])[row]
        + bottleneck.has_embedding * terms.embedding[s][row] + bottleneck.has_head * terms.head[s][row]
        for s in range(len(terms.forward))
    ]  # fmt: skip


def _slowest_stage(
    terms: SplitTerms,
    row: np.ndarray,
    ends: tuple[np.ndarray, np.ndarray],
    layer: np.ndarray,
    recomputed_layer: np.ndarray,
    recomputed_layers: np.ndarray,
) -> _Bottleneck:
    """Return the slowest of the first stage (with the embedding), the fullest middle one and the last (with the head).

    ends: seconds of embedding and head. recomputed_layers: layers of a stage that are recomputed, each ``recomputed_layer``
    longer.
    """
    first, middle, last = terms.stages.first[row], terms.stages.middle[row], terms.stages.last[row]
    single = terms.splits.pp[row] == 1
    embedding, head = ends
    at_first = first * layer + np.minimum(recomputed_layers, first) * recomputed_layer + embedding + np.where(single, head, 0.0)
    at_middle = np.where(single, 0.0, middle * layer + np.minimum(recomputed_layers, middle) * recomputed_layer)
    at_last = np.where(single, 0.0, last * layer + np.minimum(recomputed_layers, last) * recomputed_layer + head)
    is_first = (at_first >= at_middle) & (at_first >= at_last)
    is_last = (at_last > at_first) & (at_last >= at_middle)
    return _Bottleneck(
        seconds=np.where(is_first, at_first, np.where(is_last, at_last, at_middle)),
        layers=np.where(is_first, first, np.where(is_last, last, middle)),
        has_embedding=is_first * 1.0,
        has_head=(is_last | single) * 1.0,
    )


def _fsdp(terms: SplitTerms, layouts: Layouts, forward: np.ndarray, backward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the exposed seconds of ZeRO-3 per layer and micro batch, and of embedding and head; zero for other layouts.

    A layer's parameters are all-gathered while the layer before it computes, in forward and again in backward, where the
    gradients of the layer after it are reduce-scattered at the same time. Source: Zhao et al. 2023 (PyTorch FSDP, arXiv
    2304.11277).
    """
    layer, root = np.zeros(len(layouts)), np.zeros(len(layouts))
    chosen = np.flatnonzero(layouts.zero == 3)
    if len(chosen):
        row = layouts.row[chosen]
        gather, scatter = terms.layer_all_gather.take(row), terms.layer_reduce_scatter.take(row)
        layer[chosen] = gather.overlapped_with(forward[chosen]) + (gather + scatter).overlapped_with(backward[chosen])
        root[chosen] = terms.root[row] + gather.communication  # no compute runs before the first layer's all-gather
    return layer, root


def _synchronisation(
    problem: Problem,
    terms: SplitTerms,
    layouts: Layouts,
    backward: np.ndarray,
    forward: np.ndarray,
    parameters: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the exposed seconds per step of gradient synchronisation and of the parameter all-gather (ZeRO 0 to 2).

    With overlap, gradients are sent bucket by bucket during the last micro batch's backward pass; the last bucket has nothing
    left to overlap with. ZeRO-2 keeps only its share of the gradients, so it must reduce-scatter them in every micro batch,
    overlapped with its backward pass and what follows.
    """
    row, run, zero = layouts.row, problem.run, layouts.zero
    framework = problem.framework
    whole = (zero == 0) | ((zero == 1) & (framework.data_parallel.grad_collective == "all_reduce"))
    times = np.where(zero == 2, terms.splits.num_micro_batches[row], 1)
    reduce = SideStreamWork.where(whole, terms.all_reduce.take(row), terms.reduce_scatter.take(row)) * times
    gather = terms.all_gather.take(row)
    if run.overlap_grad_reduce:
        last_bucket = 1 / buckets(framework, parameters, terms.splits.dp * terms.splits.cp)
        sync = reduce.overlapped_with(backward * times, last_bucket[row] / times)
    else:
        sync = reduce.exposed
    gathered = gather.overlapped_with(forward) if run.overlap_param_gather else gather.exposed
    return sync * (zero < 3), gathered * ((zero == 1) | (zero == 2))
