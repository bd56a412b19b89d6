"""Work of a step outside the layers: gradient and parameter synchronisation, optimizer, pipeline send/recv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from solver.layers.program import MEMORY_BOUND, ONCE_PER_STEP, OTHERS, Op, message
from solver.spec.choices import TpMode
from solver.spec.cluster import Placement, placement
from solver.spec.precision import MOMENTS
from solver.spec.recipes import FP32, HALF
from solver.step.ddp_buckets import ddp_buckets
from solver.step.layouts import Splits
from solver.step.offload import gradient_ops, optimizer_ops
from solver.step.parameter_groups import ParameterGroup, partitions, shard_ranks, shares_vocabulary
from solver.step.problem import LayerTable, Problem

#: Bytes per parameter around Muon's iterations (solver.step.muon), in fp32: momentum (gradient and it read, it written: 12),
#: norm (4) and division by it (8), to 16 bits and back (12), two scalings (16), weight decay (8), update (12), the 16-bit
#: weight (6). Without Nesterov's mean (muon_use_nesterov). emerging_optimizers' muon_utils.py and orthogonalized_optimizer.py.
MUON_BYTES = 78.0


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
    most = linear_tensors(problem) * problem.model.num_hidden_layers / splits.pp if sync.buckets_by_hidden else np.inf
    return np.maximum(np.minimum(elements / bucket, most), 1.0)


def linear_tensors(problem: Problem) -> int:
    """Return the weights of a dense layer's linears, as the framework keeps them."""
    kernels = problem.framework.kernels
    up = 1 if kernels.fused_gate_up else problem.model.up_matrices
    return (1 if kernels.fused_qkv else 3) + 1 + up + 1


def units(problem: Problem, splits: Splits, name: str) -> np.ndarray:
    """Return FSDP's units on a stage that hold a group's parameters, fractions allowed: its layers, or one of the rest."""
    layers = problem.model.num_hidden_layers if name != OTHERS else 1
    return np.maximum(layers / splits.pp, 1.0)


def tensors_of_stage(problem: Problem, splits: Splits) -> np.ndarray:
    """Return how many tensors hold the parameters of a stage's layers, on average over the stages; [splits]."""
    per_layer = problem.framework.data_parallel.tensors_per_layer
    return per_layer * problem.model.num_hidden_layers / splits.pp


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
        if problem.is_frozen(name):
            continue
        shared = shares_vocabulary(problem, splits) & (name == OTHERS)
        tensors = np.where(shared, 2, np.ceil(tensors_of_stage(problem, splits)))
        messages = _messages(problem, splits, name, group, whole, np.minimum(shards[name], tensors))
        ops += _exchange_ops(problem, name, group, shards[name], messages)
        ops += _kernel_ops(problem, name, group, shares[name])
        ops += _update_ops(problem, name, "whole", np.where(shared, shares[name], group.elements))
        ops += _update_ops(problem, name, "shard", shares[name])
    node, copies, number = problem.cluster.gpus_per_domain, splits.cp * splits.dp, np.full(len(splits), 4.0)
    model = problem.framework.data_parallel.norm_of_model
    sums = [(splits.tp * splits.pp, 1), (copies, splits.tp)] if model else [(splits.tp * copies * splits.pp, 1)]
    return ops + [_message("gradient_norm", "all_reduce", number, placement(*group, node)) for group in sums]


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


def _exchange_ops(
    problem: Problem, name: str, group: ParameterGroup, shard: np.ndarray, messages: _Messages
) -> list[Op]:  # fmt: skip
    """Return the messages of a group's gradients and parameters, and the copies between these and their buffers."""
    sizes, sync, kept = problem.element_bytes, problem.framework.data_parallel, problem.weight_recipe
    grad = sizes.gradient
    reduced = group.elements * (sync.communicated_gradient_bytes or grad)
    scattered = grad * sync.reduce_scatter_copies or sync.bucket_copy_bytes  # FSDP's own copies, else those into buckets
    narrower = sizes.weight - kept.gathered if kept is not None and kept.gathered else 0.0
    gathered = group.elements * sizes.weight - group.quantised * narrower
    return [
        *group_ops(problem, "gradients", reduced, group, shard, messages.whole, messages.sharded),
        *copy_ops("gradients.all_reduce", group.elements * sync.bucket_copy_bytes, group),
        *copy_ops("gradients.reduce_scatter", group.elements * scattered, group),
        *gather_ops("parameters.all_gather", sync.param_collective, gathered, group, shard, messages.parameters, problem),
        *copy_ops("parameters.all_gather", gathered * sync.all_gather_copies, group),
    ]


