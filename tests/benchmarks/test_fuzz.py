"""Damaged inputs are answered or refused; and the fuzzer notices what is neither."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from fuzz import SECONDS, fuzz, run, trouble

from predictor.cost_model import CostModel


def test_damaged_inputs_show_no_defect(h100_model: CostModel) -> None:
    defects = fuzz(60, seed=11)  # make fuzz tries thousands
    assert not defects, defects[0]


def crash(arguments: Sequence[str]) -> int:
    raise KeyError("a defect")


def wrong_figures(arguments: Sequence[str]) -> int:
    best = {"step_s": -1.0, "tgs": 1.0, "peak_memory_bytes": 1.0, "mfu": 0.5}
    Path("out.json").write_text(json.dumps({"best": [best]}))
    return 0


def test_defects_are_noticed() -> None:
    assert "KeyError: 'a defect'" in run({}, [], crash)
    assert run({}, [], wrong_figures) == "figures (-1.0, 1.0, 1.0, 0.5)"
    assert run({}, [], lambda arguments: 1) == "exit status 1"
    assert run({}, [], lambda arguments: 0) == ""


@pytest.mark.parametrize(
    ("status", "seconds", "errors", "wrong"),
    [
        (2, 0.1, "error: a sentence\n", ""),
        (2, 0.1, "", "no sentence"),
        (2, 0.1, "error: two\nlines\n", "control characters"),
        (2, 0.1, "error: \x1b[31mred\n", "control characters"),
        (2, 0.1, f"error: {'x' * 2000}\n", "a message of 2007 characters"),
        (0, SECONDS + 1, "", "took 21 s"),
        (2, 0.1, "usage: foretrain\nforetrain: error: no\n", ""),
    ],
)
def test_what_counts_as_a_defect(status: int, seconds: float, errors: str, wrong: str) -> None:
    found = trouble(status, seconds, errors, "")
    assert wrong in found if wrong else not found
