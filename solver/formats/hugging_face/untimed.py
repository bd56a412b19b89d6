"""What a model's config.json says that no time depends on but training does, such as rope_theta: carried over, or named."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from profiler.errors import InputError, shown
from solver.spec.model import ModelSpec

_KEYS = re.compile(
    r"rope_\w+|rotary\w*|partial_rotary_factor|original_max_position_embeddings|\w*multiplier|logits_scaling|logit_scale"
    r"|embedding_scale|residual_scale|scale_(depth|emb)|dim_model_base|clip_qkv|hidden_act(ivation)?|activation_function"
    r"|(rms_norm|norm|layer_norm|layernorm)_eps(ilon)?|routed_scaling_factor|swiglu_(limit|alpha)|use_parallel_residual"
)
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
#: What every file means that says nothing else.
_USUAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(ACTIVATIONS, ("silu", "swish")),
    "rope_theta": (10000, 10000.0),
    "routed_scaling_factor": (1, 1.0),
    "use_parallel_residual": (False,),
    "partial_rotary_factor": (1, 1.0),
}


def untimed_of(config: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return (key, value as JSON) of the keys of a config.json, for ModelSpec.untimed."""
    return tuple((key, json.dumps(value)) for key, value in config.items() if value is not None and _KEYS.fullmatch(key))


def stated(model: ModelSpec, *keys: str) -> Any:
    """Return the value of the first of these keys that the model's config.json states; None where it states none."""
    found = dict(model.untimed)
    return next((json.loads(found[key]) for key in keys if key in found), None)


def stated_number(model: ModelSpec, *keys: str) -> float | None:
    """Return the number that the first of these keys states; None where the config.json states none.

    Raises InputError for what is no number.
    """
    value = stated(model, *keys)
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise InputError(f"{model.name}: its config.json states {shown(value)} for {' or '.join(keys)}; it must be a number")
    return value


def squared_relu(model: ModelSpec) -> bool:
    """Whether the activation is a squared ReLU without a gate, which Megatron has a flag for."""
    return not model.gated_mlp and stated(model, *ACTIVATIONS) in ("relu2", "squared_relu")


def left_out(model: ModelSpec, carried: frozenset[str]) -> str:
    """Return what the config.json states beyond ``carried`` and what is usual, as "key value, ..."; "" where it is nothing."""
    usual = {**_USUAL, **({} if model.gated_mlp else dict.fromkeys(ACTIVATIONS, ("gelu", "gelu_new", "gelu_fast")))}
    others = ((key, text) for key, text in model.untimed if key not in carried and json.loads(text) not in usual.get(key, ()))
    return ", ".join(f"{key} {text}" for key, text in others)


def unstated(model: ModelSpec) -> str:
    """Return in words what no time depends on but training does, of which the file of a rotary model says nothing; or ""."""
    known = {key for key, _ in model.untimed}
    if model.position != "rope" or known & {"rope_theta", "rope_parameters", "rope_scaling"}:
        return ""
    missing = ["rotary base"]
    missing += ["epsilon of norms"] if not any("eps" in key for key in known) else []
    missing += ["the router's scaling factor"] if model.num_experts and "routed_scaling_factor" not in known else []
    return " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))


def with_note(name: str, text: str, note: str) -> str:
    """Return the text of a file with a comment at its beginning, where its format has comments."""
    ending = PurePath(name).suffix
    if not note or ending not in (".sh", ".yaml", ".toml", ".py"):
        return text
    first, rest = text.split("\n", 1) if ending == ".sh" else ("", text)
    return "\n".join([*([first] if first else []), f"# {note}", rest])
