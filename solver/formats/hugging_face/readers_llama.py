"""What the config.json of Llama-like dense decoders says beyond a table of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver.formats.hugging_face.readers import (
    Values,
    biases,
    flag_of,
    read_flags,
    read_rotary_windows,
    read_window,
    refuse_unless,
    rotary_layers_of,
    size_of,
    with_late_windows,
)
from solver.spec.layer_types import SLIDING_ATTENTION, marked_layers


def read_smollm3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which every fourth layer has no rotary embedding; a window would be of these layers alone."""
    read_flags(config, values, read)
    values["no_rope_layers"] = rotary_layers_of(config, values)
    if flag_of(config, "use_sliding_window") and config.get("sliding_window") and not config.get("layer_types"):
        config = {**config, "layer_types": marked_layers(SLIDING_ATTENTION, (not rope for rope in values["no_rope_layers"]))}
    read_window({"use_sliding_window": False, **config}, values, read)
    read |= {"no_rope_layers", "no_rope_layer_interval"}


def read_qwen_window(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read the window of a Qwen model: off unless use_sliding_window is true, and then of the layers from max_window_layers."""
    if flag_of(config, "use_sliding_window"):
        config = with_late_windows(config, values, 28)
    read_window({"use_sliding_window": False, **config}, values, read)
    read |= {"max_window_layers"}


def read_qwen(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_qwen_window(config, values, read)
    values |= biases(qkv_bias=True)


def read_qwen3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_flags(config, values, read)
    read_qwen_window(config, values, read)
    values.setdefault("head_dim", 128)


def read_gemma(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_flags(config, values, read)
    values.setdefault("head_dim", 256)


def _read_soft_caps(config: Mapping[str, Any], values: Values, read: set[str], scores: float, logits: float) -> None:
    """Read soft caps; ``scores`` and ``logits`` are those of a config that does not state them."""
    values["capped_scores"] = bool(config.get("attn_logit_softcapping", scores))
    values["capped_logits"] = bool(config.get("final_logit_softcapping", logits))
    read |= {"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "cache_implementation"}


def read_gemma2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which every second layer sees all tokens, and the others a window."""
    read_gemma(config, values, read)
    read_window({"sliding_window": 4096, **config}, values, read, every=2)
    _read_soft_caps(config, values, read, 50.0, 30.0)
    read |= {"sliding_window_size"}  # the same window again, in early configs


def _window_pattern(config: Mapping[str, Any], read: set[str], usual: int) -> int:
    """Return which one of how many layers sees all tokens; newer releases write the name with an underscore."""
    read |= {"sliding_window_pattern", "_sliding_window_pattern"}
    return size_of(config, "sliding_window_pattern", size_of(config, "_sliding_window_pattern", usual))


def read_gemma3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which every sixth layer, or as its pattern says, sees all tokens."""
    read_gemma(config, values, read)
    read_window({"sliding_window": 4096, **config}, values, read, _window_pattern(config, read, 6))
    _read_soft_caps(config, values, read, 0.0, 0.0)


def read_stablelm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values |= biases(qkv_bias=flag_of(config, "use_qkv_bias"))
    values["qk_norm"] = "all" if flag_of(config, "qk_layernorm") else "none"
    values["norms_per_layer"] = 1 if flag_of(config, "use_parallel_residual") else 2
    read |= {"use_qkv_bias", "qk_layernorm", "use_parallel_residual"}


def read_cohere(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    attention = flag_of(config, "attention_bias")
    values |= biases(qkv_bias=attention, output_bias=attention)
    values["qk_norm"] = "all" if flag_of(config, "use_qk_norm") else "none"
    refuse_unless(config, read, {"use_gated_activation": (True,), "use_parallel_block": (True,)})
    read |= {
        "attention_bias",
        "use_qk_norm",
        "order_of_interleaved_layers",
        "position_embedding_type",
        "use_embedding_sharing",
        "use_parallel_embedding",
        "rotary_pct",
    }


def read_cohere2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a model of which every fourth layer, or as its pattern says, sees all tokens and has no rotary embedding."""
    read_cohere(config, values, read)
    read_rotary_windows({"sliding_window": 4096, **config}, values, read, _window_pattern(config, read, 4))


def read_internlm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    bias = flag_of(config, "bias")
    values |= biases(qkv_bias=bias, output_bias=bias)
    read |= {"bias", "attn_implementation"}


def read_glm(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    values |= biases(qkv_bias=flag_of(config, "attention_bias"))
    read |= {"attention_bias"}
