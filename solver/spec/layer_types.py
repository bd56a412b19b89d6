"""Values of a model's ``layer_types``, and the names of the sizes that some of them have."""

from __future__ import annotations

#: In Hugging Face's words.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "mamba")
MLP_TYPES = ("mlp", "moe")  #: those that are no mixers of tokens, where each layer is one block
LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
)  # fmt: skip
MAMBA_SIZES = (
    "mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups", "mamba_conv_kernel_dim", "mamba_chunk_size",
)  # fmt: skip
