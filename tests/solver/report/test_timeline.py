"""One step pass by pass: its time beside the estimate, the critical path, the trace a viewer reads, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pipelines import LAYOUTS, MODEL, solved
from toy import estimated, make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.commands.command_line import main
from solver.formats.config_file import load_run_config
from solver.report.picture_timeline import timeline_figure
from solver.report.timeline import StepTimeline, chrome_trace, step_timeline
from solver.report.words import seconds


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_simulated_step_is_the_estimated_one(h100_model: CostModel, name: str) -> None:
    found = solved(h100_model, name)
    step = step_timeline(found, 0)
    assert step.predicted == found.times.seconds[0]
    error = step.seconds / step.predicted - 1
    assert abs(error) < (1e-9 if name == "one stage" else 0.04)  # closed forms of stages with unequal ends
    _connected(step)


def _connected(step: StepTimeline) -> None:
    """The critical path leads from the start to the end without a gap."""
    line, on = step.line, np.flatnonzero(step.critical)
    order = on[np.argsort(line.start[on])]
    assert line.start[order[0]] == 0.0 and line.end[order].max() == line.makespan
    assert np.allclose(line.start[order[1:]], line.end[order[:-1]], atol=1e-12)


def test_stages_are_as_busy_as_the_estimate_says(h100_model: CostModel) -> None:
    found = solved(h100_model, "1f1b")
    step, m = step_timeline(found, 0), 12
    busy = (step.line.busy - np.bincount(step.line.stage, step.send, 4)) / m
    assert busy[3] > busy[1] == pytest.approx(busy[2], rel=1e-9), "the last stage has the head"
    assert busy[0] > busy[1], "the first one has the embedding"


def test_the_trace_is_what_viewers_read(h100_model: CostModel) -> None:
    step = step_timeline(solved(h100_model, "zb-v"), 0)
    trace = json.loads(json.dumps(chrome_trace(step)))
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X" and "args" in event]
    assert len(passes) == 4 * 2 * 12 * 3
    assert {event["name"][0] for event in passes} == {"F", "B", "W"}
    named = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {f"stage {stage}" for stage in (1, 2, 3, 4)}
    last = max(event["ts"] + event["dur"] for event in trace["traceEvents"] if event["ph"] == "X")
    assert last == pytest.approx(1e6 * step.seconds, rel=1e-9)
    for stage in range(4):  # events of one thread do not overlap
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in passes if e["pid"] == stage)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in zip(mine, mine[1:], strict=False))
    assert any(event.get("cname") == "terrible" and event["args"]["critical"] for event in passes)


def test_each_stream_of_collectives_has_a_lane(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 16, h100_model, 4096, framework="megatron-core", precision="bf16")
    layout = problem.layout(zero=1, zero_shard_size=2, pp=2, dp=2, tp=2, cp=2, tp_mode="msp", num_micro_batches=6)
    found = estimated(problem, [layout])
    step = step_timeline(found, 0)
    events = chrome_trace(step)["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 0]
    assert lanes == [
        "passes",
        "tensor parallel, exposed",
        "context parallel, exposed",
        "sends between stages",
        "data parallel, exposed",
    ]
    exposed = sum(event["dur"] for event in events if event["name"].startswith("tp ") and event["pid"] == 1)
    tensor = found.terms.layers.forward[:, 1, 0] + found.terms.layers.backward[:, 1, 0]
    assert exposed == pytest.approx(1e6 * 6 * 16 * tensor[0], rel=1e-9)  # six micro batches of sixteen layers
    for stage in range(2):  # what a pass waits for lies within it
        passes = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and "args" in e and e["pid"] == stage]
        for event in (e for e in events if e.get("cat") == "exposed" and e["pid"] == stage):
            start, end = event["ts"], event["ts"] + event["dur"]
            assert any(first <= start + 1e-3 and end <= last + 1e-3 for first, last in passes)


def test_sends_beside_the_next_pass_are_drawn(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, 4096, framework="megatron-core", precision="bf16", p2p_overlap=True)
    found = estimated(problem, [problem.layout(zero=1, zero_shard_size=2, **LAYOUTS["interleaved"])])
    sends = [event for event in chrome_trace(step_timeline(found, 0))["traceEvents"] if event.get("cat") == "send"]
    assert len(sends) == 2 * 12 * (4 * 2 - 1)  # forward and backward, of all chunks but one that has no further one
    assert all(event["dur"] == pytest.approx(1e6 * found.terms.send_recv[0]) for event in sends)


def test_a_step_that_no_viewer_shows_is_refused(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, 4096, framework="generic", precision="bf16")
    layout = {"pp": 8, "dp": 1, "num_micro_batches": 20000}
    with pytest.raises(InputError, match="320,000 passes is too long to draw"):
        step_timeline(estimated(problem, [problem.layout(zero=0, **layout)]), 0)


def test_the_command_line_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--run_all_solu --model_size llama3_8b --world_size 8 --global_batch_size 131072 --fix pp=4 --framework megatron-core"
    )
    for suffix, start in ((".json", b'{\n "traceEvents"'), (".png", b"\x89PNG")):
        path = tmp_path / f"step{suffix}"
        assert main([*words.split(), "--trace", str(path)]) == 0
        assert path.read_bytes().startswith(start) and f"wrote {path}" in capsys.readouterr().out
    assert main([*words.split(), "--trace", "step.txt"]) == 2
    assert "--trace step.txt: the file must end in" in capsys.readouterr().err


def test_transfers_that_overlap_delay_the_receiver_only(h100_model: CostModel) -> None:
    """Ten chunks a stage over two nodes: many transfers; Megatron's interleaved schedule sends them beside the passes."""
    model = load_run_config("configs/models/llama3_70b.json").model
    problem = make_problem(model, 64, h100_model, 4096, framework="megatron-core", precision="bf16", p2p_overlap=True)
    sizes = {"tp": 4, "pp": 8, "vpp": 10, "dp": 2, "num_micro_batches": 32, "schedule": "interleaved", "zero_shard_size": 2}
    step = step_timeline(estimated(problem, [problem.layout(**sizes)]), 0)
    assert step.seconds == pytest.approx(step.predicted, rel=2e-3) and not step.send.any()
    blocking = make_problem(model, 64, h100_model, 4096, framework="megatron-core", precision="bf16", p2p_overlap=False)
    waits = step_timeline(estimated(blocking, [blocking.layout(**sizes)]), 0)
    assert waits.seconds > 1.02 * step.seconds and waits.send.max() > 0


