"""Learning from own runs: known factors come back, runs left out are predicted better, later predictions use it and say so."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from predictor.learned import FACTORS, Learned, read_learned, write_learned
from profiler.errors import InputError
from profiler.profile.profiles import shipped_profiles
from solver import load_problem
from solver.api import estimate
from solver.commands.console import main
from solver.commands.import_files import case_line
from solver.commands.validate import CostModels
from solver.formats.cases.reading import Case, case_of, read_cases
from solver.learning import Lesson, _noise, distinct_runs, learn, scaled
from solver.report.explain import explain
from solver.report.uncertainty import LAYOUT_STD
from solver.report.validate import predict_cases
from solver.spec.strategy import Strategy
from solver.step.problem import Problem

TRUE = {"gemm": 1.06, "network": 1.5, "memory_bound": 1.3}
MODEL = "configs/models/llama3_8b.json"


def factors(**named: float) -> Learned:
    none = tuple((0.0,) * len(FACTORS) for _ in FACTORS)
    return Learned(tuple(math.log(named.get(name, 1.0)) for name in FACTORS), none, LAYOUT_STD, 0.06)


def layouts(problem: Problem) -> list[Strategy]:
    found = []
    for tp, pp, size in ((1, 1, 1), (1, 1, 2), (2, 1, 2), (4, 1, 2), (2, 2, 1), (1, 2, 1), (1, 4, 1), (4, 2, 2), (8, 1, 2)):
        dp = problem.run.world_size // tp // pp
        found.append(
            problem.layout(tp=tp, pp=pp, dp=dp, micro_batch_size=size, num_micro_batches=512 // dp // size, zero_shard_size=dp)
        )
    return found


@pytest.fixture(scope="module")
def runs() -> list[dict[str, object]]:
    """Measured on a machine that is otherwise than its profile, with 2% of noise, on 32 and on 128 GPUs."""
    random, lines = np.random.default_rng(3), []
    for world in (32, 128):
        problem = load_problem(MODEL, world, cluster="h100_100g", framework="megatron-core")
        other = replace(problem, cost=problem.cost.with_learned(factors(**TRUE)))
        for number, layout in enumerate(layouts(problem)):
            solutions = estimate(other, [layout])
            step = float(solutions.times.seconds[0]) * math.exp(random.normal(0, 0.02))
            lines.append(case_line(f"mine-{world}-{number}", "h100_sxm", solutions, layout, {"step_s": step}))
    return lines


@pytest.fixture(scope="module")
def cost_models() -> CostModels:
    return CostModels(shipped_profiles())


@pytest.fixture(scope="module")
def cases(runs: list[dict[str, object]]) -> list[Case]:
    return [case_of(json.loads(json.dumps(line))) for line in runs]


@pytest.fixture(scope="module")
def lesson(cases: list[Case], cost_models: CostModels) -> Lesson:
    return learn(cases, cost_models, "mine.json")


def test_a_run_under_another_name_counts_once(cases: list[Case]) -> None:
    first, other = cases[:2]
    kept, twins = distinct_runs([first, replace(first, id="again"), other, replace(other, measured={"step_s": 1.0}, id="new")])
    assert [case.id for case in kept] == [first.id, other.id, "new"] and twins == {"again": f"the same run as {first.id}"}


def test_nothing_is_written_where_nothing_holds_for_other_runs(
    runs: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three runs as predicted and as far off in both directions: what two teach makes the third worse."""
    file, out = tmp_path / "runs.jsonl", tmp_path / "mine.json"
    lines = []
    for name, factor in (("a", 1.0), ("b", 1.35), ("c", 0.75)):
        run = dict(next(run for run in runs if str(run["id"]).startswith("mine-32")))
        run["measured"] = {"step_s": 6.0 * factor}
        lines.append(json.dumps({**run, "id": name}))
    file.write_text("\n".join([*lines, *lines[:1]]).replace('"id": "a"', '"id": "a2"', 1) + "\n")
    assert main(["learn", str(file), "--output", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Nothing was learned that holds for other runs, so {out} is not written" in said.replace(" mine", "mine")
    assert "skipped a: the same run as a2" in said and not out.exists()


def test_factors_come_back(lesson: Lesson) -> None:
    learned = lesson.learned
    stds = dict(zip(FACTORS, np.sqrt(np.diag(np.array(learned.covariance))), strict=True))
    for name, true in TRUE.items():  # with the step's factor, which is part of all
        off = math.log(learned.factor(name) / true)
        assert abs(off) < 2 * math.hypot(stds[name], stds["step"]), (name, learned.factor(name))
    assert learned.factor("network") > 1.2 and LAYOUT_STD <= learned.noise < 1.1 * LAYOUT_STD  # of 2% that was put in
    assert learned.runs == 18 and dict(learned.conditions)["framework"] == "megatron-core-0.12"


def measured_as(cases: list[Case], cost_models: CostModels, learned: Learned) -> list[Case]:
    """Return the same runs as a machine with these factors has them."""
    found = predict_cases(cases, scaled(cost_models, learned))
    steps = [float(p.solutions.times.seconds[p.index]) for p in found if p.solutions]
    return [replace(case, measured={"step_s": step}) for case, step in zip(cases, steps, strict=True)]


@pytest.mark.parametrize("number", [2, 5])
def test_runs_that_agree_outweigh_the_uncertainty_before_them(number: int, cases: list[Case], cost_models: CostModels) -> None:
    """All half as long again: six standard deviations of the uncertainty before, but nothing that only some runs have."""
    lesson = learn(measured_as(cases[:number], cost_models, factors(step=1.5)), cost_models, "mine.json")
    assert lesson.learned.factor("step") == pytest.approx(1.5, rel=0.04)
    assert lesson.held_out.median_before == pytest.approx(1 / 3, rel=1e-6) and lesson.held_out.median_after < 0.02
    assert lesson.learned.noise == pytest.approx(LAYOUT_STD)


def test_links_of_another_machine_are_told_from_its_step(cases: list[Case], cost_models: CostModels) -> None:
    learned = learn(measured_as(cases, cost_models, factors(links=2.0)), cost_models, "mine.json").learned
    assert learned.factor("links") == pytest.approx(2.0, rel=0.1)
    assert learned.factor("step") == pytest.approx(1.0, rel=0.03) and learned.factor("gemm") == pytest.approx(1.0, rel=0.03)


def test_a_run_far_off_the_others_counts_less(cases: list[Case], cost_models: CostModels) -> None:
    found = measured_as(cases[:8], cost_models, factors())
    broken = replace(found[3], measured={"step_s": 2 * found[3].measured["step_s"]})
    assert learn([*found[:3], broken, *found[4:]], cost_models, "mine.json").learned.factor("step") == pytest.approx(
        1.0, rel=0.03
    )


def test_noise_above_the_layouts_own_has_the_factors_taken_off_the_runs(cases: list[Case], cost_models: CostModels) -> None:
    """Nine runs, twice as noisy as layouts are; one factor fits what all are off by, so that eight are free."""
    off = 2 * LAYOUT_STD * np.array([1, -1, 1, -1, 0, 1, -1, 1, -1])
    jacobian = np.zeros((9, len(FACTORS)))
    jacobian[:, 0] = 1.0
    information = np.diag([9 / 0.1**2, *(1.0,) * (len(FACTORS) - 1)])
    assert _noise(off, jacobian, information, np.ones(9), 0.1) == pytest.approx(2 * LAYOUT_STD)  # 8 squares over 9 - 1
    # a run that counts half counts half among the squares, and half among what was fitted
    half = np.array([0.5, *(1.0,) * 8])
    information[0, 0] = 8.5 / 0.1**2 + 50  # of which the prior gives 50
    by_hand = 2 * LAYOUT_STD * math.sqrt(7.5 / (9 - 850 / 900))
    assert _noise(off, jacobian, information, half, 0.1) == pytest.approx(by_hand)
    # and in a whole lesson: runs as predicted but for +-10%
    found = measured_as(cases[:9], cost_models, factors())
    noisy = [
        replace(case, measured={"step_s": case.measured["step_s"] * math.exp(0.1 * sign)})
        for case, sign in zip(found, (1, -1, 1, -1, 0, 1, -1, 1, -1), strict=True)
    ]
    assert learn(noisy, cost_models, "mine.json").learned.noise == pytest.approx(0.1, rel=0.1)


def test_runs_that_are_left_out_are_predicted_better(lesson: Lesson, cases: list[Case], cost_models: CostModels) -> None:
    held_out = lesson.held_out
    assert held_out.runs == 18 and held_out.median_after < 0.03 < 0.05 < held_out.median_before
    assert held_out.inside_after >= 0.9 and held_out.spread_after < held_out.spread_before
    few, far = cases[:9], cases[9:]
    learned = learn(few, cost_models, "few").learned
    measured = np.array([case.measured["step_s"] for case in far])
    before, after = (
        np.array([p.seconds for p in predict_cases(far, models)]) for models in (cost_models, scaled(cost_models, learned))
    )
    assert np.median(abs(after / measured - 1)) < np.median(abs(before / measured - 1)) / 2
    uncertainties = [p.explanation.relative_std for p in predict_cases(far, scaled(cost_models, learned)) if p.explanation]
    assert np.sum(abs(np.log(after / measured)) <= 1.645 * np.array(uncertainties)) >= 8  # of 9, in intervals that hold 90%


def test_the_uncertainty_is_the_posterior_s_by_hand() -> None:
    """Half GEMMs, half network: variance of step + gemm / 2 + network / 2, noise, and what the runs say nothing of."""
    std = {"step": 0.03, "gemm": 0.04, "network": 0.1}
    covariance = np.diag([std.get(name, 0.0) ** 2 for name in FACTORS])
    learned = Learned((0.0,) * len(FACTORS), tuple(tuple(row) for row in covariance.tolist()), 0.036, 0.06)
    shares = {"linear": 0.5, "network": 0.5}
    by_hand = math.sqrt(0.03**2 + (0.04 / 2) ** 2 + (0.1 / 2) ** 2 + 0.036**2)
    assert learned.relative_std(shares, 0.06) == pytest.approx(by_hand)
    assert learned.relative_std(shares, 0.05) == pytest.approx(by_hand)
    assert learned.relative_std(shares, 0.10) == pytest.approx(math.sqrt(by_hand**2 + 0.10**2 - 0.06**2))


@pytest.mark.parametrize("name", FACTORS)
def test_a_factor_scales_its_time_and_no_other(name: str) -> None:
    problem = load_problem(MODEL, 64, profile="h100_sxm", framework="megatron-core")
    layout = problem.layout(tp=2, pp=2, dp=16, micro_batch_size=1, num_micro_batches=8, zero_shard_size=16)
    slower = replace(problem, cost=problem.cost.with_learned(factors(**{name: 1.25})))
    before, after = (explain(estimate(p, [layout]), 0) for p in (problem, slower))
    kinds = {
        "gemm": "linear",
        "attention": "flash_attn",
        "memory_bound": "memory_bound",
        "links": "links",
        "network": "network",
    }
    mine, theirs = before._sum(lambda line: line.kind), after._sum(lambda line: line.kind)
    for kind in ("linear", "flash_attn", "memory_bound"):
        factor = 1.25 if name == "step" or kinds.get(name) == kind else 1.0
        assert theirs[kind] == pytest.approx(factor * mine[kind], rel=1e-3)  # synchronisation has parts of two kinds
    if name in ("links", "network"):
        assert theirs[name] > 1.1 * mine[name]  # what overlaps hides a part
    assert after.seconds >= before.seconds * (1 if name == "host" else 1.0001)
    if name == "step":
        assert after.seconds == pytest.approx(1.25 * before.seconds, rel=0.01)  # but for the host's time, which hides none


def test_the_commands(runs: list[dict[str, object]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "runs.jsonl", tmp_path / "mine.json"
    file.write_text("".join(json.dumps(line) + "\n" for line in runs))
    assert main(["learn", str(file), "--output", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "Learned from 18 runs" in shown and "runs left out in turn: median error" in shown
    words = ["predict", "--config", MODEL, "--world_size", "64", "--framework", "megatron-core", "--cluster", "h100_100g"]
    results = []
    for more in ([], ["--learned", str(out)]):
        answer = tmp_path / "answer.json"
        assert main([*words, *more, "--json", str(answer)]) == 0
        results.append(json.loads(answer.read_text())["best"][0])
    assert "learned from 18 runs (mine.json): step x " in capsys.readouterr().out.replace("\n", " ")
    before, after = results
    assert after["step_s"] > 1.03 * before["step_s"]
    width = [high / low for low, high in (one["interval_s"] for one in results)]
    assert width[1] < width[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "a100_50g"], "device NVIDIA H100 SXM 80GB; this is NVIDIA A100"),
        (["--set", "precision=fp8"], "precision bf16; this is fp8"),
        (["--framework", "pytorch"], "framework megatron-core-0.12; this is pytorch"),
        (["--profile", "h100_sxm"], "network gbit per gpu 100.0; this is 400.0"),
    ],
)
def test_what_was_learned_elsewhere_is_refused(
    lesson: Lesson, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    write_learned(path, lesson.learned, vars(lesson.held_out))
    framework = [] if "--framework" in words else ["--framework", "megatron-core"]
    framework += [] if {"--cluster", "--profile"} & {*words} else ["--cluster", "h100_100g"]
    assert main(["predict", "--config", MODEL, "--world_size", "64", *framework, *words, "--learned", str(path)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_files_round_trip_and_wrong_ones_are_refused(lesson: Lesson, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    write_learned(path, lesson.learned, vars(lesson.held_out))
    assert read_learned(path) == lesson.learned
    plain = json.loads(path.read_text())
    for wrong, message in (
        ({**plain, "log_factors": {**plain["log_factors"], "step": 9.0}}, "its factors must lie between 1/5 and 5"),
        ({**plain, "noise": -1.0}, "its noise or its covariance is negative"),
        ({**plain, "more": 1}, "its keys are not those"),
        ([1, 2], "is an object"),
        ({**plain, "runs": 10**400}, "its number of runs is none"),
        ({**plain, "runs": "x"}, "not what foretrain learn writes"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(InputError, match=message):
            read_learned(path)
    with pytest.raises(InputError, match="no such file; it should be a file of foretrain learn"):
        read_learned(tmp_path / "none.json")


def test_runs_of_two_machines_are_refused(runs: list[dict[str, object]], cost_models: CostModels, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    other = {**runs[0], "id": "other", "hardware": "h200_sxm"}
    file.write_text("\n".join(json.dumps(line) for line in [*runs[:2], other]))
    with pytest.raises(InputError, match="runs mine-32-0 and other differ in device: NVIDIA H100 SXM 80GB and NVIDIA H200"):
        learn(read_cases(file), cost_models, "x")
    with pytest.raises(InputError, match="learning needs at least two runs with a step time that can be predicted; here 1 run"):
        learn(read_cases(file)[:1], cost_models, "x")
