"""One step along each axis: the next values of the whole space, everything else kept, and the estimates of the search."""

from __future__ import annotations

import numpy as np
import pytest
from toy import make_problem

from predictor.cost_model import CostModel
from solver.api import estimate
from solver.formats.config_file import load_run_config
from solver.search.neighbours import AXES, Neighbourhood, neighbours
from solver.search.search import search
from solver.search.space import cross, enumerate_splits
from solver.spec.choices import Recompute
from solver.spec.strategy import Strategy
from solver.step.problem import Problem

BATCH = 64
LLAMA = load_run_config("configs/models/llama3_8b.json").model
MIXTRAL = load_run_config("configs/models/mixtral_8x7b.json").model
#: What may change beside the axis that steps: what fills the world and the batch, what must divide, and what follows an axis.
FREE = {"dp", "num_micro_batches", "zero_shard_size", "schedule"} | {
    f"{what}_pipeline_{'stage' if what.startswith('num') else 'split'}"
    for what in ("num_layers_in_first", "num_layers_in_last", "account_for_embedding_in", "account_for_loss_in")
}
FOLLOWING = {
    "tp": {"tp_mode", "etp", "wp"},
    "cp": {"wp"},
    "pp": {"vpp", "zero", "recompute_layers"},
    "tp_mode": {"wp"},
    "ep": {"etp"},
    "zero": {"wp"},
    "zero_shard_size": {"zero"},
    "schedule": {"vpp"},
    "recompute": {"recompute_layers"},
}


def problem_of(cost: CostModel, model: object, world: int) -> Problem:
    return make_problem(model, world, cost, 4096, framework="megatron-core", precision="bf16")


@pytest.fixture(scope="module", params=[LLAMA, MIXTRAL], ids=["dense", "experts"])
def around(request: pytest.FixtureRequest, h100_model: CostModel) -> Neighbourhood:
    problem = problem_of(h100_model, request.param, 32)
    sizes = {"tp": 2, "pp": 4, "dp": 4, "zero": 1, "zero_shard_size": 2, "micro_batch_size": 2, "num_micro_batches": 8}
    experts = {"tp_mode": "msp", "ep": 4} if request.param is MIXTRAL else {}
    layout = problem.layout(**sizes, **experts, vpp=2, schedule="interleaved", recompute="full", recompute_layers=4)
    return neighbours(problem, layout)


def layouts_of(around: Neighbourhood) -> list[Strategy]:
    s = around.solutions
    return [s.layouts.strategy(i, s.problem.run) for i in range(len(s))]


def test_each_step_changes_its_axis_and_only_what_may_follow(around: Neighbourhood) -> None:
    layouts = layouts_of(around)
    own = layouts[0]
    assert {"tp", "cp", "pp", "vpp", "micro_batch_size", "zero", "zero_shard_size", "recompute"} <= {
        s.axis for s in around.steps
    }
    for step in around.steps:
        other = layouts[step.index]
        changed = {name for name, value in vars(own).items() if getattr(other, name) != value}
        assert step.axis in AXES and changed & {step.axis, "recompute_layers"}
        assert changed <= {step.axis} | FREE | FOLLOWING.get(step.axis, set())
        assert other.global_batch_sequences == own.global_batch_sequences == BATCH
        assert other.tp * other.cp * other.pp * other.dp == other.world_size
        assert step.before != step.after


def test_steps_are_to_the_next_values_of_the_whole_space(around: Neighbourhood) -> None:
    problem, own = around.solutions.problem, layouts_of(around)[0]
    space = cross(problem, enumerate_splits(problem, BATCH).splits)
    sizes = ("tp", "cp", "pp", "ep", "micro_batch_size")
    same = sum((getattr(space.splits, name) == getattr(own, name)).astype(int) for name in sizes)[space.row]
    near = np.flatnonzero((same >= len(sizes) - 1) & (space.recompute == Recompute[own.recompute.upper()]))
    everything = [space.strategy(int(i), problem.run) for i in near]  # what differs in one size at most
    for axis in ("tp", "cp", "pp", "micro_batch_size", "zero_shard_size", "ep"):
        kept = [n for n in sizes if n != axis]
        kept += [] if axis == "pp" else ["vpp", "recompute_layers"]
        kept += ["tp_mode"] if axis != "tp" else []
        kept += ["zero"] if axis not in ("pp", "zero_shard_size") else []
        reached = {
            getattr(one, axis)
            for one in everything
            if all(getattr(one, name) == getattr(own, name) for name in kept)
            and one.recompute == own.recompute
            and (axis != "pp" or one.recompute_layers * one.pp == own.recompute_layers * own.pp)
        }
        here = getattr(own, axis)
        lower, higher = [v for v in reached if v < here], [v for v in reached if v > here]
        expected = {str(f(v)) for f, v in ((max, lower), (min, higher)) if v}
        assert {step.after for step in around.steps if step.axis == axis} == expected


def test_estimates_are_those_of_the_layouts_alone(around: Neighbourhood) -> None:
    alone = estimate(around.solutions.problem, layouts_of(around))
    assert alone.times.seconds == pytest.approx(around.solutions.times.seconds, rel=1e-12)
    step = around.steps[0]
    ratio = alone.times.seconds[step.index] / alone.times.seconds[0]
    assert around.change(step) == pytest.approx(ratio - 1)


def test_no_step_from_the_best_layout_is_faster_and_fits(h100_model: CostModel) -> None:
    problem = problem_of(h100_model, LLAMA, 32)
    best = search(problem, BATCH).best
    found = neighbours(problem, best.layouts.strategy(0, problem.run))
    fit = [found.change(step) for step in found.steps if found.solutions.verdict(step.index) != "OUT OF MEMORY"]
    assert len(fit) >= 5 and min(fit) >= 0
