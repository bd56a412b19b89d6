"""What is trained: the dimensions of a decoder-only transformer, in the words of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from profiler.errors import InputError, printable, shown

MAX_DIM = 1 << 24  #: larger dims are mistakes, and products of them would leave 64 bits
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned", "alibi", "none")
QK_NORMS = ("none", "head", "all")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model. Zero means "has none" for experts and latent attention dims."""

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
    qkv_bias: bool = False
    output_bias: bool = False  #: of attention's output projection
    mlp_bias: bool = False
    head_bias: bool = False
    norm: str = "rmsnorm"  #: one of NORMS
    norm_weight: bool = True  #: False: the norms have no parameters
    norm_bias: bool = True  #: of LayerNorms
    norms_per_layer: int = 2  #: 1: attention and MLP share one; 4: their outputs are normed too
    qk_norm: str = "none"  #: norm of q and k, with weights per head_dim ("head") or for all heads ("all")
    embedding_norm: bool = False
    position: str = "rope"  #: one of POSITIONS
    max_position_embeddings: int = 0  #: longest sequence; 0: not stated
    position_rows: int = 0  #: rows of a learned position table; 0: max_position_embeddings, or the sequence length
    sliding_window: int = 0  #: tokens that attention sees; 0: all
    sliding_window_every: int = 0  #: every n-th layer sees all tokens in spite of the window; 0: none
    unmodelled: tuple[str, ...] = ()  #: what the model does beyond this description and costs time, in words
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
        where = f"model {self.name}"
        for name in (*REQUIRED, "intermediate_size", "num_key_value_heads", "head_dim"):
            if not 1 <= getattr(self, name) <= MAX_DIM:
                raise InputError(f"{where}: {name} is {getattr(self, name)}; it must be positive and at most {MAX_DIM}")
        for name in ("padded_vocab_size", "max_position_embeddings", "position_rows", "sliding_window", "sliding_window_every"):
            if not 0 <= getattr(self, name) <= 1 << 30:
                raise InputError(f"{where}: {name} is {getattr(self, name)}; it must be between 0 and {1 << 30}")
        for name, allowed in (("norm", NORMS), ("position", POSITIONS), ("qk_norm", QK_NORMS), ("norms_per_layer", (1, 2, 4))):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"{where}: {name} is {getattr(self, name)!r}; it must be one of {', '.join(map(str, allowed))}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"{where}: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

    @property
    def is_mixture_of_experts(self) -> bool:
        return self.num_experts > 0

    @property
    def has_latent_attention(self) -> bool:
        return self.kv_lora_rank > 0 or self.q_lora_rank > 0

    @property
    def layer_linear_parameters(self) -> int:
        """Weights of the linears of one dense layer."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        return attention + h * self.intermediate_size * (3 if self.gated_mlp else 2)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.norm_weight * self.hidden_size * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def qk_norm_parameters(self) -> int:
        """Parameters of one layer's norms of q and k."""
        heads = {"none": 0, "head": 2, "all": self.num_attention_heads + self.num_key_value_heads}[self.qk_norm]
        return heads * self.head_dim

    @property
    def parameters(self) -> int:
        """All parameters of a dense model (norms and biases included, vocabulary not padded)."""
        h, d = self.hidden_size, self.head_dim
        bias = self.qkv_bias * (self.num_attention_heads + 2 * self.num_key_value_heads) * d + self.output_bias * h
        bias += self.mlp_bias * ((2 if self.gated_mlp else 1) * self.intermediate_size + h)
        layer = self.layer_linear_parameters + bias + self.norms_per_layer * self.norm_parameters + self.qk_norm_parameters
        tables = self.vocab_size * h * (1 if self.tie_word_embeddings else 2) + self.head_bias * self.vocab_size
        tables += self.learned_positions(0) * h
        return self.num_hidden_layers * layer + tables + (1 + self.embedding_norm) * self.norm_parameters

    def learned_positions(self, seq_len: int) -> int:
        """Rows of the learned position table, that of a sequence of ``seq_len`` tokens if the model states none."""
        return (self.position_rows or self.max_position_embeddings or seq_len) if self.position == "learned" else 0

    def flops_per_token(self, seq_len: int, whole_square: bool = False) -> float:
        """Return the model FLOPs per token, forward and backward, with causal attention (half of the square, or all of it).

        6 * linears + 6 * layers * heads * head_dim * seq_len, as PaLM's appendix B with the causal half. Recomputation and the
        embedding lookup are not model FLOPs, the head is.
        """
        linears = self.num_hidden_layers * self.layer_linear_parameters + self.vocab_size * self.hidden_size
        scores = self.num_hidden_layers * self.num_attention_heads * self.head_dim * seq_len
        return 6.0 * linears + (12.0 if whole_square else 6.0) * scores

    def replace(self, **changes: Any) -> ModelSpec:
        return replace(self, **changes)


