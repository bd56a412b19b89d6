"""What no kernel explains, by what is not known of a run; and the wait for the slowest rank, by hand."""

from __future__ import annotations

import math

import pytest
from toy import TINY, make_problem, part, tiny, toy_cost

from solver.report.explain import explain
from solver.report.uncertainty import system_std, uncertainties
from solver.step.stragglers import SPEED_STD, straggler_share


def test_uncertainties_add_up_as_independent_ones() -> None:
    problem = make_problem(TINY, 32, toy_cost(), 32_768, framework="megatron-core", launch_blocking=True)
    layout = problem.run.replace(tp=16, tp_mode="msp", dp=2)
    assert dict(uncertainties(problem, layout)) == {
        "what megatron-core-0.12 does": 0.05, "sequences above 16,384 tokens": 0.15, "a tensor group that spans nodes": 0.35,
        "blocking launches": 0.10,
    }  # fmt: skip
    assert system_std(problem, layout) == pytest.approx(math.sqrt(0.05**2 + 0.15**2 + 0.35**2 + 0.10**2))


def test_uncertainty_grows_with_the_ranks() -> None:
    found = []
    for world in (8, 64, 512, 4096):  # half of what waiting for the slowest rank adds is uncertain
        why = explain(tiny("megatron-core", world), 0)
        waiting = [line for line in why.lines if line.kind == "stragglers"]
        assert [line.relative_std for line in waiting] == [0.5] * (world > 8)
        found.append(sum(line.seconds * line.relative_std for line in waiting) / why.seconds)
    assert found == sorted(found) and found[0] == 0 and found[-1] > 0.02


@pytest.mark.parametrize(("framework", "std"), [("megatron-core", 0.05), ("megatron-deepspeed", 0.09), ("no such one", 0.12)])
def test_a_framework_that_is_known_less_is_less_certain(framework: str, std: float) -> None:
    problem = make_problem(TINY, 8, toy_cost(), 64, framework=framework)
    assert dict(uncertainties(problem, problem.run)) == {f"what {problem.framework.name} does": std}


def test_every_rank_waits_for_the_slowest() -> None:
    # sqrt(2 log 8) = 2.039, sqrt(2 log 2048) = 3.905
    assert straggler_share(2048, 8) == pytest.approx(SPEED_STD * (3.9050 - 2.0393), rel=1e-4)
    assert straggler_share(8, 8) == straggler_share(4, 8) == straggler_share(1, 1) == 0
    shares = [straggler_share(8 << k, 8) for k in range(12)]
    assert shares == sorted(shares) and shares[-1] < 0.07
    found = tiny("megatron-core", 64)
    alone = found.times.seconds[0] / (1 + straggler_share(64, 8))
    assert part(found, "stragglers")[0] == pytest.approx(found.times.seconds[0] - alone, rel=1e-9)
    assert alone < found.times.seconds[0]
    lines = {line.name: line.seconds for line in explain(found, 0).lines}
    assert lines["waiting for the slowest rank"] == pytest.approx(part(found, "stragglers")[0])
