"""Seconds of one micro batch on the stages of a pipeline: of their layers, of embedding and head, and of their sends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from solver.schedule.closed_forms import StageWork
from solver.schedule.kinds import splits_backward
from solver.schedule.warm_up import unpaired_micro_batches
from solver.spec.run import Run
from solver.step.deferred_head import deferred_share
from solver.step.layouts import Layouts
from solver.step.op_estimates import STREAMS
from solver.step.problem import Problem
from solver.step.sharded_weights import exposed_by_sharding
from solver.step.stage_kinds import first_chunk, over_kinds
from solver.step.terms import SplitTerms, overlapping_sends

#: Messages between two neighbours while the pipeline fills and drains: one forward, one backward.
FILLING_SENDS = 2.0


@dataclass(frozen=True)
class SlowestStage:
    """The bottleneck stage: its layers of each kind and how many of them are recomputed, [kinds, layouts]; whether it holds
    embedding and head (0 or 1), [layouts]."""

    layers: np.ndarray
    recomputed: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray

    def take(self, index: np.ndarray | int) -> SlowestStage:
        return SlowestStage(self.layers[:, index], self.recomputed[:, index], self.has_embedding[index], self.has_head[index])


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
        return (limit[-1] if limit.ndim == 2 else limit) > 0
    return (layouts.recompute_layers < 0) & (not problem.run.recompute_stage_layers)


class LayerSeconds(NamedTuple):
    """Seconds of one layer of each kind and one micro batch: [kinds, layouts].

    recompute: of its second forward pass. fsdp: exposed by ZeRO-3; fsdp_extra: what recomputation adds to that. hidden:
    exchange of tokens beside another micro batch. without_recompute: all but recomputation. recompute_extra: what it adds.
    """

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray
    fsdp: np.ndarray
    fsdp_extra: np.ndarray
    hidden: np.ndarray
    without_recompute: np.ndarray
    recompute_extra: np.ndarray


def layer_seconds(terms: SplitTerms, layouts: Layouts, run: Run) -> tuple[LayerSeconds, np.ndarray]:
    """Return the seconds of the layers, and those of ZeRO-3's embedding and head, [layouts]."""
    row = layouts.row
    forward, backward = terms.layers.forward.sum(axis=1)[:, row], terms.layers.backward.sum(axis=1)[:, row]
    recompute = terms.layers.recompute[:, layouts.recompute, row]
    fsdp, fsdp_extra, root = exposed_by_sharding(terms.once.sharded, layouts, forward, backward, recompute)
    both, nothing = forward + backward, np.zeros(forward.shape)
    hidden = _hidden_exchange(terms, layouts, both, run) if run.moe_exchange_overlap else nothing
    without_recompute, extra = forward + backward + fsdp - hidden, recompute + fsdp_extra
    return LayerSeconds(forward, backward, recompute, fsdp, fsdp_extra, hidden, without_recompute, extra), root


def _hidden_exchange(terms: SplitTerms, layouts: Layouts, both: np.ndarray, run: Run) -> np.ndarray:
    """Return the seconds per layer that the exchange of tokens, and kernels on its stream, take no more beside another micro
    batch: [kinds, layouts].

    both: forward and backward, one after the other. Weight gradients are delayed where the run says so, or the schedule splits
    the backward pass. In the steady state of a stage, each forward pass of a chunk runs together
    with the backward pass of an earlier micro batch (DeepSeek-V3's DualPipe, arXiv 2412.19437 section 3.2.1; Megatron-Core's
    combined_1f1b.py), so the exchange of both runs beside the compute of both; filling and draining the pipeline does not.
    """
    row, splits = layouts.row, terms.splits
    pp, vpp, m = splits.pp[row], splits.vpp[row], splits.num_micro_batches[row]
    alone = unpaired_micro_batches(splits.schedule[row], pp, vpp, splits.micro_batch_group[row])
    share = np.maximum(m - np.maximum(alone, 1), 0) / m
    splits_passes = run.delay_wgrad_compute | splits_backward(splits.schedule[row])
    together = np.where(splits_passes, terms.layers.paired[:, 1, row], terms.layers.paired[:, 0, row])
    ep = STREAMS.index("ep")
    sent = (terms.layers.forward[:, ep] + terms.layers.backward[:, ep])[:, row]
    return np.where(sent > 0, share * np.maximum(both - together, 0.0), 0.0)


class EndSeconds(NamedTuple):
    """Seconds of one micro batch at the ends of a pipeline: arrays over layouts. Forward and backward together."""

    embedding: np.ndarray
    head: np.ndarray
    recompute: np.ndarray  #: of the head: its second forward pass
    deferred: np.ndarray  #: the head's weight gradients that run after the last pass, and are not in ``head``


def ends_of(problem: Problem, terms: SplitTerms, layouts: Layouts) -> EndSeconds:
    """Return the seconds of embedding and head."""
    row = layouts.row
    deferred = deferred_share(problem.run, terms.splits.num_micro_batches[row]) * terms.ends.projection_weight_grad[row]
    again = np.where(end_recomputed(problem, layouts), terms.ends.head_recompute[layouts.recompute, row], 0.0)
    return EndSeconds(
        terms.ends.embedding.sum(axis=0)[row], terms.ends.head.sum(axis=0)[row] + again - deferred, again, deferred
    )