def check_model(model: ModelSpec, seq_len: int, approximate: bool = False) -> None:
    """Raise InputError if a run of ``seq_len`` tokens does what is not modelled; approximate: allow what is merely left out."""
    if model.is_mixture_of_experts:
        raise InputError(f"{model.name} is a mixture of {model.num_experts} experts, which is not modelled yet")
    if model.has_latent_attention:
        key = "kv_lora_rank" if model.kv_lora_rank else "q_lora_rank"
        raise InputError(f"{model.name} has latent attention ({key} {getattr(model, key)}), which is not modelled yet")
    if 0 < model.max_position_embeddings < seq_len:
        raise InputError(
            f"seq_len {seq_len} is more than max_position_embeddings {model.max_position_embeddings} of {model.name}; "
            "shorten the sequence, or change the model's max_position_embeddings if it is trained for longer ones"
        )
    left_out = approximations(model, seq_len)
    if left_out and not approximate:
        raise InputError(f"{model.name} has {'; '.join(left_out)}: not modelled; --approximate estimates it without")


def approximations(model: ModelSpec, seq_len: int) -> list[str]:
    """Return what an estimate of ``model`` leaves out at this sequence length, in words."""
    layers = f" in all but every {model.sliding_window_every}th layer" if model.sliding_window_every else ""
    windows = [f"a sliding window of {model.sliding_window} tokens{layers}"] if 0 < model.sliding_window < seq_len else []
    return [*windows, *model.unmodelled]


_LIKE = 0.85  #: "hiden_size" is like "hidden_size", "rms_norm_eps" like nothing known
KNOWN_KEYS = {f.name for f in fields(ModelSpec)} - {"unmodelled"} | {"hidden_act", "n_shared_experts", "bias", "attention_bias"}
OTHER_NAMES = {"n_routed_experts": "num_experts", "num_local_experts": "num_experts"}


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
        "n_shared_experts": "int", "bias": "bool", "attention_bias": "bool", "hidden_act": "str",
    }  # fmt: skip
    words = {"int": "a whole number", "bool": "true or false", "str": "a text"}
    if isinstance(given.get("qk_norm"), bool):  # as cases state it
        given["qk_norm"] = "head" if given["qk_norm"] else "none"
    for key, value in given.items():
        if type(value).__name__ != kinds[key]:  # a bool is an int in Python, but "hidden_size": true is a mistake
            raise InputError(f"{where}: model key {key} is {shown(value)}; it must be {words[kinds[key]]}")
    called = printable(name or str(given.get("name") or where))
    try:
        return ModelSpec(**{**_with_defaults(dict(given), where), "name": called})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _with_defaults(values: dict[str, Any], where: str) -> dict[str, Any]:
    hidden, heads = values["hidden_size"], max(values["num_attention_heads"], 1)
    values.setdefault("gated_mlp", "gelu_new" not in values.pop("hidden_act", ""))
    shared = values.pop("n_shared_experts", 0)
    if values.pop("bias", False):
        values = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, **values}
    if values.pop("attention_bias", False):
        values = {"qkv_bias": True, "output_bias": True, **values}
    if not values.get("intermediate_size"):
        values["intermediate_size"] = values.get("moe_intermediate_size") or 4 * hidden
    values.setdefault("num_key_value_heads", heads)
    if not values.get("head_dim") and not values.get("v_head_dim") and hidden % heads:
        raise InputError(f"{where}: num_attention_heads {heads} does not divide hidden_size {hidden}; state head_dim")
    values["head_dim"] = values.get("head_dim") or values.get("v_head_dim") or hidden // heads
    values.setdefault("norm", "rmsnorm" if values["gated_mlp"] else "layernorm")
    values.setdefault("position", "rope" if values["gated_mlp"] else "learned")
    if shared and not values.get("shared_expert_intermediate_size"):
        values["shared_expert_intermediate_size"] = shared * values.get("moe_intermediate_size", 0)
    return values
