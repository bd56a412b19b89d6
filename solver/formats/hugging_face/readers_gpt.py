"""What the config.json of GPT-like and other older decoders says beyond a table of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError
from solver.formats.hugging_face.readers import (
    Values,
    flag_of,
    layers_of,
    read_flags,
    read_window,
    refuse_if_on,
    refuse_unless,
    size_of,
)
from solver.spec.layer_types import SLIDING_ATTENTION, marked_layers


def read_gpt2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values.setdefault("intermediate_size", 4 * values["hidden_size"])
    values["max_position_embeddings"] = config.get("n_positions", config.get("n_ctx", 1024))
    read |= {"n_positions", "n_ctx", "n_inner"}


def read_bigcode(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_gpt2(config, values, read)
    # modeling_gpt_bigcode.py looks at this flag alone, whatever num_key_value_heads says
    values["num_key_value_heads"] = 1 if flag_of(config, "multi_query", True) else values["num_attention_heads"]
    read |= {"multi_query"}


def read_gpt_neo(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read attention_types, [[kinds of layers, times], ...]: the local ones have a window."""
    values["intermediate_size"] = config.get("intermediate_size") or 4 * values["hidden_size"]
    kinds = config.get("attention_layers")
    if not kinds:
        groups = config.get("attention_types", [[["global", "local"], 12]])
        kinds = [kind for group, times in groups for _ in range(min(times, len(layers_of(values)))) for kind in group]
    if "local" in kinds:
        values["sliding_window"] = size_of(config, "window_size", 256)
        values["layer_types"] = marked_layers(SLIDING_ATTENTION, (kind == "local" for kind in kinds))
    read |= {"attention_types", "attention_layers", "window_size"}


def read_gpt_neox(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    attention = flag_of(config, "attention_bias", True)
    values |= {"qkv_bias": attention, "output_bias": attention, "mlp_bias": True}
    read |= {"attention_bias", "use_parallel_residual"}  # both branches have a norm of their own


def read_gptj(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values["intermediate_size"] = config.get("n_inner") or 4 * values["hidden_size"]
    values["max_position_embeddings"] = config.get("n_positions", 2048)
    read |= {"n_inner", "n_positions", "n_ctx"}


def read_opt(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    if config.get("word_embed_proj_dim", values["hidden_size"]) != values["hidden_size"]:
        raise InputError(f"word_embed_proj_dim {config['word_embed_proj_dim']} differs from hidden_size, which is not modelled")
    values |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), flag_of(config, "enable_bias", True))
    if not flag_of(config, "do_layer_norm_before", True) or flag_of(config, "_remove_final_layer_norm"):
        raise InputError("do_layer_norm_before false and _remove_final_layer_norm mean no final norm, which is not modelled")
    values["norm_weight"] = flag_of(config, "layer_norm_elementwise_affine", True)
    values["position_rows"] = values["max_position_embeddings"] + 2
    read |= {
        "word_embed_proj_dim",
        "enable_bias",
        "do_layer_norm_before",
        "_remove_final_layer_norm",
        "layer_norm_elementwise_affine",
    }


def read_bloom(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values["intermediate_size"] = 4 * values["hidden_size"]
    refuse_unless(config, read, {"n_inner": (values["intermediate_size"],)})
    read |= {
        "apply_residual_connection_post_layernorm",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "unk_token_id",
    }


def read_falcon(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    new, heads = flag_of(config, "new_decoder_architecture"), values["num_attention_heads"]
    values["num_key_value_heads"] = (
        size_of(config, "num_kv_heads", heads) if new else 1 if flag_of(config, "multi_query", True) else heads
    )
    parallel = new or flag_of(config, "parallel_attn", True)
    if parallel and not new and config.get("num_ln_in_parallel_attn") == 2:
        raise InputError(
            "num_ln_in_parallel_attn 2 needs new_decoder_architecture; without it transformers runs one norm a layer"
        )
    values["norms_per_layer"] = size_of(config, "num_ln_in_parallel_attn", 2) if new else 1 if parallel else 2
    values["intermediate_size"] = config.get("ffn_hidden_size") or 4 * values["hidden_size"]
    values["position"] = "alibi" if flag_of(config, "alibi") else "rope"
    values |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), flag_of(config, "bias"))
    read |= {
        "new_decoder_architecture",
        "num_kv_heads",
        "n_head_kv",
        "multi_query",
        "parallel_attn",
        "num_ln_in_parallel_attn",
        "ffn_hidden_size",
        "alibi",
        "bias",
        "activation",
    }


def read_mpt(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    attention = config.get("attn_config") or {}
    refuse_unless(config, read, {"norm_type": ("low_precision_layernorm", "layernorm")})
    refuse_unless(config.get("ffn_config") or {}, read, {"ffn_type": ("mptmlp",)}, "ffn_config.")
    refuse_unless(attention, read, {"sliding_window_size": (-1,), "prefix_lm": (False,)}, "attn_config.")
    values["intermediate_size"] = config.get("expansion_ratio", 4) * values["hidden_size"]
    heads = values["num_attention_heads"]
    kinds = {"multihead_attention": heads, "multiquery_attention": 1, "grouped_query_attention": attention.get("kv_n_heads")}
    values["num_key_value_heads"] = kinds[attention.get("attn_type", "multihead_attention")]
    values["position"] = "alibi" if flag_of(attention, "alibi") else "learned"
    bias = not flag_of(config, "no_bias", True)
    values |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias"), bias)
    values["qk_norm"] = "all" if flag_of(attention, "qk_ln") else "none"
    read |= {
        "attn_config",
        "expansion_ratio",
        "no_bias",
        "max_seq_len",
        "learned_pos_emb",
        "ffn_config",
        "init_config",
        "fc_type",
        "tokenizer_name",
        "init_device",
        "embedding_fraction",
        "verbose",
    }


def read_starcoder2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), flag_of(config, "use_bias", True))
    read_window(config, values, read)
    refuse_unless(config, read, {"norm_type": ("layer_norm",), "mlp_type": ("default",)})
    read |= {"use_bias"}


