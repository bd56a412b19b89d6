"""Every layout of a world size: rank splits by divisibility, combined with the small axes. All are arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.errors import InputError
from solver.schedule.kinds import splits_backward
from solver.search.divisions import Division, divisions, divisors
from solver.search.pipelines import pipelines
from solver.spec.alignment import quantised_broken
from solver.spec.choices import Recompute, TpMode
from solver.spec.division import (
    context_runs,
    heads_divide,
    not_divided,
    not_piped,
    sequence_divides,
    tensor_overlap_runs,
    tensor_parallel_runs,
)
from solver.spec.feasibility import check_world
from solver.spec.rules.context import context_exchange_broken, heads_divide_by_cp
from solver.spec.rules.experts import (
    expert_groups_broken,
    experts_divide,
    experts_run,
    mode_broken,
    overlap_runs,
)
from solver.spec.rules.optimizers import muon_mode_broken, muon_shards, zero_broken
from solver.spec.rules.recomputation import recompute_broken
from solver.spec.rules.runs import check_run
from solver.spec.rules.schedules import split_backward_broken
from solver.spec.rules.states import copies_run, expert_shards_run, isp_runs, shards_run, zero_runs
from solver.spec.strategy import expert_replicas, replicas
from solver.step.layouts import Layouts, Splits
from solver.step.problem import Problem

OF_ONE_LAYOUT = ("recompute_stage_layers", "pipeline_layout")  #: what the stages of one layout hold, which no search varies


@dataclass(frozen=True)
class Space:
    """All valid splits, and why other splits are not valid: reason -> number of splits of tp, cp, pp, batch or wp."""

    splits: Splits
    rejected: Counter[str]


def enumerate_splits(problem: Problem, sequences: int, ends: tuple[int, int] = (0, 0)) -> Space:
    """Return every way to divide ``world_size`` ranks and ``sequences`` sequences.

    ends: layers that the user states for the first and the last pipeline stage (0: none); other divisions are then left out.
    Raises InputError where the world size does not fill whole nodes, is too large, or nothing divides.
    """
    model, world, framework = problem.model, problem.run.world_size, problem.framework
    check_world(world, problem.cluster.gpus_per_node)
    if model.is_mixture_of_experts and not framework.can_run.experts:
        raise InputError(f"mixtures of experts under {framework.name} are not modelled, and {model.name} is one")
    check_run(framework, model, problem.run)
    if problem.run.recompute_stage_layers:
        raise InputError(
            "recompute_stage_layers belongs to one layout: state it in a config's layout (of Primus, recompute_layer_ids), and "
            "leave it out of a search"
        )
    _check_chunks(problem)
    rejected: Counter[str] = Counter()
    parts: list[Splits] = []
    for tp in _allowed(((int(tp), _tensor_broken(problem, int(tp))) for tp in divisors(world)), rejected):
        for cp in _allowed(((int(cp), _context_broken(problem, tp, int(cp))) for cp in divisors(world // tp)), rejected):
            pairs = ((int(pp), world // int(tp * cp * pp)) for pp in divisors(world // (tp * cp)))
            for pp, dp in _allowed(((pair, _pipeline_broken(problem, *pair, sequences, ends)) for pair in pairs), rejected):
                splits = _splits_of(problem, (tp, cp, pp, dp), sequences // dp, rejected, ends)
                parts += [splits] if splits is not None else []
    absent = [f"ZeRO-{zero}" for zero in range(4) if zero not in framework.can_run.zero_stages]
    if absent and parts:
        rejected[f"{framework.name} does not offer {' or '.join(absent)}"] += sum(len(p) for p in parts)
    if not parts:
        reasons = "; ".join(f"{reason} ({n} times)" for reason, n in rejected.most_common())
        raise InputError(
            f"no layout divides {world} GPUs and a global batch of {sequences} sequences of {problem.run.seq_len} "
            f"tokens for {model.name}: {reasons}; try another world_size or global batch"
        )
    return Space(Splits.concatenate(parts), rejected)


def _check_chunks(problem: Problem) -> None:
    """Raise InputError for a pipeline_layout that the framework does not offer, or that is of another model."""
    chunks, layers = problem.chunks, problem.model.num_hidden_layers
    if chunks and not problem.framework.can_run.pipeline_layout:
        raise InputError(f"{problem.framework.name} does not offer pipeline_layout")
    if chunks and sum(chunks) != layers:
        raise InputError(f"pipeline_layout holds {sum(chunks)} layers; {problem.model.name} has {layers}")


def _allowed(candidates: Iterable[tuple[Any, str]], rejected: Counter[str]) -> Iterator[Any]:
    """Yield what has no reason against it; count the reasons of the others."""
    for value, reason in candidates:
        if reason:
            rejected[reason] += 1
        else:
            yield value


def _tensor_broken(problem: Problem, tp: int) -> str:
    """Return why no layout has this tp, or ""."""
    if not heads_divide(problem.model, tp):
        return "attention heads do not divide by tp"
    if not tensor_parallel_runs(problem.framework.can_run, problem.model, tp):
        return f"{problem.framework.name} does not run that tp"
    return quantised_broken(problem.model, problem.framework.can_run, problem.run.precision, tp)


def _context_broken(problem: Problem, tp: int, cp: int) -> str:
    """Return why no layout has this cp beside that tp, or ""."""
    model, run, framework = problem.model, problem.run, problem.framework
    if cp > 1 and run.cp_comm not in framework.can_run.cp_comms:
        return f"{framework.name} does not offer context parallelism by {run.cp_comm}"
    if not context_runs(framework.can_run, model, cp):
        return f"{framework.name} does not run {not_divided(model)} with context parallelism"
    if not sequence_divides(run.seq_len, cp, 1):
        return "the sequence is too short for cp"
    if cp > 1 and (unmet := context_exchange_broken(model, run)):
        return f"cp by {run.cp_comm} does not work {unmet}"
    if not heads_divide_by_cp(model, run, tp, cp):
        return "attention heads do not divide by tp and the context-parallel ranks that share them"
    return ""


def _pipeline_broken(problem: Problem, pp: int, dp: int, sequences: int, ends: tuple[int, int]) -> str:
    """Return why no layout has this pp and dp, or ""."""
    layers, can_run = problem.model.num_hidden_layers, problem.framework.can_run
    if pp > 1 and (what := not_piped(can_run, problem.model)):
        return f"{problem.framework.name} has no pipelines of models with {what}"
    if pp > layers:
        return "more pipeline stages than layers"
    if not divisions(problem.framework.can_run, layers, pp, len(problem.chunks), *ends):
        if problem.chunks:
            return "pipeline_layout has another number of chunks"
        if any(ends):
            return "the stated end stages leave layers that the other stages do not divide"
        return f"{problem.framework.name} does not run the layers in that many pipeline stages"
    if pp > 1 and problem.run.offload_layers:
        return "offload_layers needs a single pipeline stage"
    return "the global batch does not divide by dp" if sequences % dp else ""


def _splits_of(
    problem: Problem, sizes: tuple[int, int, int, int], sequences: int, rejected: Counter[str], ends: tuple[int, int]
) -> Splits | None:
    """Return all modes, wp, ZeRO shard sizes, expert groups, micro batches and vpp of one (tp, cp, pp, dp), or None."""
    tp, cp, pp, dp = sizes
    modes = _modes_that_run(problem, tp, cp, rejected)
    experts = _expert_groups(problem, tp, tp * cp * dp)
    sharing = [
        (*row, *groups) for mode, wp in _modes(modes, tp, cp, dp) for row in _shards(mode, wp, tp, cp, dp) for groups in experts
    ]
    if not sharing:
        rejected["no tensor-parallel mode and no group of experts runs with that tp and cp"] += 1
        return None
    runs = pipelines(problem, pp, sequences, rejected, ends)
    if not runs:
        return None
    i, j = (index.ravel() for index in np.indices((len(sharing), len(runs))))
    mode, wp, shard, ep, etp = np.array(sharing, dtype=np.int64)[i].T
    size, count, schedule, vpp, group, *division = np.array([run.columns for run in runs], dtype=np.int64)[j].T
    fixed = {name: np.full(len(i), value) for name, value in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp))}
    return Splits(
        mode=mode,
        wp=wp,
        zero_shard_size=shard,
        ep=ep,
        etp=etp,
        micro_batch_size=size,
        num_micro_batches=count,
        micro_batch_group=group,
        schedule=schedule,
        vpp=vpp,
        **fixed,
        **dict(zip(Division._fields, division, strict=True)),
    )


def _modes_that_run(problem: Problem, tp: int, cp: int, rejected: Counter[str]) -> list[TpMode]:
    """Return the tensor-parallel modes of the framework that run with this tp and cp."""
    can_run, run = problem.framework.can_run, problem.run
    modes = set(can_run.tp_modes or (TpMode.MTP,)) & set(can_run.context_modes if cp > 1 else TpMode)
    if not sequence_divides(run.seq_len, cp, tp):
        rejected["the sequence is too short for tp * cp"] += 1
        modes &= {TpMode.MTP}
    return [
        mode
        for mode in can_run.tp_modes or (TpMode.MTP,)
        if mode in modes
        and not mode_broken(problem.model, mode.name.lower(), tp)
        and not muon_mode_broken(run, mode.name.lower())
        and tensor_overlap_runs(problem.framework, run, mode.name.lower(), tp)
    ]


def _expert_groups(problem: Problem, tp: int, ranks: int) -> list[tuple[int, int]]:
    """Return all (ep, etp) over the ranks of a stage; etp divides tp."""
    model, can_run = problem.model, problem.framework.can_run
    if not model.is_mixture_of_experts:
        return [(1, 1)]
    return [
        (int(ep), int(etp))
        for ep in divisors(model.num_experts)
        for etp in divisors(tp)
        if experts_divide(model, ranks, int(ep), int(etp))
        and experts_run(can_run, model, tp, ranks, int(ep), int(etp))
        and not expert_groups_broken(problem.run, int(ep), int(etp))
    ]


def _modes(modes: Sequence[TpMode], tp: int, cp: int, dp: int) -> Iterator[tuple[TpMode, int]]:
    """Yield (mode, wp) for a framework's modes.

    With one tensor rank MTP, MSP, FSP, and ISP without wp are the same layout, but for the vocabulary's states in InternEvo.
    """
    plain = [mode for mode in modes if mode != TpMode.ISP]
    yield from ((mode, 1) for mode in (plain if tp > 1 else [TpMode.MTP] * bool(plain)))
    if TpMode.ISP in modes:
        yield from ((TpMode.ISP, int(wp)) for wp in divisors(tp * cp * dp) if tp > 1 or wp > 1 or not plain)


def _shards(mode: TpMode, wp: int, tp: int, cp: int, dp: int) -> list[tuple[int, int, int]]:
    return [(int(mode), wp, int(shard)) for shard in divisors(int(replicas(mode == TpMode.ISP, tp, cp, dp, wp)))]


def _in_chunks(layers: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Return a number of layers rounded up to as many in each chunk."""
    return (np.ceil(layers / chunks) * chunks).astype(np.int64)