class Sends(NamedTuple):
    """Seconds for which a stage's passes wait for their messages, per micro batch: arrays over layouts."""

    between: np.ndarray  #: a middle stage: exchanges with both neighbours
    at_end: np.ndarray  #: an end of the pipeline
    filling: np.ndarray  #: one micro batch on its way through all stages and back, while the pipeline fills and drains


def sends_of(problem: Problem, terms: SplitTerms, layouts: Layouts) -> Sends:
    """Return the seconds of the sends that passes wait for.

    Megatron's interleaved schedule overlaps sends with the next chunk's compute; automatic schedules wait for a message where
    they need it.
    """
    row, splits = layouts.row, terms.splits
    pp, vpp = splits.pp[row], splits.vpp[row]
    blocking = problem.framework.pipeline.blocking_sends
    never = overlaps_sends(problem, terms, layouts) | splits.automatic[row]
    between = np.where(never, 0.0, blocking * vpp * terms.send_recv[row])
    # an end of the pipeline has one neighbour: of two exchanges for each chunk it makes one less, and where a V turns each
    less = np.where(splits.v_shaped[row], 0.5, 1 / (2.0 * vpp))
    at_end = np.where(pp > 1, between * (1 - less), between)
    return Sends(between, at_end, between * (pp - 1) * FILLING_SENDS / blocking)


def overlaps_sends(problem: Problem, terms: SplitTerms, layouts: Layouts) -> np.ndarray:
    """Return whether each layout's sends run beside the next chunk's compute: bool [layouts]."""
    return overlapping_sends(problem, terms.splits)[layouts.row]


@dataclass(frozen=True)
class PipelineStages:
    """What the seconds of all stages are made of. limit: layers that a stage recomputes at most."""

    terms: SplitTerms
    layouts: Layouts
    layer: LayerSeconds
    ends: EndSeconds
    sends: Sends
    limit: np.ndarray

    def take(self, of: np.ndarray) -> PipelineStages:
        layer = LayerSeconds(*(each[:, of] for each in self.layer))
        ends, sends = EndSeconds(*(each[of] for each in self.ends)), Sends(*(each[of] for each in self.sends))
        return PipelineStages(self.terms, self.layouts.at(of), layer, ends, sends, self.limit[..., of])

    @property
    def filling(self) -> np.ndarray:
        """Seconds of one micro batch on its way through all stages and back, while the pipeline fills and drains: [layouts]."""
        terms, row = self.terms, self.layouts.row
        _, recomputed = terms.stages.recomputed(self.limit, row)
        layers = over_kinds(terms.stages.totals[:, None], self.layer.without_recompute) + over_kinds(
            recomputed, self.layer.recompute_extra
        )
        return layers + self.ends.embedding + self.ends.head + self.sends.filling

    @property
    def draining(self) -> np.ndarray:
        """Seconds of the backward passes of one chunk of every stage but the last, during which that one waits: [layouts]."""
        kinds, row = self.terms.stages, self.layouts.row
        of_stages, of_all = kinds.recomputed(self.limit, row)
        ends = kinds.has_end[:, row]
        last = ((np.cumsum(ends, axis=0) == 1) & ends)[:, None]  # with pp 1 the first stage, which padding repeats
        layers = kinds.totals[:, None] - (kinds.counts[:, :, row] * last).sum(axis=0)
        again = of_all - (of_stages * last).sum(axis=0)
        seconds = over_kinds(layers, self.layer.backward) + over_kinds(again, self.layer.recompute)
        return seconds / self.terms.splits.vpp[row]


class Bottleneck(NamedTuple):
    """Seconds of one micro batch on the slowest stage, of them the sends, and what it holds; arrays over layouts."""

    seconds: np.ndarray
    send_recv: np.ndarray
    stage: SlowestStage


def bottleneck(stages: PipelineStages) -> Bottleneck:
    """Return the slowest stage, of equal ones the first, else the last.

    The first stage stands for middle ones of as many layers where there are any, so it waits for as many sends.
    """
    row, kinds, ends, layer = stages.layouts.row, stages.terms.stages, stages.ends, stages.layer
    counts, has_embedding, has_head = kinds.counts[:, :, row], kinds.has_embedding[:, row], kinds.has_head[:, row]
    recomputed, _ = kinds.recomputed(stages.limit, row, counts)
    sent = np.where((has_head > 0) | (stages.terms.splits.pp[row] == 2), stages.sends.at_end, stages.sends.between)
    seconds = np.array(
        [
            over_kinds(counts[s], layer.without_recompute)
            + over_kinds(recomputed[s], layer.recompute_extra)
            + has_embedding[s] * ends.embedding
            + has_head[s] * ends.head
            + sent[s]
            for s in range(len(counts))
        ]
    )
    slowest = np.argmax(seconds, axis=0)
    chosen = slowest, np.arange(len(row))
    stage = SlowestStage(
        counts.transpose(0, 2, 1)[chosen].T, recomputed.transpose(0, 2, 1)[chosen].T, has_embedding[chosen], has_head[chosen]
    )
    return Bottleneck(seconds[chosen], sent[chosen], stage)


