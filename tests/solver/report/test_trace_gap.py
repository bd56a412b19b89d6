"""A traced step beside the predicted one: the parts by hand, that they add up, and the command on a trace of a whole step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver import load_problem
from solver.api import estimate
from solver.commands.console import main
from solver.formats.logs.profiler_trace import ATTENTION, COMPUTE, GEMM, MEMORY, OPTIMIZER, Trace, read_trace
from solver.report.explain import Explanation, explain
from solver.report.trace_gap import COMMUNICATION, IDLE, PARTS, predicted_parts, trace_lines, traced

NAMES = {
    GEMM: "nvjet_a",
    ATTENTION: "flash_fwd",
    MEMORY: "rmsnorm",
    OPTIMIZER: "multi_tensor_apply_kernel<Adam>",
    "all_gather": "ncclDevKernel_AllGather_RING_LL",
    "all_reduce": "ncclDevKernel_AllReduce_Sum_RING_LL",
}
CONFIG = "configs/models/llama3_8b.json"


def trace_of(*kernels: tuple[str, float, float], end: float) -> Trace:
    """Return a trace of one step, of kernels by what they do, with start and end."""
    rows = sorted(kernels, key=lambda row: row[1])
    kind = np.array([row[0] for row in rows], dtype=object)
    first, last = (np.array([row[i] for row in rows], dtype=float) for i in (1, 2))
    names = tuple(NAMES.get(row[0], row[0]) for row in rows)
    return Trace(names, kind, first, last, np.zeros(len(rows), int), np.array([[0.0, end]]), "one step")


def test_a_step_by_hand() -> None:
    # compute 0-40, 50-60, 80-90; all-reduce 30-70: 20 of it beside compute; nothing runs in 70-80 and from 90 on
    found = traced(trace_of((GEMM, 0, 40), ("all_reduce", 30, 70), (ATTENTION, 50, 60), (MEMORY, 80, 90), end=100))
    assert found.parts == {GEMM: 40, ATTENTION: 10, MEMORY: 10, OPTIMIZER: 0, "copies": 0, COMMUNICATION: 20, IDLE: 20}
    assert found.exposed == {"all_reduce": 20} and found.overlapped == 0 and found.step == 100
    assert found.largest[0] == ("nvjet_a", GEMM, 40) and len(found.largest) == 4


def test_compute_that_runs_beside_compute_counts_once() -> None:
    found = traced(trace_of((GEMM, 0, 40), (GEMM, 20, 60), (MEMORY, 50, 70), end=70))
    assert found.overlapped == 30 and found.parts[IDLE] == 0
    assert found.parts[GEMM] == pytest.approx(80 * 0.7) and found.parts[MEMORY] == pytest.approx(20 * 0.7)


def test_two_collectives_at_once_are_exposed_once() -> None:
    found = traced(trace_of((GEMM, 0, 10), ("all_gather", 5, 35), ("all_reduce", 20, 45), end=45))
    assert found.exposed == {"all_gather": 25, "all_reduce": 10} and found.parts[COMMUNICATION] == 35


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.floats(0, 90), st.floats(0, 20)), min_size=1, max_size=12))
def test_parts_add_up_to_the_step(kernels: list[tuple[str, float, float]]) -> None:
    found = traced(trace_of(*((kind, start, start + length) for kind, start, length in kernels), end=100))
    assert sum(found.parts.values()) == pytest.approx(100) and min(found.parts.values()) > -1e-9
    assert sum(found.exposed.values()) == pytest.approx(found.parts[COMMUNICATION], abs=1e-9)


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    problem = load_problem(CONFIG, 64, profile="h100_sxm", framework="megatron-core")
    layout = problem.layout(tp=4, tp_mode="msp", pp=2, dp=8, num_micro_batches=4, zero=1, zero_shard_size=8)
    return explain(estimate(problem, [layout]), 0)


def as_trace(explanation: Explanation, path: Path, more: dict[str, float]) -> Path:
    """Write a trace whose step has the predicted parts, one after the other, and ``more`` seconds of some of them."""
    kinds = {COMMUNICATION: "all_gather"}
    events, now = [], 0.0
    for number in (1, 2):
        begin = now
        for part, length in predicted_parts(explanation).items():
            length += more.get(part, 0.0)
            if part != IDLE and length:
                name = NAMES[kinds.get(part, part)]
                events.append(
                    {
                        "ph": "X",
                        "cat": "kernel",
                        "name": name,
                        "ts": 1e6 * now,
                        "dur": 1e6 * length,
                        "args": {"device": 0, "stream": 7},
                    }
                )
            now += length
        events.append(
            {
                "ph": "X",
                "cat": "gpu_user_annotation",
                "name": f"ProfilerStep#{number}",
                "ts": 1e6 * begin,
                "dur": 1e6 * (now - begin),
            }
        )
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def test_predicted_parts_are_the_step(explanation: Explanation) -> None:
    parts = predicted_parts(explanation)
    assert sum(parts.values()) == pytest.approx(explanation.seconds, rel=1e-9) and set(parts) == set(PARTS)
    assert parts[GEMM] > parts[ATTENTION] > 0 and parts[IDLE] > 0 and all(parts[kind] >= 0 for kind in COMPUTE)


def test_a_trace_of_the_prediction_has_no_gap(explanation: Explanation, tmp_path: Path) -> None:
    found = traced(read_trace(as_trace(explanation, tmp_path / "a.json", {})))
    assert found.parts == pytest.approx(predicted_parts(explanation), abs=1e-9)
    assert found.step == pytest.approx(explanation.seconds)
    assert not [line for line in trace_lines(found, explanation) if "than predicted" in line]


@pytest.mark.parametrize("part", [GEMM, MEMORY, COMMUNICATION, IDLE])
def test_the_part_that_is_longer_is_the_gap(part: str, explanation: Explanation, tmp_path: Path) -> None:
    longer = 0.3 * explanation.seconds
    found = traced(read_trace(as_trace(explanation, tmp_path / "a.json", {part: longer})))
    lines = [line for line in trace_lines(found, explanation) if "than predicted" in line]
    assert lines == [f"{part}: {1e3 * longer:,.1f} ms more than predicted: 100% of the gap"]


def test_the_command(explanation: Explanation, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = as_trace(explanation, tmp_path / "a.json", {COMMUNICATION: 0.5 * explanation.seconds})
    config = tmp_path / "run.json"
    layout = {
        "tp": 4,
        "tp_mode": "msp",
        "pp": 2,
        "dp": 8,
        "num_micro_batches": 4,
        "zero": 1,
        "zero_shard_size": 8,
        "framework": "megatron-core",
    }
    config.write_text(json.dumps({"name": "m", "model": json.loads(Path(CONFIG).read_text()), "layout": layout}))
    given_words = ["import", str(path), "--config", str(config), "--world_size", "64", "--profile", "h100_sxm"]
    assert main([*given_words, "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    assert (
        "communication that nothing hides: " in printed and " more than predicted" in printed and "100% of the gap" in printed
    )
    assert "communication that nothing hides is all_gather" in printed
    plain = json.loads((tmp_path / "out.json").read_text())
    assert plain["measured_step_s"] == pytest.approx(1.5 * explanation.seconds, rel=1e-6)
    assert sum(plain["trace"]["traced"]["parts_s"].values()) == pytest.approx(plain["measured_step_s"])
    assert main(["import", str(path)]) == 2
    assert "is a trace, which does not say what was run: give --config" in capsys.readouterr().err
