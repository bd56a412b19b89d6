"""The time from the first forward to the last backward pass of a step, by schedule, and what the slowest stage does in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from solver.schedule.kinds import is_schedule
from solver.schedule.stages import PipelineColumns, automatic_pipeline_seconds, pipeline_seconds, wave_pipeline_seconds
from solver.schedule.warm_up import unpaired_micro_batches
from solver.spec.strategy import SPLIT_BACKWARD, Strategy
from solver.step.deferred_head import deferred_share, with_deferred
from solver.step.layouts import Layouts
from solver.step.offload import exposed_transfer
from solver.step.op_estimates import STREAMS
from solver.step.problem import Problem
from solver.step.sharded_weights import exposed_by_sharding
from solver.step.stage_kinds import over_kinds
from solver.step.terms import SplitTerms

#: Parts of these seconds, in the order of the rows of PipelineTimes.parts.
PIPELINE_PARTS = (
    "compute", "recompute", "tp_exposed", "cp_exposed", "wp_exposed", "ep_exposed", "fsdp_exposed", "offload_exposed",
    "pp_transfer", "bubble",
)  # fmt: skip


@dataclass(frozen=True)
class SlowestStage:
    """The bottleneck stage: its layers of each kind and how many of them are recomputed, [kinds, layouts]; whether it holds
    embedding and head (0 or 1), [layouts]."""

    layers: np.ndarray
    recomputed: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray

    def take(self, index: np.ndarray) -> SlowestStage:
        return SlowestStage(self.layers[:, index], self.recomputed[:, index], self.has_embedding[index], self.has_head[index])


#: Messages between two neighbours while the pipeline fills and drains: one forward, one backward.
FILLING_SENDS = 2.0


@dataclass(frozen=True)
class PipelineTimes:
    """Seconds of pipelines; arrays over pipelines.

    parts: [parts, pipelines], of the slowest stage, add up to ``seconds``. hidden: of each layer's exchange beside another
    micro batch, [kinds, pipelines]. forward, backward: of one micro batch's layers on the slowest stage.
    """

    seconds: np.ndarray
    parts: np.ndarray
    slowest: SlowestStage
    hidden: np.ndarray
    forward: np.ndarray
    backward: np.ndarray


def pipeline_times(problem: Problem, terms: SplitTerms, layouts: Layouts) -> PipelineTimes:
    """Return the seconds of each layout's pipeline."""
    row, run = layouts.row, problem.run
    pp, vpp, m = terms.splits.pp[row], terms.splits.vpp[row], terms.splits.num_micro_batches[row].astype(float)
    layer, root = _layer_seconds(terms, layouts, run)
    # Megatron's interleaved schedule overlaps sends with the next chunk's compute: only the first and last pass through all
    # chunks are exposed
    overlapped = (vpp > 1) & run.p2p_overlap & ~terms.splits.waves[row]
    # automatic schedules wait for a message where they need it
    blocking = problem.framework.pipeline.blocking_sends * vpp * terms.send_recv[row]
    send_recv = np.where(overlapped | terms.splits.automatic[row], 0.0, blocking)

    deferred = deferred_share(run, m) * terms.projection_weight_grad[row]
    limit = recomputed_limit(problem, layouts)
    head_recompute = np.where(end_recomputed(problem, layouts), terms.head_recompute[layouts.recompute, row], 0.0)
    embedding, head = terms.embedding.sum(axis=0)[row], terms.head.sum(axis=0)[row] + head_recompute - deferred
    # an end of the pipeline has one neighbour: it makes one exchange less, of two for each chunk (a wave's formula has its own)
    at_end = np.where((pp > 1) & ~terms.splits.waves[row], send_recv * (1 - 1 / (2.0 * vpp)), send_recv)
    bottleneck, recomputed_of_all = _slowest_stage(terms, layouts, (embedding, head), (send_recv, at_end), layer, limit)
    stage, filling = bottleneck.stage, send_recv * (pp - 1) * FILLING_SENDS / problem.framework.pipeline.blocking_sends
    send_recv = bottleneck.send_recv
    slowest = bottleneck.seconds + root
    total = (
        over_kinds(terms.stages.totals[:, None], layer.once) + over_kinds(recomputed_of_all, layer.recomputing)
        + embedding + head + root + filling + np.where(terms.splits.waves[row], send_recv, 0.0)
    )  # fmt: skip
    deferrable = over_kinds(stage.layers, terms.weight_grad[:, row]) + stage.has_head * terms.head_weight_grad[row]
    forward = over_kinds(stage.layers, layer.forward)
    first = forward + stage.has_head * terms.head_forward[row]
    offload = _offload(problem, terms, layouts, layer, stage)
    slowest, total = slowest + offload, total + pp * offload
    passes = _Passes(total, slowest, first, deferrable, send_recv)
    pipeline = _pipeline(passes, terms, layouts, stage, problem.framework.pipeline.waits_for_norm)
    pipeline = pipeline + np.where(overlapped, 2.0 * (pp * vpp - 1), 0.0) * terms.send_recv[row]
    if run.defer_embedding_wgrad_compute:
        drains = over_kinds(terms.stages.totals[:, None], layer.backward) + over_kinds(recomputed_of_all, layer.recompute)
        pipeline = with_deferred(pipeline, m * deferred, drains * (pp - 1) / (pp * vpp))
    recomputed = over_kinds(stage.recomputed, layer.recompute) + stage.has_head * head_recompute
    fsdp_stage = over_kinds(stage.layers, layer.fsdp) + over_kinds(stage.recomputed, layer.fsdp_recomputing)
    backward = over_kinds(stage.layers, layer.backward)
    streams = [m * seconds for seconds in _by_stream(terms, row, stage)]
    streams[STREAMS.index("ep")] = streams[STREAMS.index("ep")] - m * over_kinds(stage.layers, layer.hidden)
    parts = np.array([
        streams[0], m * recomputed, *streams[1:], m * (fsdp_stage + root), m * offload, m * send_recv,
        pipeline - m * (slowest + stage.has_head * deferred),
    ])  # fmt: skip
    return PipelineTimes(pipeline, parts, stage, layer.hidden, forward, backward + recomputed)


