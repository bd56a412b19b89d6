"""How the keys of a Hugging Face ``config.json`` are read: a table of names, and what a table cannot say.

Source: the modeling and configuration files of the transformers library, and for baichuan and chatglm those of the published
checkpoints, as remembered: they were not read again line by line. What checks them are the parameter counts in
tests/data/checkpoints.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Values = dict[str, Any]
#: Adds or changes what a plain table cannot say: (config, values so far, names of the keys it read).
Special = Callable[[Mapping[str, Any], Values, set[str]], None]

_COMMON = {
    key: key
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
}
_EXPERTS = {
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "shared_expert_intermediate_size": "shared_expert_intermediate_size",
    "n_shared_experts": "n_shared_experts",
}
_LATENT = {key: key for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    fixed: ModelSpec fields that its code decides. tied: tie_word_embeddings if the config does not state it. keys: config key
    -> ModelSpec field, besides the common ones. class_defaults: of the config class, which nested configs leave out. special:
    see Special.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    class_defaults: Mapping[str, Any] = field(default_factory=dict)
    special: Special | None = None

    def read(self, config: Mapping[str, Any]) -> tuple[Values, set[str]]:
        """Return (keys of a model file, names of the config's keys that were read). Raises KeyError for a missing one."""
        names = {**_COMMON, **_EXPERTS, **_LATENT, **self.keys}
        values: Values = {"tie_word_embeddings": self.tied}
        values |= {field: config[key] for key, field in names.items() if key in config}
        values |= self.fixed
        read = set(names)
        if self.special:
            self.special(config, values, read)
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            if key not in values:
                raise KeyError(key)
        return values, read


def biases(**flags: bool) -> dict[str, bool]:
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False) | flags


ALL = biases(qkv_bias=True, output_bias=True, mlp_bias=True)
NONE = biases()
LLAMA = {"gated_mlp": True, "norm": "rmsnorm", "position": "rope"}
GPT = {"gated_mlp": False, "norm": "layernorm", "position": "rope"}


