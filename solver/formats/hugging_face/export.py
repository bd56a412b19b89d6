"""A model as a Hugging Face config.json: the first of a few architectures that is read back as the same model."""

from __future__ import annotations

import json
from typing import Any

from profiler.errors import InputError
from solver.formats.hugging_face.model import model_of_config
from solver.formats.hugging_face.untimed import stated
from solver.spec.layer_types import LINEAR_SIZES
from solver.spec.model import ModelSpec

#: model_type -> class that transformers makes of it, in the order in which they are tried.
_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


#: Keys without a part in any time that these architectures have too.
CARRIED = frozenset(("rope_theta", "rope_scaling", "rms_norm_eps"))
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def config_json(model: ModelSpec) -> str:
    """Return the text of a config.json. Raises InputError where none of the architectures is the model's."""
    return json.dumps(config_of(model), indent=2) + "\n"


def config_of(model: ModelSpec) -> dict[str, Any]:
    """Return the keys of a config.json. Raises InputError where none of the architectures is the model's."""
    asked = model.replace(padded_vocab_size=0)  # how far tables are padded is the framework's that reads it
    for model_type, name in _TYPES.items():
        config = {"architectures": [name], "model_type": model_type, **_keys(model, model_type)}
        try:
            read = model_of_config(config, model.name, model.name)
        except InputError:
            continue
        if read == asked.replace(untimed=read.untimed):
            return config | {key: stated(model, key) for key, _ in model.untimed if key in CARRIED}
    raise InputError(f"{model.name}: no Hugging Face architecture of {', '.join(_TYPES)} describes it in a config.json")


def _keys(model: ModelSpec, model_type: str) -> dict[str, Any]:
    if model_type == "gpt2":
        found = {
            "n_embd": model.hidden_size,
            "n_layer": model.num_hidden_layers,
            "n_head": model.num_attention_heads,
            "n_inner": model.intermediate_size,
            "n_positions": model.max_position_embeddings or None,
        }
    else:
        found = {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_hidden_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.max_position_embeddings or None,
            "attention_bias": model.output_bias or None,
            "mlp_bias": model.mlp_bias or None,
            "sliding_window": model.sliding_window or None,
            "num_local_experts": model.num_experts or None,
            "num_experts_per_tok": model.num_experts_per_tok or None,
        }
    if model_type == "gpt_oss":
        found.pop("mlp_bias")  # which it always has
    if model.has_linear_attention:
        found.pop("num_local_experts", None)
        experts = _EXPERTS if model.is_mixture_of_experts else ()
        found |= {key: getattr(model, key) for key in (*LINEAR_SIZES, *experts)} | {"layer_types": list(model.layer_types)}
        found["mtp_num_hidden_layers"] = model.num_nextn_predict_layers or None
    found |= {"vocab_size": model.vocab_size, "tie_word_embeddings": model.tie_word_embeddings}
    return {key: value for key, value in found.items() if value is not None}
