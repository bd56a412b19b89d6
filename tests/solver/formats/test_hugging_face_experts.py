"""Hugging Face configs of mixtures of experts and of latent attention: which layers, which experts, which router."""

from __future__ import annotations

from typing import Any

import pytest
from references import nextn_parameters

from profiler.errors import InputError
from solver.formats.hugging_face.model import model_of_config
from solver.spec.layer_kinds import has_experts, layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import parameters

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
QWEN = SHAPE | {"model_type": "qwen2_moe", "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
ROUTED = SHAPE | {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEEPSEEK = ROUTED | LATENT | {"model_type": "deepseek_v3", "q_lora_rank": 256}
LLAMA4 = SHAPE | {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1, "attention_chunk_size": 8192}
GLM = ROUTED | {"model_type": "glm4_moe", "attention_bias": True}
OSS = SHAPE | {"model_type": "gpt_oss", "num_local_experts": 16, "num_experts_per_tok": 4}
ERNIE = SHAPE | {"model_type": "ernie4_5_moe", "moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 512}


def read(config: dict[str, Any]) -> ModelSpec:
    return model_of_config(config, "config.json", "m")


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (QWEN, range(8)),
        (QWEN | {"decoder_sparse_step": 2}, (1, 3, 5, 7)),
        (QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5, 7)),
        (DEEPSEEK | {"first_k_dense_replace": 3}, range(3, 8)),
        (DEEPSEEK | {"first_k_dense_replace": 1, "moe_layer_freq": 3}, (3, 6)),
        (GLM | {"first_k_dense_replace": 1}, range(1, 8)),
        (LLAMA4, range(8)),
        (LLAMA4 | {"interleave_moe_layer_step": 2}, (1, 3, 5, 7)),
        (LLAMA4 | {"interleave_moe_layer_step": 2, "moe_layers": [0, 7]}, (0, 7)),
        (ERNIE, range(1, 8)),
        (ERNIE | {"moe_layer_start_index": 3, "moe_layer_end_index": 6, "moe_layer_interval": 2}, (3, 5)),
    ],
)
def test_the_layers_with_experts_are_read(config: dict[str, Any], layers: range | tuple[int, ...]) -> None:
    model = read(config)
    assert [layer for layer in range(8) if has_experts(model, layer)] == [*layers]


