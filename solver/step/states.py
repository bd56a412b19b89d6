"""Weights, gradients and optimizer states of a stage by ZeRO stage, and the weights that are gathered for a while."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from solver.layers.program import EXPERTS, LINEARS, OTHERS, VOCABULARY
from solver.spec.choices import TpMode
from solver.spec.recipes import FP32, HALF
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Splits
from solver.step.muon import momentum_saved, more_than_even
from solver.step.offload import gradients_here, states_on_host
from solver.step.parameter_groups import (
    elements_of,
    joined_ends,
    partitions,
    quantised_elements,
    shard_ranks,
    shares_vocabulary,
    trained_elements,
)
from solver.step.problem import Problem
from solver.step.sharded_weights import gathered_bytes
from solver.step.stage_kinds import StageKinds


class StateBytes(NamedTuple):
    """Bytes on a stage by ZeRO stage, each [4 ZeRO stages, splits]. update: what the optimizer's step adds. buckets: copies of
    gradients that synchronisation keeps between steps, which are among the gradients."""

    weights: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    update: np.ndarray
    buckets: np.ndarray

    @property
    def held(self) -> np.ndarray:
        """Of weights, gradients and optimizer states: [4 ZeRO stages, splits]."""
        return self.weights + self.gradients + self.optimizer


def stage_state(
    priced: PricedSplits,
    shares: Mapping[str, np.ndarray],
    stages: StageKinds,
    stage: int,
    zero_stages: Iterable[int] = range(4),
) -> StateBytes:
    """Return the bytes of weights, gradients and optimizer states on a stage by ZeRO stage, and what the optimizer's step adds.

    shares: ranks over which ZeRO shards the parameters, of the groups that are asked for, each of shape [splits]. zero_stages:
    those that are asked for; the rows of others are not filled in.

    16-bit weights, gradients in grad_dtype, fp32 master weights and two Adam moments (12 bytes; spec.precision has the other
    combinations), and the dummy gradients of one layer's linears where the framework keeps them. ZeRO-1 shards the 12 bytes,
    ZeRO-2 also the gradients (with a pipeline only after the last micro batch, as where their reduction is deferred), ZeRO-3
    everything, and its sharded master weights are the only ones (Rajbhandari et al. 2020), unless the framework also shards
    those that it gathers.
    """
    problem, key, splits = priced.problem, priced.key, priced.splits
    weights, gradients, optimizer, kept = np.zeros((4, 4, len(key)))
    update = np.zeros((2, 4, len(key)))  # experts are updated after all other parameters
    gradients += _gradient_buffers(priced, stages, stage)
    piped: np.ndarray = np.any(stages.index > 0, axis=0)
    late = (splits.num_micro_batches > 1) & problem.defers_sync
    trained, several = np.zeros(len(key)), splits.dp * splits.cp > 1
    shared = shares_vocabulary(problem, splits)
    groups = {name: elements_of(priced, stages, stage, name) for name in shares}
    for name, updated in partitions(problem, splits, groups, shares).items():
        elements = groups[name]
        more = more_than_even(priced, name, shares[name], stages, stage)
        partitioned = np.minimum(elements, updated + more)
        if problem.is_frozen(name):  # of a frozen weight nothing else is there
            weights[:3] += problem.element_bytes.activation * elements
            weights[3] += problem.element_bytes.activation * partitioned
            continue
        trained += elements
        weights += _weight_copies(priced, stages, stage, name, shares[name])
        owned = np.where(shared, partitioned, elements) if name == OTHERS else elements  # under ZeRO-0
        for zero in zero_stages:
            # experts that nothing shards accumulate in the parameters' type
            sharded = (shares[name] > 1) | problem.framework.data_parallel.wraps_lone_experts
            whole = (piped & (zero == 2) | late & (zero > 1)) & (sharded | (name != EXPERTS))
            held, step = trained_bytes(problem, name, zero, elements, partitioned if zero else owned, several, whole)
            for table_of_zero, added in zip((weights, gradients, optimizer), held, strict=True):
                table_of_zero[zero] += added
            update[int(name == EXPERTS), zero] += step
            kept[zero] += elements * several * synchronisation_bytes(problem, zero)
    buckets = bucket_bytes(problem, trained, splits)
    gradients += buckets
    if problem.run.offload_gradients:  # stage_1_and_2.py, temp_grad_buffer_for_gpu_offload
        has_table = (stages.has_embedding[stage] + stages.has_head[stage]) > 0
        gradients[2] += problem.element_bytes.activation * _largest_tensor(problem, splits, has_table)
    stepping = update.max(axis=0)
    if problem.framework.memory.joins_buckets:  # stage_1_and_2.py: _release_ipg_buffers after the last backward pass
        stepping[1:3] = np.maximum(stepping[1:3] - buckets[1:3], 0.0)
    return StateBytes(weights, gradients, optimizer, stepping, kept)


def _largest_tensor(problem: Problem, splits: Splits, has_table: np.ndarray | bool = True) -> np.ndarray:
    """Return the elements of the largest weight on one rank, [splits]: of the MLP or, where there is one, the vocabulary's."""
    model, kernels = problem.model, problem.framework.kernels
    mlp = model.intermediate_size * (2 if kernels.fused_gate_up and model.gated_mlp else 1)
    return model.hidden_size * np.maximum(mlp, model.vocab_size * np.asarray(has_table)) / splits.tp


