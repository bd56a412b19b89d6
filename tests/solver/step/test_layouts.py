"""Layouts as arrays, and back as strategies."""

from __future__ import annotations

import numpy as np
import pytest
from toy import toy_layout

from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts, Splits

LAYOUTS = [
    toy_layout(32, dp=4, tp=2, cp=2, pp=2, zero=1, zero_shard_size=4, micro_batch_size=3, num_micro_batches=6),
    toy_layout(32, dp=8, pp=4, vpp=2, schedule="interleaved", num_micro_batches=8, recompute="full", recompute_layers=2),
    toy_layout(32, dp=16, tp=2, tp_mode="isp", wp=4, zero=3, zero_shard_size=2, recompute="selective"),
]


def test_strategies_become_layouts_and_strategies_again() -> None:
    layouts = Layouts.of(LAYOUTS)
    assert [layouts.strategy(i, toy_layout(32)) for i in range(3)] == LAYOUTS
    chosen = layouts.take(np.array([2, 0, 2]))
    assert len(chosen) == 3 and len(chosen.splits) == 2
    assert [chosen.strategy(i, toy_layout(32)) for i in range(3)] == [LAYOUTS[2], LAYOUTS[0], LAYOUTS[2]]
    both = Splits.concatenate([layouts.splits, chosen.splits])
    assert len(both) == 5 and both.tp.tolist() == [2, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("asked", "vpp", "schedule"),
    [
        ("1f1b", 1, "1f1b"),
        ("zb-h1", 1, "zb-h1"),
        ("interleaved", 1, "1f1b"),
        ("interleaved", 2, "interleaved"),
        ("1f1b", 2, "interleaved"),
    ],
)
def test_the_schedule_of_a_layout(asked: str, vpp: int, schedule: str) -> None:
    # several chunks are interleaved; one chunk runs the schedule that it states, which for an interleaved one is 1F1B
    strategy: Strategy = LAYOUTS[1].replace(vpp=vpp, schedule=asked)
    assert Layouts.of([strategy]).strategy(0, toy_layout(32)).schedule == schedule


def test_layouts_that_differ_in_sharded_states_share_a_pipeline() -> None:
    run = toy_layout(32, dp=16, tp=2)
    whole = [run.replace(zero=0), run.replace(zero=1, zero_shard_size=4), run.replace(zero=2, zero_shard_size=16)]
    gathering = [run.replace(zero=3, zero_shard_size=4), run.replace(zero=3, zero_shard_size=16)]
    others = [
        run.replace(zero=1, zero_shard_size=4, **more)
        for more in (
            {"recompute": "full"},
            {"recompute": "full", "recompute_layers": 2},
            {"micro_batch_size": 2},
        )
    ]
    first, same = Layouts.of([*whole, *gathering, *others]).pipelines
    assert same[:3].tolist() == [same[0]] * 3 and len(set(same[2:].tolist())) == 6 == len(first)
    np.testing.assert_array_equal(same[first], np.arange(6))
