"""Models with linear attention (gated delta rules): what their config.json files say.

Source: configuration and modeling files of transformers, qwen3_next of 4.57.1, qwen3_5 and qwen3_5_moe of 5.x, olmo_hybrid
and lara_mini of 5.24, as read. The counts in tests/data/checkpoints.json are of qwen3_next those of the model that transformers
builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver.formats.hugging_face.readers import (
    LLAMA,
    NONE,
    Family,
    Values,
    class_of,
    layer_types_of,
    layers_of,
    refuse_if_on,
    refuse_unless,
    size_of,
)
from solver.formats.hugging_face.readers_qwen_experts import read_qwen_experts
from solver.spec.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, LINEAR_SIZES, SLIDING_ATTENTION

#: Sizes that the config classes have where a config leaves them out.
_DEFAULTS = dict(zip(LINEAR_SIZES, (16, 32, 128, 128, 4), strict=True))


def _read_linear(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read which layers have linear attention, all but every fourth or as listed, and its sizes."""
    every = size_of(config, "full_attention_interval", 4)
    allowed = (FULL_ATTENTION, LINEAR_ATTENTION)
    kinds = layer_types_of(config, allowed) or [allowed[(n + 1) % every != 0] for n in layers_of(values)]
    values |= {"layer_types": kinds, "attention_gate": True}
    if LINEAR_ATTENTION in kinds:
        values |= {key: config.get(key, default) for key, default in _DEFAULTS.items()}
    values.setdefault("head_dim", 256)
    refuse_if_on(config, read, "attention_bias")
    refuse_unless(config, read, {"attn_output_gate": (True,)})
    values["num_nextn_predict_layers"] = size_of(config, "mtp_num_hidden_layers", 0, least=0)
    refuse_if_on(config, read, "mtp_use_dedicated_embeddings")
    read |= {"full_attention_interval", "layer_types", "mtp_num_hidden_layers", *LINEAR_SIZES}


def read_linear_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values.setdefault("intermediate_size", values["moe_intermediate_size"])
    read_qwen_experts(config, values, read)
    refuse_if_on(config, read, "use_sliding_window", "mlp_bias")
    read |= {"sliding_window", "max_window_layers"}
    values["shared_expert_gate"] = True
    _read_linear(config, values, read)


def read_olmo_hybrid(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which every fourth layer has softmax attention, without rotary embedding where its base is null; the
    others have a gated delta rule, whose projections are as large where they are apart."""
    allowed = (FULL_ATTENTION, LINEAR_ATTENTION)
    kinds = layer_types_of(config, allowed) or [allowed[(n + 1) % 4 != 0] for n in layers_of(values)]
    if FULL_ATTENTION not in kinds:  # of fewer than four layers the last one
        kinds[-1] = FULL_ATTENTION
    heads = values["num_attention_heads"]
    keys = size_of(config, "linear_num_key_heads", heads)
    key = size_of(config, "linear_key_head_dim", int(0.75 * values["hidden_size"] / keys))
    sizes = (keys, heads, key, 2 * key, 4)
    values |= {name: config.get(name, default) for name, default in zip(LINEAR_SIZES, sizes, strict=True)}
    rotary = config.get("rope_parameters") or {}
    values |= {"layer_types": kinds, "position": "none" if rotary.get("rope_theta", 0) is None else "rope"}
    refuse_if_on(config, read, "attention_bias")
    read |= {"layer_types", "linear_allow_neg_eigval", *LINEAR_SIZES, *_STARTS}


def read_lara(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of linear attention, windows and full attention, in turn or as layer_types says; the latter has no rotary
    embedding."""
    pattern = (LINEAR_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION, SLIDING_ATTENTION)
    kinds = layer_types_of(config, pattern) or [pattern[n % len(pattern)] for n in layers_of(values)]
    values |= {"layer_types": kinds, "no_rope_layers": [int(kind != FULL_ATTENTION) for kind in kinds]}
    if SLIDING_ATTENTION in kinds:
        values["sliding_window"] = size_of(config, "sliding_window", 512)
    if LINEAR_ATTENTION in kinds:
        sizes = zip(LINEAR_SIZES, (8, 16, 128, 128, 4), strict=True)
        values |= {name: config.get(name, default) for name, default in sizes}
    values.setdefault("head_dim", 128)
    refuse_if_on(config, read, "attention_bias", "mlp_bias")
    read |= {"layer_types", "sliding_window", *LINEAR_SIZES}


#: Numbers that the decay of OLMo's linear attention starts from.
_STARTS = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
_FIXED = {**LLAMA, **NONE, "qk_norm": "head"}
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_KEYS = {name: name for name in _EXPERTS}

FAMILIES: Mapping[str, Family] = {
    "lara_mini": Family(
        fixed=_FIXED, tied=True, keys={**_KEYS, "num_local_experts": "num_experts"}, needed=_EXPERTS, special=read_lara
    ),
    "olmo_hybrid": Family(fixed={**LLAMA, **NONE, "qk_norm": "all"}, special=read_olmo_hybrid),
    "qwen3_next": Family(fixed=_FIXED, keys=_KEYS, needed=_EXPERTS, special=read_linear_experts),
    "qwen3_5_text": Family(fixed=_FIXED, special=_read_linear, class_defaults=class_of(248320, 4096, 12288, 32, 16, 4, 32768)),
    "qwen3_5_moe_text": Family(
        fixed=_FIXED,
        keys=_KEYS,
        needed=_EXPERTS,
        special=read_linear_experts,
        class_defaults={
            **class_of(248320, 2048, 512, 40, 16, 2, 32768),
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
}
