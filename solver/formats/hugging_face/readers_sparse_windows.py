"""Further mixtures of experts of which some layers have a window, of 2025 and 2026: what their config.json files say.

Source: the configuration and modeling files of transformers 5.24, as read; parameter counts in the tests are those of the
models that it builds without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver.formats.hugging_face.readers import (
    LLAMA,
    NONE,
    Family,
    Values,
    layers_of,
    read_rotary_windows,
    read_sparse_layers,
    read_window,
    refuse_if_on,
    refuse_unless,
    size_of,
)
from solver.formats.hugging_face.readers_dense import read_granite_windows
from solver.formats.hugging_face.readers_experts import EXPERTS, read_router_groups, same
from solver.formats.hugging_face.readers_qwen_experts import read_qwen_experts
from solver.formats.hugging_face.readers_recent import read_exaone4
from solver.formats.hugging_face.readers_sparse import BALANCED, NAMED, NAMED_SHARED, read_attention_bias, read_expert_width
from solver.spec.layer_types import SLIDING_ATTENTION, marked_layers


def read_afmoe(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Trinity: attention with a gate, of which every fourth layer sees all tokens and has no rotary embedding."""
    read_attention_bias(config, values, read)
    every = size_of(config, "global_attn_every_n_layers", 4)
    read_rotary_windows({"sliding_window": 1024, **config}, values, read, every)
    values.setdefault("first_k_dense_replace", 1)
    values.setdefault("n_shared_experts", 2)
    values.setdefault("head_dim", 128)
    refuse_unless(config, read, {"score_func": ("sigmoid",)})
    read_router_groups(config, values, read)
    read |= {"global_attn_every_n_layers", "mup_enabled", "route_scale", "route_norm"}


def read_cohere_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model whose attention and MLP share a norm, and whose layers that see all tokens have no rotary embedding.

    The first dense layers have a pattern of their own, and rotary embedding where that lets all of them see all tokens.
    """
    read_attention_bias(config, values, read)
    dense, width = size_of(config, "first_k_dense_replace", 0, least=0), config["intermediate_size"]
    every, first = size_of(config, "sliding_window_pattern", 4), size_of(config, "prefix_dense_sliding_window_pattern", 1)
    sliding = [(n + 1) % first if n < dense else (n - dense + 1) % every for n in layers_of(values)]
    kinds = config.get("layer_types") or marked_layers(SLIDING_ATTENTION, sliding)
    read_window({"sliding_window": 4096, **config, "layer_types": kinds}, values, read)
    read_sparse_layers(config, values, read, dense)
    prefix = config.get("mlp_layer_types") or ["dense"] * dense + ["sparse"] * (len(kinds) - dense)
    rope = [kind == SLIDING_ATTENTION or (mlp == "dense" and first == 1) for kind, mlp in zip(kinds, prefix, strict=False)]
    values["no_rope_layers"] = [int(on) for on in rope]
    read_expert_width(config, values, size_of(config, "num_shared_experts", 0, least=0))
    values["intermediate_size"] = config.get("prefix_dense_intermediate_size", width)
    values |= {"norm": "rmsnorm"} if config.get("rms_norm_eps") else {"norm": "layernorm", "norm_bias": False}
    values["router_score"] = config.get("expert_selection_fn", "softmax")
    values.setdefault("head_dim", 128)
    read |= {"first_k_dense_replace", "sliding_window_pattern", "prefix_dense_sliding_window_pattern", "num_shared_experts"}
    read |= {"prefix_dense_intermediate_size", "expert_selection_fn", "shared_expert_combination_strategy"}


def read_exaone_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read K-EXAONE: the attention of EXAONE 4, and experts of all layers but the first, or as its mlp_layer_types say."""
    read_exaone4(config, values, read)
    read_sparse_layers(config, values, read, dense=1)
    values.setdefault("n_shared_experts", 1)
    read_router_groups(config, values, read)
    refuse_unless(config, read, {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)})


def read_flint(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model whose first two layers, every fourth and the last see all tokens and have no rotary embedding."""
    read_attention_bias(config, values, read)
    last = values["num_hidden_layers"] - 1
    sliding = (n > 1 and n % 4 != 1 and n != last for n in layers_of(values))
    kinds = config.get("layer_types") or marked_layers(SLIDING_ATTENTION, sliding)
    read_rotary_windows({"sliding_window": 513, **config, "layer_types": kinds}, values, read, every=4)
    read_qwen_experts({"mlp_only_layers": [0, 1], **config}, values, read)
    values.setdefault("head_dim", 128)


def read_granite_experts_windows(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_granite_windows(config, values, read)
    values["moe_intermediate_size"] = config["intermediate_size"]
    refuse_if_on(config, read, "mlp_bias")


def read_kolibri(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which every fifth layer sees all tokens and has no rotary embedding."""
    refuse_if_on(config, read, "attention_bias")
    read_rotary_windows({"sliding_window": 513, **config}, values, read, every=5)
    values.setdefault("shared_expert_intermediate_size", 512)
    values.setdefault("head_dim", 128)


def read_mellum(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model whose layers see all tokens, but for those that layer_types names; all have rotary embedding."""
    read_attention_bias(config, values, read)
    kinds = config.get("layer_types") or marked_layers(SLIDING_ATTENTION, [0] * len(layers_of(values)))
    read_window({"sliding_window": 1024, **config, "layer_types": kinds}, values, read)
    read_sparse_layers(config, values, read, dense=0)
    values.setdefault("head_dim", 128)


FAMILIES: Mapping[str, Family] = {
    "afmoe": Family(
        fixed={**BALANCED, "qk_norm": "head", "attention_gate": True, "norms_per_layer": 4},
        keys={**NAMED_SHARED, "num_dense_layers": "first_k_dense_replace"},
        needed=EXPERTS,
        special=read_afmoe,
    ),
    "cohere2_moe": Family(
        fixed={**LLAMA, "norms_per_layer": 1}, tied=True, keys=same(*EXPERTS), needed=EXPERTS, special=read_cohere_experts
    ),
    "exaone_moe": Family(
        fixed={**BALANCED, **NONE, "qk_norm": "head"},
        keys={**NAMED_SHARED, **same("first_k_dense_replace")},
        needed=EXPERTS,
        special=read_exaone_experts,
    ),
    "flint": Family(
        fixed={**LLAMA, "qk_norm": "head", "attention_sinks": True, "router_score": "sigmoid"},
        keys={**NAMED, **same("shared_expert_intermediate_size")},
        needed=(*EXPERTS, "shared_expert_intermediate_size"),
        special=read_flint,
    ),
    "granitemoe_swa": Family(
        fixed={**LLAMA, "attention_sinks": True},
        keys={
            **same("num_experts_per_tok"),
            "num_local_experts": "num_experts",
            "shared_intermediate_size": "shared_expert_intermediate_size",
        },
        needed=EXPERTS,
        special=read_granite_experts_windows,
    ),
    "kolibri1": Family(
        fixed={**BALANCED, **NONE, "qk_norm": "head", "norms_per_layer": 4},
        keys={**NAMED, **same("shared_expert_intermediate_size")},
        needed=EXPERTS,
        special=read_kolibri,
    ),
    "mellum": Family(fixed={**LLAMA, "qk_norm": "head"}, keys=NAMED, needed=EXPERTS, special=read_mellum),
}
