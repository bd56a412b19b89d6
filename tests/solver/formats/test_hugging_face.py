"""Hugging Face configs: published checkpoints to the last parameter, and everything else refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from solver import load_problem
from solver.formats.cases.reading import case_of
from solver.formats.hugging_face.model import model_of_config, unread_keys
from solver.formats.hugging_face.model_types import FAMILIES
from solver.formats.hugging_face.refused_types import NOT_DECODERS, UNDESCRIBED
from solver.spec.layer_kinds import layer_kinds
from solver.spec.model import ModelSpec, check_model
from solver.spec.model_size import parameters

CHECKPOINTS = json.loads((Path(__file__).resolve().parents[2] / "data" / "checkpoints.json").read_text())["checkpoints"]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def read(config: dict[str, Any]) -> ModelSpec:
    return model_of_config(config, "config.json", "m")


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda c: c["name"])
def test_published_checkpoints_have_their_parameters(checkpoint: dict[str, Any]) -> None:
    assert parameters(read(checkpoint["config"])) == checkpoint["parameters"]


def test_the_checkpoints_cover_the_families() -> None:
    configs = [checkpoint["config"] for checkpoint in CHECKPOINTS]
    covered = {config.get("text_config", config)["model_type"] for config in configs}
    announced_only = {
        "apertus",
        "arcee",
        "bailing_moe_v2",
        "cwm",
        "ernie4_5_moe",
        "exaone4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm4v_moe_text",
        "grok-1",
        "kimi_k2",
        "minimax_m2",
        "minicpm3",
        "ministral3",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    }  # to some digits, in other tests
    without_a_figure = {"codegen", "cohere2", "glm", "glm4", "granite", "minicpm", "nemotron"}
    as_another = {"granitemoehybrid", "qwen3_vl_moe_text"}  # as the family of the same shapes, below
    assert set(FAMILIES) - covered == announced_only | without_a_figure | as_another


def sizes(hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int = 131072, **more: Any) -> dict[str, Any]:
    """Return the keys of a model whose heads are 128 wide."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "vocab_size": vocab,
    } | more


GLM_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "vocab_size": 154880,
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
}
EXAONE: dict[str, Any] = {"model_type": "exaone4"} | sizes(5120, 27392, 64, 40, 8, 102400)


