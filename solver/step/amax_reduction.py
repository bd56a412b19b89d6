"""The all-reduce of largest values (amax) that delayed scaling of FP8 has at the end of each pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.spec.cluster import placement
from solver.spec.recipes import FP32
from solver.spec.rules.quantised import delays
from solver.step.data_parallel_ops import once_message
from solver.step.distinct import distinct
from solver.step.layouts import Splits
from solver.step.message_counts import linears_of_stage
from solver.step.op_estimates import OpEstimates, estimate_ops
from solver.step.problem import Problem

_TENSORS = 3  #: of a linear's forward pass whose largest values are kept: input, weight and output


def estimate_amax_reduction(problem: Problem, splits: Splits) -> OpEstimates:
    """Return the estimated exchange of one pass's largest values; shape [ops, splits], without ops where there is none.

    Where scales come from the largest values of past steps, Transformer Engine finds them over all ranks that work on the same
    layers, at the end of a forward pass and of a backward pass of a chunk; what follows waits for it (fp8.py,
    reduce_and_update_fp8_tensors, which fp8_autocast_exit and the first module's backward pass call; Megatron-Core's
    transformer_block.py has one autocast around a chunk, and get_amax_reduction_group says which ranks).
    """
    run, node = problem.run, problem.cluster.gpus_per_domain
    if not _reduces(problem):
        return estimate_ops([], len(splits), problem.cost)
    ranks = splits.tp * splits.cp * (splits.dp if run.fp8_amax_reduction == "all" else 1)
    size = FP32 * _TENSORS * linears_of_stage(problem, splits) / splits.vpp
    op = once_message("amax", "all_reduce", size, placement(ranks, 1, node))
    return estimate_ops([replace(op, module="linears")], len(splits), problem.cost)


def amax_seconds(problem: Problem, splits: Splits) -> np.ndarray:
    """Return the seconds per pass of a chunk, [splits]."""
    if not _reduces(problem):
        return np.zeros(len(splits))
    first, same = distinct((splits.tp, splits.cp, splits.dp, splits.pp, splits.vpp))
    estimates = estimate_amax_reduction(problem, splits.take(first))
    return np.asarray((estimates.seconds * estimates.counts()).sum(axis=0)[same])


def _reduces(problem: Problem) -> bool:
    return delays(problem.framework, problem.run) and problem.run.fp8_amax_reduction != "none"
