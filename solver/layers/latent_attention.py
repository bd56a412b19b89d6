"""Multi-head latent attention: queries, keys and values through low ranks, and the copies that put them together.

Sources: DeepSeek-V2 (arXiv 2405.04434) section 2.1; Megatron-Core's multi_latent_attention.py, as read. Keys and values are
expanded to all heads before the core ("not absorbed"), as every framework trains it.
"""

from __future__ import annotations

import numpy as np

from solver.layers.attention_core import core_ops, core_saved
from solver.layers.casts import gradient_casts, input_casts, kept_input_casts, weight_casts
from solver.layers.norm import norm_passes
from solver.layers.ops import bias_ops, gradient_sums, linear, memory_bound
from solver.layers.program import ATTENTION, FORWARD, INPUT_GRAD, LINEARS, OTHERS, Array, Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.layers.tensor_parallel import column_linears, row_linear, tp_collective


def latent_attention_ops(shapes: Shapes) -> list[Op]:
    """Return the ops of one latent attention block, forward and backward.

    The down projections are not split: every tensor rank holds them and works on its own tokens. What they give is normed and
    all-gathered (under a sequence split), then expanded to this rank's heads.
    """
    model = shapes.model
    q, kv = model.num_attention_heads * model.qk_head_dim, _expanded(shapes)
    context = model.num_attention_heads * model.v_head_dim // shapes.split
    up = [
        *(_up(shapes, "q_up", model.q_lora_rank, q // shapes.split) if model.q_lora_rank else []),
        *_up(shapes, "kv_up", model.kv_lora_rank, kv),
    ]
    down = {"q_down": model.q_lora_rank} if model.q_lora_rank else {}
    direct = [] if model.q_lora_rank else column_linears(shapes, ATTENTION, model.hidden_size, {"wq": q // shapes.split})
    down["kv_down"] = model.kv_lora_rank + model.qk_rope_head_dim
    return [
        *gradient_sums(shapes, "norm1", ATTENTION, 2),
        *direct,
        *(op for name, width in down.items() for op in _down(shapes, name, width)),
        *_rotary_key_gather(shapes),
        *up,
        *_assembly(shapes),
        *core_ops(shapes),
        *row_linear(shapes, "wo", ATTENTION, model.hidden_size, context),
        *kept_input_casts(shapes, "wo", ATTENTION, shapes.linear_tokens, context),
        *bias_ops(shapes, "wo", ATTENTION, shapes.norm_tokens * model.hidden_size, model.output_bias),
    ]


def _expanded(shapes: Shapes) -> Array:
    """Columns of the up projection of keys and values on one rank."""
    model = shapes.model
    return model.num_attention_heads // shapes.split * (model.qk_nope_head_dim + model.v_head_dim)


def _down(shapes: Shapes, name: str, width: int) -> list[Op]:
    hidden, tokens = shapes.model.hidden_size, shapes.norm_tokens
    return [
        *input_casts(shapes, name, ATTENTION, tokens, hidden, False, normed=False),
        *linear(shapes, name, ATTENTION, width, hidden, tokens=tokens),
        *gradient_casts(shapes, name, ATTENTION, tokens, width),
        *weight_casts(shapes, name, ATTENTION, hidden * width),
    ]


def _up(shapes: Shapes, name: str, rank: int, width: Array) -> list[Op]:
    """A norm of the low rank, its all-gather under a sequence split, and the expansion to heads."""
    whole, operand = shapes.tokens * rank * shapes.element, shapes.tokens * rank * shapes.gathered_element
    split, everywhere = shapes.sequence_split, ~shapes.sequence_split & (shapes.split > 1)
    return [
        *norm_passes(shapes, f"{name}.norm", ATTENTION, shapes.norm_tokens * rank),
        *input_casts(shapes, name, ATTENTION, shapes.linear_tokens, rank, split, normed=True),
        tp_collective(shapes, f"{name}.all_gather", ATTENTION, "all_gather", FORWARD, split, size=operand),
        *linear(shapes, name, ATTENTION, width, rank),
        *gradient_casts(shapes, name, ATTENTION, shapes.linear_tokens, width),
        *weight_casts(shapes, name, ATTENTION, rank * width),
        tp_collective(shapes, f"{name}.reduce_scatter", ATTENTION, "reduce_scatter", INPUT_GRAD, split, size=whole),
        tp_collective(shapes, f"{name}.all_reduce", ATTENTION, "all_reduce", INPUT_GRAD, everywhere, size=whole),
        tp_collective(shapes, f"{name}.regather", ATTENTION, "all_gather", INPUT_GRAD, shapes.keeps_shard, size=operand),
    ]


def _rotary_key_gather(shapes: Shapes) -> list[Op]:
    """All-gather of the rotary part of the key, which all heads share, under a sequence split; its gradient is scattered."""
    whole = shapes.tokens * shapes.model.qk_rope_head_dim * shapes.element
    return [
        tp_collective(shapes, "rotary_key", ATTENTION, "all_gather", FORWARD, shapes.sequence_split, size=whole),
        tp_collective(shapes, "rotary_key", ATTENTION, "reduce_scatter", INPUT_GRAD, shapes.sequence_split, size=whole),
    ]


def _assembly(shapes: Shapes) -> list[Op]:
    """Rotary embedding of parts of queries and keys, and what puts them together for the core.

    The rotary parts alone go through the rotary kernels, then q, k and v are each written anew (torch.cat and contiguous: read
    and write); backward copies them back. Fused (Megatron-Core's fused_mla_yarn_rope_apply.py): one kernel turns the rotary
    part of q in place, another reads what kv_up gave and writes k and v; backward likewise.
    """
    model, heads, e = shapes.model, shapes.heads, shapes.element
    if shapes.fused_latent_rope:
        turned = shapes.tokens * heads * model.qk_rope_head_dim
        moved = shapes.tokens * heads * (model.qk_nope_head_dim + model.qk_head_dim + 2 * model.v_head_dim)
        return [
            *memory_bound("rope", ATTENTION, "rope", turned, 2 * e, 2 * e),
            *memory_bound("assembly", ATTENTION, "rope", moved, e, e),
        ]
    fused = shapes.fused_rope and shapes.fused_latent_rope is None
    rotary = shapes.tokens * (heads + 1) * model.qk_rope_head_dim
    assembled = shapes.tokens * heads * (2 * model.qk_head_dim + model.v_head_dim)
    return [
        *memory_bound("rope", ATTENTION, "rope", rotary, 2 * e, 2 * e, fused=fused),
        *memory_bound("assembly", ATTENTION, "copy", assembled, 2 * e, 2 * e),
    ]


def latent_attention_saved(shapes: Shapes) -> list[Saved]:
    """Return the saved tensors: those of the core, and the low ranks before and after their norms.

    A column linear keeps its shard of what is normed, or all of it.
    """
    model, e = shapes.model, shapes.element
    ranks = model.q_lora_rank + model.kv_lora_rank
    kept = np.where(shapes.keeps_shard, shapes.norm_tokens, shapes.tokens)
    low = Saved("low_ranks", ranks * shapes.norm_tokens * e), Saved("low_ranks_normed", ranks * kept * shapes.input_element)
    return [*core_saved(shapes), *low]


def latent_attention_weights(shapes: Shapes) -> list[Weight]:
    """Return the projections of one rank; the down projections and the norms are whole on every tensor rank."""
    model, h = shapes.model, shapes.model.hidden_size
    q = model.num_attention_heads * model.qk_head_dim // shapes.split
    low = h * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim)
    found = {
        "attention.q_up": q * (model.q_lora_rank or h),
        "attention.kv_up": _expanded(shapes) * model.kv_lora_rank,
        "attention.out": model.num_attention_heads * model.v_head_dim // shapes.split * h,
        "attention.down": low,
    }
    others = {"attention.norms": model.q_lora_rank + model.kv_lora_rank, "attention.bias": h * model.output_bias}
    return [
        *(Weight(name, elements, LINEARS) for name, elements in found.items()),
        *(Weight(name, elements, OTHERS) for name, elements in others.items() if elements),
    ]