@pytest.mark.parametrize(
    ("billions", "config"),
    [
        (
            70.6,
            {"model_type": "apertus", "hidden_act": "xielu", "qk_norm": True, "post_norm": False}
            | sizes(8192, 43008, 80, 64, 8),
        ),
        (4.62, {"model_type": "arcee", "hidden_act": "relu2"} | sizes(2560, 18432, 36, 20, 4, 128004)),
        (32.6, {"model_type": "cwm"} | sizes(6144, 21504, 64, 48, 8, 128256)),
        (30.95 + 2 * 5120 * 102400 / 1e9, EXAONE | {"sliding_window": 4096, "sliding_window_pattern": "LLLG"}),
        (29.9, GLM_FLASH),
        (
            106.85,
            {
                "model_type": "glm4v_moe",
                "vision_config": {"depth": 24},
                "text_config": {"model_type": "glm4v_moe_text", "head_dim": 128, "vocab_size": 151552},
            },
        ),
        (3.43, {"model_type": "ministral3", "tie_word_embeddings": True} | sizes(3072, 9216, 26, 32, 8)),
        (8.49, {"model_type": "ministral3"} | sizes(4096, 14336, 34, 32, 8)),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_models_of_late_2025_have_the_parameters_announced(billions: float, config: dict[str, Any]) -> None:
    """Exaone 4 announces 30.95 B without its two tables."""
    assert parameters(read(config)) / 1e9 == pytest.approx(billions, abs=0.05 if billions > 10 else 0.005)
    assert [key for key in unread_keys(config) if "vision_config" not in key] == []


def test_layers_of_exaone_4_that_see_all_tokens_have_no_rotary_embedding() -> None:
    def pattern(**keys: Any) -> str:
        model = read(EXAONE | {"num_hidden_layers": 6} | keys)
        if not model.sliding_window:
            return "all"
        if model.layer_types:
            assert model.no_rope_layers == tuple(int(kind == "sliding_attention") for kind in model.layer_types)
        else:
            assert model.no_rope_layers == tuple(int((n + 1) % model.sliding_window_every != 0) for n in range(6))
        return "".join("L" if rope else "G" for rope in model.no_rope_layers)

    assert pattern() == "LLLGLL" and pattern(sliding_window_pattern=2) == "LGLGLG"
    assert pattern(sliding_window_pattern="LLG") == "LLGLLG" and pattern(sliding_window_pattern="LL") == "LLLLLG"
    assert pattern(sliding_window=None) == "all"
    assert pattern(layer_types=["full_attention"] + ["sliding_attention"] * 5) == "GLLLLL"
    with pytest.raises(InputError, match="sliding_window_pattern is 'LLX'; it must be letters L and G"):
        pattern(sliding_window_pattern="LLX")


def test_layers_of_glm_flash_are_dense_or_have_experts() -> None:
    assert read(GLM_FLASH).first_k_dense_replace == 1 and read(GLM_FLASH).v_head_dim == 256
    kinds = ["dense", "sparse", "dense", *["sparse"] * 44]
    assert read(GLM_FLASH | {"mlp_layer_types": kinds}).moe_layer_freq == (0, 1, 0, *[1] * 44)
    for wrong, message in (
        (["dense"], "mlp_layer_types lists 1 layers; the model has 47"),
        (["moe"] * 47, "must be a list of"),
    ):
        with pytest.raises(InputError, match=message):
            read(GLM_FLASH | {"mlp_layer_types": wrong})


def test_the_first_of_four_layers_of_cwm_sees_all_tokens() -> None:
    model = read({"model_type": "cwm"} | sizes(6144, 21504, 8, 48, 8))
    assert model.sliding_window == 8192 and [kind[:4] for kind in model.layer_types] == ["full", "slid", "slid", "slid"] * 2


LING_MINI: dict[str, Any] = {
    "model_type": "bailing_moe_v2",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 157184,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_rmsnorm": True,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "router_dtype": "fp32",
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "norm_topk_prob": True,
}


def test_ling_has_the_parameters_announced() -> None:
    """Announced are 16.26 B with 1.43 B active (Ling-mini-2.0) and 103 B with 6.1 B (Ling-flash-2.0, counted 6.15)."""
    flash = LING_MINI | {
        "hidden_size": 4096,
        "intermediate_size": 9216,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "moe_intermediate_size": 1024,
        "moe_shared_expert_intermediate_size": 1024,
    }
    for config, total, active in ((LING_MINI, 16.26, 1.43), (flash, 102.9, 6.15)):
        model = read(config)
        assert parameters(model) / 1e9 == pytest.approx(total, abs=0.05 if total > 100 else 0.005)
        assert parameters(model, active=True) / 1e9 == pytest.approx(active, abs=0.05 if active > 5 else 0.005)
        assert unread_keys(config) == []
    assert read(LING_MINI).router_topk_groups == 4 and read(LING_MINI).router_score == "sigmoid"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"score_function": "softmax"}, "score_function is softmax, which is not modelled"),
        ({"moe_shared_expert_intermediate_size": 1024}, "moe_shared_expert_intermediate_size is 1024, which is not modelled"),
        ({"num_shared_experts": None}, "the model needs 'num_shared_experts'"),
        ({"use_rmsnorm": False}, "use_rmsnorm of bailing_moe_v2 is not modelled"),
        ({"kv_lora_rank": 512}, "kv_lora_rank of bailing_moe_v2 is not modelled"),
        ({"layer_group_size": 5}, "layer_group_size of bailing_moe_v2 is not modelled"),
    ],
)
def test_what_ling_does_not_do_is_refused(other: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(LING_MINI | other)


M2: dict[str, Any] = {
    "model_type": "minimax_m2",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "head_dim": 128,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "vocab_size": 200064,
    "tie_word_embeddings": False,
    "max_position_embeddings": 196608,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "shared_intermediate_size": 0,
    "attn_type_list": [1] * 62,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "use_mtp": False,
    "num_mtp_modules": 3,
    "mtp_transformer_layers": 1,
    "rope_theta": 5000000,
}


def test_minimax_m2_is_read_without_its_modules() -> None:
    """Announced are 229 B with 10 B active; by hand, a layer has 44.04 M of attention, 3,624.7 M of experts and router."""
    model = read(M2)
    tables, attention = 2 * 200064 * 3072, 3072 * 128 * (2 * 48 + 2 * 8) + 128 * (48 + 8)
    by_hand = tables + 62 * (attention + 256 * (3 * 3072 * 1536 + 3072) + 2 * 3072) + 3072
    assert abs(parameters(model) - by_hand) <= 62 * 256 and parameters(model) / 1e9 == pytest.approx(228.7, abs=0.05)
    assert parameters(model, active=True) / 1e9 == pytest.approx(10.0 + 1.0, abs=0.1)  # of which the tables hold 1.23
    assert unread_keys(M2) == []
    bare = read({key: value for key, value in M2.items() if key not in ("use_qk_norm", "use_routing_bias")})
    assert bare == model and (bare.qk_norm, bare.router_bias) == ("all", True)  # which transformers builds without these keys
    published = {f"layernorm_{of}_beta": 1.0 for of in ("linear_attention", "full_attention", "mlp")}
    published |= {"use_mtp": True, "mlp_intermediate_size": 8192, "shared_moe_mode": "sigmoid"}
    assert read(M2 | published) == model
    assert [key.split()[0] for key in unread_keys(M2 | published)] == ["num_mtp_modules"]
    for other, message in (
        ({"layernorm_mlp_beta": 3.5}, "layernorm_mlp_beta is 3.5"),
        ({"attn_type_list": [0] + [1] * 61}, "attn_type_list has layers of another kind than 1"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type is per_head"),
        ({"shared_intermediate_size": 8192}, "shared_intermediate_size is 8192"),
    ):
        with pytest.raises(InputError, match=message):
            read(M2 | other)


def test_the_language_model_of_qwen3_vl_is_qwen3() -> None:
    shapes = next(c["config"] for c in CHECKPOINTS if c["name"] == "Qwen3-30B-A3B")
    text = shapes | {"model_type": "qwen3_vl_moe_text", "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}}
    whole = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"depth": 27}}
    assert read(whole) == read(shapes)
    later = {key: value for key, value in text.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert read(whole | {"text_config": later}) == read(shapes)


def test_sequences_beyond_the_context_are_refused_where_a_problem_is_made() -> None:
    model = read(LLAMA | {"max_position_embeddings": 4096})
    with pytest.raises(InputError, match="seq_len 8192 is more than max_position_embeddings 4096 of m"):
        check_model(model, 8192)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "foo9"}, "config.json: model_type 'foo9' is not known; known are afmoe"),
        (LLAMA | {"model_type": "lama"}, "model_type 'lama' is not known (did you mean 'llama'?)"),
        (LLAMA | {"model_type": "bert"}, "config.json: model_type bert is an encoder, which is not modelled"),
        (LLAMA | {"model_type": "mamba2"}, "a state-space model"),
        ({**LLAMA, "model_type": None, "architectures": ["FooModel"]}, "model_type not given is not known"),
        (
            LLAMA | {"num_nextn_predict_layers": 1},
            "num_nextn_predict_layers of llama is not modelled (it is 1); set it to 0 to estimate",
        ),
        *[
            (LLAMA | {"model_type": kind, "sliding_window": 1024}, f"sliding_window of {kind} is not modelled (it is 1024)")
            for kind in ("llama", "olmo", "olmo2", "glm4", "phi", "stablelm", "nemotron", "cohere")
        ],
        *[
            (
                LLAMA | {"model_type": kind, "layer_types": ["full_attention", "linear_attention"]},
                "layer_types has 'linear_attention', which is not modelled",
            )
            for kind in ("llama", "mistral", "qwen3", "gemma2")
        ],
        *[
            (LLAMA | {"model_type": kind, "num_local_experts": 8}, f"num_local_experts of {kind} is not modelled (it is 8)")
            for kind in ("llama", "mistral", "qwen3", "granite", "phi3")
        ],
        (LLAMA | {"model_type": "minicpm", "q_lora_rank": 768}, "q_lora_rank of minicpm is not modelled (it is 768)"),
        (LLAMA | {"model_type": "jamba"}, "jamba is a hybrid of attention, state-space layers and experts"),
        (LLAMA | {"model_type": "kimi_linear"}, "kimi_linear is a hybrid of attention and linear attention"),
        (LLAMA | {"model_type": "minimax_text_01"}, "a hybrid of softmax attention and lightning attention"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "layer_types has 'sliding_attention', which is not modelled"),
        (LLAMA | {"layer_types": ["full_attention"] * 7}, "config.json: layer_types lists 7 layers; the model has 32"),
        (LLAMA | {"head_dim": 0}, "config.json: head_dim is 0; it must be positive, or left out for hidden_size / heads"),
        (LLAMA | {"attention_chunk_size": 8192}, "attention_chunk_size of llama is not modelled"),
        (LLAMA | {"hidden_size": "4096"}, "hidden_size is '4096'; it must be a whole number"),
        (LLAMA | {"num_attention_heads": 24, "num_key_value_heads": 8}, "24 does not divide hidden_size 4096; state head_dim"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "config.json: the model needs 'hidden_size'"),
        (
            LLAMA | {"model_type": "opt", "ffn_dim": 1, "word_embed_proj_dim": 512, "max_position_embeddings": 2048},
            "word_embed_proj_dim 512 differs from hidden_size",
        ),
        (
            LLAMA | {"model_type": "opt", "ffn_dim": 1, "do_layer_norm_before": False, "max_position_embeddings": 2048},
            "do_layer_norm_before false and _remove_final_layer_norm mean no final norm, which is not modelled",
        ),
        (
            LLAMA | {"model_type": "falcon", "num_ln_in_parallel_attn": 2},
            "num_ln_in_parallel_attn 2 needs new_decoder_architecture",
        ),
        (LLAMA | {"model_type": "qwen2_vl"}, "model_type qwen2_vl is of an architecture that is not modelled; if it"),
        (LLAMA | {"model_type": "hunyuan_v1_dense", "use_cla": True}, "use_cla is True, which is not modelled"),
        (LLAMA | {"model_type": "hunyuan_v1_dense", "use_qk_norm": False}, "use_qk_norm is False, which is not modelled"),
        (
            LLAMA | {"model_type": "hunyuan_v1_dense", "attention_head_dim": 64},
            "attention_head_dim 64 differs from head_dim 128",
        ),
        (
            LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantization_config has load_in_4bit: weights in 4 bits under adapters (QLoRA) are not modelled; remove it to",
        ),
        (
            {"model_type": "llava", "text_config": {**LLAMA}, "quantization_config": {"load_in_8bit": True}},
            "quantization_config has load_in_8bit: weights in 8 bits",
        ),
        (
            LLAMA | {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention is on: attention that is not causal is not modelled",
        ),
    ],
)
def test_configs_that_cannot_be_read_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        read(config)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("base", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("total_ut_steps", 4),
        ("is_encoder_decoder", True),
        ("vocab_size_per_layer_input", 262144),
        ("index_topk", 2048),
        ("hc_mult", 4),
        ("num_residual_streams", 4),
        ("num_loops", 2),
        ("layer_repeats", 2),
        ("altup_num_inputs", 4),
        ("attn_type_list", [0, 1]),
        ("attention_type", "lightning"),
        ("cla_factor", 2),
        ("differential_attention", True),
        ("block_configs", [{"no_op": True}]),
        ("first_k_dense_replace", 3),
        ("rope_head_dim", 64),
        ("output_gate_type", "swish"),
        ("ffn_dim_multiplier", 1.3),
        ("is_causal", False),
        ("vision_config", {"depth": 32}),
        ("pruned_heads", {"0": [1]}),
        ("quantization_config", {"quant_method": "bitnet"}),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("architectures", ["LlamaForSequenceClassification"]),
        ("architectures", ["LlamaForRewardModel"]),
    ],
)
def test_keys_that_announce_other_work_are_refused(base: str, key: str, value: Any) -> None:
    with pytest.raises(InputError, match=key):
        read(LLAMA | {"model_type": base, key: value})


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mpt", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_config.ffn_type is mptglu"),
        ("mpt", {"attn_config": {"sliding_window_size": 512}}, "attn_config.sliding_window_size is 512"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type is rmsnorm"),
        ("starcoder2", {"mlp_type": "gated"}, "mlp_type is gated"),
        ("cohere", {"use_parallel_block": False}, "use_parallel_block is False"),
        ("bloom", {"n_inner": 999}, "n_inner is 999"),
        ("chatglm", {"pre_seq_len": 128}, "pre_seq_len is 128"),
        ("chatglm", {"post_layer_norm": False}, "post_layer_norm is False"),
    ],
)
def test_values_of_keys_that_are_read_are_those_described(model_type: str, changes: dict[str, Any], message: str) -> None:
    few = dict.fromkeys(("n_layers", "n_heads", "n_layer", "n_head", "num_layers"), 2)
    wide = dict.fromkeys(("d_model", "hidden_size", "ffn_hidden_size", "padded_vocab_size", "max_seq_len", "seq_length"), 1024)
    shapes = {**few, **wide}
    with pytest.raises(InputError, match=re.escape(f"{message}, which is not modelled")):
        read({**LLAMA, **shapes, "model_type": model_type, **changes})


