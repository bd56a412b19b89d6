"""Peak memory of every layout: what the fullest pipeline stage holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from solver.schedule.automatic import automatic_limit
from solver.schedule.kinds import AUTOMATIC, is_schedule
from solver.schedule.stages import layers_in_flight, stated_layers_in_flight
from solver.spec.choices import TpMode
from solver.spec.recipes import HALF
from solver.step.activations import Activations
from solver.step.autocast import Casts, cast_weights, casts_of
from solver.step.deferred_head import deferred_share, projection_operands
from solver.step.layouts import Layouts, Splits
from solver.step.parameter_groups import elements_of, shard_ranks, share_of_first_layer, stages_of
from solver.step.problem import LayerTable, Problem
from solver.step.stage_kinds import StageKinds, over_kinds
from solver.step.stage_seconds import end_recomputed
from solver.step.states import StateBytes, embedding_gradient, gather_buffers, stage_state
from solver.step.workspaces import exchange_bytes, workspace_bytes

#: Parts of the peak, in the order of the rows of Memory.parts.
MEMORY_PARTS = ("weights", "gradients", "optimizer", "workspaces", "activations", "backward_buffers", "loss", "gather_buffers")
#: The upper bound adds BOUND_SHARE of the allocated bytes, by which measured peaks of known frameworks exceed the estimate, and
#: BOUND_GAPS of those that come and go, because allocator gaps differ between runs.
BOUND_SHARE, BOUND_GAPS = 0.03, 0.15
#: The upper bound fits; the estimate fits, but not the bound; the estimate does not fit.
FITS, AT_RISK, OUT_OF_MEMORY = VERDICTS = ("FITS", "AT RISK", "OUT OF MEMORY")


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest stage, arrays over layouts (or on every stage of one layout).

    allocated: the framework's peak counter. reserved: with the slack of the caching allocator. device: with the runtime outside
    the allocator, most on the fullest stage. A layout fits if this does, and surely if ``bound``, of any stage the largest.
    """

    allocated: np.ndarray
    reserved: np.ndarray
    device: np.ndarray
    bound: np.ndarray
    stage: np.ndarray  #: number of that stage, 0 is the first
    on_last_stage: np.ndarray  #: whether it is the last of several
    assemble: Callable[[], np.ndarray]  #: makes ``parts``, which searches do not look at

    @cached_property
    def parts(self) -> np.ndarray:
        """Bytes that add up to ``allocated``: [parts, layouts]."""
        return self.assemble()

    def verdict(self, index: int, limit: float) -> str:
        """Return whether a layout fits in ``limit`` bytes: one of VERDICTS."""
        return VERDICTS[int(self.device[index] > limit) + int(self.bound[index] > limit)]

    def take(self, index: np.ndarray) -> Memory:
        """Return that of the chosen layouts."""
        sizes = self.allocated[index], self.reserved[index], self.device[index], self.bound[index]
        return Memory(*sizes, self.stage[index], self.on_last_stage[index], lambda: self.parts[:, index])


class _StageBytes(NamedTuple):
    """Bytes of one stage. absent, late: of the gradients what is not there while the loss is computed, and while the backward
    pass of its first layer begins, [4 ZeRO stages, splits]; freed: the share of the activations that is not there any more
    then, [splits]. casts: arrays over layouts.
    Arrays over pipelines: activations; kept: logits and operands that wait; loss, backward: what lives while the loss, or a
    layer's backward pass, runs."""

    state: StateBytes
    absent: np.ndarray
    late: np.ndarray
    freed: np.ndarray
    casts: Casts
    activations: np.ndarray
    kept: np.ndarray
    loss: np.ndarray
    backward: np.ndarray


class _Sizes(NamedTuple):
    """Bytes of a stage, as in Memory: [layouts] each."""

    allocated: np.ndarray
    reserved: np.ndarray
    device: np.ndarray
    bound: np.ndarray


