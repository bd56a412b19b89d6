"""Interleaving in groups of micro batches that are not pp: orders by hand, the time, what is held, what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import interleaved_form
from toy import TINY, all_layouts, make_problem, toy_cost

from profiler.errors import InputError
from solver.schedule.event_simulation import simulate
from solver.schedule.op_orders import stage_order
from solver.schedule.stages import micro_batches_in_flight
from solver.search.search import search
from solver.spec.feasibility import check_layout
from solver.spec.rules.schedules import groups_fit, smallest_group
from solver.step.solutions import estimate_layouts


def forwards(stage: int, pp: int, m: int, vpp: int, group: int) -> list[tuple[int, int]]:
    """(chunk, micro batch) of the forward passes in order."""
    return [(chunk, micro) for kind, chunk, micro in stage_order("interleaved", stage, pp, m, vpp, group).tolist() if kind == 0]


def test_the_order_of_five_micro_batches_by_hand() -> None:
    # pp 2 in groups of 3: three of each chunk, then the two that are left
    expected = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (0, 4), (1, 3), (1, 4)]
    assert forwards(0, 2, 5, 2, 3) == forwards(1, 2, 5, 2, 3) == expected
    # before the first backward pass the last stage runs a chunk of one group, the first also two more, and each the next one
    for stage, before in ((1, 3 + 1), (0, 2 + 3 + 1)):
        order = stage_order("interleaved", stage, 2, 5, 2, 3)
        assert np.flatnonzero(order[:, 0] != 0)[0] == before
    np.testing.assert_array_equal(stage_order("interleaved", 1, 4, 8, 2, 4), stage_order("interleaved", 1, 4, 8, 2))


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 5), st.integers(2, 3), st.integers(0, 4), st.integers(1, 3), st.integers(0, 6))
def test_the_closed_forms_hold(pp: int, vpp: int, larger: int, whole: int, rest: int) -> None:
    group = pp + larger
    m = whole * group + (rest if pp <= rest < group else 0)
    assert groups_fit(m, pp, group)
    line = simulate("interleaved", np.full(pp, 1.0 * vpp), np.full(pp, 2.0 * vpp), m, vpp, group=group)
    # as soon as with groups of pp, whose bubble is the shortest that filling and draining leave
    equal = np.ones((pp, vpp))
    assert line.makespan == pytest.approx(interleaved_form(equal, 2 * equal, m, group))
    for stage in range(pp):
        assert line.in_flight[stage] == pytest.approx(float(micro_batches_in_flight("interleaved", m, pp, vpp, stage, group)))


def problem(**constants: Any) -> Any:
    model = TINY.replace(num_hidden_layers=8)
    return make_problem(model, 8, toy_cost(), 512, **{"framework": "megatron-core", "micro_batch_group": 3, **constants})


def test_a_search_deals_in_groups() -> None:
    layouts = all_layouts(problem(), 30)
    splits = layouts.splits
    assert (splits.vpp > 1).all() and (splits.pp <= 3).all()
    assert groups_fit(5, 2, 3) and not groups_fit(4, 2, 3)
    assert {m % 3 for m, pp in zip(splits.num_micro_batches.tolist(), splits.pp.tolist(), strict=True)} <= {0, 2}
    found = estimate_layouts(problem(), layouts)
    fits = found.memory.device <= found.problem.cluster.memory_bytes
    assert search(problem(), 30).best.times.seconds[0] == pytest.approx(found.times.seconds[fits].min(), rel=1e-12)


def test_a_search_tries_larger_groups_where_pp_does_not_divide_the_micro_batches() -> None:
    """Of 16 micro batches groups of 3 leave one and of 4 none; some frameworks interleave multiples of pp only."""
    assert [smallest_group(m, pp) for m, pp in ((16, 3), (16, 4), (32, 12), (100, 12), (5, 3), (2, 3))] == [4, 0, 16, 17, 5, 0]
    model = TINY.replace(num_hidden_layers=12)
    for framework, groups in (("megatron-core", {0, 4}), ("megatron-core-0.8", {0})):
        one = make_problem(model, 24, toy_cost(), 512, framework=framework)
        layouts = all_layouts(one, 64)
        splits = layouts.splits
        chosen = (splits.pp == 3) & (splits.num_micro_batches == 16) & (splits.dp == 4)
        assert set(splits.micro_batch_group[chosen].tolist()) == groups
        assert (splits.micro_batch_group[splits.vpp == 1] == 0).all()
        assert (splits.vpp[chosen] > 1).any() == (4 in groups)
        for row in np.flatnonzero(chosen[layouts.row])[:20]:
            check_layout(one.model, one.cluster, layouts.strategy(int(row), one.run))


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"pp": 4, "dp": 2, "vpp": 2, "num_micro_batches": 6}, "micro_batch_group 3 is less than pp 4"),
        ({"pp": 2, "dp": 4, "vpp": 2, "num_micro_batches": 4}, "groups of 3 and a last one of at least pp 2, not 4"),
        ({"pp": 2, "dp": 4, "vpp": 2, "num_micro_batches": 2}, "groups of 3"),
        ({"pp": 2, "dp": 4, "num_micro_batches": 6}, "changes nothing without interleaved stages"),
        ({"pp": 2, "dp": 4, "vpp": 2, "num_micro_batches": 6, "framework": "megatron-core-0.8"}, "does not offer"),
    ],
)
def test_refused(layout: dict[str, Any], reason: str) -> None:
    one = problem()
    with pytest.raises(InputError, match=reason):
        check_layout(one.model, one.cluster, one.layout(**layout))