def test_a_picture_of_a_long_step_shows_its_beginning_and_its_end(h100_model: CostModel) -> None:
    """Four stages of 2 * 12 passes each are drawn whole; of 2 * 160 a quarter, an eighth at each end."""
    problem = make_problem(MODEL, 8, h100_model, 4096, framework="generic", precision="bf16")
    layouts = (problem.layout(**{**LAYOUTS["1f1b"], "num_micro_batches": count}) for count in (12, 160))
    short, long = (step_timeline(estimated(problem, [layout]), 0) for layout in layouts)
    (whole,) = timeline_figure(short).axes
    assert whole.get_xlim() == (0.0, short.end) and len(whole.texts) == 4 * 24
    first, last = timeline_figure(long).axes
    assert first.get_xlim() == pytest.approx((0.0, long.end / 8))
    assert last.get_xlim() == pytest.approx((long.end * 7 / 8, long.end))
    assert {text.get_text() for text in first.texts} >= {"0", "1"} and "0" not in {text.get_text() for text in last.texts}
    assert "159" in {text.get_text() for text in last.texts}


def test_the_picture_says_where_its_step_differs_from_the_predicted_one(h100_model: CostModel) -> None:
    step = step_timeline(solved(h100_model, "one stage"), 0)
    assert f"\none step, {seconds(step.predicted)}; " in timeline_figure(step).get_suptitle()
    other = replace(step, predicted=0.9 * step.predicted)
    said = f"\none step, {seconds(step.seconds)} as simulated here ({seconds(0.9 * step.predicted)} predicted); "
    assert said in timeline_figure(other).get_suptitle()
