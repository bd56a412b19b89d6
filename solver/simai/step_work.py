"""What a priced layout does once per step, or per layer under ZeRO-3: gradients, parameters, the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from solver.layers.program import EXPERTS, Op
from solver.simai.pieces import Piece, piece_of
from solver.spec.choices import Recompute
from solver.step.data_parallel_ops import buffer_op
from solver.step.once_terms import estimate_synchronisation
from solver.step.parameter_groups import parameter_groups
from solver.step.sharded_weights import UNITS
from solver.step.solutions import Solutions
from solver.step.synchronisation import reduces_whole
from solver.step.terms import estimate_send_recv
from solver.step.time import accumulations, sharded_casts

_OF_COPIES = {False: "dp", True: "ep_dp"}
#: Ops once per step whose messages are of other groups than data parallelism.
_GROUPS = {"gradient_norm": "all", "tied_embedding": "embedding"}
_FIRST = "gradients.reduce_scatter"  #: the first op of each group of parameters


@dataclass(frozen=True)
class StepWork:
    """What a step does outside its layers.

    reduced: messages of gradients. gathered: those of new parameters. other: the gradient norm, tied embeddings. update:
    kernels that add up gradients and update parameters. send: bytes of one activation that a rank sends to the next stage.
    """

    reduced: tuple[Piece, ...]
    gathered: tuple[Piece, ...]
    other: tuple[Piece, ...]
    update: tuple[Piece, ...]
    send: int


def step_work(solutions: Solutions, index: int) -> StepWork:
    """Return what layout ``index`` does once per step. Without a pipeline ZeRO-2 reduces gradients in every micro batch."""
    zero, problem = int(solutions.layouts.zero[index]), solutions.problem
    split = solutions.layouts.one(index).splits
    m, pp = int(split.num_micro_batches[0]), int(split.pp[0])
    again = int(solutions.layouts.recompute[index]) == Recompute.FULL
    times = {
        "accumulation": round(float(accumulations(problem, zero, m, pp))),
        "weight_casts": int(sharded_casts(problem, m, again)) if zero == 3 else 1,
    }
    whole = reduces_whole(problem.framework, problem.run, zero)
    reducing = "" if zero == 3 else "gradients.all_reduce" if whole else "gradients.reduce_scatter"
    gathering = "parameters.all_gather" if zero in (1, 2) else ""
    updating = {"optimizer.whole" if zero == 0 else "optimizer.shard", buffer_op(problem, zero, pp), *times}
    sync = problem.framework.data_parallel
    every = ({gathering} if sync.shards_units and not problem.runs_no_sync else set()) | (
        set() if problem.defers_sync else {reducing}
    )
    every = every if zero == 2 and pp == 1 else set()
    found = dict[str, list[Piece]]()
    for name, piece in _pieces(solutions, index):
        runs = m if name in every else times.get(name, 1)
        kind = (
            "reduced"
            if name == reducing
            else "gathered"
            if name == gathering
            else "other"
            if name in _GROUPS
            else "update"
            if name in updating
            else ""
        )
        kind = kind if piece.is_message or kind in ("", "update") else "update"  # copies into and out of buckets
        found.setdefault(kind, []).extend([piece] * runs)
    reduced, gathered, other, update = (tuple(found.get(kind, ())) for kind in ("reduced", "gathered", "other", "update"))
    return StepWork(reduced, gathered, other, update, _send_bytes(solutions, index))


def _send_bytes(solutions: Solutions, index: int) -> int:
    split = solutions.layouts.one(index).splits
    if int(split.pp[0]) == 1:
        return 0
    ops = estimate_send_recv(solutions.problem, split).ops
    return int(next(np.asarray(op.dims["bytes"])[0] for op in ops if op.kind == "p2p"))


def sharded_messages(solutions: Solutions, index: int) -> Mapping[str, tuple[Piece, ...]]:
    """Return ZeRO-3's messages of a layer of each kind (layer0, ...), of embedding and head (root), of a head that is a unit
    of its own (head), and of layers of multi-token prediction (predicting...); nothing otherwise."""
    if int(solutions.layouts.zero[index]) != 3:
        return {}
    found = dict[str, list[Piece]]()
    for name, piece in _pieces(solutions, index):
        owner = name.split(".")[0]
        if piece.is_message and owner.startswith(UNITS):
            found.setdefault(owner, []).append(piece)
    return {owner: tuple(pieces) for owner, pieces in found.items()}


def _pieces(solutions: Solutions, index: int) -> Iterator[tuple[str, Piece]]:
    """Yield (name, piece) of every op that some ZeRO stage runs once per step, with the group that holds its parameters."""
    row = int(solutions.layouts.row[index])
    split = solutions.priced.take(np.array([row]))
    held = parameter_groups(split)
    estimates, groups = estimate_synchronisation(split, held), list(held)
    seconds, number, owners = (estimates.seconds * estimates.counts())[:, 0], -1, set[str]()
    for op, op_seconds in zip(estimates.ops, seconds, strict=True):
        number += op.name == _FIRST and op.kind == "reduce_scatter"
        experts = groups[min(max(number, 0), len(groups) - 1)] == EXPERTS
        if op.name.startswith(UNITS):
            experts = _second_of_its_kind(op, owners)
        group = _GROUPS.get(op.name) or _OF_COPIES[experts]
        if op_seconds > 0:
            yield op.name, piece_of(op, 0, float(op_seconds), 1, group)


def _second_of_its_kind(op: Op, seen: set[str]) -> bool:
    """Return whether a layer's messages are those of its experts, which follow those of its other parameters."""
    owner = op.name.split(".")[0]
    if op.name.endswith("all_gather") and op.kind != "memory_bound":
        if owner in seen:
            seen.add(f"{owner} experts")
        seen.add(owner)
    return f"{owner} experts" in seen
