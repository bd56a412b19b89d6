"""Families of 2025: what their config.json files say, and the text parts of Qwen's vision-language models.

Source: the modeling and configuration files of transformers 4.57.1, as read, and 5 (GLM-4.7 Flash, Ministral 3); for
bailing_moe_v2 (Ling and Ring 2.0) those of inclusionAI/Ling-V2, for minimax_m2 what other implementations say of it. Parameter
counts in tests/data/checkpoints.json are those of transformers' own models, built without weights, or published. A vision tower
is no part of a model here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.hugging_face import readers_experts, readers_qwen_experts
from solver.formats.hugging_face.readers import (
    LLAMA,
    Family,
    Values,
    biases,
    class_of,
    flag_of,
    layer_types_of,
    layers_of,
    read_llama,
    read_sparse_layers,
    read_window,
    refuse_if_on,
    refuse_unless,
    size_of,
)
from solver.formats.hugging_face.readers_experts import EXPERTS, LATENT, read_router_groups
from solver.formats.hugging_face.readers_llama import read_qwen, read_qwen3
from solver.spec.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, marked_layers


def read_ernie(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    bias = flag_of(config, "use_bias")
    values |= biases(qkv_bias=bias, output_bias=bias, mlp_bias=bias)
    values.setdefault("head_dim", 128)
    read |= {"use_bias"}


def read_seed_oss(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values |= biases(
        qkv_bias=flag_of(config, "attention_bias", True),
        output_bias=flag_of(config, "attention_out_bias"),
        mlp_bias=flag_of(config, "mlp_bias"),
    )
    values.setdefault("head_dim", 128)
    read |= {"attention_bias", "attention_out_bias", "mlp_bias"}


def read_granite_hybrid(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a Granite 4.0 whose layers are all attention and which has no experts: its MLP is the one called shared."""
    layers = size_of(config, "num_hidden_layers", 32)
    kinds = config.get("layer_types") or ["mamba"] * layers
    if any(kind not in ("attention", FULL_ATTENTION) for kind in kinds):  # transformers 5 writes full_attention
        raise InputError("layer_types of granitemoehybrid has state-space layers, which are not modelled beside attention")
    if size_of(config, "num_local_experts", 8, least=0):
        raise InputError("num_local_experts of granitemoehybrid is not 0: experts beside a shared MLP are not modelled there")
    values["intermediate_size"] = size_of(config, "shared_intermediate_size", 1024)
    values |= biases(qkv_bias=flag_of(config, "attention_bias"), output_bias=flag_of(config, "attention_bias"))
    values["position"] = "rope" if config.get("position_embedding_type") == "rope" else "none"
    read |= {"layer_types", "num_local_experts", "num_experts_per_tok", "shared_intermediate_size", "attention_bias"}
    read |= {"position_embedding_type", *(key for key in config if key.startswith(("mamba_", "time_step_")))}


def read_olmo3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which every fourth layer, or as its layer_types say, sees all tokens, and the others a window."""
    attention = flag_of(config, "attention_bias")
    values |= biases(qkv_bias=attention, output_bias=attention)
    read_window({"sliding_window": 4096, **config}, values, read, every=4)
    read |= {"attention_bias"}


def read_hunyuan(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a dense Hunyuan; keys that only its own code beside the checkpoints reads must say what transformers does."""
    attention, width = flag_of(config, "attention_bias"), values["hidden_size"] // values["num_attention_heads"]
    values |= biases(qkv_bias=attention, output_bias=attention)
    refuse_if_on(config, read, "use_cla")
    if not flag_of(config, "use_qk_norm", True):
        raise InputError("use_qk_norm is False, which is not modelled: transformers norms q and k of every dense Hunyuan")
    stated = values.get("head_dim", width)
    if config.get("attention_head_dim", stated) != stated:
        raise InputError(f"attention_head_dim {config['attention_head_dim']} differs from head_dim {stated}")
    read |= {"attention_bias", "use_qk_norm", "attention_head_dim", "cla_share_factor", "org_vocab_size", "mlp_bias"}


