"""How the keys of a Hugging Face ``config.json`` are read: a table of names, and what a table cannot say.

Source: the modeling and configuration files of the transformers library, and for baichuan and chatglm those of the published
checkpoints, as remembered: they were not read again line by line. What checks them are the parameter counts in
tests/data/checkpoints.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from profiler.errors import InputError, shown
from solver.spec.layer_types import FULL_ATTENTION, SLIDING_ATTENTION, marked_layers
from solver.spec.model import MAX_LAYERS, REQUIRED

Values = dict[str, Any]
#: Adds or changes what a plain table cannot say: (config, values so far, names of the keys it read).
Special = Callable[[Mapping[str, Any], Values, set[str]], None]

_COMMON = {
    key: key
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture.

    fixed: ModelSpec fields that its code decides. tied: tie_word_embeddings if the config does not state it. keys: config key
    -> ModelSpec field, besides the common ones. class_defaults: of the config class, which nested configs leave out. needed:
    fields that must be stated, besides those of every model. special: see Special.
    """

    fixed: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    class_defaults: Mapping[str, Any] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    special: Special | None = None

    def read(self, config: Mapping[str, Any]) -> tuple[Values, set[str]]:
        """Return (keys of a model file, names of the config's keys that were read). Raises KeyError for a missing one."""
        names = {**_COMMON, **self.keys}
        values: Values = {"tie_word_embeddings": self.tied}
        values |= {field: config[key] for key, field in names.items() if key in config}
        values |= self.fixed
        read = set(names)
        if self.special:
            self.special(config, values, read)
        mlp = ("intermediate_size",) if "moe_intermediate_size" not in values else ()  # an MLP's width has no common default
        for key in (*REQUIRED, *mlp, *self.needed):
            if key not in values:
                raise KeyError(next((own for own, field in names.items() if field == key), key))
        return values, read


def biases(**flags: bool) -> dict[str, bool]:
    return dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), False) | flags


ALL = biases(qkv_bias=True, output_bias=True, mlp_bias=True)
NONE = biases()
LLAMA = {"gated_mlp": True, "norm": "rmsnorm", "position": "rope"}
GPT = {"gated_mlp": False, "norm": "layernorm", "position": "rope"}


def class_of(vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv: int, positions: int = 0) -> dict[str, int]:
    """Return the shapes that a config class has by default, as a nested config may leave them out."""
    shapes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    shapes |= {"num_attention_heads": heads, "num_key_value_heads": kv}
    return shapes | ({"max_position_embeddings": positions} if positions else {})


def layers_of(values: Values) -> range:
    return range(min(values["num_hidden_layers"], MAX_LAYERS))  # more are refused when the model is made


