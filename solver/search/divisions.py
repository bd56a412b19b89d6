"""How a search divides the layers among pipeline stages and their chunks."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from solver.spec.can_run import CanRun
from solver.spec.feasibility import stages_broken
from solver.spec.read_only import read_only
from solver.spec.strategy import Strategy


@lru_cache(maxsize=4096)
def divisors(n: int) -> np.ndarray:
    """Return all positive divisors of n, ascending."""
    candidates = np.arange(1, math.isqrt(n) + 1, dtype=np.int64)
    small = candidates[n % candidates == 0]
    return read_only(np.union1d(small, n // small))


class Division(NamedTuple):
    """How a search divides layers among stages: stated layers of the end stages (0: not), counted embedding and loss (0, 1)."""

    num_layers_in_first_pipeline_stage: int = 0
    num_layers_in_last_pipeline_stage: int = 0
    account_for_embedding_in_pipeline_split: int = 0
    account_for_loss_in_pipeline_split: int = 0


#: Axes that only divide what others give: layers among stages, states among ranks, the order of passes.
DIVIDING = ("schedule", "zero_shard_size", *Division._fields)


@lru_cache(maxsize=4096)
def divisions(
    can_run: CanRun, layers: int, pp: int, chunks: int = 0, first: int = 0, last: int = 0
) -> tuple[tuple[int, Division], ...]:
    """Return (vpp, division) of all ways in which a search divides ``layers`` among ``pp`` stages of vpp chunks.

    Evenly, with embedding or loss or both counted as layers; and, only where none of these divides, with stated end stages,
    of which the last one, with the head, never holds more. chunks: of a stated pipeline_layout; first, last: layers that the
    user states for the end stages (0: none), which are then the only way.
    """
    if chunks:
        return ((chunks // pp, Division()),) if pp > 1 and chunks % pp == 0 else ()
    if first or last:
        return _users_ends(can_run, layers, pp, first, last)
    if pp == 1 or not can_run.pipeline:
        return ((1, Division()),) if pp == 1 else ()
    found: list[tuple[int, Division]] = []
    for embedding, loss in ((0, 0), (1, 0), (0, 1), (1, 1)):
        counted = embedding + loss
        if (layers + counted) % pp == 0 and (not counted or can_run.counts_embedding_and_loss):
            same = counted == 2 == pp  # two stages of which each gives up a layer hold what they held
            each = divisors((layers + counted) // pp) if can_run.chunks_stages else (1,)
            found += [(int(v), Division(0, 0, embedding, loss)) for v in each if v > 1 or not same]
    if layers % pp and can_run.uneven_stages:
        found.append((1, Division()))
    if not found and can_run.stated_end_stages:
        each = divisors(layers) if can_run.chunks_stages else (1,)
        found = [(int(v), division) for v in each if (division := _stated_ends(layers, pp, int(v))) is not None]
    return tuple(found)


def _users_ends(can_run: CanRun, layers: int, pp: int, first: int, last: int) -> tuple[tuple[int, Division], ...]:
    """Return (vpp, division) of the numbers of chunks into which a framework divides stages with these ends."""
    if layers - first - last < pp - (first > 0) - (last > 0):  # a stage would hold none
        return ()
    ends = Division(first, last)
    run = Strategy(
        world_size=pp, seq_len=1, pp=pp, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last
    )
    each = divisors(layers) if can_run.chunks_stages else (1,)
    return tuple((int(v), ends) for v in each if not stages_broken(can_run, layers, run.replace(vpp=int(v))))


def _stated_ends(layers: int, pp: int, vpp: int) -> Division | None:
    """Return end stages that take up what equal middle stages leave, in multiples of ``vpp`` layers: less than a middle stage
    if that leaves them any, else more. ``vpp`` divides ``layers``.
    """
    chunks = layers // vpp
    if pp == 2:
        return Division(0, chunks // 2 * vpp) if chunks > 1 else None
    for middle in (-(-chunks // pp), chunks // pp):
        ends = chunks - middle * (pp - 2)
        if ends > 1 and middle:
            return Division((ends - ends // 2) * vpp, ends // 2 * vpp)
    return None
