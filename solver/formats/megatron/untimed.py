"""Arguments of Megatron-LM on which no time depends but training does, as the keys of a config.json, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver.formats.hugging_face.untimed import ACTIVATIONS, squared_relu, stated, stated_number
from solver.spec.model import ModelSpec

#: Keys that state the epsilon of norms, the first one where a file has to have one.
EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layernorm_epsilon", "layer_norm_epsilon")
#: Flag -> key of a config.json with the same value.
_ALIKE = {
    "rotary-base": "rope_theta",
    "rotary-percent": "partial_rotary_factor",
    "norm-epsilon": EPSILONS[0],
    "moe-router-topk-scaling-factor": "routed_scaling_factor",
}
#: Flag -> key of ``rope_scaling``, of positions that YaRN stretches under latent attention.
_YARN = {"rotary-scaling-factor": "factor", "mscale": "mscale", "mscale-all-dim": "mscale_all_dim"}
_LLAMA3_FACTOR = 8.0  #: --rope-scaling-factor unless stated


def untimed_flags(model: ModelSpec) -> dict[str, Any]:
    """Return the arguments without a part in any time that the model's file states."""
    theta, scaling = stated_number(model, "rope_theta"), _llama3_scaling(model)
    return {
        "rotary-base": int(theta) if theta else None,
        "rotary-percent": stated_number(model, "partial_rotary_factor"),
        "use-rope-scaling": bool(scaling),
        "rope-scaling-factor": scaling.get("factor"),
        "norm-epsilon": stated_number(model, *EPSILONS),
        "squared-relu": squared_relu(model),
        "moe-router-topk-scaling-factor": stated_number(model, "routed_scaling_factor") if model.num_experts else None,
    }


def untimed_keys(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return what arguments state as the keys of a config.json: the inverse of untimed_flags, and YaRN's factors."""
    found = {key: _number(flags[flag]) for flag, key in _ALIKE.items() if flag in flags}
    if "use-rope-scaling" in flags:
        factor = _number(flags.get("rope-scaling-factor", _LLAMA3_FACTOR))
        found["rope_scaling"] = {"rope_type": "llama3", "factor": factor}
    elif not flags.keys().isdisjoint(_YARN):
        yarn = {key: _number(flags[flag]) for flag, key in _YARN.items() if flag in flags}
        found["rope_scaling"] = {"rope_type": "yarn", **yarn}
    if "squared-relu" in flags:
        found["hidden_act"] = "relu2"
    return found


def carried(model: ModelSpec) -> frozenset[str]:
    """Return the keys of a config.json without a part in any time that these arguments hold."""
    scaling = ("rope_scaling",) if _llama3_scaling(model) else ()
    activation = ACTIVATIONS if squared_relu(model) else ()
    gate = ("swiglu_limit", *ACTIVATIONS) if model.clamped_gate else ()
    factor = ("routed_scaling_factor",) if model.num_experts else ()
    return frozenset(("rope_theta", "partial_rotary_factor", *EPSILONS, *scaling, *activation, *gate, *factor))


def _llama3_scaling(model: ModelSpec) -> dict[str, Any]:
    """Return how Llama 3.1 stretches rotary positions; empty where the model does not."""
    scaling = stated(model, "rope_scaling")
    return scaling if isinstance(scaling, dict) and scaling.get("rope_type") == "llama3" else {}


def _number(value: Any) -> Any:
    """Return what a flag states as a number where it is one; a wrong value is named where it is written."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value
    return int(number) if number.is_integer() else number
