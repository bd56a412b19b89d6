"""Settings that would shorten a step much: what is said of them is what a search with them finds, or less."""

from __future__ import annotations

from typing import Any

import pytest
from toy import make_problem

from predictor.cost_model import CostModel
from solver import estimate, load_problem
from solver.formats.config_file import load_run_config
from solver.search.hints import dispatchers_on, faster_settings
from solver.search.search import search
from solver.search.variants import CONSTANT_AXES
from solver.spec.feasibility import check_layout

DENSE, EXPERTS = (load_run_config(f"configs/models/{name}.json").model for name in ("llama3_8b", "qwen3_30b_a3b"))


@pytest.mark.parametrize(
    ("model", "world", "constants", "setting"),
    [
        (DENSE, 8, {"framework": "deepspeed", "attention": "unfused"}, "attention=flash"),
        (EXPERTS, 64, {"framework": "megatron-core", "moe_dispatcher": "alltoall"}, "moe_dispatcher=deepep"),
    ],
)
def test_a_search_with_the_setting_finds_as_much(
    h100_model: CostModel, model: Any, world: int, constants: dict[str, Any], setting: str
) -> None:
    problem = make_problem(model, world, h100_model, 4096, precision="bf16", **constants)
    result = search(problem, 2 * world)
    (hint,) = (one for one in faster_settings(result, 0.005) if one.setting == setting)
    key, value = setting.split("=")
    other = make_problem(model, world, h100_model, 4096, precision="bf16", **{**constants, key: value})
    layout = hint.solutions.layouts.strategy(hint.index, hint.solutions.problem.run)
    check_layout(model, other.cluster, layout)
    seconds = float(estimate(other, [layout]).times.seconds[0])
    assert seconds / float(result.best.times.seconds[0]) - 1 == pytest.approx(hint.change) and hint.change < 0
    assert float(search(other, 2 * world).best.times.seconds[0]) <= seconds * (1 + 1e-12)


@pytest.mark.parametrize(
    ("profile", "framework", "expected"),
    [
        ("h100_sxm", "megatron-core", {"alltoall", "allgather", "deepep", "hybridep"}),
        ("b200_sxm", "megatron-core", {"alltoall", "allgather", "deepep", "hybridep"}),
        ("gb200", "megatron-core", {"alltoall", "allgather", "hybridep"}),
        ("mi300x", "megatron-core", {"alltoall", "allgather"}),
        ("mi300x", "primus", {"alltoall", "allgather", "deepep"}),
    ],
)
def test_dispatchers_are_suggested_on_the_gpus_that_they_are_made_for(profile: str, framework: str, expected: set[str]) -> None:
    problem = load_problem("configs/models/qwen3_30b_a3b.json", 64, profile=profile, framework=framework)
    assert set(dispatchers_on(problem)) == expected
    assert CONSTANT_AXES["moe_dispatcher"](problem) == dispatchers_on(problem)


def test_flash_attention_is_not_suggested_where_none_runs() -> None:
    run = {"precision": "fp16", "attention": "unfused"}
    for profile, suggested in (("v100_sxm_32gb", False), ("a100_sxm_80gb", True)):
        problem = load_problem("configs/models/gemma3_1b.json", 8, profile=profile, seq_len=2048, **run)
        hints = faster_settings(search(problem, 64), 0.0)
        assert any(hint.setting == "attention=flash" for hint in hints) == suggested


def test_nothing_is_said_of_what_a_model_has_not(h100_model: CostModel) -> None:
    problem = make_problem(DENSE, 8, h100_model, 4096, framework="megatron-core", precision="bf16")
    assert faster_settings(search(problem, 16), 0.0) == []
