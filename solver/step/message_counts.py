"""How many messages carry the gradients and parameters of a stage, and how many tensors hold them."""

from __future__ import annotations

import numpy as np

from solver.layers.program import OTHERS
from solver.step.ddp_buckets import ddp_buckets
from solver.step.layouts import Splits
from solver.step.parameter_groups import shard_ranks
from solver.step.problem import Problem


def buckets(problem: Problem, splits: Splits, elements: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return the number of collectives that carry ``elements`` of a rank's ``whole`` gradients, [splits].

    It follows the framework's bucket size: at least one, fractions allowed; where buckets are of whole tensors, this part's of
    all of them.
    """
    sync = problem.framework.data_parallel
    if sync.buckets_of_tensors:
        return ddp_buckets(problem.model, problem.framework.kernels, splits) * elements / whole
    if sync.buckets_to_overlap and not problem.run.overlap_grad_reduce:
        return np.ones(len(splits))
    bucket = np.maximum(sync.bucket(problem.model.hidden_size), sync.bucket_elements_per_rank * splits.dp * splits.cp)
    most = linears_of_stage(problem, splits) if sync.buckets_by_hidden else np.inf
    return np.maximum(np.minimum(elements / bucket, most), 1.0)


def linear_tensors(problem: Problem) -> int:
    """Return the weights of a dense layer's linears, as the framework keeps them."""
    kernels = problem.framework.kernels
    up = 1 if kernels.fused_gate_up else problem.model.up_matrices
    return (1 if kernels.fused_qkv else 3) + 1 + up + 1


def linears_of_stage(problem: Problem, splits: Splits) -> np.ndarray:
    """Return the weights of the linears of a stage's layers, on average over the stages; [splits]."""
    return linear_tensors(problem) * problem.model.num_hidden_layers / splits.pp


def units(problem: Problem, splits: Splits, name: str) -> np.ndarray:
    """Return FSDP's units on a stage that hold a group's parameters, fractions allowed: its layers, or one of the rest."""
    layers = problem.model.num_hidden_layers if name != OTHERS else 1
    return np.maximum(layers / splits.pp, 1.0)


def tensors_of_stage(problem: Problem, splits: Splits) -> np.ndarray:
    """Return how many tensors hold the parameters of a stage's layers, on average over the stages; [splits]."""
    per_layer = problem.framework.data_parallel.tensors_per_layer
    return per_layer * problem.model.num_hidden_layers / splits.pp


def list_seconds(problem: Problem, splits: Splits) -> np.ndarray:
    """Return the seconds of the host for the lists of parts that ZeRO's collectives take, [splits]."""
    sync, ranks = problem.framework.data_parallel, shard_ranks(problem, splits)[OTHERS]
    tensors = tensors_of_stage(problem, splits)
    return sync.seconds_per_part * tensors * np.where(ranks > 1, ranks, 0)