class _Passes(NamedTuple):
    """Seconds of one micro batch, arrays over layouts: on all stages and on the slowest one; of the latter the forward pass,
    the weight gradients and the sends that it waits for."""

    total: np.ndarray
    slowest: np.ndarray
    forward: np.ndarray
    deferrable: np.ndarray
    send_recv: np.ndarray


def _pipeline(passes: _Passes, terms: SplitTerms, layouts: Layouts, stage: SlowestStage, waits: bool) -> np.ndarray:
    """Return the seconds from the first forward to the last backward pass of a step, by each layout's schedule: [layouts].

    waits: stages wait for each other at the end of a step.
    """
    splits, row = terms.splits, layouts.row
    columns = PipelineColumns(splits.schedule[row], splits.num_micro_batches[row].astype(float), splits.pp[row])
    total, slowest, forward, deferrable, send_recv = passes
    found: np.ndarray = pipeline_seconds(*columns, splits.vpp[row], total, slowest, deferrable)
    waves = np.flatnonzero(splits.waves[row])
    if len(waves):
        ends = total[waves], slowest[waves], (forward + send_recv / 2)[waves], deferrable[waves]
        found[waves] = wave_pipeline_seconds(columns.take(waves), *ends, waits)
    automatic = np.flatnonzero(splits.automatic[row])
    if len(automatic):
        each = np.array([forward, slowest - forward - deferrable, deferrable])[:, automatic]
        late, share = terms.send_recv[row[automatic]], weight_share(terms, layouts, stage)[automatic]
        found[automatic] = automatic_pipeline_seconds(
            columns.take(automatic), total[automatic], slowest[automatic], each, late, share, waits
        )
    return found


