"""What passes wait for largest values of other ranks under delayed scaling: seconds by hand, and where there is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver import load_problem
from solver.report.explain import explain
from solver.report.timeline import step_timeline
from solver.spec.feasibility import check_rules
from solver.step.amax_reduction import amax_seconds, estimate_amax_reduction
from solver.step.layouts import Layouts
from solver.step.per_stage import time_of_stages
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts
from solver.step.time import TIME_PARTS


def problem(world: int = 64, **constants: Any) -> Problem:
    run = {"profile": "h100_sxm", "framework": "nemo-24.12", "precision": "fp8", **constants}
    return load_problem("configs/models/llama3_8b.json", world, **run)


def estimated(one: Problem, **axes: Any) -> Solutions:
    return estimate_layouts(
        one, Layouts.of([one.layout(**{"tp": 2, "tp_mode": "msp", "cp": 2, "num_micro_batches": 8, **axes})])
    )


def part(found: Solutions, name: str) -> float:
    return float(found.times.parts[TIME_PARTS.index(name), 0])


@pytest.mark.parametrize(
    ("reduction", "ranks"), [("all", (8, 2)), ("tensor", (4, 1))]
)  # 64 GPUs in 4 stages: 16 ranks share a stage's layers, tp 2 x cp 2 of them a part of each
def test_each_pass_waits_for_one_small_all_reduce(reduction: str, ranks: tuple[int, int], h100_model: CostModel) -> None:
    one = problem(fp8_amax_reduction=reduction)
    found = estimated(one, pp=4, vpp=2, dp=4, schedule="interleaved")
    # 32 layers of four linears, three values each, in four bytes, on 4 stages of 2 chunks
    size = 4 * 3 * 4 * 32 / 4 / 2
    seconds = float(one.cost.network.collective("all_reduce", size, *ranks).seconds)
    assert found.terms.amax[0] == pytest.approx(seconds, rel=1e-12)
    assert part(found, "amax") == pytest.approx(8 * 2 * 2 * seconds, rel=1e-12)  # micro batches x chunks x ways
    assert 2e-5 < seconds < 2e-4


def test_the_step_is_longer_by_the_passes_of_the_pipeline() -> None:
    """Without a pipeline by those of all micro batches; with one by those that fill and drain it too."""
    for pp, passes in ((1, 8), (4, 8 + 3)):
        with_, without = (
            estimated(problem(fp8_amax_reduction=how), pp=pp, dp=16 // pp, schedule="1f1b") for how in ("all", "none")
        )
        stragglers = part(with_, "stragglers") - part(without, "stragglers")
        longer = float(with_.times.seconds[0] - without.times.seconds[0]) - stragglers
        assert longer == pytest.approx(2 * passes * with_.terms.amax[0], rel=1e-6)
        assert part(without, "amax") == 0.0 == without.terms.amax[0]


@pytest.mark.parametrize(
    "constants",
    [
        {"precision": "bf16"},
        {"fp8_recipe": "tensorwise"},
        {"framework": "torchtitan"},
        {"fp8_amax_reduction": "none"},
        {"precision": "mxfp8", "profile": "b200_sxm", "framework": "megatron-core"},
    ],
)
def test_where_no_largest_values_are_exchanged(constants: dict[str, Any]) -> None:
    one = problem(**constants)
    splits = Layouts.of([one.layout(tp=2, dp=32, tp_mode="msp")]).splits
    assert amax_seconds(one, splits).tolist() == [0.0] and estimate_amax_reduction(one, splits).ops == ()


def test_one_rank_exchanges_nothing() -> None:
    one = problem(8)
    splits = Layouts.of([one.layout(pp=8, schedule="1f1b", num_micro_batches=8)]).splits
    assert amax_seconds(one, splits).tolist() == [0.0]


def test_more_replicas_wait_longer() -> None:
    seconds = [estimated(problem(world), dp=world // 4).terms.amax[0] for world in (8, 16, 64, 512)]
    assert seconds == sorted(seconds) and seconds[-1] > 1.5 * seconds[0]


def test_reports_and_the_timeline_have_it() -> None:
    found = estimated(problem(), pp=4, vpp=2, dp=4, schedule="interleaved")
    line = next(line for line in explain(found, 0).lines if line.part == "amax")
    assert line.seconds == pytest.approx(part(found, "amax")) and line.relative_std > 0
    of_stages = time_of_stages(found, 0)
    assert of_stages[TIME_PARTS.index("amax")].tolist() == [part(found, "amax")] * 4
    assert np.allclose(of_stages.sum(axis=0), found.times.seconds[0])
    timeline = step_timeline(found, 0)
    assert timeline.line.makespan == pytest.approx(
        sum(part(found, n) for n in TIME_PARTS[: TIME_PARTS.index("bubble") + 1]), rel=0.02
    )


def test_other_recipes_refuse_the_setting() -> None:
    one = problem(fp8_recipe="tensorwise", fp8_amax_reduction="tensor")
    with pytest.raises(InputError, match="fp8_amax_reduction tensor changes nothing without fp8_recipe delayed"):
        check_rules(one.model, one.layout(dp=64))