def flag_of(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """Return what a key switches. Raises InputError for what is neither true nor false: a text such as "false" is not off."""
    value = config.get(key, default)
    if value not in (True, False):
        raise InputError(f"{key} is {shown(value)}; it must be true or false")
    return bool(value)


def size_of(config: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    """Return a whole number of at least ``least``. Raises InputError for what is none."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise InputError(f"{key} is {shown(value)}; it must be {kind}")
    return value


def refuse_if_on(config: Mapping[str, Any], read: set[str], *keys: str) -> None:
    """Raise InputError for a key that this program's description of the model has no place for, unless it is off."""
    for key in keys:
        if config.get(key):
            raise InputError(f"{key} is {str(config[key])[:40]}, which is not modelled")
    read.update(keys)


def refuse_unless(
    config: Mapping[str, Any], read: set[str], allowed: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Raise InputError for a stated key with another value than those that this program describes. where: begins its name."""
    for key, values in allowed.items():
        if config.get(key) is not None and config[key] not in values:
            raise InputError(f"{where}{key} is {str(config[key])[:40]}, which is not modelled")
    read.update(allowed if not where else ())


def read_flags(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read attention_bias (q, k, v and output) and mlp_bias, as the Llama classes have them."""
    attention = flag_of(config, "attention_bias")
    values |= {"qkv_bias": attention, "output_bias": attention, "mlp_bias": flag_of(config, "mlp_bias")}
    read |= {"attention_bias", "mlp_bias"}


def layer_types_of(config: Mapping[str, Any], allowed: tuple[str, ...] = (FULL_ATTENTION, SLIDING_ATTENTION)) -> list[str]:
    """Return the config's layer_types, one a layer. Raises InputError for a kind of layer that the family does not have."""
    kinds, layers = config.get("layer_types") or [], config.get("num_hidden_layers")
    other = [kind for kind in kinds if kind not in allowed]
    if other:
        raise InputError(f"layer_types has {other[0]!r}, which is not modelled")
    if kinds and layers is not None and len(kinds) != layers:
        raise InputError(f"layer_types lists {len(kinds)} layers; the model has {layers}")
    return list(kinds)


def read_window(config: Mapping[str, Any], values: Values, read: set[str], every: int = 0) -> None:
    """Read sliding_window and which layers have it: those that layer_types names, else all, or all but every n-th one.

    Some families carry a window that use_sliding_window turns off.
    """
    kinds = layer_types_of(config)
    window = config.get("sliding_window", 0) if flag_of(config, "use_sliding_window", True) else 0
    if SLIDING_ATTENTION in kinds:
        values |= {"sliding_window": window, "layer_types": kinds}
    elif window and not kinds:
        values |= {"sliding_window": window, "sliding_window_every": every}
    read |= {"sliding_window", "use_sliding_window", "layer_types"}


def read_rotary_windows(config: Mapping[str, Any], values: Values, read: set[str], every: int) -> None:
    """Read a window as ``read_window`` does, of a family whose layers that see all tokens have no rotary embedding."""
    read_window(config, values, read, every)
    sliding = ((n + 1) % every for n in layers_of(values))
    kinds = config.get("layer_types") or marked_layers(SLIDING_ATTENTION, sliding)
    values["no_rope_layers"] = [int(kind == SLIDING_ATTENTION) for kind in kinds]


def rotary_layers_of(config: Mapping[str, Any], values: Values) -> list[int]:
    """Return no_rope_layers, 1 for each layer with rotary embedding: those that are stated, else all but every n-th one."""
    every = size_of(config, "no_rope_layer_interval", 4)
    return config.get("no_rope_layers") or [int((n + 1) % every != 0) for n in layers_of(values)]


def with_late_windows(config: Mapping[str, Any], values: Values, first: int) -> Mapping[str, Any]:
    """Return a config with a window that names no layers with those from max_window_layers on, by default from ``first``."""
    if not config.get("sliding_window") or config.get("layer_types"):
        return config
    first = size_of(config, "max_window_layers", first, least=0)
    return {**config, "layer_types": marked_layers(SLIDING_ATTENTION, (n >= first for n in layers_of(values)))}


def read_sparse_layers(config: Mapping[str, Any], values: Values, read: set[str], dense: int) -> None:
    """Read which layers have experts: those that mlp_layer_types calls sparse, else all but the first ``dense`` ones."""
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        values.setdefault("first_k_dense_replace", dense)
    else:
        if not isinstance(kinds, list) or any(kind not in ("dense", "sparse") for kind in kinds):
            raise InputError(f"mlp_layer_types is {shown(kinds)}; it must be a list of dense and sparse, one a layer")
        if len(kinds) != values["num_hidden_layers"]:
            raise InputError(f"mlp_layer_types lists {len(kinds)} layers; the model has {values['num_hidden_layers']}")
        first = kinds.index("sparse") if "sparse" in kinds else len(kinds)
        regular = "dense" not in kinds[first:]
        values["first_k_dense_replace"] = first if regular else 0
        values["moe_layer_freq"] = 1 if regular else [int(kind == "sparse") for kind in kinds]
    read |= {"mlp_layer_types"}


def read_llama(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read the flags of a family without windows, whose layer_types say so."""
    read_flags(config, values, read)
    layer_types_of(config, (FULL_ATTENTION,))
    read |= {"layer_types"}
