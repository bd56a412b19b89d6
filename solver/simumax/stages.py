"""Times and bytes of every pipeline stage of one layout, in the parts that SimuMax's results have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from solver.layers.program import EXPERTS
from solver.step.layer_table import PricedSplits
from solver.step.memory import MEMORY_PARTS
from solver.step.parameter_groups import shard_ranks, stages_of
from solver.step.per_stage import memory_of_stages, time_of_stages
from solver.step.solutions import Solutions
from solver.step.stage_seconds import recomputed_limit
from solver.step.states import stage_state
from solver.step.time import TIME_PARTS

#: Name of SimuMax -> parts of the step that it consists of, forward and backward compute aside.
_TIMES = {
    "recompute_time": ("recompute",),
    "optim_time": ("optimizer", "gradient_accumulation"),
    "intra_exposed_time": ("tp_exposed", "cp_exposed", "wp_exposed", "ep_exposed"),
    "inter_exposed_time": ("pp_transfer", "offload_exposed", "amax"),
    "dp_exposed_time": ("gradient_sync", "parameter_gather", "fsdp_exposed"),
    "bubble_time": ("bubble",),
    "straggler_time": ("stragglers",),
}


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage at its peak. dense, experts: weights, gradients and optimizer states, [3]. dummy: gradients that
    Transformer Engine keeps beside them. cache: activations of one micro batch. in_flight: micro batches whose activations are
    kept. parts: by name, adding up to allocated."""

    dense: np.ndarray
    experts: np.ndarray
    dummy: float
    cache: float
    in_flight: float
    parts: dict[str, float]
    allocated: float
    reserved: float

    @property
    def model(self) -> float:
        return float(self.dense.sum() + self.experts.sum() + self.dummy)


def breakdown(solutions: Solutions, index: int) -> list[dict[str, float]]:
    """Return the seconds of the step by part for every stage; those of a stage add up to the step."""
    times = time_of_stages(solutions, index)
    forward = _forward_seconds(solutions, index)
    found = []
    for stage in range(times.shape[1]):
        part = dict(zip(TIME_PARTS, times[:, stage].tolist(), strict=True))
        compute = {"fwd_compute_time": float(forward[stage]), "bwd_compute_time": part["compute"] - float(forward[stage])}
        found.append(compute | {name: sum(part[one] for one in parts) for name, parts in _TIMES.items()})
    return found


def _forward_seconds(solutions: Solutions, index: int) -> np.ndarray:
    """Return the compute of the forward passes of all micro batches on every stage: [pp]."""
    problem, row = solutions.problem, solutions.layouts.row[index]
    one, key = solutions.layouts.one(index), solutions.terms.key[row]
    stages, table = stages_of(problem, one.splits, every=True), solutions.table
    each = stages.counts[:, :, 0] @ solutions.terms.layers.forward[:, 0, row]
    each = each + table.embedding.times.forward[0, key] * stages.has_embedding[:, 0]
    each = each + table.head.times.forward[0, key] * stages.has_head[:, 0]
    return one.splits.num_micro_batches[0] * each


def stage_memory(solutions: Solutions, index: int) -> list[StageBytes]:
    """Return the memory of every stage."""
    problem, table = solutions.problem, solutions.table
    one = solutions.layouts.one(index)
    splits, zero, level = one.splits, int(one.zero[0]), int(one.recompute[0])
    key = solutions.terms.key[solutions.layouts.row[index : index + 1]]
    stages, memory = stages_of(problem, splits, every=True), memory_of_stages(solutions, index)
    shares = shard_ranks(problem, splits)
    recomputed = stages.recomputed(recomputed_limit(problem, one), np.zeros(1, dtype=np.int64))[0][:, :, 0]
    kept, whole = (np.array([part.saved[at, key[0]] for part in table.layers]) for at in (level, 0))
    found = []
    for stage in range(len(stages.index)):

        def state(names: set[str], stage: int = stage) -> np.ndarray:
            some = {name: share for name, share in shares.items() if name in names}
            found = stage_state(PricedSplits(problem, table, key, splits), some, stages, stage)
            return np.array([found.weights, found.gradients, found.optimizer])[:, zero, 0]

        beside = state(set())
        parts = dict(zip(MEMORY_PARTS, memory.parts[:, stage].tolist(), strict=True))
        cache = float(recomputed[stage] @ kept + (stages.counts[stage, :, 0] - recomputed[stage]) @ whole)
        found.append(
            StageBytes(
                dense=state(set(shares) - {EXPERTS}) - beside,
                experts=state({EXPERTS}) - beside,
                dummy=float(beside.sum()),
                cache=cache,
                in_flight=parts["activations"] / cache if cache else 0.0,
                parts=parts,
                allocated=float(memory.allocated[stage]),
                reserved=float(memory.reserved[stage]),
            )
        )
    return found
