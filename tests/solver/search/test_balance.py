"""Layers assigned to stages one by one: against brute force, never worse than evenly, refusals, the command line."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from toy import estimated, make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from profiler.profile.devices import DEVICES
from solver.commands.command_line import main
from solver.formats.config_file import load_run_config
from solver.report.timeline import step_timeline
from solver.search.balance import _moved, balanced
from solver.search.search import search
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.pipeline_layout import chunk_layers, layout_text
from solver.step.solutions import estimate_layouts

MODEL = load_run_config("configs/models/llama3_8b.json").model.replace(num_hidden_layers=12)
LAYOUT = {"pp": 4, "dp": 2, "zero": 1, "zero_shard_size": 2, "num_micro_batches": 8}


@pytest.mark.parametrize("memory_gib", [80, 26])
def test_no_deal_of_the_layers_is_faster(h100_model: CostModel, memory_gib: int) -> None:
    cluster = cluster_of(DEVICES["h100_sxm"], {"memory_gib": memory_gib})
    problem = make_problem(MODEL, 8, h100_model, 8192, cluster, framework="megatron-core", precision="bf16")
    start = estimated(problem, [problem.layout(**LAYOUT)])
    balance = balanced(start, 0)
    assert balance.solutions.memory.device[0] <= cluster.memory_bytes
    best = np.inf
    for chunks in product(range(1, 7), repeat=4):
        if sum(chunks) != 12:
            continue
        stated = problem.with_run(pipeline_layout=layout_text(chunks))
        found = estimate_layouts(stated, balance.solutions.layouts, start.table)
        if found.memory.device[0] <= cluster.memory_bytes:
            best = min(best, float(found.times.seconds[0]))
    assert balance.seconds == pytest.approx(best, rel=1e-9), "with the recomputation that it chose"
    if memory_gib == 80:
        assert balance.seconds < start.times.seconds[0], "the head of a small model is worth a layer and more"
    layers = chunk_layers(balance.text)
    assert sum(layers) == 12 and layers[-1] < max(layers)


def test_the_best_layouts_get_no_slower(h100_model: CostModel) -> None:
    problem = make_problem(
        load_run_config("configs/models/deepseek_v2.json").model,
        128,
        h100_model,
        4096,
        framework="megatron-core",
        precision="bf16",
    )
    found = search(problem, 512, fixed={"pp": 8}).best
    balance = balanced(found, len(found) - 1)
    assert balance.seconds <= balance.before * (1 + 1e-9)
    run = balance.solutions.layouts.strategy(0, balance.solutions.problem.run)
    check_layout(problem.model, problem.cluster, run)
    assert sum(chunk_layers(run.pipeline_layout)) == problem.model.num_hidden_layers


def test_what_cannot_be_dealt_is_refused(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-core", precision="bf16")
    with pytest.raises(InputError, match="nothing to balance"):
        balanced(estimated(problem, [problem.layout(zero=1, zero_shard_size=8)]), 0)
    other = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-deepspeed", precision="bf16")
    with pytest.raises(InputError, match="assigns layers to stages itself under schedule 1f1b"):
        balanced(estimated(other, [other.layout(**LAYOUT)]), 0)


def test_the_command_line_says_what_it_brings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    words = "--run_all_solu --model_size llama3_8b --world_size 16 --framework megatron-core --fix pp=4 --balance"
    assert main([*words.split(), "--json", str(out)]) == 0
    content = json.loads(out.read_text())["balanced"]
    assert "Layers assigned to the stages one by one" in capsys.readouterr().out
    assert content["step_s"] <= content["evenly_dealt_step_s"]
    assert sum(chunk_layers(content["layout"]["pipeline_layout"])) == 32


def test_a_layer_moves_from_the_largest_chunk_of_a_stage_to_the_smallest_of_another() -> None:
    # four stages of two chunks; the fourth has one layer and three
    chunks = (2, 2, 2, 1, 2, 2, 2, 3)
    assert _moved(chunks, 4, 3, 0) == [(3, 2, 2, 1, 2, 2, 2, 2), (2, 2, 2, 1, 3, 2, 2, 2)]  # or between the last ones
    assert _moved(chunks, 4, 0, 3) == [(1, 2, 2, 2, 2, 2, 2, 3), (2, 2, 2, 1, 1, 2, 2, 4)]
    assert _moved((0, 1), 2, 0, 1) == [], "an empty stage gives none"


def test_layers_beside_the_head_balance_interleaved_stages(h100_model: CostModel) -> None:
    """Eight chunks of one layer, and a head as long as two: the layers that run beside it, not any, make room for it."""
    model = load_run_config("configs/models/llama3_8b.json").model
    problem = make_problem(model, 64, h100_model, 4096, framework="megatron-core", precision="bf16")
    even = search(problem, 1024, top=1, fixed={"pp": 4, "vpp": 8, "tp": 1, "cp": 1}).best
    found = balanced(even, 0)
    simulated = [step_timeline(one, 0).seconds for one in (even, found.solutions)]
    assert found.seconds / found.before < 0.93 and simulated[1] / simulated[0] < 0.93
    assert [found.before, found.seconds] == pytest.approx(simulated, rel=0.01)


def test_the_chunks_of_a_layout_string_may_be_those_of_few_stages_or_of_many(h100_model: CostModel) -> None:
    model = load_run_config("configs/models/llama3_8b.json").model
    constants = {"framework": "megatron-core", "precision": "bf16", "pipeline_layout": "Et|(t|)*28t*2|t|L"}
    found = search(make_problem(model, 64, h100_model, 4096, **constants), 1024, top=50).best
    layouts = [found.layouts.strategy(index, found.problem.run) for index in range(len(found))]
    pipelines = {(layout.pp, layout.vpp): index for index, layout in enumerate(layouts)}
    assert {(2, 16), (4, 8)} <= pipelines.keys()
    for index in pipelines.values():
        assert found.times.seconds[index] == pytest.approx(step_timeline(found, index).seconds, rel=0.01)