def _recompute_levels(problem: Problem) -> list[tuple[Recompute, float]]:
    """Return what the framework recomputes, and of what share of a stage's layers."""
    can_run, run = problem.framework.can_run, problem.run
    levels = [(Recompute.NONE, 0.0), (Recompute.SELECTIVE, 1.0), (Recompute.FULL, 1.0)]
    levels += [(Recompute.FULL, share) for share in can_run.recompute_shares]
    allowed = [name for name in can_run.recompute if overlap_runs(run.moe_exchange_overlap, 1, 1, name)]
    allowed = [name for name in allowed if not recompute_broken(problem.framework, run, name)]
    return [(level, share) for level, share in levels if level.name.lower() in allowed]


def cross(problem: Problem, splits: Splits) -> Layouts:
    """Combine splits with the framework's ZeRO stages (0 where nothing is sharded) and recompute levels, without duplicates.

    Partial recomputation recomputes the framework's recompute_shares of a stage's layers, rounded up to as many in each of its
    chunks (frameworks state it for a chunk), where that is a new number.
    """
    can_run, levels = problem.framework.can_run, _recompute_levels(problem)
    whole_states, one_stage = splits.zero_shard_size == 1, splits.pp == 1
    sharded = ~whole_states & shards_run(can_run, splits.zero_shard_size, splits.cp, splits.dp * splits.cp)
    copied = whole_states & copies_run(can_run, problem.run, splits.tp, splits.cp, splits.pp, splits.dp, splits.ep)
    if split_backward_broken(can_run, problem.run, 1):
        sharded &= one_stage | ~splits_backward(splits.schedule)
    sharded &= muon_shards(problem.run, 1, splits.zero_shard_size, splits.dp * splits.cp)
    if problem.model.is_mixture_of_experts:
        copies = expert_replicas(splits.tp, splits.cp, splits.dp, splits.ep, splits.etp)
        alike = expert_shards_run(can_run, splits.zero_shard_size, splits.cp * splits.dp, copies)
        sharded &= alike | (splits.ep * splits.etp == 1)
    isp = splits.mode == TpMode.ISP
    possible = [
        (zero, (sharded if zero else copied) & zero_runs(can_run, zero, splits.pp) & isp_runs(zero, isp))
        for zero in can_run.zero_stages
        if not zero_broken(problem.run, zero)
    ]
    stage = -(-problem.model.num_hidden_layers // splits.pp)
    columns: list[tuple[np.ndarray, ...]] = []
    for stage_of_zero, valid in possible:
        rows = np.flatnonzero(valid)
        for level, share in levels:
            covered = _in_chunks(stage[rows] * share, splits.vpp[rows])
            new = rows
            if 0 < share < 1:
                below = max((s for s in (0.0, *can_run.recompute_shares) if s < share), default=0.0)
                smaller = _in_chunks(stage[rows] * below, splits.vpp[rows])
                fresh = (covered > smaller) & (covered < stage[rows])
                new, covered = rows[fresh], covered[fresh]
            whole = np.full(len(new), -1) if share in (0.0, 1.0) else covered
            columns.append((new, np.full(len(new), stage_of_zero), np.full(len(new), int(level)), whole))
    return Layouts(splits, *(np.concatenate(column) for column in zip(*columns, strict=True)))
