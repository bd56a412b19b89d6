"""Further mixtures of experts without windows, most of them of 2025 and 2026: what their config.json files say.

Source: the configuration and modeling files of transformers 5.24, as read; parameter counts in the tests are those of the
models that it builds without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.hugging_face.readers import (
    LLAMA,
    NONE,
    Family,
    Values,
    biases,
    class_of,
    flag_of,
    read_llama,
    read_sparse_layers,
    refuse_if_on,
    refuse_unless,
    size_of,
)
from solver.formats.hugging_face.readers_experts import EXPERTS, LATENT, read_router_groups, same


def read_attention_bias(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read attention_bias, of q, k, v and output; MLPs and experts have no biases."""
    attention = flag_of(config, "attention_bias")
    values |= biases(qkv_bias=attention, output_bias=attention)
    refuse_if_on(config, read, "mlp_bias")
    read |= {"attention_bias"}


def read_expert_width(config: Mapping[str, Any], values: Values, shared: int = 0) -> None:
    """Take intermediate_size as that of each expert, of which ``shared`` see all tokens."""
    values["moe_intermediate_size"] = config["intermediate_size"]
    values["n_shared_experts"] = shared


def read_aria(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_attention_bias(config, values, read)
    read_expert_width(config, values, size_of(config, "moe_num_shared_experts", 2, least=0))
    read |= {"moe_num_shared_experts"}


def read_flex_olmo(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_attention_bias(config, values, read)
    read_expert_width(config, values)


def read_granite_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Granite's experts; beside them a shared MLP of shared_intermediate_size, 0 where there is none."""
    read_llama(config, values, read)
    values["moe_intermediate_size"] = config["intermediate_size"]
    refuse_if_on(config, read, "mlp_bias")


def _of_all_layers(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a size that may be listed for each layer. Raises InputError where layers differ."""
    value = config.get(key, default)
    if isinstance(value, list) and value and any(size != value[0] for size in value):
        raise InputError(f"{key} is {shown(value)}; layers with different experts are not modelled")
    return size_of({key: value[0]} if isinstance(value, list) and value else config, key, default)


def read_hunyuan_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Hunyuan-A13B: an MLP of the same width beside the experts; numbers may be listed for each layer.

    Keys that only its own code beside the checkpoint reads must say what transformers does.
    """
    read_attention_bias(config, values, read)
    width = config["intermediate_size"]
    values["num_experts"] = _of_all_layers(config, "num_experts", 1)
    values["num_experts_per_tok"] = _of_all_layers(config, "moe_topk", 1)
    same_as = {"moe_intermediate_size": width, "num_shared_expert": 1, "attention_head_dim": values.get("head_dim")}
    for key, only in same_as.items():
        if config.get(key) is not None and _of_all_layers(config, key, 1) != only:
            raise InputError(f"{key} is {shown(config[key])}, which is not modelled: transformers has {only}")
    read_expert_width(config, values, shared=1)
    refuse_if_on(config, read, "use_cla", "moe_layer_num_skipped")
    refuse_unless(config, read, {"use_qk_norm": (True,), "use_mixed_mlp_moe": (True,)})
    read |= {"num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert", "attention_head_dim"}
    read |= {"cla_share_factor", "org_vocab_size", "norm_topk_prob"}


def read_hy3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Hunyuan 3: experts of all layers but the first, or as its mlp_layer_types say."""
    read_attention_bias(config, values, read)
    refuse_unless(config, read, {"first_k_dense_replace": (1,)})
    read_sparse_layers(config, values, read, dense=1)
    values.setdefault("n_shared_experts", 1)
    values.setdefault("head_dim", 128)
    read |= {"router_scaling_factor", "enable_moe_fp32_combine"}


def read_mistral4(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Mistral 4: latent attention, softmax scores of experts; that its queries grow with their position is a factor."""
    values.setdefault("n_shared_experts", 1)
    values["num_key_value_heads"] = values["num_attention_heads"]
    read_router_groups(config, values, read)
    refuse_if_on(config, read, "attention_bias", "mlp_bias")
    read |= {"qk_head_dim"}


def read_sarvam_mla(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Sarvam 105B: DeepSeek-V3 without a low rank of queries."""
    values.setdefault("first_k_dense_replace", 1)
    read_mistral4(config, values, read)
    refuse_unless(config, read, {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)})
    read |= {"q_head_dim"}


def read_sarvam(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Sarvam 30B: GLM-4.5 with other names, whose q and k are normed unless use_qk_norm is off."""
    values |= biases(qkv_bias=flag_of(config, "attention_bias", flag_of(config, "use_qkv_bias")))
    values["qk_norm"] = "head" if flag_of(config, "use_qk_norm", True) else "none"
    values.setdefault("first_k_dense_replace", 1)
    values.setdefault("n_shared_experts", 1)
    values.setdefault("head_dim", 64)
    read_router_groups(config, values, read)
    refuse_if_on(config, read, "use_bias")
    read |= {"attention_bias", "use_qkv_bias", "use_qk_norm"}


def read_solar(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Solar Open: all layers have experts, and q and k no norm."""
    values |= biases(qkv_bias=flag_of(config, "attention_bias"))
    values.setdefault("n_shared_experts", 1)
    values.setdefault("head_dim", 128)
    read_router_groups(config, values, read)
    refuse_if_on(config, read, "first_k_dense_replace", "use_qk_norm")
    read |= {"attention_bias"}


_ROUTED = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    **same("num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace"),
}
NAMED = {**same(*EXPERTS, "moe_intermediate_size"), "num_local_experts": "num_experts"}
NAMED_SHARED = {**NAMED, "num_shared_experts": "n_shared_experts"}
_SARVAM = {**_ROUTED, **same("num_experts", "num_nextn_predict_layers"), "num_shared_experts": "n_shared_experts"}
_GRANITE = {**same("num_experts_per_tok"), "num_local_experts": "num_experts"}
BALANCED = {**LLAMA, "router_score": "sigmoid", "router_bias": True}  #: sigmoid scores, and a bias that balances the load

FAMILIES: Mapping[str, Family] = {
    "aria_text": Family(
        fixed=LLAMA,
        keys={"moe_num_experts": "num_experts", "moe_topk": "num_experts_per_tok"},
        needed=EXPERTS,
        special=read_aria,
        class_defaults={**class_of(32000, 4096, 4096, 32, 32, 32, 2048), "moe_num_experts": 8, "moe_topk": 2},
    ),
    "flex_olmo": Family(fixed={**LLAMA, "qk_norm": "all"}, keys=same(*EXPERTS), needed=EXPERTS, special=read_flex_olmo),
    "granitemoe": Family(fixed=LLAMA, keys=_GRANITE, needed=EXPERTS, special=read_granite_experts),
    "granitemoeshared": Family(
        fixed=LLAMA,
        keys={**_GRANITE, "shared_intermediate_size": "shared_expert_intermediate_size"},
        needed=EXPERTS,
        special=read_granite_experts,
    ),
    "hunyuan_v1_moe": Family(fixed={**LLAMA, "qk_norm": "head"}, needed=EXPERTS, special=read_hunyuan_experts),
    "hy_v3": Family(fixed={**BALANCED, "qk_norm": "head"}, keys=NAMED_SHARED, needed=EXPERTS, special=read_hy3),
    "mistral4": Family(
        fixed={**LLAMA, **NONE},
        keys={**_ROUTED, **same(*LATENT)},
        needed=(*EXPERTS, "kv_lora_rank"),
        special=read_mistral4,
        class_defaults={
            **class_of(131072, 4096, 12288, 36, 32, 32, 1048576),
            "moe_intermediate_size": 2048,
            "n_routed_experts": 128,
            "num_experts_per_tok": 4,
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 64,
        },
    ),
    "sarvam_mla": Family(
        fixed={**BALANCED, **NONE},
        keys={**_SARVAM, **same(*LATENT)},
        needed=(*EXPERTS, "kv_lora_rank"),
        special=read_sarvam_mla,
    ),
    "sarvam_moe": Family(fixed=BALANCED, keys=_SARVAM, needed=EXPERTS, special=read_sarvam),
    "solar_open": Family(fixed=BALANCED, keys=_ROUTED, needed=EXPERTS, special=read_solar),
}