def buffers_shard(problem: Problem, zero: Any, pp: Any) -> Any:
    """Return whether a rank's buffer of gradients holds its shard alone between micro batches (Megatron-FSDP's
    main_grad_buffer), or else all of them; arguments broadcast."""
    return (zero == 3) | ((zero == 2) & (pp == 1) & (not problem.defers_sync))


def buffer_op(problem: Problem, zero: int, pp: int) -> str:
    """Return the name of the passes over that buffer."""
    return f"gradient_buffer.{'shard' if buffers_shard(problem, zero, pp) else 'whole'}"


def _kernel_ops(problem: Problem, name: str, group: ParameterGroup, owned: np.ndarray) -> list[Op]:
    """Return the kernels that cast a group's weights, add its gradients to a buffer, and pass over that buffer, which holds all
    of them or those that are ``owned``.

    An addition reads the new gradient, reads and writes the buffer; it is not needed with Megatron's fused GEMMs or FSDP's
    shards. A cast before it writes the gradient in the buffer's type, which is read in its place. Under FSDP1's no_sync
    autograd first joins the gradients of a unit's parameters, a read and a write more.
    """
    sizes, sync, kept = problem.element_bytes, problem.framework.data_parallel, problem.weight_recipe
    apart = not problem.fused_accumulation or sync.accumulates_whole or problem.runs_no_sync
    casts = sync.accumulation_casts and sizes.gradient > sizes.weight
    mixed = sizes.gradient > sizes.weight and not casts and not problem.runs_no_sync
    added = 5.0 * sizes.activation if problem.runs_no_sync else sizes.weight + 2.0 * sizes.gradient * (1 + casts)

    def kernel(what: str, module: str, size: float, there: bool, variant: str, elements: np.ndarray = group.elements) -> Op:
        dims = {"bytes": elements * size * there}
        return Op(what, module, MEMORY_BOUND, ONCE_PER_STEP, dims, count=float(there), variant=variant)

    passes, passed = sizes.gradient * sync.buffer_passes, sync.buffer_passes > 0
    cast = [kernel("weight_casts", "optimizer", kept.cast, True, "quantize", group.quantised)] if kept else []
    return [
        *cast,
        kernel("accumulation", "gradients", added, apart, "mixed" if mixed else "residual"),
        kernel("gradient_buffer.whole", "gradients", passes, passed, "residual"),
        kernel("gradient_buffer.shard", "gradients", passes, passed, "residual", owned),
    ]


def _update_ops(problem: Problem, name: str, kind: str, owned: np.ndarray) -> list[Op]:
    """Return the kernels of an optimizer's step on ``owned`` parameters of a group: a rank's whole ones, or its ZeRO shard."""
    sync, here = problem.framework.data_parallel, 1.0 - problem.run.optimizer_offload_fraction
    moved = MUON_BYTES if orthogonalises(problem, name) else adam_bytes(problem)
    moved += sync.whole_step_bytes * (kind == "whole" and problem.element_bytes.gradient == HALF)
    passes = {"bytes": owned * problem.element_bytes.gradient * sync.gradient_passes}
    return [
        *optimizer_ops(problem, f"optimizer.{kind}", owned),
        *(gradient_ops(problem, owned) if kind == "shard" else []),
        Op(f"optimizer.{kind}", "optimizer", MEMORY_BOUND, ONCE_PER_STEP, {"bytes": owned * here * moved}, variant="adam"),
        Op(f"optimizer.{kind}", "optimizer", MEMORY_BOUND, ONCE_PER_STEP, passes, variant="residual",
           count=float(sync.gradient_passes > 0)),
    ]  # fmt: skip


def orthogonalises(problem: Problem, name: str) -> bool:
    """Whether Muon, and not Adam, updates a group of parameters."""
    return problem.run.optimizer == "muon" and name != OTHERS


#: Bytes per parameter by which Transformer Engine's Adam widens narrow moments for its step and narrows them again: read, fp32
#: written, read, written narrow (of bf16 twice, a tensor of its own first; of 8 bits the largest value is looked for before).
#: Source: fused_adam.py (get_unscaled_state, _apply_scale), as read.
WIDENED = {"bf16": 2 * (2 + FP32 + FP32 + 2 + 2 + 2), "8bit": 2 * (1 + FP32 + FP32 + FP32 + 1)}


def adam_bytes(problem: Problem) -> float:
    """Return the memory traffic of an Adam step per parameter: narrower moments are read and written in fewer bytes, unless
    they are widened for it."""
    whole, states = problem.framework.data_parallel.optimizer_bytes_per_parameter, problem.run.optimizer_states
    if problem.framework.memory.fused_adam_copies and states in WIDENED:
        return whole + WIDENED[states]
    return whole - 2 * 2 * (MOMENTS["fp32"] - MOMENTS[states])


