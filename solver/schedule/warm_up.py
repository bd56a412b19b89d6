"""Forward passes that a stage runs before its first backward pass."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from solver.schedule.kinds import FORWARD, STEADY, is_schedule
from solver.schedule.v_shaped_orders import v_shaped_order
from solver.spec.choices import SCHEDULES, V_SHAPED


def group_of(pp: Any, group: Any) -> Any:
    """Return the micro batches that interleaved stages run of one chunk before the next: ``group``, or pp where it is 0."""
    return np.where(np.asarray(group) > 0, group, pp)


def interleaved_warm_up(pp: Any, vpp: Any, stage: Any, group: Any = 0) -> Any:
    """Return the forward passes of chunks before the first backward pass of interleaved stages, numbers or arrays.

    group: as of group_of. Source: Narayanan et al. 2021 (arXiv 2104.04473) and
    Megatron-Core's schedules.py: 2 (pp - 1 - stage) + (vpp - 1) group.
    """
    return 2 * (pp - 1 - stage) + (vpp - 1) * group_of(pp, group)


def unpaired_micro_batches(schedule: np.ndarray, pp: np.ndarray, vpp: np.ndarray, group: Any = 0) -> np.ndarray:
    """Return the micro batches that the first stage has begun before another's backward pass can run beside them.

    schedule: codes (indexes into SCHEDULES); all arrays of one shape. V-shaped orders are counted.
    """
    found = np.where(vpp > 1, interleaved_warm_up(pp, vpp, 0, group) / vpp, pp - 1.0)
    v_shaped = np.flatnonzero(is_schedule(schedule, *V_SHAPED))
    if len(v_shaped):
        rows, which = np.unique(np.stack([schedule, pp], axis=1)[v_shaped], axis=0, return_inverse=True)
        found[v_shaped] = np.array([_v_shaped_warm_up(SCHEDULES[code], stages) for code, stages in rows.tolist()])[
            which.ravel()
        ]
    return found


@lru_cache(maxsize=1024)
def _v_shaped_warm_up(schedule: str, pp: int) -> float:
    """Return the same of a V-shaped schedule: half of the passes, since a stage has two chunks."""
    kinds = v_shaped_order(schedule, 0, pp, STEADY * pp)[:, 0]
    return float(np.flatnonzero(kinds != FORWARD)[0]) / 2