def weight_share(terms: SplitTerms, layouts: Layouts, stage: SlowestStage) -> np.ndarray:
    """Return the share of a micro batch's activations on ``stage`` that its weight gradients need: [layouts].

    Above 1 where recomputation keeps less than they need.
    """
    row = layouts.row
    kept, whole = terms.saved[:, layouts.recompute, row], terms.saved[:, 0, row]
    held = over_kinds(stage.recomputed, kept) + over_kinds(stage.layers - stage.recomputed, whole)
    share: np.ndarray = over_kinds(stage.layers, terms.postponed[:, row]) / np.maximum(held, 1.0)
    return share


def recomputed_limit(problem: Problem, layouts: Layouts) -> np.ndarray:
    """Return how many of a stage's layers each layout recomputes at most: [layouts], or by stage where the run states that."""
    every, stated = problem.model.num_hidden_layers, problem.run.recomputed_of_stages
    if stated:
        return np.repeat(np.array(stated)[:, None], len(layouts), axis=1)
    return np.where(layouts.recompute_layers < 0, every, np.minimum(layouts.recompute_layers, every))


def end_recomputed(problem: Problem, layouts: Layouts) -> np.ndarray:
    """Return whether each layout runs again what follows the layers: bool [layouts].

    The head where the framework does so, with any layer of its stage. Modules of multi-token prediction only with all layers:
    block recomputation passes them over (Megatron-Core's multi_token_prediction.py).
    """
    if problem.framework.recomputation.includes_head:
        limit = recomputed_limit(problem, layouts)
        found: np.ndarray = (limit[-1] if limit.ndim == 2 else limit) > 0
        return found
    every: np.ndarray = (layouts.recompute_layers < 0) & (not problem.run.recompute_stage_layers)
    return every


class _LayerSeconds(NamedTuple):
    """Seconds of one layer of each kind and one micro batch: [kinds, layouts].

    recompute: of its second forward pass. fsdp: exposed by ZeRO-3; fsdp_recomputing: what recomputation adds to that. hidden:
    exchange of tokens beside another micro batch. once: all without recomputation. recomputing: what recomputation adds.
    """

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    fsdp: np.ndarray
    fsdp_recomputing: np.ndarray
    hidden: np.ndarray
    once: np.ndarray
    recomputing: np.ndarray


def _layer_seconds(terms: SplitTerms, layouts: Layouts, run: Strategy) -> tuple[_LayerSeconds, np.ndarray]:
    """Return the seconds of the layers, and those of ZeRO-3's embedding and head, [layouts]."""
    row = layouts.row
    forward, backward = terms.forward.sum(axis=1)[:, row], terms.backward.sum(axis=1)[:, row]
    recompute = terms.recompute[:, layouts.recompute, row]
    fsdp, fsdp_recomputing, root = exposed_by_sharding(terms.sharded, layouts, forward, backward, recompute)
    both, nothing = forward + backward, np.zeros(forward.shape)
    hidden = _hidden_exchange(terms, layouts, both, run) if run.moe_exchange_overlap else nothing
    once, recomputing = forward + backward + fsdp - hidden, recompute + fsdp_recomputing
    return _LayerSeconds(forward, backward, recompute, fsdp, fsdp_recomputing, hidden, once, recomputing), root


def _hidden_exchange(terms: SplitTerms, layouts: Layouts, both: np.ndarray, run: Strategy) -> np.ndarray:
    """Return the seconds per layer that the exchange of tokens takes no more beside another micro batch: [kinds, layouts].

    both: forward and backward, one after the other. Weight gradients are delayed where the run says so, or the schedule splits
    the backward pass. In the steady state of a stage, each forward pass of a chunk runs together
    with the backward pass of an earlier micro batch (DeepSeek-V3's DualPipe, arXiv 2412.19437 section 3.2.1; Megatron-Core's
    combined_1f1b.py), so the exchange of both runs beside the compute of both; filling and draining the pipeline does not.
    """
    row, splits = layouts.row, terms.splits
    pp, vpp, m = splits.pp[row], splits.vpp[row], splits.num_micro_batches[row]
    alone = unpaired_micro_batches(splits.schedule[row], pp, vpp, run.micro_batch_group)
    share = np.maximum(m - np.maximum(alone, 1), 0) / m
    splits_passes = run.delay_wgrad_compute | is_schedule(splits.schedule[row], *SPLIT_BACKWARD)
    together = np.where(splits_passes, terms.paired[:, 1, row], terms.paired[:, 0, row])
    ep = STREAMS.index("ep")
    sent = (terms.forward[:, ep] + terms.backward[:, ep])[:, row]
    found: np.ndarray = share * np.clip(both - together, 0.0, sent)
    return found


