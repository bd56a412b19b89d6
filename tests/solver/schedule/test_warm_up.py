"""Passes before the first backward pass: the closed forms are what the orders of the schedules have."""

from __future__ import annotations

import numpy as np
import pytest

from solver.schedule.kinds import FORWARD
from solver.schedule.op_orders import stage_order
from solver.schedule.warm_up import interleaved_warm_up, unpaired_micro_batches
from solver.spec.choices import SCHEDULES


def before_the_first_backward(schedule: str, stage: int, pp: int, vpp: int, group: int = 0) -> int:
    """Count the forward passes that the order of a stage begins with."""
    kinds = stage_order(schedule, stage, pp, 6 * (group or pp), vpp, group)[:, 0]
    return int(np.flatnonzero(kinds != FORWARD)[0])


@pytest.mark.parametrize(("pp", "vpp", "group"), [(2, 2, 0), (4, 2, 0), (4, 3, 6), (8, 5, 0)])
def test_interleaved_stages(pp: int, vpp: int, group: int) -> None:
    for stage in range(pp):
        counted = before_the_first_backward("1f1b", stage, pp, vpp, group)
        assert interleaved_warm_up(pp, vpp, stage, group) + 1 == counted  # the pass that pairs with the first backward


@pytest.mark.parametrize("pp", [2, 4, 8, 16])
@pytest.mark.parametrize(
    ("schedule", "vpp"), [("1f1b", 1), ("1f1b", 3), ("zb-v", 2), ("dualpipev", 2), ("v-half", 2), ("v-min", 2)]
)
def test_the_first_stage_of_every_schedule(schedule: str, vpp: int, pp: int) -> None:
    found = unpaired_micro_batches(*(np.array([value]) for value in (SCHEDULES.index(schedule), pp, vpp)))
    last = schedule == "1f1b"  # in which the last of these forward passes already has a backward pass beside it
    assert found.tolist() == [(before_the_first_backward(schedule, 0, pp, vpp) - last) / vpp]


def test_by_hand() -> None:
    codes = np.array([SCHEDULES.index(name) for name in ("zb-v", "dualpipev", "v-half", "v-min")])
    assert unpaired_micro_batches(codes, np.full(4, 8), np.full(4, 2)).tolist() == [8, 8, 2.5, 2]
