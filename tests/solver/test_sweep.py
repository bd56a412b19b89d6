"""A sweep: rows of single searches, one table by one process, by two and by a Dask cluster, killed and resumed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from profiler.errors import InputError
from profiler.files import locked
from solver import load_problem, search
from solver.commands.console import main
from solver.formats.model_file import CONFIGS
from solver.options.journal import inputs_of
from solver.report.explain import explain
from solver.sweep import Options, Point, points, price, sweep

MODELS = ["qwen3_0_6b"]
WORDS = ["--models", ",".join(MODELS), "--world_sizes", "8,16", "--global_batch_sizes", "131072,262144,1000000"]
PROBLEMS = 6


def table(tmp_path: Path, name: str, *options: str) -> bytes:
    out = tmp_path / name
    assert main(["sweep", str(out), *WORDS, *options]) == 0
    assert not out.with_name(name + ".partial").exists()
    return out.read_bytes()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return table(tmp_path_factory.mktemp("alone"), "out.csv", "--jobs", "1")


def test_rows_are_those_of_single_searches(alone: bytes) -> None:
    rows = list(csv.DictReader(alone.decode().splitlines()))
    assert len(rows) == PROBLEMS
    for row in rows:
        if row["global_batch_size"] == "1000000":
            assert row["reason"] == "1000000 tokens are not a whole number of sequences of 4096" and not row["tgs"]
            continue
        problem = load_problem(f"configs/models/{row['model']}.json", int(row["world_size"]), profile=row["machine"])
        best = search(problem, int(row["global_batch_size"]) // 4096, 1).best
        low, high = explain(best, 0).interval
        assert float(row["step_s"]) == float(best.times.seconds[0])
        assert (float(row["interval_low_s"]), float(row["interval_high_s"])) == (low, high)
        assert int(row["tp"]) * int(row["cp"]) * int(row["pp"]) * int(row["dp"]) == int(row["world_size"])
        assert row["verdict"] in ("FITS", "AT RISK") and row["reason"] == ""


def test_rows_without_a_layout_state_their_problem_too() -> None:
    """So that they can be joined with others: the length and framework that the model's file has."""
    found = [price(Point("llama3_8b", None, "h100_sxm", None, world, 4_194_304), Options()) for world in (1, 8)]
    assert found[0]["reason"] and not found[0]["tgs"] and found[1]["tgs"] > 0 and found[1]["reason"] is None
    for name in ("seq_len", "framework"):
        assert found[0][name] == found[1][name] is not None


def test_a_sweep_without_any_layout_fails_and_leaves_the_last_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.csv"
    out.write_text("what was there")
    assert main(["sweep", str(out), "--models", "llama3_405b", "--world_sizes", "1", "--jobs", "1"]) == 2
    said = capsys.readouterr()
    assert f"no problem has a layout, so that {out} is left as it is: none of " in said.err
    assert "layouts of llama3_405b fits on 1 GPU: the smallest needs" in said.err
    assert "llama3_405b" in said.out and out.read_text() == "what was there" and list(tmp_path.iterdir()) == [out]


def test_of_two_sweeps_of_one_table_the_second_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.csv"
    with locked(tmp_path / "out.csv.partial"):
        assert main(["sweep", str(out), *WORDS, "--jobs", "1"]) == 2
    assert "out.csv.partial: another process is writing it" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_two_processes_write_the_same_table(alone: bytes, tmp_path: Path) -> None:
    assert table(tmp_path, "out.csv", "--jobs", "2") == alone


def test_a_dask_cluster_writes_the_same_table(alone: bytes, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1", scheduler_port=0
    ) as cluster:
        assert table(tmp_path, "out.csv", "--scheduler", cluster.scheduler_address) == alone