def send_recv_ops(problem: Problem, splits: Splits) -> list[Op]:
    """Return the send of one activation (or its gradient) to the neighbouring stage: every tensor rank sends its share.

    Where the ranks hold the whole activation (MTP), each still sends only its part, and the receivers all-gather the parts
    inside their node (Narayanan et al. 2021, arXiv 2104.04473, section 4.1; InternEvo and DeepSpeed do the same).
    """
    row = problem.model.hidden_size * problem.element_bytes.activation
    whole = splits.tokens(problem.run.seq_len) * row
    ranks_per_stage = splits.tp * splits.cp * splits.dp
    node = problem.cluster.gpus_per_domain
    spans = ranks_per_stage * splits.pp > node  # then some neighbours are in two nodes, and the slowest hop sets the pace
    stride = np.where(spans, np.maximum(node, ranks_per_stage), ranks_per_stage)
    place = placement(np.where(splits.pp > 1, 2, 1), stride, node)
    tensor = placement(splits.tp, 1, node)
    apart = problem.framework.pipeline.scatter_gather or splits.mode != TpMode.MTP
    gathers = np.where((splits.mode == TpMode.MTP) & (splits.tp > 1) & apart, 1.0, 0.0)
    return [
        Op("send_recv", "pipeline", "p2p", ONCE_PER_STEP, message(whole // np.where(apart, splits.tp, 1), place), "pp"),
        Op("send_recv", "pipeline", "all_gather", ONCE_PER_STEP, message(whole, tensor), "pp", count=gathers),
    ]


def list_seconds(problem: Problem, splits: Splits) -> np.ndarray:
    """Return the seconds of the host for the lists of parts that ZeRO's collectives take, [splits]."""
    sync, ranks = problem.framework.data_parallel, shard_ranks(problem, splits)[OTHERS]
    tensors = tensors_of_stage(problem, splits)
    return sync.seconds_per_part * tensors * np.where(ranks > 1, ranks, 0)


def tied_embedding_op(problem: Problem, table: LayerTable, key: np.ndarray, splits: Splits) -> Op:
    """Return the sum of the embedding's gradients over the first and the last stage, where these are two and both hold it:
    tied embeddings, or multi-token prediction.
    """
    ranks = splits.tp * splits.cp * splits.dp * np.maximum(splits.pp - 1, 1)
    place = placement(np.where(splits.pp > 1, 2, 1), ranks, problem.cluster.gpus_per_domain)
    size = table.embedding.parameters[key] * problem.element_bytes.gradient
    op = _message("tied_embedding", "all_reduce", size, place)
    copied = problem.model.tie_word_embeddings or problem.model.num_nextn_predict_layers > 0
    copied = copied and not problem.is_frozen(OTHERS)
    present = np.where((splits.pp > 1) & ~splits.v_shaped & copied, 1.0, 0.0)  # a V ends where it begins
    return replace(op, count=present)


def _message(name: str, op: str, size: np.ndarray, place: Placement, count: np.ndarray | float = 1.0) -> Op:
    """Return an op that sends ``size`` bytes in ``count`` equal messages, one after the other."""
    ranks = place.intra * place.inter
    return Op(
        name, "data parallel", op, ONCE_PER_STEP, message(size / count, place), "dp", count=np.where(ranks > 1, count, 0.0)
    )


def group_ops(
    problem: Problem, name: str, size: np.ndarray, group: ParameterGroup, shard: np.ndarray, whole: np.ndarray | float,
    sharded: np.ndarray | float,
) -> list[Op]:  # fmt: skip
    """Gradients of ``size`` bytes over a group.

    They are all-reduced in ``whole`` messages (0: never), or in ``sharded`` ones reduce-scattered inside shard groups and
    all-reduced across them.
    """
    node = problem.cluster.gpus_per_domain
    inside = placement(shard, group.stride, node)
    across = placement(np.maximum(group.size // shard, 1), group.stride * shard, node)
    ops = [
        _message(f"{name}.reduce_scatter", "reduce_scatter", size, inside, sharded),
        _message(f"{name}.reduce_scatter", "all_reduce", size / shard, across, sharded),
    ]
    if np.any(whole):
        everyone = placement(group.size, group.stride, node)
        ops.append(_message(f"{name}.all_reduce", "all_reduce", size, everyone, whole))
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
    return [_message(name, how, size, placement(shard, group.stride, problem.cluster.gpus_per_domain), count)]
