"""Buffers beside the gradients: those that they are reduced in, and what autograd makes before they are added."""

from __future__ import annotations

import numpy as np

from solver.layers.program import LINEARS, OTHERS, VOCABULARY
from solver.spec.recipes import FP32, HALF
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Splits
from solver.step.problem import Problem
from solver.step.stage_kinds import StageKinds


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


def dummy_gradients(priced: PricedSplits, stages: StageKinds, stage: int) -> np.ndarray:
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


def largest_tensor(problem: Problem, splits: Splits, has_table: np.ndarray | bool = True) -> np.ndarray:
    """Return the elements of the largest weight on one rank, [splits]: of the MLP or, where there is one, the vocabulary's."""
    model, kernels = problem.model, problem.framework.kernels
    mlp = model.intermediate_size * (2 if kernels.fused_gate_up and model.gated_mlp else 1)
    return model.hidden_size * np.maximum(mlp, model.vocab_size * np.asarray(has_table)) / splits.tp
