"""Runs whose framework's name means another release than it says, and what else a case leaves to be known."""

from __future__ import annotations

from typing import Any

import pytest

from solver.formats.cases.reading import Case, case_of
from solver.formats.cases.release import with_release
from solver.spec.frameworks import framework_of
from solver.spec.model_from_keys import model_from_keys
from solver.spec.model_size import parameters

LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def released(framework: str, hardware: str, gated: bool = True, **run: Any) -> dict[str, Any]:
    model = model_from_keys({**LLAMA, "gated_mlp": gated}, "model")
    return with_release({"framework": framework, **run}, model, hardware, [])


def case(model: dict[str, Any], framework: str = "megatron-core", hardware: str = "h100_sxm", **run: Any) -> Case:
    given = {"framework": framework, "world_size": 64, "seq_len": 4096, "global_batch_size": 256, **run}
    return case_of({"id": "X-1", "hardware": hardware, "model": model, "run": given, "measured": {"step_s": 1.0}})


@pytest.mark.parametrize(
    ("framework", "hardware", "run", "meant"),
    [
        ("DeepSpeed ZeRO-3", "h100_sxm", {}, "transformers-deepspeed"),
        ("DeepSpeed", "a100_sxm_80gb", {}, "transformers-deepspeed"),
        ("DeepSpeed", "a100_sxm_80gb", {"tp": 8}, "megatron-deepspeed"),
        ("torchtitan", "gb200", {}, "torchtitan-2025-06"),
        ("torchtitan", "h100_sxm", {}, "torchtitan-2024-12"),
        ("NeMo", "b200_sxm", {}, "nemo-25"),
        ("Meta internal (FSDP)", "h100_sxm", {"tp": 8, "pp": 16}, "generic"),
        ("PyTorch FSDP", "h100_sxm", {}, "fsdp"),
        ("llm-foundry/composer FSDP", "a100_sxm_40gb", {"grad_dtype": "bf16"}, "llm-foundry-2023"),
        ("llm-foundry/composer FSDP", "h100_sxm", {"grad_dtype": "fp32"}, "llm-foundry-2023-10"),
        ("ms-swift megatron", "h100_sxm", {"tp": 2}, "megatron-core-0.12"),
        ("ms-swift", "h100_sxm", {}, "fsdp"),
        ("ROCm Megatron-LM v25.6", "mi300x", {}, "megatron-core-0.12"),
        ("Megatron-Core 0.7", "h100_sxm", {}, "megatron-core-0.8"),
        ("Megatron-Core v0.10", "h100_sxm", {}, "megatron-core-0.12"),
        ("Megatron-LM v2.5", "a100_sxm_80gb", {}, "megatron-lm-2021"),
    ],
)
def test_the_release_that_a_name_means(framework: str, hardware: str, run: dict[str, Any], meant: str) -> None:
    assert framework_of(released(framework, hardware, **run)["framework"]).name == meant


def test_models_of_old_releases_have_the_attention_of_their_time() -> None:
    assert released("gpt-neox", "a100_sxm_80gb")["attention"] == "flash"
    assert "attention" not in released("megatron-deepspeed", "a100_sxm_80gb", gated=False)
    assert released("megatron-deepspeed", "a100_sxm_80gb", attention="unfused")["attention"] == "unfused"
    old = case(LLAMA | {"gated_mlp": False}, "megatron-lm 2021", "a100_sxm_80gb")
    assert old.strategy is not None and old.strategy.attention == "unfused"


def test_generic_trainers_split_the_sequence_since_hopper() -> None:
    assert released("our own", "h100_sxm", tp=8)["sequence_parallel"] is True
    assert "sequence_parallel" not in released("our own", "a100_sxm_80gb", tp=8)
    assert "sequence_parallel" not in released("our own", "h100_sxm", tp=8, tp_mode="mtp")


def test_ends_count_as_layers_where_they_make_the_stages_divide() -> None:
    """Llama 3.1 405B has 126 layers, so that with its ends 16 stages have eight each (arXiv 2407.21783, 3.3.2)."""
    found = case(LLAMA | {"num_hidden_layers": 126}, "our own", tp=4, pp=16).strategy
    assert found is not None
    assert found.account_for_embedding_in_pipeline_split and found.account_for_loss_in_pipeline_split


