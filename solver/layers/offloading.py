"""Saved tensors that wait on the host, module by module (Megatron-Core's ``--fine-grained-activation-offloading``).

Each module names the tensors that autograd saves inside it and that nothing else holds: a context that the output projection
keeps on the device too is copied in vain, which is left out. Sources, as read: Megatron-Core's
fine_grained_activation_offload.py, attention.py, multi_latent_attention.py and moe/experts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from solver.layers.program import Saved
from solver.layers.shapes import Shapes
from solver.layers.unfused_core import ATTENTION_SCORES
from solver.spec.choices import OFFLOAD_LEAST_ELEMENTS
from solver.spec.norms import norms_beside_linears

#: By module; where the norm before attention is a part of the projection, as without latent attention, so is its input.
OFFLOADED = {
    "attn_norm": ("layer_input",),
    "qkv_linear": ("norm1_output", "low_ranks", "low_ranks_normed", "qk_norm_input"),
    "core_attn": ("qkv", "qkv_exchanged", ATTENTION_SCORES),
    "attn_proj": ("context", "context_quantised"),
    "mlp_norm": ("residual1",),
    "expert_fc1": ("expert_input",),
    "moe_act": ("expert_act_input", "expert_clamped"),
}


def offloaded_saved(shapes: Shapes, saved: Sequence[Saved]) -> list[Saved]:
    """Return the ``saved`` tensors of a layer, each with the share of it that waits on the host."""
    names = {name for module in shapes.run.modules_offloaded for name in OFFLOADED[module]}
    if "core_attn" in shapes.run.modules_offloaded and shapes.copies_kept_inputs:
        names.add("context")  # else the output projection holds it too, and lets it go with attn_proj alone
    apart = norms_beside_linears(shapes.model, shapes.kind.experts)  # Megatron-Core's, under whatever framework
    if "qkv_linear" in shapes.run.modules_offloaded and "norm1" not in apart:
        names.add("layer_input")
    if "norm2" not in apart:  # it is then a part of the MLP's first linear, which stays
        names.discard("residual1")
    large = OFFLOAD_LEAST_ELEMENTS * shapes.element
    return [replace(s, offloaded=np.where(s.bytes >= large, 1.0, 0.0)) if s.name in names else s for s in saved]
