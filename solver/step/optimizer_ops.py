"""Kernels of the optimizer's step on a rank's parameters, by ZeRO stage."""

from __future__ import annotations

import numpy as np

from solver.layers.program import MEMORY_BOUND, ONCE_PER_STEP, OTHERS, Op
from solver.spec.precision import MOMENTS
from solver.spec.recipes import FP32, HALF
from solver.step.offload import gradient_ops, optimizer_ops
from solver.step.problem import Problem

#: Bytes per parameter around Muon's iterations (solver.step.muon), in fp32: momentum (gradient and it read, it written: 12),
#: norm (4) and division by it (8), to 16 bits and back (12), two scalings (16), weight decay (8), update (12), the 16-bit
#: weight (6). Without Nesterov's mean (muon_use_nesterov). emerging_optimizers' muon_utils.py and orthogonalized_optimizer.py.
MUON_BYTES = 78.0
#: Bytes per parameter by which Transformer Engine's Adam widens narrow moments for its step and narrows them again: read, fp32
#: written, read, written narrow (of bf16 twice, a tensor of its own first; of 8 bits the largest value is looked for before).
#: Source: fused_adam.py (get_unscaled_state, _apply_scale), as read.
WIDENED = {"bf16": 2 * (2 + FP32 + FP32 + 2 + 2 + 2), "8bit": 2 * (1 + FP32 + FP32 + FP32 + 1)}


def update_ops(problem: Problem, name: str, kind: str, owned: np.ndarray) -> list[Op]:
    """Return the kernels of an optimizer's step on ``owned`` parameters of a group: a rank's whole ones, or its ZeRO shard."""
    sync, here = problem.framework.data_parallel, 1.0 - problem.run.optimizer_offload_fraction
    moved = MUON_BYTES if orthogonalises(problem, name) else adam_bytes(problem)
    moved += sync.whole_step_bytes * (kind == "whole" and problem.element_bytes.gradient == HALF)
    if kind == "shard" and problem.element_bytes.gradient == HALF:
        moved += sync.shard_step_bytes + sync.overflow_bytes * (problem.run.precision == "fp16")
    passes = {"bytes": owned * problem.element_bytes.gradient * sync.gradient_passes}
    return [
        *optimizer_ops(problem, f"optimizer.{kind}", owned),
        *(gradient_ops(problem, owned) if kind == "shard" else []),
        Op(f"optimizer.{kind}", "optimizer", MEMORY_BOUND, ONCE_PER_STEP, {"bytes": owned * here * moved}, variant="adam"),
        Op(
            f"optimizer.{kind}",
            "optimizer",
            MEMORY_BOUND,
            ONCE_PER_STEP,
            passes,
            variant="residual",
            count=float(sync.gradient_passes > 0),
        ),
    ]


def orthogonalises(problem: Problem, name: str) -> bool:
    """Whether Muon, and not Adam, updates a group of parameters."""
    return problem.run.optimizer == "muon" and name != OTHERS


def adam_bytes(problem: Problem) -> float:
    """Return the memory traffic of an Adam step per parameter: narrower moments are read and written in fewer bytes, unless
    they are widened for it."""
    whole, states = problem.framework.data_parallel.optimizer_bytes_per_parameter, problem.run.optimizer_states
    if problem.framework.memory.fused_adam_copies and states in WIDENED:
        return whole + WIDENED[states]
    return whole - 2 * 2 * (MOMENTS["fp32"] - MOMENTS[states])
