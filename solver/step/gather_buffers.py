"""Weights that are all-gathered for a while, and the gradients beside them, by ZeRO stage."""

from __future__ import annotations

import numpy as np

from solver.layers.program import EXPERTS, LINEARS, OTHERS
from solver.spec.choices import TpMode
from solver.step.gradient_buffers import largest_tensor
from solver.step.layer_table import PricedSplits
from solver.step.parameter_groups import joined_ends, shard_ranks, trained_elements
from solver.step.problem import Problem
from solver.step.sharded_weights import gathered_bytes


def gather_buffers(priced: PricedSplits) -> np.ndarray:
    """Return the bytes of all-gathered weights by ZeRO stage, [2, 4, splits]: while the loss is computed, and while a layer's
    backward pass runs.

    ISP keeps two blocks of full weights (this one's and the next one's). DeepSpeed gathers ahead until it holds live_elements,
    or what one tensor needs, and its gradients go to a bucket (partitioned_param_coordinator.py, stage3.py). FSDP keeps, beside
    what its root keeps, two all-gathered layers, one layer's whole gradients and, if the root has both ends, those of the head
    in the latter, the gradients under ZeRO-2 too; while the loss is computed no layer is gathered, except in frameworks whose
    buffers stay or gather ahead (those without a root). FSDP2 has a layer's gradients as autograd makes them beside what it
    reduces of the layer after it, and frees a head that is a unit of its own after its backward pass (_fsdp_param_group.py,
    post_backward; _fsdp_collectives.py, foreach_reduce). The largest kind of layer decides.
    """
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    sizes = problem.element_bytes
    block = sizes.activation * np.max([part.parameters_of[LINEARS][key] for part in table.layers], axis=0) * splits.wp
    pool = np.where((splits.mode == TpMode.ISP) & (splits.wp > 1), 2 * block, 0.0)
    gathered, trained = _sharded_layers(priced)
    made = sizes.activation * trained * problem.framework.memory.copies_gradients
    queued = problem.framework.uses_megatron_fsdp
    fsdp = _queued(problem, gathered, trained) if queued else np.max(2 * gathered + sizes.gradient * trained + made, axis=0)
    if live := problem.framework.memory.live_elements:
        counts = np.bincount(problem.kinds.of_layer, minlength=len(gathered))[:, None]
        ends = joined_ends(problem, table.embedding.parameters[key], table.head.parameters[key])
        most = np.maximum(live, largest_tensor(problem, splits))  # what a module needs is gathered whatever there is
        fsdp = np.minimum((counts * gathered).sum(axis=0) + sizes.activation * ends, sizes.activation * most)
    stay = problem.framework.memory.root_stays
    held = (
        part.parameters_of[OTHERS][key] * (name in stay)
        for name, part in (("embedding", table.embedding), ("head", table.head))
    )
    root = joined_ends(problem, *held) * sizes.activation
    # one flat parameter: autograd splits its gradient, and the head's part waits for the embedding's
    waiting = sizes.activation * table.head.parameters_of[OTHERS][key] * ({"embedding", "head"} <= set(stay) and not queued)
    at_loss, passed = fsdp * (not stay), root * (stay != ("head",))
    whole = pool + (np.max(made + sizes.gradient * trained, axis=0) + waiting) * problem.framework.data_parallel.shards_units
    return np.array([[pool, pool, pool, pool + root + at_loss], [pool, pool, whole, pool + passed + fsdp + waiting]])


def _sharded_layers(priced: PricedSplits) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of weights that are gathered of a layer of each kind, and its parameters whose gradients are reduced,
    [kinds, splits] each: without the experts where their ranks hold no copies, so that nothing shards them."""
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    ranks, wrapped = shard_ranks(problem, splits), problem.framework.data_parallel.wraps_lone_experts
    alone = (ranks[EXPERTS] == 1) if EXPERTS in ranks and not wrapped else np.zeros(len(splits), dtype=bool)
    gathered, trained = [], []
    for part, kind in zip(table.layers, problem.kinds.kinds, strict=True):
        experts = gathered_bytes(problem, part, key, kind.quantised, [EXPERTS])
        gathered.append(gathered_bytes(problem, part, key, kind.quantised, part.parameters_of) - alone * experts)
        trained.append(trained_elements(problem, part, key) - alone * part.parameters_of[EXPERTS][key])
    return np.array(gathered), np.array(trained)


def _queued(problem: Problem, gathered: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return the most bytes of gathered weights and whole gradients of Megatron-FSDP in a layer's backward pass: [splits].

    gathered, trained: bytes and parameters of a layer of each kind, [kinds, splits]. Its communication unit is of two layers or
    communication_unit parameters, whichever is more: layers are gathered ahead until they hold half of it, and gradients stay
    until those that were sent to be reduced exceed it (megatron_fsdp.py; wait_for_previous_grad_reduce and async_bucket_gather
    of param_and_grad_buffer.py).
    """
    counts = np.bincount(problem.kinds.of_layer, minlength=len(trained))[:, None]
    layers, stage = counts.sum(), (counts * trained).sum(axis=0)
    average, whole = np.maximum(stage / layers, 1.0), (counts * gathered).sum(axis=0)
    unit = np.maximum(problem.framework.memory.communication_unit, 2 * average)
    ahead = np.minimum(np.max(gathered, axis=0) + np.ceil(unit / 2 / average) * whole / layers, whole)
    return ahead + problem.element_bytes.gradient * np.minimum(unit + np.max(trained, axis=0), stage)