class PeakMemory:
    """What a stage of every layout holds at its peak; what all stages share is computed once.

    key: index of each split's layer in ``table``, shape [splits].
    """

    def __init__(self, problem: Problem, table: LayerTable, key: np.ndarray, layouts: Layouts, stages: StageKinds) -> None:
        self._problem, self._table, self._key, self._layouts, self._stages = problem, table, key, layouts, stages
        first, self._pipeline = layouts.pipelines
        self._pipelines = layouts.at(first)
        splits = layouts.splits
        self._cell = layouts.zero * len(splits) + layouts.row  # of arrays [4 ZeRO stages, splits] that are flattened
        self._buffers = gather_buffers(problem, table, key, splits).reshape(2, -1).take(self._cell, axis=1)
        self._shares = shard_ranks(problem, splits)
        self._activations = Activations(problem, table, key, self._pipelines, stages)
        self._workspaces = workspace_bytes(problem) + np.max([part.buffer[key] for part in table.layers], axis=0)
        if stay := problem.framework.memory.gather_buffers:
            self._workspaces = self._workspaces + stay * (splits.mode == TpMode.MSP) * self._gathered
        keys, element = table.keys, problem.element_bytes.activation
        self._head_operands = projection_operands(table.head, element)
        self._deferred_operands = projection_operands(table.head, element, np.where(keys.is_mode(TpMode.MSP), keys.tp, 1))
        self._held: dict[int, _StageBytes] = {}

    @property
    def stages(self) -> int:
        """How many stages of the StageKinds there are."""
        return len(self._stages.index)

    def parts(self, stage: int) -> np.ndarray:
        """Return the bytes of stage ``stage`` of the StageKinds: [parts, layouts]."""
        parts, absent, update = self.parts_of_passes(stage)
        passing = slice(MEMORY_PARTS.index("activations"), len(MEMORY_PARTS))
        at_step = update > parts[passing].sum(axis=0) - absent
        parts[MEMORY_PARTS.index("gradients")] += np.where(at_step, absent, 0.0)
        parts[MEMORY_PARTS.index("optimizer")] += np.where(at_step, update, 0.0)
        parts[passing] = np.where(at_step, 0.0, parts[passing])
        return parts

    def parts_of_passes(self, stage: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the bytes of a stage at the peak of its passes, [parts, layouts], the gradients that are not there yet then,
        and what lives while the optimizer's step runs, [layouts] each."""
        row, pipeline = self._layouts.row, self._pipeline
        held = self._stage_bytes(stage)
        at_loss, _, _, below = self._moments(held)
        weights, gradients, optimizer, update = (self._of_zero(table) for table in held.state)
        activations = held.activations[pipeline] + held.casts.saved
        moment = np.where(at_loss, 0, below.argmin(axis=0))
        absent = np.select([moment == 0, moment == 1], [self._of_zero(held.absent), self._of_zero(held.late)], 0.0)
        freed = np.select([moment == 0, moment == 1], [0.0, held.freed[row] * activations], activations)
        working = np.where(at_loss | (moment == 2), 0.0, held.backward[pipeline] + held.casts.at_a_time)
        there = np.where(at_loss, held.loss[pipeline] + held.casts.at_loss, 0.0), working
        buffers = np.where(at_loss, *self._buffers)
        passing = np.array([activations - freed, there[1], held.kept[pipeline] + there[0], buffers])
        return np.stack([weights, gradients - absent, optimizer, self._workspaces[row], *passing]), absent, update

    def sums(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of stage ``stage`` that are allocated, and of these those that come and go: [layouts] each."""
        held = self._stage_bytes(stage)
        at_loss, loss, backward, below = self._moments(held)
        dynamic = (held.activations + held.kept)[self._pipeline] + held.casts.saved + np.where(at_loss, loss, backward)
        state = self._of_zero(held.state.held + self._workspaces)
        absent = np.where(at_loss, below[0], below.min(axis=0)) if held.absent.any() else 0.0
        if not held.state.update.any():
            return state - absent + dynamic, dynamic
        update = self._of_zero(held.state.update)
        return state + np.maximum(dynamic - absent, update), np.where(update > dynamic - absent, update, dynamic)

    def _moments(self, held: _StageBytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return whether the loss needs more than a layer's backward pass, what comes and goes at each, [layouts] each, and
        by how much the backward pass stays below it (_below)."""
        loss = held.loss[self._pipeline] + self._buffers[0] + held.casts.at_loss
        backward = held.backward[self._pipeline] + self._buffers[1] + held.casts.at_a_time
        if not held.absent.any():
            return loss > backward, loss, backward, np.zeros((3, 1))
        below = self._below(held)
        return loss - below[0] > backward - below.min(axis=0), loss, backward, below

    def _below(self, held: _StageBytes) -> np.ndarray:
        """Return the bytes by which the backward pass is below all activations, all gradients and a layer's working set at
        three moments, of which the largest counts: when it begins, when its first layer does, and at its end; [3, layouts].

        The more it has of the gradients, the fewer activations are left.
        """
        activations = held.activations[self._pipeline] + held.casts.saved
        first = held.freed[self._layouts.row] * activations + self._of_zero(held.late)
        at_end = activations + held.backward[self._pipeline] + held.casts.at_a_time
        return np.array([self._of_zero(held.absent), first, at_end])

    def _of_zero(self, table: np.ndarray) -> np.ndarray:
        """Return the entries of ``table``, [4 ZeRO stages, splits], that belong to the layouts: [layouts]."""
        return table.ravel().take(self._cell)

    def _stage_bytes(self, stage: int) -> _StageBytes:
        if stage not in self._held:
            self._held[stage] = self._estimated(stage)
        return self._held[stage]

    def _estimated(self, stage: int) -> _StageBytes:
        """Return what a stage holds at its peak, but for workspaces and gathered weights."""
        problem, splits, row, stages = self._problem, self._layouts.splits, self._pipelines.row, self._stages
        schedule, m, index = splits.schedule, splits.num_micro_batches, stages.index[stage]
        layers = stages.counts[stage].sum(axis=0)
        short = np.where(index == 0, splits.account_for_embedding_in_pipeline_split,
                         splits.account_for_loss_in_pipeline_split * stages.has_end[stage])  # fmt: skip
        group = splits.micro_batch_group
        if problem.chunks:
            flight = stated_layers_in_flight(schedule, m, splits.pp, problem.chunks, index, group)
        else:
            flight = layers_in_flight(schedule, m, splits.pp, splits.vpp, layers, short, index, group)
        flight = flight / np.maximum(layers, 1)
        activations, backward = self._activations.in_flight(stage, flight), self._activations.backward(stage)
        dropped = np.where(end_recomputed(problem, self._pipelines), self._pipelines.recompute, 0)
        head, transient = self._table.head.saved[dropped, self._key[row]], self._table.head.transient[self._key[row]]
        has_head = stages.has_head[stage, row]
        # the head's backward follows its forward immediately, so one micro batch of logits is alive; GPipe keeps all
        kept_logits = has_head * head * np.where(is_schedule(schedule, "gpipe"), m - 1.0, 0.0)[row]
        # operands of the head's weight gradients that wait: for the drain, or as long as zero-bubble schedules let them
        waiting = np.where(
            is_schedule(schedule, "zb-h1", *AUTOMATIC), np.minimum(automatic_limit(schedule, splits.pp), m) - 1.0, 0.0
        )
        deferred = self._deferred_operands[self._key] * m * deferred_share(problem.run, m)
        kept_logits += has_head * (self._head_operands[self._key] * waiting + deferred)[row]
        # the loss's memory is freed before the last layer's backward pass: the larger of the two counts
        loss = has_head * (head + transient)
        freed = 1 - 1 / np.maximum(layers, 1)
        if problem.framework.memory.half_gradients_at_end:
            backward = backward + self._half_gradients(stage, activations / np.maximum(flight, 1.0)[row], freed)
        if problem.framework.pipeline.keeps_messages:
            output, beside_loss = self._table.head.output[:, self._key[row]] * has_head * (splits.pp > 1)[row]
            kept_logits += output
            loss = loss + beside_loss - output
        zero_stages = self._layouts.zero_stages
        state = stage_state(problem, self._table, self._key, self._shares, splits, stages, stage, zero_stages)
        absent = _absent_gradients(problem, splits, state.gradients)
        late = absent
        if absent.any():
            late = absent * share_of_first_layer(problem, self._table, self._key, stages, stage, self._shares)
        casts = casts_of(cast_weights(problem, self._table, self._key, stages, stage), flight, layers, self._layouts)
        return _StageBytes(state, absent, late, freed, casts, activations, kept_logits, loss, backward)

    def _half_gradients(self, stage: int, of_micro_batch: np.ndarray, freed: np.ndarray) -> np.ndarray:
        """Return 16-bit gradients at the end of the backward pass, beyond activations that are freed by then; [pipelines].

        of_micro_batch: activations of one micro batch [pipelines]. freed: their share that is no longer there [splits].
        """
        problem, row = self._problem, self._pipelines.row
        of_groups = (elements_of(problem, self._table, self._key, self._stages, stage, name) for name in self._shares)
        trained = sum(of_groups, np.zeros(len(self._key)))
        held: np.ndarray = np.maximum(HALF * trained[row] - freed[row] * of_micro_batch, 0.0)
        return held

    def totals(self, allocated: np.ndarray, dynamic: np.ndarray, stage: int) -> _Sizes:
        """Return the bytes of a stage, as in Memory, from its sums. stage: its index."""
        memory, splits = self._problem.framework.memory, self._layouts.splits
        alone, several = memory.gaps(self._problem.run.expandable_segments)
        share = np.where(splits.pp == 1, alone, several)[self._layouts.row]
        reserved = allocated + share * dynamic
        if alone or several:
            reserved = reserved + (self._embedding_gradient * (self._stages.index[stage] == 0))[self._layouts.row]
        if memory.collective_gaps:
            layers = self._stages.layers[stage, self._layouts.row]
            reserved = reserved + memory.collective_gaps * layers * self._gathered[self._layouts.row]
        device = reserved + memory.runtime_bytes + exchange_bytes(self._problem, splits)[self._layouts.row]
        return _Sizes(allocated, reserved, device, device + BOUND_GAPS * dynamic + BOUND_SHARE * allocated)

    @cached_property
    def _embedding_gradient(self) -> np.ndarray:
        return embedding_gradient(self._problem, self._table, self._key, self._layouts.splits)

    @cached_property
    def _gathered(self) -> np.ndarray:
        """Bytes of an activation of one micro batch that a tensor group gathers; shape [splits]."""
        splits, run = self._layouts.splits, self._problem.run
        tokens = splits.tokens(run.seq_len) * (splits.tp > 1)
        return tokens * self._problem.model.hidden_size * self._problem.element_bytes.activation


def least_memory(problem: Problem, table: LayerTable, key: np.ndarray, layouts: Layouts) -> np.ndarray:
    """Return bytes that each layout does not go below: states, activations and the runtime's of its first stage; [layouts].

    Where a part of the layers is recomputed, as if all were. Of the only micro batch of a step there are the gradients, or
    instead of them the activations.
    """
    splits = layouts.splits
    stages = stages_of(problem, splits)
    shares = shard_ranks(problem, splits)
    zero_stages = layouts.zero_stages
    state = stage_state(problem, table, key, shares, splits, stages, 0, zero_stages)
    if problem.run.offload_layers or problem.run.offload_modules or problem.chunks:
        return state.held[layouts.zero, layouts.row]
    index, counts = stages.index[0], stages.counts[0]
    layers, short = counts.sum(axis=0), splits.account_for_embedding_in_pipeline_split
    group = splits.micro_batch_group
    flight = layers_in_flight(splits.schedule, splits.num_micro_batches, splits.pp, splits.vpp, layers, short, index, group)
    kept = over_kinds(counts[:, None], np.array([part.saved[:, key] for part in table.layers]))
    activations = flight / np.maximum(layers, 1) * kept
    shared = np.where(layouts.recomputes_groups, problem.run.recompute_group, 1)  # an input of so many layers
    saved = activations[layouts.recompute, layouts.row] / shared
    absent = _absent_gradients(problem, splits, state.gradients)[layouts.zero, layouts.row]  # when the backward pass begins
    held = state.held[layouts.zero, layouts.row] + np.maximum(saved - absent, 0.0)
    return np.asarray(held + problem.framework.memory.runtime_bytes)


def _absent_gradients(problem: Problem, splits: Splits, gradients: np.ndarray) -> np.ndarray:
    """Return the bytes of a stage's ``gradients`` that are not there until the backward pass of a step's only micro batch makes
    them, [4 ZeRO stages, splits]: all where the optimizer freed them, but for views of DDP's buckets, which stay."""
    memory = problem.framework.memory
    absent = gradients * ((splits.num_micro_batches == 1) & memory.frees_gradients)
    if memory.bucket_views:
        absent[:3] *= splits.dp * splits.cp == 1
    return absent


def peak_memory(problem: Problem, table: LayerTable, key: np.ndarray, layouts: Layouts) -> Memory:
    """Return the peak bytes of each layout on its fullest stage.

    First stage: most micro batches in flight. Middle ones: perhaps more layers, or more with experts. Last: head and loss.
    key: index of each split's layer in ``table``.
    """
    stages, row = stages_of(problem, layouts.splits), layouts.row
    peak = PeakMemory(problem, table, key, layouts, stages)
    fullest, at = peak.totals(*peak.sums(0), 0), np.zeros(len(layouts), dtype=np.int64)
    for stage in range(1, len(stages.index)):
        alike = not (problem.run.recompute_stage_layers or problem.framework.pipeline.keeps_messages)
        if stage > 1 and alike and (stages.counts[stage] <= stages.counts[0]).all():  # a micro batch less of no more layers
            continue
        sizes = peak.totals(*peak.sums(stage), stage)
        fuller = sizes.device > fullest.device
        bound = np.maximum(sizes.bound, fullest.bound)  # of any stage: one with less now may have more that comes and goes
        allocated, reserved, device = (np.where(fuller, *pair) for pair in zip(sizes[:3], fullest[:3], strict=True))
        fullest = _Sizes(allocated, reserved, device, bound)
        at = np.where(fuller, stage, at)
    number, is_last = stages.index[at, row], stages.has_end[at, row]

    def assemble() -> np.ndarray:
        parts = peak.parts(0)
        for stage in np.unique(at[at > 0]):
            parts = np.where(at == stage, peak.parts(int(stage)), parts)
        return parts

    return Memory(*fullest, number, is_last & (number > 0), assemble)
