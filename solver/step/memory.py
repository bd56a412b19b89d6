"""Peak memory of every layout: what the first and the last stage hold at their peaks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.schedule.stages import layers_in_flight, micro_batches_in_flight
from solver.spec.cluster import RUNTIME_BYTES
from solver.spec.precision import HALF
from solver.spec.strategy import TpMode
from solver.step.layouts import Layouts
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
class StageState:
    """Bytes of weights, gradients and optimizer states on one pipeline stage, by ZeRO stage: [3, 4 ZeRO stages, splits]."""

    first: np.ndarray
    middle: np.ndarray
    last: np.ndarray


def stage_state(problem: Problem, table: LayerTable, terms: SplitTerms) -> StageState:
    """Return the static bytes of the stages under ZeRO 0 to 3.

    16-bit weights, gradients in grad_dtype, fp32 master weights and two Adam moments (12 bytes; spec.precision has the other
    combinations), and the dummy gradients of one layer's linears where the framework keeps them. ZeRO-1 shards the 12 bytes,
    ZeRO-2 also the gradients, ZeRO-3 everything, and its sharded master weights are the only ones (Rajbhandari et al. 2020).
    """
    splits, key, sizes = terms.splits, terms.key, problem.element_bytes
    groups = parameter_groups(problem, table, key, splits)
    embedding, head = table.embedding.parameters[key], table.head.parameters[key]
    both = np.maximum(embedding, head) if problem.model.tie_word_embeddings else embedding + head
    single = splits.pp == 1

    def state(layers: np.ndarray, end: np.ndarray) -> np.ndarray:
        out = np.zeros((3, 4, len(splits)))
        out[1] += HALF * table.layer.sharded[key] * problem.framework.memory.dummy_gradients
        held = (layers * table.layer.sharded[key], layers * table.layer.unsharded[key] + np.where(single, both, end))
        for elements, group in zip(held, groups, strict=True):
            share = shard_ranks(group, splits.zero_shard_size)
            for zero in range(4):
                partitioned = elements / share
                out[0, zero] += sizes.weight * elements if zero < 3 else 0.0
                out[1, zero] += sizes.gradient * (elements if zero < 2 else partitioned)
                out[2, zero] += (sizes.sharded if zero == 3 else sizes.states) * (elements if zero == 0 else partitioned)
        return out

    stages = terms.stages
    none = np.zeros(len(splits))
    return StageState(state(stages.first, embedding), state(stages.middle, none), state(stages.last, head))


def gather_buffers(problem: Problem, table: LayerTable, terms: SplitTerms) -> np.ndarray:
    """Return the bytes of all-gathered weights by ZeRO stage, shape [4, splits].

    ISP keeps two blocks of full weights (this one's and the next one's); FSDP keeps two all-gathered layers and one layer's
    whole gradients.
    """
    splits, key, sizes = terms.splits, terms.key, problem.element_bytes
    block = sizes.activation * table.layer.sharded[key] * splits.wp
    pool = np.where((splits.mode == TpMode.ISP) & (splits.wp > 1), 2 * block, 0.0)
    fsdp = table.layer.parameters[key] * (2 * sizes.activation + sizes.gradient)
    return np.array([pool, pool, pool, pool + fsdp])


def peak_memory(problem: Problem, table: LayerTable, terms: SplitTerms, layouts: Layouts) -> Memory:
    """Return the peak bytes of each layout on its fullest stage.

    First stage: most micro batches in flight. Second: perhaps more layers. Last: head and loss.
    """
    row, zero, level, splits = layouts.row, layouts.zero, layouts.recompute, terms.splits
    state, buffers = stage_state(problem, table, terms), gather_buffers(problem, table, terms)
    saved = table.layer.saved[:, terms.key]
    kept, whole = saved[level, row], saved[0][row]
    limit = np.where(layouts.recompute_layers < 0, problem.model.num_hidden_layers, layouts.recompute_layers)
    # the layer whose backward pass runs: all its saved tensors where it was recomputed, and its largest gradients
    backward = np.where(limit > 0, whole - kept, 0.0) + table.layer.transient[terms.key][row]
    head, transient = table.head.saved[0][terms.key], table.head.transient[terms.key]
    schedule, m = problem.run.schedule, splits.num_micro_batches

    def stage(layers: np.ndarray, static: np.ndarray, pp: np.ndarray, last: bool, short: np.ndarray | int) -> np.ndarray:
        flight = micro_batches_in_flight(schedule, m, pp, splits.vpp, last)
        held = layers_in_flight(schedule, m, pp, splits.vpp, layers, short, last) / np.maximum(layers, 1)
        recomputed = np.minimum(limit, layers[row])
        activations = held[row] * (recomputed * kept + (layers[row] - recomputed) * whole)
        ends = np.where(splits.pp == 1, 1.0, float(last))
        # the head's backward follows its forward immediately, so one micro batch of logits is alive; GPipe keeps all
        kept_logits = (ends * head * (flight - 1.0 if schedule == "gpipe" else 0.0))[row]
        # the loss's memory is freed before the last layer's backward pass: the larger of the two counts
        loss = (ends * (head + transient))[row]
        at_loss = loss > backward
        parts = [*static[:, zero, row], activations, np.where(at_loss, 0.0, backward),
                 kept_logits + np.where(at_loss, loss, 0.0), buffers[zero, row]]  # fmt: skip
        return np.array(parts)

    stages = terms.stages
    first = stage(stages.first, state.first, splits.pp, False, splits.account_for_embedding_in_pipeline_split)
    last = stage(stages.last, state.last, splits.pp, True, splits.account_for_loss_in_pipeline_split)
    if (stages.middle > stages.first).any():  # the second stage holds more layers, for one micro batch less
        second = stage(stages.middle, state.middle, np.maximum(splits.pp - 1, 1), False, 0)
        first = np.where((splits.pp > 2)[row] & (second.sum(axis=0) > first.sum(axis=0)), second, first)
    on_last = last.sum(axis=0) > first.sum(axis=0)
    parts = np.where(on_last, last, first)
    allocated = parts.sum(axis=0)
    reserved = allocated + problem.framework.memory.allocator_gaps * parts[STATIC_PARTS:].sum(axis=0)
    return Memory(allocated, reserved, reserved + RUNTIME_BYTES, parts, on_last)
