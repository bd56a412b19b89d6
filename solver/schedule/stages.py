"""Pipeline stages: the layers that each has, and how many of them hold activations at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from solver.schedule.automatic import automatic_limit
from solver.schedule.critical_paths import v_shaped_in_flight
from solver.schedule.kinds import AUTOMATIC, BACKWARD, FORWARD, STEADY, WEIGHT, WHOLE, is_schedule, part_of, splits_backward
from solver.schedule.op_orders import stage_order
from solver.schedule.warm_up import group_of, interleaved_warm_up
from solver.spec.choices import SCHEDULES, V_SHAPED


@dataclass(frozen=True)
class StageLayers:
    """Layers of the first, the fullest middle and the last stage; int64 arrays. With pp 1 each is the whole model.

    fuller_last: where middle stages differ, the fuller ones come after the others, not before.
    """

    first: np.ndarray
    middle: np.ndarray
    last: np.ndarray
    fuller_last: bool = False


def stage_layers(
    layers: int, pp: Any, first: Any = 0, last: Any = 0, counts_embedding: Any = 0, counts_loss: Any = 0
) -> StageLayers:
    """Return the layers of the stages; all arguments but ``layers`` may be arrays.

    first, last: stated layers of an end stage (0: not stated); the other stages share what is left. counts_embedding,
    counts_loss (0 or 1): embedding and loss each take the place of a layer of the first and the last stage. Otherwise the
    split is even and the remainder goes to middle stages, so that first and last (embedding, head) hold fewer.
    """
    pp, first, last = (np.asarray(values, dtype=np.int64) for values in (pp, first, last))
    stated = (first > 0).astype(np.int64) + (last > 0)
    unstated = np.maximum(pp - stated, 1)
    left = layers + counts_embedding + counts_loss - first - last
    share, rest = left // unstated, np.where(stated > 0, 0, left % pp)
    # the rest fits into the middle stages unless it is pp - 1 layers: then the first stage also takes one
    n_first = np.where(first > 0, first, share + (rest > np.maximum(pp - 2, 0))) - counts_embedding
    n_last = np.where(last > 0, last, share) - counts_loss
    n_middle = -(-(layers - n_first - n_last) // np.maximum(pp - 2, 1))
    single, pair = pp == 1, pp == 2
    n_first = np.where(pair & (last > 0), layers - last, n_first)
    n_last = np.where(pair, layers - n_first, n_last)
    n_middle = np.where(pair, np.maximum(n_first, n_last), n_middle)
    n_first, n_middle, n_last = (np.where(single, layers, n) for n in (n_first, n_middle, n_last))
    return StageLayers(n_first, n_middle, n_last)


def v_shaped_stages(stages: StageLayers, v_shaped: np.ndarray, counts_loss: np.ndarray) -> StageLayers:
    """Return evenly divided stages, of which the first holds the loss too under V-shaped schedules (``v_shaped``)."""
    moved = np.where(v_shaped, counts_loss, 0)
    return StageLayers(stages.first - moved, stages.middle, stages.last + moved)


def stage_layers_counting_ends(layers: int, pp: Any) -> StageLayers:
    """Return the layers of the stages where embedding, layers, final norm and head are assigned as items of one list.

    The remainder goes to the first stages, one each (uniform partition of AA-Scaling and DeepSpeed).
    """
    pp = np.asarray(pp, dtype=np.int64)
    share, rest = (layers + 3) // pp, (layers + 3) % pp
    first, middle = share + (rest > 0) - 1, share + (rest > 1)
    last = np.maximum(share - 2, 0)  # a single item is the head; the norm before it then fills a stage
    middle = np.where(pp == 2, np.maximum(first, last), middle)
    first, middle, last = (np.where(pp == 1, layers, n) for n in (first, middle, last))
    return StageLayers(first, middle, last)


def stage_layers_last_first(layers: int, pp: Any) -> StageLayers:
    """Return the layers of the stages where the remainder goes to the last stages, one each (InternEvo's partition_uniform)."""
    pp = np.asarray(pp, dtype=np.int64)
    share, rest = layers // pp, layers % pp
    last, middle = share + (rest > 0), share + (rest > 1)
    middle = np.where(pp == 2, np.maximum(share, last), middle)
    share, middle, last = (np.where(pp == 1, layers, n) for n in (share, middle, last))
    return StageLayers(share, middle, last, fuller_last=True)


def stage_layers_by_cost(layers: int, pp: Any, head: float) -> StageLayers:
    """Return the layers of the stages where a stage ends with the layer that makes it exceed its share of all cost.

    head: cost of the head, in layers. As nanotron's build_model, except that a stage which holds nothing but the loss, behind
    the one with the head, counts as one before it.
    """
    pp = np.asarray(pp, dtype=np.int64)
    found = {int(p): _sizes_by_cost(layers, int(p), head) for p in np.unique(pp)}
    ends = np.array([found[int(p)] for p in pp.ravel()], dtype=np.int64).reshape(*pp.shape, 3)
    return StageLayers(*np.moveaxis(ends, -1, 0))


def _sizes_by_cost(layers: int, pp: int, head: float) -> tuple[int, int, int]:
    """Return the layers of the first, the fullest middle and the head's stage of one pipeline."""
    ends = np.cumsum([*[1.0] * layers, head])
    sizes, stage = np.zeros(pp, dtype=np.int64), 0
    for block, end in enumerate(ends):
        sizes[stage] += block < layers
        last = stage
        stage = min(stage + (end > ends[-1] * (stage + 1) / pp), pp - 1)
    middle = np.delete(sizes, [0, last])
    return int(sizes[0]), int(middle.max(initial=0)), int(sizes[last]) if last or pp == 1 else 0


def micro_batches_in_flight(schedule: Any, micro_batches: Any, pp: Any, vpp: Any, stage: Any = 0, group: Any = 0) -> Any:
    """Return the micro batches whose activations ``stage`` (0 is the first) holds at its peak, in units of whole stages.

    1F1B: min(pp - stage, m). Interleaved: (2 (pp - 1 - stage) + (vpp - 1) pp + 1) / vpp chunks (Megatron-Core's warm-up;
    group: as in stage_order, in place of the second pp). GPipe: all m. Zero bubble delays weight gradients, so every stage
    holds pp (ZB-2p: 2 pp). V-shaped: counted.
    """
    pp, vpp, m, stage = (np.asarray(values) for values in (pp, vpp, micro_batches, stage))
    delayed = automatic_limit(schedule, pp) + 0 * stage
    zero_bubble = is_schedule(schedule, "zb-h1", *AUTOMATIC)
    plain = np.where(zero_bubble, delayed, np.where(is_schedule(schedule, "gpipe"), m, pp - stage))
    chunks = interleaved_warm_up(pp, vpp, stage, group) + 1
    found = np.minimum(np.where(vpp > 1, chunks / vpp, plain), m)
    v_shaped = is_schedule(schedule, *V_SHAPED)
    return _with_v_shaped(schedule, m, pp, stage, v_shaped, found) if np.any(v_shaped) else found


def _with_v_shaped(
    schedule: Any, m: np.ndarray, pp: np.ndarray, stage: np.ndarray, v_shaped: Any, found: np.ndarray
) -> np.ndarray:
    """Return ``found`` with the counted numbers where ``v_shaped``."""
    codes = SCHEDULES.index(schedule) if isinstance(schedule, str) else schedule
    chosen = np.ravel(np.broadcast_to(v_shaped, found.shape))
    columns = np.stack([a.ravel() for a in np.broadcast_arrays(codes, pp, m, stage)], axis=1)[chosen]
    rows, group = np.unique(columns, axis=0, return_inverse=True)
    held = np.array([v_shaped_in_flight(SCHEDULES[code], p, count)[min(s, p - 1)] for code, p, count, s in rows.tolist()])
    out = np.array(found, dtype=float)
    out[np.broadcast_to(v_shaped, out.shape)] = held[group.ravel()]
    return out


def stated_layers_in_flight(
    schedule: Any, micro_batches: Any, pp: Any, chunks: Sequence[int], stage: Any, of_group: Any = 0
) -> np.ndarray:
    """Return the layers of a micro batch that ``stage`` holds at its peak, as layers_in_flight, by counting.

    chunks: layers of all chunks of the pipeline, in order. The other arguments are arrays of shape [splits].
    """
    columns = np.stack(np.broadcast_arrays(schedule, micro_batches, pp, stage, of_group), axis=1)
    rows, group = np.unique(columns, axis=0, return_inverse=True)
    peaks = [_stated_peak(SCHEDULES[code], m, p, tuple(chunks), s, size) for code, m, p, s, size in rows.tolist()]
    return np.array(peaks, dtype=float)[group.ravel()]


@lru_cache(maxsize=4096)
def _stated_peak(schedule: str, micro_batches: int, pp: int, chunks: tuple[int, ...], stage: int, of_group: int) -> int:
    counted = micro_batches if of_group else min(micro_batches, STEADY * pp)
    order = stage_order(schedule, stage, pp, counted, len(chunks) // pp, of_group)
    kind, chunk, _ = order.T
    held = np.array(chunks)[part_of(schedule, stage, chunk, pp)]
    frees = np.isin(kind, (WEIGHT, WHOLE) if splits_backward(schedule) else (BACKWARD,))
    return int(np.cumsum(np.where(kind == FORWARD, held, np.where(frees, -held, 0))).max())


def layers_in_flight(
    schedule: Any, micro_batches: Any, pp: Any, vpp: Any, layers: Any, short: Any, stage: Any = 0, group: Any = 0
) -> Any:
    """Return the layers whose activations of a micro batch ``stage`` holds at its peak, each counted per micro batch.

    short: layers that the first chunk of the first stage, or the last chunk of the last stage, holds less than its other
    chunks, because embedding or loss count as a layer. Of that chunk the first stage holds min(2 pp - 1, m) micro batches at
    its peak (the first pp of each chunk, and pp - 1 of the next group); the last stage none if another group follows, else one.
    group: as in stage_order, in place of the pp of a group.
    """
    flight = micro_batches_in_flight(schedule, micro_batches, pp, vpp, stage, group)
    pp, m = np.asarray(pp), np.asarray(micro_batches)
    short = np.where(is_schedule(schedule, *V_SHAPED), 0, short)  # both ends are on one stage
    size = group_of(pp, group)
    of_the_short_chunk = np.where(np.asarray(stage) > 0, np.where(m > size, 0, 1), np.minimum(size + pp - 1, m))
    return flight * layers + np.where(np.asarray(vpp) > 1, (flight - of_the_short_chunk) * short, 0.0)
