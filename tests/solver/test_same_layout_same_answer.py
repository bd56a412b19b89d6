"""One layout has one answer, whatever way it comes in: search, Python, a config file, the result of a search, a case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor.cost_model import CostModel
from solver import configured_strategy, estimate, load_problem
from solver.commands.command_line import main
from solver.formats.cases.reading import case_of
from solver.formats.config_file import RunConfig, load_run_config
from solver.report.output import layout_dict
from solver.report.validate import predict_cases
from solver.search.space import cross, enumerate_splits
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

MODEL = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
FRAMEWORKS = (
    "internevo-2024",
    "internevo-2023",
    "megatron-core",
    "megatron-lm-2023",
    "nemo",
    "torchtitan",
    "fsdp",
    "pytorch",
    "megatron-deepspeed",
    "aleph alpha",
    "llm-foundry",
    "generic",
)
PER_FRAMEWORK = 90


def problem_of(framework: str, folder: Path, **options: Any) -> Problem:
    path = folder / "m.json"
    path.write_text(json.dumps(MODEL))
    return load_problem(path, 32, profile="h100_sxm", framework=framework, seq_len=4096, **options)


def sampled(problem: Problem, count: int) -> Solutions:
    """Estimate ``count`` layouts of the whole space, evenly spread over a shuffled order."""
    layouts = cross(problem, enumerate_splits(problem, 64).splits)
    chosen = np.random.default_rng(7).permutation(len(layouts))[:count]
    return estimate_layouts(problem, layouts.take(np.sort(chosen)))


def configs_of(layouts: Sequence[dict[str, Any]], folder: Path) -> list[RunConfig]:
    """Write each layout as a config file and read it."""
    found = []
    for number, layout in enumerate(layouts):
        path = folder / f"run{number}.json"
        path.write_text(json.dumps({"name": "m", "model": MODEL, "layout": layout}))
        found.append(load_run_config(path))
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_thousand_layouts_have_one_answer_each(framework: str, tmp_path: Path, h100_model: CostModel) -> None:
    problem = problem_of(framework, tmp_path)
    searched = sampled(problem, PER_FRAMEWORK)
    layouts = [layout_dict(searched, index) for index in range(len(searched))]
    assert len(layouts) >= 60 and PER_FRAMEWORK * len(FRAMEWORKS) > 1000

    configs = configs_of(layouts, tmp_path)
    configured = load_problem(configs[0], 32, profile="h100_sxm")  # the layouts differ in axes of the search only
    strategies = [configured_strategy(configured, config) for config in configs]
    cases = [
        case_of({"id": "x-1", "hardware": "h100_sxm", "model": {"name": "m", **MODEL}, "measured": {}, "run": layout})
        for layout in layouts
    ]
    predictions = predict_cases(cases, lambda hardware, network: h100_model.with_network(network))
    assert not any(prediction.skipped for prediction in predictions)

    answers = {"python": estimate(problem, strategies), "config": estimate(configured, strategies)}
    seconds = {way: found.times.seconds for way, found in answers.items()} | {
        "case": np.array([p.seconds for p in predictions])
    }
    memory = {way: found.memory.device for way, found in answers.items()}
    memory["case"] = np.array([p.solutions.memory.device[p.index] for p in predictions if p.solutions])
    for way in seconds:
        np.testing.assert_allclose(seconds[way], searched.times.seconds, rtol=1e-12, err_msg=way)
        np.testing.assert_allclose(memory[way], searched.memory.device, rtol=1e-12, err_msg=way)


def test_the_best_layout_of_a_result_is_a_config(tmp_path: Path) -> None:
    out, run, second = (tmp_path / name for name in ("out.json", "run.json", "second.json"))
    assert (
        main(["--run_all_solu", "--model_size", "llama3_8b", "--world_size", "32", "--json", str(out), "--framework", "nemo"])
        == 0
    )
    best = json.loads(out.read_text())["best"][0]
    run.write_text(json.dumps({"model": "llama3_8b", "layout": best["layout"]}))
    assert main(["--config", str(run), "--json", str(second)]) == 0  # its world_size and framework come from the layout
    found = json.loads(second.read_text())["best"][0]
    assert found["layout"] == best["layout"] and found["layout"]["framework"] == "nemo-25"
    assert found["step_s"] == pytest.approx(best["step_s"], rel=1e-12)
    assert found["peak_memory_bytes"] == pytest.approx(best["peak_memory_bytes"], rel=1e-12)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"dp": 8, "global_batch_sequences": 12}, "global_batch_sequences is 12; it must be dp * micro_batch_size"),
        ({"global_batch_sequences": 8}, "global_batch_sequences needs dp beside it"),
        ({"dp": 8, "global_batch_size": 8}, "global_batch_size has no unit; give global_batch_sequences"),
        (
            {"dp": 8, "num_micro_batches": 2, "global_batch_sequences": 8},
            "it must be dp * micro_batch_size * num_micro_batches",
        ),
        ({"dp": 8, "global_batch_sequences": "many"}, "global_batch_sequences is 'many'"),
    ],
)
def test_batches_that_contradict_the_layout(
    layout: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": MODEL, "layout": layout}))
    assert main(["--config", str(path), "--world_size", "8"]) == 2
    assert message in capsys.readouterr().err


def test_two_numbers_of_gpus_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": MODEL, "layout": {"world_size": 16, "dp": 16}}))
    assert main(["--config", str(path), "--world_size", "8"]) == 2
    assert "--world_size is 8, but" in capsys.readouterr().err
    assert main(["--config", str(path)]) == 0 and "16 x NVIDIA H100" in capsys.readouterr().out


def test_a_framework_s_zero_stage_is_that_of_a_layout_that_states_none(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": MODEL, "layout": {"framework": "fsdp"}}))
    config = load_run_config(path)
    strategy = configured_strategy(load_problem(config, 8, profile="h100_sxm"), config)
    assert (strategy.zero, strategy.zero_shard_size, strategy.framework) == (3, 8, "fsdp")