def _weight_copies(priced: PricedSplits, stages: StageKinds, stage: int, name: str, share: np.ndarray) -> np.ndarray:
    """Return the bytes of quantised copies of a group's weights, [4 ZeRO stages, splits]."""
    out, kept = np.zeros((4, len(priced.key))), priced.problem.weight_recipe
    if kept is not None and name != OTHERS:
        quantised = quantised_elements(priced, stages, stage, name)
        out[:3] += kept.held * quantised
        if kept.sharded and priced.problem.framework.memory.keeps_shards:
            out[3] += (kept.sharded - HALF) * quantised / share
    return out


def bucket_bytes(problem: Problem, trained: np.ndarray, splits: Splits) -> np.ndarray:
    """Return the bytes of the buckets of gradients that are allocated beside ``trained`` gradients, [4 ZeRO stages, splits].

    As needed: no more than there are gradients, and none under ZeRO-3, which is FSDP, or where all gradients fit one bucket,
    which is flattened after the backward pass (InternEvo's hybrid_zero_optim.py, step). Tensors that are joined to be reduced
    are of a bucket, and no more than there are: DeepSpeed's comm/coalesced_collectives.py (reduce_scatter_coalesced) and
    stage_1_and_2.py (allreduce_bucket).
    """
    memory, elements = problem.framework.memory, problem.framework.data_parallel.bucket(problem.model.hidden_size)
    number = np.full((4, len(trained)), float(memory.gradient_buckets))
    alone = (splits.pp == 1) | (not problem.framework.data_parallel.overlaps_sharded_alone)
    number[1:3] += memory.second_bucket * bool(problem.run.overlap_grad_reduce) * alone
    size = number * (elements if memory.gradient_buckets else 0.0)  # without buckets their size is infinite
    if memory.joins_buckets:
        size[1:] += np.minimum(elements, trained)
    if memory.buckets_as_needed:
        size = np.where(trained > elements, np.minimum(size, trained), 0.0)
        size[3] = 0.0
    return size * problem.element_bytes.gradient


def synchronisation_bytes(problem: Problem, zero: int) -> float:
    """Return the bytes per parameter that synchronisation keeps between steps where ranks hold copies."""
    return problem.framework.memory.synchronisation_bytes[min(zero, 1)] if zero < 3 else 0.0


