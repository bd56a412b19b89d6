"""What one pipeline stage of every layout holds at its peak."""

from __future__ import annotations

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
from solver.step.gather_buffers import gather_buffers
from solver.step.gradient_buffers import embedding_gradient
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Layouts
from solver.step.memory import BOUND_GAPS, BOUND_SHARE, MEMORY_PARTS
from solver.step.parameter_groups import elements_of, shard_ranks, share_of_first_layer
from solver.step.stage_kinds import StageKinds
from solver.step.stage_seconds import end_recomputed
from solver.step.states import StateBytes, absent_gradients, stage_state
from solver.step.workspaces import exchange_bytes, workspace_bytes


class _StageBytes(NamedTuple):
    """Bytes of one stage.

    absent, late: gradients that do not exist yet while the loss is computed, and when the backward pass of the stage's first
    layer begins, [4 ZeRO stages, splits]. freed: share of the activations that is freed by the latter, [splits]. casts: arrays
    over layouts. Arrays over pipelines: activations; kept: logits and operands that wait; loss, backward: what is alive while
    the loss, or a layer's backward pass, runs.
    """

    state: StateBytes
    absent: np.ndarray
    late: np.ndarray
    freed: np.ndarray
    casts: Casts
    activations: np.ndarray
    kept: np.ndarray
    loss: np.ndarray
    backward: np.ndarray


class Sizes(NamedTuple):
    """Bytes of a stage, as in Memory: [layouts] each."""

    allocated: np.ndarray
    reserved: np.ndarray
    device: np.ndarray
    bound: np.ndarray