def test_keys_that_a_family_has_anyway_are_accepted() -> None:
    assert read(LLAMA | {"model_type": "qwen3", "use_qk_norm": True}) == read(LLAMA | {"model_type": "qwen3"})
    with pytest.raises(InputError, match="use_qk_norm of llama is not modelled"):
        read(LLAMA | {"use_qk_norm": True})
    neutral = {"total_ut_steps": 1, "hc_mult": 1, "attention_type": "full", "is_encoder_decoder": False, "is_causal": True}
    assert read(LLAMA | neutral) == read(LLAMA)
    nested = {"model_type": "x", "is_encoder_decoder": True, "text_config": LLAMA}
    with pytest.raises(InputError, match="is_encoder_decoder of llama"):
        read(nested)


def test_keys_that_are_off_or_change_no_work_are_accepted() -> None:
    harmless = {
        "num_nextn_predict_layers": 0,
        "sliding_window": None,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "attention_dropout": 0.1,
        "pretraining_tp": 1,
        "use_cache": True,
        "some_new_flag": True,
        "use_bidirectional_attention": False,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    assert read(LLAMA | harmless) == read(LLAMA)
    assert unread_keys(LLAMA | harmless) == [
        "num_nextn_predict_layers",
        "some_new_flag",
    ]


def test_keys_that_are_refused_are_not_merely_unread() -> None:
    assert unread_keys(LLAMA | {"num_local_experts": 8, "some_new_flag": 1}) == ["some_new_flag"]


def test_soft_caps_are_read() -> None:
    gemma = next(read(c["config"]) for c in CHECKPOINTS if c["name"] == "gemma-2-9b")
    assert gemma.capped_scores and gemma.capped_logits


def test_what_is_null_is_off_and_what_is_left_out_is_as_its_class_has_it() -> None:
    gemma = next(c["config"] for c in CHECKPOINTS if c["name"] == "gemma-2-9b")
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    plain = read({**gemma, **dict.fromkeys(caps)})
    assert not plain.capped_scores and not plain.capped_logits and plain == read({**gemma, **dict.fromkeys(caps, 0)})
    without = read({key: value for key, value in gemma.items() if key not in caps})
    assert without.capped_scores and without.capped_logits
    olmo = {
        "model_type": "olmo3",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "vocab_size": 1000,
        "num_attention_heads": 8,
    }
    assert windows(olmo) == [4096, 4096, 4096, 0, 4096, 4096] and windows({**olmo, "sliding_window": None}) == [0] * 6
    seed = {**olmo, "model_type": "seed_oss", "num_key_value_heads": 2}
    assert read(seed).head_dim == 128 and read({**seed, "head_dim": None}).head_dim == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": "false"}, "config.json: attention_bias is 'false'; it must be true or false"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": "x"},
            "config.json: max_window_layers is 'x'; it must be a whole number of at least 0",
        ),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval is 0; it must be a positive whole"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern is 0; it must be a positive"),
    ],
)
def test_values_of_the_wrong_kind_are_named_with_their_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as refused:
        read(LLAMA | changes)
    assert message in str(refused.value)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}


