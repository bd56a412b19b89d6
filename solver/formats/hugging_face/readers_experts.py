"""Mixtures of experts and latent attention: what their config.json files say, and the families that have them.

Source: the modeling and configuration files of the transformers library, and for grok-1, kimi_k2 and minicpm3 those beside the
published checkpoints. Their parameter counts are in tests/data/checkpoints.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from profiler.errors import InputError
from solver.formats.hugging_face.readers import (
    ALL,
    LLAMA,
    NONE,
    Family,
    Special,
    Values,
    class_of,
    flag_of,
    layer_types_of,
    layers_of,
    read_flags,
    read_window,
    refuse_if_on,
    rotary_layers_of,
    size_of,
    with_late_windows,
)
from solver.spec.layer_types import CHUNKED_ATTENTION, FULL_ATTENTION, marked_layers

EXPERTS = ("num_experts", "num_experts_per_tok")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
#: How DeepSeek's routers choose: (only from some groups, with a bias that balances the load).
_TOPK_METHODS = {"greedy": (False, False), "group_limited_greedy": (True, False), "noaux_tc": (True, True)}


def same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def have_experts(values: Values, has: Callable[[int], bool]) -> None:
    listed = [int(has(layer)) for layer in layers_of(values)]
    values["moe_layer_freq"] = 1 if all(listed) else listed


def _read_expert_width(config: Mapping[str, Any], values: Values) -> None:
    """Take intermediate_size as that of each expert; all layers have experts."""
    values["moe_intermediate_size"] = config["intermediate_size"]


def read_mixtral(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    _read_expert_width(config, values)
    read_window(config, values, read)


def read_phimoe(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_mixtral(config, values, read)
    read_flags(config, values, read)
    values["head_bias"] = flag_of(config, "lm_head_bias")
    read |= {"lm_head_bias"}


def read_olmoe(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    _read_expert_width(config, values)
    read_flags(config, values, read)


def read_grok(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Grok-1: attention scores are capped at max_attn_value by a hyperbolic tangent, scales are constants."""
    _read_expert_width(config, values)
    values["capped_scores"] = bool(config.get("max_attn_value", 30.0))
    read |= {"max_attn_value", "attn_output_multiplier", "embedding_multiplier_scale", "output_multiplier_scale"}


