"""The core of attention, between the projections: fused or unfused kernels, and what they keep for the backward pass."""

from __future__ import annotations

import numpy as np

from solver.layers.context_parallel import whole_kv
from solver.layers.flash_core import core_casts, flash_core_ops
from solver.layers.ops import ATTENTION_CORE, WHOLE_LAYER, memory_bound
from solver.layers.program import ATTENTION, Op, Saved
from solver.layers.shapes import Shapes
from solver.layers.unfused_core import scores_saved, unfused_core_ops, unfused_working_bytes
from solver.spec.recipes import FP32


def core_ops(shapes: Shapes) -> list[Op]:
    """Return the ops between the projections: from q, k and v after the rotary embedding to the context."""
    core = flash_core_ops(shapes) if shapes.run.attention == "flash" else unfused_core_ops(shapes)
    return [*_repeated(shapes), *core_casts(shapes), *core]


def _repeated(shapes: Shapes) -> list[Op]:
    """Copies of keys and values to as many heads as there are of queries, and the sums of their gradients."""
    if not shapes.framework.kernels.repeats_kv or np.all(shapes.heads == shapes.kv_heads):
        return []
    moved = shapes.tokens * (shapes.kv_heads + shapes.heads) * shapes.kv_width * (shapes.heads > shapes.kv_heads)
    return memory_bound("kv.repeat", ATTENTION, "copy", moved, shapes.element, shapes.element)


def core_saved(shapes: Shapes) -> list[Saved]:
    """Return what the core saves: q, k, v, the context, and the log-sum-exp (or the scores).

    An exchange between context-parallel ranks makes new tensors of q, k and v, which are kept instead of the projections'
    output: all of them behind an all-to-all, and in a ring keys and values, those received last (Transformer Engine's
    AttnFuncWithCPAndQKVOA2A and AttnFuncWithCPAndKVP2P, as read).
    """
    qkv = shapes.tokens * shapes.qkv_width * shapes.element
    exchanged = np.where(shapes.heads_shared > 1, qkv, np.where(_ring(shapes) > 1, _ring_kv(shapes), 0))
    context = shapes.context_elements * shapes.element
    copied = shapes.copies_kept_inputs  # by the output projection, so that the context is the core's alone, if not a gate's
    dropped_by = ATTENTION_CORE if copied and not shapes.model.attention_gate else WHOLE_LAYER
    saved = [
        Saved("qkv", qkv - exchanged + _beside_values(shapes)),
        Saved("qkv_exchanged", exchanged),
        Saved("context", context, dropped_by),
    ]
    if copied:
        saved.append(Saved("context_quantised", shapes.context_elements * shapes.input_element))
    if shapes.run.attention == "flash":
        return [*saved, Saved("log_sum_exp", shapes.tokens * shapes.heads * FP32, ATTENTION_CORE)]
    return [*saved, scores_saved(shapes)]


def _beside_values(shapes: Shapes) -> np.ndarray:
    """Return the bytes of parts of keys that values of latent attention keep alive, where they are views of both: [keys]."""
    views = shapes.framework.kernels.latent_values_are_views and shapes.model.has_latent_attention
    elements = shapes.tokens * shapes.heads * shapes.model.qk_nope_head_dim * views
    return np.where(shapes.keys.cp == 1, elements * shapes.element, 0)


def core_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients alive in the core's backward pass, or of a ring's forward pass where it needs more: [keys].

    Flash: gradients of q, k, v and context, and the fp32 sum of the query gradients (FlashAttention 2); where keys and values
    are all-gathered, these of whole sequences, and their gradients except in a ring of torch. In a ring backward has two
    buffers each of keys, values and their gradients, and the sum of the queries' gradients; forward has keys, values and
    context of every step (Transformer Engine's AttnFuncWithCPAndKVP2P, as read).
    """
    if shapes.run.attention == "unfused":
        return unfused_working_bytes(shapes)
    gradients = (shapes.heads + shapes.core_kv_heads) * shapes.kv_width * shapes.element
    whole = (1 if shapes.framework.kernels.torch_context_parallel else 2) * (shapes.run.cp_comm == "allgather")
    gathered = whole * np.where(shapes.keys.cp > 1, whole_kv(shapes), 0) * shapes.element
    backward = shapes.tokens * (gradients + shapes.heads * FP32 * shapes.model.qk_head_dim) + gathered
    ring, kv, heads = _ring(shapes), _ring_kv(shapes), shapes.tokens * shapes.heads * shapes.element
    backward = backward + np.where(ring > 1, 4 * kv + heads * shapes.model.qk_head_dim, 0)
    forward = np.where(ring > 1, ring * (kv + heads * shapes.model.value_head_dim), 0)
    return np.maximum(backward, forward)


def _ring(shapes: Shapes) -> np.ndarray:
    """Return the ranks of Transformer Engine's ring of keys and values, [keys]; 1 where they are exchanged otherwise."""
    rings = (
        "ring" in shapes.run.cp_comm and shapes.run.attention == "flash" and not shapes.framework.kernels.torch_context_parallel
    )
    return shapes.keys.cp // shapes.heads_shared if rings else np.ones_like(shapes.keys.cp)


def _ring_kv(shapes: Shapes) -> np.ndarray:
    """Return the bytes of the keys and values that one step of a ring sends, [keys]."""
    return shapes.kv_elements * shapes.element