class StageMemory:
    """What a stage of every layout holds at its peak; what all stages share is computed once.

    priced: the splits of ``layouts``.
    """

    def __init__(self, priced: PricedSplits, layouts: Layouts, stages: StageKinds) -> None:
        self._priced, self._layouts, self._stages = priced, layouts, stages
        problem, table, key = priced.problem, priced.table, priced.key
        self._problem, self._key = problem, key
        first, self._pipeline = layouts.pipelines
        self._pipelines = layouts.at(first)
        splits = layouts.splits
        self._cell = layouts.zero * len(splits) + layouts.row  # of arrays [4 ZeRO stages, splits] that are flattened
        self._buffers = gather_buffers(priced).reshape(2, -1).take(self._cell, axis=1)
        self._shares = shard_ranks(problem, splits)
        self._activations = Activations(priced, self._pipelines, stages)
        self._workspaces = workspace_bytes(problem) + np.max([part.buffer[key] for part in table.layers], axis=0)
        if stay := problem.framework.memory.gathered_activation_buffers:
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
        state = held.state
        of_moments = state.weights, state.gradients, state.optimizer, state.update
        weights, gradients, optimizer, update = map(self._by_layout, of_moments)
        activations = held.activations[pipeline] + held.casts.saved
        moment = np.where(at_loss, 0, below.argmin(axis=0))
        absent = np.select([moment == 0, moment == 1], [self._by_layout(held.absent), self._by_layout(held.late)], 0.0)
        freed = np.select([moment == 0, moment == 1], [0.0, held.freed[row] * activations], activations)
        working = np.where(at_loss | (moment == 2), 0.0, held.backward[pipeline] + held.casts.at_a_time)
        at_loss_only = np.where(at_loss, held.loss[pipeline] + held.casts.at_loss, 0.0)
        buffers = np.where(at_loss, *self._buffers)
        passing = np.array([activations - freed, working, held.kept[pipeline] + at_loss_only, buffers])
        return np.stack([weights, gradients - absent, optimizer, self._workspaces[row], *passing]), absent, update

    def sums(self, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of stage ``stage`` that are allocated, and of these those that come and go: [layouts] each."""
        held = self._stage_bytes(stage)
        at_loss, loss, backward, below = self._moments(held)
        dynamic = (held.activations + held.kept)[self._pipeline] + held.casts.saved + np.where(at_loss, loss, backward)
        state = self._by_layout(held.state.held + self._workspaces)
        absent = np.where(at_loss, below[0], below.min(axis=0)) if held.absent.any() else 0.0
        if not held.state.update.any():
            return state - absent + dynamic, dynamic
        update = self._by_layout(held.state.update)
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
        first = held.freed[self._layouts.row] * activations + self._by_layout(held.late)
        at_end = activations + held.backward[self._pipeline] + held.casts.at_a_time
        return np.array([self._by_layout(held.absent), first, at_end])

    def _by_layout(self, table: np.ndarray) -> np.ndarray:
        """Return the entries of ``table``, [4 ZeRO stages, splits], that belong to the layouts: [layouts]."""
        return table.ravel().take(self._cell)

    def _stage_bytes(self, stage: int) -> _StageBytes:
        if stage not in self._held:
            self._held[stage] = self._estimated(stage)
        return self._held[stage]

    def _estimated(self, stage: int) -> _StageBytes:
        """Return what a stage holds at its peak, but for workspaces and gathered weights."""
        problem, splits, row, stages = self._problem, self._layouts.splits, self._pipelines.row, self._stages
        layers = stages.counts[stage].sum(axis=0)
        flight = self._micro_batches_in_flight(stage, layers)
        activations, backward = self._activations.in_flight(stage, flight), self._activations.backward(stage)
        kept, loss = self._of_head(stages.has_head[stage, row])
        freed = 1 - 1 / np.maximum(layers, 1)
        if problem.framework.memory.half_gradients_at_end:
            backward = backward + self._half_gradients(stage, activations / np.maximum(flight, 1.0)[row], freed)
        zero_stages = self._layouts.zero_stages
        state = stage_state(self._priced, self._shares, stages, stage, zero_stages)
        absent = absent_gradients(problem, splits, state)
        late = absent
        if absent.any():
            late = absent * share_of_first_layer(self._priced, stages, stage, self._shares)
        casts = casts_of(cast_weights(self._priced, stages, stage), flight, layers, self._layouts)
        return _StageBytes(state, absent, late, freed, casts, activations, kept, loss, backward)

    def _micro_batches_in_flight(self, stage: int, layers: np.ndarray) -> np.ndarray:
        """Return the micro batches whose activations a stage holds, averaged over its ``layers``: [splits]."""
        problem, splits, index = self._problem, self._layouts.splits, self._stages.index[stage]
        schedule, m, group = splits.schedule, splits.num_micro_batches, splits.micro_batch_group
        if problem.chunks:
            flight = stated_layers_in_flight(schedule, m, splits.pp, problem.chunks, index, group)
        else:
            short = np.where(
                index == 0,
                splits.account_for_embedding_in_pipeline_split,
                splits.account_for_loss_in_pipeline_split * self._stages.has_end[stage],
            )
            flight = layers_in_flight(schedule, m, splits.pp, splits.vpp, layers, short, index, group)
        return flight / np.maximum(layers, 1)

    def _of_head(self, has_head: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bytes of the head that wait, and those that live while the loss is computed: [pipelines] each.

        has_head: whether the stage has the head, [pipelines]. The loss's memory is freed before the last layer's backward pass.
        """
        problem, splits, row, table = self._problem, self._layouts.splits, self._pipelines.row, self._priced.table.head
        schedule, m, of_row = splits.schedule, splits.num_micro_batches, self._key[self._pipelines.row]
        dropped = np.where(end_recomputed(problem, self._pipelines), self._pipelines.recompute, 0)
        logits, transient = table.saved[dropped, of_row], table.transient[of_row]
        # the head's backward follows its forward immediately, so one micro batch of logits is alive; GPipe keeps all
        kept = has_head * logits * np.where(is_schedule(schedule, "gpipe"), m - 1.0, 0.0)[row]
        # operands of the head's weight gradients that wait: for the drain, or as long as zero-bubble schedules let them
        waiting = np.where(
            is_schedule(schedule, "zb-h1", *AUTOMATIC), np.minimum(automatic_limit(schedule, splits.pp), m) - 1.0, 0.0
        )
        deferred = self._deferred_operands[self._key] * m * deferred_share(problem.run, m)
        kept += has_head * (self._head_operands[self._key] * waiting + deferred)[row]
        loss = has_head * (logits + transient)
        if problem.framework.memory.keeps_logits:
            return kept + table.output[0, of_row] * has_head, loss
        if problem.framework.pipeline.keeps_messages:
            output, beside_loss = table.output[:, of_row] * has_head * (splits.pp > 1)[row]
            return kept + output, loss + beside_loss - output
        return kept, loss

    def _half_gradients(self, stage: int, of_micro_batch: np.ndarray, freed: np.ndarray) -> np.ndarray:
        """Return 16-bit gradients at the end of the backward pass, beyond activations that are freed by then; [pipelines].

        of_micro_batch: activations of one micro batch [pipelines]. freed: their share that is no longer there [splits].
        """
        row = self._pipelines.row
        of_groups = (elements_of(self._priced, self._stages, stage, name) for name in self._shares)
        trained = sum(of_groups, np.zeros(len(self._key)))
        held: np.ndarray = np.maximum(HALF * trained[row] - freed[row] * of_micro_batch, 0.0)
        return held

    def totals(self, allocated: np.ndarray, dynamic: np.ndarray, stage: int) -> Sizes:
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
        return Sizes(allocated, reserved, device, device + BOUND_GAPS * dynamic + BOUND_SHARE * allocated)

    @cached_property
    def _embedding_gradient(self) -> np.ndarray:
        return embedding_gradient(self._priced)

    @cached_property
    def _gathered(self) -> np.ndarray:
        """Bytes of an activation of one micro batch that a tensor group gathers; shape [splits]."""
        splits, run = self._layouts.splits, self._problem.run
        tokens = splits.tokens(run.seq_len) * (splits.tp > 1)
        return tokens * self._problem.model.hidden_size * self._problem.element_bytes.activation