def read_dbrx(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    experts, attention = config["ffn_config"], config["attn_config"]
    values |= {"num_experts": experts["moe_num_experts"], "num_experts_per_tok": experts["moe_top_k"]}
    values["moe_intermediate_size"] = experts["ffn_hidden_size"]
    values["num_key_value_heads"] = attention["kv_n_heads"]
    read |= {"ffn_config", "attn_config"}


def read_gpt_oss(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read GPT-OSS: every second layer sees all tokens, the others a window; everything has a bias; YaRN, clamped gates."""
    _read_expert_width(config, values)
    read_window({"sliding_window": 128, **config}, values, read, every=2)
    attention = flag_of(config, "attention_bias", True)
    values |= {"qkv_bias": attention, "output_bias": attention, "mlp_bias": True, "clamped_gate": True, "scaled_rope": True}
    values.setdefault("head_dim", 64)
    read |= {"attention_bias", "initial_context_length"}


def read_llama4(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Llama 4: three of four layers have rotary embedding and see their chunk alone, the others see all tokens.

    Queries and keys are normed in the layers with rotary embedding, without weights. That is the work of a norm per head, whose
    weights (256 per layer) are counted though there are none.
    """
    read_flags({"attention_bias": config.get("attention_bias", False)}, values, read)
    width = config["intermediate_size"]
    values |= {"moe_intermediate_size": width, "shared_expert_intermediate_size": width}
    values["intermediate_size"] = size_of(config, "intermediate_size_mlp", 16384)
    rope = rotary_layers_of(config, values)
    kinds = layer_types_of(config, (FULL_ATTENTION, CHUNKED_ATTENTION)) or marked_layers(CHUNKED_ATTENTION, rope)
    values["no_rope_layers"] = rope
    chunk = size_of(config, "attention_chunk_size", 0, least=0)
    values |= {"attention_chunk_size": chunk, "layer_types": kinds} if chunk else {}
    step, listed = size_of(config, "interleave_moe_layer_step", 1), config.get("moe_layers")
    have_experts(values, lambda layer: layer in listed if listed is not None else (layer + 1) % step == 0)
    values["qk_norm"] = "head" if flag_of(config, "use_qk_norm", True) else "none"
    read |= {"intermediate_size_mlp", "no_rope_layers", "no_rope_layer_interval", "attention_chunk_size", "layer_types"}
    read |= {"interleave_moe_layer_step", "moe_layers", "use_qk_norm", "attn_scale", "floor_scale", "attn_temperature_tuning"}
    read |= {"cache_implementation", "for_llm_compressor"}


def read_router_groups(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read the groups of experts of which a token may use topk_group; where it may use all, there are none."""
    groups = size_of(config, "n_group", 1)
    chosen = size_of(config, "topk_group", groups)
    values |= {"router_groups": groups, "router_topk_groups": chosen} if groups > chosen else {"router_groups": 0}
    read |= {"n_group", "topk_group"}


def _set_absent(config: Mapping[str, Any], values: Values, **defaults: int) -> None:
    """Set what a config does not state to its class's default; a null is the config's own word."""
    values.update({key: value for key, value in defaults.items() if key not in config})


def read_glm_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    _set_absent(config, values, first_k_dense_replace=1, n_shared_experts=1)  # Glm4MoeConfig
    values["qkv_bias"] = flag_of(config, "attention_bias")
    values["qk_norm"] = "head" if flag_of(config, "use_qk_norm") else "none"
    read_router_groups(config, values, read)
    read |= {"attention_bias", "use_qk_norm"}


def read_dots(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read dots.llm1: layers from max_window_layers on have the window, where one is stated."""
    attention = flag_of(config, "attention_bias")
    values |= {"qkv_bias": attention, "output_bias": attention}
    read_router_groups(config, values, read)
    read_window({**with_late_windows(config, values, 62), "use_sliding_window": True}, values, read)
    read |= {"attention_bias", "max_window_layers", "scoring_func"}


def read_ernie_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read which layers have experts: every moe_layer_interval-th one from a first to a last."""
    first, last = size_of(config, "moe_layer_start_index", 1, least=0), size_of(config, "moe_layer_end_index", -1, least=-1)
    every = size_of(config, "moe_layer_interval", 1)
    have_experts(values, lambda n: (n + 1) % every == 0 and first <= n and (last == -1 or n <= last))
    refuse_if_on(config, read, "use_bias")
    read |= {"moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_norm_min", "moe_use_aux_free"}
    read |= {"moe_capacity", "moe_gate"}


def _deepseek(score: str, method: str) -> Special:
    """Return the reader of a DeepSeek family; ``score`` and ``method`` are what its configs leave out."""

    def read_deepseek(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
        chosen = config.get("topk_method", method)
        if chosen not in _TOPK_METHODS:
            raise InputError(f"topk_method is {str(chosen)[:40]!r}, which is not modelled")
        grouped, biased = _TOPK_METHODS[chosen]
        read_router_groups(config if grouped else {}, values, read)
        values |= {"router_score": config.get("scoring_func", score), "router_bias": biased}
        values["num_key_value_heads"] = values["num_attention_heads"]
        if method == "noaux_tc":  # DeepseekV3Config, whose saved configs leave out what is as its own default
            _set_absent(config, values, first_k_dense_replace=3, n_shared_experts=1)
        refuse_if_on(config, read, "attention_bias", "mlp_bias")
        read |= {"topk_method", "scoring_func", "qk_head_dim", "ep_size"}

    return read_deepseek


def read_minicpm3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values.setdefault("v_head_dim", values["hidden_size"] // values["num_attention_heads"])
    values["num_key_value_heads"] = values["num_attention_heads"]
    refuse_if_on(config, read, "attention_bias")
    read |= {"qk_head_dim"}


_LOCAL = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"}
_ROUTED = {
    "n_routed_experts": "num_experts",
    **same("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace"),
}
_DEEPSEEK = {**_ROUTED, **same("moe_layer_freq", *LATENT)}
_DEEPSEEK_V3 = Family(
    fixed={**LLAMA, **NONE},
    keys={**_DEEPSEEK, **same("num_nextn_predict_layers")},
    needed=(*EXPERTS, "kv_lora_rank"),
    special=_deepseek("sigmoid", "noaux_tc"),
)

FAMILIES: Mapping[str, Family] = {
    "dbrx": Family(
        fixed={**LLAMA, **NONE, "norm": "layernorm", "norm_bias": False},
        keys={
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "max_seq_len": "max_position_embeddings",
        },
        special=read_dbrx,
    ),
    "deepseek_v2": Family(
        fixed={**LLAMA, **NONE},
        keys=_DEEPSEEK,
        needed=(*EXPERTS, "kv_lora_rank"),
        special=_deepseek("softmax", "greedy"),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "dots1": Family(
        fixed={**LLAMA, **NONE, "qk_norm": "head", "router_score": "sigmoid", "router_bias": True},
        keys=_ROUTED,
        needed=EXPERTS,
        special=read_dots,
    ),
    "ernie4_5_moe": Family(
        fixed={**LLAMA, **NONE, "router_bias": True},
        tied=True,
        keys={
            "moe_num_experts": "num_experts",
            "moe_k": "num_experts_per_tok",
            "moe_num_shared_experts": "n_shared_experts",
            **same("moe_intermediate_size"),
        },
        needed=EXPERTS,
        special=read_ernie_experts,
    ),
    "glm4_moe": Family(
        fixed={**LLAMA, **NONE, "router_score": "sigmoid", "router_bias": True},
        keys={**_ROUTED, **same("num_nextn_predict_layers")},
        needed=EXPERTS,
        special=read_glm_experts,
    ),
    "gpt_oss": Family(
        fixed={**LLAMA, **ALL, "router_bias": True, "attention_sinks": True},
        keys={**same("num_experts"), "experts_per_token": "num_experts_per_tok", **_LOCAL},
        needed=EXPERTS,
        special=read_gpt_oss,
    ),
    "grok-1": Family(
        fixed={**LLAMA, **NONE, "norms_per_layer": 4},
        tied=True,
        keys={**_LOCAL, **same(*EXPERTS)},
        needed=EXPERTS,
        special=read_grok,
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "llama4_text": Family(
        fixed={**LLAMA, "router_score": "sigmoid"},
        keys=_LOCAL,
        class_defaults={
            **class_of(202048, 5120, 8192, 48, 40, 8, 131072),
            "head_dim": 128,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 8192,
        },
        needed=EXPERTS,
        special=read_llama4,
    ),
    "minicpm3": Family(fixed={**LLAMA, **NONE}, tied=True, keys=same(*LATENT), needed=("kv_lora_rank",), special=read_minicpm3),
    "mixtral": Family(fixed={**LLAMA, **NONE}, keys=_LOCAL, needed=EXPERTS, special=read_mixtral),
    "olmoe": Family(fixed={**LLAMA, "qk_norm": "all"}, keys=same(*EXPERTS), needed=EXPERTS, special=read_olmoe),
    "phimoe": Family(fixed={**LLAMA, "norm": "layernorm"}, keys=_LOCAL, needed=EXPERTS, special=read_phimoe),
}
