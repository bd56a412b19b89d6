"""Where attention in 8 bits has a kernel: scales, heads, masks and chips."""

from __future__ import annotations

from typing import Any

import pytest
from toy import make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from profiler.profile.devices import DEVICES
from solver.formats.config_file import find_model, load_run_config
from solver.search.variants import CONSTANT_AXES
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.rules.context import context_exchange_broken
from solver.spec.rules.fp8_attention import fp8_attention_broken
from solver.spec.strategy import Strategy
from solver.step.problem import Problem

MODELS = {name: load_run_config(find_model(name)).model for name in ("llama3_8b", "deepseek_v3", "gpt_oss_20b", "gemma2_9b")}


def broken(model: str, device: str, **run: Any) -> str:
    stated = {"framework": "megatron-bridge-26", "world_size": 1, "seq_len": 4096, "fp8_attention": True, **run}
    return fp8_attention_broken(MODELS[model], Strategy(**stated), DEVICES[device])


@pytest.mark.parametrize(
    ("model", "device", "run"),
    [
        ("llama3_8b", "h100_sxm", {"precision": "fp8", "fp8_recipe": "delayed"}),
        ("llama3_8b", "b200_sxm", {"precision": "fp8", "fp8_recipe": "tensorwise"}),
        ("deepseek_v3", "gb200", {"precision": "mxfp8"}),
        ("gpt_oss_20b", "gb300", {"precision": "mxfp8"}),
        ("gemma2_9b", "h100_sxm", {"precision": "fp8", "fp8_attention": False}),
    ],
)
def test_what_runs(model: str, device: str, run: dict[str, Any]) -> None:
    assert broken(model, device, **run) == ""


@pytest.mark.parametrize(
    ("model", "device", "run", "sentence"),
    [
        ("llama3_8b", "h100_sxm", {"precision": "fp8", "fp8_recipe": "tensorwise"}, "needs fp8_recipe delayed"),
        ("deepseek_v3", "h100_sxm", {"precision": "fp8", "fp8_recipe": "delayed"}, "heads of 128"),
        ("gpt_oss_20b", "h200_sxm", {"precision": "fp8", "fp8_recipe": "delayed"}, "without windows and sinks"),
        ("llama3_8b", "b200_sxm", {"precision": "nvfp4"}, "no kernel with nvfp4 scales"),
        ("llama3_8b", "b200_sxm", {"precision": "fp8", "fp8_recipe": "blockwise"}, "no kernel with blockwise scales"),
        ("gemma2_9b", "b200_sxm", {"precision": "mxfp8"}, "no kernel for heads of 256"),
        ("llama3_8b", "b200_sxm", {"precision": "mxfp8", "document_lengths": "2048"}, "packed documents"),
    ],
)
def test_what_does_not_run(model: str, device: str, run: dict[str, Any], sentence: str) -> None:
    assert sentence in broken(model, device, **run)


def test_searches_offer_it_only_where_it_runs(h100_model: CostModel) -> None:
    def problem(recipe: str, **run: Any) -> Problem:
        stated = {"framework": "megatron-bridge-26", "precision": "fp8", "fp8_recipe": recipe, **run}
        return make_problem(MODELS["llama3_8b"], 8, h100_model, 8192, cluster_of(DEVICES["h100_sxm"]), **stated)

    assert CONSTANT_AXES["fp8_attention"](problem("delayed")) == [False, True]
    assert CONSTANT_AXES["fp8_attention"](problem("tensorwise")) == [False]
    with pytest.raises(InputError, match="needs fp8_recipe delayed"):
        problem("tensorwise", fp8_attention=True)
    gathers = problem("delayed").layout(fp8_attention=True, cp_comm="allgather")
    assert context_exchange_broken(MODELS["llama3_8b"], gathers) == "with fp8_attention; use cp_comm ring or a2a"


def test_plain_attention_is_not_divided_by_context_parallelism() -> None:
    model, problem = (
        MODELS["llama3_8b"],
        {"framework": "megatron-core", "attention": "unfused", "world_size": 8, "dp": 8, "seq_len": 8192},
    )
    why = "with attention unfused; use attention flash, or cp 1"
    assert context_exchange_broken(model, Strategy(**problem)) == why
    assert context_exchange_broken(model, Strategy(**{**problem, "attention": "flash"})) == ""
    with pytest.raises(InputError, match=why):
        check_layout(model, cluster_of(DEVICES["h100_sxm"]), Strategy(**{**problem, "cp": 2, "dp": 4}))