def read_phi(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Phi, whose norms of q and k have biases as its other LayerNorms have."""
    values |= {"qk_norm": "head", "qk_norm_bias": True} if flag_of(config, "qk_layernorm") else {"qk_norm": "none"}
    read |= {"qk_layernorm"}


def read_baichuan(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    if "max_position_embeddings" not in config:  # the 13B's config states model_max_length and its code uses ALiBi
        values |= {"position": "alibi", "max_position_embeddings": config.get("model_max_length", 4096)}
    read |= {"model_max_length"}


def read_first_qwen(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read the first Qwen (modeling_qwen.py of its checkpoints), whose intermediate_size is that of both halves of its MLP."""
    values["intermediate_size"] = size_of(config, "intermediate_size", 22016, 2) // 2
    bias = not flag_of(config, "no_bias", True)
    values |= {"qkv_bias": True, "output_bias": bias, "mlp_bias": bias}
    read |= {"no_bias", "use_logn_attn", "use_dynamic_ntk", "onnx_safe", "fp16", "bf16", "fp32"}


def read_chatglm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values["num_key_value_heads"] = (
        config["multi_query_group_num"] if flag_of(config, "multi_query_attention") else values["num_attention_heads"]
    )
    linear, qkv = flag_of(config, "add_bias_linear"), flag_of(config, "add_qkv_bias")
    values |= {"qkv_bias": linear or qkv, "output_bias": linear, "mlp_bias": linear}
    values["norm"] = "rmsnorm" if flag_of(config, "rmsnorm", True) else "layernorm"
    refuse_if_on(
        config, read, "pre_seq_len", "prefix_projection", "quantization_bit", "apply_residual_connection_post_layernorm"
    )
    refuse_unless(config, read, {"post_layer_norm": (True,)})
    read |= {
        "multi_query_group_num",
        "multi_query_attention",
        "add_bias_linear",
        "add_qkv_bias",
        "rmsnorm",
        "bias_dropout_fusion",
        "apply_query_key_layer_scaling",
        "fp32_residual_connection",
        "original_rope",
        "interleaved_qkv",
        "rope_ratio",
    }


def read_nemotron(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_flags(config, values, read)
