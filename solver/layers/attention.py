"""The attention block: projections, norms and rotary embedding of queries and keys, and the sequence exchange of ISP."""

from __future__ import annotations

import numpy as np

from solver.layers.attention_core import core_ops, core_saved
from solver.layers.casts import kept_input_casts
from solver.layers.context_parallel import exchange
from solver.layers.norm import norm_passes
from solver.layers.ops import WHOLE_LAYER, bias_ops, gradient_sums, memory_bound
from solver.layers.program import ATTENTION, LINEARS, Array, Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.layers.tensor_parallel import column_linears, row_linear
from solver.spec.choices import TpMode
from solver.spec.recipes import FP32


def attention_ops(shapes: Shapes) -> list[Op]:
    """Return the ops of one attention block, forward and backward."""
    model = shapes.model
    q_width = model.num_attention_heads * model.head_dim
    projections = _projections(shapes)
    return [
        *gradient_sums(shapes, "norm1", ATTENTION, len(projections)),
        *column_linears(shapes, ATTENTION, model.hidden_size, projections),
        *bias_ops(
            shapes,
            "wqkv",
            ATTENTION,
            shapes.linear_tokens * _columns(shapes),
            model.qkv_bias,
            apart=shapes.framework.kernels.bias_apart,
        ),
        *_split_copies(shapes),
        *_qk_norm(shapes),
        *_head_exchange(shapes),
        *_rope(shapes),
        *core_ops(shapes),
        *_gate(shapes),
        *row_linear(shapes, "wo", ATTENTION, model.hidden_size, q_width // shapes.split),
        *kept_input_casts(shapes, "wo", ATTENTION, shapes.linear_tokens, q_width // shapes.split),
        *bias_ops(shapes, "wo", ATTENTION, shapes.norm_tokens * model.hidden_size, model.output_bias),
    ]


def _split_copies(shapes: Shapes) -> list[Op]:
    """Copies around the split of one tensor, in which each group of queries is beside its key and value, where a framework
    makes them. Forward: of the queries, where groups of several are not one after the other, and of the values; backward the
    gradients of all three are joined. Source: Megatron-Core's attention.py (get_query_key_value_tensors), Transformer Engine's
    SplitAlongDim.backward and get_qkv_layout.
    """
    if shapes.framework.kernels.splits_groups and shapes.model.num_attention_heads > shapes.model.num_key_value_heads:
        return _copies_of_groups(shapes)
    kernels, d, twice = shapes.framework.kernels, shapes.model.head_dim, 2.0 * shapes.element
    if not kernels.fused_qkv or not (kernels.splits_interleaved or kernels.joins_gradients):
        return []
    backward = shapes.tokens * (shapes.heads + 2 * shapes.kv_heads) * d
    join = memory_bound("qkv.join", ATTENTION, "copy", backward, 0.0, twice)
    if not kernels.splits_interleaved:
        return join
    grouped = (shapes.heads > shapes.kv_heads) & (shapes.kv_heads > 1)
    forward = shapes.tokens * (shapes.heads * grouped + shapes.kv_heads) * d
    return [*memory_bound("qkv.split", ATTENTION, "copy", forward, twice, 0.0), *join]


def _copies_of_groups(shapes: Shapes) -> list[Op]:
    """Copies around slices of one tensor of grouped queries. Forward: of the queries, and of keys joined with values; backward
    each of three slices makes a zeroed gradient of the whole and copies its part there, and the three are added. Source:
    InternEvo's modules/mha.py (GQA) and modeling_internlm2.py (_packed_forward)."""
    e, d = shapes.element, shapes.model.head_dim
    queries, whole = shapes.tokens * shapes.heads * d, shapes.tokens * (shapes.heads + 2 * shapes.kv_heads) * d
    return [
        *memory_bound("qkv.split", ATTENTION, "copy", whole, 2.0 * e, 11.0 * e),
        *memory_bound("qkv.join", ATTENTION, "copy", queries, 0.0, 1.0 * e),
    ]


def _qk_norm(shapes: Shapes) -> list[Op]:
    """Return the norms of queries and keys: one kernel, or a chain of eager ones."""
    if shapes.model.qk_norm == "none":
        return []
    return norm_passes(shapes, "qk_norm", ATTENTION, _qk_elements(shapes))


def _qk_elements(shapes: Shapes) -> Array:
    return shapes.tokens * (shapes.heads + shapes.kv_heads) * shapes.model.head_dim


def _rope(shapes: Shapes) -> list[Op]:
    """Rotary embedding of queries and keys: read and written once, by one kernel or by a chain of eager kernels."""
    if shapes.model.position != "rope" or not shapes.kind.rope:
        return []
    twice = 2 * shapes.element
    scales = shapes.framework.kernels.scaled_rope_fused or not shapes.model.scaled_rope
    return memory_bound("rope", ATTENTION, "rope", _qk_elements(shapes), twice, twice, fused=shapes.fused_rope and scales)


def _gate(shapes: Shapes) -> list[Op]:
    """The context times the sigmoid of the gate: reads both, writes their product; backward one read and one write more."""
    if not shapes.model.attention_gate:
        return []
    elements, e = shapes.tokens * shapes.heads * shapes.model.head_dim, shapes.element
    return memory_bound("gate", ATTENTION, "gated_act", elements, 3 * e, 5 * e, fused=shapes.fused_elementwise)


def _projections(shapes: Shapes) -> dict[str, Array]:
    """Columns of the q, k and v projections on one rank, as one GEMM or three; a gate is as wide as q and beside it.

    Key and value heads are replicated where tp exceeds them.
    """
    model = shapes.model
    q = model.num_attention_heads // shapes.split * model.head_dim * (1 + model.attention_gate)
    kv = np.maximum(model.num_key_value_heads // shapes.split, 1) * model.head_dim
    return {"wqkv": q + 2 * kv} if shapes.framework.kernels.fused_qkv else {"wq": q, "wk": kv, "wv": kv}


def _columns(shapes: Shapes) -> Array:
    return sum(_projections(shapes).values())


def _head_exchange(shapes: Shapes) -> list[Op]:
    """ISP (DeepSpeed-Ulysses): all-to-alls of q, k, v and context between heads and sequence over the tensor group.

    They are not overlapped.
    """
    model, where = shapes.model, (shapes.keys.is_mode(TpMode.ISP) & (shapes.keys.tp > 1)).astype(float)
    q = shapes.local_tokens * model.num_attention_heads * model.head_dim * shapes.element
    kv = shapes.local_tokens * 2 * np.maximum(model.num_key_value_heads, shapes.keys.tp) * model.head_dim * shapes.element
    return exchange(shapes, "exchange", "tp", {"q": q, "kv": kv, "context": q}, where, WHOLE_LAYER)


def attention_saved(shapes: Shapes) -> list[Saved]:
    """Return the saved tensors: those of the core, and q and k before their norm."""
    before, kept = _qk_elements(shapes) * shapes.element, [*core_saved(shapes), *_gate_saved(shapes)]
    if shapes.model.qk_norm == "none":
        return kept
    wide = [] if shapes.fused_norm else [Saved("qk_norms_fp32", _qk_elements(shapes) * FP32)]
    return [*kept, Saved("qk_norm_input", before), *wide]


def _gate_saved(shapes: Shapes) -> list[Saved]:
    """The gate, and in 16 bits its product with the context, which the output projection keeps beside what attention keeps."""
    width = shapes.tokens * shapes.heads * shapes.model.head_dim * shapes.element
    if not shapes.model.attention_gate:
        return []
    product = [] if shapes.copies_kept_inputs else [Saved("context_gated", width)]  # else a copy of core_saved
    return [Saved("gate", width), *product]


def attention_weights(shapes: Shapes) -> list[Weight]:
    """Return the projection weights (and biases) of one rank; ISP shards the weights of the whole block over wp."""
    model, share = shapes.model, shapes.weight_shards
    q_width = model.num_attention_heads * model.head_dim
    bias = _columns(shapes) * model.qkv_bias + model.hidden_size * model.output_bias + shapes.heads * model.attention_sinks
    linears = _columns(shapes) * model.hidden_size + q_width // shapes.split * model.hidden_size
    return [Weight("attention.linears", linears / share, group=LINEARS), Weight("attention.bias", bias / share)]
