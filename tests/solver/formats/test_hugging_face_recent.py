"""Hugging Face configs of what transformers 5.24 builds: what each architecture does differently from its kin.

That their parameters are those of transformers' models is tested with the checkpoints (tests/data/checkpoints.json).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from solver.formats.hugging_face.model import model_of_config, unread_keys
from solver.formats.hugging_face.refused_types import NOT_DECODERS
from solver.spec.layer_kinds import has_experts, layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import parameters

CHECKPOINTS = {
    checkpoint["config"].get("model_type"): checkpoint["config"]
    for checkpoint in json.loads((Path(__file__).resolve().parents[2] / "data" / "checkpoints.json").read_text())["checkpoints"]
}


def read(model_type: str, **changes: Any) -> ModelSpec:
    return model_of_config(CHECKPOINTS[model_type] | changes, "config.json", "m")


def layers(model: ModelSpec, first: int) -> list[tuple[int, bool]]:
    """(window, rotary embedding) of the first layers."""
    found = layer_kinds(model)
    return [(found.kinds[kind].window, found.kinds[kind].rope) for kind in found.of_layer[:first]]


def test_the_announced_sizes_are_those_of_the_names() -> None:
    """K-EXAONE 236B-A23B, Trinity Mini 26B-A3B, Hunyuan-A13B of 80 B, Granite 3.0 3B-A800M, Solar Open 102B-A12B."""

    def billions(model_type: str) -> tuple[float, float]:
        model = read(model_type)
        return round(parameters(model) / 1e9, 1), round(parameters(model, active=True) / 1e9, 1)

    named = {called: billions(called) for called in ("exaone_moe", "afmoe", "hunyuan_v1_moe", "granitemoe", "solar_open")}
    assert named == {
        "exaone_moe": (236.6, 23.7),
        "afmoe": (26.1, 3.5),
        "hunyuan_v1_moe": (80.4, 12.7),
        "granitemoe": (3.3, 0.9),
        "solar_open": (102.7, 12.1),
    }


def test_parameters_of_jais_by_hand() -> None:
    """Its layers have LayerNorms, biases everywhere and an MLP without a gate."""
    h, mlp = 3328, 26624
    layer = 4 * (h * h + h) + (h * mlp + mlp) + (mlp * h + h) + 2 * 2 * h
    assert parameters(read("jais2")) == 2 * 150272 * h + 32 * layer + 2 * h
    assert read("jais2").norm == "layernorm" and not read("jais2", attention_bias=False).qkv_bias


def test_parameters_of_trinity_by_hand() -> None:
    """Its attention has a gate as wide as its queries, and its layers four norms."""
    h, wide = 2048, 32 * 128
    attention = 3 * h * wide + 2 * h * 4 * 128 + 2 * 128 + 4 * h
    experts = 128 * (3 * h * 1024 + h + 1) + 3 * h * 1024
    assert parameters(read("afmoe")) == 2 * 200192 * h + 32 * attention + 2 * 3 * h * 6144 + 30 * experts + h


@pytest.mark.parametrize(
    ("model_type", "changes", "first"),
    [
        ("afmoe", {}, [(2048, True)] * 3 + [(0, False)]),
        ("afmoe", {"global_attn_every_n_layers": 2}, [(2048, True), (0, False)] * 2),
        ("exaone_moe", {}, [(128, True)] * 3 + [(0, False)]),
        ("flint", {}, [(0, False)] * 2 + [(513, True)] * 3 + [(0, False)]),
        ("kolibri1", {}, [(513, True)] * 4 + [(0, False)]),
        ("cohere2_moe", {}, [(4096, True)] * 3 + [(0, False)]),
        ("cohere2_moe", {"first_k_dense_replace": 2}, [(0, True)] * 2 + [(4096, True)] * 3 + [(0, False)]),
        ("mellum", {}, [(0, True)] * 4),
        ("mellum", {"layer_types": ["sliding_attention", "full_attention"] * 14}, [(1024, True), (0, True)]),
        ("granite_swa", {}, [(0, True)] + [(128, True)] * 3),
        ("granite_swa", {"layer_rope_theta": [0, 1e4] * 12}, [(0, False), (128, True), (128, False), (128, True)]),
        ("granitemoe_swa", {}, [(0, True)] + [(128, True)] * 3),
        ("lara_mini", {}, [(0, False), (512, True), (0, False), (0, False), (512, True)]),
        ("olmo_hybrid", {}, [(0, False)] * 3 + [(0, True)]),
        ("vaultgemma", {}, [(4096, True), (0, True)]),
    ],
)
def test_windows_and_rotary_embedding_are_read_for_each_layer(
    model_type: str, changes: dict[str, Any], first: list[tuple[int, bool]]
) -> None:
    assert layers(read(model_type, **changes), len(first)) == first


def test_the_last_layer_of_flint_sees_all_tokens() -> None:
    assert layers(read("flint"), 49)[-2:] == [(513, True), (0, False)] and layers(read("flint"), 49)[45] == (0, False)


def test_linear_attention_is_read_with_the_sizes_of_its_class() -> None:
    kinds = ["linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention"]
    assert read("lara_mini").layer_types[:5] == tuple(kinds) and not read("lara_mini").attention_gate
    olmo = read("olmo_hybrid", linear_key_head_dim=None, linear_value_head_dim=None, linear_num_key_heads=None)
    assert (olmo.linear_num_key_heads, olmo.linear_key_head_dim, olmo.linear_value_head_dim) == (30, 96, 192)
    assert olmo.position == "rope"
    assert read("olmo_hybrid", rope_parameters={"rope_type": "default", "rope_theta": None}).position == "none"


@pytest.mark.parametrize(
    ("model_type", "changes", "dense"),
    [
        ("afmoe", {}, [0, 1]),
        ("hy_v3", {}, [0]),
        ("solar_open", {}, []),
        ("sarvam_moe", {"first_k_dense_replace": None}, [0]),
        ("flint", {"mlp_only_layers": None}, [0, 1]),
        ("mellum", {"mlp_layer_types": ["sparse", "dense"] * 14}, [*range(1, 28, 2)]),
        ("cohere2_moe", {"first_k_dense_replace": 3}, [0, 1, 2]),
    ],
)
def test_dense_layers_are_read(model_type: str, changes: dict[str, Any], dense: list[int]) -> None:
    model = read(model_type, **changes)
    assert [layer for layer in range(model.num_hidden_layers) if not has_experts(model, layer)] == dense


def test_routers_are_read() -> None:
    routers = {
        called: (read(called).router_score, read(called).router_bias)
        for called in ("mistral4", "sarvam_mla", "flint", "hy_v3", "granitemoe", "lara_mini")
    }
    assert routers == {
        "mistral4": ("softmax", False),
        "sarvam_mla": ("sigmoid", True),
        "flint": ("sigmoid", False),
        "hy_v3": ("sigmoid", True),
        "granitemoe": ("softmax", False),
        "lara_mini": ("softmax", False),
    }
    grouped = read("mistral4", n_group=8, topk_group=4)
    assert (grouped.router_groups, grouped.router_topk_groups) == (8, 4)


def test_cohere_s_experts_have_their_own_widths_and_norms() -> None:
    assert read("cohere2_moe").norm == "layernorm" and not read("cohere2_moe").norm_bias
    model = read("cohere2_moe", rms_norm_eps=1e-6, num_shared_experts=2, prefix_dense_intermediate_size=512)
    assert (model.norm, model.intermediate_size, model.shared_expert_intermediate_size) == ("rmsnorm", 512, 2 * 22528)


def test_norms_of_kin_differ() -> None:
    norms = {called: read(called).norms_per_layer for called in ("hyperclovax", "vaultgemma", "glm4v_text", "cohere2_moe")}
    assert norms == {"hyperclovax": 4, "vaultgemma": 2, "glm4v_text": 4, "cohere2_moe": 1}
    assert read("hyperclovax", use_post_norm=False).norms_per_layer == 2
    assert read("persimmon").qk_norm_bias and read("persimmon", qk_layernorm=False).qk_norm == "none"


def test_names_of_the_code_beside_a_checkpoint_are_read() -> None:
    """Sarvam and InternLM 3 have names of their own for what transformers calls otherwise."""
    own = dict.fromkeys(("n_routed_experts", "n_shared_experts", "attention_bias"))
    sarvam = read("sarvam_moe", **own, num_experts=128, num_shared_experts=1, use_qkv_bias=False)
    assert sarvam == read("sarvam_moe")
    biased = read("internlm3", attention_bias=None, mlp_bias=None, qkv_bias=True, bias=True)
    assert biased == read("internlm3", attention_bias=True, mlp_bias=True) and biased.mlp_bias


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("apertus1p5_text", {"output_vocab_size": 131072}, "output_vocab_size is 131072"),
        ("biogpt", {"layerdrop": 0.1}, "layerdrop is 0.1"),
        ("exaone_moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types lists 1 layers; the model has 48"),
        ("glm4v_text", {"attention_bias": False}, "attention_bias is False"),
        ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta is "),
        ("helium", {"head_dim": 64}, "head_dim 64 times num_attention_heads differs from hidden_size"),
        ("hunyuan_v1_moe", {"moe_topk": [8, 4] * 16}, "moe_topk is .*layers with different experts are not modelled"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert is 2"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias is True"),
        ("internlm3", {"attention_bias": True}, "qkv_bias differs from bias"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("mellum", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers of mellum is not modelled"),
        ("olmo_hybrid", {"attention_bias": True}, "attention_bias is True"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("youtu", {"attention_bias": True}, "attention_bias is True"),
    ],
)
def test_what_is_not_described_is_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(model_type, **changes)


def test_every_key_of_these_checkpoints_is_known() -> None:
    recent = [*CHECKPOINTS][[*CHECKPOINTS].index("exaone_moe") :]
    assert {called: unread_keys(CHECKPOINTS[called]) for called in recent} == {called: [] for called in recent}


@pytest.mark.parametrize("called", ["lfm2", "longcat_flash", "mimo_v2_flash", "diffllama", "gemma3n_text", "nanochat"])
def test_refusals_say_what_a_model_is(called: str) -> None:
    with pytest.raises(InputError) as error:
        model_of_config(CHECKPOINTS["helium"] | {"model_type": called}, "config.json")
    assert str(error.value) == f"config.json: model_type {called} is {NOT_DECODERS[called]}, which is not modelled"
    assert NOT_DECODERS[called].startswith("a ")


def test_parameters_of_the_first_qwen_by_hand() -> None:
    """Its intermediate_size counts both halves of the MLP; q, k and v have biases, other linears unless no_bias is true."""
    h, half, tokens = 4096, 11008, 151936
    sizes = {"hidden_size": h, "intermediate_size": 2 * half, "num_hidden_layers": 32, "num_attention_heads": 32}
    others = {"kv_channels": 128, "vocab_size": tokens, "max_position_embeddings": 32768, "tie_word_embeddings": False}
    config = {"model_type": "qwen", "no_bias": True, "use_logn_attn": True, "use_dynamic_ntk": True, **sizes, **others}
    layer = 4 * h * h + 3 * h + 3 * h * half + 2 * h
    model = model_of_config(config, "config.json", "m")
    assert parameters(model) == 2 * tokens * h + 32 * layer + h == 7_721_324_544
    with_biases = model_of_config(config | {"no_bias": False}, "config.json", "m")
    assert with_biases.output_bias and with_biases.mlp_bias
