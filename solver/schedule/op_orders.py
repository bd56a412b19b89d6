"""The order in which each pipeline stage runs its forward, backward and weight-gradient passes, by schedule.

An order is an int64 array of shape [passes, 3] with the columns kind, chunk, micro batch. It depends on the stage, the number
of stages and the number of micro batches, and but for the automatic ones never on how long a pass takes. Frameworks work the
same way, so unequal stages wait.
"""

from __future__ import annotations

import numpy as np

from profiler.errors import InputError
from solver.schedule.automatic import automatic_orders
from solver.schedule.kinds import AUTOMATIC, BACKWARD, FORWARD, WEIGHT, splits_backward
from solver.schedule.v_shaped_orders import v_shaped_order
from solver.schedule.warm_up import interleaved_warm_up
from solver.spec.choices import SCHEDULES, V_SHAPED
from solver.spec.rules.schedules import chunks_broken


def check_schedule(schedule: str, stages: int, micro_batches: int, vpp: int, group: int = 0) -> None:
    """Raise InputError for a schedule that no framework runs."""
    if schedule not in SCHEDULES:
        raise InputError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    if min(stages, micro_batches, vpp) < 1:
        raise InputError(f"a pipeline needs a stage, chunk and micro batch, not {stages}, {vpp}, {micro_batches}")
    if broken := chunks_broken(schedule, stages, vpp, micro_batches, group):
        raise InputError(broken)


def stage_order(schedule: str, stage: int, stages: int, micro_batches: int, vpp: int = 1, group: int = 0) -> np.ndarray:
    """Return the passes of ``stage`` (0 is the first) in order. group: micro batches of a chunk in turn, 0: as many as stages.

    * gpipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).
    * 1f1b: as many forwards as there are later stages, then one forward and one backward in turn (Narayanan et al. 2021,
      arXiv 2006.09503: PipeDream-Flush).
    * interleaved: as in Megatron-Core, micro batches in groups of pp (or ``group``) run chunk after chunk; before the first
      backward run 2 (pp - 1 - stage) + (vpp - 1) pp forwards of chunks (Narayanan et al. 2021, arXiv 2104.04473). One chunk:
      1f1b.
    * zb-h1: 1f1b with weight gradients ``stage`` micro batches late, so that every stage holds at most pp micro batches
      (Qi et al. 2023, arXiv 2401.10241). The order is fixed: stages that differ in kind, not only in layers, may lose by it.
    * zb-1p, zb-2p: solver.schedule.automatic, whose orders depend on times; here those of equal passes.
    * zb-v, v-half, v-min, dualpipev: solver.schedule.v_shaped_orders.
    """
    check_schedule(schedule, stages, micro_batches, vpp, group)
    behind = stages - 1 - stage
    if schedule in V_SHAPED:
        return v_shaped_order(schedule, stage, stages, micro_batches)
    if schedule == "gpipe":
        return _one_by_one(_passes(micro_batches, stages, 1), micro_batches)
    if vpp > 1:
        return _one_by_one(_passes(micro_batches, group or stages, vpp), interleaved_warm_up(stages, vpp, stage, group))
    if schedule in AUTOMATIC:
        return automatic_orders(schedule, micro_batches, np.ones((3, stages)))[stage]
    if splits_backward(schedule):
        return _with_weights(micro_batches, behind, stage)
    return _one_by_one(_passes(micro_batches, stages, 1), behind)


def _passes(micro_batches: int, group: int, vpp: int) -> np.ndarray:
    """Return (chunk, micro batch) of all forwards in order; backwards run in this order with chunks counted from the last.

    The last group may be smaller than the others (get_schedule_table in Megatron-Core's schedules.py).
    """
    k = np.arange(micro_batches * vpp)
    if vpp == 1:
        return np.stack([np.zeros_like(k), k], axis=1)
    first = k // (group * vpp) * group  # micro batch of each group
    size = np.minimum(group, micro_batches - first)
    within = k - first * vpp
    return np.stack([within // size, first + within % size], axis=1)


def _one_by_one(forwards: np.ndarray, warm_up: int) -> np.ndarray:
    """Return ``warm_up`` forwards, then one forward and one backward in turn, then the remaining backwards."""
    count = len(forwards)
    backwards = np.stack([forwards[:, 0].max() - forwards[:, 0], forwards[:, 1]], axis=1)
    k, warm_up = np.arange(count), min(warm_up, count)
    # a forward's time slot is given by its number; backward k follows forward k + warm_up
    slots = np.concatenate([2 * k, 2 * (k + warm_up) + 1])
    kinds = np.repeat([FORWARD, BACKWARD], count)
    return np.column_stack([kinds, np.concatenate([forwards, backwards])])[np.argsort(slots, kind="stable")]


def _with_weights(micro_batches: int, warm_up: int, late: int) -> np.ndarray:
    """As _one_by_one; weight gradient of micro batch k - ``late`` follows backward k, the remaining ones run at the end."""
    k, warm_up = np.arange(micro_batches), min(warm_up, micro_batches)
    slots = np.concatenate([3 * k, 3 * (k + warm_up) + 1, 3 * (k + late + warm_up) + 2])
    order = np.argsort(slots, kind="stable")
    kinds = np.repeat([FORWARD, BACKWARD, WEIGHT], micro_batches)
    return np.column_stack([kinds, np.zeros_like(slots), np.tile(k, 3)])[order]