def windows(config: dict[str, Any]) -> list[int]:
    """Windows of the layers, 0 for those that see all tokens."""
    found = layer_kinds(read(config))
    return [found.kinds[kind].window for kind in found.of_layer]


@pytest.mark.parametrize(
    ("config", "of_layer"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [4096] * 6),
        ({"model_type": "mistral", "sliding_window": None}, [0] * 6),
        ({"model_type": "qwen2", "sliding_window": 4096}, [0] * 6),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 4}, [0] * 6),
        (
            {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 4},
            [0] * 4 + [4096] * 2,
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 6}, [0] * 6),
        ({"model_type": "gemma2"}, [4096, 0] * 3),
        ({"model_type": "gemma2", "sliding_window": 2048, "sliding_window_size": 2048}, [2048, 0] * 3),
        ({"model_type": "gemma3_text", "sliding_window": 512}, [512] * 5 + [0]),
        ({"model_type": "gemma3_text", "sliding_window": 512, "sliding_window_pattern": 3}, [512, 512, 0] * 2),
        (
            {"model_type": "gemma3_text", "sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 3},
            [512, 0] * 3,
        ),
        ({"model_type": "cohere2", "sliding_window": 512}, [512] * 3 + [0] + [512] * 2),
        ({"model_type": "cohere2", "sliding_window": 512, "_sliding_window_pattern": 2}, [512, 0] * 3),
        (
            {"model_type": "cohere2", "sliding_window": 512, "sliding_window_pattern": 3, "_sliding_window_pattern": 3},
            [512, 512, 0] * 2,
        ),
        (
            {"model_type": "gpt_neo", "num_layers": 6, "num_heads": 32, "attention_types": [[["global", "local"], 3]]},
            [0, 256] * 3,
        ),
        ({"model_type": "starcoder2", "sliding_window": 4096}, [4096] * 6),
        ({"model_type": "olmo3"}, [4096] * 3 + [0] + [4096] * 2),
        (
            {"model_type": "olmo3", "sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"] * 3},
            [0, 512] * 3,
        ),
        ({"model_type": "phi3", "sliding_window": 2047}, [2047] * 6),
        ({"model_type": "smollm3", "sliding_window": 512}, [0] * 6),
        ({"model_type": "smollm3", "sliding_window": 512, "use_sliding_window": True}, [0] * 3 + [512] + [0] * 2),
        (EXPERTS | {"model_type": "qwen2_moe", "sliding_window": 512}, [0] * 6),
        (EXPERTS | {"model_type": "qwen2_moe", "use_sliding_window": True, "max_window_layers": 4}, [4096, 0] * 2 + [0] * 2),
        (EXPERTS | {"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 4}, [4096] * 6),
    ],
)
def test_windows_are_read_for_each_layer(config: dict[str, Any], of_layer: list[int]) -> None:
    assert windows(LLAMA | {"num_hidden_layers": 6} | config) == of_layer


