"""Recomputation of another number of layers on each stage: against brute force, never worse than the same everywhere, rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from toy import estimated, make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from profiler.profile.devices import DEVICES
from solver.formats.config_file import load_run_config
from solver.search.balance import balanced
from solver.search.stage_recomputation import fewest_recomputed
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_framework
from solver.spec.rules.sizes import check_sizes
from solver.spec.strategy import Strategy
from solver.step.layer_table import LayerTable
from solver.step.layouts import Layouts
from solver.step.per_stage import memory_of_stages, time_of_stages
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

MODEL = load_run_config("configs/models/llama3_8b.json").model.replace(num_hidden_layers=16)
LAYOUT = {
    "pp": 4,
    "dp": 2,
    "zero": 1,
    "zero_shard_size": 2,
    "num_micro_batches": 8,
    "recompute": "full",
    "pipeline_layout": "Et*4|t*4|t*4|t*4L",
}


def problem_of_memory(model: CostModel, gib: float, **run: object) -> Problem:
    cluster = cluster_of(DEVICES["h100_sxm"], {"memory_gib": gib})
    settings: dict[str, object] = {"framework": "primus", "precision": "bf16", **run}
    return make_problem(MODEL, 8, model, 8192, cluster, **settings)


def with_counts(
    problem: Problem, counts: tuple[int, ...] | str, table: LayerTable | None = None, **changes: object
) -> Solutions:
    text = counts if isinstance(counts, str) else "+".join(map(str, counts))
    run = problem.layout(**{**LAYOUT, "recompute_stage_layers": text, **changes})
    return estimate_layouts(replace(problem, run=run), Layouts.of([run]), table)


def test_no_other_numbers_fit_and_are_faster(h100_model: CostModel) -> None:
    """Of all numbers on the first three stages of which none is above the one before, whose stage has more micro batches in
    flight; with fewer on the last nothing fits, and more is never faster."""
    plain = with_counts(problem_of_memory(h100_model, 80), "")

    def priced(last: int) -> tuple[np.ndarray, np.ndarray]:
        falling = combinations_with_replacement(range(4, -1, -1), 3)
        every = [with_counts(plain.problem, (*counts, last), plain.table) for counts in falling]
        return np.array([one.times.seconds[0] for one in every]), np.array([one.memory.device[0] for one in every])

    of_last = {last: priced(last) for last in (0, 1, 2)}
    for gib, last in ((28, 2), (30, 0), (32, 0)):
        problem, (seconds, held) = problem_of_memory(h100_model, gib), of_last[last]
        fewest = fewest_recomputed(problem, plain.layouts, plain.table)
        found = with_counts(problem, fewest)
        assert found.memory.device[0] <= problem.cluster.memory_bytes
        assert found.times.seconds[0] == pytest.approx(seconds[held <= problem.cluster.memory_bytes].min(), rel=1e-12)
        assert fewest[0] > fewest[2], "the first stage has most micro batches in flight"
        assert fewest[3] == last and (last == 0 or (of_last[last - 1][1] > problem.cluster.memory_bytes).all())
    assert all((of_last[last + 1][0] >= of_last[last][0]).all() for last in (0, 1))


@pytest.mark.parametrize("count", [0, 1, 3, 4])
@pytest.mark.parametrize("changes", [{}, {"vpp": 2, "pipeline_layout": "E(tt|)*7ttL"}])
def test_the_same_number_everywhere_is_recompute_layers(h100_model: CostModel, count: int, changes: dict[str, object]) -> None:
    problem = problem_of_memory(h100_model, 80)
    one = with_counts(problem, (count,) * 4, **changes)
    other = with_counts(problem, "", recompute_layers=count, **changes)
    assert float(one.times.seconds[0]) == pytest.approx(float(other.times.seconds[0]), rel=1e-12)
    assert float(one.memory.device[0]) == pytest.approx(float(other.memory.device[0]), rel=1e-12)
    assert time_of_stages(one, 0) == pytest.approx(time_of_stages(other, 0), rel=1e-9, abs=1e-12)


def test_stages_hold_and_take_what_their_own_numbers_say(h100_model: CostModel) -> None:
    """A stage's memory is that of the layout in which every stage recomputes as many layers as it does."""
    problem, counts = problem_of_memory(h100_model, 80), (4, 0, 2, 1)
    mixed = memory_of_stages(with_counts(problem, counts), 0).device
    for stage, count in enumerate(counts):
        alike = memory_of_stages(with_counts(problem, (count,) * 4), 0).device
        assert mixed[stage] == pytest.approx(alike[stage], rel=1e-12)
    seconds = time_of_stages(with_counts(problem, counts), 0)
    again = seconds[1]  # the part of recomputation
    assert (
        again[1] == 0
        and again[0] == pytest.approx(2 * again[2], rel=1e-9)
        and again[2] == pytest.approx(2 * again[3], rel=1e-9)
    )


