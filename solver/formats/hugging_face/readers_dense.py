"""Further dense decoders that transformers 5.24 builds, most of them of 2025 and 2026: what their config.json files say.

Source: the configuration and modeling files of transformers 5.24, as read; parameter counts in the tests are those of the
models that it builds without weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.hugging_face import readers_recent
from solver.formats.hugging_face.readers import (
    ALL,
    GPT,
    LLAMA,
    NONE,
    Family,
    Values,
    biases,
    class_of,
    flag_of,
    layers_of,
    read_flags,
    read_llama,
    read_window,
    refuse_if_on,
    refuse_unless,
)
from solver.formats.hugging_face.readers_experts import LATENT, same
from solver.formats.hugging_face.readers_llama import read_gemma2
from solver.spec.layer_types import SLIDING_ATTENTION, marked_layers


def read_exaone(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read EXAONE 3, whose own config.json has num_layers where transformers 5 writes num_hidden_layers."""
    read_llama(config, values, read)
    read |= {"layer_norm_epsilon", "activation_function"}


def read_helium(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Helium, whose output projection is square and never has a bias."""
    values |= biases(qkv_bias=flag_of(config, "attention_bias"), mlp_bias=flag_of(config, "mlp_bias"))
    values.setdefault("head_dim", 128)
    if values["head_dim"] * values["num_attention_heads"] != values["hidden_size"]:
        raise InputError(
            f"head_dim {values['head_dim']} times num_attention_heads differs from hidden_size, which is not modelled"
        )
    read |= {"attention_bias", "mlp_bias"}


def read_hyperclovax(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read HyperCLOVA X: Granite, whose blocks' outputs are normed too unless use_post_norm is off."""
    read_llama(config, values, read)
    values["norms_per_layer"] = 4 if flag_of(config, "use_post_norm", True) else 2
    read |= {"use_post_norm"}


def read_internlm3(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read InternLM3, whose qkv_bias and bias transformers takes for attention_bias and mlp_bias; it wants both or none."""
    attention = flag_of(config, "attention_bias", flag_of(config, "qkv_bias"))
    if attention != flag_of(config, "mlp_bias", flag_of(config, "bias")):
        raise InputError("qkv_bias differs from bias, which is not modelled: transformers' InternLM3 has both or none")
    values |= dict.fromkeys(ALL, attention)
    values.setdefault("head_dim", 128)
    read |= {"attention_bias", "mlp_bias", "qkv_bias", "bias"}


def read_iquestcoder(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read a Llama with heads of 128; what its own code had beside, transformers refuses as well."""
    read_llama(config, values, read)
    values.setdefault("head_dim", 128)
    refuse_if_on(config, read, "use_sliding_window", "clip_qkv")
    read |= {"sliding_window", "max_window_layers"}


def read_jais2(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    read_flags({"attention_bias": True, "mlp_bias": True, **config}, values, read)


def read_persimmon(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read Persimmon, whose norms of q and k are LayerNorms with biases; it has as many keys and values as queries."""
    values["qk_norm"] = "head" if flag_of(config, "qk_layernorm", True) else "none"
    values["qk_norm_bias"] = values["qk_norm"] == "head"
    values["num_key_value_heads"] = values["num_attention_heads"]
    read |= {"qk_layernorm"}


def read_biogpt(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read BioGPT, whose table of positions has two rows more, as OPT's."""
    values["position_rows"] = values["max_position_embeddings"] + 2
    refuse_if_on(config, read, "layerdrop")
    read |= {"scale_embedding"}


def read_youtu(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read latent attention beside a dense MLP."""
    values["num_key_value_heads"] = values["num_attention_heads"]
    refuse_if_on(config, read, "attention_bias", "mlp_bias")
    read |= {"qk_head_dim"}


def read_granite_windows(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read which layers of a Granite have a window of 128: all but the first of four, or as its layer_types say.

    layer_rope_theta has a base of rotary embedding for each layer; where it is 0, the layer has none.
    """
    read_flags(config, values, read)
    kinds = config.get("layer_types") or marked_layers(SLIDING_ATTENTION, (n % 4 for n in layers_of(values)))
    read_window({"sliding_window": 128, **config, "layer_types": kinds}, values, read)
    bases = config.get("layer_rope_theta")
    if bases is not None:
        if not isinstance(bases, list) or len(bases) != values["num_hidden_layers"]:
            raise InputError(f"layer_rope_theta is {shown(bases)}; it must be a list of a number for each layer")
        values["no_rope_layers"] = [] if all(bases) else [int(base != 0) for base in bases]
    read |= {"layer_rope_theta"}


def read_glm_vision(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read the text model of GLM-4.1V, whose queries, keys and values have biases whatever its config.json says."""
    refuse_unless(config, read, {"attention_bias": (True,)})


def read_apertus_text(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read the text model of Apertus 1.5: Apertus, whose head may leave out what it never predicts."""
    readers_recent.read_apertus(config, values, read)
    refuse_unless(config, read, {"output_vocab_size": (values["vocab_size"],)})


FAMILIES: Mapping[str, Family] = {
    "apertus1p5_text": dataclasses.replace(
        readers_recent.FAMILIES["apertus"],
        special=read_apertus_text,
        class_defaults=class_of(266752, 4096, 14336, 32, 32, 32, 65536),
    ),
    "biogpt": Family(fixed={**GPT, **ALL, "position": "learned"}, tied=True, special=read_biogpt),
    "exaone": Family(fixed=LLAMA, special=read_exaone, keys={"num_layers": "num_hidden_layers"}),
    "glm4v_text": Family(
        fixed={**LLAMA, **biases(qkv_bias=True), "norms_per_layer": 4},
        special=read_glm_vision,
        class_defaults=class_of(151552, 4096, 13696, 40, 32, 2, 32768),
    ),
    "granite_swa": Family(fixed={**LLAMA, "attention_sinks": True}, tied=True, special=read_granite_windows),
    "helium": Family(fixed=LLAMA, special=read_helium),
    "hyperclovax": Family(fixed=LLAMA, special=read_hyperclovax),
    "internlm3": Family(fixed=LLAMA, special=read_internlm3),
    "iquestcoder": Family(fixed=LLAMA, special=read_iquestcoder),
    "jais2": Family(fixed=GPT, special=read_jais2),
    "persimmon": Family(fixed={**GPT, **ALL}, special=read_persimmon),
    "vaultgemma": Family(fixed={**LLAMA, **NONE}, tied=True, special=read_gemma2),
    "youtu": Family(
        fixed={**LLAMA, **NONE},
        tied=True,
        keys=same(*LATENT),
        needed=("kv_lora_rank",),
        special=read_youtu,
    ),
}
