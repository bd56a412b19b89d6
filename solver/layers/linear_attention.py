"""Linear attention by a gated delta rule (Gated DeltaNet): one projection, a short convolution, the rule, a gated norm.

Sources: Yang et al. 2024 (arXiv 2412.06464); Megatron-Core 0.16's ssm/gated_delta_net.py and transformers 4.57's
modeling_qwen3_next.py, as read; both call flash-linear-attention's kernels (predictor.kernels.chunk_scan).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from predictor.kernels.chunk_scan import CHUNK
from solver.layers.norm import norm_passes
from solver.layers.ops import WHOLE_LAYER, gradient_sums, memory_bound
from solver.layers.program import ATTENTION, CHUNK_SCAN, FORWARD, INPUT_GRAD, LINEARS, OTHERS, Array, Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.layers.tensor_parallel import column_linears, row_linear
from solver.spec.recipes import FP32

#: Kernels of flash-linear-attention's forward and backward pass, and of the decays and rates that torch computes before it
#: (exp, negation, to fp32, sum, softplus, product, sigmoid), counted in their code (fla/ops/gated_delta_rule/chunk.py 0315a70).
SCAN_LAUNCHES, DECAY_LAUNCHES = (6, 9), 7
#: Bytes per head of values and token of those small kernels: each reads and writes fp32.
_DECAY_BYTES = 2.0 * FP32 * DECAY_LAUNCHES


def linear_attention_ops(shapes: Shapes) -> list[Op]:
    """Return the ops of one block, forward and backward."""
    projections = _projections(shapes)
    return [
        *gradient_sums(shapes, "norm1", ATTENTION, len(projections)),
        *column_linears(shapes, ATTENTION, shapes.model.hidden_size, projections),
        *_convolution(shapes),
        *_keys(shapes),
        *_copies(shapes),
        *_decays(shapes),
        *_scan(shapes),
        *_gated_norm(shapes),
        *row_linear(shapes, "wo", ATTENTION, shapes.model.hidden_size, _values(shapes)),
    ]


def _heads(shapes: Shapes) -> Array:
    """Heads of values on one rank."""
    return shapes.model.linear_num_value_heads // shapes.split


def _values(shapes: Shapes) -> Array:
    return shapes.model.linear_value_width // shapes.split


def _convolved(shapes: Shapes) -> Array:
    """Queries, keys and values of one token, which the convolution runs over."""
    return (2 * shapes.model.linear_key_width + shapes.model.linear_value_width) // shapes.split


def _repeated(shapes: Shapes) -> Array:
    """Queries and keys of one token with as many heads as values have; 0 where they have as many."""
    model = shapes.model
    several = model.linear_num_value_heads > model.linear_num_key_heads
    return 2 * _heads(shapes) * model.linear_key_head_dim * several


def _projections(shapes: Shapes) -> dict[str, Array]:
    """Columns of queries, keys, values and the gate, and of two rates per head; one GEMM, or two."""
    wide, rates = _convolved(shapes) + _values(shapes), 2 * _heads(shapes)
    return {"wqkvzba": wide + rates} if shapes.framework.kernels.fused_qkv else {"wqkvz": wide, "wba": rates}


def _convolution(shapes: Shapes) -> list[Op]:
    """Queries, keys and values, copied so that tokens lie one after the other, through the convolution and its activation."""
    elements, e = shapes.tokens * _convolved(shapes), shapes.element
    return [
        *memory_bound("conv.input", ATTENTION, "copy", elements, 2 * e, 2 * e),
        *memory_bound("conv", ATTENTION, "act", elements, 2 * e, 3 * e),
    ]


def _keys(shapes: Shapes) -> list[Op]:
    """Norms of queries and keys, copied for them, and their repetition for every head of values."""
    elements, e = shapes.tokens * 2 * shapes.model.linear_key_width // shapes.split, shapes.element
    repeated = shapes.tokens * _repeated(shapes)
    return [
        *memory_bound("qk.copy", ATTENTION, "copy", elements, 2 * e, 2 * e),
        *memory_bound("qk_l2norm", ATTENTION, "norm", elements, 2 * e, 3 * e, gradient=shapes.norm_gradient),
        *memory_bound("qk.repeat", ATTENTION, "copy", repeated + elements * (repeated > 0), e, e),
    ]


def _copies(shapes: Shapes) -> list[Op]:
    """Values and the gate, made contiguous; backward the gradients of all parts of the projection are joined."""
    values, e = _values(shapes), shapes.element
    joined = _convolved(shapes) + values
    return [
        *memory_bound("linear.split", ATTENTION, "copy", shapes.tokens * 2 * values, 2 * e, 0.0),
        *memory_bound("linear.join", ATTENTION, "copy", shapes.tokens * joined, 0.0, 2 * e),
    ]


def _decays(shapes: Shapes) -> list[Op]:
    """Decay and rate of each head and token, a chain of small kernels."""
    ops = memory_bound("decay", ATTENTION, "copy", shapes.tokens * _heads(shapes), _DECAY_BYTES, _DECAY_BYTES)
    return [replace(op, launches=float(DECAY_LAUNCHES)) for op in ops]


def _scan(shapes: Shapes) -> list[Op]:
    """The gated delta rule over whole sequences; it runs again only with its whole layer."""
    model = shapes.model
    dims = {
        "batch": shapes.keys.micro_batch_size,
        "seq": shapes.run.seq_len,
        "heads": _heads(shapes),
        "key_dim": model.linear_key_head_dim,
        "value_dim": model.linear_value_head_dim,
    }
    forward, backward = ({**dims, "backward": which} for which in (False, True))
    return [
        Op("delta_rule", ATTENTION, CHUNK_SCAN, FORWARD, forward, launches=SCAN_LAUNCHES[0], recomputed_by=WHOLE_LAYER),
        Op("delta_rule", ATTENTION, CHUNK_SCAN, INPUT_GRAD, backward, launches=SCAN_LAUNCHES[1]),
    ]


def _gated_norm(shapes: Shapes) -> list[Op]:
    """A norm of each head's output, times the activated gate."""
    elements, e = shapes.tokens * _values(shapes), shapes.element
    return [
        *norm_passes(shapes, "out_norm", ATTENTION, elements),
        *memory_bound("out_gate", ATTENTION, "gated_act", elements, 3 * e, 5 * e, fused=shapes.fused_elementwise),
    ]


