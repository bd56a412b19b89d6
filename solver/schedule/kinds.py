"""Kinds of passes, and what a schedule does with a stage's chunks."""

from __future__ import annotations

from typing import Any

import numpy as np

from solver.spec.choices import SCHEDULES, SPLIT_BACKWARD, V_SHAPED

#: BACKWARD is the whole backward pass, or the input gradient where the schedule splits it; WHOLE is a whole backward pass of a
#: schedule that splits others.
FORWARD, BACKWARD, WEIGHT, WHOLE = 0, 1, 2, 3
#: Planned from measured times (solver.schedule.automatic): their orders have no closed form.
AUTOMATIC = ("zb-1p", "zb-2p")
#: Micro batches, in units of pp, of which every further one only repeats the steady state.
STEADY = 4


def is_schedule(schedule: Any, *names: str) -> Any:
    """Whether a schedule, by name or as codes (indexes into SCHEDULES, an array), is one of ``names``."""
    if isinstance(schedule, str):
        return schedule in names
    return np.logical_or.reduce([schedule == SCHEDULES.index(name) for name in names])  # of few, np.isin costs more


def splits_backward(schedule: Any) -> Any:
    """Whether a schedule, by name or as codes, runs the weight gradient as a pass of its own."""
    return is_schedule(schedule, *SPLIT_BACKWARD)


def part_of(schedule: str, stage: Any, chunk: Any, stages: int) -> Any:
    """Return which part of the model a stage's chunk is: parts are numbered in the order in which a micro batch passes them."""
    if schedule in V_SHAPED:
        return np.where(chunk == 0, stage, 2 * stages - 1 - stage)
    return chunk * stages + stage
