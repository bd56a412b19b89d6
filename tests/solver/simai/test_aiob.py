"""Kernel-time files of aiob: read finished and raw, and compute columns filled as AICB fills them and as kernels cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simai_files import DATA, table_of, text_of

from profiler.errors import InputError
from solver.simai.aiob import (
    Kernel,
    KernelTimes,
    compute_cache,
    kernel_times_text,
    parse_kernel_times,
    read_kernel_times,
    write_kernel_times,
)
from solver.simai.aiob_fill import block_times, fill_csv, fill_csv_as_aicb, fill_text, fill_text_as_aicb
from solver.simai.workload_csv import CsvWorkload, parse_workload_csv
from solver.simai.workload_text import Pass, Row, TextWorkload, parse_workload_text

EXAMPLE = DATA / "aiob_Example.txt"
TIMES = read_kernel_times(EXAMPLE)


def test_the_example_is_written_back_as_it_was(tmp_path: Path) -> None:
    write_kernel_times(tmp_path / "a.txt", TIMES)
    assert (tmp_path / "a.txt").read_text() == EXAMPLE.read_text()
    assert TIMES.average("atten_flash") == 512 and TIMES.average("absent") == 0 and TIMES.first == "train_iter:10"


def test_aicbs_stages() -> None:
    cache = compute_cache(TIMES)
    assert cache["attention_forward"] == cache["attention_backward"] == (70 + 889 + 512 + 349) * 1000
    assert cache["mlp_forward"] == (71 + 1408 + 257 + 742) * 1000
    assert (cache["grad_forward"], cache["grad_backward"], cache["logit_time"]) == (16_647_000, 17_374_000, 12_824_000)
    assert compute_cache(TIMES, recompute=True)["attention_forward"] == (70 + 889 + 2 * 512 + 349) * 1000


RAW = """train_iter:3
{"Emb": [{"time_gpu": 10}, {"time_gpu": 40}, {"time_gpu": 20.5}], "mlp_gelu": [{"time_gpu": 7}]}
{"Emb": [{"time_gpu": 30}]}"""


def test_raw_samples_above_three_times_the_fastest_are_left_out() -> None:
    assert parse_kernel_times(RAW, "x").kernels == (Kernel("Emb", 30, 10, (10 + 20.5 + 30) / 3), Kernel("mlp_gelu", 7, 7, 7.0))
    listed = 'train_iter:1\n[{"Emb": [{"time_gpu": 5}]}]'
    assert parse_kernel_times(listed, "x") == KernelTimes((Kernel("Emb", 5, 5, 5.0),), "train_iter:1")
    finished = kernel_times_text(parse_kernel_times(RAW, "x"))
    assert parse_kernel_times(finished, "x").kernels == parse_kernel_times(RAW, "x").kernels
    served = "inference_term:decode\n\nEmb:\n    time_gpu_max: 2\n    time_gpu_min: 1\n    time_gpu_avg: 1.5\n"
    assert parse_kernel_times(served, "x").first == "inference_term:decode"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x, line 1: is ''; an aiob kernel-time file starts with a line such as train_iter:10"),
        ("train_iter:1\n", "x: holds no kernel; a kernel is a line such as Emb: and its time_gpu_max, _min and _avg"),
        ("train_iter:1\nEmb:\n    time_gpu_max: 2\n", "x, line 4: Emb has no time_gpu_min; give max, min and avg"),
        ("train_iter:1\nEmb 3\n", "x, line 2: is 'Emb 3'; it must be a kernel's name or its indented time_gpu_avg: 12"),
        ("train_iter:1\nEmb:\n    time_gpu_max: x\n", "x, line 3: time_gpu_max is 'x'; it must be a number of microseconds"),
        ("train_iter:1\nEmb:\n    time_gpu_max: -1\n", "x, line 3: time_gpu_max is '-1'; it must be a number of microseconds"),
        (EXAMPLE.read_text() + EXAMPLE.read_text().split("\n", 1)[1], "x: has two sections Emb; leave one out"),
        ('train_iter:1\n{"Emb": [{"time_gpu": 1]}', "x: is no valid JSON after its first line"),
        ('train_iter:1\n{"Emb": []}', "x: 'Emb' has no samples; it must be a list of {\"time_gpu\": microseconds}"),
        ('train_iter:1\n{"Emb": 3}', "x: 'Emb' has no samples"),
        ("train_iter:1\n[3]", "x: holds JSON that names no kernels; it must be objects such as"),
        ('train_iter:1\n{"Emb": [{"time_gpu": true}]}', "x: Emb: time_gpu is True; it must be a number of microseconds"),
    ],
)
def test_wrong_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_kernel_times(text, "x")
    assert message in str(error.value) and "\n" not in str(error.value)


FILLED = (
    "deepseek16b_tp1_ep16_ws2048_gbs4096_seq4096_sp",
    "gpt13b_tp4_pp1_ws4_gbs2_seq4096",
    "gpt175b_tp8_pp8_ws128_gbs32_seq2048_sp",
    "gpt7b_tp2_pp1_ws4096_gbs8192_seq4096",
    "gpt7b_tp2_pp1_ws4096_gbs8192_seq4096_sp",
    "mixtral8x7b_tp2_ep8_ws128_gbs128_seq2048_sp",
)


def emptied(workload: TextWorkload) -> TextWorkload:
    """The workload with 0 and 1 ns of compute, as AICB writes them without times."""

    def least(part: Pass) -> Pass:
        return replace(part, compute=min(part.compute, 1))

    rows = (
        replace(r, forward=least(r.forward), input_grad=least(r.input_grad), weight_grad=least(r.weight_grad))
        for r in workload.rows
    )
    return replace(workload, rows=tuple(rows))


@pytest.mark.parametrize("name", FILLED)
def test_rows_are_filled_as_aicb_fills_them(name: str) -> None:
    theirs = parse_workload_text(text_of(f"{name}_aiobExample"), name)
    assert emptied(theirs) != theirs == fill_text_as_aicb(emptied(theirs), TIMES)


def test_items_are_filled_as_aicb_fills_them() -> None:
    name = "gpt13b_tp4_pp1_ws4_gbs2_seq4096"
    empty = parse_workload_csv(table_of(f"{name}_comp"), name)
    theirs = parse_workload_csv(table_of(f"{name}_aiobExample_filled"), name)
    filled = [item.elapsed for item in fill_csv_as_aicb(empty, TIMES).items if item.kind == "computation"]
    assert filled == [item.elapsed for item in theirs.items if item.kind == "computation"]
    assert sum(filled) == 2_063_040_000  # each of the six GEMMs of a block takes the time of the whole block


def total(workload: CsvWorkload) -> float:
    return sum(item.elapsed for item in workload.items if item.kind == "computation")


def test_our_items_take_a_blocks_kernels_once() -> None:
    empty = parse_workload_csv(table_of("gpt13b_tp4_pp1_ws4_gbs2_seq4096_comp"), "x")
    gemms, flash, others = 889 + 349 + 1408 + 742, 512, 70 + 71 + 257
    a_layer = (3 * gemms + (1 + 2.5) * flash + 2 * others) * 1000  # forward and input gradient; weight gradient of GEMMs
    assert total(fill_csv(empty, TIMES)) == 40 * 2 * a_layer


def test_our_rows_take_what_each_kernel_costs() -> None:
    block = block_times(TIMES, "attention_layer")
    assert block is not None and block_times(TIMES, "optimizer1") is None
    assert block.forward == (70 + 889 + 512 + 349) * 1000
    assert block.input_grad == (70 + 889 + 2.5 * 512 + 349) * 1000 and block.weight_grad == (889 + 349) * 1000
    head = block_times(TIMES, "final_column")
    assert head is not None and (head.forward, head.weight_grad) == (12_894_000, 12_824_000)
    names = ("grad_param_compute", "embedding_layer", "mlp_moelayer", "mlp_moelayer", "cross_entropy1")
    rows = tuple(Row(name, Pass(1), Pass(1), Pass(1)) for name in names)
    filled = fill_text(TextWorkload(parse_workload_text("MICRO\n0", "x").header, rows), TIMES).rows
    assert [row.compute for row in filled[2:]] == [(2478 + 2478 + 2150) * 1000, 0, 3]
    assert (filled[0].input_grad.compute, filled[1].forward.compute, filled[1].weight_grad.compute) == (17_374_000, 799_000, 0)


def test_recomputing_attention_doubles_its_forward_pass_in_both_of_aicbs_places() -> None:
    rows = (Row("attention_layer", Pass(), Pass(), Pass()), Row("mlp_layer", Pass(), Pass(), Pass()))
    workload = TextWorkload(parse_workload_text("MICRO\n0", "x").header, rows)
    attention, mlp = fill_text_as_aicb(workload, TIMES, recompute=True).rows
    block = (70 + 889 + 2 * 512 + 349) * 1000
    assert (attention.forward.compute, attention.input_grad.compute, attention.weight_grad.compute) == (2 * block, block, block)
    assert mlp.forward.compute == 2_478_000
