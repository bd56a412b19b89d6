"""The console command foretrain: the same answers as the scripts, and one sentence for what cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from solver.commands import command_line, console

ROOT = Path(__file__).resolve().parents[2]


def foretrain(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "solver.commands.console", *arguments]
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


def test_predict_has_no_options_of_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        console.main(["predict", "--plot", "x.png"])
    assert end.value.code == 2 and "unrecognized arguments: --plot x.png" in capsys.readouterr().err


def test_measure_passes_its_options_on() -> None:
    done = foretrain("measure", "--nproc-per-node", "1", "--budget", "-1")  # under torchrun: tests of the harness
    assert done.returncode and "gen_profiler_data.py: --budget is -1 minutes; it must be positive\n" in done.stderr
    helped = foretrain("measure", "--help")
    assert helped.returncode == 0 and "usage: gen_profiler_data.py" in helped.stdout


def test_measuring_takes_a_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main(["measure", "--nproc-per-node", "0"]) == 2
    assert capsys.readouterr().err == "error: --nproc-per-node is 0; it must be at least 1\n"


@pytest.mark.parametrize(
    ("arguments", "purpose"),
    [
        (["--quick"], "measuring"),
        (["--merge", "prof_data/h100_sxm.pt", "prof_data/h100_sxm.pt"], "writing a profile"),
        (["--help"], ""),
    ],
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
    if not purpose:
        assert done.returncode == 0 and "--budget MINUTES" in done.stdout
        return
    missing = "needs torch, which is missing here; run `make setup-measure` or pip install torch==2.13.0"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"gen_profiler_data.py: {purpose} {missing}\n")


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


def test_names_that_no_file_has_and_values_that_are_none_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    run, name = ["predict", "--config", str(ROOT / "configs" / "7B_internlm2.py"), "--world_size", "128"], "x" * 300
    for words, message in (
        ([*run, "--learned", name], "no file has such a name: File name too long"),
        ([*run, "--json", f"{name}/a.json"], "no file has such a name: File name too long"),
        ([*run, "--as=--"], "--as needs a value"),
        ([*run, "--vocab_size", "0"], "vocab_size is 0; it must be a positive"),
        ([*run, "--seq_len", "8k"], "argument --seq_len is '8k'; write it out, as 8000 or 8192"),
        ([*run, "--seq_len", "1e30"], "argument --seq_len is '1e30'; it must be a whole number"),
        (["plan", "--tokens", "2.5T"], "argument --tokens is '2.5T'; write it out, as 2.5e+12"),
        (["plan", "--tokens", "1e9", "--env=--"], "give each variable once, as in --env TP=4"),
        (["plan", "--tokens", "1e9", "--max_gpus", "100000000"], "must be a whole number of at least 1 and at most 1048576"),
    ):
        try:
            status: Any = console.main(words)
        except SystemExit as end:  # of argparse
            status = end.code
        assert status == 2 and message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "both"),
    [
        ("health a.json --config C --world_size 128 --json a.json", "LOG and --json"),
        ("import a.json --config C --world_size 128 --runs a.json", "LOG and --runs"),
        ("search --cluster a.json --json a.json", "--cluster and --json"),
        ("search --as a.json --csv a.json", "--as and --csv"),
        ("explain --measurements x.csv --json x.csv", "--json and --measurements"),
        ("learn a.json --output a.json", "RUNS and --output"),
        ("validate a.json --json a.json", "FILE and --json"),
    ],
)
def test_no_output_replaces_an_input_or_another_output(
    words: str, both: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs" / "7B_internlm2.py")
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text('{"step_s": 16.1}')
    assert console.main([config if word == "C" else word for word in words.split()]) == 2
    assert f"error: {both} are both " in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["a.json"] and Path("a.json").read_text() == '{"step_s": 16.1}'


@pytest.mark.parametrize("model", ["", "qwen3_30b_a3b"])
def test_a_job_is_imported_once(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same log again adds nothing, and another job of its name gets a number."""
    log, runs = tmp_path / "job.json", tmp_path / "runs.jsonl"
    config = str(ROOT / "configs" / "7B_internlm2.py")
    if model:
        config = str(tmp_path / "run.json")
        Path(config).write_text(json.dumps({"model": model, "layout": {"dp": 128, "ep": 8, "micro_batch_size": 1}}))
    words = ["import", str(log), "--config", config, "--world_size", "128", "--runs", str(runs)]
    for step, said in (
        (16.1, f"appended to {runs}\n"),
        (16.1, f"already in {runs}\n"),
        (16.4, f"appended to {runs} as job-2\n"),
        (16.1, f"already in {runs}\n"),
        (16.4, f"already in {runs}\n"),
    ):
        log.write_text(json.dumps({"step_s": step}))
        assert console.main(words) == 0
        assert capsys.readouterr().out.replace("\n", "").endswith(said.replace("\n", ""))
    found = [json.loads(line) for line in runs.read_text().splitlines()]
    assert [(one["id"], one["measured"]["step_s"]) for one in found] == [("job", 16.1), ("job-2", 16.4)]
    runs.write_text("# my notes\n")
    assert console.main(words) == 2
    assert "holds something else than runs" in capsys.readouterr().err and runs.read_text() == "# my notes\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("learn a.json a.json --output mine.json", "RUNS names a.json twice"),
        ("learn a.json --output mine.txt", "--output mine.txt: the file must end in .json"),
    ],
)
def test_files_that_learn_is_given(
    words: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text("{}\n")
    assert console.main(words.split()) == 2
    assert message in capsys.readouterr().err and not Path("mine.txt").exists()


@pytest.mark.parametrize(
    ("model", "framework", "why"),
    [
        ("gpt3_175b", "torchtitan", "torchtitan-2026-02 may not run this as it is; --export cannot write it: gpt3"),
        ("gemma3_12b", "nanotron", "nanotron's YAML has no place for head_dim 256"),
        ("llama3_8b", "torchtitan", ""),
        ("llama3_8b", "megatron-core", ""),
        ("gpt3_175b", "megatron-lm-2023", ""),  # which no file is written for
    ],
)
@pytest.mark.parametrize("command", [["predict"], ["search", "--top", "1"]])
def test_a_layout_that_no_file_of_its_framework_states_is_named(
    command: list[str], model: str, framework: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = [*command, "--model_size", model, "--framework", framework, "--world_size", "64", "--json", str(out)]
    assert console.main(words) == 0
    shown, found = " ".join(capsys.readouterr().out.split()), json.loads(out.read_text())
    assert (why in shown and why in found["not_expressed"]) if why else ("may not run" not in shown + str(found.keys()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "search --model_size llama3_8b --approximate",
            "--approximate changes nothing: llama3_8b has no soft caps; leave it out",
        ),
        ("export e.sh --model_size llama3_8b --fix tp=2", "--fix fixes axes of a search; give --best too"),
        ("search --max-tp 0", "--max-tp is 0; it must be a positive whole number"),
        ("search --export x.foo", "--export x.foo: a layout of internevo-2024 is written as .py"),
        (
            "serch --world_size 8",
            "error: no command is called 'serch' (did you mean 'search'?); choose one of search, predict, ",
        ),
        ("--world_size 64", "the command comes first: foretrain COMMAND --world_size ..."),
        ("search --max_tp 0", "--max-tp is 0; it must be a positive whole number"),
        ("search --world-size 0", "world_size is 0; it must be a whole number"),
        ("search --health x.log", "unrecognized arguments: --health x.log"),
        ("search --framework megatron-core-0.99", "'0.99' of 'megatron-core-0.99' is no release that is described"),
    ],
)
def test_options_that_change_nothing_or_belong_elsewhere(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = console.main(words.split())
    except SystemExit as end:
        status = end.code
    assert status == 2
    shown = capsys.readouterr()
    assert message in shown.err and not shown.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--world_size 64 --top 3", "--top belongs to a search; give --run_all_solu too"),
        ("--validate a.jsonl --set precision=fp8", "--set has no effect with --validate"),
        ("--validate a.jsonl --no-timing", "--no-timing has no effect with --validate"),
        ("--validate a.jsonl --top 3", "--top has no effect with --validate"),
    ],
)
def test_options_of_the_script_that_change_nothing(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(words.split()) == 2
    assert message in capsys.readouterr().err
