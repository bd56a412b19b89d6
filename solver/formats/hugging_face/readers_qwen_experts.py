"""Qwen's mixtures of experts: which layers have experts and which have a window.

Source: configuration and modeling files of qwen2_moe and qwen3_moe in transformers 4.57 and 5.24, as read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.hugging_face.readers import (
    LLAMA,
    Family,
    Values,
    flag_of,
    layers_of,
    read_flags,
    read_window,
    size_of,
)
from solver.formats.hugging_face.readers_experts import EXPERTS, have_experts, same
from solver.spec.layer_types import SLIDING_ATTENTION, marked_layers


def read_qwen_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read which layers have experts: every decoder_sparse_step-th one, but for mlp_only_layers."""
    step, layers = size_of(config, "decoder_sparse_step", 1), layers_of(values)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) and layer in layers for layer in dense):
        raise InputError(f"mlp_only_layers is {shown(dense)}; it must be a list of layers from 0 to {len(layers) - 1}")
    have_experts(values, lambda layer: (layer + 1) % step == 0 and layer not in dense)
    read |= {"decoder_sparse_step", "mlp_only_layers"}


def read_qwen2_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a window that every second of the first max_window_layers has, if use_sliding_window is true.

    That is how Qwen2MoeConfig lists them; those of a dense Qwen2 are all from the max_window_layers-th on.
    """
    read_qwen_experts(config, values, read)
    values["qkv_bias"] = flag_of(config, "qkv_bias", True)
    if flag_of(config, "use_sliding_window") and not config.get("layer_types"):
        last = size_of(config, "max_window_layers", 28, least=0)
        sliding = (n % 2 == 0 and n < last for n in layers_of(values))
        config = {"sliding_window": 4096, **config, "layer_types": marked_layers(SLIDING_ATTENTION, sliding)}
    read_window({"use_sliding_window": False, **config}, values, read)
    read |= {"qkv_bias", "max_window_layers"}


def read_qwen3_experts(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a window that all layers have, if use_sliding_window is true: max_window_layers changes nothing there."""
    read_qwen_experts(config, values, read)
    read_flags(config, values, read)
    read_window({"use_sliding_window": False, "sliding_window": 4096, **config}, values, read)
    read |= {"max_window_layers"}


_KEYS = same(*EXPERTS, "moe_intermediate_size")

FAMILIES: Mapping[str, Family] = {
    "qwen2_moe": Family(
        fixed={**LLAMA, "shared_expert_gate": True},
        keys={**_KEYS, **same("shared_expert_intermediate_size")},
        needed=EXPERTS,
        special=read_qwen2_experts,
    ),
    "qwen3_moe": Family(
        fixed={**LLAMA, "qk_norm": "head"},
        keys={**_KEYS, "num_local_experts": "num_experts"},
        needed=EXPERTS,
        special=read_qwen3_experts,
    ),
}
