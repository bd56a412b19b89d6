"""Peak memory of every layout: what the first and the last stage hold at their peaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from solver.layers.program import LINEARS, OTHERS
from solver.schedule.stages import is_schedule, layers_in_flight
from solver.spec.cluster import RUNTIME_BYTES
from solver.spec.precision import HALF
from solver.spec.strategy import TpMode
from solver.step.layouts import Layouts, Splits
from solver.step.problem import LayerTable, Problem
from solver.step.step_ops import parameter_groups, shard_ranks
from solver.step.terms import SplitTerms

#: Parts of the peak, in the order of the rows of Memory.parts.
PARTS = ("weights", "gradients", "optimizer", "activations", "backward_buffers", "loss", "gather_buffers")
STATIC_PARTS = 3  #: this many of the first parts are allocated once and stay


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest stage, arrays over layouts.

    allocated: the framework's peak counter. reserved: with the slack of the caching allocator. device: with the runtime outside
    the allocator; a layout fits if this fits. parts: [parts, layouts], add up to ``allocated``.
    """

    allocated: np.ndarray
    reserved: np.ndarray
    device: np.ndarray
    parts: np.ndarray
    on_last_stage: np.ndarray


@dataclass(frozen=True)
class StageContent:
    """One pipeline stage of every split; arrays of shape [splits] or scalars.

    index: 0 is the first. has_embedding, has_head: 0 or 1. short: as in solver.schedule.stages.layers_in_flight.
    """

    index: np.ndarray | int
    layers: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray
    short: np.ndarray | int = 0


def stage_state(
    problem: Problem, table: LayerTable, key: np.ndarray, shares: Mapping[str, np.ndarray], stage: StageContent
) -> np.ndarray:
    """Return the bytes of weights, gradients and optimizer states on a stage by ZeRO stage: [3, 4 ZeRO stages, splits].

    shares: ranks over which ZeRO shards the parameters, by group, each of shape [splits]. 16-bit weights, gradients in
    grad_dtype, fp32 master weights and two Adam moments (12 bytes; spec.precision has the other
    combinations), and the dummy gradients of one layer's linears where the framework keeps them. ZeRO-1 shards the 12 bytes,
    ZeRO-2 also the gradients, ZeRO-3 everything, and its sharded master weights are the only ones (Rajbhandari et al. 2020).
    """
    sizes = problem.element_bytes
    embedding = table.embedding.parameters[key] * stage.has_embedding
    head = table.head.parameters[key] * stage.has_head
    ends = np.maximum(embedding, head) if problem.model.tie_word_embeddings else embedding + head
    out = np.zeros((3, 4, len(key)))
    out[1] += HALF * table.layer.parameters_of[LINEARS][key] * problem.framework.memory.dummy_gradients
    for name, share in shares.items():
        elements = stage.layers * table.layer.parameters_of[name][key] + (ends if name == OTHERS else 0.0)
        for zero in range(4):
            partitioned = elements / share
            out[0, zero] += sizes.weight * elements if zero < 3 else 0.0
            out[1, zero] += sizes.gradient * (elements if zero < 2 else partitioned)
            out[2, zero] += (sizes.sharded if zero == 3 else sizes.states) * (elements if zero == 0 else partitioned)
    return out


def gather_buffers(problem: Problem, table: LayerTable, key: np.ndarray, splits: Splits) -> np.ndarray:
    """Return the bytes of all-gathered weights by ZeRO stage, shape [4, splits].

    ISP keeps two blocks of full weights (this one's and the next one's); FSDP keeps two all-gathered layers and one layer's
    whole gradients.
    """
    sizes = problem.element_bytes
    block = sizes.activation * table.layer.parameters_of[LINEARS][key] * splits.wp
    pool = np.where((splits.mode == TpMode.ISP) & (splits.wp > 1), 2 * block, 0.0)
    fsdp = table.layer.parameters[key] * (2 * sizes.activation + sizes.gradient)
    return np.array([pool, pool, pool, pool + fsdp])


