"""The program as a user runs it: printed and written output, and error messages for wrong input."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from predictor.cost_model import CostModel
from solver.commands.command_line import main
from solver.commands.console import main as console
from solver.report.explain import TIE_THRESHOLD
from solver.report.uncertainty import LAYOUT_STD
from solver.step.memory import MEMORY_PARTS
from solver.step.time import TIME_PARTS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "7B_internlm2.py"
PROFILE = ROOT / "prof_data" / "h100_sxm.pt"
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}


def run(*arguments: Any, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "simulation_train_formulaic.py"), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, env=environment)


def works(*arguments: Any, cwd: Path = ROOT) -> str:
    """Run the program in this process, which saves its start; return what it prints."""
    printed, errors, before = StringIO(), StringIO(), Path.cwd()
    os.chdir(cwd)
    try:
        with redirect_stdout(printed), redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "160")
            status = main([str(argument) for argument in arguments])
    except SystemExit as ended:  # of --help
        status = int(ended.code or 0)
    finally:
        os.chdir(before)
    assert status == 0 and "Traceback" not in errors.getvalue(), errors.getvalue()
    return printed.getvalue()


def refused(*arguments: Any) -> str:
    """Run the program, in this process, on input that it must refuse; return its one line on stderr."""
    printed, errors = StringIO(), StringIO()
    with redirect_stdout(printed), redirect_stderr(errors):
        status = main([str(argument) for argument in arguments])
    assert status == 2, (status, errors.getvalue()[-800:])
    return one_line(errors.getvalue())


def one_line(errors: str) -> str:
    assert "Traceback" not in errors
    lines = errors.split("\n")
    assert len(lines) == 2 and lines[1] == "" and lines[0].startswith("error: "), f"not one line: {errors!r}"
    return lines[0]


def test_a_refusal_is_one_line_and_status_2_of_a_process() -> None:
    done = run("--run_all_solu", "--world_size", 0)
    assert done.returncode == 2 and not done.stdout
    assert one_line(done.stderr) == refused("--run_all_solu", "--world_size", 0)


@pytest.fixture(scope="module", autouse=True)
def fitted_before(h100_model: CostModel, a100_model: CostModel) -> None:
    """Put the fits into the program's cache, so that a run takes a second and no two runs fit at the same time."""


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """Run a search as a process; return the printed report, the JSON, and the folder with the CSV and the picture."""
    folder = tmp_path_factory.mktemp("out")
    done = run(
        "--run_all_solu",
        "--world_size",
        128,
        "--top",
        5,
        "--json",
        folder / "out.json",
        "--csv",
        folder / "out.csv",
        "--plot",
        folder / "front.png",
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    printed = done.stdout
    return printed, json.loads((folder / "out.json").read_text()), folder


def check_solution(found: dict[str, Any], world: int, tokens: int) -> None:
    assert set(TIME_PARTS) == set(found["breakdown_s"]) and set(MEMORY_PARTS) == set(found["memory_parts_bytes"])
    step, layout = found["step_s"], found["layout"]
    assert sum(found["breakdown_s"].values()) == pytest.approx(step, rel=1e-9)
    assert sum(op["seconds"] for op in found["ops"]) == pytest.approx(step, rel=1e-9)
    assert sum(found["basis"].values()) == pytest.approx(1, rel=1e-9)
    assert set(found["basis"]) == {"measured", "interpolated", "extrapolated", "roofline", "simulated"}
    assert found["tgs"] * step * world == pytest.approx(tokens, rel=1e-9)
    assert layout["global_batch_sequences"] * layout["seq_len"] == tokens
    assert layout["tp"] * layout["cp"] * layout["dp"] * layout["pp"] == layout["world_size"] == world
    low, high = found["interval_s"]
    assert low < step < high and 0 < found["mfu"] < 1
    assert sum(found["memory_parts_bytes"].values()) == pytest.approx(found["allocated_memory_bytes"], rel=1e-9)
    assert found["allocated_memory_bytes"] < found["reserved_memory_bytes"] < found["peak_memory_bytes"]


def test_the_json_of_a_search(searched: tuple[str, dict[str, Any], Path]) -> None:
    _, plain, _ = searched
    about = plain["search"]
    assert set(about) == {"layouts_priced", "feasible", "seconds", "layouts_per_second", "rejected"}
    assert about["layouts_priced"] > 100_000 and 0 < about["feasible"] < about["layouts_priced"]
    assert about["layouts_per_second"] == pytest.approx(about["layouts_priced"] / about["seconds"])
    assert about["rejected"]["does not fit in memory"] == about["layouts_priced"] - about["feasible"]
    assert len(plain["best"]) == 5
    keys = {"layout", "step_s", "interval_s", "tgs", "mfu", "peak_memory_bytes", "breakdown_s", "basis"}
    for found in [*plain["best"], *plain["best_of_mode"].values()]:
        assert keys <= set(found)
        check_solution(found, 128, 4_194_304)
        assert found["fits"] and found["peak_memory_bytes"] <= plain["cluster"]["memory_bytes"]
    tgs = [found["tgs"] for found in plain["best"]]
    assert tgs == sorted(tgs, reverse=True) and tgs[0] == max(f["tgs"] for f in plain["best_of_mode"].values())
    assert set(plain["best_of_mode"]) == {"mtp", "msp", "fsp", "isp"}
    assert plain["model"]["parameters"] == 7_737_708_544
    assert plain["pareto"][0]["tgs"] == pytest.approx(tgs[0], rel=1e-12)


def test_every_key_of_the_json_is_documented(searched: tuple[str, dict[str, Any], Path]) -> None:
    text = (ROOT / "docs" / "json.md").read_text()
    best, about = searched[1]["best"][0], (f"search.{key}" for key in searched[1]["search"])
    for key in (*searched[1], *about, *best, *best["breakdown_s"]):
        assert f"`{key}`" in text, key
    assert f"within {TIE_THRESHOLD:.1%} of the first" in text and f"({LAYOUT_STD:.1%} for each layout" in text


def test_the_report_starts_with_the_best_layout(searched: tuple[str, dict[str, Any], Path]) -> None:
    printed, plain, folder = searched
    best = plain["best"][0]
    lines = printed.splitlines()
    verdict = next(i for i, line in enumerate(lines) if "tokens/GPU/s" in line)
    assert verdict < next(i for i, line in enumerate(lines) if "Best layout of each" in line)
    assert f"{best['tgs']:,.0f} tokens/GPU/s" in lines[verdict] and f"MFU {best['mfu']:.1%}" in lines[verdict + 1]
    assert f"searched {plain['search']['layouts_priced']:,} layouts" in printed
    assert "profile: h100_sxm" in printed and "128 x NVIDIA H100" in printed
    for path in ("out.json", "out.csv", "front.png"):
        assert f"wrote {folder / path}" in printed.replace("\n", "")


def test_the_csv_has_the_same_numbers(searched: tuple[str, dict[str, Any], Path]) -> None:
    _, plain, folder = searched
    with (folder / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    for row, found in zip(rows, plain["best"], strict=True):
        assert float(row["step_s"]) == found["step_s"] and float(row["tgs"]) == found["tgs"]
        assert [float(row["interval_low_s"]), float(row["interval_high_s"])] == found["interval_s"]
        assert {k: "" if v is None else str(v) for k, v in found["layout"].items()} == {k: row[k] for k in found["layout"]}
        assert sum(float(row[f"{part}_s"]) for part in TIME_PARTS) == pytest.approx(found["step_s"], rel=1e-9)


def test_the_picture_is_a_png(searched: tuple[str, dict[str, Any], Path]) -> None:
    content = (searched[2] / "front.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 5_000


def test_what_a_deterministic_run_leaves_out_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--config", "configs/7B_internlm2.py", "--world_size", "64"]
    assert main([*line, "--set", "deterministic=true"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "left out of the estimate: what a deterministic run's kernels other than attention take longer" in printed
    assert main(line) == 0
    assert "left out" not in capsys.readouterr().out


def test_two_runs_agree(searched: tuple[str, dict[str, Any], Path], tmp_path: Path) -> None:
    works("--run_all_solu", "--world_size", 128, "--top", 5, "--json", tmp_path / "again.json", cwd=tmp_path)
    second = json.loads((tmp_path / "again.json").read_text())
    assert second["best"] == searched[1]["best"]
    assert [path.name for path in tmp_path.iterdir()] == ["again.json"], "nothing else is written"


def test_a_model_with_experts_as_a_user_searches_it(tmp_path: Path) -> None:
    tokens, world = 256 * 4096, 64
    common = (
        "--config",
        "configs/models/qwen3_30b_a3b.json",
        "--run_all_solu",
        "--world_size",
        world,
        "--top",
        2,
        "--global_batch_size",
        tokens,
    )
    printed = works(*common, "--set", "moe_dispatcher=deepep,moe_imbalance=1.2", "--json", tmp_path / "uneven.json")
    assert "exposed exchange of expert tokens" in printed and "30.53 B parameters" in printed
    even = works(*common, "--set", "moe_dispatcher=deepep", "--json", tmp_path / "even.json", "--jobs", 2)
    assert "exchange" in even
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("uneven", "even")}
    for out in found.values():
        for solution in out["best"]:
            check_solution(solution, world, tokens)
            layout = solution["layout"]
            ranks = layout["tp"] * layout["cp"] * layout["dp"]
            assert layout["moe_dispatcher"] == "deepep" and ranks % (layout["ep"] * layout["etp"]) == 0
    best = {name: out["best"][0]["step_s"] for name, out in found.items()}
    assert best["uneven"] > best["even"]


def test_a_single_layout_is_that_of_the_config(tmp_path: Path) -> None:
    printed = works("--config", CONFIG, "--world_size", 64, "--json", tmp_path / "one.json", "--csv", tmp_path / "one.csv")
    plain = json.loads((tmp_path / "one.json").read_text())
    (found,) = plain["best"]
    layout = found["layout"]
    expected = {
        "tp": 2,
        "tp_mode": "msp",
        "pp": 1,
        "dp": 32,
        "micro_batch_size": 2,
        "num_micro_batches": 8,
        "zero": 1,
        "zero_shard_size": 32,
    }
    assert {key: layout[key] for key in expected} == expected
    check_solution(found, 64, 32 * 2 * 8 * 4096)
    assert f"{found['tgs']:,.0f} tokens/GPU/s" in printed
    assert len((tmp_path / "one.csv").read_text().splitlines()) == 2


def test_a_batch_in_tokens_sets_the_micro_batches(tmp_path: Path) -> None:
    works("--config", CONFIG, "--world_size", 64, "--global_batch_size", 2**20, "--json", tmp_path / "one.json")
    (found,) = json.loads((tmp_path / "one.json").read_text())["best"]
    assert found["layout"]["num_micro_batches"] == 4
    check_solution(found, 64, 2**20)


def test_a_layout_that_does_not_fit_is_reported(tmp_path: Path) -> None:
    printed = works("--config", CONFIG, "--world_size", 64, "--memory_limit_gib", 5, "--json", tmp_path / "one.json")
    assert "OUT OF MEMORY" in printed
    assert json.loads((tmp_path / "one.json").read_text())["best"][0]["fits"] is False


@pytest.mark.parametrize("way", ["--profile", "--pre_profiling_data_path", "--cluster"])
def test_another_machine(tmp_path: Path, way: str) -> None:
    value = {
        "--profile": "a100_sxm_80gb",
        "--pre_profiling_data_path": ROOT / "prof_data" / "a100_sxm_80gb.pt",
        "--cluster": "dgx_a100",
    }[way]
    printed = works("--world_size", 64, way, value, "--json", tmp_path / "a100.json")
    assert "A100" in printed
    works("--world_size", 64, "--json", tmp_path / "h100.json")
    a100, h100 = (json.loads((tmp_path / f"{n}.json").read_text())["best"][0] for n in ("a100", "h100"))
    assert 1.5 < a100["step_s"] / h100["step_s"] < 3.5


def test_the_requested_framework_is_used(tmp_path: Path) -> None:
    # the name of a family means its newest release
    releases = {"internevo-2023": "internevo-2023", "megatron-lm": "megatron-core-0.12"}
    for name, release in releases.items():
        printed = works("--world_size", 64, "--framework", name, "--json", tmp_path / f"{name}.json")
        assert release in printed.splitlines()[0] + printed.splitlines()[1]
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in releases)
    assert [plain["run"]["framework"] for plain in (first, second)] == list(releases.values())
    assert (first["run"]["cross_entropy_fusion"], second["run"]["overlap_param_gather"]) == (True, True)
    assert first["best"][0]["step_s"] != second["best"][0]["step_s"]


def test_settings_that_another_framework_does_not_take_over_are_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    layout = {"framework": "megatron-core", "tp": 2, "cross_entropy_fusion": True, "moe_dispatcher": "alltoall"}
    path.write_text(json.dumps({"model": "llama3_8b", "layout": layout}))
    said = "as nanotron is asked for: cross_entropy_fusion True (now False); --set"
    assert said in " ".join(works("--config", path, "--world_size", 8, "--framework", "nanotron").split())
    assert "not taken over" not in works("--config", path, "--world_size", 8, "--framework", "megatron-core")


def test_a_hugging_face_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SMALL, "model_type": "llama", "rope_theta": 5e5}))
    works(
        "--config",
        path,
        "--world_size",
        8,
        "--seq_len",
        2048,
        "--run_all_solu",
        "--global_batch_size",
        2**17,
        "--json",
        tmp_path / "out.json",
    )
    plain = json.loads((tmp_path / "out.json").read_text())
    assert plain["model"]["hidden_size"] == 512 and plain["best"][0]["layout"]["seq_len"] == 2048


