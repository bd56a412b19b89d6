"""The core of attention by fused kernels (FlashAttention, cuDNN): their calls under context parallelism, windows and chunks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from predictor.kernels.attn_physics import QUERY_TILE
from solver.layers.casts import CAST
from solver.layers.context_parallel import context_exchange, kv_gather, kv_regather, ring_ops
from solver.layers.ops import ATTENTION_CORE, fill_ops, memory_bound
from solver.layers.program import ATTENTION, FLASH_ATTN, FORWARD, INPUT_GRAD, Array, Op
from solver.layers.shapes import Shapes
from solver.spec.recipes import HALF


def flash_core_ops(shapes: Shapes) -> list[Op]:
    """Return flash attention; under context parallelism the causal work is shared evenly (zigzag order of the sequence).

    ring: one causal step on the rank's own part, then cp - 1 steps of half blocks, overlapped with sending keys and values for
    the next step (backward also sends their gradients). allgather: keys and values are all-gathered before attention, their
    gradients reduce-scattered after it. a2a: heads are exchanged for sequence, twice. a2a+ring (hierarchical): heads among
    neighbours, a ring across. torch's computes in the steps of a ring by either method. Windows and chunks across ranks work
    by allgather and a2a only (solver.spec.feasibility). Sources: Liu et al. 2023 (arXiv 2310.01889), Jacobs et al. 2023 (arXiv
    2309.14509), Transformer Engine's and Llama 3's context parallelism as published.
    """
    run, cp = shapes.run, shapes.keys.cp
    local, ones = run.seq_len // cp, np.ones(len(cp))
    copies = _layout_copies(shapes)
    if run.cp_comm == "a2a":
        return [*copies, *context_exchange(shapes), *_whole_sequence(shapes, ones, run.seq_len)]
    if run.cp_comm == "allgather" and not shapes.framework.kernels.torch_context_parallel:
        single, several = np.where(cp == 1, 1.0, 0.0), np.where(cp > 1, 1.0, 0.0)
        return [
            *copies,
            *kv_gather(shapes),
            *kv_regather(shapes),
            *_whole_sequence(shapes, single, run.seq_len),
            *_flash(shapes, "attention.shared", several, local, _seen(shapes), causal=False, held=run.seq_len),
        ]
    ring = cp // shapes.heads_shared
    length = shapes.kind.chunk or run.seq_len  # a packed document is cut over the ranks as a sequence is
    (blocks, share), local, steps = _blocks(shapes, length), np.maximum(length // ring, 1), (ring - 1) * 1.0
    window = shapes.kind.window > 0
    return [
        *copies,
        *(context_exchange(shapes) if run.cp_comm == "a2a+ring" else []),
        *(
            _whole_sequence(shapes, ones, local)
            if window
            else _flash(shapes, "attention", ones * share, local, local, causal=True, blocks=blocks)
        ),
        *_flash(shapes, "attention.step", steps * share, local, np.maximum(local // 2, 1), causal=False, blocks=blocks),
        *ring_ops(shapes, steps),
    ]


def core_casts(shapes: Shapes) -> list[Op]:
    """Return the casts of q, k and v, and of the context's gradient, for attention in 8 bits (projections have their own)."""
    recipe, context = shapes.recipe, shapes.context_elements
    if recipe is None or not _in_fp8(shapes):
        return []
    cast = HALF * recipe.reads + recipe.element * (2 if recipe.by_axis else 1)
    return [
        *memory_bound("attention.qkv_cast", ATTENTION, CAST, shapes.tokens * shapes.qkv_width, cast, 0.0, ATTENTION_CORE),
        *memory_bound("attention.context_cast", ATTENTION, CAST, context, 0.0, cast),
    ]


def _whole_sequence(shapes: Shapes, count: Array, seq: Array) -> list[Op]:
    """Causal attention of ``seq`` tokens to themselves, within the window or the chunks of this kind of layer."""
    kind = shapes.kind
    if kind.chunk:
        blocks, share = _blocks(shapes, kind.chunk)
        return _flash(shapes, "attention", count * share, kind.chunk, kind.chunk, causal=True, blocks=blocks)
    if kind.window:
        return _flash(shapes, "attention", count, seq, _seen(shapes), causal=False, window=True, held=seq)
    return _flash(shapes, "attention", count, seq, seq, causal=True)