class PeakMemory:
    """What a stage of every layout holds at its peak; what all stages share is computed once.

    key: index of each split's layer in ``table``, shape [splits].
    """

    def __init__(self, problem: Problem, table: LayerTable, key: np.ndarray, layouts: Layouts) -> None:
        self._problem, self._table, self._key, self._layouts = problem, table, key, layouts
        self._buffers = gather_buffers(problem, table, key, layouts.splits)[layouts.zero, layouts.row]
        groups = parameter_groups(problem, table, key, layouts.splits)
        self._shares = {name: shard_ranks(group, layouts.splits.zero_shard_size) for name, group in groups.items()}
        saved = table.layer.saved[:, key]
        self._kept, self._whole = saved[layouts.recompute, layouts.row], saved[0][layouts.row]
        limit = layouts.recompute_layers
        self._limit = np.where(limit < 0, problem.model.num_hidden_layers, limit)
        # the layer whose backward pass runs: all its saved tensors where it was recomputed, and its largest gradients
        recomputed = np.where(self._limit > 0, self._whole - self._kept, 0.0)
        self._backward = recomputed + table.layer.transient[key][layouts.row]

    def parts(self, stage: StageContent) -> np.ndarray:
        """Return the bytes of a stage: [parts, layouts]."""
        problem, splits, row = self._problem, self._layouts.splits, self._layouts.row
        schedule, m = splits.schedule, splits.num_micro_batches
        layers = np.broadcast_to(stage.layers, len(splits))
        flight = layers_in_flight(schedule, m, splits.pp, splits.vpp, layers, stage.short, stage.index) / np.maximum(layers, 1)
        recomputed = np.minimum(self._limit, layers[row])
        activations = flight[row] * (recomputed * self._kept + (layers[row] - recomputed) * self._whole)
        head, transient = self._table.head.saved[0][self._key], self._table.head.transient[self._key]
        # the head's backward follows its forward immediately, so one micro batch of logits is alive; GPipe keeps all
        kept_logits = stage.has_head * head * np.where(is_schedule(schedule, "gpipe"), m - 1.0, 0.0)
        # the loss's memory is freed before the last layer's backward pass: the larger of the two counts
        loss = (stage.has_head * (head + transient))[row]
        at_loss = loss > self._backward
        state = stage_state(problem, self._table, self._key, self._shares, stage)[:, self._layouts.zero, row]
        return np.array([
            *state, activations, np.where(at_loss, 0.0, self._backward), kept_logits[row] + np.where(at_loss, loss, 0.0),
            self._buffers,
        ])  # fmt: skip


def peak_memory(problem: Problem, table: LayerTable, terms: SplitTerms, layouts: Layouts) -> Memory:
    """Return the peak bytes of each layout on its fullest stage.

    First stage: most micro batches in flight. Second: perhaps more layers. Last: head and loss.
    """
    splits, stages, row, peak = terms.splits, terms.stages, layouts.row, PeakMemory(problem, table, terms.key, layouts)
    single, none = (splits.pp == 1) * 1.0, np.zeros(len(splits))
    first = peak.parts(StageContent(0, stages.first, none + 1, single, splits.account_for_embedding_in_pipeline_split))
    at_last = StageContent(splits.pp - 1, stages.last, single, none + 1, splits.account_for_loss_in_pipeline_split)
    last = peak.parts(at_last)
    if (stages.middle > stages.first).any():  # the second stage holds more layers, for a micro batch less
        second = peak.parts(StageContent(np.minimum(splits.pp - 1, 1), stages.middle, none, none))
        first = np.where((splits.pp > 2)[row] & (second.sum(axis=0) > first.sum(axis=0)), second, first)
    on_last = last.sum(axis=0) > first.sum(axis=0)
    parts = np.where(on_last, last, first)
    allocated, reserved, device = totals(problem, parts)
    return Memory(allocated, reserved, device, parts, on_last)


def totals(problem: Problem, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (allocated, reserved, device) bytes of parts, [parts, ...] -> [...] each; as in Memory."""
    allocated = parts.sum(axis=0)
    reserved = allocated + problem.framework.memory.allocator_gaps * parts[STATIC_PARTS:].sum(axis=0)
    return allocated, reserved, reserved + RUNTIME_BYTES