# measured runs

CASE: dict[str, Any] = {
    "id": "mine-1",
    "hardware": "h100_sxm",
    "model": SMALL,
    "run": {
        "world_size": 8,
        "seq_len": 2048,
        "micro_batch_size": 4,
        "global_batch_size": 64,
        "framework": "megatron-lm",
        "colour": "green",
    },
    "measured": {"step_s": 0.05, "peak_memory_gib": 8.0, "memory_kind": "allocated"},
}


def write_cases(path: Path, *cases: Any) -> Path:
    path.write_text("\n".join(json.dumps(case) for case in cases) + "\n\n")
    return path


def test_validate(tmp_path: Path) -> None:
    moe = {**CASE, "id": "mine-moe", "model": {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}}
    elsewhere = {**CASE, "id": "mine-tpu", "hardware": "tpu_v9"}
    slower = {**CASE, "id": "mine-2", "run": {**CASE["run"], "recompute": "full"}}
    split = {**CASE, "id": "mine-3", "run": {**CASE["run"], "tp": 2}}
    path = write_cases(tmp_path / "cases.jsonl", CASE, moe, elsewhere, slower, split)
    printed = works("--validate", path, "--json", tmp_path / "out.json")
    cases = {case["id"]: case for case in json.loads((tmp_path / "out.json").read_text())["cases"]}
    assert list(cases) == ["mine-1", "mine-moe", "mine-tpu", "mine-2", "mine-3"], "none dropped, order kept"
    first = cases["mine-1"]
    assert first["skipped"] is None and first["fits"] is True
    assert first["interval_s"][0] < first["predicted_step_s"] < first["interval_s"][1]
    assert cases["mine-2"]["predicted_step_s"] > first["predicted_step_s"]
    assert cases["mine-2"]["predicted_peak_memory_bytes"] < first["predicted_peak_memory_bytes"]
    assert "not read: colour=green" in first["assumptions"]
    assert any(a.startswith("zero:") for a in first["assumptions"]) and any("network" in a for a in first["assumptions"])
    assert "experts" in cases["mine-moe"]["skipped"] and cases["mine-moe"]["predicted_step_s"] is None
    assert "tpu_v9" in cases["mine-tpu"]["skipped"]
    assert "5 cases, 3 predicted" in printed and "mine-moe" in printed and "mine-tpu" in printed
    # the printed error is that of the JSON: one source, three cases that took 0.05 s
    errors = sorted(abs(cases[i]["predicted_step_s"] / 0.05 - 1) for i in ("mine-1", "mine-2", "mine-3"))
    assert f"{errors[1]:.1%}" in printed and "regret mine" in printed