def test_norms_of_q_and_k_have_the_biases_of_their_class() -> None:
    """Phi's are LayerNorms of head_dim with weight and bias: 2 x 2 x 128 in each of 32 layers; StableLM's have no bias."""
    plain, normed = (parameters(read(LLAMA | {"model_type": "phi", "qk_layernorm": on})) for on in (False, True))
    assert normed - plain == 32 * 2 * 2 * 128
    plain, normed = (parameters(read(LLAMA | {"model_type": "stablelm", "qk_layernorm": on})) for on in (False, True))
    assert normed - plain == 32 * (32 + 8) * 128


def test_opts_norms_may_have_no_parameters() -> None:
    opt = LLAMA | {"model_type": "opt", "ffn_dim": 14336, "max_position_embeddings": 2048}
    bare = read(opt | {"layer_norm_elementwise_affine": False})
    assert parameters(read(opt)) - parameters(bare) == (2 * 32 + 1) * 2 * 4096  # weight and bias of two a layer and a last one


def test_layers_without_rotary_embedding_are_read() -> None:
    small = LLAMA | {"num_hidden_layers": 8}
    assert read(small | {"model_type": "smollm3"}).no_rope_layers == (1, 1, 1, 0) * 2
    assert read(small | {"model_type": "smollm3", "no_rope_layers": [0, 1] * 4}).no_rope_layers == (0, 1) * 4
    assert read(small | {"model_type": "cohere2"}).no_rope_layers == (1, 1, 1, 0) * 2