def linear_attention_saved(shapes: Shapes) -> list[Saved]:
    """Return what backward needs: the convolution's input, normed queries and keys, these repeated, values, the inverse of each
    chunk's triangle, decays and rates, the output before and after its norm, the gate, and the output projection's input."""
    e, heads, values, t = shapes.element, _heads(shapes), _values(shapes), shapes.tokens
    keys = 2 * shapes.model.linear_key_width // shapes.split
    wide = [] if shapes.fused_norm else [Saved("out_norm_fp32", t * values * FP32)]
    return [
        Saved("conv_input", t * _convolved(shapes) * e),
        Saved("linear_qkv", t * (keys + _repeated(shapes) + values) * e),
        Saved("chunk_triangles", t * heads * CHUNK * e),
        Saved("decays", t * heads * (2 * FP32 + e)),
        Saved("context", t * values * e),
        Saved("out_norm_output", t * values * e),
        Saved("gate", t * values * e),
        Saved("context_gated", t * values * shapes.input_element),
        *wide,
    ]


def linear_attention_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes alive in the backward pass of the rule: the states of all chunks and their gradients, and eight tensors
    as wide as the values (the two factors of each chunk, new values and gradients of these and of queries and keys)."""
    model, heads = shapes.model, _heads(shapes)
    states = 2 * heads * model.linear_key_head_dim * model.linear_value_head_dim / CHUNK
    return shapes.tokens * (states + 8 * _values(shapes)) * shapes.element


def linear_attention_weights(shapes: Shapes) -> list[Weight]:
    """Return the weights of one rank: both projections; the convolution's, a decay and a bias per head, and the norm's."""
    model = shapes.model
    columns = sum(_projections(shapes).values())
    linears = (columns + _values(shapes)) * model.hidden_size
    others = _convolved(shapes) * model.linear_conv_kernel_dim + 2 * _heads(shapes) + model.linear_value_head_dim
    return [Weight("linear_attention.linears", linears, group=LINEARS), Weight("linear_attention.conv", others, OTHERS)]
