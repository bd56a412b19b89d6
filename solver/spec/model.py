"""The model: dimensions of a decoder-only transformer, with the key names of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from profiler.errors import InputError

MAX_DIM = 1 << 24  #: larger dims are mistakes, and their products would overflow 64 bits
_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_OTHER_NAMES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                "n_inner": "intermediate_size", "n_routed_experts": "num_experts", "num_local_experts": "num_experts",
                "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}  # fmt: skip
#: Hugging Face model types whose MLP has no gate and whose norms are LayerNorms with learned positions.
_GPT_LIKE = {"gpt2", "gpt_bigcode", "opt", "mpt", "gpt_neox", "bloom", "falcon"}
_HUGGING_FACE_MARKS = {"model_type", "architectures", "transformers_version"}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model. Zero means that the model has none, for experts and latent attention dims."""

    name: str = "model"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    padded_vocab_size: int = 0  #: 0: vocab_size is padded to a multiple of 128 * tp, as Megatron does
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    bias: bool = False
    norm: str = "rmsnorm"  #: rmsnorm or layernorm
    position: str = "rope"  #: rope or learned
    max_position_embeddings: int = 0  #: rows of a learned position table; 0: the sequence length
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        for name in (*_REQUIRED, "intermediate_size", "num_key_value_heads", "head_dim"):
            if not 1 <= getattr(self, name) <= MAX_DIM:
                raise InputError(
                    f"model {self.name}: {name} is {getattr(self, name)}; it must be positive and at most {MAX_DIM}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"model {self.name}: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def is_mixture_of_experts(self) -> bool:
        return self.num_experts > 0

    @property
    def has_latent_attention(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def layer_linear_parameters(self) -> int:
        """Weights of the linears of one dense layer."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        return attention + h * self.intermediate_size * (3 if self.gated_mlp else 2)

    @property
    def parameters(self) -> int:
        """All parameters of a dense model (norms and biases included, vocabulary not padded)."""
        h, norm = self.hidden_size, (2 if self.norm == "layernorm" else 1) * self.hidden_size
        bias = h + (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim if self.bias else 0
        bias += (2 if self.gated_mlp else 1) * self.intermediate_size + h if self.bias else 0
        tables = self.vocab_size * h * (1 if self.tie_word_embeddings else 2)
        tables += self.max_position_embeddings * h if self.position == "learned" else 0
        return self.num_hidden_layers * (self.layer_linear_parameters + 2 * norm + bias) + tables + norm

    def flops_per_token(self, seq_len: int) -> float:
        """Return the model FLOPs per token, forward and backward, with causal attention counted once (half of the square).

        6 * linears + 6 * layers * heads * head_dim * seq_len, as in appendix B of PaLM with the causal half. Recomputation and
        the embedding lookup count as no model FLOPs; the head counts.
        """
        linears = self.num_hidden_layers * self.layer_linear_parameters + self.vocab_size * self.hidden_size
        scores = self.num_hidden_layers * self.num_attention_heads * self.head_dim * seq_len
        return 6.0 * linears + 6.0 * scores

    def replace(self, **changes: Any) -> ModelSpec:
        return replace(self, **changes)


_LIKE = 0.85  #: similarity of a misspelt key: "hiden_size" resembles "hidden_size", "rms_norm_eps" resembles no known key
_KNOWN = {f.name for f in fields(ModelSpec)} | {"hidden_act", "n_shared_experts"}


def unknown_model_keys(config: Mapping[str, Any], but_misspelt: bool = False) -> list[str]:
    """Return the keys of ``config`` that a ModelSpec does not use, in order; a null counts as absent.

    but_misspelt: leave out keys that look like a known key, because they are probably misspelt.
    """
    known = _KNOWN | _HUGGING_FACE_MARKS
    unknown = (key for key, value in config.items() if value is not None and _OTHER_NAMES.get(key, key) not in known)
    return sorted(key for key in unknown if not (but_misspelt and get_close_matches(key, _KNOWN, 1, _LIKE)))


def model_from_config(config: Mapping[str, Any], where: str, name: str = "") -> ModelSpec:
    """Return a ModelSpec from a mapping with Hugging Face keys; ``where`` names it in error messages.

    A real ``config.json`` (it has model_type, architectures or transformers_version) may hold any further keys. In a plain
    mapping an unknown key is an error, because it is most likely misspelt.
    """
    given = {_OTHER_NAMES.get(key, key): value for key, value in config.items() if value is not None}
    unknown = unknown_model_keys(config)
    if unknown and not _HUGGING_FACE_MARKS & set(config):
        raise InputError(f"{where}: unknown model key {unknown[0]!r}; known keys are {', '.join(sorted(_KNOWN))}")
    missing = [key for key in _REQUIRED if key not in given]
    if missing:
        raise InputError(f"{where}: the model needs {missing[0]}")
    values = {key: value for key, value in given.items() if key in _KNOWN}
    gpt = str(config.get("model_type", "")) in _GPT_LIKE
    for key in _REQUIRED + ("intermediate_size", "num_key_value_heads", "head_dim"):
        if key in values and (isinstance(values[key], bool) or not isinstance(values[key], int)):
            raise InputError(f"{where}: model key {key} is {values[key]!r}; it must be a whole number")
    for key in _REQUIRED:
        if values[key] < 1:
            raise InputError(f"{where}: model key {key} is {values[key]}; it must be positive")
    called = name or str(config.get("name") or config.get("_name_or_path") or where)
    try:
        return ModelSpec(**_with_defaults(values, gpt, called))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _with_defaults(values: dict[str, Any], gpt: bool, name: str) -> dict[str, Any]:
    """Fill in what Hugging Face omits: a key and value head per query head, an MLP of 4 * hidden_size, gate by activation."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    act = str(values.pop("hidden_act", "" if not gpt else "gelu"))
    shared = values.pop("n_shared_experts", 0)
    values.setdefault("gated_mlp", not gpt and "gelu_new" not in act)
    if not values.get("intermediate_size"):
        values["intermediate_size"] = values.get("moe_intermediate_size") or 4 * hidden
    values.setdefault("num_key_value_heads", heads)
    values.setdefault("head_dim", values.get("v_head_dim") or hidden // heads)
    values.setdefault("norm", "rmsnorm" if values["gated_mlp"] else "layernorm")
    values.setdefault("position", "rope" if values["gated_mlp"] else "learned")
    values.setdefault("bias", gpt)
    if shared and not values.get("shared_expert_intermediate_size"):
        values["shared_expert_intermediate_size"] = shared * values.get("moe_intermediate_size", 0)
    values["name"] = name
    return values
