"""Messages and kernels of data parallelism once per step: gradients and parameters, and the copies around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from solver.layers.program import MEMORY_BOUND, ONCE_PER_STEP, OTHERS, Op, message
from solver.spec.choices import TpMode
from solver.spec.cluster import Placement, placement
from solver.step.layouts import Splits
from solver.step.message_counts import buckets, tensors_of_stage, units
from solver.step.optimizer_ops import update_ops
from solver.step.parameter_groups import ParameterGroup, partitions, shard_ranks, shares_vocabulary
from solver.step.problem import Problem


def synchronisation_ops(problem: Problem, groups: Mapping[str, ParameterGroup], splits: Splits) -> list[Op]:
    """Return every message and kernel that some ZeRO stage needs once per step (or, under FSDP, per layer); arrays over splits.

    gradients.all_reduce: whole gradients over all copies. gradients.reduce_scatter: reduce-scatter inside the shard group and
    all-reduce of the shards across groups (hybrid sharding). parameters.all_gather: 16-bit parameters inside the shard group.
    """
    shards = shard_ranks(problem, splits)
    shares = partitions(problem, splits, {name: group.elements for name, group in groups.items()}, shards)
    ops: list[Op] = []
    whole = np.sum([group.elements for group in groups.values()], axis=0)
    for name, group in groups.items():
        sync = problem.framework.data_parallel
        if problem.is_frozen(name):  # FSDP gathers them all the same
            ops += _gather_ops(problem, name, group, shards[name], units(problem, splits, name)) if sync.shards_units else []
            continue
        shared = shares_vocabulary(problem, splits) & (name == OTHERS)
        tensors = np.where(shared, 2, np.ceil(tensors_of_stage(problem, splits)))
        messages = _messages(problem, splits, name, group, whole, np.minimum(shards[name], tensors))
        ops += _exchange_ops(problem, name, group, shards[name], messages)
        passes = sync.buffer_passes + sync.scaling_passes * (splits.dp * splits.cp > 1)
        ops += _kernel_ops(problem, name, group, shares[name], passes)
        ops += update_ops(problem, name, "whole", np.where(shared, shares[name], group.elements))
        ops += update_ops(problem, name, "shard", shares[name])
    node, copies, number = problem.cluster.gpus_per_domain, splits.cp * splits.dp, np.full(len(splits), 4.0)
    model = problem.framework.data_parallel.norm_of_model
    sums = [(splits.tp * splits.pp, 1), (copies, splits.tp)] if model else [(splits.tp * copies * splits.pp, 1)]
    return ops + [once_message("gradient_norm", "all_reduce", number, placement(*group, node)) for group in sums]


class _Messages(NamedTuple):
    """Numbers of a group's collectives in a step: whole gradients, sharded ones, parameters; [splits] each."""

    whole: np.ndarray
    sharded: np.ndarray
    parameters: np.ndarray


def _messages(
    problem: Problem, splits: Splits, name: str, group: ParameterGroup, whole: np.ndarray, senders: np.ndarray
) -> _Messages:
    """Return how many messages carry a group's gradients and parameters.

    whole: parameters of all groups. senders: ranks that have parameters to broadcast. A rank sends those of all groups whose
    copies are on the same ranks in one buffer (InternEvo's broadcast_params): without ISP the others are in the linears'.
    """
    sync = problem.framework.data_parallel
    count = buckets(problem, splits, group.elements, whole)
    sharded = units(problem, splits, name) if sync.shards_units else np.ones_like(count) if sync.shards_at_once else count
    if sync.param_collective == "broadcast":
        joins = (name == OTHERS) & (splits.mode != TpMode.ISP)
        return _Messages(count, sharded, np.where(joins, 1.0, senders))
    if sync.gather_bucket_elements:
        return _Messages(count, sharded, np.maximum(group.elements / sync.gather_bucket_elements, 1.0))
    return _Messages(count, sharded, sharded)


def _exchange_ops(problem: Problem, name: str, group: ParameterGroup, shard: np.ndarray, messages: _Messages) -> list[Op]:
    """Return the messages of a group's gradients and parameters, and the copies between these and their buffers."""
    sync, grad = problem.framework.data_parallel, problem.element_bytes.gradient
    reduced = group.elements * (sync.communicated_gradient_bytes or grad)
    scattered = grad * sync.reduce_scatter_copies or sync.bucket_copy_bytes  # FSDP's own copies, else those into buckets
    return [
        *group_ops(problem, "gradients", reduced, group, shard, messages.whole, messages.sharded),
        *copy_ops("gradients.all_reduce", group.elements * sync.bucket_copy_bytes, group),
        *copy_ops("gradients.reduce_scatter", group.elements * scattered, group),
        *_gather_ops(problem, name, group, shard, messages.parameters),
    ]


def _gather_ops(problem: Problem, name: str, group: ParameterGroup, shard: np.ndarray, messages: np.ndarray) -> list[Op]:
    """Return the messages of a group's parameters, and the copies around them; under FSDP each rank casts its shard before."""
    sizes, sync, kept = problem.element_bytes, problem.framework.data_parallel, problem.weight_recipe
    narrower = sizes.weight - kept.gathered if kept is not None and kept.gathered else 0.0
    gathered, owned = group.elements * sizes.weight - group.quantised * narrower, group.elements / shard
    return [
        *gather_ops("parameters.all_gather", sync.param_collective, gathered, group, shard, messages, problem),
        *copy_ops("parameters.all_gather", gathered * sync.all_gather_copies, group),
        *copy_ops("parameters.all_gather", owned * sync.shard_cast_bytes * sync.shards_units, group),
    ]


