"""What lives on the host: a share of the optimizer's moments, and the saved activations of some layers.

Both cross the host's link (PCIe or NVLink-C2C), whose bandwidth the cluster states. Sources: Ren et al. 2021 (ZeRO-Offload,
arXiv 2101.06840); Megatron-Core's HybridDeviceOptimizer and Transformer Engine's cpu_offload.py, as read.
"""

from __future__ import annotations

import numpy as np

from solver.layers.program import HOST_LINK, HOST_MEMORY, Op
from solver.spec.precision import MOMENTS
from solver.spec.recipes import FP32
from solver.step.problem import Problem

#: Adam on the host reads weight, both moments and the gradient, and writes all but the last, in fp32 [bytes per parameter].
HOST_ADAM_BYTES = 7 * FP32
#: Layers whose activations are on the device at a time: the one that computes, and the one that leaves or comes back.
RESIDENT_LAYERS = 2


def optimizer_ops(problem: Problem, name: str, owned: np.ndarray) -> list[Op]:
    """Return the host's part of an optimizer step over ``owned`` parameters of a rank: fp32 gradients go to the host, the
    host's Adam runs, fp32 weights come back, one after the other."""
    share = problem.run.optimizer_offload_fraction
    if not share:
        return []
    moved = owned * share
    return [
        Op(name, "optimizer", HOST_LINK, "step", {"bytes": moved * 2 * FP32}),
        Op(name, "optimizer", HOST_MEMORY, "step", {"bytes": moved * HOST_ADAM_BYTES}),
    ]


def moments_on_host(problem: Problem) -> float:
    """Return the bytes per parameter of both moments that are on the host."""
    return problem.run.optimizer_offload_fraction * 2.0 * MOMENTS[problem.run.optimizer_states]


def exposed_transfer(problem: Problem, saved: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the seconds by which an offloaded layer's activations of ``saved`` bytes are late: what their way to the host
    exceeds a layer's forward pass by, and what their way back exceeds its backward pass by. Arrays of one shape."""
    transfer = saved / max(problem.cluster.host_link, 1.0)
    late: np.ndarray = np.maximum(transfer - forward, 0.0) + np.maximum(transfer - backward, 0.0)
    return late
