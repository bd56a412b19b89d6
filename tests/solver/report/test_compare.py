"""Side by side: the same numbers as one prediction, how sure a difference is by hand, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import erf, log, sqrt
from pathlib import Path
from typing import Any

import pytest
from toy import make_problem

from predictor.cost_model import CostModel
from predictor.fitted import cost_model
from profiler.profile.derived import derived_profile
from profiler.profile.devices import DATASHEETS
from profiler.profile.profiles import PROF_DATA, find_profile
from solver.api import estimate
from solver.commands.console import main
from solver.formats.config_file import load_run_config
from solver.report.compare import Side, probability_faster, verdicts
from solver.report.uncertainty import LAYOUT_STD
from solver.spec.cluster import cluster_of

CONFIG = "configs/7B_internlm2.py"  #: tp 2, 4 micro batches of 2
LLAMA = "configs/models/llama3_8b.json"
MODEL = load_run_config(LLAMA).model


def side(cost: CostModel, **sizes: Any) -> Side:
    problem = make_problem(MODEL, 8, cost, 4096, framework="megatron-core", precision="bf16")
    return Side(str(sizes), estimate(problem, [problem.layout(**sizes)]))


def normal(z: float) -> float:
    return 0.5 * (1 + erf(z / sqrt(2)))


def test_probability_by_hand(h100_model: CostModel, a100_model: CostModel) -> None:
    fast, slow = (side(h100_model, tp=tp, dp=8 // tp, num_micro_batches=tp) for tp in (2, 8))
    by_hand = normal(log(fast.tgs / slow.tgs) / (sqrt(2) * LAYOUT_STD))
    assert probability_faster(fast, slow) == pytest.approx(by_hand) and by_hand > 0.5
    assert probability_faster(fast, slow) + probability_faster(slow, fast) == pytest.approx(1)
    assert probability_faster(fast, fast) == 0.5
    other = side(a100_model, tp=2, dp=4, num_micro_batches=2)
    std = sqrt(fast.why.relative_std**2 + other.why.relative_std**2)
    assert probability_faster(other, fast) == pytest.approx(normal(log(other.tgs / fast.tgs) / std))


def test_what_machines_with_the_same_kernels_share_is_no_doubt(h100_model: CostModel) -> None:
    """A quarter of the network's rate: what compute may err by is common to both, what the network does only in part."""
    sides = []
    for gbit in (400, 100):
        place = cluster_of(h100_model.device, {"inter_node_gbit_per_gpu": gbit})
        cost = h100_model.with_network(place.network_bandwidth)
        problem = make_problem(MODEL, 64, cost, 4096, place, framework="megatron-core", precision="bf16")
        sides.append(Side("", estimate(problem, [problem.layout(tp=1, dp=64)])))
    fast, slow = sides
    mine, others = fast.why.kind_uncertainties(), slow.why.kind_uncertainties()
    variance = 2 * LAYOUT_STD**2 + sum(abs(mine.get(k, 0) ** 2 - others.get(k, 0) ** 2) for k in {*mine, *others})
    expected = normal(log(fast.tgs / slow.tgs) / sqrt(variance))
    apart = normal(log(fast.tgs / slow.tgs) / sqrt(fast.why.relative_std**2 + slow.why.relative_std**2))
    assert probability_faster(fast, slow) == pytest.approx(expected) and expected > apart > 0.5


def test_a_derived_device_shares_the_errors_of_the_measured_one(h100_model: CostModel) -> None:
    """The kernels of both are the same: what the derived one errs by beyond the other is its own."""
    sheet = DATASHEETS["h100_sxm"]
    twice = replace(sheet, device=replace(sheet.device, memory_bandwidth=2 * sheet.device.memory_bandwidth))
    derived = cost_model(derived_profile("twice", twice, find_profile("h100_sxm")[0]), cache_dir=PROF_DATA / ".cache")
    ours, theirs = (replace(side(cost, tp=1, dp=8), kernels="h100_sxm") for cost in (h100_model, derived))
    apart = normal(log(theirs.tgs / ours.tgs) / sqrt(ours.why.relative_std**2 + theirs.why.relative_std**2))
    assert probability_faster(theirs, ours) > apart + 0.03 and apart > 0.5
    unrelated = replace(theirs, kernels="b200_sxm")
    assert probability_faster(unrelated, ours) == pytest.approx(apart)