def buffers_shard(problem: Problem, zero: Any, pp: Any) -> Any:
    """Return whether a rank's buffer of gradients holds its shard alone between micro batches (Megatron-FSDP's
    main_grad_buffer), or else all of them; arguments broadcast."""
    return (zero == 3) | ((zero == 2) & (pp == 1) & (not problem.defers_sync))


def buffer_op(problem: Problem, zero: int, pp: int) -> str:
    """Return the name of the passes over that buffer."""
    return f"gradient_buffer.{'shard' if buffers_shard(problem, zero, pp) else 'whole'}"


def _kernel_ops(problem: Problem, name: str, group: ParameterGroup, owned: np.ndarray, passes: np.ndarray) -> list[Op]:
    """Return the kernels that cast a group's weights, add its gradients to a buffer, and pass over that buffer, which holds all
    of them or those that are ``owned``. passes: reads or writes of the buffer in a step, [splits].

    An addition reads the new gradient, reads and writes the buffer; it is not needed with Megatron's fused GEMMs or FSDP's
    shards. A cast before it writes the gradient in the buffer's type, which is read in its place. Under FSDP1's no_sync
    autograd first joins the gradients of a unit's parameters, a read and a write more.
    """
    sizes, sync, kept = problem.element_bytes, problem.framework.data_parallel, problem.weight_recipe
    apart = not problem.fused_accumulation or sync.accumulates_whole or problem.runs_no_sync
    casts = sync.accumulation_casts and sizes.gradient > sizes.weight
    mixed = sizes.gradient > sizes.weight and not casts and not problem.runs_no_sync
    added = 5.0 * sizes.activation if problem.runs_no_sync else sizes.weight + 2.0 * sizes.gradient * (1 + casts)

    def kernel(what: str, module: str, size: Any, there: Any, variant: str, elements: np.ndarray = group.elements) -> Op:
        dims = {"bytes": elements * size * there}
        return Op(what, module, MEMORY_BOUND, ONCE_PER_STEP, dims, count=1.0 * there, variant=variant)

    passed = passes > 0
    cast = []
    if kept and name != OTHERS:
        cast = [kernel("weight_casts", "optimizer", kept.cast, True, "quantize", group.quantised)]
    return [
        *cast,
        kernel("accumulation", "gradients", added, apart, "mixed" if mixed else "residual"),
        kernel("gradient_buffer.whole", "gradients", sizes.gradient * passes, passed, "residual"),
        kernel("gradient_buffer.shard", "gradients", sizes.gradient * passes, passed, "residual", owned),
    ]


def once_message(name: str, op: str, size: np.ndarray, place: Placement, count: np.ndarray | float = 1.0) -> Op:
    """Return an op that sends ``size`` bytes in ``count`` equal messages, one after the other."""
    ranks = place.intra * place.inter
    return Op(
        name, "data parallel", op, ONCE_PER_STEP, message(size / count, place), "dp", count=np.where(ranks > 1, count, 0.0)
    )


def group_ops(
    problem: Problem,
    name: str,
    size: np.ndarray,
    group: ParameterGroup,
    shard: np.ndarray,
    whole: np.ndarray | float,
    sharded: np.ndarray | float,
) -> list[Op]:
    """Gradients of ``size`` bytes over a group.

    They are all-reduced in ``whole`` messages (0: never), or in ``sharded`` ones reduce-scattered inside shard groups and
    all-reduced across them.
    """
    node = problem.cluster.gpus_per_domain
    inside = placement(shard, group.stride, node)
    across = placement(np.maximum(group.size // shard, 1), group.stride * shard, node)
    ops = [
        once_message(f"{name}.reduce_scatter", "reduce_scatter", size, inside, sharded),
        once_message(f"{name}.reduce_scatter", "all_reduce", size / shard, across, sharded),
    ]
    if np.any(whole):
        everyone = placement(group.size, group.stride, node)
        ops.append(once_message(f"{name}.all_reduce", "all_reduce", size, everyone, whole))
    return ops


def copy_ops(name: str, size: np.ndarray, group: ParameterGroup) -> list[Op]:
    """Copies of ``size`` bytes, read and written, that belong to the message ``name``; none where nothing is sent or copied."""
    if not np.any(size):
        return []
    there = np.where(group.size > 1, 1.0, 0.0)
    return [Op(name, "data parallel", MEMORY_BOUND, ONCE_PER_STEP, {"bytes": size}, count=there, variant="copy")]


def gather_ops(
    name: str, how: str, size: np.ndarray, group: ParameterGroup, shard: np.ndarray, count: np.ndarray | float, problem: Problem
) -> list[Op]:
    """Parameters of ``size`` bytes in the shard group in ``count`` messages: all-gathered, or broadcast rank by rank."""
    return [once_message(name, how, size, placement(shard, group.stride, problem.cluster.gpus_per_domain), count)]
