"""Workspaces of cuBLAS that live in torch's allocator, and so in the framework's counter of its peak."""

from __future__ import annotations

from profiler.profile.profile import MIB
from solver.step.problem import Problem

#: Of torch, for each thread that runs GEMMs; of Transformer Engine, one. Sources: aten/src/ATen/cuda/CUDABlas.cpp
#: (getChosenWorkspaceSize: 2 x 4 MiB + 8 x 16 KiB, since Hopper 32 MiB) and transformer_engine/pytorch/module/base.py, as read.
TORCH_BYTES, TORCH_BYTES_HOPPER = 8.125 * MIB, 32 * MIB
TE_BYTES, TE_BYTES_HOPPER = 4 * MIB, 32 * MIB
#: CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic GEMMs need.
DETERMINISTIC_BYTES = 32 * MIB
#: Streams on which Transformer Engine runs the GEMMs of experts, each with a workspace.
EXPERT_STREAMS = 4


def workspace_bytes(problem: Problem) -> float:
    """Return the bytes of all workspaces of one rank."""
    memory, hopper = problem.framework.memory, "fp8" in problem.cost.device.peak_flops
    of_torch = DETERMINISTIC_BYTES if problem.run.deterministic else TORCH_BYTES_HOPPER if hopper else TORCH_BYTES
    grouped = problem.model.is_mixture_of_experts and problem.run.moe_grouped_gemm
    of_te = (TE_BYTES_HOPPER if hopper else TE_BYTES) * (1 + EXPERT_STREAMS * grouped)
    return memory.cublas_threads * of_torch + memory.transformer_engine * of_te
