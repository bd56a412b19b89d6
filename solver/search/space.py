"""Every layout of a world size: rank splits by divisibility, combined with the small axes. All are arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from profiler.errors import InputError
from solver.search.divisions import Division, divisions, divisors
from solver.spec.deferral_rules import NO_DRAIN, deferral_runs
from solver.spec.expert_rules import (
    context_exchange_runs,
    experts_divide,
    experts_run,
    heads_divide_by_cp,
    mode_runs,
    overlap_runs,
    predicted_beside,
)
from solver.spec.feasibility import (
    check_world,
    context_runs,
    heads_divide,
    sequence_divides,
    tensor_overlap_runs,
    tensor_parallel_runs,
)
from solver.spec.optimizer_rules import MUON_ZERO
from solver.spec.run_rules import check_run
from solver.spec.schedule_rules import schedules_run, split_backward_broken
from solver.spec.state_rules import copies_run, expert_shards_run, recompute_broken, shards_run
from solver.spec.strategy import SCHEDULES, WAVES, Recompute, TpMode, chunks_broken, groups_fit, replicas
from solver.step.layouts import Layouts, Splits
from solver.step.problem import Problem


@dataclass(frozen=True)
class Space:
    """All valid splits, and why other splits are not valid: reason -> number of splits of tp, cp, pp, batch or wp."""

    splits: Splits
    rejected: Counter[str]


def enumerate_splits(problem: Problem, sequences: int) -> Space:
    """Return every way to divide ``world_size`` ranks and ``sequences`` sequences.

    Raises InputError where the world size does not fill whole nodes, is too large, or nothing divides.
    """
    model, world, seq_len = problem.model, problem.run.world_size, problem.run.seq_len
    framework, cp_comm = problem.framework, problem.run.cp_comm
    check_world(world, problem.cluster.gpus_per_node)
    if model.is_mixture_of_experts and not framework.can_run.experts:
        raise InputError(f"{framework.name} is not described with mixtures of experts, which {model.name} is")
    check_run(framework, model, problem.run)
    for key in ("recompute_stage_layers", "pipeline_layout"):
        if getattr(problem.run, key):
            raise InputError(
                f"{key} belongs to one layout: state it in a config's layout (of Primus, recompute_layer_ids), "
                "and leave it out of a search"
            )
    rejected: Counter[str] = Counter()
    parts: list[Splits] = []
    for tp in divisors(world):
        if not heads_divide(model, int(tp)):
            rejected["attention heads do not divide by tp"] += 1
            continue
        if not tensor_parallel_runs(framework.can_run, model, int(tp)):
            rejected[f"{framework.name} does not run that tp"] += 1
            continue
        for cp in divisors(world // tp):
            if cp > 1 and cp_comm not in framework.can_run.cp_comms:
                rejected[f"{framework.name} does not offer context parallelism by {cp_comm}"] += 1
                continue
            if not context_runs(framework.can_run, model, int(cp)):
                rejected[f"{framework.name} does not run multi-token prediction with context parallelism"] += 1
                continue
            if not sequence_divides(seq_len, int(cp), 1):
                rejected["the sequence is too short for cp"] += 1
                continue
            if not context_exchange_runs(model, problem.run, int(cp)):
                rejected["windows, chunks or documents need cp_comm a2a or allgather"] += 1
                continue
            if not heads_divide_by_cp(model, problem.run, int(tp), int(cp)):
                rejected["attention heads do not divide by tp and the context-parallel ranks that share them"] += 1
                continue
            for pp in divisors(world // tp // cp):
                if pp > model.num_hidden_layers:
                    rejected["more pipeline stages than layers"] += 1
                    continue
                if not divisions(framework.can_run, model.num_hidden_layers, int(pp)):
                    rejected[f"{framework.name} does not run the layers in that many pipeline stages"] += 1
                    continue
                if pp > 1 and problem.run.offload_layers:
                    rejected["offload_layers needs a single pipeline stage"] += 1
                    continue
                dp = world // int(tp * cp * pp)
                if sequences % dp:
                    rejected["the global batch does not divide by dp"] += 1
                    continue
                found = _splits_of(problem, int(tp), int(cp), int(pp), dp, sequences // dp, rejected)
                parts += [found] if found is not None else []
    absent = [f"ZeRO-{zero}" for zero in range(4) if zero not in framework.can_run.zero_stages]
    if absent and parts:
        rejected[f"{framework.name} does not offer {' or '.join(absent)}"] += sum(len(p) for p in parts)
    if not parts:
        reasons = "; ".join(f"{reason} ({n} times)" for reason, n in rejected.most_common())
        raise InputError(
            f"no layout divides {world} accelerators and a global batch of {sequences} sequences of {seq_len} "
            f"tokens for {model.name}: {reasons}; try another world_size or global batch"
        )
    return Space(Splits.concatenate(parts), rejected)


def _splits_of(problem: Problem, tp: int, cp: int, pp: int, dp: int, sequences: int, rejected: Counter[str]) -> Splits | None:
    """Return all modes, wp, ZeRO shard sizes, expert groups, micro batches and vpp of one (tp, cp, pp), or None."""
    modes: Sequence[TpMode] = problem.framework.can_run.tp_modes or (TpMode.MTP,)
    if not sequence_divides(problem.run.seq_len, cp, tp):
        rejected["the sequence is too short for tp * cp"] += 1
        modes = [mode for mode in modes if mode == TpMode.MTP]
    muon = problem.run.optimizer == "muon"
    beside = problem.framework.can_run.context_modes if cp > 1 else tuple(TpMode)
    modes = [
        mode for mode in modes
        if mode_runs(problem.model, mode.name.lower(), tp) and mode in beside and not (muon and mode == TpMode.ISP)
        and tensor_overlap_runs(problem.framework, problem.run, mode.name.lower(), tp)
    ]  # fmt: skip
    can_run = problem.framework.can_run
    experts = _expert_groups(problem, tp, tp * cp * dp)
    sharing = [
        (*row, *groups) for mode, wp in _modes(modes, tp, cp, dp) for row in _shards(mode, wp, tp, cp, dp) for groups in experts
    ]
    if not sharing:
        rejected["no tensor-parallel mode runs with that tp and cp"] += 1
        return None
    overlaps, defers = problem.run.moe_exchange_overlap, problem.run.defer_embedding_wgrad_compute
    group = problem.run.micro_batch_group
    schedules = schedules_run(problem.framework, problem.model, problem.run) if pp > 1 else ("1f1b",)
    if pp > 1 and len(schedules) < len(can_run.schedules) and (wrong := split_backward_broken(can_run, problem.run)):
        rejected[f"{problem.framework.name} does not split the backward pass with {wrong}"] += 1
    schedules = tuple(name for name in schedules if deferral_runs(defers, pp, name))
    if not schedules:
        rejected[NO_DRAIN] += 1
        return None
    ways = divisions(can_run, problem.model.num_hidden_layers, pp)
    further = predicted_beside(problem.framework, problem.model)
    divided = [way for way in ways if overlap_runs(overlaps, pp, way[0], "none", further) and (not group or way[0] > 1)]
    if can_run.overlaps_interleaving and not problem.run.p2p_overlap:
        divided = [way for way in divided if way[0] == 1]
    schedules = tuple(name for name in schedules if not group or name in ("1f1b", "interleaved"))
    batches = _batches(divided, schedules, (pp, group), sequences, rejected)
    if can_run.fills_pipeline:
        batches = [batch for batch in batches if batch[1] >= pp - 1 or SCHEDULES[batch[2]] != "1f1b"]
    if not batches:
        rejected[f"{'micro_batch_group' if group else 'moe_exchange_overlap'} needs interleaved stages"] += 1
        return None
    i, j = (index.ravel() for index in np.indices((len(sharing), len(batches))))
    mode, wp, shard, ep, etp = np.array(sharing, dtype=np.int64)[i].T
    size, count, schedule, vpp, *ends = np.array(batches, dtype=np.int64)[j].T
    fixed = {name: np.full(len(i), value) for name, value in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp))}
    return Splits(
        mode=mode, wp=wp, zero_shard_size=shard, ep=ep, etp=etp, micro_batch_size=size, num_micro_batches=count,
        schedule=schedule, vpp=vpp, **fixed,
        **dict(zip(Division._fields, ends, strict=True)),
    )  # fmt: skip


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
        and experts_run(can_run, tp, ranks, int(ep), int(etp))
        and (etp == 1 or not problem.run.moe_fused_experts)
        and (ep > 1 or not problem.run.moe_exchange_overlap)
    ]


def _modes(modes: Sequence[TpMode], tp: int, cp: int, dp: int) -> Iterator[tuple[TpMode, int]]:
    """Yield (mode, wp) for a framework's modes.

    With one tensor rank MTP, MSP, FSP, and ISP without wp are the same layout.
    """
    plain = [mode for mode in modes if mode != TpMode.ISP]
    yield from ((mode, 1) for mode in (plain if tp > 1 else [TpMode.MTP] * bool(plain)))
    if TpMode.ISP in modes:
        yield from ((TpMode.ISP, int(wp)) for wp in divisors(tp * cp * dp) if tp > 1 or wp > 1 or not plain)


def _shards(mode: TpMode, wp: int, tp: int, cp: int, dp: int) -> list[tuple[int, int, int]]:
    return [(int(mode), wp, int(shard)) for shard in divisors(int(replicas(mode == TpMode.ISP, tp, cp, dp, wp)))]


def _batches(
    divided: Sequence[tuple[int, Division]], schedules: Sequence[str], of: tuple[int, int], sequences: int,
    rejected: Counter[str],
) -> list[tuple[int, ...]]:  # fmt: skip
    """Return (micro_batch_size, num_micro_batches, schedule, vpp, *Division) for one data-parallel rank's sequences.

    of: pp, and the micro batches of a group that interleaves (0: pp).
    """
    pp, group = of
    found: list[tuple[int, ...]] = []
    plain = [SCHEDULES.index(name) for name in schedules if name not in ("interleaved", *WAVES)]
    interleaved = [SCHEDULES.index("interleaved")] * ("interleaved" in schedules)
    waves = [name for name in schedules if name in WAVES]
    for size in divisors(sequences):
        count = sequences // int(size)
        in_groups = groups_fit(count, pp, group) and (not group or group >= pp)
        for vpp, division in divided:
            ways = plain if vpp == 1 else interleaved * in_groups
            if vpp == 2 and not division.num_layers_in_last_pipeline_stage:
                ways = ways + [SCHEDULES.index(name) for name in waves if not chunks_broken(name, pp, vpp, count)]
            found += [(int(size), count, code, vpp, *division) for code in ways]
        if not in_groups and (chunked := sum(vpp > 1 for vpp, _ in divided)):
            rejected["interleaving needs micro batches in multiples of pp"] += chunked
    return found


def _in_chunks(layers: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Return a number of layers rounded up to as many in each chunk."""
    return (np.ceil(layers / chunks) * chunks).astype(np.int64)