def trained_bytes(
    problem: Problem,
    name: str,
    zero: int,
    elements: np.ndarray,
    owned: np.ndarray,
    several: np.ndarray,
    keeps: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of weights, gradients and states of a group's trained parameters in a ZeRO stage, [3, splits], and those
    that the optimizer's step adds, [splits].

    elements, owned: parameters of a rank, and those that it updates. several, keeps: whether ranks hold copies, and whether
    gradients that are sharded are kept whole until the last micro batch.
    """
    sizes, memory = problem.element_bytes, problem.framework.memory
    weights = sizes.weight * (elements if zero < 3 else owned * memory.keeps_shards)
    whole = elements if zero < 2 else np.where(keeps, elements, owned)
    here = gradients_here(problem) if zero > 1 else 1.0
    reduced = np.where(keeps, 0, memory.held_gradient_bytes)
    gradients = elements * several * synchronisation_bytes(problem, zero)
    kept = np.where(keeps, sizes.activation, sizes.gradient) if problem.runs_no_sync else sizes.gradient
    gradients = gradients + (np.where(reduced, reduced, kept) + kept_halves(problem)) * whole * here
    beside = memory.partition_bytes if zero in (1, 2) else 0.0
    state = (sizes.sharded if zero == 3 else sizes.states) + beside - states_on_host(problem) - momentum_saved(problem, name)
    on_device = (1 - problem.run.optimizer_offload_fraction) * owned
    if memory.keeps_wide_gradients and problem.run.optimizer_offload_fraction and sizes.gradient == HALF:
        gradients = gradients + FP32 * on_device
    step: np.ndarray = sizes.step * on_device
    if memory.fp32_gradient_copy and sizes.gradient == HALF:
        step = step + _gradient_copies(zero, elements, on_device, memory.fp32_gradient_copy)
    if zero in (1, 2):
        step = step + memory.list_bytes * elements * several
    if memory.step_peak and zero < 2:
        step = step + np.maximum((memory.step_peak - sizes.states) * owned - sizes.gradient * elements, 0.0)
    return np.array([weights, gradients, state * owned]), step


def _gradient_copies(zero: int, elements: np.ndarray, updated: np.ndarray, at_once: float) -> np.ndarray:
    """Return the bytes that copies of 16-bit gradients in a step add to what is held, [splits]; at_once: of ZeRO-3, elements.

    Of the partition a flat one and one in fp32; ZeRO-1 frees the gradients first (DeepSpeed 0.19, stage_1_and_2.py, epilogue of
    the reduction). Without ZeRO all are cast and then joined in fp32, beside the 16-bit ones (fp16/fused_optimizer.py, step).
    """
    if not zero:
        return 2.0 * FP32 * updated
    copies: np.ndarray = (HALF + FP32) * (np.minimum(updated, at_once) if zero == 3 else updated)
    return np.maximum(copies - HALF * elements, 0.0) if zero == 1 else copies


def _gradient_buffers(priced: PricedSplits, stages: StageKinds, stage: int) -> np.ndarray:
    """Return the bytes of dummy gradients of a stage, [splits]: of one linear of each shape that its layers have, and of the
    head."""
    problem, table, key = priced.problem, priced.table, priced.key
    has_head, predicts = stages.has_head[stage], problem.model.num_nextn_predict_layers > 0
    shapes: dict[str, np.ndarray] = {}
    for kind, part in enumerate(table.layers):
        there = stages.counts[stage][kind] + has_head * (predicts and kind == problem.kinds.of_layer[-1]) > 0
        for name, elements in part.shaped_alike.items():
            shapes[name] = np.maximum(shapes.get(name, 0.0), elements[key] * there)
    accumulates = problem.run.gradient_accumulation_fusion is not False and not problem.is_frozen(LINEARS)
    of_head = table.head.shaped_alike[VOCABULARY][key] * has_head
    of_all = sum(shapes.values(), np.zeros(len(key))) + of_head
    return HALF * of_all * (problem.framework.memory.dummy_gradients and accumulates)


def embedding_gradient(priced: PricedSplits) -> np.ndarray:
    """Return the bytes that the allocator needs in one piece at the end of each micro batch's backward pass on the first of
    several stages, [splits]: the gradient of the whole table, which autograd makes anew and adds, and its cast where the
    framework makes one. They are below the peak, but no gap that smaller tensors left holds them.
    """
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    sizes, casts = problem.element_bytes, problem.framework.data_parallel.accumulation_casts
    cast = FP32 * (casts and sizes.gradient > sizes.weight)
    largest = max(HALF, cast) if sizes.activation == HALF else FP32
    return largest * table.embedding.parameters[key] * (splits.pp > 1) * (not problem.is_frozen(OTHERS))


def kept_halves(problem: Problem) -> float:
    """Return the bytes of a 16-bit gradient that stays beside an fp32 one."""
    return HALF * (problem.framework.memory.keeps_half_gradients and problem.element_bytes.gradient > HALF)


def _sharded_layers(priced: PricedSplits) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of weights that are gathered of a layer of each kind, and its parameters whose gradients are reduced,
    [kinds, splits] each: without the experts where their ranks hold no copies, so that nothing shards them."""
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    ranks, wrapped = shard_ranks(problem, splits), problem.framework.data_parallel.wraps_lone_experts
    alone = (ranks[EXPERTS] == 1) if EXPERTS in ranks and not wrapped else np.zeros(len(splits), dtype=bool)
    gathered, trained = [], []
    for part, kind in zip(table.layers, problem.kinds.kinds, strict=True):
        experts = gathered_bytes(problem, part, key, kind.quantised, [EXPERTS])
        gathered.append(gathered_bytes(problem, part, key, kind.quantised, part.parameters_of) - alone * experts)
        trained.append(trained_elements(problem, part, key) - alone * part.parameters_of[EXPERTS][key])
    return np.array(gathered), np.array(trained)


def _queued(problem: Problem, gathered: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return the most bytes of gathered weights and whole gradients of Megatron-FSDP in a layer's backward pass: [splits].

    gathered, trained: bytes and parameters of a layer of each kind, [kinds, splits]. Its communication unit is of two layers or
    communication_unit parameters, whichever is more: layers are gathered ahead until they hold half of it, and gradients stay
    until those that were sent to be reduced exceed it (megatron_fsdp.py; wait_for_previous_grad_reduce and async_bucket_gather
    of param_and_grad_buffer.py).
    """
    counts = np.bincount(problem.kinds.of_layer, minlength=len(trained))[:, None]
    layers, stage = counts.sum(), (counts * trained).sum(axis=0)
    average, whole = np.maximum(stage / layers, 1.0), (counts * gathered).sum(axis=0)
    unit = np.maximum(problem.framework.memory.communication_unit, 2 * average)
    ahead = np.minimum(np.max(gathered, axis=0) + np.ceil(unit / 2 / average) * whole / layers, whole)
    return ahead + problem.element_bytes.gradient * np.minimum(unit + np.max(trained, axis=0), stage)


def gather_buffers(priced: PricedSplits) -> np.ndarray:
    """Return the bytes of all-gathered weights by ZeRO stage, [2, 4, splits]: while the loss is computed, and while a layer's
    backward pass runs.

    ISP keeps two blocks of full weights (this one's and the next one's). DeepSpeed gathers ahead until it holds live_elements,
    or what one tensor needs, and its gradients go to a bucket (partitioned_param_coordinator.py, stage3.py). FSDP keeps, beside
    what its root keeps, two all-gathered layers, one layer's whole gradients and, if the root has both ends, those of the head
    in the latter, the gradients under ZeRO-2 too; while the loss is computed no layer is gathered, except in frameworks whose
    buffers stay or gather ahead (those without a root). FSDP2 has a layer's gradients as autograd makes them beside what it
    reduces of the layer after it, and frees a head that is a unit of its own after its backward pass (_fsdp_param_group.py,
    post_backward; _fsdp_collectives.py, foreach_reduce). The largest kind of layer decides.
    """
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    sizes = problem.element_bytes
    block = sizes.activation * np.max([part.parameters_of[LINEARS][key] for part in table.layers], axis=0) * splits.wp
    pool = np.where((splits.mode == TpMode.ISP) & (splits.wp > 1), 2 * block, 0.0)
    gathered, trained = _sharded_layers(priced)
    made = sizes.activation * trained * problem.framework.memory.copies_gradients
    queued = problem.framework.uses_megatron_fsdp
    fsdp = _queued(problem, gathered, trained) if queued else np.max(2 * gathered + sizes.gradient * trained + made, axis=0)
    if live := problem.framework.memory.live_elements:
        counts = np.bincount(problem.kinds.of_layer, minlength=len(gathered))[:, None]
        ends = joined_ends(problem, table.embedding.parameters[key], table.head.parameters[key])
        most = np.maximum(live, _largest_tensor(problem, splits))  # what a module needs is gathered whatever there is
        fsdp = np.minimum((counts * gathered).sum(axis=0) + sizes.activation * ends, sizes.activation * most)
    stay = problem.framework.memory.root_stays
    held = (
        part.parameters_of[OTHERS][key] * (name in stay)
        for name, part in (("embedding", table.embedding), ("head", table.head))
    )
    root = joined_ends(problem, *held) * sizes.activation
    # one flat parameter: autograd splits its gradient, and the head's part waits for the embedding's
    waiting = sizes.activation * table.head.parameters_of[OTHERS][key] * ({"embedding", "head"} <= set(stay) and not queued)
    at_loss, passed = fsdp * (not stay), root * (stay != ("head",))
    whole = pool + (np.max(made + sizes.gradient * trained, axis=0) + waiting) * problem.framework.data_parallel.shards_units
    return np.array([[pool, pool, pool, pool + root + at_loss], [pool, pool, whole, pool + passed + fsdp + waiting]])


def absent_gradients(problem: Problem, splits: Splits, state: StateBytes) -> np.ndarray:
    """Return the bytes of a stage's gradients that are not there until the backward pass of a step's only micro batch makes
    them, [4 ZeRO stages, splits]: all where the optimizer freed them, but for DDP's buckets, and gradients that are views of
    these, which stay."""
    memory = problem.framework.memory
    half = memory.frees_half_gradients and problem.element_bytes.gradient == HALF
    stages = np.array([memory.frees_gradients, *[memory.frees_gradients or half] * 2, memory.frees_gradients])
    absent = (state.gradients - state.buckets) * ((splits.num_micro_batches == 1) & stages[:, None])
    if memory.bucket_views:
        absent[:3] *= splits.dp * splits.cp == 1
    return absent
