"""Hybrids of Mamba-2, attention, MLPs and experts whose layers are one block each (Nemotron-H): what their config.json says.

Source: configuration_nemotron_h.py and modeling_nemotron_h.py of nvidia/Nemotron-H-8B-Base-8K, as remembered; the parameters
of two published checkpoints check it. Attention has no rotary embedding there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.hugging_face.readers import NONE, Family, Values, read_flags, refuse_if_on, refuse_unless, size_of
from solver.formats.hugging_face.readers_experts import read_router_groups
from solver.spec.layer_types import FULL_ATTENTION, MAMBA, MLP, MOE

#: A letter of hybrid_override_pattern, as in Megatron-Core's mamba_hybrid_layer_allocation.py -> a layer.
LETTERS: Mapping[str, str] = {"M": MAMBA, "*": FULL_ATTENTION, "-": MLP, "E": MOE}
#: The same in layers_block_type of transformers, which since 5 has other words for its mixers of tokens.
_WORDS: Mapping[str, str] = {
    "mamba": MAMBA,
    "linear_attention": MAMBA,
    "attention": FULL_ATTENTION,
    "full_attention": FULL_ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}
_DEFAULTS = {
    "ssm_state_size": ("mamba_state_dim", 128),
    "n_groups": ("mamba_num_groups", 8),
    "chunk_size": ("mamba_chunk_size", 128),
    "mamba_num_heads": ("mamba_num_heads", 128),
    "mamba_head_dim": ("mamba_head_dim", 64),
    "conv_kernel": ("mamba_conv_kernel_dim", 4),
}
_FIXED: Mapping[str, tuple[object, ...]] = {
    "use_conv_bias": (True,),
    "mamba_proj_bias": (False,),
    "use_bias": (False,),
    "residual_in_fp32": (False,),
    "mamba_hidden_act": ("silu",),
    "mlp_hidden_act": ("relu2",),
    "moe_latent_size": (0,),
    "sliding_window": (0,),
}


def layers_of_pattern(pattern: Any, layers: int, what: str) -> list[str]:
    """Return the layers of a text of LETTERS. Raises InputError for another letter or another number of layers."""
    if not isinstance(pattern, str) or set(pattern) - set(LETTERS):
        raise InputError(f"{what} is {shown(pattern)}; it must be a text of the letters {', '.join(LETTERS)}, one a layer")
    if len(pattern) != layers:
        raise InputError(f"{what} lists {len(pattern)} layers; the model has {layers}")
    return [LETTERS[letter] for letter in pattern]


def read_nemotron_h(config: Mapping[str, Any], values: Values, read: set[str]) -> None:
    """Read which block each layer is, the sizes of Mamba-2 and the experts."""
    if words := config.get("layers_block_type"):
        if other := [word for word in words if word not in _WORDS]:
            raise InputError(f"layers_block_type has {shown(other[0])}, which is not modelled")
        kinds = [_WORDS[word] for word in words]
    else:
        pattern = config.get("hybrid_override_pattern")
        kinds = layers_of_pattern(pattern, size_of(config, "num_hidden_layers", 52), "hybrid_override_pattern")
    values.setdefault("num_hidden_layers", len(kinds))  # transformers 5 saves layers_block_type alone
    values |= {"layer_types": kinds, "one_block_layers": True, "gated_mlp": False, "position": "none", "norm": "rmsnorm"}
    if MAMBA in kinds:
        values |= {field: size_of(config, key, default) for key, (field, default) in _DEFAULTS.items()}
    values["head_dim"] = size_of(config, "head_dim", size_of(config, "attention_head_dim", 128))
    experts = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
    if MOE in kinds:
        values |= {"router_score": "sigmoid", "router_bias": True}
        read_router_groups(config, values, read)
    else:
        values |= dict.fromkeys(experts, 0)
    read_flags(config, values, read)
    # transformers' attention has none, and of MLPs' biases its experts have none
    refuse_if_on(config, read, "attention_bias", *(["mlp_bias"] if MOE in kinds else []))
    refuse_unless(config, read, _FIXED)
    refuse_if_on(config, read, "num_nextn_predict_layers", "mtp_hybrid_override_pattern")
    read |= {*_DEFAULTS, "layers_block_type", "hybrid_override_pattern", "attention_head_dim", "expand", "n_shared_experts"}
    read |= {"n_group", "topk_group", "time_step_limit", "time_step_rank"}
    read |= {"mamba_ssm_cache_dtype", "use_mamba_kernels", "ssm_cfg", "moe_shared_expert_overlap"}
    read |= {"mtp_layers_block_type"}  # of modules that num_nextn_predict_layers counts


FAMILIES: Mapping[str, Family] = {
    "nemotron_h": Family(
        fixed=NONE,
        keys={
            "n_routed_experts": "num_experts",
            "num_experts_per_tok": "num_experts_per_tok",
            "moe_intermediate_size": "moe_intermediate_size",
            "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        },
        special=read_nemotron_h,
    ),
}
