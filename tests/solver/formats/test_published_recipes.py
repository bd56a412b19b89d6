"""Settings of Megatron-Bridge's performance recipes: each is a layout that runs, and a run gets those of its own release."""

from __future__ import annotations

from typing import Any

import pytest

from profiler.profile.devices import FOLDER, read_datasheet
from solver.formats.cases.published_recipes import Recipe, recipes
from solver.formats.cases.reading import Case, case_of
from solver.formats.model_file import shipped_model
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_framework
from solver.spec.frameworks import framework_of
from solver.spec.strategy import Strategy

QWEN = {
    "name": "qwen3-30b-a3b",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "qk_norm": True,
}
GPT_OSS = {
    "name": "gpt-oss-120b",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2880,
    "attention_bias": True,
}
RUN = {
    "framework": "megatron-bridge 26.06",
    "world_size": 8,
    "seq_len": 4096,
    "global_batch_size": 512,
    "micro_batch_size": 8,
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 8,
    "zero": 1,
    "precision": "mxfp8",
}


def read(model: dict[str, Any] = QWEN, hardware: str = "gb300", **run: Any) -> Case:
    case = case_of({"id": "x-1", "hardware": hardware, "model": model, "run": RUN | run, "measured": {"step_s": 1.0}})
    assert case.skipped is None and case.strategy is not None, case.skipped
    return case


def strategy(case: Case) -> Strategy:
    assert case.strategy is not None
    return case.strategy


@pytest.mark.parametrize(
    "recipe", recipes(), ids=lambda r: "-".join((r.family, r.model, r.devices[0], r.precision, *r.releases[:1]))
)
def test_every_recipe_is_a_layout_that_runs(recipe: Recipe) -> None:
    sizes, model = dict(recipe.layout), shipped_model(recipe.model)
    dp = sizes["world_size"] // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    settings = {key: value for key, value in recipe.settings.items() if key != "offload_layers"}
    zero = settings.pop("zero", 3 if recipe.family == "nemo-automodel" else 1)
    shard = settings.pop("zero_shard_size", dp * sizes["cp"])
    run = Strategy(
        **(sizes | settings),
        seq_len=4096,
        dp=dp,
        zero=zero,
        zero_shard_size=shard,
        precision=recipe.precision,
        schedule="interleaved" if sizes["vpp"] > 1 else "1f1b",
        num_micro_batches=8 * sizes["pp"],
        tp_mode="msp",
        framework=(framework := " ".join((recipe.family, *recipe.releases[-1:]))),
        **({} if "fp8_recipe" in settings else {"fp8_recipe": framework_of(framework).flags.get("fp8_recipe", "delayed")}),
    )
    assert run.world_size == sizes["tp"] * sizes["pp"] * sizes["cp"] * dp
    assert set(recipe.devices) <= {path.stem for path in FOLDER.glob("*.json")}
    if run.pipeline_layout or model.num_hidden_layers % (run.pp * run.vpp) == 0:
        check_framework(model, run)


def test_a_run_gets_what_its_release_has() -> None:
    new, old = strategy(read()), strategy(read(framework="megatron-bridge 26.04"))
    assert (new.moe_exchange_overlap, new.moe_fused_experts, new.cuda_graphs, new.moe_dispatcher) == (
        True,
        True,
        True,
        "hybridep",
    )
    assert (old.moe_exchange_overlap, old.moe_fused_experts, old.cuda_graph_modules, old.moe_dispatcher) == (
        False,
        False,
        "moe_router+moe_preprocess",
        "hybridep",
    )
    assert old.cuda_graphs and not new.cuda_graph_modules
    assert any(
        line.startswith("moe_exchange_overlap: True (megatron-bridge's performance recipe") for line in read().assumptions
    )
    assert (new.fp8_attention, old.fp8_attention) == (True, False)


def test_what_a_run_states_stands() -> None:
    stated = strategy(read(moe_exchange_overlap=False, recompute="full"))
    assert (stated.moe_exchange_overlap, stated.recompute, stated.moe_dispatcher) == (False, "full", "hybridep")


def test_more_gpus_repeat_a_recipe() -> None:
    assert strategy(read(world_size=64, global_batch_size=4096)).moe_exchange_overlap


@pytest.mark.parametrize(
    "other",
    [
        {"framework": "megatron-core 0.14"},
        {"framework": "megatron-bridge 27.01"},
        {"micro_batch_size": 2},
        {"ep": 4},
        {"precision": "bf16", "micro_batch_size": 4},
    ],
)
def test_another_run_gets_nothing(other: dict[str, Any]) -> None:
    assert not any("performance recipe" in line for line in read(**other).assumptions)
    assert not any("performance recipe" in line for line in read({**QWEN, "num_hidden_layers": 24}).assumptions)


def test_a_named_model_has_what_its_preset_has() -> None:
    case = read(GPT_OSS, hardware="gb200", precision="bf16", framework="megatron-core")
    assert case.model is not None and case.model.mlp_bias and case.model.clamped_gate and case.model.scaled_rope
    assert any(line.startswith("model: mlp_bias, attention_sinks, clamped_gate, scaled_rope") for line in case.assumptions)
    for other in ({"name": "mine"}, {"num_hidden_layers": 35}):
        found = read({**GPT_OSS, **other}, hardware="gb200", precision="bf16", framework="megatron-core").model
        assert found is not None and not found.mlp_bias