@pytest.mark.parametrize(
    ("config", "router"),
    [
        (QWEN, ("softmax", False, 0)),
        (OSS, ("softmax", True, 0)),
        (LLAMA4, ("sigmoid", False, 0)),
        (GLM, ("sigmoid", True, 0)),
        (GLM | {"n_group": 1, "topk_group": 1}, ("sigmoid", True, 0)),
        (DEEPSEEK, ("sigmoid", True, 0)),
        (DEEPSEEK | {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1}, ("sigmoid", True, 0)),
        (DEEPSEEK | {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc"}, ("sigmoid", True, 8)),
        (DEEPSEEK | {"n_group": 8, "topk_group": 8}, ("sigmoid", True, 0)),  # a token may use all groups
        (DEEPSEEK | {"model_type": "deepseek_v2", "n_group": 8, "topk_group": 3}, ("softmax", False, 0)),  # greedy: no groups
        (
            DEEPSEEK | {"model_type": "deepseek_v2", "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
            ("softmax", False, 8),
        ),
    ],
)
def test_the_router_is_read(config: dict[str, Any], router: tuple[str, bool, int]) -> None:
    model = read(config)
    assert (model.router_score, model.router_bias, model.router_groups) == router


def test_widths_of_experts_are_read() -> None:
    def widths(config: dict[str, Any]) -> tuple[int, int, int]:
        model = read(config)
        return model.intermediate_size, model.moe_intermediate_size, model.shared_expert_intermediate_size

    assert widths(QWEN | {"shared_expert_intermediate_size": 256}) == (4096, 512, 256)
    assert widths(DEEPSEEK) == widths(GLM) == (4096, 512, 2 * 512)
    assert widths(OSS) == (4096, 4096, 0)
    assert widths(LLAMA4 | {"intermediate_size_mlp": 8192}) == (8192, 4096, 4096)  # its experts have intermediate_size


def test_the_shared_expert_of_qwen2_has_a_gate() -> None:
    assert read(QWEN).shared_expert_gate and read(QWEN).qkv_bias and not read(QWEN).output_bias
    assert not read(QWEN | {"model_type": "qwen3_moe"}).shared_expert_gate
    assert read(QWEN | {"model_type": "qwen3_moe"}).qk_norm == "head"


def test_heads_of_qwen3_are_as_wide_as_their_class_has_them() -> None:
    """Qwen3Config states 128; Qwen3MoeConfig states none, and its layers divide the hidden size (here 2048 / 32)."""
    dense = {
        "model_type": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 151936,
    }
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    assert (read(dense).head_dim, read(dense | experts).head_dim) == (128, 64)
    assert read(dense | experts | {"head_dim": 128}).head_dim == 128


def test_dots_has_norms_a_bias_that_balances_and_seldom_a_window() -> None:
    dots = {
        "model_type": "dots1",
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "vocab_size": 152064,
    }
    model = read(dots | {"n_group": 1, "topk_group": 1, "scoring_func": "noaux_tc", "sliding_window": None})
    assert (model.qk_norm, model.router_score, model.router_bias, model.router_groups) == ("head", "sigmoid", True, 0)
    assert (model.shared_expert_intermediate_size, model.first_k_dense_replace, model.sliding_window) == (2816, 1, 0)
    late = read(dots | {"sliding_window": 4096, "max_window_layers": 3})
    assert late.layer_types == ("full_attention",) * 3 + ("sliding_attention",) and late.sliding_window == 4096
    assert read(dots | {"sliding_window": 4096}).sliding_window == 0  # of layers from the 62nd on


def test_latent_attention_is_read() -> None:
    model = read(DEEPSEEK)
    assert (model.qk_head_dim, model.value_head_dim, model.num_key_value_heads) == (192, 128, 8)
    assert read(DEEPSEEK | {"q_lora_rank": None}).q_lora_rank == 0
    assert read(DEEPSEEK | {"head_dim": 64, "qk_head_dim": 192}) == model  # as newer configs add
    small = read(SHAPE | LATENT | {"model_type": "minicpm3", "v_head_dim": None, "q_lora_rank": 256})
    assert (small.num_experts, small.value_head_dim, small.tie_word_embeddings) == (0, 1024 // 8, True)


def test_multi_token_prediction_is_read() -> None:
    for config in (DEEPSEEK, GLM):
        model = read(config | {"num_nextn_predict_layers": 1})
        assert model.num_nextn_predict_layers == 1
        assert parameters(model) == parameters(read(config))  # it is counted apart
        assert nextn_parameters(model) > 2 * 1024**2


def test_layers_of_llama4_see_their_chunk_or_have_no_rotary_embedding() -> None:
    kinds = layer_kinds(read(LLAMA4))
    assert [(k.chunk, k.rope) for k in kinds.kinds] == [(8192, True), (0, False)]
    assert [*kinds.of_layer] == [0, 0, 0, 1, 0, 0, 0, 1]
    assert read(LLAMA4 | {"no_rope_layers": [0, 1] * 4}).layer_types == ("full_attention", "chunked_attention") * 4
    nested = {"model_type": "llama4", "text_config": {"model_type": "llama4_text", "num_hidden_layers": 8}}
    assert read(nested).attention_chunk_size == 8192 and read(nested).num_experts == 16
    nested["text_config"]["attention_chunk_size"] = None  # stated, and off
    assert read(nested).attention_chunk_size == 0 and len(layer_kinds(read(nested)).kinds) == 2


def test_gpt_oss_has_sinks_biases_and_alternating_windows() -> None:
    model = read(OSS)
    assert model.attention_sinks and model.qkv_bias and model.output_bias and model.mlp_bias and model.head_dim == 64
    stated = read(OSS | {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 4})
    for spec in (model, stated):
        assert [(k.window, int(n)) for k, n in zip(layer_kinds(spec).kinds, layer_kinds(spec).counts, strict=True)] == [
            (128, 4),
            (0, 4),
        ]


def test_gpt_oss_may_name_its_experts_as_its_first_configs_did() -> None:
    first = {k: v for k, v in OSS.items() if "experts" not in k} | {"num_experts": 16, "experts_per_token": 4}
    assert read(first) == read(OSS)


def test_grok_names_its_soft_cap() -> None:
    grok = SHAPE | {"model_type": "grok-1", "num_experts": 8, "num_experts_per_tok": 2}
    assert read(grok).capped_scores and read(grok).norms_per_layer == 4
    assert not read(grok | {"max_attn_value": 0}).capped_scores


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN | {"num_experts_per_tok": 17}, "num_experts_per_tok is 17; it must be between 1 and num_experts 16"),
        ({k: v for k, v in QWEN.items() if k != "num_experts"}, "the model needs 'num_experts'"),
        ({k: v for k, v in QWEN.items() if k != "moe_intermediate_size"}, "needs moe_intermediate_size"),
        ({k: v for k, v in DEEPSEEK.items() if k != "kv_lora_rank"}, "the model needs 'kv_lora_rank'"),
        ({k: v for k, v in DEEPSEEK.items() if k != "v_head_dim"}, "latent attention needs qk_nope_head_dim"),
        (DEEPSEEK | {"topk_method": "best"}, "topk_method is 'best', which is not modelled"),
        (DEEPSEEK | {"scoring_func": "tanh"}, "router_score is 'tanh'; it must be one of softmax, sigmoid"),
        (DEEPSEEK | {"attention_bias": True}, "attention_bias is True, which is not modelled"),
        (DEEPSEEK | {"n_group": 5, "topk_group": 2}, "router_groups 5 does not divide num_experts 16"),
        (DEEPSEEK | {"index_topk": 2048, "index_head_dim": 128}, "index_topk of deepseek_v3 is not modelled"),
        (QWEN | {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers of qwen2_moe is not modelled"),
        (QWEN | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; it must be a positive whole number"),
        (QWEN | {"mlp_only_layers": [99]}, "; it must be a list of layers from 0 to 7"),
        (QWEN | {"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be positive and at most"),
        (QWEN | {"num_hidden_layers": 20_000, "mlp_only_layers": [0]}, "num_hidden_layers is 20000; it must be at most 4096"),
        (OSS | {"moe_intermediate_size": 5}, "moe_intermediate_size of gpt_oss is not modelled"),
        (LLAMA4 | {"layer_types": ["sliding_attention"] * 8}, "layer_types has 'sliding_attention', which is not modelled"),
        (ERNIE | {"use_bias": True}, "use_bias is True, which is not modelled"),
        (ERNIE | {"moe_num_experts": [16, 16]}, "num_experts is a list; it must be a whole number"),
        (SHAPE | {"model_type": "deepseek_v32"}, "a model with learned sparse attention, which is not modelled"),
    ],
)
def test_what_is_not_expressed_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read(config)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_qwen3_experts_as_transformers_5_writes_them() -> None:
    new = {"num_local_experts" if key == "num_experts" else key: value for key, value in QWEN.items()}
    assert read(new | {"model_type": "qwen3_moe"}) == read(QWEN | {"model_type": "qwen3_moe"})


@pytest.mark.parametrize(("config", "dense"), [(DEEPSEEK, 3), (GLM, 1), (DEEPSEEK | {"model_type": "deepseek_v2"}, 0)])
def test_saved_configs_leave_out_the_defaults_of_their_class(config: dict[str, Any], dense: int) -> None:
    """DeepseekV3Config has 3 dense layers and a shared expert, Glm4MoeConfig one of each, DeepseekV2Config no dense layer."""
    found = read(config)
    assert sum(not has_experts(found, layer) for layer in range(8)) == dense == found.first_k_dense_replace
    stated = read(config | {"first_k_dense_replace": 0})
    assert stated.first_k_dense_replace == 0 and stated.shared_expert_intermediate_size == 1024
    if dense:
        alone = {key: value for key, value in config.items() if key != "n_shared_experts"}
        assert read(alone).shared_expert_intermediate_size == 512
