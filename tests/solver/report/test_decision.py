"""How safe a choice is: chances and sensitivities by hand, what is said of a neighbourhood, and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import erf, hypot, log, sqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import make_problem, toy_cost

from predictor.cost_model import CostModel
from predictor.estimate import Basis
from solver.api import estimate, load_problem
from solver.commands.console import main
from solver.formats.config_file import load_run_config
from solver.report.decision import MEASUREMENTS, chances, decision_of, kept_out, sensitivities, standing
from solver.report.explain import TIE_THRESHOLD, Explanation, Line, explain
from solver.report.uncertainty import LAYOUT_STD, difference_std, errors_of, own_stds
from solver.search.neighbours import neighbours
from solver.search.search import search
from solver.step.solutions import Solutions

LLAMA = load_run_config("configs/models/llama3_8b.json").model


def test_chances_of_two_layouts_by_hand() -> None:
    z = log(1.05) / (sqrt(2) * LAYOUT_STD)
    assert chances(np.array([1.0, 1.05]), np.full(2, LAYOUT_STD)) == pytest.approx(
        [0.5 * (1 + erf(z / sqrt(2))), 0.5 * (1 - erf(z / sqrt(2)))], abs=1e-4
    )
    assert chances(np.array([2.0]), np.array([LAYOUT_STD])) == pytest.approx([1.0])


def test_a_layout_that_is_less_certain_is_less_surely_the_fastest() -> None:
    # 39.1 s that may be off by 35% beside 41.1 s: by hand Phi(log(41.1 / 39.1) / hypot(0.35, LAYOUT_STD))
    z = log(41.1 / 39.1) / hypot(0.35, LAYOUT_STD)
    found = chances(np.array([39.1, 41.1]), np.array([0.35, LAYOUT_STD]))
    assert found == pytest.approx([0.5 * (1 + erf(z / sqrt(2))), 0.5 * (1 - erf(z / sqrt(2)))], abs=1e-3)
    assert 0.5 < found[0] < 0.57


def test_what_all_rivals_may_err_by_decides_nothing() -> None:
    """Tensor groups of 16 span nodes: beside one that does not they may be off by 35%, among themselves by what others are."""
    model = LLAMA.replace(num_key_value_heads=32)
    problem = make_problem(model, 32, toy_cost(), 4096, framework="megatron-core", precision="bf16")
    wide = [problem.layout(tp=16, dp=2, num_micro_batches=m) for m in (4, 8)]
    inside = problem.layout(tp=8, dp=4)

    def own(solutions: Solutions, kinds: list[dict[str, float]]) -> np.ndarray:
        return own_stds([errors_of(solutions, index, one) for index, one in enumerate(kinds)])

    assert own(estimate(problem, wide), [{}, {}]) == pytest.approx([LAYOUT_STD] * 2)
    three = estimate(problem, [*wide, inside])
    assert own(three, [{}] * 3) == pytest.approx([hypot(LAYOUT_STD, 0.35)] * 2 + [LAYOUT_STD])
    # and what only its network, or more of it, is uncertain by
    kinds = [{"linear": 0.1, "network": 0.05}, {"linear": 0.1, "network": 0.13}, {"linear": 0.1}]
    expected = [hypot(LAYOUT_STD, 0.35, 0.05), hypot(LAYOUT_STD, 0.35, 0.13), LAYOUT_STD]
    assert own(three, kinds) == pytest.approx(expected)
    assert difference_std(0.35, 0.35) == pytest.approx(sqrt(2) * LAYOUT_STD)
    assert difference_std(0.35, 0.0) == pytest.approx(hypot(sqrt(2) * LAYOUT_STD, 0.35))


def test_a_decision_prints_its_rivals_and_no_arrays() -> None:
    problem = make_problem(LLAMA, 8, toy_cost(), 4096, framework="megatron-core", precision="bf16")
    rivals = [problem.layout(tp=tp, dp=8 // tp, num_micro_batches=tp) for tp in (1, 2)]
    lines = repr(decision_of(problem, rivals[0], rivals)).splitlines()
    assert lines[0] == "<Decision among" and len(lines) == 3 and max(map(len, lines)) < 120
    assert [line.split(" the fastest, ")[1].split(": ")[1].split(",")[0] for line in lines[1:]] == ["mtp dp8", "mtp tp2 dp4"]


@given(st.lists(st.floats(1.0, 1.5), min_size=2, max_size=8))
def test_chances_add_up_and_fall_with_the_time(seconds: list[float]) -> None:
    found = chances(np.array(seconds), np.full(len(seconds), LAYOUT_STD))
    assert found.sum() == pytest.approx(1)
    order = np.argsort(seconds)
    assert (np.diff(found[order]) <= 1e-9).all()


def test_equal_layouts_have_equal_chances() -> None:
    assert chances(np.ones(4), np.full(4, LAYOUT_STD)) == pytest.approx([0.25] * 4)


def explained(**seconds: float) -> Explanation:
    """Return an explanation of GEMMs (uncertainty 10%) and the network (uncertainty 50%)."""
    uncertainty = {"linear": 0.1, "network": 0.5}
    lines = tuple(Line(kind, "", "compute", kind, s, uncertainty[kind], Basis.MEASURED) for kind, s in seconds.items())
    return Explanation(lines, sum(seconds.values()), 0.0)


def test_sensitivities_by_hand() -> None:
    first, rival, far = explained(linear=8, network=2), explained(linear=10, network=0.5), explained(linear=20, network=1)
    by_kind = {row.kind: row for row in sensitivities([first, rival, far])}
    network = by_kind["network"]
    assert (network.seconds, network.relative_std, network.step_change) == pytest.approx((2, 0.5, 0.1))
    # rival is 0.5 s slower; one deviation of the network adds 1 s here and 0.25 s there
    assert (network.deviations, network.rival) == (pytest.approx(0.5 / 0.75), 1)
    # GEMMs must be faster for the rival that has more of them: 0.5 s / (1.0 - 0.8) s a deviation
    assert (by_kind["linear"].deviations, by_kind["linear"].rival) == (pytest.approx(-0.5 / 0.2), 1)
    assert [row.step_change for row in sensitivities([first, rival])] == sorted([0.1, 0.08], reverse=True)
    assert all(row.deviations is None for row in sensitivities([first, far]))


def test_every_kind_of_time_has_a_measurement(h100_model: CostModel) -> None:
    model = load_run_config("configs/models/qwen3_30b_a3b.json").model
    problem = make_problem(model, 64, h100_model, 4096, framework="megatron-core", precision="bf16")
    best = search(problem, 128).best
    kinds = {row.kind for i in range(len(best)) for row in sensitivities([explain(best, i)])}
    assert {"linear", "grouped_linear", "network", "stragglers"} <= kinds <= set(MEASUREMENTS)
    named = {command for _, how in MEASUREMENTS.values() for command in re.findall(r"foretrain (\S+?)\b", how)}
    assert named == {"measure", "health", "import"}


def test_what_is_said_of_a_neighbourhood(h100_model: CostModel) -> None:
    problem = make_problem(LLAMA, 32, h100_model, 4096, framework="megatron-core", precision="bf16")
    best = search(problem, 64).best.layouts.strategy(0, problem.run)
    around = neighbours(problem, best)
    assert standing(around).startswith("Robust choice: one step along ")
    smaller = {"dp": best.dp // 8, "num_micro_batches": 8 * best.num_micro_batches, "zero": 0, "zero_shard_size": 1}
    bad = neighbours(problem, best.replace(tp=8, **smaller))
    fastest = min((s for s in bad.steps if bad.solutions.verdict(s.index) != "OUT OF MEMORY"), key=bad.change)
    text = f"{fastest.axis} {fastest.before} -> {fastest.after} makes the step {-bad.change(fastest):.1%} shorter"
    assert standing(bad).startswith(f"A neighbouring layout is faster: {text}")
    fit = [step for step in around.steps if around.solutions.verdict(step.index) != "OUT OF MEMORY"]
    alone = replace(around, steps=tuple(step for step in fit if around.change(step) > TIE_THRESHOLD))
    cheapest = min(alone.steps, key=around.change)
    text = f"{cheapest.axis} {cheapest.before} -> {cheapest.after}, costs {around.change(cheapest):.1%}."
    assert standing(alone) == f"No single step comes close: the cheapest that fits, {text}"
    large = load_run_config("configs/models/llama3_70b.json").model
    problem = make_problem(large, 512, h100_model, 4096, framework="megatron-core", precision="bf16")
    around = neighbours(problem, search(problem, 1024).best.layouts.strategy(0, problem.run))
    lines = kept_out(around)
    assert lines and all(" would make the step " in line and "GiB more than the GPU has" in line for line in lines)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = ["explain", "--model_size", "llama3_8b", "--world_size", "64", "--global_batch_size", "1048576"]
    assert main([*words, "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    for part in (
        "Longest ops",
        "is fastest with",
        "One step along each axis",
        "What the uncertainty of each kind of time decides",
    ):
        assert part in shown
    found = json.loads(out.read_text())
    assert sum(rival["chance"] for rival in found["rivals"]) == pytest.approx(1)
    sizes = [tuple(rival["layout"][name] for name in ("tp", "cp", "pp")) for rival in found["rivals"]]
    assert len(set(sizes)) == len(sizes) and found["best"][0]["step_s"] == found["rivals"][0]["step_s"]
    assert found["standing"] in shown


def test_the_layout_of_the_config_is_explained_on_demand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert main(["explain", "--config", "configs/7B_internlm2.py", "--world_size", "64", "--own", "--json", str(out)]) == 0
    layout = json.loads(out.read_text())["rivals"][0]["layout"]
    assert (layout["tp"], layout["micro_batch_size"]) == (2, 2)
    assert main(["explain", "--model_size", "7", "--own", "--fix", "tp=2"]) == 2
    assert "--fix chooses among the layouts of a search, --own takes the config's; leave one out" in capsys.readouterr().err


def test_a_fixed_axis_stays_fixed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["explain", "--model_size", "llama3_8b", "--world_size", "64", "--fix", "tp=4", "--json", str(out)]
    assert main(words) == 0
    found = json.loads(out.read_text())
    assert {rival["layout"]["tp"] for rival in found["rivals"]} == {4}
    best = search(load_problem("configs/models/llama3_8b.json", 64), 1024, fixed={"tp": 4}).best
    assert found["best"][0]["step_s"] == pytest.approx(float(best.times.seconds[0]))


def test_a_part_of_the_step_is_as_uncertain_as_what_the_layout_sends() -> None:
    """ZeRO-1's gradients are not spread as an all-reduce over all ranks, which only ZeRO-0 runs."""
    cost = toy_cost()
    problem = make_problem(LLAMA, 16, cost, framework="megatron-core", overlap_grad_reduce=False, overlap_param_gather=False)
    layouts = [problem.layout(zero=zero, zero_shard_size=16 if zero else 1, dp=16) for zero in (0, 1)]
    found = estimate(problem, layouts)
    sync, spread = found.terms.once.estimates, {}
    for op, std in (("gradients.all_reduce", 0.5), ("gradients.reduce_scatter", 0.1)):
        for row, one in enumerate(sync.ops):
            if one.name.startswith(op):
                sync.relative_std[row] = std
    for zero in (0, 1):
        (line,) = [line for line in explain(found, zero).lines if line.name == "gradient_sync"]
        spread[zero] = line.relative_std
    assert spread == {0: pytest.approx(0.5), 1: pytest.approx(0.1)}
