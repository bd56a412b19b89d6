"""Tokens and a deadline: days by hand, more GPUs, the fewest that meet it, the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import norm
from toy import make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.commands.console import main
from solver.formats.config_file import load_run_config
from solver.report.explain import explain
from solver.report.goodput import Goodput
from solver.report.picture_plan import plan_figure
from solver.report.plan import Machine, Training, cheapest, efficient, fewest, trainings, worlds_between
from solver.report.plan_table import answer, plan_rows
from solver.search.search import search

MODEL = load_run_config("configs/models/llama3_8b.json").model


def test_days_by_hand(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-core", precision="bf16")
    ((one,), _) = trainings(problem.for_world, lambda _: 512, 1e12, [64])
    ((rented,), _) = trainings(problem.for_world, lambda _: 512, 1e12, [64], machine=Machine("h100_sxm", 2.5, 700.0))
    assert rented.money == pytest.approx(rented.gpu_hours * 2.5) and rented.energy_mwh == pytest.approx(rented.gpu_hours * 7e-4)
    assert one.money is None and (one.cost, rented.cost) == (one.gpu_hours, rented.money)
    best = search(make_problem(MODEL, 64, h100_model, 8192, framework="megatron-core", precision="bf16"), 512, 1).best
    step = float(best.times.seconds[0])
    assert one.days[1] == pytest.approx(1e12 / (512 * 8192) * step / 86400, rel=1e-12)
    low, high = explain(best, 0).interval
    assert (one.days[0] / one.days[1], one.days[2] / one.days[1]) == pytest.approx((low / step, high / step))
    assert one.gpu_hours == pytest.approx(one.days[1] * 24 * 64) and one.energy_mwh is None


def test_more_gpus_take_fewer_days_and_more_gpu_hours(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-core", precision="bf16")
    found, none = trainings(problem.for_world, lambda _: 512, 1e12, worlds_between(8, 512, 8))
    assert [one.world_size for one in found] == worlds_between(8, 512, 8) and not none
    found = [one for one in found if one.world_size & (one.world_size - 1) == 0]  # the others leave stages with fewer layers
    days, hours = [one.days[1] for one in found], [one.gpu_hours for one in found]
    assert days == sorted(days, reverse=True) and hours[-1] > hours[1]
    deadline = days[3] * 1.01
    assert fewest(found, deadline) is found[3] and fewest(found, days[-1] / 2) is None


def test_numbers_of_gpus_are_whole_nodes() -> None:
    assert worlds_between(8, 100, 8) == [8, 16, 24, 32, 48, 64, 96]
    assert worlds_between(12, 100, 4) == [12, 16, 24, 32, 48, 64, 96, 100]
    assert worlds_between(2, 16, 8) == [2, 4, 8, 16]  # 6 and 12 are no whole nodes, nor do 6 divide one
    assert worlds_between(2304, 2304, 8) == [2304]
    assert worlds_between(3, 64, 8) == [4, 8, 16, 24, 32, 48, 64] and worlds_between(60, 150, 72) == [72, 144]
    with pytest.raises(
        InputError, match="no whole nodes of 8 GPUs from 100 to 119, one of these or 1, 2, 3, 4, 6 and so on nodes"
    ):
        worlds_between(100, 119, 8)


def test_spare_nodes_are_paid_for(offers: list[Training]) -> None:
    nothing_lost = Goodput(1.0, math.inf, math.inf, {}, 0.0)
    watts = replace(offers[0], machine=Machine("", 2.0, 1000.0))
    one = watts.interrupted(nothing_lost, spare_gpus=16)
    assert one.gpu_hours == pytest.approx(40 * 24 * (64 + 16)) and one.money == pytest.approx(2 * one.gpu_hours)
    assert one.energy_mwh == pytest.approx(40 * 24 * 64 * 1000 / 1e6) == watts.energy_mwh  # spare nodes do not train


def test_the_interval_of_an_interrupted_training_by_hand(offers: list[Training]) -> None:
    """40 days with 90% from 36 to 44, of which 0.8 train: 50 days; a failure an hour of 3.6e7 s2 on average adds to it."""
    one = offers[0].interrupted(Goodput(0.8, 1000.0, 3600.0, {}, 3.6e7))
    failures = math.sqrt(50 * 24 * 3.6e7) / 86_400 / 50
    std = math.hypot(math.log(1.1 / 0.9) / (2 * norm.ppf(0.95)), failures)
    assert 0.04 < failures < 0.06
    low, middle, high = one.days
    assert middle == pytest.approx(50) and high / 50 == pytest.approx(50 / low)
    assert math.log(high / 50) == pytest.approx(norm.ppf(0.95) * std, rel=1e-4)


def test_what_fits_nowhere_is_said(h100_model: CostModel) -> None:
    large = load_run_config("configs/models/llama3_405b.json").model
    problem = make_problem(large, 8, h100_model, 4096, framework="megatron-core", precision="bf16")
    with pytest.raises(InputError, match="none of these numbers of GPUs works: 8, 16; of the last: none of .* fits on 16"):
        trainings(problem.for_world, lambda _: 64, 1e12, [8, 16])


def test_the_command_line_names_the_fewest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = "plan --model_size llama3_8b --framework megatron-core --tokens 1e11 --days 8 --price 2 --min_gpus 8 --max_gpus 64"
    assert main([*words.split(), "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    rows = json.loads(out.read_text())["plan"]
    meets = [row["world_size"] for row in rows if row["days"] <= 8]
    assert f"{meets[0]} GPUs, the fewest of those tried, meet 8 days" in shown
    assert all(row["money"] == pytest.approx(2 * row["gpu_hours"]) for row in rows)
    assert all(row["days_interval"][0] < row["days"] < row["days_interval"][1] for row in rows)
    assert main(["plan", "--model_size", "llama3_8b", "--tokens", "-1"]) == 2
    assert "--tokens is -1.0; it must be a positive number" in capsys.readouterr().err


@pytest.mark.parametrize("figures", [{"all_reduce_busbw_gb_s": 15}, {"gpus_per_leaf": 16, "oversubscription": 4}])
def test_each_number_of_gpus_has_the_network_that_a_search_there_has(figures: dict[str, float], tmp_path: Path) -> None:
    cluster, out = tmp_path / "cluster.json", tmp_path / "out.json"
    cluster.write_text(json.dumps({"hardware": "h100_sxm", "inter_node_gbit_per_gpu": 200, **figures}))
    common = ["--model_size", "llama3_8b", "--framework", "megatron-core", "--cluster", str(cluster), "--json", str(out)]
    assert main(["plan", *common, "--tokens", "1e12", "--min_gpus", "8", "--max_gpus", "64", "--fix", "tp=8,cp=1"]) == 0
    planned = {row["world_size"]: row["tgs"] for row in json.loads(out.read_text())["plan"]}
    assert sorted(planned) == [8, 16, 24, 32, 48, 64]
    for world in (16, 64):
        assert main(["search", *common, "--world_size", str(world), "--fix", "tp=8,cp=1"]) == 0
        assert json.loads(out.read_text())["best"][0]["tgs"] == pytest.approx(planned[world], rel=1e-9)


def test_several_machines_say_how_sure_the_cheapest_is(offers: list[Training], capsys: pytest.CaptureFixture[str]) -> None:
    # 256 slow GPUs take 10.1 days, from 9.09 to 11.11; ln(10.2 / 10.1) of that normal distribution is 57%
    slow, std = offers[2], math.log(1.1 / 0.9) / 2 / norm.ppf(0.95)
    sure = float(norm.cdf(math.log(10.2 / 10.1) / std))
    said = answer(offers, 10.2, None)
    assert slow.world_size == 256 and 0.5 < sure < 0.6
    assert "Cheapest within 10.2 days: 256 x slow, 10.1 days (9.09 to 11.1 with 90% probability)" in said
    # of the fast ones 128 take up to 11 days and 256 up to 5.56
    assert f" It meets 10.2 days with {sure:.0%} probability; the cheapest of those that do with 95%: 256 x fast" in said
    assert main(["plan", "--model_size", "llama3_8b", "--tokens", "15000"]) == 2
    assert "--tokens is 15000, which is less than a step; write 15e12" in " ".join(capsys.readouterr().err.split())


def test_energy_is_that_of_the_device_file(tmp_path: Path) -> None:
    sheet = json.loads(Path("configs/devices/h100_sxm.json").read_text())
    mine, out = tmp_path / "mine.json", tmp_path / "plan.json"
    mine.write_text(json.dumps({**sheet, "name": "My chip", "power_watts": 900, "aliases": [], "source": "me"}))
    words = "plan --model_size llama3_8b --framework megatron-core --tokens 1e11 --min_gpus 8 --max_gpus 8"
    for named, watts in ((["--as", str(mine)], 900), (["--profile", "h100_sxm"], 700)):
        assert main([*words.split(), *named, "--json", str(out)]) == 0
        (row,) = json.loads(out.read_text())["plan"]
        assert row["energy_mwh"] == pytest.approx(row["gpu_hours"] * watts / 1e6)


@pytest.fixture(scope="module")
def offers(h100_model: CostModel) -> list[Training]:
    """Two machines of 64 to 256 GPUs: 40, 20 and 10 days, and half of that at three times the price."""
    problem = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-core", precision="bf16")
    ((one,), _) = trainings(problem.for_world, lambda _: 512, 1e12, [64])
    slow, fast = Machine("slow", 1.0), Machine("fast", 3.0)
    return [
        replace(one, world_size=world, days=(0.9 * days, days, 1.1 * days), machine=machine)
        for machine, speed in ((slow, 1), (fast, 2))
        for world, days in ((64, 40 / speed), (128, 20 / speed), (256, 10.1 / speed))
    ]


def test_the_front_holds_what_nothing_beats(offers: list[Training]) -> None:
    # GPU-days: 2,560, 2,560 and 2,585.6; the fast ones cost 1.5 times as much. 64 slow GPUs cost as much as 128 and are slower
    slow, fast = offers[:3], offers[3:]
    assert efficient(offers) == [fast[2], fast[1], slow[2], slow[1]]
    assert (
        cheapest(offers, 6, None) is fast[2] and cheapest(offers, 15, None) is slow[2] and cheapest(offers, 25, None) is slow[1]
    )
    assert cheapest(offers, None, 2570 * 24) is slow[1] and cheapest(offers, None, 2590 * 24) is slow[2]
    assert cheapest(offers, 6, 2590 * 24) is None and cheapest(offers, 11, 2590 * 24) is slow[2]


def test_equal_offers_are_told_apart(offers: list[Training]) -> None:
    twin = replace(offers[2], machine=Machine("another", 1.0))
    assert efficient([offers[2], twin]) == [offers[2]] and replace(twin) != twin
    assert [row["efficient"] for row in plan_rows([offers[2], twin])] == [True, False]


def test_the_answer_in_words(offers: list[Training]) -> None:
    assert answer(offers, 6, None).startswith(
        "Cheapest within 6 days: 256 x fast, 5.05 days (4.54 to 5.56 with 90% probability), a price of 93,082. "
    )
    assert answer(offers, None, 62_100).startswith("Fastest within a budget of 62,100: 256 x slow, 10.1 days")
    assert answer(offers, 4, None).startswith("Nothing within 4 days. Fastest: 256 x fast")
    assert answer(offers, None, 10).startswith("Nothing within a budget of 10. Cheapest: 64 x slow, 40 days")
    # log-normal: ln(25 / 20) over the standard deviation of which 1.645 lie between the middle and the end of the interval
    low, middle, high = offers[1].days
    sure = float(norm.cdf(math.log(25 / middle) / (math.log(high / low) / 2 / 1.6448536)))
    said = answer(offers[:3], 25, None)
    assert sure > 0.99 and said.startswith(
        "128 GPUs, the fewest of those tried, meet 25 days with more than 99% probability: 20 days"
    )


def test_a_layout_that_may_not_fit_is_told(h100_model: CostModel) -> None:
    whole = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-core", precision="bf16")
    best = trainings(whole.for_world, lambda _: 512, 1e12, [64])[0][0].result.best
    peak, bound = float(best.memory.device[0]), float(best.memory.bound[0])
    tight, ample = (
        replace(whole, cluster=replace(whole.cluster, memory_bytes=size)) for size in ((peak + bound) / 2, 4 * bound)
    )
    (sure,), (risky,) = (trainings(problem.for_world, lambda _: 512, 1e12, [64])[0] for problem in (ample, tight))
    assert "memory" not in answer([sure], None, None) and risky.result.best.verdict(0) == "AT RISK"
    told, memory = answer([risky], None, None), risky.result.best.memory
    peak, bound = float(memory.device[0]), float(memory.bound[0])
    assert f"Its memory is AT RISK: {peak / 2**30:.1f} GiB, at most {bound / 2**30:.1f}, of " in told
    assert "Sure to fit, +" in told or "is sure to fit" in told
    assert plan_rows([risky])[0]["verdict"] == "AT RISK"


def test_a_picture_of_the_offers(offers: list[Training]) -> None:
    (axes,) = plan_figure(offers, "a model", 6, 62_100).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert {"slow, 1 an hour", "fast, 3 an hour", "6 days", "budget of 62,100"} <= set(labels)
    assert (axes.get_ylabel(), [t.get_text() for t in axes.texts]) == ("money", ["64", "128", "256"] * 2)


def test_machines_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    words = "plan --model_size llama3_8b --framework megatron-core --tokens 1e11 --days 8 --min_gpus 8 --max_gpus 16"
    assert main([*words.split(), "--machines", "h100_sxm=2,a100_100g=1", "--json", str(out)]) == 0
    assert "Cheapest within 8 days: " in capsys.readouterr().out
    rows = json.loads(out.read_text())["plan"]
    assert [(row["machine"], row["world_size"]) for row in rows] == [
        (name, world) for name in ("h100_sxm", "a100_100g") for world in (8, 16)
    ]
    front = [row for row in rows if row["efficient"]]
    for row in rows:
        beaten = any(o["days"] < row["days"] and o["money"] < row["money"] for o in rows)
        assert not (beaten and row in front) and row["money"] == pytest.approx(
            row["gpu_hours"] * (2 if row["machine"] == "h100_sxm" else 1)
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--machines h100_sxm=2,gb200", "either all machines have a price or none has"),
        ("--machines h100_sxm=x", "'h100_sxm=x' must be a machine and a positive price"),
        ("--machines h100_sxm=-2", "'h100_sxm=-2' must be a machine and a positive price"),
        ("--machines h100_sxm --price 2", "--machines names the machines and their prices; leave out --price"),
        ("--machines h100_sxm --as gb200", "leave out --as"),
        ("--min_gpus 512 --max_gpus 64", "--min_gpus is 512 and --max_gpus 64; they must be positive"),
        ("--machines foo=2", "no profile and no cluster is called 'foo'"),
        ("--plot plan.foo", "--plot plan.foo: the file must end in .png, .jpg, .pdf or .svg"),
        ("--budget 100", "--budget needs a price"),
        ("--budget -1 --price 2", "--budget is -1.0; it must be a positive number"),
        ("--machines no_such=2", "no cluster is called 'no_such'"),
        ("--machines h100_sxm=1,no_such=2", "no cluster is called 'no_such'"),
        ("--machines h100_sxm=2,h100_sxm=3", "names h100_sxm twice"),
    ],
)
def test_wrong_offers(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model_size", "llama3_8b", "--tokens", "1e11", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_derived_machine_beside_the_one_it_is_derived_from_is_no_equal_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --model_size llama3_8b --framework megatron-core --tokens 1e11 --min_gpus 64 --max_gpus 64 --machines "
    assert main([*words.split(), "b200_sxm,b300"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "b300 beside b200_sxm: GEMMs and attention of the latter carry a factor of 1.24 that a second laboratory" in shown
    assert main([*words.split(), "h100_sxm,h200_sxm"]) == 0
    assert " beside " not in capsys.readouterr().out


def test_a_plan_of_a_file_whose_ranks_follow_from_the_gpus_has_its_global_batch(tmp_path: Path) -> None:
    """torchtitan's shard degree -1 is the GPUs that are left, and 96 sequences are a step on any number of them."""
    config, out = tmp_path / "run.toml", tmp_path / "plan.json"
    config.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\nlocal_batch_size = 1\nglobal_batch_size = 96\n'
    )
    words = ["plan", "--config", str(config), "--tokens", "1e11", "--min_gpus", "8", "--max_gpus", "16", "--json", str(out)]
    assert main(words) == 0
    found = json.loads(out.read_text())["plan"]
    assert [row["world_size"] for row in found] == [8, 16]
    assert [row["layout"]["global_batch_sequences"] for row in found] == [96, 96]