def read_qwen2_vl_text(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_qwen({"max_window_layers": 80, **config}, values, read)


def read_bailing(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Ling and Ring 2.0: sigmoid scores with a bias that balances the load, groups of experts, norms of q and k."""
    values |= biases(qkv_bias=flag_of(config, "use_qkv_bias"), output_bias=flag_of(config, "use_bias"))
    values["qk_norm"] = "head" if flag_of(config, "use_qk_norm", True) else "none"
    values["router_bias"] = flag_of(config, "moe_router_enable_expert_bias", True)
    read_router_groups(config, values, read)
    width = size_of(config, "moe_intermediate_size", 0) * size_of(config, "num_shared_experts", 0, least=0)
    shared = {"moe_shared_expert_intermediate_size": (width, values["moe_intermediate_size"])}
    refuse_unless(config, read, {"score_function": ("sigmoid",), **shared})
    read |= {"use_qkv_bias", "use_bias", "use_qk_norm", "moe_router_enable_expert_bias", "router_type"}


def read_minimax_m2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read MiniMax-M2: softmax attention in all layers, one norm over all heads of q and one of k, experts in every layer.

    Its published weights hold no modules of multi-token prediction, though its configs announce some: the model is estimated
    without, which the report says (unread_keys). Keys of shared experts and of layers of other kinds change nothing.
    """
    values["moe_intermediate_size"] = config["intermediate_size"]
    values["qk_norm"] = "all" if flag_of(config, "use_qk_norm", True) else "none"  # transformers' class has no such key
    values["router_bias"] = flag_of(config, "use_routing_bias", True)  # as transformers, which has no such key, builds it
    kinds = config.get("attn_type_list") or []
    if any(kind != 1 for kind in kinds):
        raise InputError("attn_type_list has layers of another kind than 1 (softmax attention), which are not modelled")
    betas = {f"layernorm_{of}_beta": (1, 1.0) for of in ("linear_attention", "full_attention", "mlp")}
    refuse_unless(config, read, {"qk_norm_type": ("per_layer",), "scoring_func": ("sigmoid",), **betas})
    refuse_if_on(config, read, "shared_intermediate_size")
    read |= {"use_qk_norm", "use_routing_bias", "attn_type_list", "mlp_intermediate_size", "shared_moe_mode"}
    read |= {"use_mtp", "num_mtp_modules", "mtp_transformer_layers"}


def read_apertus(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model without gates; of its learned activation (xIELU) neither the two scalars a layer nor the chain of kernels
    that runs where its own kernel is not installed count."""
    attention = flag_of(config, "attention_bias")
    values |= biases(qkv_bias=attention, output_bias=attention)
    read |= {"attention_bias", "mlp_bias"}


def read_cwm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which the first of four layers, or as its layer_types say, sees all tokens."""
    values |= biases(mlp_bias=flag_of(config, "mlp_bias"))
    values.setdefault("head_dim", 128)
    kinds = config.get("layer_types") or marked_layers(SLIDING_ATTENTION, (n % 4 for n in layers_of(values)))
    read_window({"sliding_window": 8192, **config, "layer_types": kinds}, values, read)
    read |= {"mlp_bias"}


def read_exaone4(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which every fourth layer, or as its pattern says, sees all tokens and has no rotary embedding; without a
    window all layers have one. A pattern of letters ends with a layer that sees all."""
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        last = values["num_hidden_layers"] - 1
        if not pattern or not set(pattern) <= {"L", "G"}:
            raise InputError(f"sliding_window_pattern is {shown(pattern)}; it must be letters L and G, or a whole number")
        sliding = [n != last and pattern[n % len(pattern)] == "L" for n in layers_of(values)]
    else:
        every = size_of({"sliding_window_pattern": pattern}, "sliding_window_pattern", 4, least=0)
        sliding = [bool(every and (n + 1) % every) for n in layers_of(values)]
    window = config.get("sliding_window", 4096)
    if window:
        kinds = layer_types_of(config) or list(marked_layers(SLIDING_ATTENTION, sliding))
        every = next((n for n in range(2, len(kinds)) if kinds == _all_but(n, values)), 0)
        values |= {"sliding_window": window} | ({"sliding_window_every": every} if every else {"layer_types": kinds})
        values["no_rope_layers"] = [int(kind == SLIDING_ATTENTION) for kind in kinds]
    read |= {"sliding_window", "sliding_window_pattern", "layer_types"}


def _all_but(every: int, values: Values) -> list[str]:
    """Return the kinds of layers of which every n-th sees all tokens."""
    return list(marked_layers(SLIDING_ATTENTION, ((n + 1) % every for n in layers_of(values))))


def read_glm_lite(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read latent attention and experts of all layers but the first, or as its mlp_layer_types say."""
    read_sparse_layers(config, values, read, dense=1)
    values.setdefault("n_shared_experts", 1)
    values["num_key_value_heads"] = values["num_attention_heads"]
    read_router_groups(config, values, read)
    refuse_if_on(config, read, "attention_bias", "mlp_bias")
    refuse_unless(config, read, {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)})
    read |= {"qk_head_dim"}


def read_glm_vision_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    readers_experts.read_glm_experts({"attention_bias": True, **config}, values, read)


def read_ministral(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Ministral 8B: a window in all layers, or in those that its layer_types name."""
    read_window({"sliding_window": 4096, **config}, values, read)


def read_ministral3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Ministral 3: Mistral with heads of 128; that its queries grow with their position is one factor more of them."""
    values.setdefault("head_dim", 128)
    read_window(config, values, read)


_QWEN2_VL = Family(fixed=LLAMA, special=read_qwen2_vl_text, class_defaults=class_of(152064, 8192, 29568, 80, 64, 8, 32768))

_QWEN3_VL_MOE = {
    **class_of(151936, 2048, 5632, 24, 16, 16, 128000),
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
}

_GLM4V_MOE = {
    **class_of(151424, 4096, 10944, 46, 96, 8, 65536),
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
}

FAMILIES: Mapping[str, Family] = {
    "apertus": Family(fixed={**LLAMA, "gated_mlp": False, "qk_norm": "head"}, special=read_apertus),
    "arcee": Family(fixed={**LLAMA, "gated_mlp": False}, special=read_llama),
    "bailing_moe_v2": Family(
        fixed={**LLAMA, "router_score": "sigmoid"},
        keys={
            **{key: key for key in (*EXPERTS, "moe_intermediate_size", "first_k_dense_replace", "num_nextn_predict_layers")},
            "num_shared_experts": "n_shared_experts",
        },
        needed=(*EXPERTS, "first_k_dense_replace", "n_shared_experts"),
        special=read_bailing,
    ),
    "cwm": Family(fixed=LLAMA, special=read_cwm),
    "ernie4_5": Family(fixed=LLAMA, tied=True, special=read_ernie),
    "exaone4": Family(fixed={**LLAMA, **biases(), "qk_norm": "head"}, special=read_exaone4),
    "glm4_moe_lite": Family(
        fixed={**LLAMA, **biases(), "router_score": "sigmoid", "router_bias": True},
        keys={
            "n_routed_experts": "num_experts",
            **{key: key for key in ("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", *LATENT)},
            **{key: key for key in ("first_k_dense_replace", "num_nextn_predict_layers")},
        },
        needed=(*EXPERTS, "kv_lora_rank"),
        special=read_glm_lite,
    ),
    "glm4v_moe_text": dataclasses.replace(
        readers_experts.FAMILIES["glm4_moe"], special=read_glm_vision_experts, class_defaults=_GLM4V_MOE
    ),
    "granitemoehybrid": Family(fixed=LLAMA, special=read_granite_hybrid),
    "hunyuan_v1_dense": Family(fixed={**LLAMA, "qk_norm": "head"}, special=read_hunyuan),
    "minimax_m2": Family(
        fixed={**LLAMA, **biases(), "router_score": "sigmoid"},
        keys={"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"},
        needed=EXPERTS,
        special=read_minimax_m2,
    ),
    "ministral": Family(fixed={**LLAMA, **biases()}, special=read_ministral),
    "ministral3": Family(
        fixed={**LLAMA, **biases()}, special=read_ministral3, class_defaults=class_of(131072, 4096, 14336, 34, 32, 8, 262144)
    ),
    "olmo3": Family(fixed={**LLAMA, "qk_norm": "all"}, special=read_olmo3),
    "qwen2_5_vl": _QWEN2_VL,  # its first configs state the text model without a section of its own
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_vl_text": Family(
        fixed={**LLAMA, "qk_norm": "head"},
        special=read_qwen3,
        class_defaults=class_of(151936, 4096, 22016, 32, 32, 32, 128000),
    ),
    "qwen3_vl_moe_text": dataclasses.replace(readers_qwen_experts.FAMILIES["qwen3_moe"], class_defaults=_QWEN3_VL_MOE),
    "seed_oss": Family(fixed=LLAMA, special=read_seed_oss),
}
