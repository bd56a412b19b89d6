"""The console command foretrain: the same answers as the scripts, and one sentence for what cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from solver import command_line, console

ROOT = Path(__file__).resolve().parents[2]


def foretrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "solver.console", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_search_is_the_script_with_all_solutions(tmp_path: Path) -> None:
    options = ["--world_size", "16", "--global_batch_size", "262144"]
    assert console.main(["search", *options, "--json", str(tmp_path / "a.json")]) == 0
    assert command_line.main(["--run_all_solu", *options, "--json", str(tmp_path / "b.json")]) == 0
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert a["best"] == b["best"] and a["search"]["layouts_priced"] == b["search"]["layouts_priced"] > 1000


def test_predict_is_the_script_without(tmp_path: Path) -> None:
    assert console.main(["predict", "--world_size", "64", "--json", str(tmp_path / "a.json")]) == 0
    assert command_line.main(["--world_size", "64", "--json", str(tmp_path / "b.json")]) == 0
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert a.pop("command") and b.pop("command") and a == b


def test_validate_needs_a_file_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main(["validate", "absent.jsonl"]) == 2
    assert (
        capsys.readouterr().err == "error: absent.jsonl: no such file; it should be a file of cases, JSON objects one a line\n"
    )


def test_predict_has_no_options_of_a_search() -> None:
    done = foretrain("predict", "--plot", "x.png")
    assert done.returncode == 2 and "unrecognized arguments: --plot x.png" in done.stderr


def test_measure_passes_its_options_on() -> None:
    done = foretrain("measure", "--budget", "-1")
    assert (done.returncode, done.stderr) == (2, "gen_profiler_data.py: --budget is -1 minutes; it must be positive\n")
    assert foretrain("measure", "--nproc-per-node", "0").stderr == "error: --nproc-per-node is 0; it must be at least 1\n"
    helped = foretrain("measure", "--nproc-per-node", "2", "--help")
    assert helped.returncode == 0 and "usage: gen_profiler_data.py" in helped.stdout


@pytest.mark.parametrize(
    ("arguments", "purpose"),
    [(["--quick"], "measuring"), (["--merge", "prof_data/h100_sxm.pt", "prof_data/h100_sxm.pt"], "writing a profile")],
)
def test_without_torch_the_harness_fails_with_one_sentence(tmp_path: Path, arguments: list[str], purpose: str) -> None:
    code = (
        "import importlib.util, runpy, sys\n"
        "found = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else found(name, *rest)\n"
        "sys.modules['torch'] = None\n"  # any import of torch fails
        "runpy.run_path('gen_profiler_data.py', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, *arguments, "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    missing = "needs torch, which is missing here; run `make setup-measure` or pip install torch==2.13.0"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"gen_profiler_data.py: {purpose} {missing}\n")
    helped = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert helped.returncode == 0 and "--budget MINUTES" in helped.stdout


@pytest.mark.parametrize("words", [["fit"], ["explain"], ["compare", ".", "tp=2"], ["plan", "--tokens", "1e12"]])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--config", "configs/7B_internlm2.py", "--model_size", "7"], "--config and --model_size both name a model"),
        (["--profile", "h100_sxm", "--pre_profiling_data_path", "data.pt"], "both name a profile"),
        (["--config", "configs/7B_internlm2.py", "--json", "configs/7B_internlm2.py"], "the one would overwrite the other"),
        (["--seq_len", "0"], "seq_len is 0; it must be a whole number"),
    ],
)
def test_every_question_checks_its_options(
    words: list[str], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert console.main([*words, *options]) == 2
    assert message in capsys.readouterr().err