def test_validate_of_runs_without_times(tmp_path: Path) -> None:
    out = {**CASE, "id": "dry-1", "measured": {"out_of_memory": True}}
    printed = works("--validate", write_cases(tmp_path / "cases.jsonl", out), "--json", tmp_path / "out.json")
    assert "1 cases, 1 predicted" in printed and "fits or not: 0.0% classified correctly" in printed


def test_an_impossible_case_is_skipped_with_its_reason(tmp_path: Path) -> None:
    wrong = {
        "mine-batch": {**CASE["run"], "global_batch_size": 7},
        "mine-tp": {**CASE["run"], "tp": 3},
        "mine-pp": {**CASE["run"], "pp": 8, "tp": 1, "world_size": 64, "num_micro_batches": 0},
    }
    cases = [{**CASE, "id": name, "run": changed} for name, changed in wrong.items()]
    works("--validate", write_cases(tmp_path / "c.jsonl", CASE, *cases), "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [case["skipped"] is None for case in found] == [True, False, False, False]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("not json\n", "line 1: not a JSON object"),
        ("[1, 2]\n", "line 1: a case needs id"),
        ('{"id": "x"}\n', "hardware is missing"),
        ("\n\n", "no case"),
        ("5\n", "line 1: a case needs id"),
        (json.dumps({**CASE, "model": 5}) + "\n", "model is 5; it must be an object"),
        (
            json.dumps({**CASE, "model": "llama3_70"}) + "\n",
            "no shipped model is called 'llama3_70' (did you mean 'llama3_70b'?)",
        ),
        (json.dumps({**CASE, "run": []}) + "\n", "run is []; it must be an object"),
        (json.dumps({**CASE, "measured": None}) + "\n", "measured is None; it must be an object"),
    ],
)
def test_invalid_case_files(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(lines)
    assert message in refused("--validate", path)


ODD_LINES = {
    "broken": "{broken",
    "deep": '{"id": ' + "[" * 100_000,
    "long number": json.dumps({**CASE, "id": "x-2", "run": {**CASE["run"], "seq_len": 1}}).replace(": 1", ": " + "9" * 5000),
    "experts": json.dumps({**CASE, "id": "x-3", "model": {**SMALL, "num_experts": "x"}}),
    "norm": json.dumps({**CASE, "id": "x-4", "model": {**SMALL, "norm": ["rmsnorm"]}}),
    "another norm": json.dumps({**CASE, "id": "x-5", "model": {**SMALL, "norm": "zz"}}),
    "tied": json.dumps({**CASE, "id": "x-6", "model": {**SMALL, "tie_word_embeddings": "no"}}),
    "padded": json.dumps({**CASE, "id": "x-7", "model": {**SMALL, "padded_vocab_size": -5}}),
    "twice": json.dumps({**CASE, "id": "x-8"})[:-1] + ', "id": "x-9"}',
    "huge": json.dumps({**CASE, "id": "x-10", "run": {**CASE["run"], "num_micro_batches": 2**63}}),
}


def test_one_odd_line_does_not_lose_the_other_cases(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text("\n".join([json.dumps(CASE), *ODD_LINES.values()]) + "\n")
    printed = works("--validate", path, "--json", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert [case["skipped"] is None for case in found] == [True] + [False] * len(ODD_LINES)
    assert f"{1 + len(ODD_LINES)} cases, 1 predicted" in printed and "stands twice" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", CONFIG, "--model_size", "7"), "--config and --model_size both name a model"),
        (("--validate", "x.jsonl", "--world_size", 8), "--world_size has no effect with --validate"),
        (("--cluster", "dgx_a100", "--profile", "h200_sxm"), "is h200_sxm, but the cluster is of a100_sxm_80gb; leave"),
        (("--json", "same", "--csv", "same"), "--json and --csv are both same"),
        (("--config", "c.json", "--json", "c.json"), "--config and --json are both c.json"),
        (("--framework", ""), "--framework is empty"),
        (("--top", 100_000), "top is 100000; it must be a whole number of at least 1 and at most 1000"),
        (("--memory_limit_gib", "1e308"), "memory_limit_gib is 1e+308; it must be a positive number between"),
        (("--seq_len", 2**65), "seq_len is 36893488147419103232; it must be a whole number"),
        (("--global_batch_size", 10**40), "global_batch_size is"),
        (("--profile", "data"), "nothing was measured here yet"),
        (("--set", "tp=8"), "--set tp: it is an axis of a search"),
        (("--set", "dispatcher=deepep"), "--set dispatcher: it is no constant of a run"),
        (("--set", "moe_dispatcher=deepep"), "moe_dispatcher changes nothing: 7B_internlm2 has no experts"),
        (("--set", "fp8_param_gather=true"), "fp8_param_gather changes nothing with precision bf16; leave it out"),
        (
            ("--framework", "megatron-core", "--set", "overlap_weight_gather=false"),
            "overlap_weight_gather changes nothing under megatron-core-0.12, which has no isp; leave it out",
        ),
        (("--set", "precision"), "--set precision: it has no value; give each constant once"),
        (("--set", "precision=int3"), "precision is 'int3'; it must be one of"),
        (("--jobs", 2), "--jobs shares a search; give --run_all_solu too"),
    ],
)
def test_what_contradicts_or_exceeds_is_refused(arguments: tuple[object, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_an_option_that_is_given_twice_is_refused() -> None:
    done = run("--config", CONFIG, "--config", CONFIG)
    said = "error: --config is given twice; simulation_train_formulaic.py --help lists the options\n"
    assert done.returncode == 2 and done.stderr == said


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"inter_node_gbit_per_gpu": float("nan")}, "inter_node_gbit_per_gpu is nan"),
        ({"topology": "rail"}, "a cluster holds no topology; give the .topo file or the template itself as the cluster"),
        ({"topology": None}, "a cluster holds no topology"),
        ({"memory_gib": float("inf")}, "memory_gib is inf"),
        ({"gpus_per_node": 2**63}, "gpus_per_node is"),
        ({"gpus_per_node": 2.5}, "gpus_per_node is 2.5; it must be a whole number"),
        ({"memory_gib": 1e308}, "memory_gib is 1e+308"),
    ],
)
def test_figures_of_a_cluster_that_cannot_be(tmp_path: Path, cluster: dict[str, Any], message: str) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"hardware": "h100_sxm", **cluster}))
    assert message in refused("--cluster", path, "--world_size", 8)