class _Bottleneck(NamedTuple):
    """Seconds of one micro batch on the slowest stage, of them the sends, and what it holds; arrays over layouts."""

    seconds: np.ndarray
    send_recv: np.ndarray
    stage: SlowestStage


def _by_stream(terms: SplitTerms, row: np.ndarray, stage: SlowestStage) -> list[np.ndarray]:
    """Return the seconds of one micro batch on the slowest stage, forward and backward, for each stream."""
    return [
        over_kinds(stage.layers, (terms.forward[:, s] + terms.backward[:, s])[:, row])
        + stage.has_embedding * terms.embedding[s][row] + stage.has_head * terms.head[s][row]
        for s in range(terms.forward.shape[1])
    ]  # fmt: skip


def _slowest_stage(
    terms: SplitTerms, layouts: Layouts, ends: tuple[np.ndarray, np.ndarray], sends: tuple[np.ndarray, np.ndarray],
    layer: _LayerSeconds, limit: np.ndarray,
) -> tuple[_Bottleneck, np.ndarray]:  # fmt: skip
    """Return the slowest stage (of equal ones the first, else the last), and the recomputed layers of all, [kinds, layouts].

    ends: seconds of embedding and head. sends: seconds of a middle stage's sends, and of an end's; the first stage stands for
    middle ones of as many layers where there are any. limit: layers that every stage recomputes at most.
    """
    row, stages = layouts.row, terms.stages
    counts, has_embedding, has_head = stages.counts[:, :, row], stages.has_embedding[:, row], stages.has_head[:, row]
    recomputed, recomputed_of_all = stages.recomputed(limit, row, counts)
    embedding, head = ends
    between, at_end = sends
    sent = np.where((has_head > 0) | (terms.splits.pp[row] == 2), at_end, between)
    seconds = np.array([
        over_kinds(counts[s], layer.once) + over_kinds(recomputed[s], layer.recomputing)
        + has_embedding[s] * embedding + has_head[s] * head + sent[s]
        for s in range(len(counts))
    ])  # fmt: skip
    slowest = np.argmax(seconds, axis=0)
    chosen = slowest, np.arange(len(row))
    stage = SlowestStage(
        counts.transpose(0, 2, 1)[chosen].T, recomputed.transpose(0, 2, 1)[chosen].T, has_embedding[chosen], has_head[chosen]
    )
    return _Bottleneck(seconds[chosen], sent[chosen], stage), recomputed_of_all


def _offload(problem: Problem, terms: SplitTerms, layouts: Layouts, layer: _LayerSeconds, stage: SlowestStage) -> np.ndarray:
    """Return the seconds per micro batch that the slowest stage waits for activations on their way to and from the host:
    [layouts]. Modules are offloaded in all layers, layers whole and of a single stage."""
    limit, row, level = problem.run.offload_layers, layouts.row, layouts.recompute
    if limit:
        moved, _ = terms.stages.recomputed(np.full(len(layouts), limit), row)
        return over_kinds(moved[0], exposed_transfer(problem, terms.saved[:, 0, row], layer.forward, layer.backward))
    if not problem.run.offload_modules:
        return np.zeros(len(layouts))
    whole = exposed_transfer(problem, terms.away[:, 0, row], layer.forward, layer.backward)
    again = exposed_transfer(problem, terms.away[:, level, row], layer.forward, layer.backward + layer.recompute)
    return over_kinds(stage.layers - stage.recomputed, whole) + over_kinds(stage.recomputed, again)