def test_towers_beside_the_text_model_are_named() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 2304, "num_hidden_layers": 26, "intermediate_size": 9216}
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}, "audio_config": None}
    assert unread_keys(config)[0] == "vision_config (the text model alone is estimated)"
    assert not any("audio" in key for key in unread_keys(config))


def test_bigcode_shares_keys_and_values_by_its_own_flag() -> None:
    # built without weights by transformers 4.57: GPTBigCodeConfig(multi_query=False), which keeps num_key_value_heads 1
    config = {
        "model_type": "gpt_bigcode",
        "multi_query": False,
        "num_key_value_heads": 1,
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    }
    assert parameters(model_of_config(config, "x")) == 124_439_808
    assert parameters(model_of_config({**config, "multi_query": True}, "x")) < 112e6


def test_the_text_model_of_a_multimodal_config_has_its_class_defaults() -> None:
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    gemma3 = read({"model_type": "gemma3", "text_config": text})
    assert (gemma3.num_attention_heads, gemma3.num_key_value_heads, gemma3.head_dim, gemma3.vocab_size) == (8, 4, 256, 262208)
    assert parameters(gemma3) == 3_880_263_168  # the language model of gemma-3-4b
    llava = read({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}, "vision_config": {}})
    assert (llava.hidden_size, llava.num_hidden_layers, llava.vocab_size) == (4096, 32, 32064)


