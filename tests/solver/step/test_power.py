"""Clocks at the power limit: the law beside what was measured, by hand, and in a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import TINY, estimated, make_problem, part, toy_cost

from predictor.kernels.derating import Deratings
from predictor.network.stated_busbw import StatedLinks
from solver.step.power import MEMORY_BOUND_POWER, slowdown_at

MEASURED = Path(__file__).parents[3] / "configs" / "validate_here"
IDLE_POWER = 0.19  #: 131 W of 700: what copies at half of the time leave
SHORT = 0.06  #: seconds of a round, and less: clocks average over several
LONG = 0.2e-3  #: seconds of a GEMM: a burst of shorter ones has hardly begun when it ends


def rows(device: str) -> list[dict[str, Any]]:
    lines = (MEASURED / device / "power.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kernel"].startswith("gemm") and row["burst"] > LONG]


@pytest.mark.parametrize("device", ["h100", "h200"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_gemms_beside_copies_and_beside_nothing_take_what_the_law_says(device: str, dtype: str) -> None:
    chosen = [row for row in rows(device) if dtype in row["kernel"] and row["period"] < SHORT]
    alone = float(np.median([row["slowdown"] for row in chosen if row["share"] > 0.99]))
    found = []
    for row in chosen:
        power = MEMORY_BOUND_POWER if row["filler"] == "copies" else IDLE_POWER
        spare = row["seconds"] * (1 / row["share"] - 1) * (1 - power)
        found.append(float(slowdown_at(np.array(row["burst"]), np.array(spare), alone)) / row["slowdown"])
    assert len(found) > 6 and 1.14 < alone < 1.19
    assert np.median(np.abs(np.array(found) - 1)) < 0.015 and np.abs(np.array(found) - 1).max() < 0.07


def test_the_average_power_is_at_the_limit() -> None:
    # GEMMs of 1 s in a burst, which draw 1.2^2 of the limit, beside 0.1 s of copies: x (1 - 1.44 / x^2) + 0.1 * 0.425 = 0
    x = float(slowdown_at(np.array(1.0), np.array(0.1 * (1 - MEMORY_BOUND_POWER)), 1.2))
    assert (x * 1.44 / x**2 + 0.1 * MEMORY_BOUND_POWER) / (x + 0.1) == pytest.approx(1.0, rel=1e-12)
    assert x == pytest.approx(1.178938, abs=1e-6)


@given(limited=st.floats(1e-6, 10.0), spare=st.floats(0.0, 10.0), more=st.floats(0.0, 1.0), alone=st.floats(1.0, 1.5))
def test_more_work_beside_gemms_never_slows_them(limited: float, spare: float, more: float, alone: float) -> None:
    seconds = slowdown_at(np.full(2, limited), np.array([spare, spare + more]), alone)
    assert 1.0 <= seconds[1] <= seconds[0] <= alone
    assert slowdown_at(np.array(limited), np.array(0.0), alone) == pytest.approx(alone, rel=1e-12)


def compute_seconds(tp: int = 1, links: float = 1.0, derating: float = 1.0, power: float = 1.0) -> float:
    """Seconds of the compute of a step of TINY on ``tp`` GPUs, whose links take ``links`` times as long."""
    cost = toy_cost(deratings=Deratings(derating, derating, power_slowdown=power), stated=StatedLinks(link_slowdown=links))
    problem = make_problem(TINY, tp, cost, framework="megatron", compile=True)
    run = problem.layout(tp=tp, dp=1, tp_mode="msp" if tp > 1 else "mtp")
    return float(part(estimated(problem, [run]), "compute")[0])


def test_a_steps_gemms_take_what_its_kernels_leave() -> None:
    # one GPU, whose step is GEMMs and attention of g seconds in a burst and kernels of k: g x + k
    free, limited, derated = compute_seconds(), compute_seconds(derating=4, power=4), compute_seconds(derating=4)
    gemms = (derated - free) / 3
    kernels = free - gemms
    x = float(slowdown_at(np.array(gemms), np.array(kernels * (1 - MEMORY_BOUND_POWER)), 4.0))
    assert 1.5 < x < 3.5
    assert limited == pytest.approx(gemms * x + kernels, rel=1e-9)


def test_gemms_are_faster_beside_longer_collectives() -> None:
    # so little of TINY are its GEMMs that a limit which they exceed 100 times in a burst holds them down
    free, derated = compute_seconds(tp=2), compute_seconds(tp=2, derating=10)
    short, long = (compute_seconds(tp=2, links=links, derating=10, power=10) for links in (0.01, 1.0))
    assert free < long < short < derated
    assert compute_seconds(tp=2, links=100.0, derating=10, power=10) == pytest.approx(free, rel=1e-9)
