"""What to measure first: each shape of a step once, by what it adds to the uncertainty; by hand, and as a user's file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from toy import TINY, make_problem, toy_cost

from predictor.estimate import Basis
from solver.commands.console import main
from solver.layers.program import Op
from solver.report.explain import Explanation, Line
from solver.report.measuring_plan import measuring_plan


def line(kind: str, seconds: float, std: float, basis: Basis = Basis.EXTRAPOLATED, **dims: float) -> Line:
    return Line("a", "mlp", "compute", kind, seconds, std, basis, Op("a", "mlp", kind, "forward", dims) if dims else None)


def test_shares_by_hand() -> None:
    lines = (
        line("linear", 2.0, 0.1, m=8, n=4),
        line("linear", 1.0, 0.1, m=8, n=4),
        line("linear", 1.0, 0.2, m=4, n=4, layout=0),
        line("linear", 5.0, 0.1, Basis.MEASURED, m=2),
        line("flash_attn", 1.0, 0.5, seq_q=64),
        line("host", 3.0, 0.5),
    )
    # linear 0.3 + 0.2 + 0.5 = 1.0, attention 0.5, host 1.5 seconds of uncertainty: squares 1 + 0.25 + 2.25 = 3.5
    found = {one.shape: one for one in measuring_plan(Explanation(lines, 10.0, 0.0))}
    assert list(found) == ["m 8, n 4", "seq_q 64", "m 4, n 4"]  # neither what was measured nor what is no kernel
    assert found["m 8, n 4"].seconds == pytest.approx(3.0) and found["m 8, n 4"].share == pytest.approx(0.3 / 3.5)
    assert found["m 4, n 4"].share == pytest.approx(0.2 / 3.5) and found["seq_q 64"].share == pytest.approx(0.25 / 3.5)
    assert len(measuring_plan(Explanation(lines, 10.0, 0.0), most=2)) == 2


def test_the_shapes_of_a_device_that_nobody_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "first.csv"
    step = ["explain", "--model_size", "llama3_8b", "--framework", "megatron-core", "--world_size", "64", "--as", "gb300"]
    assert main([*step, "--measurements", str(out)]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert 10 < len(rows) <= 50 and {row["kernel"].split()[0] for row in rows} >= {"linear", "flash_attn", "memory_bound"}
    shares = [float(row["share_of_uncertainty"]) for row in rows]
    assert shares == sorted(shares, reverse=True) and 0.5 < sum(shares) <= 1
    assert f"wrote {out}: {len(rows)} shapes" in capsys.readouterr().out
    assert main([*step, "--measurements", "first.txt"]) == 2
    assert "the file must end in .csv" in capsys.readouterr().err


def test_nothing_is_left_to_measure_of_what_was() -> None:
    problem = make_problem(TINY, 8, toy_cost(), 64, framework="megatron-core")
    assert problem.cost.origin == "measured"
    assert measuring_plan(Explanation((line("linear", 1.0, 0.1, Basis.MEASURED, m=2),), 1.0, 0.0)) == ()
