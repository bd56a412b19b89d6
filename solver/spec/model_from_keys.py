"""A model from a mapping of its own keys, as model files and measured cases state it, and the defaults of keys left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from profiler.errors import InputError, printable, shown
from solver.spec.model import REQUIRED, ModelSpec

_LIKE = 0.85  #: "hiden_size" is like "hidden_size", "rms_norm_eps" like nothing known
KNOWN_KEYS = {f.name for f in fields(ModelSpec)} - {"unmodelled", "untimed"} | {
    "hidden_act",
    "n_shared_experts",
    "bias",
    "attention_bias",
}
OTHER_NAMES = {
    "n_routed_experts": "num_experts",
    "num_local_experts": "num_experts",
    "n_group": "router_groups",
    "topk_group": "router_topk_groups",
}


def unknown_keys(config: Mapping[str, Any], but_misspelt: bool = False) -> list[str]:
    """Return the keys of ``config`` that no ModelSpec is made of, in order; a null counts as absent.

    but_misspelt: leave out those that look like a known key, which somebody meant.
    """
    unknown = (key for key, value in config.items() if value is not None and OTHER_NAMES.get(key, key) not in KNOWN_KEYS)
    return sorted(key for key in unknown if not (but_misspelt and get_close_matches(key, KNOWN_KEYS, 1, _LIKE)))


def model_from_keys(config: Mapping[str, Any], where: str, name: str = "") -> ModelSpec:
    """Return a ModelSpec from a mapping of ModelSpec's own keys; ``where`` names it in error messages.

    Defaults: one key and value head per query head, an MLP of 4 hidden sizes, head_dim = hidden / heads; a gated MLP with
    RMSNorm and rotary positions, or for hidden_act "gelu_new" a plain MLP with LayerNorm and learned positions. bias: of all
    linears; attention_bias: of those of attention. Raises InputError for an unknown key, most likely a misspelt one, and for
    values that cannot be.
    """
    given = {OTHER_NAMES.get(key, key): value for key, value in config.items() if value is not None}
    unknown = unknown_keys(config)
    if unknown:
        raise InputError(f"{where}: unknown model key {unknown[0]!r}; known keys are {', '.join(sorted(KNOWN_KEYS))}")
    missing = [key for key in REQUIRED if key not in given]
    if missing:
        raise InputError(f"{where}: the model needs {missing[0]}")
    kinds = {f.name: str(f.type) for f in fields(ModelSpec)} | {
        "n_shared_experts": "int",
        "bias": "bool",
        "attention_bias": "bool",
        "hidden_act": "str",
    }
    words = {
        "int": "a whole number",
        "bool": "true or false",
        "str": "a text",
        "tuple[str, ...]": "a list of texts",
        "tuple[int, ...]": "a list of whole numbers",
        "int | tuple[int, ...]": "a whole number or a list of them",
    }
    if isinstance(given.get("qk_norm"), bool):  # as cases state it
        given["qk_norm"] = "head" if given["qk_norm"] else "none"
    for key, value in given.items():
        if not _is_of(value, kinds[key]):
            raise InputError(f"{where}: model key {key} is {shown(value)}; it must be {words[kinds[key]]}")
    called = printable(name or str(given.get("name") or where))
    try:
        return ModelSpec(**{**_with_defaults(dict(given)), "name": called})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _is_of(value: Any, kind: str) -> bool:
    """Whether a value is of a field's type; a bool is an int in Python, but ``"hidden_size": true`` is a mistake."""
    if isinstance(value, list | tuple):
        return f"tuple[{type(value[0]).__name__ if value else 'int'}, ...]" in kind and len({type(v) for v in value}) <= 1
    return type(value).__name__ in kind.split(" | ")


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    hidden, heads = values["hidden_size"], max(values["num_attention_heads"], 1)
    values.setdefault("gated_mlp", "gelu_new" not in values.pop("hidden_act", ""))
    shared = values.pop("n_shared_experts", 0)
    if values.pop("bias", False):
        values = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, **values}
    if values.pop("attention_bias", False):
        values = {"qkv_bias": True, "output_bias": True, **values}
    if values.get("intermediate_size") == 0 and not values.get("moe_intermediate_size"):
        raise InputError("intermediate_size is 0; it must be at least 1")
    if not values.get("intermediate_size"):
        values["intermediate_size"] = values.get("moe_intermediate_size") or 4 * hidden
    values.setdefault("num_key_value_heads", heads)
    if values.get("kv_lora_rank"):
        values["head_dim"] = values.get("qk_nope_head_dim", 0) + values.get("qk_rope_head_dim", 0) or 1
    if values.get("head_dim", 1) < 1:
        raise InputError(f"head_dim is {values['head_dim']}; it must be positive, or left out for hidden_size / heads")
    if "head_dim" not in values and not values.get("v_head_dim") and hidden % heads:
        raise InputError(f"num_attention_heads {heads} does not divide hidden_size {hidden}; state head_dim")
    values["head_dim"] = values.get("head_dim") or values.get("v_head_dim") or hidden // heads
    values.setdefault("norm", "rmsnorm" if values["gated_mlp"] else "layernorm")
    values.setdefault("position", "rope" if values["gated_mlp"] else "learned")
    if shared and not values.get("shared_expert_intermediate_size"):
        values["shared_expert_intermediate_size"] = shared * values.get("moe_intermediate_size", 0)
    return values