def test_a_plan_trains_with_the_batch_that_its_config_states(tmp_path: Path) -> None:
    """On any number of GPUs, also where the config states its own."""
    layout = {
        "world_size": 64,
        "tp": 2,
        "tp_mode": "msp",
        "dp": 32,
        "zero": 1,
        "zero_shard_size": -1,
        "num_micro_batches": 4,
        "micro_batch_size": 1,
        "seq_len": 8192,
        "framework": "megatron-core",
    }
    config, out = tmp_path / "mine.json", tmp_path / "plan.json"
    config.write_text(json.dumps({"name": "mine", "model": "llama3_8b", "layout": layout}))
    options = ["--tokens", "1e12", "--min_gpus", "32", "--max_gpus", "64", "--json", str(out)]
    days = []
    for batch in ([], ["--global_batch_size", str(32 * 4 * 8192)], ["--global_batch_size", str(512 * 8192)]):
        assert main(["plan", "--config", str(config), *batch, *options]) == 0
        days.append([row["days"] for row in json.loads(out.read_text())["plan"]])
    assert days[0] == days[1] and len(days[0]) == 3  # 32, 48 and 64 GPUs
    assert all(small > large for small, large in zip(days[0], days[2], strict=True))


def test_a_batch_is_rounded_for_each_number_of_gpus_or_said_not_to_divide(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    plan = [
        "plan",
        "--model_size",
        "llama3_8b",
        "--framework",
        "megatron-core",
        "--tokens",
        "1e12",
        "--min_gpus",
        "96",
        "--max_gpus",
        "96",
    ]
    assert main([*plan, "--json", str(out)]) == 0  # the default batch of 1,024 sequences
    said, rounded = capsys.readouterr().out, json.loads(out.read_text())["plan"][0]
    assert "or the nearest that the GPUs divide" in said and "odd factor" not in said
    assert main([*plan, "--global_batch_size", str(1024 * 4096), "--json", str(out)]) == 0
    said, stated = " ".join(capsys.readouterr().out.split()), json.loads(out.read_text())["plan"][0]
    assert "on 96 GPUs the batch does not divide by their odd factor" in said
    assert rounded["days"] < 0.95 * stated["days"]  # which has to have three or six stages
    assert main([*plan, "--global_batch_size", str(1024 * 4096), "--round_batch", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["plan"][0]["days"] == rounded["days"]