def test_every_way_in_refuses_what_is_not_modelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from solver.commands.command_line import main

    config = LLAMA | {"some_lora_rank": 8}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="some_lora_rank of llama is not modelled"):
        load_problem(path, 64, profile="h100_sxm")
    for arguments in ([], ["--run_all_solu"]):
        assert main(["--config", str(path), "--world_size", "64", *arguments]) == 2
        assert "some_lora_rank of llama is not modelled" in capsys.readouterr().err
    case = case_of(
        {
            "id": "x-1",
            "hardware": "h100_sxm",
            "model": config,
            "measured": {"step_s": 1.0},
            "run": {"world_size": 8, "seq_len": 4096, "micro_batch_size": 1},
        }
    )
    assert case.skipped is not None and "some_lora_rank of llama is not modelled" in case.skipped


def test_what_an_approximation_leaves_out_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from solver.commands.command_line import main

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"model_type": "gemma3_text", "final_logit_softcapping": 30.0, "some_new_flag": 3}))
    options = ["--config", str(path), "--world_size", "8", "--seq_len", "1024"]
    assert main(options) == 2 and "has no soft caps, which" in capsys.readouterr().err
    assert main([*options, "--approximate"]) == 0
    printed = capsys.readouterr().out
    assert "left out of the estimate: soft-capped logits" in printed
    assert "not read from the config: some_new_flag" in printed


