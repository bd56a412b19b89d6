"""An AICB Workload CSV on a measured profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from simai_files import table_of

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.simai import command
from solver.simai.price_csv import GroupSizes, group_sizes, table_prices
from solver.simai.workload_csv import CsvWorkload, Item, parse_workload_csv
from solver.spec.cluster import placement

END = Item("epoch_end", None, 0, "")


def seconds(cost: CostModel, op: str, size: int, ranks: int, stride: int) -> float:
    place = placement(np.array([ranks]), np.array([stride]), 8)
    return float(cost.network.collective(op, np.array([float(size)]), *place).seconds[0])


def test_items_of_a_step_by_group_and_kind(h100_model: CostModel) -> None:
    setup = (Item("all_reduce", "tp_group", 1 << 30, "init", 4), END)
    step = (
        Item("all_reduce", "tp_group", 1 << 20, "forward", 4),
        Item("computation", None, None, "forward", elapsed=5e6),
        Item("all_to_all", "ep_group", 1 << 21, "forward"),
        Item("reduce_scatter", "dp_group", 1 << 30, "step", 8),
        Item("isend", "pp_group", 1 << 22, "forward_step", 1),
        Item("barrier", "all", None, "step"),
        Item("broadcast", "ep_dp_group", 1 << 23, "step"),
        Item("all_gather", "embedding_group", 0, "step"),
        END,
    )
    workload = CsvWorkload((*setup, *step, *step))
    found = {(line.group, line.kind): line for line in table_prices(workload, h100_model, 8, ep=2)}
    assert group_sizes(workload, 2) == GroupSizes(tp=4, dp=8, pp=2, ep=2)
    expected = {
        ("compute", "computation"): 5e-3,
        ("tp_group", "all_reduce"): seconds(h100_model, "all_reduce", 1 << 20, 4, 1),
        ("ep_group", "all_to_all"): seconds(h100_model, "all2all", 1 << 21, 2, 4),
        ("dp_group", "reduce_scatter"): seconds(h100_model, "reduce_scatter", 1 << 30, 8, 4),
        ("pp_group", "isend"): seconds(h100_model, "p2p", 1 << 22, 2, 32),
        ("all", "barrier"): seconds(h100_model, "all_reduce", 4, 64, 1),
        ("ep_dp_group", "broadcast"): seconds(h100_model, "broadcast", 1 << 23, 4, 8),
        ("embedding_group", "all_gather"): 0.0,
    }
    assert {key: line.seconds for key, line in found.items()} == {key: pytest.approx(value) for key, value in expected.items()}
    assert {line.count for line in found.values()} == {1.0} and found["dp_group", "reduce_scatter"].size == 1 << 30


def test_files_of_aicb(h100_model: CostModel) -> None:
    workload = parse_workload_csv(table_of("gpt175b_tp8_pp8_ws128_gbs32_seq2048"), "x")
    assert group_sizes(workload) == GroupSizes(tp=8, dp=2, pp=8, ep=None)
    lines = {(line.group, line.kind): line for line in table_prices(workload, h100_model, 8)}
    assert lines["tp_group", "all_reduce"].seconds > 0.1 > lines["pp_group", "isend"].seconds > 0
    mixture = parse_workload_csv(table_of("mixtral8x7b_tp2_ep8_ws128_gbs128_seq2048_sp"), "x")
    with pytest.raises(InputError, match="ep_group has no size in the file, as AICB writes it; say with --ep how many ranks"):
        table_prices(mixture, h100_model, 8)
    assert {line.kind for line in table_prices(mixture, h100_model, 8, ep=8)} >= {"all_to_all", "reduce_scatter", "broadcast"}
    with pytest.raises(InputError, match="all_reduce of all in no stage has no bytes; give them in msg_size"):
        table_prices(CsvWorkload((Item("all_reduce", "all", None, ""),)), h100_model, 8)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.csv"
    text = table_of("gpt13b_tp4_pp1_ws4_gbs2_seq4096_aiobExample_filled").removesuffix("\n")
    path.write_text(f"{text}\n[rank4 ~ rank7]\n")
    assert command.main(["--price", str(path), "--profile", "h100_sxm"]) == 0
    out = capsys.readouterr().out
    assert (
        "w.csv on 4 GPUs, tp 4, dp 1, pp 1, profile: h100_sxm" in out
        and "2,063,040" in out
        and "1 more are of other ranks" in out
    )
    path.write_text(table_of("gpt13b_tp4_pp1_ws4_gbs2_seq4096_comp"))
    assert command.main(["--price", str(path)]) == 0
    assert "960 computations have no time; --fill gives them one" in capsys.readouterr().out
    for options, message in (
        (["-nv", "360"], "-nv has no effect with the price of a .csv; leave it out"),
        (["--model_size", "7"], "--model_size has no effect with the price of a .csv"),
        (["--ep", "0"], "--ep is 0; it must be at least 1"),
    ):
        assert command.main(["--price", str(path), *options]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "w.txt").write_text("MICRO\n0\n")
    assert command.main(["--price", str(tmp_path / "w.txt"), "--ep", "2"]) == 2
    assert "--ep has no effect with a SIMAI_workload, whose first line states it" in capsys.readouterr().err
