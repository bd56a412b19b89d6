"""Models with linear attention (gated delta rules): what their config.json files say.

Source: configuration and modeling files of transformers, qwen3_next of 4.57.1 and qwen3_5 and qwen3_5_moe of 5.x, as read. The
counts in tests/data/checkpoints.json are of qwen3_next those of the model that transformers builds.
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
from solver.spec.layer_types import FULL_ATTENTION, LINEAR_ATTENTION, LINEAR_SIZES

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


_FIXED = {**LLAMA, **NONE, "qk_norm": "head"}
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
_KEYS = {name: name for name in _EXPERTS}

FAMILIES: Mapping[str, Family] = {
    "qwen3_next": Family(fixed=_FIXED, keys=_KEYS, needed=_EXPERTS, special=read_linear_experts),
    "qwen3_5_text": Family(
        fixed=_FIXED, special=_read_linear, class_defaults=class_of(248320, 4096, 12288, 32, 16, 4, 32768)
    ),
    "qwen3_5_moe_text": Family(
        fixed=_FIXED,
        keys=_KEYS,
        needed=_EXPERTS,
        special=read_linear_experts,
        class_defaults={
            **class_of(248320, 2048, 512, 40, 16, 2, 32768), "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
}  # fmt: skip
