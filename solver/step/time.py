"""The time of one optimizer step of every layout, as a sum of named parts of its slowest stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from solver.layers.program import LINEARS
from solver.schedule.warm_up import group_of
from solver.spec.framework import ASSUMED_LAUNCH, Framework
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.offload import late_gradients
from solver.step.parameter_groups import shares_vocabulary
from solver.step.pipeline import PIPELINE_PARTS, PipelineTimes, pipeline_times
from solver.step.problem import Problem
from solver.step.side_stream import SideStreamWork
from solver.step.stage_seconds import SlowestStage
from solver.step.step_ops import buckets, tensors_of_stage, units
from solver.step.stragglers import straggler_share
from solver.step.terms import SplitTerms

#: Parts of a step, in the order of the rows of StepTimes.parts.
TIME_PARTS = (*PIPELINE_PARTS, "gradient_accumulation", "gradient_sync", "parameter_gather", "optimizer", "stragglers")


@dataclass(frozen=True)
class StepTimes:
    """seconds: [layouts]. pipelines: of the distinct pipelines; pipeline: that of each layout, [layouts]. after: the parts that
    follow a pipeline's, [parts, layouts]."""

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
    sync, gather = _synchronisation(problem, terms, layouts, forward=forward, backward=backward)
    if problem.run.offload_gradients:
        number, beside = terms.splits.num_micro_batches[row], problem.run.overlap_grad_reduce
        sync = sync + late_gradients(terms.to_host[row], backward, number, layouts.zero, beside)
    optimizer = np.where(layouts.zero == 0, terms.optimizer_whole[row], terms.optimizer_shard[row]) + terms.once[row]
    casts = np.where(layouts.zero == 3, sharded_casts(problem, terms.splits.num_micro_batches[row]), 1)
    optimizer = optimizer + casts * terms.weight_casts[row]
    optimizer = np.maximum(optimizer, _optimizer_launches(problem, terms)[row])
    alone = pipeline + accumulation + sync + gather + optimizer
    waiting = alone * straggler_share(problem.run.world_size, problem.cluster.gpus_per_node)
    return StepTimes(alone + waiting, pipelines, same, np.array([accumulation, sync, gather, optimizer, waiting]))


def _accumulation(problem: Problem, terms: SplitTerms, layouts: Layouts) -> np.ndarray:
    """Return the seconds per step of the kernels that add gradients to those of the micro batches before, [layouts]."""
    row, splits = layouts.row, terms.splits
    seconds: np.ndarray = terms.accumulation[row]
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


def sharded_casts(problem: Problem, number: Any) -> np.ndarray:
    """Return how often weights are cast under ZeRO-3 in a step of ``number`` micro batches, of its shape.

    Of weights that are held quantised the optimizer casts its shard alone, which is left out; the copy in the other order is
    made of what is gathered in every micro batch, or sharded too.
    """
    kept = problem.weight_recipe
    if kept is None or not kept.unit:
        return np.ones_like(number)
    return np.asarray(number) * (kept.sharded == kept.unit)


def reduces_whole(framework: Framework, run: Strategy, zero: Any) -> Any:
    """Whether gradients are all-reduced whole instead of reduce-scattered; zero: ZeRO stages, of the same shape.

    Distributed Muon keeps all gradients.
    """
    whole_states = run.optimizer == "muon" or framework.data_parallel.grad_collective == "all_reduce"
    return (zero == 0) | ((zero == 1) & whole_states) | ((zero == 2) & framework.data_parallel.reduces_whole_buckets)


def _synchronisation(
    problem: Problem,
    terms: SplitTerms,
    layouts: Layouts,
    backward: np.ndarray,
    forward: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the exposed seconds per step of gradient synchronisation and of the parameter all-gather (ZeRO 0 to 2).

    With overlap, gradients are sent bucket by bucket during the last micro batch's backward pass; the last bucket, that of the
    embedding, has nothing left to overlap with, and no compute runs before the first parameters, the embedding's, have arrived.
    ZeRO-2 keeps only its share of the gradients, so it must reduce-scatter them in every micro batch, overlapped with its
    backward pass and what follows; FSDP's also gathers the weights again, unless a pipeline keeps them. Behind a pipeline it
    reduces them once, after the last backward pass (torch/distributed/pipelining/stage.py, backward_maybe_with_nosync); where
    it is deferred, once beside the last backward pass.
    Gradients of interleaved chunks are sent when a chunk's last micro batch is done, while those of the chunks before it run,
    and of the first chunk after all; parameters of a chunk are gathered while the first micro batches run the chunk before it
    (Megatron-Core's schedules.py, whose ranks launch them at the same time unless told otherwise).
    """
    row, run, zero = layouts.row, problem.run, layouts.zero
    framework = problem.framework
    muon = run.optimizer == "muon"  # whose distributed form gathers parameters after the step
    whole = reduces_whole(framework, run, zero)
    split = terms.splits
    pp, vpp = split.pp[row], split.vpp[row]
    often = np.where((zero == 2) & (pp == 1), split.num_micro_batches[row], 1)
    times = np.ones_like(often) if problem.defers_sync else often
    reduce = SideStreamWork.where(whole, terms.all_reduce.take(row), terms.reduce_scatter.take(row)) * times
    gathers = often if framework.data_parallel.shards_units and not problem.runs_no_sync else np.ones_like(often)
    gather = terms.all_gather.take(row) * gathers
    parameters, embedding = terms.parameters, terms.embedding_parameters
    of_units = framework.data_parallel.shards_units & ~whole
    messages = buckets(problem, split, parameters, parameters, split.dp * split.cp)[row]
    one_bucket = 1 / np.where(of_units, units(problem, split, LINEARS)[row], messages)
    last_bucket = np.minimum(np.maximum(one_bucket, (embedding / parameters)[row]), 1.0)
    interleaved = (vpp > 1) & ~split.v_shaped[row]
    group = group_of(pp, split.micro_batch_group[row])
    under = np.where(interleaved, group * backward * (vpp - 1) / vpp, backward * times)
    alone = np.where((zero == 2) & (pp > 1), 1.0, np.where(interleaved, 1.0 / vpp, last_bucket / times))
    if framework.data_parallel.shards_at_once:
        alone = np.where(whole, alone, 1.0)
    sync = reduce.exposed
    if run.overlap_grad_reduce:
        late = framework.data_parallel.overlaps_sharded_alone & ((zero == 0) | (pp > 1))
        sync = np.where(late, sync, reduce.overlapped_with(under, alone))
    gathered = gather.exposed
    if run.overlap_param_gather and not muon:
        chunks = np.where(interleaved & (not framework.data_parallel.shards_units), vpp, 1)
        first = gather * (1 / chunks)
        gathered = first.overlapped_with(forward * gathers / chunks, np.minimum(last_bucket * chunks, 1.0))
        later = 1 - 1 / chunks
        gathered = gathered + (gather * later).overlapped_with(group * forward * later)
    shared = (zero == 1) | (zero == 2) | ((zero == 0) & shares_vocabulary(problem, split)[row])
    return sync * (zero < 3), gathered * shared
