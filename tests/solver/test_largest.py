"""What fits: against trying every value, at most the model's positions, and on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from solver.api import configured_strategy, estimate, load_problem
from solver.commands.console import main
from solver.formats.config_file import load_run_config
from solver.largest import fewest_gpus, largest_micro_batch, longest_sequence

CONFIG = load_run_config("configs/7B_internlm2.py")  #: tp 2, 4 micro batches of 2
PROBLEM = load_problem(CONFIG, 64, profile="h100_sxm")
LAYOUT = configured_strategy(PROBLEM, CONFIG)


def test_micro_batch_against_every_size() -> None:
    verdicts = {}
    each = LAYOUT.micro_batch_size * LAYOUT.num_micro_batches
    for size in [size for size in range(1, each + 1) if each % size == 0]:
        found = estimate(PROBLEM, [LAYOUT.replace(micro_batch_size=size, num_micro_batches=each // size)])
        verdicts[size] = found.memory.verdict(0, PROBLEM.cluster.memory_bytes)
    limit = largest_micro_batch(PROBLEM, LAYOUT)
    assert limit.surely and limit.likely and limit.breaks
    assert limit.surely.value == max(size for size, verdict in verdicts.items() if verdict == "FITS")
    assert limit.likely.value == max(size for size, verdict in verdicts.items() if verdict != "OUT OF MEMORY")
    assert limit.breaks.value == min(size for size, verdict in verdicts.items() if verdict == "OUT OF MEMORY")


def test_sequence_against_every_length() -> None:
    verdicts = {}
    for length in range(1024, 20 * 1024, 1024):
        problem = PROBLEM.with_run(seq_len=length)
        found = estimate(problem, [LAYOUT.replace(seq_len=length)])
        verdicts[length] = found.memory.verdict(0, problem.cluster.memory_bytes)
    limit = longest_sequence(PROBLEM, LAYOUT)
    assert limit.surely and limit.likely and limit.breaks
    assert limit.surely.value == max(length for length, verdict in verdicts.items() if verdict == "FITS")
    assert limit.likely.value == max(length for length, verdict in verdicts.items() if verdict != "OUT OF MEMORY")
    assert limit.breaks.value == limit.likely.value + 1024


def test_sequences_beyond_the_models_positions_are_named() -> None:
    short = replace(PROBLEM, model=PROBLEM.model.replace(max_position_embeddings=5000))
    limit, free = longest_sequence(short, LAYOUT), longest_sequence(PROBLEM, LAYOUT)
    assert limit.surely and free.surely and limit.surely.value == free.surely.value > 5000
    assert "states 5,000 positions" in limit.note and free.note == ""


def test_sequences_of_many_ranks_begin_where_ranks_have_enough_tokens() -> None:
    # 128 tokens for each of 32 ranks: 1,024 in all run on none, and are no reason to try no more
    problem = load_problem("configs/models/llama3_8b.json", 32, profile="h100_sxm", framework="megatron-core")
    layout = problem.layout(tp=8, cp=4, dp=1, tp_mode="msp", zero=1, num_micro_batches=1, micro_batch_size=1)
    limit = longest_sequence(problem, layout)
    assert limit.surely and limit.surely.value >= 8192


def test_fewer_gpus_shard_less() -> None:
    limit = fewest_gpus(PROBLEM, CONFIG, LAYOUT.global_batch_sequences)
    assert limit.surely and limit.breaks and limit.breaks.value < limit.surely.value <= 64
    fewer = limit.surely.solutions.layouts.strategy(0, limit.surely.solutions.problem.run)
    assert (fewer.tp, fewer.pp, fewer.global_batch_sequences) == (LAYOUT.tp, LAYOUT.pp, LAYOUT.global_batch_sequences)
    whole = estimate(PROBLEM, [LAYOUT]).memory
    assert limit.breaks.solutions.memory.device[0] > limit.surely.solutions.memory.device[0] > whole.device[0]


def test_experts_can_need_more_than_one_data_parallel_rank() -> None:
    config = load_run_config("configs/models/gpt_oss_20b.json")
    config = replace(config, layout={"ep": 8, "framework": "megatron-core", "micro_batch_size": 1})
    limit = fewest_gpus(load_problem(config, 32, profile="h200_sxm"), config, 64)
    assert limit.surely and not limit.breaks and limit.surely.value == 8
    assert limit.ends.startswith("with one data-parallel rank it does not run: ") and "ep 8" in limit.ends


def test_a_batch_of_one_micro_batch_grows_until_it_breaks() -> None:
    one = LAYOUT.replace(micro_batch_size=1, num_micro_batches=1)
    limit = largest_micro_batch(PROBLEM, one)
    assert limit.surely and limit.breaks and limit.breaks.value == (limit.likely or limit.surely).value + 1 > 2
    assert limit.breaks.solutions.tokens[0] == one.tokens * limit.breaks.value


def test_more_gpus_are_tried_where_the_own_do_not_fit() -> None:
    large = load_run_config("configs/models/llama3_8b.json")
    layout = replace(large, layout={"zero": 3, "framework": "torchtitan", "micro_batch_size": 1})
    problem = load_problem(layout, 1, profile="h100_sxm")
    limit = fewest_gpus(problem, layout, 64)
    assert limit.surely and limit.breaks and limit.breaks.value >= 1
    assert limit.surely.value > 1 and limit.surely.value == 2 * limit.breaks.value


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fit.json"
    assert main(["fit", "--config", "configs/7B_internlm2.py", "--world_size", "64", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    for row in json.loads(out.read_text())["limits"]:
        assert row["surely"]["verdict"] == "FITS" and row["breaks"]["verdict"] == "OUT OF MEMORY"
        assert f"{row['of']}: {row['surely']['value']:,} fits: " in shown
        assert f"{row['breaks']['value']:,} does not fit: {row['breaks']['peak_memory_bytes'] / 2**30:.1f} GiB" in shown
    assert main(["fit", "--config", "configs/7B_internlm2.py", "--world_size", "63"]) == 2
    assert "does not divide world_size 63" in capsys.readouterr().err


def test_nothing_fits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fit", "--config", "configs/7B_internlm2.py", "--world_size", "64", "--memory_limit_gib", "10"]
    assert main(words) == 0
    assert "micro batch: none that was tried fits; 1 does not fit: " in capsys.readouterr().out