@pytest.mark.parametrize(
    "layout",
    [
        {"micro_batch_size": 10**12},
        {"micro_batch_size": 2**52},
        {"recompute": "full", "recompute_layers": 99},
        {"recompute_layers": 2**63},
        {"num_micro_batches": 10**19},
    ],
)
def test_layouts_out_of_bounds(tmp_path: Path, layout: dict[str, Any]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": "llama3_8b", "layout": layout}))
    assert next(reversed(layout)) in refused("--config", path, "--world_size", 8)


def test_outputs_keep_what_is_no_file_and_follow_links(tmp_path: Path) -> None:
    works("--world_size", 8, "--json", "/dev/null")
    assert Path("/dev/null").is_char_device()
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target)
    works("--world_size", 8, "--json", link)
    assert link.is_symlink() and "best" in json.loads(target.read_text()) and target.stat().st_mode & 0o777 == 0o600
    done = subprocess.run(
        [sys.executable, "simulation_train_formulaic.py", "--world_size", "8", "--json", "/dev/stdout"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"best": [' in done.stdout


# input that cannot be used


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_profiles_that_cannot_be_read(tmp_path: Path) -> None:
    trace, path = tmp_path / "ran", tmp_path / "data.pt"
    assert "no such profile" in refused("--pre_profiling_data_path", tmp_path / "absent.pt")
    path.write_bytes(PROFILE.read_bytes()[:5000])
    assert "truncated" in refused("--pre_profiling_data_path", path)
    torch.save({"linear": Hostile(f"touch {trace}")}, path)
    before = path.read_bytes()
    assert "only plain values are read" in refused("--pre_profiling_data_path", path)
    assert not trace.exists() and path.read_bytes() == before
    path.write_text("{}")
    refused("--pre_profiling_data_path", path)
    assert "choose one of" in refused("--profile", "b9000")
    assert "give one" in refused("--profile", "h100_sxm", "--pre_profiling_data_path", PROFILE)


def test_a_profile_with_invalid_device_values(tmp_path: Path) -> None:
    plain = torch.load(PROFILE, weights_only=True)
    path = tmp_path / "data.pt"
    wrong: list[dict[str, Any]] = [{"num_sms": 0}, {"peak_flops": {}}, {"memory_bandwidth": -1.0}, {"gpus_per_node": 0}]
    for change in [*wrong, {"memory_bytes": "80"}]:
        device = {**plain["meta"]["device"], **change}
        torch.save({**plain, "tables": {}, "meta": {**plain["meta"], "device": device}}, path)
        assert next(iter(change)) in refused("--pre_profiling_data_path", path, "--world_size", 8)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("hidden_size=HIDDEN_SIZE", "hidden_sise=HIDDEN_SIZE", "hidden_sise"),
        ("tensor=dict(size=2", "tensor=dict(sise=2", "sise"),
        ("tensor=dict(size=2", "tensor=dict(size=3", "3"),
        ("micro_bsz=2", "micro_bsz=", "line"),
        ("micro_bsz=2", "micro_bsz=0", "micro_bsz"),
        ("NUM_LAYER = 32", "NUM_LAYER = input()", "line"),
        ("NUM_LAYER = 32", "NUM_LAYER = 'many'", "num_layers"),
        ('mode="msp"', 'mode="other"', "mode"),
    ],
)
def test_wrong_configs(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = CONFIG.read_text()
    assert old in text
    path = tmp_path / "wrong.py"
    path.write_text(text.replace(old, new))
    assert message in refused("--config", path, "--world_size", 64)
    assert path.read_text() == text.replace(old, new)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.py", None),
        ("absent.json", None),
        ("x.txt", "hello"),
        ("x.json", "not json"),
        ("x.json", "[1]"),
        ("x.json", "{}"),
        ("x.json", '{"hidden_size": 512}'),
        ("x.py", "def f(:"),
        ("x.py", "\x00"),
        ("x.py", ""),
        ("x.json", json.dumps({**SMALL, "num_attention_heads": 7})),
        ("x.json", json.dumps({**SMALL, "hidden_size": -1})),
        ("x.json", json.dumps({**SMALL, "hidden_size": "512"})),
        ("x.json", json.dumps({**SMALL, "hiden_size": 512})),
    ],
)
def test_invalid_config_files(tmp_path: Path, name: str, content: str | None) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert "error: " in refused("--config", tmp_path / name, "--world_size", 8)


