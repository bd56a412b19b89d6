"""SimuMax's model file as a ModelSpec: a decoder with RMSNorm and rotary positions, embedding and head of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError
from solver.formats.simumax.configs import ModelConfig
from solver.spec.model import ModelSpec
from solver.spec.model_from_keys import model_from_keys

_NAMES = {
    "hidden_size": "hidden_size",
    "layer_num": "num_hidden_layers",
    "head_num": "num_attention_heads",
    "kv_head_num": "num_key_value_heads",
    "head_size": "head_dim",
    "intermediate_size": "intermediate_size",
    "use_swiglu": "gated_mlp",
}
_OF_EXPERTS = {
    "expert_num": "num_experts",
    "topk": "num_experts_per_tok",
    "dense_layers": "first_k_dense_replace",
    "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
}
_LATENT = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_NEEDED = ("hidden_size", "head_num", "layer_num", "vocab_size", "intermediate_size")


_MARKS = ("head_num", "layer_num")


def is_model(plain: Mapping[str, Any]) -> bool:
    return all(mark in plain for mark in _MARKS)


def read_model(plain: Mapping[str, Any], where: str, name: str) -> ModelSpec:
    """Return the model of a file. Raises InputError naming ``where`` for what it cannot be."""
    try:
        return model_of(ModelConfig(**{"model_name": name, **plain}))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def model_of(config: ModelConfig, tp: int = 1) -> ModelSpec:
    """Return the model. tp: size of the tensor group, to a multiple of which the vocabulary is padded.

    Raises InputError for a field that is missing, and for sizes that contradict each other.
    """
    missing = [name for name in _NEEDED if getattr(config, name) is None]
    if missing:
        raise InputError(f"model field {missing[0]} is missing; a model states {', '.join(_NEEDED)}")
    vocabulary = config.orig_vocab_size or config.vocab_size
    keys: dict[str, Any] = {ours: getattr(config, theirs) for theirs, ours in _NAMES.items()}
    keys |= {"vocab_size": vocabulary, "padded_vocab_size": _padded(config, vocabulary, tp)}
    keys |= {"norm": "rmsnorm", "position": "rope"}
    if config.attention_type == "mla":
        keys |= {ours: getattr(config, theirs) for theirs, ours in _LATENT.items()}
        if not config.kv_lora_rank:
            raise InputError("model field attention_type is 'mla', which needs kv_lora_rank")
    if config.has_experts:
        keys |= {ours: getattr(config, theirs) for theirs, ours in _OF_EXPERTS.items()}
        keys["moe_intermediate_size"] = config.moe_ffn_hidden_size or config.intermediate_size
    return model_from_keys(keys, f"model {config.model_name}", config.model_name)


def _padded(config: ModelConfig, vocabulary: int, tp: int) -> int:
    """Return the rows of the vocabulary; 0: a multiple of 128 * tp, as ModelSpec pads it."""
    if config.padded_vocab_size and config.make_vocab_size_divisible_by == 128:
        return 0
    multiple = config.make_vocab_size_divisible_by * tp if config.padded_vocab_size else 1
    return int(-(-vocabulary // multiple) * multiple)