def test_a_killed_sweep_goes_on(alone: bytes, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    journal = tmp_path / "out.csv.partial"
    command = [sys.executable, "-m", "solver.commands.console", "sweep", str(out), *WORDS, "--jobs", "1"]
    code = f"import sys; from solver.commands.console import main; sys.exit(main({command[3:]!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, cwd=os.getcwd())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not journal.exists() or journal.read_text().count("\n") < 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    lines = journal.read_text().count("\n")
    assert 3 <= lines < PROBLEMS + 1 and not out.exists()
    with journal.open("a") as file:
        file.write('{"point": {"model": "cut')  # as a line looks that was being written
    assert table(tmp_path, "out.csv", "--jobs", "1") == alone


def test_what_a_journal_holds_is_not_priced_again(tmp_path: Path) -> None:
    journal, asked = (
        tmp_path / "j",
        points(
            model=["qwen3_0_6b"],
            seq_len=[None],
            machine=["h100_sxm"],
            framework=[None],
            world_size=[8],
            global_batch_size=[131072],
        ),
    )
    rows = sweep(asked, Options(), journal)
    lines = journal.read_text().splitlines()
    head = json.loads(lines[0])
    assert head["options"] == vars(Options()) and len(lines) == 2
    assert set(head["inputs"]) == {"program", "model qwen3_0_6b", "machine h100_sxm"}
    journal.write_text(lines[0] + "\n" + json.dumps({"point": vars(asked[0]), "row": {"tgs": 1.0}}) + "\n")
    assert sweep(asked, Options(), journal) == [{"tgs": 1.0}] != rows
    with pytest.raises(InputError) as caught:
        sweep(asked, Options(fix="tp=2"), journal)
    assert str(caught.value) == (
        f"{journal} is an unfinished sweep without --fix, but this one is with --fix tp=2: finish that with its own options, "
        "or delete the file"
    )
    for text in ("what is this\n", "[]\n", lines[0] + '\n{"point": {"colour": 1}, "row": {}}\n', '{"options": {}}\n', "1\n"):
        journal.write_text(text)
        with pytest.raises(InputError, match="is no unfinished sweep"):
            sweep(asked, Options(), journal)


def test_rows_of_other_inputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's file, the cluster's, or the program has changed since: which of them is said, and nothing is priced."""
    journal, model, cluster = tmp_path / "j", tmp_path / "model.json", tmp_path / "cluster.json"
    described = json.loads(Path("configs/models/qwen3_0_6b.json").read_text())
    model.write_text(json.dumps(described))
    cluster.write_text('{"hardware": "h100_sxm", "inter_node_gbit_per_gpu": 200}')
    one = Point(str(model), None, str(cluster), None, 16, 131072)
    rows = sweep([one], Options(), journal)
    model.write_text(json.dumps(described, indent=4))  # says the same
    assert sweep([one], Options(), journal) == rows

    def refused() -> str:
        with pytest.raises(InputError) as caught:
            sweep([one], Options(), journal)
        return str(caught.value)

    told = f"{journal} is an unfinished sweep whose rows were computed from another content of the {{}}: put that back, or"
    model.write_text(json.dumps(described | {"num_hidden_layers": 14}))
    assert refused().startswith(told.format(f"model {model}"))
    model.write_text(json.dumps(described))
    cluster.write_text('{"hardware": "h100_sxm", "inter_node_gbit_per_gpu": 100}')
    assert refused().startswith(told.format(f"machine {cluster}"))
    cluster.write_text('{"hardware": "h200_sxm", "inter_node_gbit_per_gpu": 200}')
    assert refused().startswith(told.format(f"machine {cluster}"))
    cluster.write_text('{"hardware": "h100_sxm", "inter_node_gbit_per_gpu": 200}')
    another = Point("qwen3_0_6b", None, "h100_sxm", None, 8, 131072)
    assert sweep([one, another], Options(), journal)[0] == rows[0]  # further models and machines may be added
    assert [sorted(json.loads(line)) for line in journal.read_text().splitlines()][2:] == [["inputs"], ["point", "row"]]
    assert sweep([one], Options(), journal) == rows
    monkeypatch.setattr("solver.options.journal.source_digest", lambda _: "another release")
    assert refused().startswith(told.format("program"))


def test_a_device_file_is_a_machine(tmp_path: Path) -> None:
    """The file of a known device gives that device's row; with half its memory bandwidth another one, in another sweep."""
    chip = tmp_path / "chip.json"
    text = (CONFIGS / "devices" / "gb300.json").read_text()
    chip.write_text(text)
    own, known = (Point("qwen3_0_6b", None, machine, None, 8, 131072) for machine in (str(chip), "gb300"))
    rows = sweep([own, known], Options(), tmp_path / "journal")
    assert [row.pop("machine") for row in rows] == [str(chip), "gb300"] and rows[0] == rows[1]
    values = json.loads(text)
    slower = values | {"memory_bandwidth_gb_s": values["memory_bandwidth_gb_s"] / 2}
    chip.write_text(json.dumps(slower))
    with pytest.raises(InputError, match="another content of the machine"):
        sweep([own], Options(), tmp_path / "journal")
    (row,) = sweep([own], Options(), tmp_path / "another")
    assert row["step_s"] > 1.05 * rows[0]["step_s"]


def test_a_cluster_and_options_are_those_of_a_search() -> None:
    point = Point("llama3_8b", 2048, "a100_50g", "megatron-core", 16, 262144)
    row = price(point, Options(set="precision=bf16", fix="tp=4", memory_limit_gib=60.0))
    problem = load_problem(
        "configs/models/llama3_8b.json", 16, cluster="a100_50g", seq_len=2048, memory_limit_gib=60, framework="megatron-core"
    )
    best = search(problem, 128, 1, fixed={"tp": 4}).best
    assert (row["tp"], row["tgs"]) == (4, float(best.tgs[0])) and row["peak_memory_bytes"] < 60 * 2**30


def test_pictures_and_parquet(alone: bytes, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    out, picture = tmp_path / "out.parquet", tmp_path / "out.png"
    assert main(["sweep", str(out), *WORDS, "--jobs", "1", "--plot", str(picture)]) == 0
    frame = pandas.read_parquet(out)
    rows = list(csv.DictReader(alone.decode().splitlines()))
    assert list(frame.columns) == list(rows[0])
    assert [None if value != value else value for value in frame["step_s"]] == [
        float(r["step_s"]) if r["step_s"] else None for r in rows
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["out.txt", "--models", "llama3_8b", "--world_sizes", "8"], "out.txt: a table is a .csv or a .parquet file"),
        (["/dev/null/a/out.csv", "--models", "llama3_8b", "--world_sizes", "8"], "Not a directory"),
        (["out.csv", "--models", "llama9", "--world_sizes", "8"], "no model is called 'llama9'"),
        (
            ["out.csv", "--models", "llama3_8b", "--world_sizes", "8,eight"],
            "--world_sizes 8,eight: eight is no positive whole number",
        ),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "-8"], "--world_sizes -8: -8 is no positive whole number"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8,8"], "--world_sizes 8,8: give names, each once"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--machines", "h900"], "no cluster is called 'h900'"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--machines", "h900"], "; profiles are a100_pcie_80gb, "),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--machines", "chip.json"], "chip.json: name is missing"),
        (["out.csv", "--models", "none.json", "--world_sizes", "8"], "--models none.json: no such file"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--frameworks", "foo"], "no framework is called 'foo'"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--set", "precision=fp7"], "precision is 'fp7'"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--plot", "out.csv"], "OUT and --plot are both out.csv"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--fix", "tp=0"], "tp is 0"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--jobs", "0"], "jobs is 0"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--plot", "a.txt"], "--plot a.txt: the file must end in"),
        (["out.csv", "--models", "llama3_8b", "--world_sizes", "8", "--scheduler", "nothing"], "no Dask scheduler answers at"),
    ],
)
def test_wrong_options(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--scheduler" in options:
        pytest.importorskip("distributed")
    monkeypatch.chdir(tmp_path)
    Path("chip.json").write_text('{"peak_tflops": {"bf16": 900}}')
    assert main(["sweep", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_config_has_the_same_batch_wherever_it_is_priced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Predicted, searched, explained and swept: 16 replicas of tp 2 on 32 GPUs take 2 sequences 8 times, 8 on 16 half of it."""
    config, found = tmp_path / "run.json", tmp_path / "out.json"
    layout = {"framework": "megatron-core", "tp": 2, "micro_batch_size": 2, "num_micro_batches": 8, "seq_len": 2048}
    config.write_text(json.dumps({"model": "qwen3_0_6b", "layout": layout}))
    asked = ["--config", str(config), "--world_size", "32"]
    for words in (["predict"], ["search"], ["search", "--search", "tp"], ["explain"], ["explain", "--own"]):
        assert main([*words, *asked, "--json", str(found)]) == 0
        best = json.loads(found.read_text())["best"][0]["layout"]
        assert best["global_batch_sequences"] == 256, words
        searches = words != ["predict"] and "--own" not in words
        assert ("global batch: the config's own, 256 sequences" in capsys.readouterr().out) == searches
    out = tmp_path / "out.csv"
    options = ["--models", str(config), "--world_sizes", "16,32", "--jobs", "1", "--plot", str(tmp_path / "out.png")]
    assert main(["sweep", str(out), *options]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [int(row["global_batch_size"]) // int(row["seq_len"]) for row in rows] == [128, 256]


def test_a_config_that_the_gpus_do_not_hold_says_that_its_batch_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, found = tmp_path / "run.json", tmp_path / "out.json"
    config.write_text(json.dumps({"model": "qwen3_0_6b", "layout": {"tp": 2, "pp": 4, "num_micro_batches": 8}}))
    assert main(["search", "--config", str(config), "--world_size", "4", "--json", str(found)]) == 0
    assert json.loads(found.read_text())["best"][0]["layout"]["global_batch_sequences"] == 4_194_304 // 4096
    said = "global batch: the default, because the config's tp * cp * pp do not divide 4 GPUs"
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_file_that_needs_a_number_of_gpus_is_told_from_its_edited_self(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seq_len = 4096")  # refused, for want of all else
    before = inputs_of([str(path)], [])[f"model {path}"]
    path.write_text("seq_len = 8192")
    assert inputs_of([str(path)], [])[f"model {path}"] != before


def test_the_default_batch_is_that_of_a_search_on_every_number_of_gpus() -> None:
    # 4,194,304 tokens are 1,024 sequences of 4,096; the multiple of 96 GPUs next to them is 1,056
    row = price(Point("llama3_8b", None, "h100_sxm", None, 96, None), Options())
    assert (row["global_batch_size"], row["reason"]) == (1056 * 4096, None)
