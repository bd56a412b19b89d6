"""Offload to the host: a share of the optimizer's moments, gradients, and saved activations.

Both cross the host's link (PCIe or NVLink-C2C), whose bandwidth the cluster states. Sources: Ren et al. 2021 (ZeRO-Offload,
arXiv 2101.06840); Megatron-Core's HybridDeviceOptimizer and Transformer Engine's cpu_offload.py, as read.
"""

from __future__ import annotations

import numpy as np

from solver.layers.program import HOST_LINK, HOST_MEMORY, ONCE_PER_STEP, Op
from solver.spec.precision import MOMENTS
from solver.spec.recipes import FP32, HALF
from solver.step.layouts import Splits
from solver.step.problem import Problem

TO_HOST = "gradients.to_host"  #: name of the op
#: Adam on the host reads weight, both moments and the gradient, and writes all but the last, in fp32 [bytes per parameter].
HOST_ADAM_BYTES = 7 * FP32
#: Where the fp32 weights live on the host only, it makes 16-bit ones of them for the device (torch converts on the source).
HOST_CAST_BYTES = FP32 + HALF
#: Where the host unscales and clips the gradients, in place.
HOST_CLIP_BYTES = 2 * FP32
#: Layers whose activations are on the device at a time: the one that computes, and the one that leaves or comes back.
RESIDENT_LAYERS = 2
#: The same where modules are offloaded one by one: those of the last layer stay, since its backward pass comes next; then each
#: comes back as the one after it has run.
RESIDENT_MODULES = 1


def gradient_ops(problem: Problem, owned: np.ndarray) -> list[Op]:
    """Return the copy of a micro batch's gradients of ``owned`` parameters to the host, as wide as activations."""
    if not problem.run.offload_gradients:
        return []
    moved = owned * problem.run.optimizer_offload_fraction
    return [Op(TO_HOST, "gradients", HOST_LINK, ONCE_PER_STEP, {"bytes": moved * problem.element_bytes.activation})]


def serialised_ranks(problem: Problem, splits: Splits, elements: np.ndarray) -> np.ndarray:
    """Return how many ranks copy gradients to the host one after the other (not in parallel) under ZeRO-2, [splits].

    Its partitions are contiguous, so that a bucket of the rank's ``elements`` belongs to as many ranks as have a part of it,
    and the next bucket's reduction waits for their copies (DeepSpeed 0.19: stage_1_and_2.py, reduce_ipg_grads;
    round_robin_gradients, off unless asked for, would deal each bucket to all ranks).
    """
    buckets = elements / problem.framework.data_parallel.bucket(problem.model.hidden_size)
    return np.clip(buckets, 1.0, splits.dp * splits.cp)


def exposed_gradient_offload(
    to_host: np.ndarray, backward: np.ndarray, micro_batches: np.ndarray, zero: np.ndarray, turns: np.ndarray, overlaps: bool
) -> np.ndarray:
    """Return the exposed seconds per step of moving gradients to the host. to_host: seconds of a rank's copy, one
    way, in 16 bits. turns: serialised_ranks.

    overlaps: copies overlap with the backward pass (DeepSpeed's overlap_comm); only what outlasts it is exposed. Under ZeRO-2
    they never do: the host waits for each copy before the next, and with it the launches of the backward pass. After the first
    micro batch the sum comes from the host, is added to on the device and goes back; the last one's also goes in fp32. ZeRO-2
    sends a single micro batch's in fp32 alone, ZeRO-3 reads back what it has just sent after the first one, too (DeepSpeed
    0.19: stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu and async_inplace_copy_grad_to_fp32_buffer_from_gpu; stage3.py,
    partition_grads).
    """
    sharded = zero == 3
    hidden, copied = np.where(sharded & overlaps, backward, 0.0), to_host * np.where(sharded, 1.0, turns)

    def exposed(copies: np.ndarray | float) -> np.ndarray:
        return np.maximum(copies * copied - hidden, 0.0)

    several = exposed(np.where(sharded, 2.0, 1.0)) + (micro_batches - 2) * exposed(2.0) + exposed(4.0)
    return np.where(micro_batches == 1, exposed(np.where(sharded, 4.0, 2.0)), several)


def optimizer_ops(problem: Problem, name: str, owned: np.ndarray) -> list[Op]:
    """Return the host's part of an optimizer step over ``owned`` parameters of a rank: fp32 gradients go to the host, the
    host's Adam runs, weights come back, one after the other: in fp32 where the device has such, else in 16 bits. Offloaded
    gradients are on the host already."""
    share, memory = problem.run.optimizer_offload_fraction, problem.framework.memory
    if not share:
        return []
    to_host = 0 if problem.run.offload_gradients else FP32
    to_device = problem.element_bytes.weight if memory.offloads_master else FP32
    host = HOST_ADAM_BYTES + HOST_CAST_BYTES * memory.offloads_master + HOST_CLIP_BYTES * memory.clips_on_host
    return [
        Op(name, "optimizer", HOST_LINK, ONCE_PER_STEP, {"bytes": owned * share * (to_host + to_device)}),
        Op(name, "optimizer", HOST_MEMORY, ONCE_PER_STEP, {"bytes": owned * share * host}),
    ]


def host_state_bytes(problem: Problem) -> float:
    """Return the bytes per parameter of the optimizer's states on the host: both moments, and perhaps the fp32 weight."""
    moments = 2.0 * MOMENTS[problem.run.optimizer_states]
    leaving = problem.element_bytes.states if problem.framework.memory.offloads_master else moments
    return problem.run.optimizer_offload_fraction * leaving


def gradient_share_on_device(problem: Problem) -> float:
    """Return the share of a rank's partition of the gradients that stays on the device under ZeRO-2 and 3."""
    return 1.0 - problem.run.optimizer_offload_fraction * problem.run.offload_gradients


def exposed_transfer(
    problem: Problem, saved: np.ndarray, forward: np.ndarray, backward: np.ndarray, next_pass: float | np.ndarray = 1.0
) -> np.ndarray:
    """Return the exposed seconds of moving ``saved`` bytes to the host, under a ``forward`` pass, and back, under a
    ``backward`` pass: the part of each transfer that outlasts the pass. Arrays of one shape.

    next_pass: share whose backward pass comes right after its forward pass; the others have other passes' time to leave in.
    """
    transfer = saved / max(problem.cluster.host_link, 1.0)
    return next_pass * np.maximum(transfer - forward, 0.0) + np.maximum(transfer - backward, 0.0)