def stage_work(stages: PipelineStages, everywhere: np.ndarray, at_ends: np.ndarray) -> StageWork:
    """Return the seconds of every stage that can be the slowest, by pass.

    everywhere: what every stage waits for besides, in each micro batch. at_ends: the same of the ends; the slowest
    stage waits for it too.
    """
    row, kinds, splits = stages.layouts.row, stages.terms.stages, stages.terms.splits
    counts, index, pp, of_chunk = kinds.counts[:, :, row], kinds.index[:, row], splits.pp[row], 1 / splits.vpp[row]
    recomputed, recomputed_of_all = kinds.recomputed(stages.limit, row, counts)
    head, half = kinds.has_head[:, row], stages.sends.between / 2  # a pass waits for one exchange
    each, later = [], []
    for s, (layers, again) in enumerate(zip(*kinds.after(stages.limit, row), strict=True)):
        after = pp - 1 - index[s]
        sent = (1 - (after == 0) * of_chunk) * half, (1 - (index[s] == 0) * of_chunk) * half + everywhere + at_ends
        each.append(_passes(stages, counts[s], recomputed[s], (kinds.has_embedding[s, row], head[s]), sent))
        sent = np.maximum(after - of_chunk, 0) * half, after * (half + everywhere)
        later.append(_passes(stages, layers, again, (0.0, (after > 0) * 1.0), sent))
    filling = stages.sends.filling / 2 * (pp - of_chunk) / np.maximum(pp - 1, 1)  # of every chunk, not only of the first ones
    sent = filling, filling + pp * everywhere + at_ends
    total = _passes(stages, np.repeat(kinds.totals[:, None], len(row), axis=1), recomputed_of_all, (1.0, 1.0), sent)
    return StageWork(np.stack(each, axis=1), np.stack(later, axis=1), total, index)


def chunk_work(stages: PipelineStages, everywhere: np.ndarray, at_ends: np.ndarray) -> np.ndarray:
    """Return the seconds of the first chunk of V-shaped stages, of the last and of any other, by pass: [3, 3, layouts].

    everywhere, at_ends: as in stage_work. The first stage has the first chunk and the last one; layers of several kinds are
    divided between them as all its layers are.
    """
    row, kinds, splits = stages.layouts.row, stages.terms.stages, stages.terms.splits
    counts = kinds.counts[:, :, row]
    recomputed, _ = kinds.recomputed(stages.limit, row, counts)
    embedding, loss = splits.account_for_embedding_in_pipeline_split[row], splits.account_for_loss_in_pipeline_split[row]
    held = np.maximum(kinds.layers[0, row], 1.0)
    share = first_chunk(held, embedding, loss) / held
    half, others = stages.sends.between / 4, (kinds.index[:, row] > 0)[:, None]  # a pass waits for one exchange
    turning = half * np.where(splits.pp[row] == 2, 0.5, 1.0)  # half of the last stage's passes do
    waits, nothing = (everywhere + at_ends) / 2, np.zeros(len(row))
    first = _passes(stages, counts[0] * share, recomputed[0] * share, (1.0, 0.0), (half, waits))
    last = _passes(stages, counts[0] * (1 - share), recomputed[0] * (1 - share), (0.0, 1.0), (nothing, half + waits))
    each = [
        _passes(stages, counts[s] / 2, recomputed[s] / 2, (0.0, 0.0), (turning, turning + waits)) * others[s]
        for s in range(1, len(counts))
    ]
    seconds = np.array(each)
    slowest = np.argmax(seconds.sum(axis=1), axis=0)
    return np.array([first, last, np.take_along_axis(seconds, slowest[None, None], axis=0)[0]])


def _passes(
    stages: PipelineStages,
    layers: np.ndarray,
    recomputed: np.ndarray,
    ends: tuple[Any, Any],
    sent: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Return the seconds of forward pass, input gradients and weight gradients of ``layers``: [3, layouts].

    ends: whether embedding and head are among them (0 or 1). sent: what the first two wait for.
    """
    row, terms, layer, (first, last) = stages.layouts.row, stages.terms, stages.layer, ends
    forward = (
        over_kinds(layers, layer.forward) + first * terms.ends.embedding_forward[row] + last * terms.ends.head_forward[row]
    )
    both = (
        over_kinds(layers, layer.without_recompute)
        + over_kinds(recomputed, layer.recompute_extra)
        + first * stages.ends.embedding
        + last * stages.ends.head
    )
    split = splits_backward(terms.splits.schedule[row])
    weights = split * (over_kinds(layers, terms.layers.weight_grad[:, row]) + last * terms.ends.head_weight_grad[row])
    return np.array([forward + sent[0], both - forward - weights + sent[1], weights])
