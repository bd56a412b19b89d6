"""The model of a case: its keys, those of other tools, and what its name, shape and framework say beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError
from solver.formats.cases.published_recipes import with_facts
from solver.formats.cases.synonyms import named_as_ours
from solver.formats.hugging_face.model import MARKS, model_of_config, unread_keys
from solver.formats.model_file import ASSUMED_VOCAB
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.model_from_keys import model_from_keys, unknown_keys
from solver.spec.multi_token import as_trained

_OTHER_LAYERS = r"mamba|ssm|hybrid|encoder|linear_att|rwkv|recurrent"  #: keys of a model of other layers
#: Names of models of which most layers are no attention.
_HYBRIDS = (
    r"nemotron[-_ ]?h(?![a-z])|nemotron[-_ ]?3(?!\d)|qwen3[-_ ]?next|mamba|jamba|zamba"
    r"|kimi[-_ ]?linear|minimax[-_ ]?(01|m1|text)"
)
_UNGATED = ("gelu", "gelu_new", "relu", "relu2", "squared_relu")  #: activations of MLPs without a gate


def model_of_case(config: dict[str, Any], framework: Framework, assumptions: list[str]) -> ModelSpec:
    """Return a case's model; what it leaves open is added to ``assumptions``.

    Raises InputError for what is no transformer decoder, and for a hybrid model whose keys do not say which layers it has.
    """
    if not config.get("vocab_size"):
        config = {**config, "vocab_size": framework.example_vocab or ASSUMED_VOCAB}
        assumptions.append(f"vocab_size: {config['vocab_size']}")
    if "hybrid_override_pattern" in config:
        config = {"model_type": "nemotron_h", **config}
    foreign = bool(MARKS & set(config))
    config = config if foreign else named_as_ours(config)
    unread = unread_keys(config) if foreign else unknown_keys(config, but_misspelt=True)
    other = [key for key in unread if re.search(_OTHER_LAYERS, key)]
    if other:
        raise InputError(f"model key {other[0]}: its layers are no transformer decoder's, which alone are described")
    assumptions += [f"not read: model.{key}={config[key]}" for key in unread]
    if not foreign and "gated_mlp" not in config and config.get("hidden_act") in _UNGATED:
        config = {**config, "gated_mlp": False}
    if _all_experts_stated(config):
        config = {**config, "moe_intermediate_size": config["intermediate_size"]}
        assumptions.append("moe_intermediate_size: intermediate_size (no layer is dense)")
    read = model_of_config if foreign else model_from_keys
    found = read({key: value for key, value in config.items() if key not in unread}, "model")
    if not (foreign or found.gated_mlp or found.is_mixture_of_experts):
        found = _as_by_default(found, config, framework, assumptions)
    found = with_facts(found, config, framework.family, assumptions)
    if (trained := as_trained(found, framework)) != found:
        found = trained
        assumptions.append(f"num_nextn_predict_layers: 0 ({framework.name} has no multi-token prediction)")
    if re.search(_HYBRIDS, found.name.lower()) and not (found.linear_num_value_heads or found.mamba_num_heads):
        raise InputError(
            f"model {found.name}: its keys do not say which layers are no attention (layer_types, linear_*, mamba_*)"
        )
    return found


def _as_by_default(model: ModelSpec, config: Mapping[str, Any], framework: Framework, assumptions: list[str]) -> ModelSpec:
    """Return a model without gates as its framework builds it where its keys say nothing."""
    if framework.linear_bias and not any("bias" in key for key in config):
        model = model.replace(qkv_bias=True, output_bias=True, mlp_bias=True)
        assumptions.append("bias: of all linears")
    if framework.tied_embeddings and "tie_word_embeddings" not in config:
        model = model.replace(tie_word_embeddings=True)
        assumptions.append("tie_word_embeddings: true")
    return model


def _all_experts_stated(config: Mapping[str, Any]) -> bool:
    """Whether the one size of an MLP that a mixture of experts states is that of its experts, as in Mixtral's config.json."""
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    dense = {"first_k_dense_replace", "moe_layer_freq", "moe_intermediate_size"} & config.keys()
    return isinstance(experts, int) and experts > 1 and not dense and "intermediate_size" in config and not MARKS & set(config)


def long_enough(model: ModelSpec, seq_len: int, assumptions: list[str]) -> ModelSpec:
    """Return a model that was trained on longer sequences than its file states: rotary positions have no end."""
    if model.position != "rope" or not 0 < model.max_position_embeddings < seq_len:
        return model
    assumptions.append(f"max_position_embeddings: {seq_len}, as long as the sequences (the model states fewer)")
    return model.replace(max_position_embeddings=seq_len)
