"""Memory through a step: its peak is the estimate's, it ends as it began, and torch's memory viewer reads the snapshot."""

from __future__ import annotations

import io
import pickle
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from pipelines import LAYOUTS, MODEL, solved
from toy import estimated, make_problem

from predictor.cost_model import CostModel
from solver.commands.command_line import main
from solver.report.memory_timeline import memory_through_step, snapshot
from solver.step.per_stage import memory_of_stages


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_peak_is_the_estimate_s(h100_model: CostModel, name: str) -> None:
    found = solved(h100_model, name)
    step, stages = memory_through_step(found)
    allocated = memory_of_stages(found, 0).allocated
    for stage in stages:
        times, levels = stage.curve
        stays = sum(stage.staying.values())
        logits = name == "gpipe" and stage.stage == 1  # all micro batches' logits are kept: in the estimate beside the buffers
        assert stage.peak[1] == pytest.approx(allocated[stage.stage], rel=0.2 if logits else 1e-9)
        assert levels[0] == stays and levels[-1] == pytest.approx(stays) and (levels >= stays - 1).all()
        assert (np.diff(times) >= 0).all() and times[-1] <= step.seconds
        assert stage.at_peak()


def test_weight_gradients_of_the_head_that_wait_hold_no_activations(h100_model: CostModel) -> None:
    deferred = {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 4}
    problem = make_problem(MODEL, 16, h100_model, 4096, framework="megatron-core", precision="bf16", **deferred)
    found = estimated(problem, [problem.layout(pp=2, dp=8, zero=1, zero_shard_size=8, num_micro_batches=8)])
    step, stages = memory_through_step(found)
    assert {str(kind) for kind in step.line.kind} == {"F", "B", "W"} and not step.splits
    for stage, allocated in zip(stages, memory_of_stages(found, 0).allocated, strict=True):
        assert stage.peak[1] == pytest.approx(allocated, rel=1e-9)


def test_stages_of_1f1b_hold_as_many_micro_batches_as_come_after(h100_model: CostModel) -> None:
    _, stages = memory_through_step(solved(h100_model, "1f1b"))
    assert [stage.at_peak().split()[0] for stage in stages] == ["4", "3", "2", "1"]
    assert all(len({block.words for block in stage.blocks}) == len(stage.blocks) == 24 for stage in stages)


def test_the_optimizer_s_step_is_a_block_beside_the_passes(h100_model: CostModel) -> None:
    """States in 16 bits are widened for the update, which is the peak of a small micro batch with full recomputation."""
    problem = make_problem(MODEL, 32, h100_model, 8192, framework="megatron-core", optimizer_states="bf16")
    found = estimated(problem, [problem.layout(tp=8, pp=4, dp=1, num_micro_batches=4, recompute="full")])
    step, stages = memory_through_step(found)
    allocated = memory_of_stages(found, 0).allocated
    for stage in stages:
        update = stage.blocks[-1]
        assert update.words == "the optimizer's step" and update.end <= step.seconds
        assert update.end - update.start == pytest.approx(dict(step.after)["optimizer"])
        assert stage.peak[1] == pytest.approx(allocated[stage.stage], rel=1e-9)
        assert all(block.size > 0 for block in stage.blocks) and len(stage.blocks) > 4


def test_torch_reads_the_snapshot(h100_model: CostModel, tmp_path: Path) -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    step, stages = memory_through_step(solved(h100_model, "1f1b"))
    plain = pickle.loads(pickle.dumps(snapshot(step, stages)))
    for stage, trace in zip(stages, plain["device_traces"], strict=True):
        level, peak, alive = 0, 0, {}
        for event in trace:
            if event["action"] == "alloc":
                assert event["addr"] not in alive
                alive[event["addr"]] = event["size"]
            elif event["action"] == "free_completed":
                assert alive.pop(event["addr"]) == event["size"]
            level = sum(alive.values())
            peak = max(peak, level)
        assert peak == pytest.approx(stage.peak[1], abs=1000) and level == pytest.approx(sum(stage.staying.values()), abs=1000)
    page = viewer.trace_plot(plain)
    assert "<html" in page.lower() and len(page) > 1000
    with redirect_stdout(io.StringIO()):
        text = viewer.trace(plain)
    devices = text.split("Device ")[1:]
    assert len(devices) == 4
    for stage, device in zip(stages, devices, strict=True):
        assert (
            device.count("= MEM[") == 24 + len(stage.staying) and device.count("del ") == device.count("# free completed") == 24
        )


def test_the_command_writes_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "configs/7B_internlm2.py", "--world_size", "64", "--memory_trace"]
    picture, data = tmp_path / "m.png", tmp_path / "m.pickle"
    assert main([*words, str(picture)]) == main([*words, str(data)]) == 0
    assert "stage 1 allocates most" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and len(pickle.loads(data.read_bytes())["device_traces"]) == 1
    assert main([*words, str(tmp_path / "m.json")]) == 2
    assert "the file must end in .png, .jpg, .pdf, .pickle or .svg" in " ".join(capsys.readouterr().err.split())
