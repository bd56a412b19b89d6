"""What a step waits for ranks that hold the same parameters: for their gradients and, under ZeRO, for the updated parameters.

Of ZeRO 0 to 2 (ZeRO-3 sends layer by layer: sharded_weights.py). With overlap, gradients are sent bucket by bucket beside the
last micro batch's backward pass; the last bucket, that of the embedding, has nothing left to overlap with, and no compute runs
before the first parameters, the embedding's, have arrived.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from solver.layers.program import LINEARS
from solver.schedule.warm_up import group_of
from solver.spec.framework import Framework
from solver.spec.run import Run
from solver.step.layouts import Layouts
from solver.step.message_counts import buckets, units
from solver.step.parameter_groups import shares_vocabulary
from solver.step.problem import Problem
from solver.step.side_stream import SideStreamWork
from solver.step.terms import SplitTerms


def reduces_whole(framework: Framework, run: Run, zero: Any) -> Any:
    """Whether gradients are all-reduced whole instead of reduce-scattered; zero: ZeRO stages, of the same shape.

    Distributed Muon keeps all gradients.
    """
    whole_states = run.optimizer == "muon" or framework.data_parallel.grad_collective == "all_reduce"
    return (zero == 0) | ((zero == 1) & whole_states) | ((zero == 2) & framework.data_parallel.reduces_whole_buckets)


def exposed_gradients(problem: Problem, terms: SplitTerms, layouts: Layouts, backward: np.ndarray) -> np.ndarray:
    """Return the exposed seconds per step of gradient synchronisation beside ``backward`` passes, [layouts].

    ZeRO-2 keeps only its share of the gradients, so it must reduce-scatter them in every micro batch, beside its backward pass
    and what follows. Behind a pipeline it reduces them once, after the last backward pass (backward_maybe_with_nosync of
    torch/distributed/pipelining/stage.py); where it is deferred, once beside the last backward pass. Gradients of interleaved
    chunks are sent when a chunk's last micro batch is done, while those of the chunks before it run, and of the first chunk
    after all (Megatron-Core's schedules.py, whose ranks launch them at the same time).
    """
    row, zero, split, sync = layouts.row, layouts.zero, terms.splits, problem.framework.data_parallel
    whole, pp, vpp = reduces_whole(problem.framework, problem.run, zero), split.pp[row], split.vpp[row]
    times = np.ones_like(pp) if problem.defers_sync else _reductions(terms, layouts)
    reduce = SideStreamWork.where(whole, terms.once.all_reduce.take(row), terms.once.reduce_scatter.take(row)) * times
    late = sync.overlaps_sharded_alone & ((zero == 0) | (pp > 1))
    if not problem.run.overlap_grad_reduce:
        late = np.ones_like(late)
    interleaved = _is_interleaved(terms, layouts)
    under = np.where(interleaved, _group(terms, layouts) * backward * (vpp - 1) / vpp, backward * times)
    last = _last_bucket(problem, terms, layouts, whole) / times
    alone = np.where((zero == 2) & (pp > 1), 1.0, np.where(interleaved, 1.0 / vpp, last))
    if sync.shards_at_once:
        alone = np.where(whole, alone, 1.0)
    return np.where(late, reduce.exposed, reduce.overlapped_with(under, alone)) * (zero < 3)


def exposed_gathers(problem: Problem, terms: SplitTerms, layouts: Layouts, forward: np.ndarray) -> np.ndarray:
    """Return the exposed seconds per step of the parameters' all-gather beside ``forward`` passes, [layouts].

    FSDP's ZeRO-2 gathers them in every micro batch, unless a pipeline keeps them. Those of an interleaved chunk are gathered
    while the first micro batches run the chunk before it (Megatron-Core's schedules.py, unless told otherwise), those of the
    first one beside its own first pass.
    """
    row, zero, run = layouts.row, layouts.zero, problem.run
    of_units = problem.framework.data_parallel.shards_units
    gathers = _reductions(terms, layouts) if of_units and not problem.runs_no_sync else np.ones_like(row)
    gather = terms.once.all_gather.take(row) * gathers
    gathered = gather.exposed
    in_step = run.optimizer == "muon" or problem.framework.data_parallel.gathers_in_step  # Muon's distributed form does so too
    if run.overlap_param_gather and not in_step:
        whole = reduces_whole(problem.framework, run, zero)
        chunks = np.where(_is_interleaved(terms, layouts) & (not of_units), terms.splits.vpp[row], 1)
        last = np.minimum(_last_bucket(problem, terms, layouts, whole) * chunks, 1.0)
        gathered = (gather * (1 / chunks)).overlapped_with(forward * gathers / chunks, last)
        later = 1 - 1 / chunks
        gathered = gathered + (gather * later).overlapped_with(_group(terms, layouts) * forward * later)
    shared = (zero == 1) | (zero == 2) | ((zero == 0) & shares_vocabulary(problem, terms.splits)[row])
    return gathered * shared


def _reductions(terms: SplitTerms, layouts: Layouts) -> np.ndarray:
    """Return how often a step reduces gradients unless that is deferred, [layouts]."""
    row = layouts.row
    return np.where((layouts.zero == 2) & (terms.splits.pp[row] == 1), terms.splits.num_micro_batches[row], 1)


def _is_interleaved(terms: SplitTerms, layouts: Layouts) -> np.ndarray:
    return (terms.splits.vpp[layouts.row] > 1) & ~terms.splits.v_shaped[layouts.row]


def _group(terms: SplitTerms, layouts: Layouts) -> np.ndarray:
    """Return the micro batches that run a chunk one after the other, [layouts]."""
    return group_of(terms.splits.pp[layouts.row], terms.splits.micro_batch_group[layouts.row])


def _last_bucket(problem: Problem, terms: SplitTerms, layouts: Layouts, whole: np.ndarray) -> np.ndarray:
    """Return the share of a stage's parameters that the last bucket has, the embedding's, [layouts]."""
    row, split, parameters = layouts.row, terms.splits, terms.once.parameters
    of_units = problem.framework.data_parallel.shards_units & ~whole
    messages = buckets(problem, split, parameters, parameters)[row]
    one = 1 / np.where(of_units, units(problem, split, LINEARS)[row], messages)
    return np.minimum(np.maximum(one, (terms.ends.embedding_parameters / parameters)[row]), 1.0)