def cross(problem: Problem, splits: Splits) -> Layouts:
    """Combine splits with the framework's ZeRO stages (0 where nothing is sharded) and recompute levels, without duplicates.

    Partial recomputation recomputes a quarter, a half or three quarters of a stage's layers, rounded up to as many in each of
    its chunks (frameworks state it for a chunk), where that is a new number. ZeRO-3
    together with ISP would shard the same weights twice and is left out; so is ZeRO-3 with a pipeline,
    which no framework here runs, and ZeRO-2 where the framework does not run that.
    """
    levels = [(Recompute.NONE, 0.0), (Recompute.SELECTIVE, 1.0), (Recompute.FULL, 1.0)]
    can_run, overlaps = problem.framework.can_run, problem.run.moe_exchange_overlap
    levels += [(Recompute.FULL, share) for share in can_run.recompute_shares]
    allowed = [name for name in can_run.recompute if overlap_runs(overlaps, 1, 1, name)]
    allowed = [name for name in allowed if not recompute_broken(problem.framework, problem.run, name)]
    allowed = ["none"] if problem.run.offload_layers else allowed
    levels = [(level, share) for level, share in levels if level.name.lower() in allowed]
    whole_states, one_stage = splits.zero_shard_size == 1, splits.pp == 1
    sharded = ~whole_states & shards_run(can_run, splits.zero_shard_size, splits.cp, splits.dp * splits.cp)
    copied = whole_states & copies_run(can_run, problem.run, splits.tp, splits.cp, splits.pp, splits.dp)
    if problem.run.optimizer == "muon":
        sharded &= splits.zero_shard_size == splits.dp * splits.cp
    if problem.model.is_mixture_of_experts:
        copies = splits.tp * splits.cp * splits.dp // (splits.ep * splits.etp)
        alike = expert_shards_run(can_run, splits.zero_shard_size, splits.cp * splits.dp, copies)
        sharded &= alike | (splits.ep * splits.etp == 1)
    second = sharded & (one_stage | (2 in can_run.zero_with_pipeline))
    zeros = [(0, copied), (1, sharded), (2, second), (3, sharded & one_stage & (splits.mode != TpMode.ISP))]
    offered = set(problem.framework.can_run.zero_stages) & (set(MUON_ZERO) if problem.run.optimizer == "muon" else {0, 1, 2, 3})
    offered -= {0, 1} if problem.run.offload_gradients else set()
    zeros = [(zero, valid) for zero, valid in zeros if zero in offered]
    stage = -(-problem.model.num_hidden_layers // splits.pp)
    columns: list[tuple[np.ndarray, ...]] = []
    for stage_of_zero, valid in zeros:
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
