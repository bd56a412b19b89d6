"""Weights, gradients and optimizer states of a stage by ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from solver.layers.program import EXPERTS, OTHERS
from solver.spec.recipes import FP32, HALF
from solver.step.gradient_buffers import bucket_bytes, dummy_gradients, largest_tensor, synchronisation_bytes
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Splits
from solver.step.muon import momentum_saved, more_than_even
from solver.step.offload import gradient_share_on_device, host_state_bytes
from solver.step.parameter_groups import (
    elements_of,
    partitions,
    quantised_elements,
    shares_vocabulary,
)
from solver.step.problem import Problem
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
    gradients += dummy_gradients(priced, stages, stage)
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
        gradients[2] += problem.element_bytes.activation * largest_tensor(problem, splits, has_table)
    stepping = update.max(axis=0)
    if problem.framework.memory.joins_buckets:  # stage_1_and_2.py: _release_ipg_buffers after the last backward pass
        stepping[1:3] = np.maximum(stepping[1:3] - buckets[1:3], 0.0)
    return StateBytes(weights, gradients, optimizer, stepping, kept)


def _weight_copies(priced: PricedSplits, stages: StageKinds, stage: int, name: str, share: np.ndarray) -> np.ndarray:
    """Return the bytes of quantised copies of a group's weights, [4 ZeRO stages, splits]."""
    out, kept = np.zeros((4, len(priced.key))), priced.problem.weight_recipe
    if kept is not None and name != OTHERS:
        quantised = quantised_elements(priced, stages, stage, name)
        out[:3] += kept.held * quantised
        if kept.sharded and priced.problem.framework.memory.keeps_shards:
            out[3] += (kept.sharded - HALF) * quantised / share
    return out


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
    here = gradient_share_on_device(problem) if zero > 1 else 1.0
    reduced = np.where(keeps, 0, memory.held_gradient_bytes)
    gradients = elements * several * synchronisation_bytes(problem, zero)
    kept = np.where(keeps, sizes.activation, sizes.gradient) if problem.runs_no_sync else sizes.gradient
    gradients = gradients + (np.where(reduced, reduced, kept) + kept_half_gradient_bytes(problem)) * whole * here
    partition = memory.partition_bytes if zero in (1, 2) else 0.0
    state = (
        (sizes.sharded if zero == 3 else sizes.states) + partition - host_state_bytes(problem) - momentum_saved(problem, name)
    )
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


def kept_half_gradient_bytes(problem: Problem) -> float:
    """Return the bytes of a 16-bit gradient that stays beside an fp32 one."""
    return HALF * (problem.framework.memory.keeps_half_gradients and problem.element_bytes.gradient > HALF)


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
