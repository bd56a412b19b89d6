"""Tokens and a deadline: days by hand, more GPUs, the fewest that meet it, the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy import make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.console import main
from solver.formats.config_file import load_run_config
from solver.report.explain import explain
from solver.report.plan import fewest, trainings, worlds_between
from solver.search.search import search

MODEL = load_run_config("configs/models/llama3_8b.json").model


def test_days_by_hand(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-core", precision="bf16")
    (one,) = trainings(problem, 512, 1e12, [64])
    best = search(make_problem(MODEL, 64, h100_model, 8192, framework="megatron-core", precision="bf16"), 512, 1).best
    step = float(best.times.seconds[0])
    assert one.days[1] == pytest.approx(1e12 / (512 * 8192) * step / 86400, rel=1e-12)
    low, high = explain(best, 0).interval
    assert (one.days[0] / one.days[1], one.days[2] / one.days[1]) == pytest.approx((low / step, high / step))
    assert one.gpu_hours == pytest.approx(one.days[1] * 24 * 64) and one.energy_mwh(700) == pytest.approx(one.gpu_hours * 7e-4)


def test_more_gpus_take_fewer_days_and_more_gpu_hours(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-core", precision="bf16")
    found = trainings(problem, 512, 1e12, worlds_between(8, 512, 8))
    assert [one.world_size for one in found] == [8, 16, 32, 64, 128, 256, 512]
    days, hours = [one.days[1] for one in found], [one.gpu_hours for one in found]
    assert days == sorted(days, reverse=True) and hours[-1] > hours[1]
    deadline = days[3] * 1.01
    assert fewest(found, deadline) is found[3] and fewest(found, days[-1] / 2) is None


def test_numbers_of_gpus_are_whole_nodes() -> None:
    assert worlds_between(8, 100, 8) == [8, 16, 32, 64]
    assert worlds_between(12, 100, 4) == [16, 32, 64]
    assert worlds_between(2, 16, 8) == [2, 4, 8, 16]
    with pytest.raises(InputError, match="no whole nodes of 8 GPUs, doubled, from 100 to 120"):
        worlds_between(100, 120, 8)


def test_what_fits_nowhere_is_said(h100_model: CostModel) -> None:
    large = load_run_config("configs/models/llama3_405b.json").model
    problem = make_problem(large, 8, h100_model, 4096, framework="megatron-core", precision="bf16")
    with pytest.raises(InputError, match="no number of GPUs from 8 to 16 works; of the last: llama3_405b fits on 16"):
        trainings(problem, 64, 1e12, [8, 16])


def test_the_command_line_names_the_fewest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = "plan --model_size llama3_8b --framework megatron-core --tokens 1e11 --days 8 --price 2 --least 8 --most 64"
    assert main([*words.split(), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = json.loads(out.read_text())["plan"]
    meets = [row["world_size"] for row in rows if row["days"] <= 8]
    assert f"{meets[0]} GPUs meet 8 days" in shown
    assert all(row["money"] == pytest.approx(2 * row["gpu_hours"]) for row in rows)
    assert all(row["days_interval"][0] < row["days"] < row["days_interval"][1] for row in rows)
    assert main(["plan", "--model_size", "llama3_8b", "--tokens", "-1"]) == 2
    assert "--tokens is -1.0; it must be a positive number" in capsys.readouterr().err