# fmt: off
DEEPSEEK = {"name": "deepseek-v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
            "num_attention_heads": 128, "vocab_size": 129280, "first_k_dense_replace": 3, "num_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "shared_expert_intermediate_size": 2048,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# fmt: on


def test_deepseek_has_the_layout_and_the_predicted_token_of_its_recipe() -> None:
    run = {
        "framework": "megatron-bridge 26.04",
        "world_size": 1024,
        "global_batch_size": 8192,
        "micro_batch_size": 1,
        "tp": 2,
        "pp": 8,
        "vpp": 4,
        "ep": 64,
        "precision": "bf16",
    }
    case = read(DEEPSEEK, "h100_sxm", **run)
    found = strategy(case)
    assert (found.pipeline_layout, found.tp_mode, found.recompute_modules) == ("Et|(tt|)*30mL", "msp", "mla_up_proj+mlp")
    assert case.model is not None and case.model.num_nextn_predict_layers == 1
    other = read(DEEPSEEK, "h100_sxm", **run | {"framework": "nemo automodel", "zero": 0, "vpp": 1, "pp": 1, "tp": 1}).model
    assert other is not None and other.num_nextn_predict_layers == 0
    stated = read({**DEEPSEEK, "num_nextn_predict_layers": 0}, "h100_sxm", **run, pipeline_layout="Et|(tt|)*30L").model
    assert stated is not None and stated.num_nextn_predict_layers == 0


def test_layers_are_offloaded_where_the_host_is_described() -> None:
    llama = {
        "name": "llama3-70b",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    run = {
        "framework": "megatron-bridge 26.04",
        "world_size": 64,
        "global_batch_size": 256,
        "micro_batch_size": 2,
        "ep": 1,
        "zero": 3,
        "precision": "fp8",
        "seq_len": 8192,
    }
    assert strategy(read(llama, "gb200", **run)).offload_layers == 40
    assert cluster_of(read_datasheet(FOLDER / "gb200.json").device).host_link == 225e9


def test_no_group_of_one_rank_sends_tokens_between_ranks() -> None:
    run = {"framework": "nemo automodel", "world_size": 64, "micro_batch_size": 2, "zero": 3, "precision": "bf16", "ep": 1}
    assert strategy(read(GPT_OSS, "h100_sxm", **run, moe_dispatcher="deepep")).ep == 64
    assert strategy(read(GPT_OSS, "h100_sxm", **run, moe_dispatcher="alltoall")).ep == 1


GROK = {
    "name": "grok1-314b",
    "hidden_size": 6144,
    "intermediate_size": 32768,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32768,
}
GROK_RUN = {
    "framework": "nemo 24.12",
    "world_size": 512,
    "global_batch_size": 1024,
    "micro_batch_size": 1,
    "tp": 4,
    "pp": 8,
    "vpp": 8,
    "cp": 2,
    "ep": 8,
    "precision": "bf16",
    "seq_len": 8192,
}


def test_a_release_is_found_wherever_it_stands_in_a_framework_s_name() -> None:
    early = strategy(read(GROK, "h100_sxm", **GROK_RUN | {"framework": "nemo 24.09/24.11"}))
    assert (early.etp, early.flash_generation, early.moe_grouped_gemm) == (4, 2, False)
    late = strategy(read(GROK, "h100_sxm", **GROK_RUN | {"framework": "nemo 25.05 (megatron-core)"}))
    assert (late.etp, late.flash_generation, late.moe_grouped_gemm, late.moe_capacity_factor) == (1, 0, True, 1.0)
    # without a recipe etp is tp
    assert strategy(read(GROK, "h100_sxm", **GROK_RUN | {"framework": "nemo 25.11"})).etp == 4


def test_a_recipe_may_train_fewer_layers_than_its_model_has() -> None:
    small = GROK_RUN | {"world_size": 64, "global_batch_size": 128, "pp": 1, "vpp": 1}
    assert strategy(read({**GROK, "num_hidden_layers": 8}, "h100_sxm", **small)).flash_generation == 2
    assert strategy(read({**GROK, "num_hidden_layers": 12}, "h100_sxm", **small)).flash_generation == 0


@pytest.mark.parametrize("framework", ["nemo 24.12", "megatron-bridge 26.06"])
def test_fine_tuning_runs_pack_short_documents(framework: str) -> None:
    llama = {
        "name": "llama3-8b SFT",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    run = {"framework": framework, "precision": "bf16", "micro_batch_size": 1, "ep": 1}
    found = read(llama, "h100_sxm", **run)
    assert strategy(found).document_tokens == 200
    assert any(line.startswith("document_lengths: 200 (fine-tuning recipes pack SQuAD") for line in found.assumptions)
    assert strategy(read(llama, "h100_sxm", **run, document_lengths="512")).document_tokens == 512
    assert strategy(read(llama | {"name": "llama3-8b"}, "h100_sxm", **run)).document_tokens == 0
    assert strategy(read(llama, "h100_sxm", **run | {"framework": "megatron-core"})).document_tokens == 0