@pytest.mark.parametrize("gib", [23, 26, 30, 80])
def test_it_is_never_worse_than_the_same_number_everywhere(h100_model: CostModel, gib: float) -> None:
    problem = problem_of_memory(h100_model, gib)
    start = estimated(problem, [problem.layout(**{**LAYOUT, "pipeline_layout": ""})])
    balance = balanced(start, 0)
    assert balance.seconds <= balance.uniform * (1 + 1e-9)
    if gib == 26:
        assert balance.seconds < 0.98 * balance.uniform
        run = balance.solutions.layouts.strategy(0, balance.solutions.problem.run)
        assert len(run.recomputed_of_stages) == 4
        check_sizes(MODEL, run)
        check_framework(MODEL, run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute_stage_layers": "4+4"}, "is of 2 stages, and pp is 4"),
        ({"recompute_stage_layers": "4+4+5+0"}, "the stages hold 4\\+4\\+4\\+4 layers"),
        ({"vpp": 2}, "assigns 16 layers to 4 chunks, but there are 16 layers and pp 4 \\* vpp 2"),
        ({"schedule": "zb-v", "vpp": 2}, "assigns 16 layers to 4 chunks"),
        ({"schedule": "zb-v"}, "schedule zb-v"),
        ({"recompute": "none"}, "is of recompute full, and replaces recompute_layers"),
        ({"recompute_layers": 2}, "is of recompute full, and replaces recompute_layers"),
        ({"pipeline_layout": ""}, "needs pipeline_layout, which says what each stage holds"),
        ({"framework": "megatron-core-0.12"}, "recomputes as many layers on every stage"),
        ({"recompute_stage_layers": "1,2"}, "it must be a number of layers for each stage, as in 3\\+8\\+8\\+0"),
        (
            {
                "schedule": "v-half",
                "vpp": 2,
                "pipeline_layout": "E(tt|)*7ttL",
                "overlap_grad_reduce": False,
                "overlap_param_gather": False,
                "recompute_stage_layers": "",
            },
            "does not offer pipeline_layout under schedule v-half",
        ),
        (
            {"schedule": "zb-1p", "pipeline_layout": "", "recompute_stage_layers": ""},
            "does not run overlap_grad_reduce with schedule zb-1p, which splits the backward pass",
        ),
    ],
)
def test_what_no_run_can_have_is_refused(changes: dict[str, object], message: str) -> None:
    usual = {**LAYOUT, "recompute_stage_layers": "1+1+0+0", "framework": "primus-2026"}
    with pytest.raises(InputError, match=message):
        run = Strategy(**{"world_size": 8, "seq_len": 8192, **usual, **changes})  # type: ignore[arg-type]
        check_sizes(MODEL, run)
        check_framework(MODEL, run)


@pytest.mark.parametrize("count", [1, 3])
def test_a_stage_may_fill_all_memory(h100_model: CostModel, count: int) -> None:
    # exactly what the first stage holds with so many layers recomputed; a byte less, and it must recompute one more
    problem = problem_of_memory(h100_model, 80)
    same = with_counts(problem, (count,) * 4)
    needed = float(memory_of_stages(same, 0).device[0])
    for memory, fewest in ((needed, count), (needed - 1, count + 1)):
        limited = replace(same.problem, cluster=replace(problem.cluster, memory_bytes=memory))
        assert fewest_recomputed(limited, same.layouts, same.table)[0] == fewest
