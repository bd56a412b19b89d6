"""The time of one optimizer step of every layout, as a sum of named parts of its slowest stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from solver.spec.choices import Recompute
from solver.spec.framework import ASSUMED_LAUNCH
from solver.step.data_parallel_ops import buffers_shard
from solver.step.layouts import Layouts
from solver.step.message_counts import tensors_of_stage
from solver.step.offload import exposed_gradient_offload, serialised_ranks
from solver.step.pipeline import PIPELINE_PARTS, PipelineTimes, pipeline_times
from solver.step.problem import Problem
from solver.step.stage_seconds import SlowestStage
from solver.step.stragglers import straggler_share
from solver.step.synchronisation import exposed_gathers, exposed_gradients
from solver.step.terms import SplitTerms

#: Parts of a step, in the order of the rows of StepTimes.parts.
TIME_PARTS = (*PIPELINE_PARTS, "gradient_accumulation", "gradient_sync", "parameter_gather", "optimizer", "stragglers")


@dataclass(frozen=True)
class StepTimes:
    """Times of one optimizer step, by layout and part.

    seconds: of the whole step, [layouts]. pipelines: times of the distinct pipelines; pipeline: the index of each layout's in
    them, [layouts]. after: seconds of the parts that follow the pipeline, [parts, layouts].
    """

    seconds: np.ndarray
    pipelines: PipelineTimes
    pipeline: np.ndarray
    after: np.ndarray

    @cached_property
    def parts(self) -> np.ndarray:
        """Seconds of the slowest stage that add up to ``seconds``: [parts, layouts]."""
        return np.concatenate([self.pipelines.parts[:, self.pipeline], self.after])

    @cached_property
    def slowest(self) -> SlowestStage:
        """The bottleneck stage of each layout."""
        return self.pipelines.slowest.take(self.pipeline)

    @property
    def hidden(self) -> np.ndarray:
        """Seconds of each layer's exchange beside another micro batch: [kinds, layouts]."""
        return self.pipelines.hidden[:, self.pipeline]


def step_times(problem: Problem, terms: SplitTerms, layouts: Layouts) -> StepTimes:
    """Return the seconds of each layout."""
    first, same = layouts.pipelines
    pipelines = pipeline_times(problem, terms, layouts.at(first))
    row, pipeline = layouts.row, pipelines.seconds[same]
    accumulation = _accumulation(problem, terms, layouts)
    forward, backward = pipelines.forward[same], pipelines.backward[same]
    sync = exposed_gradients(problem, terms, layouts, backward)
    gather = exposed_gathers(problem, terms, layouts, forward)
    if problem.run.offload_gradients:
        number, overlaps = terms.splits.num_micro_batches[row], problem.overlaps_sharded_reduction
        turns = serialised_ranks(problem, terms.splits, terms.once.parameters)[row]
        sync = sync + exposed_gradient_offload(terms.once.to_host[row], backward, number, layouts.zero, turns, overlaps)
    optimizer = (
        np.where(layouts.zero == 0, terms.once.optimizer_whole[row], terms.once.optimizer_shard[row]) + terms.once.other[row]
    )
    casts = sharded_casts(problem, terms.splits.num_micro_batches[row], layouts.recompute == Recompute.FULL)
    optimizer = optimizer + np.where(layouts.zero == 3, casts, 1) * terms.once.weight_casts[row]
    of_shard = buffers_shard(problem, layouts.zero, terms.splits.pp[row])
    optimizer = optimizer + np.where(of_shard, terms.once.buffer_shard[row], terms.once.buffer_whole[row])
    optimizer = np.maximum(optimizer, _optimizer_launches(problem, terms)[row])
    alone = pipeline + accumulation + sync + gather + optimizer
    waiting = alone * straggler_share(problem.run.world_size, problem.cluster.gpus_per_node)
    return StepTimes(alone + waiting, pipelines, same, np.array([accumulation, sync, gather, optimizer, waiting]))


def _accumulation(problem: Problem, terms: SplitTerms, layouts: Layouts) -> np.ndarray:
    """Return the seconds per step of the kernels that add gradients to those of the micro batches before, [layouts]."""
    row, splits = layouts.row, terms.splits
    seconds: np.ndarray = terms.once.accumulation[row]
    return seconds * accumulations(problem, layouts.zero, splits.num_micro_batches[row], splits.pp[row])


def accumulations(problem: Problem, zero: Any, number: Any, pp: Any) -> np.ndarray:
    """Return how often the kernels that add gradients run in ``number`` micro batches; arguments broadcast.

    To a buffer that is wider than what autograd returns all are added; else the first ones stay. FSDP2 behind a pipeline, and
    where it defers reducing them, casts the first ones and adds the others, unless it reduces all at once (_fsdp_param.py,
    to_accumulated_grad_if_needed). Under FSDP1's no_sync the first ones stay.
    """
    sizes, sync = problem.element_bytes, problem.framework.data_parallel
    again = (number - (sizes.gradient <= sizes.weight)) * (not problem.fused_accumulation)
    cast = (sizes.weight + sizes.gradient) / (sizes.weight + 2.0 * sizes.gradient) * (sizes.gradient > sizes.weight)
    late = sync.accumulates_whole & ((zero == 2) & (pp > 1) | (zero > 1) & problem.defers_sync)
    joined = np.where((zero > 1) & problem.runs_no_sync, number - 1, 0.0)
    return np.where(late, (number - 1 + cast) * (number > 1), np.where(zero < 2, again, joined))


def _optimizer_launches(problem: Problem, terms: SplitTerms) -> np.ndarray:
    """Return the seconds in which the host launches the kernels of an optimizer that works tensor by tensor, [splits]."""
    sync = problem.framework.data_parallel
    tensors = tensors_of_stage(problem, terms.splits) + 2  # and the ends
    return sync.optimizer_launches * ASSUMED_LAUNCH * tensors


def sharded_casts(problem: Problem, number: Any, recomputed: Any) -> np.ndarray:
    """Return how often weights are cast under ZeRO-3 in a step of ``number`` micro batches, of its shape; recomputed: whether
    layers run forward twice.

    Of weights that are held quantised the optimizer casts its shard alone, which is left out; the copy in the other order is
    sharded too, or made of what is gathered in every pass: forward, though the backward pass alone reads it, and dropped with
    the weights behind it (Transformer Engine's base.py, quantize_weight; Megatron-FSDP's megatron_fsdp.py, _post_forward).
    """
    kept = problem.weight_recipe
    if kept is None or not kept.unit:
        return np.ones_like(number)
    return np.asarray(number) * (2 + np.asarray(recomputed) * 1) * (kept.sharded == kept.unit)
