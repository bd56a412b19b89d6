"""The time from the first forward to the last backward pass of a step, by schedule, and what the slowest stage does in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.schedule.closed_forms import (
    PipelineColumns,
    automatic_pipeline_seconds,
    fixed_order_seconds,
    v_shaped_pipeline_seconds,
)
from solver.spec.choices import Recompute
from solver.step.deferred_head import with_deferred
from solver.step.interleaved import interleaved_pipeline_seconds
from solver.step.layouts import Layouts
from solver.step.offload import exposed_transfer
from solver.step.op_estimates import STREAMS
from solver.step.problem import Problem
from solver.step.stage_kinds import over_kinds
from solver.step.stage_seconds import (
    Bottleneck,
    LayerSeconds,
    PipelineStages,
    SlowestStage,
    bottleneck,
    chunk_work,
    ends_of,
    layer_seconds,
    overlaps_sends,
    recomputed_limit,
    sends_of,
    stage_work,
)
from solver.step.terms import SplitTerms

#: Parts of these seconds, in the order of the rows of PipelineTimes.parts.
PIPELINE_PARTS = (
    "compute",
    "recompute",
    "tp_exposed",
    "cp_exposed",
    "wp_exposed",
    "ep_exposed",
    "fsdp_exposed",
    "offload_exposed",
    "amax",
    "pp_transfer",
    "bubble",
)


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
    layer, root = layer_seconds(terms, layouts, run)
    stages = PipelineStages(
        terms,
        layouts,
        layer,
        ends_of(problem, terms, layouts),
        sends_of(problem, terms, layouts),
        recomputed_limit(problem, layouts),
    )
    slowest = bottleneck(stages)
    stage, deferred = slowest.stage, stages.ends.deferred
    offload, amax = _offload(problem, terms, layouts, layer, stage), 2.0 * vpp * terms.amax[row]
    pipeline = _pipeline(problem, stages, slowest, root=root, everywhere=offload + amax)
    # of sends that overlap with the next chunk's compute only the first and the last pass through all chunks are exposed, and
    # what the compute is too short for: a chunk's two passes exchange one after the other
    overlapped, send = overlaps_sends(problem, terms, layouts), terms.send_recv[row]
    pipeline = np.maximum(pipeline, overlapped * 2.0 * m * vpp * send) + overlapped * 2.0 * (pp * vpp - 1) * send
    if run.defer_embedding_wgrad_compute:
        pipeline = with_deferred(pipeline, m * deferred, stages.draining)
    recomputed = over_kinds(stage.recomputed, layer.recompute) + stage.has_head * stages.ends.recompute
    fsdp_stage = over_kinds(stage.layers, layer.fsdp) + over_kinds(stage.recomputed, layer.fsdp_extra)
    streams = [m * seconds for seconds in _by_stream(terms, row, stage)]
    # what is hidden is the exchange, and of more than that kernels that run on its stream
    left = streams[STREAMS.index("ep")] - m * over_kinds(stage.layers, layer.hidden)
    streams[0], streams[STREAMS.index("ep")] = streams[0] + np.minimum(left, 0.0), np.maximum(left, 0.0)
    parts = np.array(
        [
            streams[0],
            m * recomputed,
            *streams[1:],
            m * (fsdp_stage + root),
            m * offload,
            m * amax,
            m * slowest.send_recv,
            pipeline - m * (slowest.seconds + root + offload + amax + stage.has_head * deferred),
        ]
    )
    forward, backward = over_kinds(stage.layers, layer.forward), over_kinds(stage.layers, layer.backward)
    return PipelineTimes(pipeline, parts, stage, layer.hidden, forward, backward + recomputed)


def _pipeline(
    problem: Problem, stages: PipelineStages, slowest: Bottleneck, *, root: np.ndarray, everywhere: np.ndarray
) -> np.ndarray:
    """Return the seconds from the first forward to the last backward pass of a step, by each layout's schedule: [layouts].

    root: seconds that ZeRO-3 adds to a micro batch at the ends. everywhere: that every stage waits for besides.
    """
    waits = problem.waits_for_norm  # stages for each other at the end of a step
    splits, row = stages.terms.splits, stages.layouts.row
    columns = PipelineColumns(splits.schedule[row], splits.num_micro_batches[row].astype(float), splits.pp[row])
    v_shaped, automatic, vpp = splits.v_shaped[row], splits.automatic[row], splits.vpp[row]
    seconds = slowest.seconds + root + everywhere
    total = stages.filling + root + columns.pp * everywhere
    pipeline: np.ndarray = columns.num_micro_batches * seconds
    interleaved = np.flatnonzero(~v_shaped & ~automatic & (vpp > 1))
    if len(interleaved):
        of, at = columns.take(interleaved), stages.take(interleaved)
        pipeline[interleaved] = interleaved_pipeline_seconds(at, of, everywhere[interleaved], root[interleaved], problem.chunks)
    fixed = np.flatnonzero(~v_shaped & ~automatic & (vpp == 1) & (columns.pp > 1))
    if len(fixed):
        work = stage_work(stages.take(fixed), everywhere[fixed], root[fixed])
        pipeline[fixed] = fixed_order_seconds(columns.take(fixed), work)
    v = np.flatnonzero(v_shaped)
    if len(v):
        pipeline[v] = v_shaped_pipeline_seconds(columns.take(v), chunk_work(stages.take(v), everywhere[v], root[v]), waits)
    planned = np.flatnonzero(automatic)
    if len(planned):
        stage, terms = slowest.stage, stages.terms
        deferrable = (
            over_kinds(stage.layers, terms.layers.weight_grad[:, row]) + stage.has_head * terms.ends.head_weight_grad[row]
        )
        forward = over_kinds(stage.layers, stages.layer.forward) + stage.has_head * terms.ends.head_forward[row]
        each = np.array([forward, seconds - forward - deferrable, deferrable])[:, planned]
        late, share = terms.send_recv[row[planned]], weight_share(terms, stages.layouts, stage)[planned]
        pipeline[planned] = automatic_pipeline_seconds(
            columns.take(planned), total[planned], seconds[planned], each, late, share, waits
        )
    return np.maximum(pipeline, columns.num_micro_batches * seconds)  # but for rounding none is below it


def weight_share(terms: SplitTerms, layouts: Layouts, stage: SlowestStage) -> np.ndarray:
    """Return the share of a micro batch's activations on ``stage`` that its weight gradients need: [layouts].

    Above 1 where recomputation keeps less than they need.
    """
    row = layouts.row
    kept, whole = terms.layers.saved[:, layouts.recompute, row], terms.layers.saved[:, Recompute.NONE, row]
    held = over_kinds(stage.recomputed, kept) + over_kinds(stage.layers - stage.recomputed, whole)
    return over_kinds(stage.layers, terms.layers.postponed[:, row]) / np.maximum(held, 1.0)


def _by_stream(terms: SplitTerms, row: np.ndarray, stage: SlowestStage) -> list[np.ndarray]:
    """Return the seconds of one micro batch on the slowest stage, forward and backward, for each stream."""
    return [
        over_kinds(stage.layers, (terms.layers.forward[:, s] + terms.layers.backward[:, s])[:, row])
        + stage.has_embedding * terms.ends.embedding[s][row]
        + stage.has_head * terms.ends.head[s][row]
        for s in range(terms.layers.forward.shape[1])
    ]


def _of_whole_layers(problem: Problem, saved: np.ndarray, layer: LayerSeconds) -> np.ndarray:
    """Return the exposed seconds of moving a layer's ``saved`` bytes: the layers that leave share the time of all, evenly.

    Source: Transformer Engine's cpu_offload.py (layer_window_map): each has as many layers' passes as divide, the first ones
    that do not divide one more.
    """
    whole, more = divmod(problem.model.num_hidden_layers, problem.run.offload_layers)
    longer = more / problem.run.offload_layers
    each = [exposed_transfer(problem, saved, w * layer.forward, w * layer.backward) for w in (whole, whole + 1)]
    return (1 - longer) * each[0] + longer * each[1]


def _offload(problem: Problem, terms: SplitTerms, layouts: Layouts, layer: LayerSeconds, stage: SlowestStage) -> np.ndarray:
    """Return the seconds per micro batch that the slowest stage waits for activations on their way to and from the host:
    [layouts]. Modules are offloaded in all layers, layers whole and of a single stage.

    Of interleaved chunks only the last one's backward pass follows its forward pass at once; no other forward pass waits for
    what leaves (Megatron-Core's fine_grained_activation_offload.py, on_group_commit_forward and bulk_reload_group).
    """
    limit, row, level = problem.run.offload_layers, layouts.row, layouts.recompute
    if limit:
        moved, _ = terms.stages.recomputed(np.full(len(layouts), limit), row)
        return over_kinds(moved[0], _of_whole_layers(problem, terms.layers.saved[:, Recompute.NONE, row], layer))
    if not problem.run.offload_modules:
        return np.zeros(len(layouts))
    last, moved = 1.0 / terms.splits.vpp[row], terms.layers.offloaded
    whole = exposed_transfer(problem, moved[:, Recompute.NONE, row], layer.forward, layer.backward, last)
    again = exposed_transfer(problem, moved[:, level, row], layer.forward, layer.backward + layer.recompute, last)
    return over_kinds(stage.layers - stage.recomputed, whole) + over_kinds(stage.recomputed, again)
