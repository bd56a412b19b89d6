"""Real training steps over one, two and four gloo processes: every layout trains the same model with the same gradients."""

from __future__ import annotations

import json
import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from forked_job import forked_ranks

from profiler.errors import InputError
from profiler.files import append_line
from profiler.train.command import leave, main, measure, process_group
from profiler.train.layout import Layout
from profiler.train.model import Dims
from solver.formats.cases.reading import read_cases

DIMS = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
}
FLAGS = [word for name, value in DIMS.items() for word in (f"--{name}", str(value))] + ["--seq_len", "32"]

#: Trained one after the other by two ranks of one job. All train on the same 4 sequences per step.
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"num_micro_batches": 2},
    "ddp_recompute": {"num_micro_batches": 2, "recompute": "full"},
    "zero1": {"num_micro_batches": 2, "zero": 1},
    "fsdp": {"num_micro_batches": 2, "zero": 3},
    "fsdp_recompute": {"num_micro_batches": 1, "micro_batch_size": 2, "zero": 3, "recompute": "full"},
    "tp": {"num_micro_batches": 2, "micro_batch_size": 2, "tp": 2},
    "tp_sp": {"num_micro_batches": 2, "micro_batch_size": 2, "tp": 2, "sequence_parallel": True},
    "tp_sp_recompute": {"num_micro_batches": 1, "micro_batch_size": 4, "tp": 2, "sequence_parallel": True, "recompute": "full"},
    "pp": {"num_micro_batches": 4, "pp": 2},
    "pp_recompute": {"num_micro_batches": 2, "micro_batch_size": 2, "pp": 2, "recompute": "full"},
    "tp_sp_bf16": {"num_micro_batches": 1, "micro_batch_size": 4, "tp": 2, "sequence_parallel": True, "dtype": "bf16"},
    "fsdp_bf16": {"num_micro_batches": 2, "zero": 3, "dtype": "bf16"},
    "pp_bf16": {"num_micro_batches": 4, "pp": 2, "dtype": "bf16"},
}
#: Trained in the same way by four ranks: two kinds of parallelism at the same time.
LAYOUTS_OF_4: dict[str, dict[str, Any]] = {
    "tp_fsdp": {"num_micro_batches": 1, "micro_batch_size": 2, "tp": 2, "sequence_parallel": True, "zero": 3},
    "pp_ddp": {"num_micro_batches": 2, "pp": 2},
    "pp_fsdp": {"num_micro_batches": 2, "pp": 2, "zero": 3},
    "pp_tp": {"num_micro_batches": 2, "micro_batch_size": 2, "pp": 2, "tp": 2},
}


def train(layouts: dict[str, dict[str, Any]], output: Path) -> None:
    """Train every layout as a rank of a job; the first rank appends name, losses, norm of the first gradient and seconds."""
    with process_group() as device:
        for name, given in layouts.items():
            dims, ranks = Dims(**DIMS), int(os.environ["WORLD_SIZE"])
            took = measure(Layout(dims=dims, world_size=ranks, seq_len=32, steps=6, **given), device)
            if os.environ["RANK"] == "0":
                append_line(output, json.dumps([name, took.losses, took.gradient_norm, took.seconds]))
        leave()


def joined(jobs: list[BaseProcess]) -> None:
    for job in jobs:
        job.join(120)
        assert job.exitcode == 0


def one_rank(output: Path) -> dict[str, Any]:
    """Return what was measured of the same 4 sequences on one rank."""
    flags = [*FLAGS, "--num_micro_batches", "4", "--dtype", "fp32", "--steps", "6", "--output", str(output)]
    assert main(flags) == 0
    measured: dict[str, Any] = json.loads(output.read_text())["measured"]
    return measured


def trained_layouts(output: Path) -> dict[str, tuple[list[float], float, list[float]]]:
    """Return (losses, norm of the first gradient, seconds) of every layout."""
    for ranks, layouts in ((2, LAYOUTS), (4, LAYOUTS_OF_4)):
        joined(forked_ranks(ranks, train, layouts, output))
    lines = map(json.loads, output.read_text().splitlines())
    return {name: (losses, norm, seconds) for name, losses, norm, seconds in lines}


def test_all_layouts_train_the_same_model(tmp_path: Path) -> None:
    """Losses of six steps and the norm of the first gradient agree with one rank: communication and scaling are correct."""
    expected, trained = one_rank(tmp_path / "cases.jsonl"), trained_layouts(tmp_path / "trained.jsonl")
    assert trained.keys() == LAYOUTS.keys() | LAYOUTS_OF_4.keys()
    for name, (losses, norm, seconds) in trained.items():
        tolerance = 2e-2 if "bf16" in name else 1e-4
        assert losses == pytest.approx(expected["losses"], rel=tolerance), name
        assert norm == pytest.approx(expected["gradient_norm"], rel=tolerance), name
        assert losses[-1] < losses[0] - 0.2, name
        assert len(seconds) == 3 and min(seconds) > 0, name


def command(flags: list[str]) -> None:
    assert main(flags) == 0
    leave()


def test_command_writes_a_case_that_validation_reads(tmp_path: Path) -> None:
    output = tmp_path / "cases.jsonl"
    layout = ["--tp", "2", "--sequence_parallel", "--dtype", "bf16", "--steps", "5", "--output", str(output)]
    joined(forked_ranks(2, command, [*FLAGS, *layout]))
    case = json.loads(output.read_text())
    assert case["hardware"] == "data" and case["cluster"] == {"gpus_per_node": 2}
    assert case["measured"]["repeats"] == 2 and case["measured"]["step_s"] > 0 and case["measured"]["spread"] >= 0
    (read,) = read_cases(output)
    assert read.skipped is None and read.strategy is not None and read.model is not None
    assert (read.strategy.tp, read.strategy.tp_mode, read.strategy.dp, read.strategy.precision) == (2, "msp", 1, "bf16")
    assert not [assumption for assumption in read.assumptions if assumption.startswith("not read")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "3"], "not a multiple of tp 3"),
        (["--sequence_parallel"], "sequence_parallel needs tp"),
        (["--zero", "1"], "dp is 1"),
        (["--steps", "3"], "at least 4"),
        (["--micro_batch_size", "0"], "micro_batch_size must be at least 1"),
        (["--num_attention_heads", "5"], "num_attention_heads 5"),
    ],
)
def test_impossible_options_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FLAGS, *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world_size": 4, "tp": 2}, "use --zero 3"),
        ({"world_size": 2, "pp": 2}, "num_micro_batches 1 is less than pp 2"),
        ({"world_size": 4, "tp": 4}, "num_key_value_heads 2 is not a multiple of tp 4"),
        ({"world_size": 2, "tp": 2, "sequence_parallel": True, "seq_len": 33}, "seq_len 33"),
        ({"world_size": 3, "pp": 3, "num_micro_batches": 3}, "num_hidden_layers 2 is not a multiple of pp 3"),
    ],
)
def test_impossible_layouts(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Layout(**{"dims": Dims(**DIMS), "seq_len": 32, **given}).check()


def test_lines_are_appended_once(tmp_path: Path) -> None:
    """Two ranks with OOM write one case, not two; other lines stay."""
    path = tmp_path / "deep" / "cases.jsonl"
    for line in ('{"a": 1}', '{"b": 2}', '{"b": 2}'):
        append_line(path, line)
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n'
    path.write_text('{"a": 1}')  # whose line was not ended
    append_line(path, '{"c": 3}')
    assert path.read_text() == '{"a": 1}\n{"c": 3}\n'
    with pytest.raises(InputError, match="cannot write"):
        append_line(tmp_path, "x")
