"""The kinds of a model's layers as arguments of Megatron-LM: windows, sinks, positions, linear attention, Mamba-2."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from solver.formats.hugging_face.readers_hybrid import LETTERS
from solver.formats.hugging_face.untimed import stated_number
from solver.formats.megatron.flags import HYBRID_LAYERS, LINEAR, MAMBA_ARGUMENTS
from solver.spec.layer_kinds import is_linear, window_of
from solver.spec.model import ModelSpec

Flags = dict[str, Any]


def plain(model: ModelSpec) -> bool:
    """Whether all layers attend to all tokens, without sinks, with one rotary embedding or none, and no gate is clamped or of
    attention."""
    return not (
        model.sliding_window
        or model.attention_sinks
        or model.no_rope_layers
        or model.clamped_gate
        or model.scaled_rope
        or model.has_linear_attention
        or model.attention_gate
        or model.is_hybrid
    )


def layer_kind_flags(model: ModelSpec) -> Flags:
    """Return windows, which the token itself is beside; sinks; layers without rotary embedding; and GPT-OSS's clamped gate,
    which is a quick GELU (its alpha is 1.702) of up projections plus 1 (megatron/core/fusions/fused_bias_geglu.py)."""
    layers = range(model.num_hidden_layers)
    windows = [int(window_of(model, layer) > 0) for layer in layers]
    limit = stated_number(model, "swiglu_limit") or 7.0
    gate = {"quick-geglu": True, "activation-func-clamp-value": limit, "glu-linear-offset": 1.0} if model.clamped_gate else {}
    return gate | {
        "window-size": f"{model.sliding_window - 1},0" if any(windows) else None,
        "window-attn-skip-freq": None if all(windows) or not any(windows) else listed(windows),
        "softmax-type": "learnable" if model.attention_sinks else None,
        "no-rope-freq": listed([1 - has for has in model.no_rope_layers]) if model.no_rope_layers else None,
        "attention-output-gate": model.attention_gate,
        **(_linear(model) if model.has_linear_attention else {}),
        **(_hybrid(model) if model.one_block_layers else {}),
    }


def _hybrid(model: ModelSpec) -> Flags:
    """Return which block each layer is, and the sizes of Mamba-2."""
    letters = {kind: letter for letter, kind in LETTERS.items()}
    sizes = {flag: getattr(model, key) for flag, (key, _) in MAMBA_ARGUMENTS.items()} | {
        "mamba-num-heads": model.mamba_num_heads
    }
    return {
        "is-hybrid-model": True,
        "spec": HYBRID_LAYERS,
        "hybrid-override-pattern": "".join(letters[kind] for kind in model.layer_types),
        **(sizes if model.has_state_space else {}),
    }


def _linear(model: ModelSpec) -> Flags:
    """Return the layers with linear attention, and its sizes."""
    kinds = [int(is_linear(model, layer)) for layer in range(model.num_hidden_layers)]
    every = kinds.index(0) + 1 if 0 in kinds else 0
    regular = every > 1 and kinds == [int(n % every != 0) for n in range(1, len(kinds) + 1)]
    return {
        "experimental-attention-variant": "gated_delta_net",
        "linear-attention-freq": every if regular else listed(kinds),
        **{flag: getattr(model, key) for flag, (key, _) in LINEAR.items()},
    }


def listed(pattern: Sequence[int]) -> str:
    """Return a pattern of layers as a list expression, like ([0]*3+[1]*11)."""
    return f"({'+'.join(f'[{kind}]*{len(list(same))}' for kind, same in groupby(pattern))})"
