"""What is trained: the dimensions of a decoder-only transformer, in the words of a Hugging Face ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from profiler.errors import InputError
from solver.spec.layer_types import LINEAR_ATTENTION, LINEAR_SIZES, MAMBA, MAMBA_SIZES
from solver.spec.model_rules import check_kinds

MAX_DIM = 1 << 24  #: larger dims are mistakes, and products of them would leave 64 bits
MAX_LAYERS = 4096  #: the deepest published models have 1,000
REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
NORMS = ("rmsnorm", "layernorm")
POSITIONS = ("rope", "learned", "alibi", "none")
QK_NORMS = ("none", "head", "all")
ROUTER_SCORES = ("softmax", "sigmoid")


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
    padded_vocab_size: int = 0  #: 0: vocab_size is padded to a multiple of VOCAB_MULTIPLE * tp
    tie_word_embeddings: bool = False
    gated_mlp: bool = True
    qkv_bias: bool = False
    output_bias: bool = False  #: of attention's output projection
    mlp_bias: bool = False
    clamped_gate: bool = False  #: gate and up projection are clamped before the activation
    head_bias: bool = False
    norm: str = "rmsnorm"  #: one of NORMS
    norm_weight: bool = True  #: False: the norms have no parameters
    norm_bias: bool = True  #: of LayerNorms
    norms_per_layer: int = 2  #: 1: attention and MLP share one; 4: their outputs are normed too
    qk_norm: str = "none"  #: norm of q and k, with weights per head_dim ("head") or for all heads ("all")
    qk_norm_bias: bool = False  #: of these norms
    embedding_norm: bool = False
    position: str = "rope"  #: one of POSITIONS
    scaled_rope: bool = False  #: sine and cosine carry a factor of their own (YaRN's attention factor)
    max_position_embeddings: int = 0  #: longest sequence; 0: not stated
    position_rows: int = 0  #: rows of a learned position table; 0: max_position_embeddings, or the sequence length
    sliding_window: int = 0  #: tokens that attention sees; 0: all
    sliding_window_every: int = 0  #: every n-th layer sees all tokens in spite of the window; 0: none
    capped_scores: bool = False  #: attention scores are soft-capped (solver.spec.soft_caps)
    capped_logits: bool = False
    unmodelled: tuple[str, ...] = ()  #: what is left out of the model on demand and costs time, in words
    #: (key, value as JSON) of its config.json that no time depends on, for the files that train it
    untimed: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    attention_chunk_size: int = 0  #: attention sees nothing outside blocks of this many tokens; 0: no blocks
    layer_types: tuple[str, ...] = ()  #: LAYER_TYPES of every layer; empty: sliding_window_every decides
    one_block_layers: bool = False  #: each layer is one block with a norm, as layer_types says: LAYER_TYPES or MLP_TYPES
    no_rope_layers: tuple[int, ...] = ()  #: 1 for every layer with rotary embedding, 0 for those without; empty: all have it
    attention_sinks: bool = False  #: a learned logit per head takes part in the softmax
    attention_gate: bool = False  #: the sigmoid of a further projection, as wide as the queries, scales attention's output
    linear_num_key_heads: int = 0  #: of layers with linear attention, a gated delta rule (solver.layers.linear_attention)
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 0  #: tokens that the convolution before it sees
    mamba_num_heads: int = 0  #: of layers with Mamba-2 (solver.layers.state_space)
    mamba_head_dim: int = 0
    mamba_state_dim: int = 0
    mamba_num_groups: int = 0  #: of heads that share keys and queries (B and C)
    mamba_conv_kernel_dim: int = 0  #: tokens that the convolution before it sees
    mamba_chunk_size: int = 0  #: tokens of a chunk of its kernels
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0  #: of all shared experts together
    shared_expert_gate: bool = False  #: a learned gate scales the shared expert
    first_k_dense_replace: int = 0  #: the first layers have no experts
    moe_layer_freq: int | tuple[int, ...] = 1  #: every n-th layer after them has experts, or a 1 for each layer that has
    router_score: str = "softmax"  #: one of ROUTER_SCORES
    router_bias: bool = False  #: a bias per expert, learned or adjusted to balance the load
    router_groups: int = 0  #: groups of experts, neighbours, of which a token may use only some; 0: no groups
    router_topk_groups: int = 0  #: groups that a token may use; 0: all
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    num_nextn_predict_layers: int = 0  #: multi-token prediction modules, each with a layer of its own

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        for name in (*REQUIRED, "intermediate_size", "num_key_value_heads", "head_dim"):
            if not 1 <= getattr(self, name) <= MAX_DIM:
                raise InputError(f"{where}: {name} is {getattr(self, name)}; it must be positive and at most {MAX_DIM}")
        if self.num_hidden_layers > MAX_LAYERS:
            raise InputError(f"{where}: num_hidden_layers is {self.num_hidden_layers}; it must be at most {MAX_LAYERS}")
        for name in _SIZES:
            if not 0 <= getattr(self, name) <= 1 << 30:
                raise InputError(f"{where}: {name} is {getattr(self, name)}; it must be between 0 and {1 << 30}")
        for name, allowed in (
            ("norm", NORMS),
            ("position", POSITIONS),
            ("qk_norm", QK_NORMS),
            ("norms_per_layer", (1, 2, 4)),
            ("router_score", ROUTER_SCORES),
        ):
            if getattr(self, name) not in allowed:
                raise InputError(
                    f"{where}: {name} is {getattr(self, name)!r}; it must be one of {', '.join(map(str, allowed))}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"{where}: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )

        check_kinds(self, where)

    @property
    def is_mixture_of_experts(self) -> bool:
        return self.num_experts > 0

    @property
    def has_latent_attention(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def has_linear_attention(self) -> bool:
        return LINEAR_ATTENTION in self.layer_types

    @property
    def has_state_space(self) -> bool:
        return MAMBA in self.layer_types

    @property
    def is_hybrid(self) -> bool:
        """Whether it has layers that are no pair of softmax or linear attention and MLP."""
        return self.has_state_space or self.one_block_layers

    @property
    def mamba_width(self) -> int:
        """Width of all values of one token in a layer with Mamba-2."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def mamba_convolved(self) -> int:
        """Values, keys and queries (x, B and C) of one token, which its convolution runs over."""
        return self.mamba_width + 2 * self.mamba_num_groups * self.mamba_state_dim

    @property
    def linear_key_width(self) -> int:
        """Width of all keys of one token in a layer with linear attention; its queries are as wide."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_width(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.has_latent_attention else self.head_dim

    @property
    def value_head_dim(self) -> int:
        return self.v_head_dim if self.has_latent_attention else self.head_dim

    @property
    def up_matrices(self) -> int:
        """Projections of the input of an MLP, or of an expert: up, and the gate's where it has one."""
        return 2 if self.gated_mlp else 1

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size."""
        return self.norm_weight * self.hidden_size * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def qk_norm_parameters(self) -> int:
        """Parameters of one layer's norms of q and k."""
        heads = {"none": 0, "head": 2, "all": self.num_attention_heads + self.num_key_value_heads}[self.qk_norm]
        return heads * self.head_dim * (2 if self.qk_norm_bias else 1)

    def padded_vocab(self, tp: Any) -> Any:
        """Rows of the vocabulary's tables with ``tp`` tensor-parallel ranks (an int or an array), all of them together."""
        multiple = VOCAB_MULTIPLE * tp
        return self.padded_vocab_size or -(-self.vocab_size // multiple) * multiple

    def learned_positions(self, seq_len: int) -> int:
        """Rows of the learned position table, that of a sequence of ``seq_len`` tokens if the model states none."""
        return (self.position_rows or self.max_position_embeddings or seq_len) if self.position == "learned" else 0

    def replace(self, **changes: Any) -> ModelSpec:
        return replace(self, **changes)


#: Megatron pads the vocabulary to a multiple of this and of tp (--make-vocab-size-divisible-by), unless it is told otherwise.
VOCAB_MULTIPLE = 128
_SIZES = (
    "padded_vocab_size",
    "max_position_embeddings",
    "position_rows",
    "sliding_window",
    "sliding_window_every",
    "attention_chunk_size",
    *LINEAR_SIZES,
    *MAMBA_SIZES,
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "router_groups",
    "router_topk_groups",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_nextn_predict_layers",
)


def check_model(model: ModelSpec, seq_len: int) -> None:
    """Raise InputError for sequences that the model has no positions for."""
    if 0 < model.max_position_embeddings < seq_len:
        longer = (
            "its table of positions has no more rows, unless the model's max_position_embeddings says so"
            if model.position == "learned"
            else "if it is trained for longer ones, say so by --seq_len (or seq_len of load_problem), or change the model's "
            "max_position_embeddings"
        )
        raise InputError(
            f"seq_len {seq_len} is more than max_position_embeddings {model.max_position_embeddings} of {model.name}; "
            f"shorten the sequence; {longer}"
        )
