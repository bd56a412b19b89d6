"""Values of a model's ``layer_types``, and the names of the sizes that some of them have."""

from __future__ import annotations

from collections.abc import Iterable

#: In Hugging Face's words.
FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION = "full_attention", "sliding_attention", "chunked_attention"
LINEAR_ATTENTION, MAMBA = "linear_attention", "mamba"
MLP, MOE = "mlp", "moe"
LAYER_TYPES = (FULL_ATTENTION, SLIDING_ATTENTION, CHUNKED_ATTENTION, LINEAR_ATTENTION, MAMBA)
MLP_TYPES = (MLP, MOE)  #: those that are no mixers of tokens, where each layer is one block
LINEAR_SIZES = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
MAMBA_SIZES = (
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_state_dim",
    "mamba_num_groups",
    "mamba_conv_kernel_dim",
    "mamba_chunk_size",
)


def marked_layers(kind: str, marks: Iterable[object]) -> list[str]:
    """Return the type of each layer: ``kind`` where the layer is marked, else full attention."""
    return [kind if mark else FULL_ATTENTION for mark in marks]