def _flash(
    shapes: Shapes,
    name: str,
    count: Array,
    seq_q: Array,
    seq_kv: Array,
    *,
    causal: bool,
    blocks: Array = 1,
    window: bool = False,
    held: Array | None = None,
) -> list[Op]:
    """Return ``count`` calls of the kernel, forward and backward, of seq_q queries that see seq_kv keys.

    blocks: independent parts of each sequence, as further sequences of the batch. held: the keys that the rank holds, which
    have gradients, where a query sees fewer. window: seq_kv is of a sliding window; backward, cuDNN's 8-bit kernels compute
    the whole causal triangle then (predictor.kernels.fp8_attention: 0.5, 1.8, 6.3, 23.7 and 91.5 ms of fp8 at 2k to 32k tokens,
    0.2 to 3.6 ms in 16 bits).
    """
    heads, kv_heads = _heads_of_call(shapes)
    dims = {
        "batch": shapes.keys.micro_batch_size * blocks,
        "seq_q": seq_q,
        "seq_kv": seq_kv,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": shapes.model.qk_head_dim,
        "v_head_dim": shapes.model.value_head_dim,
        "causal": causal,
    }
    precision = shapes.run.precision if _in_fp8(shapes) else ""
    queries = dims["batch"] * seq_q * heads
    keys = dims["batch"] * (seq_kv if held is None else held) * kv_heads
    gradients = queries * shapes.model.qk_head_dim + keys * shapes.kv_width
    written = {FORWARD: queries * shapes.model.value_head_dim, INPUT_GRAD: gradients}
    forward, backward = ({**dims, "backward": is_backward} for is_backward in (False, True))
    if window and precision:
        backward |= {"seq_kv": seq_q, "causal": True}
    return [
        Op(name, ATTENTION, FLASH_ATTN, FORWARD, forward, count=count, variant=precision, recomputed_by=ATTENTION_CORE),
        Op(name, ATTENTION, FLASH_ATTN, INPUT_GRAD, backward, count=count, variant=precision),
        *fill_ops(shapes, name, ATTENTION, written, count, ATTENTION_CORE),
    ]


def _heads_of_call(shapes: Shapes) -> tuple[Array, Array]:
    """Return the heads of queries, and of keys and values, that a call of the kernel works on after an all-to-all: [keys]."""
    shared = shapes.heads_shared
    return np.maximum(shapes.heads // shared, 1), np.maximum(shapes.core_kv_heads // shared, 1)


def _seen(shapes: Shapes) -> int:
    """Return the keys that a tile of queries reads on average under a window or in chunks, at most half of the sequence.

    A window moves along the rows of a tile, which adds as many columns as the tile has rows.
    """
    kind, seq_len = shapes.kind, shapes.run.seq_len
    moving = QUERY_TILE if kind.window else 0
    return max(min(math.ceil(kind.seen_tokens(seq_len)) + moving, seq_len // 2), 1)


def _blocks(shapes: Shapes, length: int) -> tuple[int, float]:
    """Return how many blocks of ``length`` tokens a sequence has, and their work over that of as many full ones.

    Chunks: the last one is shorter. Packed documents are represented by equal ones of ``length`` tokens.
    """
    seq_len = shapes.run.seq_len
    whole, rest = divmod(seq_len, length)
    blocks = whole + (rest > 0)
    work = seq_len / length if shapes.run.document_tokens else whole + (rest / length) ** 2
    return blocks, work / blocks


def _layout_copies(shapes: Shapes) -> list[Op]:
    """Copies between the framework's order of dimensions and the kernel's, in both directions; each is a read and a write."""
    of_qkv, of_context = shapes.framework.kernels.attention_layout_copies
    apart = _split_and_join_copies(shapes) if shapes.framework.kernels.splits_and_joins_kv else []
    if not of_qkv + of_context:
        return apart
    width = of_qkv * shapes.qkv_width + of_context * shapes.heads * shapes.model.value_head_dim
    several, twice = np.where(shapes.keys.micro_batch_size > 1, 1.0, 0.0), 2 * shapes.element
    copies = memory_bound("layout", ATTENTION, "copy", shapes.tokens * width, twice, twice, ATTENTION_CORE)
    return [*apart, *(replace(op, count=several) for op in copies)]


def _split_and_join_copies(shapes: Shapes) -> list[Op]:
    """Copies of splits_and_joins_kv, counted in torch. Forward: all three, then keys and values twice; backward: keys and
    values, then all three twice. The host's launches are in the time of nanotron's layers as measured."""
    kv = shapes.tokens * shapes.kv_heads * shapes.kv_width
    whole, twice = shapes.tokens * shapes.qkv_width, 2 * shapes.element
    copies = [
        *memory_bound("layout.split", ATTENTION, "copy", whole + 2 * kv, twice, 0.0, ATTENTION_CORE),
        *memory_bound("layout.split", ATTENTION, "copy", 2 * whole + kv, 0.0, twice, ATTENTION_CORE),
    ]
    return [replace(op, launches=0.0) for op in copies]


def _in_fp8(shapes: Shapes) -> bool:
    """Whether this layer's attention multiplies in 8 bits; layers that are not quantised stay in 16 bits."""
    return shapes.run.fp8_attention and shapes.recipe is not None
