"""Every layout of a world size: rank splits by divisibility, crossed with the small axes. Arrays throughout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from profiler.errors import InputError
from solver.layouts import Layouts, Splits
from solver.model import ModelSpec
from solver.problem import Problem
from solver.strategy import Recompute, TpMode

MAX_WORLD_SIZE = 1 << 20
#: A rank's share of one sequence shorter than this is not worth a split (kernels would be all launch time).
MIN_LOCAL_TOKENS = 128
#: Share of a stage's layers that partial full-recomputation covers.
RECOMPUTE_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Space:
    """All valid splits, and why the others are none: reason -> number of splits of tp, cp, pp, batch or wp."""

    splits: Splits
    rejected: Counter[str]


@lru_cache(maxsize=4096)
def divisors(n: int) -> np.ndarray:
    """All positive divisors of n, ascending."""
    small = [i for i in range(1, int(n**0.5) + 1) if n % i == 0]
    return np.array(sorted({*small, *(n // i for i in small)}), dtype=np.int64)


def enumerate_splits(problem: Problem, global_batch_size: int) -> Space:
    """Every way to divide ``world_size`` ranks and ``global_batch_size`` sequences.

    Raises InputError where the world does not fill whole nodes, is larger than MAX_WORLD_SIZE, or nothing divides.
    """
    model, world, seq_len = problem.model, problem.run.world_size, problem.run.seq_len
    _check_world(world, problem.cluster.gpus_per_node)
    rejected: Counter[str] = Counter()
    parts: list[Splits] = []
    for tp in divisors(world):
        if not _heads_divide(model, int(tp)):
            rejected["attention heads do not divide by tp"] += 1
            continue
        for cp in divisors(world // tp):
            if seq_len % (2 * cp * tp) or seq_len // (cp * tp) < MIN_LOCAL_TOKENS:
                rejected["the sequence is too short for tp * cp"] += 1
                continue
            for pp in divisors(world // tp // cp):
                if pp > model.num_hidden_layers:
                    rejected["more pipeline stages than layers"] += 1
                    continue
                dp = world // int(tp * cp * pp)
                if global_batch_size % dp:
                    rejected["the global batch does not divide by dp"] += 1
                    continue
                parts.append(_splits_of(model, int(tp), int(cp), int(pp), dp, global_batch_size // dp, rejected))
    absent = [f"ZeRO-{zero}" for zero in range(4) if zero not in problem.framework.zero_stages]
    if absent:
        rejected[f"{problem.framework.name} does not offer {' or '.join(absent)}"] += sum(len(p) for p in parts)
    if not parts:
        reasons = "; ".join(f"{reason} ({n} times)" for reason, n in rejected.most_common())
        raise InputError(
            f"no layout divides {world} accelerators and a global batch of {global_batch_size} sequences of {seq_len} "
            f"tokens for {model.name}: {reasons}; try another world_size or global_batch_size"
        )
    return Space(Splits.concatenate(parts), rejected)


def _check_world(world: int, node: int) -> None:
    if world > MAX_WORLD_SIZE:
        raise InputError(f"world_size is {world}; this program prices up to {MAX_WORLD_SIZE} accelerators")
    if (node % world if world < node else world % node) != 0:
        raise InputError(
            f"world_size {world} does not fill nodes of {node} accelerators evenly; use a divisor or a multiple of {node}, "
            "or a cluster with another gpus_per_node"
        )


def _heads_divide(model: ModelSpec, tp: int) -> bool:
    """Query heads are dealt evenly; key and value heads are dealt evenly or copied evenly where tp exceeds them."""
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    return heads % tp == 0 and (kv % tp == 0 or tp % kv == 0) and model.intermediate_size % tp == 0


def _splits_of(model: ModelSpec, tp: int, cp: int, pp: int, dp: int, sequences: int, rejected: Counter[str]) -> Splits:
    """All modes, wp, ZeRO shard sizes, micro batches and vpp of one (tp, cp, pp)."""
    sharing = [row for mode, wp in _modes(tp, cp, dp) for row in _shards(mode, wp, tp, cp, dp)]
    batches = _batches(model, pp, sequences, rejected)
    i, j = (index.ravel() for index in np.indices((len(sharing), len(batches))))
    mode, wp, shard = np.array(sharing, dtype=np.int64)[i].T
    size, count, vpp = np.array(batches, dtype=np.int64)[j].T
    fixed = {name: np.full(len(i), value) for name, value in (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp))}
    return Splits(mode=mode, wp=wp, zero_shard_size=shard, micro_batch_size=size, num_micro_batches=count, vpp=vpp, **fixed)


def _modes(tp: int, cp: int, dp: int) -> Iterator[tuple[TpMode, int]]:
    """(mode, wp): with one tensor rank MTP, MSP and FSP are the same layout, and so is ISP without wp."""
    yield TpMode.MTP, 1
    if tp > 1:
        yield TpMode.MSP, 1
        yield TpMode.FSP, 1
    for wp in divisors(tp * cp * dp):
        if tp > 1 or wp > 1:
            yield TpMode.ISP, int(wp)


def _shards(mode: TpMode, wp: int, tp: int, cp: int, dp: int) -> list[tuple[int, int, int]]:
    copies = tp * cp * dp // wp if mode == TpMode.ISP else cp * dp
    return [(int(mode), wp, int(shard)) for shard in divisors(copies)]


def _batches(model: ModelSpec, pp: int, sequences: int, rejected: Counter[str]) -> list[tuple[int, int, int]]:
    """(micro_batch_size, num_micro_batches, vpp) of one data-parallel rank's sequences."""
    layers, found = model.num_hidden_layers, []
    chunks = [int(v) for v in divisors(layers // pp) if v > 1] if pp > 1 and layers % pp == 0 else []
    for size in divisors(sequences):
        count = sequences // int(size)
        found.append((int(size), count, 1))
        if count % pp == 0:
            found += [(int(size), count, v) for v in chunks]
        elif chunks:
            rejected["interleaving needs micro batches in multiples of pp"] += len(chunks)
    return found


def cross(problem: Problem, splits: Splits) -> Layouts:
    """Cross splits with the framework's ZeRO stages (0 where nothing is dealt) and recomputation; duplicates left out.

    Partial recomputation covers a quarter, a half or three quarters of a stage's layers, where that is a new number. ZeRO-3
    beside a weight-parallel group would shard the same weights twice and is left out.
    """
    levels = [(Recompute.NONE, 0.0), (Recompute.SELECTIVE, 1.0), (Recompute.FULL, 1.0)]
    levels += [(Recompute.FULL, share) for share in RECOMPUTE_SHARES]
    alone = splits.zero_shard_size == 1
    zeros = [(0, alone), (1, ~alone), (2, ~alone), (3, ~alone & (splits.wp == 1))]
    zeros = [(zero, valid) for zero, valid in zeros if zero in problem.framework.zero_stages]
    stage = -(-problem.model.num_hidden_layers // splits.pp)
    columns: list[tuple[np.ndarray, ...]] = []
    for stage_of_zero, valid in zeros:
        rows = np.flatnonzero(valid)
        for level, share in levels:
            covered = np.ceil(stage[rows] * share).astype(np.int64)
            new = rows
            if 0 < share < 1:
                smaller = np.ceil(stage[rows] * max((s for s in (0.0, *RECOMPUTE_SHARES) if s < share), default=0.0))
                fresh = (covered > smaller) & (covered < stage[rows])
                new, covered = rows[fresh], covered[fresh]
            whole = np.full(len(new), -1) if share in (0.0, 1.0) else covered
            columns.append((new, np.full(len(new), stage_of_zero), np.full(len(new), int(level)), whole))
    return Layouts(splits, *(np.concatenate(column) for column in zip(*columns, strict=True)))
