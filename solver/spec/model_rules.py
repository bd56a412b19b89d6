"""Rules of a model's dimensions: experts, latent and linear attention, Mamba-2 and the kinds of layers.

model: a ModelSpec, whose module imports this one.
"""

from __future__ import annotations

from typing import Any

from profiler.errors import InputError, require
from solver.spec.layer_types import CHUNKED_ATTENTION, LAYER_TYPES, LINEAR_SIZES, MAMBA_SIZES, MLP_TYPES, MOE, SLIDING_ATTENTION


def check_kinds(model: Any, where: str) -> None:
    """Raise InputError where experts, latent attention or the kinds of layers contradict each other."""
    layers, freq = model.num_hidden_layers, model.moe_layer_freq
    every = {"layer_types": model.layer_types, "no_rope_layers": model.no_rope_layers, "moe_layer_freq": freq}
    for name, values in every.items():
        if isinstance(values, tuple) and values and len(values) != layers:
            raise InputError(f"{where}: {name} lists {len(values)} layers; the model has {layers}")
    rules = (
        (freq if isinstance(freq, tuple) else freq >= 1, f"moe_layer_freq is {freq}; it must be at least 1, or a list"),
        (
            model.first_k_dense_replace <= layers,
            f"first_k_dense_replace is {model.first_k_dense_replace}; the model has {layers} layers",
        ),
        (
            set(model.layer_types) <= {*LAYER_TYPES, *MLP_TYPES},
            f"layer_types must be of {', '.join((*LAYER_TYPES, *MLP_TYPES))}",
        ),
        (
            SLIDING_ATTENTION not in model.layer_types or model.sliding_window,
            "layer_types has sliding_attention; state sliding_window",
        ),
        (
            CHUNKED_ATTENTION not in model.layer_types or model.attention_chunk_size,
            "layer_types has chunked_attention; state attention_chunk_size",
        ),
        *_linear_rules(model),
        *_state_space_rules(model),
        (
            not model.num_experts or 1 <= model.num_experts_per_tok <= model.num_experts,
            f"num_experts_per_tok is {model.num_experts_per_tok}; it must be between 1 and num_experts {model.num_experts}",
        ),
        (not model.num_experts or model.moe_intermediate_size, "a mixture of experts needs moe_intermediate_size"),
        (not model.q_lora_rank or model.kv_lora_rank, f"q_lora_rank {model.q_lora_rank} needs kv_lora_rank"),
        (
            not model.kv_lora_rank or (model.qk_nope_head_dim and model.qk_rope_head_dim and model.v_head_dim),
            "latent attention needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim",
        ),
        (
            model.router_topk_groups <= model.router_groups,
            f"router_topk_groups {model.router_topk_groups} is more than router_groups {model.router_groups}",
        ),
        (
            not model.router_groups or (model.num_experts and model.num_experts % model.router_groups == 0),
            f"router_groups {model.router_groups} does not divide num_experts {model.num_experts}",
        ),
    )
    require(rules, where)


def _linear_rules(model: Any) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of the sizes of linear attention."""
    stated = [getattr(model, name) > 0 for name in LINEAR_SIZES]
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    return (
        (not model.has_linear_attention or all(stated), f"layer_types has linear_attention; state {', '.join(LINEAR_SIZES)}"),
        (model.has_linear_attention or not any(stated), "sizes of linear attention need layer_types with linear_attention"),
        (
            not model.has_linear_attention or not keys or values % keys == 0,
            f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}",
        ),
        (not (model.has_linear_attention and model.has_latent_attention), "linear attention beside latent attention"),
        (not (model.attention_gate and model.has_latent_attention), "attention_gate with latent attention"),
        (
            not (model.has_latent_attention and (model.qkv_bias or model.qk_norm != "none")),
            "qkv_bias, or qk_norm beside the norms that it has, with latent attention",
        ),
    )


def _state_space_rules(model: Any) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of layers with Mamba-2, and of layers that are one block each."""
    stated = [getattr(model, name) > 0 for name in MAMBA_SIZES]
    heads, groups, blocks = model.mamba_num_heads, model.mamba_num_groups, model.one_block_layers
    plain = model.first_k_dense_replace == 0 and model.moe_layer_freq == 1
    return (
        (not model.has_state_space or all(stated), f"layer_types has mamba; state {', '.join(MAMBA_SIZES)}"),
        (model.has_state_space or not any(stated), "sizes of Mamba-2 need layer_types with mamba"),
        (not groups or heads % groups == 0, f"mamba_num_heads {heads} is not a multiple of mamba_num_groups {groups}"),
        (
            not model.has_state_space or not (model.has_latent_attention or model.has_linear_attention),
            "Mamba-2 beside latent or linear attention",
        ),
        (not blocks or len(model.layer_types) > 0, "one_block_layers needs layer_types, one of each layer"),
        (blocks or not set(MLP_TYPES) & set(model.layer_types), "layer_types with mlp or moe need one_block_layers"),
        (
            not blocks or (MOE in model.layer_types) == model.is_mixture_of_experts,
            "num_experts needs layer_types with moe, and moe needs num_experts, where layers are one block each",
        ),
        (not blocks or plain, "first_k_dense_replace or moe_layer_freq where layer_types says which layers have experts"),
        (not blocks or model.norms_per_layer == 2, f"norms_per_layer is {model.norms_per_layer} where each block has one"),
        (not blocks or not model.num_nextn_predict_layers, "num_nextn_predict_layers where layers are one block each"),
    )