def test_what_is_said_of_two_layouts(h100_model: CostModel) -> None:
    fast, slow = (side(h100_model, tp=tp, dp=8 // tp, num_micro_batches=tp) for tp in (2, 8))
    (text,) = [line for line in verdicts([fast, slow]) if line.startswith("2")]
    assert text.startswith(f"2 is {1 - slow.tgs / fast.tgs:.1%} slower than 1 per GPU: slower with ")
    assert verdicts([slow, slow])[0] == "2 is as fast as 1 per GPU"


def test_sides_are_what_predict_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--config", CONFIG, "--world_size", "16")
    own = run(
        "compare", "--config", CONFIG, "--world_size", "16", ".", "tp=4", "world_size=32", "profile=h200_sxm", at=tmp_path
    )
    found = [one["best"][0] for one in own["sides"]]
    shown = capsys.readouterr().out
    (alone,) = run("predict", *words, at=tmp_path)["best"]
    assert found[0] == alone
    (h200,) = run("predict", *words, "--profile", "h200_sxm", at=tmp_path)["best"]
    assert found[3] == h200
    batches = [one["layout"]["global_batch_sequences"] for one in found]
    assert batches == [alone["layout"]["global_batch_sequences"]] * 4  # tp and world_size change, the batch does not
    assert [(one["layout"]["tp"], one["layout"]["dp"]) for one in found] == [(2, 8), (4, 4), (2, 16), (2, 8)]
    for number, one in enumerate(own["sides"][1:], 2):
        change = one["best"][0]["tgs"] / alone["tgs"] - 1
        word = "faster" if change > 0 else "slower"
        assert f"{number} is {abs(change):.1%} {word} than 1 per GPU" in shown
        assert (one["faster_than_first"] > 0.5) == (change > 0)
    assert own["sides"][0]["faster_than_first"] is None


def test_a_side_with_a_profile_is_not_rescaled_unless_it_says_so(tmp_path: Path) -> None:
    words = ("--config", CONFIG, "--world_size", "16")
    sides = (".", "profile=h200_sxm", "profile=h200_sxm,as=b300")
    found = run("compare", *words, "--as", "gb200", *sides, at=tmp_path)["sides"]
    options = (("--as", "gb200"), ("--profile", "h200_sxm"), ("--profile", "h200_sxm", "--as", "b300"))
    alone = [run("predict", *words, *more, at=tmp_path)["best"][0] for more in options]
    assert [one["best"][0]["step_s"] for one in found] == [one["step_s"] for one in alone]
    assert len({one["step_s"] for one in alone}) == 3


def test_a_side_has_the_gpus_that_its_config_states(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    run(
        "search",
        "--model_size",
        "llama3_8b",
        "--framework",
        "megatron-core",
        "--world_size",
        "64",
        "--export",
        str(script),
        at=tmp_path,
    )
    (alone,) = run("predict", "--config", str(script), at=tmp_path)["best"]
    found = run("compare", "--config", str(script), ".", "profile=h200_sxm", "world_size=128", at=tmp_path)["sides"]
    assert [one["best"][0]["layout"]["world_size"] for one in found] == [64, 64, 128]
    assert found[0]["best"][0]["tgs"] == alone["tgs"]


def test_a_model_without_a_batch_has_the_default_one_everywhere(tmp_path: Path) -> None:
    words = ("--config", LLAMA, "--world_size", "64")
    (alone,) = run("predict", *words, at=tmp_path)["best"]
    side = run("compare", *words, ".", "tp=2", at=tmp_path)["sides"][0]["best"][0]
    assert alone["layout"] == side["layout"] and alone["tgs"] == side["tgs"]
    assert alone["layout"]["global_batch_sequences"] == 4_194_304 // 4096


def test_states_are_sharded_over_all_ranks_of_a_side(tmp_path: Path) -> None:
    layout = {"tp": 4, "zero": 1, "zero_shard_size": 4, "num_micro_batches": 8, "framework": "megatron-core"}
    config = tmp_path / "run.json"
    config.write_text(json.dumps({"name": "m", "model": json.loads(Path(LLAMA).read_text()), "layout": layout}))
    words = ("compare", "--config", str(config), "--world_size", "16", ".", "tp=2", "tp=8", "tp=2,zero_shard_size=4")
    layouts = [one["best"][0]["layout"] for one in run(*words, at=tmp_path)["sides"]]
    assert [one["zero_shard_size"] for one in layouts] == [4, 8, 2, 4]
    assert [one["global_batch_sequences"] for one in layouts] == [32] * 4


def test_a_batch_and_micro_batches_may_be_named(tmp_path: Path) -> None:
    words = ("compare", "--config", CONFIG, "--world_size", "16", "num_micro_batches=2", "global_batch_size=1048576,tp=1")
    layouts = [one["best"][0]["layout"] for one in run(*words, at=tmp_path)["sides"]]
    assert [layout["num_micro_batches"] for layout in layouts] == [2, 8]
    assert layouts[1]["global_batch_sequences"] == 256


def test_a_side_names_an_axis_and_what_needs_it(tmp_path: Path) -> None:
    model = json.loads(Path("configs/models/qwen3_30b_a3b.json").read_text())
    layout = {"framework": "megatron-core", "ep": 8, "pp": 2, "num_micro_batches": 8}
    script, config = tmp_path / "run.sh", tmp_path / "run.json"
    config.write_text(json.dumps({"name": "m", "model": model, "layout": layout}))
    run("predict", "--config", str(config), "--world_size", "32", "--export", str(script), at=tmp_path)
    sides = (
        "vpp=4,moe_exchange_overlap=true",
        "recompute=selective,recompute_modules=moe",
        "cp=2,cp_comm=a2a",
        "recompute=selective,recompute_modules=layernorm+moe_act",
    )
    found = [one["best"][0] for one in run("compare", "--config", str(script), ".", *sides, at=tmp_path)["sides"]]
    plain, overlapped, recomputed, _, acts = found
    assert overlapped["step_s"] < plain["step_s"] < recomputed["step_s"]
    assert recomputed["peak_memory_bytes"] < acts["peak_memory_bytes"] < plain["peak_memory_bytes"]
    # and back: what belongs to the level of recomputation goes with it
    again = tmp_path / "again.sh"
    words = ("--fix", "recompute=selective", "--set", "recompute_modules=layernorm+moe_act", "--search", "micro_batch_size")
    run("search", "--config", str(script), *words, "--export", str(again), at=tmp_path)
    one, none = run("compare", "--config", str(again), ".", "recompute=none", at=tmp_path)["sides"]
    assert one["best"][0]["layout"]["recompute"] == "selective"
    assert none["best"][0]["step_s"] < one["best"][0]["step_s"]


@pytest.mark.parametrize(
    ("sides", "message"),
    [
        (["."], "1 side(s): compare 2 to 6"),
        (["tp=4", "tp=4"], "tp=4 is given twice"),
        ([".", "tpp=4"], "side tpp=4: tpp (did you mean 'tp'?) is none of config, model_size, "),
        ([".", "tp=3"], "side tp=3: 7B_internlm2: tp * cp * pp is 3, which does not divide world_size 16"),
        ([".", "recompute=some"], "side recompute=some: recompute is 'some'; it must be one of"),
        ([".", "world_size=0"], "side world_size=0: world_size is 0; it must be a whole number"),
        ([".", "missing.py"], "side missing.py: missing.py: no such file"),
        ([".", "tp=2,tp=4"], "give each name once"),
        ([".", "num_micro_batches=2,global_batch_size=65536"], "both state the batch; give one"),
        ([".", "config=a.py,model_size=7"], "both state the model; give one"),
    ],
)
def test_wrong_sides_are_refused(sides: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--config", CONFIG, "--world_size", "16", *sides]) == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


def test_sides_that_do_not_fit_are_said_so_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", "--model_size", "llama3_70b", "--framework", "megatron-core", "--world_size", "64", ".")
    assert main([*words, "recompute=full"]) == 0
    said = capsys.readouterr().out
    assert "the config states no layout: each size is 1" in said
    assert said.index("None of these layouts fits in memory") < said.index("2 is ")
    assert main([*words, "tp=8,pp=8,recompute=full"]) == 0
    assert "Does not fit in memory, so its time is hypothetical: 1" in capsys.readouterr().out


def run(*words: str, at: Path) -> dict[str, Any]:
    out = at / "out.json"
    assert main([*words, "--json", str(out)]) == 0
    content: dict[str, Any] = json.loads(out.read_text())
    return content