@pytest.mark.parametrize("world", [0, -1, 7, 10**9])
@pytest.mark.parametrize("how", [("--run_all_solu",), ()], ids=["search", "single"])
def test_invalid_world_sizes(world: int, how: tuple[str, ...]) -> None:
    assert "world_size" in refused("--world_size", world, *how)


@pytest.mark.parametrize("batch", [0, -4096, 4097, 3 * 5 * 7 * 4096])
def test_invalid_batches(batch: int) -> None:
    message = refused("--run_all_solu", "--world_size", 131072, "--global_batch_size", batch)
    assert "global_batch_size" in message or "global batch" in message
    if batch > 0:
        assert "global" in refused("--config", CONFIG, "--world_size", 64, "--global_batch_size", batch)


def test_a_model_that_fits_nowhere() -> None:
    message = refused("--run_all_solu", "--model_size", "llama3_405b", "--world_size", 8, "--global_batch_size", 2**20)
    assert re.search(r"none of [\d,]+ layouts of .* fits on 8 GPUs: the smallest needs [\d.]+ GiB of 79.1 GiB", message)
    message = refused("--run_all_solu", "--model_size", "kimi_k2", "--world_size", 8, "--framework", "megatron-core")
    assert re.search(r"fits on 8 GPUs: the smallest needs \d,\d\d\d GiB of 79.1 GiB each", message)


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot"])
def test_output_that_cannot_be_written(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("here before")
    path = tmp_path / "file" / "out.png"
    message = refused("--run_all_solu", "--world_size", 8, "--global_batch_size", 2**17, option, path)
    assert "cannot write" in message and str(path) in message
    assert (tmp_path / "file").read_text() == "here before"


NO_CASES = ("--validate", "/absent.jsonl")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--world_size", 8, "--model_size", "9999"), "or give a file with --config"),
        (("--world_size", 8, "--cluster", "moonbase"), "or one of a100_100g"),
        (("--world_size", 8, "--seq_len", 0), "seq_len is 0; it must be a whole number of at least 1"),
        (("--world_size", 8, "--top", 0), "top is 0; it must be a whole number of at least 1"),
        (("--world_size", 8, "--memory_limit_gib", "nan"), "memory_limit_gib is nan"),
        (("--world_size", 8, "--memory_limit_gib", "-3"), "memory_limit_gib is -3.0"),
        (("--world_size", 8, "--plot", "x.png"), "--plot shows layouts of a search; give --run_all_solu too"),
        (("--world_size", 8, "--run_all_solu", "--plot", "x.txt"), "--plot x.txt: the file must end in .png"),
        (("--world_size", 8, "--framework", "nonsense"), "megatron-core"),
        (("--world_size", 8, *NO_CASES), "--world_size has no effect with --validate"),
        (NO_CASES, "/absent.jsonl: no such file"),
        (
            ("--world_size", 8, "--run_all_solu", "--set", "cp_comm=a2a", "--fix", "cp=1"),
            "cp_comm changes nothing with --fix cp=1",
        ),
        ((*NO_CASES, "--csv", "x.csv"), "--csv has no effect with --validate"),
        ((*NO_CASES, "--profile", "h100_sxm"), "--profile has no effect with --validate"),
        (("--world_size", 8, "--run_all_solu", "--seq_len", 4095, "--global_batch_size", 2**22), "sequences of 4095 tokens"),
    ],
    ids=lambda a: " ".join(map(str, a)) if isinstance(a, tuple) else "",
)
def test_invalid_options(arguments: tuple[Any, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_unlimited_memory_is_refused() -> None:
    assert "memory_limit_gib is inf; it must be a positive number" in refused("--world_size", 8, "--memory_limit_gib", "inf")


#: Layouts that no framework can run: more tensor ranks than heads, more stages than layers, chunks or weight groups that
#: do not divide, stages with more layers than the model has, weight groups of a mode without weight sharding.
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"tp": 64}, "tp 64 does not divide the model's heads"),
    "more stages than layers": ({"tp": 1, "pp": 16}, "pp 16 is more than the model's 8 layers"),
    "chunks": ({"pp": 4, "vpp": 3}, "does not divide the layers of 4 pipeline stages into 3 chunks"),
    "chunks of one stage": ({"vpp": 2}, "vpp 2 interleaves pipeline stages, but pp is 1"),
    "weight group": ({"tp_mode": "isp", "wp": 3}, "wp 3 does not divide the 64 ranks of a stage"),
    "weight group beyond the world": ({"tp_mode": "isp", "wp": 1000}, "wp 1000 does not divide"),
    "weight group of mtp": ({"wp": 4}, "wp 4 needs tp_mode isp"),
    "first stage": ({"pp": 2, "num_layers_in_first_pipeline_stage": 100}, "100 layers leave too few of 8"),
    "negative stage": ({"pp": 2, "num_layers_in_first_pipeline_stage": -3}, "num_layers_in_first_pipeline_stage is -3"),
    "sequence": ({"cp": 64, "seq_len": 128}, "seq_len 128 "),
    "interleaved micro batches": ({"pp": 4, "vpp": 2, "num_micro_batches": 6}, "micro batches in multiples of pp 4, not 6"),
    "recompute": ({"recompute_layers": -5}, "recompute_layers is -5"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_layouts_that_no_framework_can_run(tmp_path: Path, name: str) -> None:
    path, (layout, message) = tmp_path / "run.json", IMPOSSIBLE[name]
    path.write_text(json.dumps({"name": "x", "model": SMALL, "layout": {"seq_len": 2048, **layout}}))
    assert message in refused("--config", path, "--world_size", 64)


def test_help_lists_every_option() -> None:
    printed = works("--help")
    options = "run_all_solu config model_size world_size global_batch_size json csv pre_profiling_data_path profile cluster"
    for option in (f"--{name}" for name in (options + " validate plot memory_limit_gib").split()):
        assert option in printed
    assert "h100_sxm" in printed and "examples" in printed


def test_health_of_a_job(tmp_path: Path) -> None:
    measured = tmp_path / "job.json"
    measured.write_text('{"step_s": 33.0, "all_reduce_busbw_gb_s": 30}')
    out = tmp_path / "out.json"
    printed = works("--config", CONFIG, "--world_size", 128, "--health", measured, "--json", out)
    assert "worse: a step takes 33 s" in printed and "times slower" in printed and "if all layers are recomputed" in printed
    found = json.loads(out.read_text())
    assert [finding["verdict"] for finding in found["health"][:2]] == ["worse", "worse"]
    assert found["other_settings"][0]["step_s"] > found["best"][0]["step_s"]


def test_health_is_of_one_layout_and_of_a_file_that_says_something(tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("hello")
    assert "leave out --run_all_solu" in refused("--run_all_solu", "--health", empty)
    assert "no step times and no table of nccl-tests" in refused("--config", CONFIG, "--world_size", 128, "--health", empty)
    assert "no such file" in refused("--config", CONFIG, "--world_size", 128, "--health", tmp_path / "none.log")
    empty.write_text('{"step_s": 16100}')  # milliseconds
    assert "is not in seconds, or of another job" in refused("--config", CONFIG, "--world_size", 128, "--health", empty)


def test_a_device_that_was_not_measured(tmp_path: Path) -> None:
    printed = works("--config", CONFIG, "--world_size", 64, "--profile", "gb200")
    assert "derived: nothing was measured on it; kernels of b200_sxm" in printed and "4 per node, fast links over 64" in printed
    assert "measured," not in printed.split("share of the time")[1].split(";")[0]
    own = works("--config", CONFIG, "--world_size", 64, "--as", "gb200")
    assert "kernels of b200_sxm" in own  # what its file names, not the default profile
    assert "kernels of h100_sxm" in works("--config", CONFIG, "--world_size", 64, "--profile", "h100_sxm", "--as", "gb200")
    assert "no device is called 'gb2'" in refused("--config", CONFIG, "--world_size", 64, "--as", "gb2")


def test_settings_of_a_file_that_change_nothing_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = {"framework": "megatron-core", "moe_imbalance": 1.5, "num_layers_at_start_in_bf16": 2}
    (tmp_path / "run.json").write_text(json.dumps({"model": "llama3_8b", "layout": layout}))
    assert main(["--config", str(tmp_path / "run.json"), "--world_size", "8"]) == 0
    shown = capsys.readouterr().out
    assert "moe_imbalance of the config changes nothing: llama3_8b has no experts" in shown
    assert "num_layers_at_start_in_bf16 of the config changes nothing with precision bf16" in shown


def test_a_search_writes_the_report_that_an_explanation_does(tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    words = ["--model_size", "llama3_8b", "--world_size", "16", "--framework", "megatron-core"]
    assert main(["--run_all_solu", *words, "--report", str(page)]) == 0
    text = page.read_text()
    assert "llama3_8b on 16 x NVIDIA H100" in text and "://" not in text.replace("http://www.w3.org", "")
    assert main([*words, "--report", str(page)]) == 2, "of one layout, foretrain explain writes it"
    assert main(["--run_all_solu", *words, "--report", str(tmp_path / "out.txt")]) == 2


def test_a_search_leaves_out_what_a_config_says_of_single_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, layout = tmp_path / "run.sh", "Et*15|t*17L"
    words = (
        "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32"
        " --seq-length 4096 --max-position-embeddings 4096 --bf16 --vocab-size 32000 --micro-batch-size 1"
        " --global-batch-size 64 --pipeline-model-parallel-size 2 --use-distributed-optimizer"
    )
    script.write_text(words)
    assert console(["search", "--config", str(script), "--json", str(tmp_path / "plain.json"), "--no-timing"]) == 0
    script.write_text(f'{words} --pipeline-model-parallel-layout "{layout}"')
    assert console(["search", "--config", str(script), "--json", str(tmp_path / "staged.json"), "--no-timing"]) == 0
    assert "pipeline_layout of the config's own layout: left out" in capsys.readouterr().out
    plain, staged = (json.loads((tmp_path / name).read_text())["best"] for name in ("plain.json", "staged.json"))
    assert [one["step_s"] for one in plain] == [one["step_s"] for one in staged]
    assert console(["predict", "--config", str(script), "--no-timing"]) == 0
    assert layout in capsys.readouterr().out
    assert console(["explain", "--own", "--config", str(script)]) == 2
    assert "foretrain predict takes its layout" in capsys.readouterr().err


def test_a_script_of_larger_nodes_says_which_nodes_it_gets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32"
        " --seq-length 4096 --max-position-embeddings 4096 --bf16 --vocab-size 32000 --micro-batch-size 1"
        " --global-batch-size 64 --use-distributed-optimizer"
    )
    assert console(["predict", "--config", str(script), "--profile", "gb200", "--no-timing"]) == 0
    assert "it launches 8 ranks on a node; of NVIDIA GB200 (NVL72) that is 2 nodes of 4 GPUs" in capsys.readouterr().out
    assert console(["predict", "--config", str(script), "--profile", "h100_sxm", "--no-timing"]) == 0
    assert "it launches 8 ranks" not in capsys.readouterr().out


def test_a_search_says_what_balancing_stages_would_bring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The head of Llama 3 8B takes as long as layers of its last stage; --balance gives that stage fewer."""
    words = ["search", "--model_size", "llama3_8b", "--framework", "megatron-core", "--world_size", "64", "--fix", "pp=4"]
    assert console([*words, "--json", str(tmp_path / "a.json")]) == 0
    (hint,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("With --balance ")]
    assert console([*words, "--balance", "--json", str(tmp_path / "b.json")]) == 0
    even, chosen = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    change = chosen["balanced"]["step_s"] / even["best"][0]["step_s"] - 1
    assert change < -0.02 and hint.startswith(f"With --balance the step is {-change:.1%} shorter: ")
    lines = capsys.readouterr().out.splitlines()
    mfu = next(i for i, line in enumerate(lines) if line.startswith("MFU "))
    said = f"With layers assigned to stages (--balance, below; --export writes it) the step is {-change:.1%} shorter: "
    assert lines[mfu + 1].startswith(said)
    assert not any(line.startswith("With --balance") for line in lines)


def test_explain_says_that_it_explains_the_best_layout_of_a_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note = "explained is the best layout of a search; --own explains the config's"
    script, words = tmp_path / "run.sh", ["explain"]
    assert console([*words, "--config", str(ROOT / CONFIG), "--world_size", "16"]) == 0
    assert note in capsys.readouterr().out
    assert console([*words, "--own", "--config", str(ROOT / CONFIG), "--world_size", "16"]) == 0
    assert note not in capsys.readouterr().out
    assert console(["search", "--model_size", "llama3_8b", "--world_size", "16", "--export", str(script)]) == 0
    assert console([*words, "--config", str(script)]) == 0
    assert note not in capsys.readouterr().out  # the script holds the best layout


def test_files_of_another_layout_than_the_first_name_it(tmp_path: Path) -> None:
    """NeMo's fastest layout of Llama 3 8B may not fit; one that is sure to takes 0.2% longer, and is what the files hold."""
    words = ["--run_all_solu", "--model_size", "llama3_8b", "--framework", "nemo-24", "--world_size", 32]
    script, page, step, plain = (tmp_path / name for name in ("run.yaml", "out.html", "step.json", "out.json"))
    printed = works(*words, "--export", script, "--report", page, "--trace", step, "--json", plain)
    said = "of the layout that is sure to fit and takes as long as the first, mtp dp32, zero1/32, 32 x 1, recompute none; "
    assert f"--export, --trace: {said}" in " ".join(printed.split())
    found = json.loads(plain.read_text())
    assert found["best"][0]["verdict"] == "AT RISK" and found["remarks"][0].startswith(f"--export, --trace: {said}")
    assert found["sure_to_fit"]["layout"]["micro_batch_size"] == 1
    assert json.loads(step.read_text())["otherData"]["predicted_step_s"] == pytest.approx(found["sure_to_fit"]["step_s"])
    assert "micro_batch_size: 1\n" in script.read_text() and "micro_batch_size: 1\n" in page.read_text()
    assert "run.yaml for mtp dp32, zero1/32, 32 x 1, recompute none (" in page.read_text()
    assert "<li>400 Gbit/s per GPU between nodes assumed (--cluster states yours)</li>" in page.read_text()
    assert all(f"<p>{remark}</p>" in page.read_text() for remark in found["remarks"])
    assert "--trace: of the layout" not in works(*words)


def test_files_are_written_though_the_reader_of_the_output_leaves(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = f"--run_all_solu --model_size llama3_8b --world_size 8 --framework fsdp --json {shlex.quote(str(out))}"
    command = f"set -o pipefail; {shlex.quote(sys.executable)} simulation_train_formulaic.py {words} | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0 and not done.stderr and json.loads(out.read_text())["best"]
