"""Schedules that are planned from measured times: their authors' published bubbles, their plans and the closed form of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from solver.schedule.automatic import automatic_bubble, automatic_limit, automatic_orders
from solver.schedule.closed_forms import PipelineColumns, automatic_pipeline_seconds
from solver.schedule.event_simulation import in_flight, simulate
from solver.schedule.kinds import AUTOMATIC, BACKWARD, FORWARD, WEIGHT
from solver.spec.choices import SCHEDULES

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])

#: arXiv 2401.10241: milliseconds of F, B, W and of a message, measured on 8 A100, and the share of its activations that a
#: weight gradient needs, 32 h / (34 h + 5 a s) of section 2.3.
OF_1_5B = (18.522, 18.086, 9.337, 0.601, 32 * 2304 / (34 * 2304 + 5 * 24 * 1024))


def bubble(schedule: str, pp: int, m: int, f: float, b: float, w: float, late: float, share: float) -> tuple[float, float]:
    """Return the idle seconds of the longest stage of the plan, and of the closed form."""
    line = simulate(schedule, [f] * pp, [b + w] * pp, m, 1, late, [w] * pp, False, share)
    form = automatic_bubble(schedule, m, pp, np.array([f, b, w]), late, share)
    return float(line.span.max()) - m * (f + b + w), float(form)


@pytest.mark.parametrize(("schedule", "rate"), [("zb-1p", 0.1585), ("zb-2p", 0.0433)])
def test_the_plan_has_the_bubble_that_its_authors_print(schedule: str, rate: float) -> None:
    # 24 micro batches: the bubble's share of a step, as their table of bubble rates has it
    f, b, w, late, share = OF_1_5B
    for idle in bubble(schedule, 8, 24, f, b, w, late, share):
        assert idle / (idle + 24 * (f + b + w)) == pytest.approx(rate, abs=5e-5)


@few
@given(
    st.sampled_from(AUTOMATIC),
    st.integers(2, 8),
    st.integers(1, 5),
    st.floats(0.7, 2.2),
    st.floats(0.3, 1.1),
    st.floats(0, 0.1),
    st.floats(0.15, 1.0),
)
def test_the_closed_form_is_close_to_the_plan(
    schedule: str, pp: int, rounds: int, b: float, w: float, late: float, share: float
) -> None:
    m = rounds * pp + 1
    plan, form = bubble(schedule, pp, m, 1.0, b, w, late, share)
    work = m * (1.0 + b + w)
    if schedule == "zb-1p":
        assert form == pytest.approx(plan, rel=0.01, abs=0.01 * work)
    else:
        assert -0.037 < (work + form) / (work + plan) - 1 < 1e-6


@few
@given(
    st.sampled_from(AUTOMATIC),
    st.integers(1, 6),
    st.integers(1, 20),
    st.floats(0.5, 2.5),
    st.floats(0.2, 1.2),
    st.floats(0.2, 1),
)
def test_a_plan_runs_each_pass_once_and_stays_within_memory(
    schedule: str, pp: int, m: int, b: float, w: float, share: float
) -> None:
    orders = automatic_orders(schedule, m, np.array([[1.0] * pp, [b] * pp, [w] * pp]), 0.05, share)
    for order in orders:
        for kind in (FORWARD, BACKWARD, WEIGHT):
            assert order[order[:, 0] == kind, 2].tolist() == list(range(m))
        counts = np.cumsum(np.eye(3)[order[:, 0]], axis=0)
        assert (counts[:, FORWARD] >= counts[:, BACKWARD]).all() and (counts[:, BACKWARD] >= counts[:, WEIGHT]).all()
    assert in_flight(schedule, orders, 1, share).max() <= automatic_limit(schedule, pp) + 1e-9


def test_the_limit_is_reached_where_micro_batches_suffice() -> None:
    for schedule, most in (("zb-1p", 8), ("zb-2p", 16)):
        line = simulate(schedule, [1.0] * 8, [2.0] * 8, 24, weight_grad=[1.0] * 8)
        assert line.in_flight == pytest.approx(np.full(8, most))


def test_more_memory_never_costs_and_all_of_it_leaves_no_bubble() -> None:
    one, two = (automatic_bubble(name, 64, 8, np.array([1.1, 1.1, 0.8]), 0.0, 0.4) for name in AUTOMATIC)
    assert one == pytest.approx(7 * (1.1 + 1.1 - 0.8)) and two == 0.0


def test_uneven_stages_stay_within_the_documented_error() -> None:
    """Of a step's time, against the simulation: stages that differ by up to a third."""
    rng = np.random.default_rng(0)
    errors: dict[str, list[float]] = {name: [] for name in AUTOMATIC}
    for _ in range(60):
        pp, rounds = int(rng.choice([2, 4, 8])), int(rng.choice([2, 3, 6]))
        m, f = rounds * pp, rng.uniform(0.75, 1.0, pp)
        b, w = f * rng.uniform(0.9, 1.8), f * rng.uniform(0.4, 0.9)
        late, share = rng.uniform(0, 0.05), rng.uniform(0.3, 1.0)
        busy = f + b + w
        slow = int(busy.argmax())
        for name in AUTOMATIC:
            columns = PipelineColumns(np.array([SCHEDULES.index(name)]), np.array([m]), np.array([pp]))
            passes = np.array([f, b, w])[:, slow, None]
            form = automatic_pipeline_seconds(columns, busy.sum()[None], busy.max()[None], passes, late, share, False)
            line = simulate(name, f, b + w, m, 1, late, w, False, share)
            errors[name].append(float(form[0]) / line.span.max() - 1)
    for name, mean, low, high in (("zb-1p", 0.02, -0.05, 0.08), ("zb-2p", 0.02, -0.05, 0.08)):
        found = np.array(errors[name])
        assert abs(found).mean() < mean and found.min() > low and found.max() < high, (
            name,
            abs(found).mean(),
            found.min(),
            found.max(),
        )


def test_a_plan_that_later_callers_get_cannot_be_changed() -> None:
    orders = automatic_orders("zb-1p", 4, np.ones((3, 2)), 0.0)
    with pytest.raises(ValueError, match="read-only"):
        orders[0][0] = 9