@pytest.mark.parametrize(
    "called",
    [
        "qwen4",
        "glm5_moe",
        "llama5",
        "deepseek_v4",
        "qwen3_omni_moe",
        "mistral3",
        "llava",
        "glm4v",
        "lfm2",
        "phi5",
        "ernie4_5_vl_moe",
        "xlm",
    ],
)
def test_another_family_or_version_is_no_misspelling(called: str) -> None:
    with pytest.raises(InputError) as error:
        read(LLAMA | {"model_type": called})
    assert "did you mean" not in str(error.value)


def test_biases_of_recent_families() -> None:
    """Of 32 layers with 32 query and 8 key heads of 128: q, k and v have 6,144 biases a layer, the output 4,096."""
    seed, plain, out = (
        parameters(read(LLAMA | {"model_type": "seed_oss", **flags}))
        for flags in ({}, {"attention_bias": False}, {"attention_out_bias": True})
    )
    assert (seed - plain, out - seed) == (32 * 6144, 32 * 4096)
    ernie, biased = (parameters(read(LLAMA | {"model_type": "ernie4_5", "use_bias": on})) for on in (False, True))
    assert biased - ernie == 32 * (6144 + 4096 + 2 * 14336 + 4096)
    hunyuan, biased = (
        parameters(read(LLAMA | {"model_type": "hunyuan_v1_dense", "attention_bias": on})) for on in (False, True)
    )
    assert biased - hunyuan == 32 * (6144 + 4096)


def test_a_granite_of_attention_alone_is_a_granite() -> None:
    """Granite 4.0 Micro: its dense layers have the MLP that the layers of its larger kin have beside experts."""
    kept = {
        "layer_types": ["attention"] * 32,
        "num_local_experts": 0,
        "shared_intermediate_size": 14336,
        "position_embedding_type": "rope",
    }
    micro = LLAMA | kept | {"model_type": "granitemoehybrid", "intermediate_size": 512, "mamba_d_state": 256}
    assert read(micro) == read(LLAMA | {"model_type": "granite"})
    assert read(micro | {"position_embedding_type": "nope"}).position == "none"
    assert read(micro | {"layer_types": ["full_attention"] * 32}) == read(micro)  # as transformers 5 saves it
    assert read(micro | {"position_embedding_type": None}).position == "none"
    for other, message in (
        ({"layer_types": ["mamba"] * 32}, "layer_types of granitemoehybrid has state-space layers"),
        ({"num_local_experts": 64}, "num_local_experts of granitemoehybrid is not 0"),
    ):
        with pytest.raises(InputError, match=message):
            read(micro | other)


def test_model_types_are_either_read_or_refused() -> None:
    assert not set(FAMILIES) & (set(NOT_DECODERS) | UNDESCRIBED) and not UNDESCRIBED & set(NOT_DECODERS)
    assert len(FAMILIES) >= 57


def test_layers_of_nemotron_h_are_read_as_transformers_5_saves_them() -> None:
    """It calls Mamba-2 linear_attention, and leaves num_hidden_layers out."""
    blocks = {
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "vocab_size": 131072,
        "mamba_num_heads": 64,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
    }
    old = read(blocks | {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4})
    assert read(blocks | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}) == old
    for flag in ("attention_bias", "mlp_bias"):
        with pytest.raises(InputError, match=f"{flag} is True, which is not modelled"):
            read(blocks | {"layers_block_type": ["mamba", "moe"], flag: True})