def read_flags(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read attention_bias (q, k, v and output) and mlp_bias, as the Llama classes have them."""
    attention = bool(config.get("attention_bias", False))
    values |= {"qkv_bias": attention, "output_bias": attention, "mlp_bias": bool(config.get("mlp_bias", False))}
    read |= {"attention_bias", "mlp_bias"}


def _only_attention(config: Mapping[str, Any]) -> None:
    other = [kind for kind in config.get("layer_types", []) if kind not in ("full_attention", "sliding_attention")]
    if other:
        raise ValueError(f"layer_types has {other[0]!r}, which is not modelled")


def read_window(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read sliding_window; some families carry one that a flag turns off. Raises ValueError for other kinds of layer."""
    _only_attention(config)
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        values["sliding_window"] = config["sliding_window"]
    read |= {"sliding_window", "use_sliding_window", "sliding_window_pattern", "layer_types", "max_window_layers"}


def read_llama(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_flags(config, values, read)
    read_window(config, values, read)


def read_smollm3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_llama(config, values, read)  # every fourth layer has no rotary embedding: a hundredth of a layer's time
    read |= {"no_rope_layers", "no_rope_layer_interval"}


def read_qwen(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_window({"use_sliding_window": False, **config}, values, read)
    values |= biases(qkv_bias=True)


def read_qwen3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_flags(config, values, read)
    read_window({"use_sliding_window": False, **config}, values, read)
    values.setdefault("head_dim", 128)


def read_gemma(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_flags(config, values, read)
    values.setdefault("head_dim", 256)


def read_gemma2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_gemma(config, values, read)
    _only_attention(config)
    values["sliding_window"] = config.get("sliding_window", 4096)
    caps = [("attn_logit_softcapping", 50.0, "attention scores"), ("final_logit_softcapping", 30.0, "logits")]
    values["unmodelled"] = [f"soft-capped {what}" for key, usual, what in caps if config.get(key, usual)]
    read |= {key for key, *_ in caps} | {"sliding_window", "query_pre_attn_scalar", "cache_implementation", "layer_types"}


def read_gemma3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_gemma(config, values, read)
    _only_attention(config)
    values["sliding_window"] = config.get("sliding_window", 4096)
    read |= {
        "sliding_window",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "query_pre_attn_scalar",
        "cache_implementation",
        "layer_types",
        "sliding_window_pattern",
        "_sliding_window_pattern",
    }
    caps = [("attn_logit_softcapping", "attention scores"), ("final_logit_softcapping", "logits")]
    values["unmodelled"] = [f"soft-capped {what}" for key, what in caps if config.get(key)]


def read_gpt2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values.setdefault("intermediate_size", 4 * values["hidden_size"])
    values["max_position_embeddings"] = config.get("n_positions", config.get("n_ctx", 1024))
    read |= {"n_positions", "n_ctx", "n_inner"}


def read_bigcode(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_gpt2(config, values, read)
    if config.get("multi_query", True):
        values["num_key_value_heads"] = 1
    read |= {"multi_query"}


def read_gpt_neo(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values["intermediate_size"] = config.get("intermediate_size") or 4 * values["hidden_size"]
    local = any("local" in kind for kind, _ in config.get("attention_types", [[["global", "local"], 12]]))
    values["sliding_window"] = config.get("window_size", 256) if local else 0
    read |= {"attention_types", "attention_layers", "window_size"}


def read_gpt_neox(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    attention = bool(config.get("attention_bias", True))
    values |= {"qkv_bias": attention, "output_bias": attention, "mlp_bias": True}
    read |= {"attention_bias", "use_parallel_residual"}  # both branches have a norm of their own


def read_gptj(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values["intermediate_size"] = config.get("n_inner") or 4 * values["hidden_size"]
    values["max_position_embeddings"] = config.get("n_positions", 2048)
    read |= {"n_inner", "n_positions", "n_ctx"}


def read_opt(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    if config.get("word_embed_proj_dim", values["hidden_size"]) != values["hidden_size"]:
        raise ValueError(f"word_embed_proj_dim {config['word_embed_proj_dim']} differs from hidden_size, which is not modelled")
    values |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(config.get("enable_bias", True)))
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
    read |= {
        "n_inner",
        "apply_residual_connection_post_layernorm",
        "masked_softmax_fusion",
        "bias_dropout_fusion",
        "unk_token_id",
    }


def read_falcon(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    new, heads = bool(config.get("new_decoder_architecture")), values["num_attention_heads"]
    values["num_key_value_heads"] = (
        config.get("num_kv_heads", heads) if new else 1 if config.get("multi_query", True) else heads
    )
    parallel = new or config.get("parallel_attn", True)
    values["norms_per_layer"] = config.get("num_ln_in_parallel_attn") or 2 if new else 1 if parallel else 2
    values["intermediate_size"] = config.get("ffn_hidden_size") or 4 * values["hidden_size"]
    values["position"] = "alibi" if config.get("alibi") else "rope"
    values |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(config.get("bias", False)))
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
    values["intermediate_size"] = config.get("expansion_ratio", 4) * values["hidden_size"]
    heads = values["num_attention_heads"]
    kinds = {"multihead_attention": heads, "multiquery_attention": 1, "grouped_query_attention": attention.get("kv_n_heads")}
    values["num_key_value_heads"] = kinds[attention.get("attn_type", "multihead_attention")]
    values["position"] = "alibi" if attention.get("alibi") else "learned"
    bias = not config.get("no_bias", True)
    values |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias", "norm_bias"), bias)
    values["qk_norm"] = "all" if attention.get("qk_ln") else "none"
    read |= {
        "attn_config",
        "expansion_ratio",
        "no_bias",
        "max_seq_len",
        "learned_pos_emb",
        "norm_type",
        "ffn_config",
        "init_config",
        "fc_type",
        "tokenizer_name",
        "init_device",
        "embedding_fraction",
        "verbose",
    }


def read_starcoder2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values |= dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), bool(config.get("use_bias", True)))
    read_window(config, values, read)
    read |= {"use_bias", "norm_type", "mlp_type"}


def read_stablelm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values |= biases(qkv_bias=bool(config.get("use_qkv_bias", False)))
    values["qk_norm"] = "all" if config.get("qk_layernorm") else "none"
    values["norms_per_layer"] = 1 if config.get("use_parallel_residual") else 2
    read |= {"use_qkv_bias", "qk_layernorm", "use_parallel_residual"}


def read_cohere(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    attention = bool(config.get("attention_bias", False))
    values |= biases(qkv_bias=attention, output_bias=attention)
    values["qk_norm"] = "all" if config.get("use_qk_norm") else "none"
    read_window(config, values, read)
    read |= {
        "attention_bias",
        "use_qk_norm",
        "order_of_interleaved_layers",
        "position_embedding_type",
        "use_embedding_sharing",
        "use_gated_activation",
        "use_parallel_block",
        "use_parallel_embedding",
        "rotary_pct",
    }


def read_phi(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values["qk_norm"] = "head" if config.get("qk_layernorm") else "none"
    read |= {"qk_layernorm"}


def read_internlm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    bias = bool(config.get("bias", False))
    values |= biases(qkv_bias=bias, output_bias=bias)
    read |= {"bias", "attn_implementation"}


def read_baichuan(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    if "max_position_embeddings" not in config:  # the 13B's config states model_max_length and its code uses ALiBi
        values |= {"position": "alibi", "max_position_embeddings": config.get("model_max_length", 4096)}
    read |= {"model_max_length"}


def read_chatglm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values["num_key_value_heads"] = (
        config["multi_query_group_num"] if config.get("multi_query_attention") else values["num_attention_heads"]
    )
    linear, qkv = bool(config.get("add_bias_linear", False)), bool(config.get("add_qkv_bias", False))
    values |= {"qkv_bias": linear or qkv, "output_bias": linear, "mlp_bias": linear}
    values["norm"] = "rmsnorm" if config.get("rmsnorm", True) else "layernorm"
    read |= {
        "multi_query_group_num",
        "multi_query_attention",
        "add_bias_linear",
        "add_qkv_bias",
        "rmsnorm",
        "bias_dropout_fusion",
        "apply_query_key_layer_scaling",
        "apply_residual_connection_post_layernorm",
        "fp32_residual_connection",
        "original_rope",
        "post_layer_norm",
        "pre_seq_len",
        "prefix_projection",
        "quantization_bit",
        "interleaved_qkv",
        "rope_ratio",
    }


def read_glm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values |= biases(qkv_bias=bool(config.get("attention_bias", False)))
    read |= {"attention_bias"}


def read_nemotron(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_flags(config, values, read)