@pytest.mark.parametrize(
    ("run", "field", "value"),
    [
        ({"gradient_checkpointing": True}, "recompute", "full"),
        ({"gradient_checkpointing": "none"}, "recompute", "none"),
        ({"use_distributed_optimizer": True}, "zero", 1),
        ({"tp_size": 4}, "tp", 4),
        ({"torch_compile": True}, "compile", True),
        ({"zero": "stage 1"}, "zero", 1),
        ({"optimizer": "AdamW"}, "optimizer", "adam"),
        ({"seq_len": "8192"}, "seq_len", 8192),
        ({"precision": "fp8 current scaling"}, "fp8_recipe", "tensorwise"),
        ({"attention": "flash-attn"}, "attention", "flash"),
        ({"tp": 8, "tp_mode": "isp", "wp": 16, "zero": 1}, "zero_shard_size", 4),
    ],
)
def test_settings_in_the_words_of_other_tools(run: dict[str, Any], field: str, value: Any) -> None:
    found = case(LLAMA, **run)
    assert found.skipped is None and getattr(found.strategy, field) == value
    assert not [line for line in found.assumptions if line.startswith("not read")]


def test_models_in_the_words_of_other_tools() -> None:
    words = {
        "num_layers": 32,
        "hidden_size": 4096,
        "ffn_hidden_size": 14336,
        "num_heads": 32,
        "num_query_groups": 8,
        "vocab_size": 128256,
    }
    one, other = case(words).model, case(LLAMA).model
    assert one == other
    mixtral = case({**LLAMA, "num_experts": 8, "moe_top_k": 2}).model
    assert mixtral is not None and mixtral.moe_intermediate_size == 14336


def test_a_model_of_a_known_name_and_shape_has_its_blocks() -> None:
    gpt3 = {
        "name": "GPT3-175B",
        "hidden_size": 12288,
        "intermediate_size": 49152,
        "num_hidden_layers": 96,
        "num_attention_heads": 96,
        "vocab_size": 50257,
    }
    found = case(gpt3, tp=8, pp=8, seq_len=2048).model
    assert found is not None and not found.gated_mlp and found.norm == "layernorm"
    assert parameters(found) == pytest.approx(175e9, rel=0.01)


def test_a_hybrid_model_whose_layers_nobody_states_is_refused() -> None:
    assert "do not say which layers are no attention" in str(case({**LLAMA, "name": "nemotron-h-9b"}).skipped)
    assert case({**LLAMA, "name": "nemotron-340b"}).skipped is None


def test_rotary_positions_have_no_end_and_learned_ones_have() -> None:
    long = case({**LLAMA, "max_position_embeddings": 2048})
    assert long.skipped is None and "max_position_embeddings: 4096" in " ".join(long.assumptions)
    assert case({**LLAMA, "max_position_embeddings": 2048, "position": "learned"}).skipped


def test_dualpipe_hides_the_exchange() -> None:
    experts = {**LLAMA, "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
    found = case(experts, "HAI-LLM", schedule="DualPipe", pp=4, ep=8, micro_batch_size=1).strategy
    assert found is not None and found.moe_exchange_overlap and (found.schedule, found.pp) == ("dualpipev", 2)


def test_optimizer_states_on_the_host_need_no_stated_link() -> None:
    found = case(LLAMA, hardware="a100_sxm_80gb", optimizer_offload_fraction=1.0, zero=1)
    assert found.skipped is None
    assert (found.cluster["host_link_gb_s"], found.cluster["host_memory_gb_s"]) == (25, 40)


def test_adapters_of_other_frameworks_are_those_that_are_described() -> None:
    found = case(LLAMA, "fsdp", lora_rank=16)
    assert found.skipped is None and "adapters as under NeMo Automodel" in " ".join(found.assumptions)
    assert "not modelled with precision fp8" in str(case(LLAMA, "nemo 24.09", lora_rank=16, precision="fp8").skipped)
