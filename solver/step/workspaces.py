"""Workspaces of cuBLAS, which live in torch's allocator, so in the framework's counter of its peak; buffers outside of it."""

from __future__ import annotations

import numpy as np

from profiler.units import MIB
from solver.spec.recipes import FP32, HALF
from solver.step.layouts import Splits
from solver.step.problem import Problem

#: Of torch, for each thread that runs GEMMs; of Transformer Engine, one. Sources: aten/src/ATen/cuda/CUDABlas.cpp
#: (getChosenWorkspaceSize: 2 x 4 MiB + 8 x 16 KiB, since Hopper 32 MiB) and transformer_engine/pytorch/module/base.py, as read.
#: AMD's libraries are taken for the same.
TORCH_BYTES, TORCH_BYTES_SINCE_HOPPER = 8.125 * MIB, 32 * MIB
TE_BYTES, TE_BYTES_SINCE_HOPPER = 4 * MIB, 32 * MIB
#: CUBLAS_WORKSPACE_CONFIG=:4096:8, which deterministic GEMMs need.
DETERMINISTIC_BYTES = 32 * MIB
#: Streams on which Transformer Engine runs the GEMMs of experts, each with a workspace.
EXPERT_STREAMS = 4


def workspace_bytes(problem: Problem) -> float:
    """Return the bytes of all workspaces of one rank."""
    memory, newer = problem.framework.memory, "fp8" in problem.cost.device.peak_flops
    of_torch = DETERMINISTIC_BYTES if problem.run.deterministic else TORCH_BYTES_SINCE_HOPPER if newer else TORCH_BYTES
    grouped = problem.model.is_mixture_of_experts and problem.run.moe_grouped_gemm
    of_te = (TE_BYTES_SINCE_HOPPER if newer else TE_BYTES) * (1 + EXPERT_STREAMS * grouped)
    return memory.cublas_threads * of_torch + problem.framework.kernels.transformer_engine * of_te


def exchange_bytes(problem: Problem, splits: Splits) -> np.ndarray:
    """Return the bytes of hybrid-EP's buffers for what a rank may get at most, outside the allocator; shape [splits].

    All tokens of the group, each with its row and an fp32 probability for every expert of the NVLink domain; where the group
    spans domains, dispatch and combine have one each. Source: DeepEP's csrc/hybrid_ep/hybrid_ep.cu (allocate_buffer), as read.
    """
    model, run, ranks = problem.model, problem.run, splits.ep * splits.etp
    if run.moe_dispatcher != "hybridep" or not model.is_mixture_of_experts:
        return np.zeros(len(splits.tp))
    domain = problem.cluster.gpus_per_domain
    tokens = splits.tokens(run.seq_len) // splits.tp * ranks
    token = HALF * model.hidden_size + FP32 * model.num_experts * splits.etp * np.minimum(domain / ranks, 1.0)
    return tokens * token * np.where(ranks > domain, 2, 1) * (ranks > 1)
