"""The core of attention, flash or unfused, with kinds of windows and whole or shared sequences."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from predictor.kernels.attn_physics import QUERY_TILE
from predictor.kernels.gemm_layout import GemmLayout
from solver.layers.casts import CAST
from solver.layers.context_parallel import context_exchange, kv_gather, kv_regather, ring_ops, whole_kv
from solver.layers.ops import ATTENTION_CORE, WHOLE_LAYER, fill_ops, gemm_dtype, memory_bound
from solver.layers.program import ATTENTION, FLASH_ATTN, FORWARD, INPUT_GRAD, LINEAR, Array, Op, Saved
from solver.layers.shapes import Shapes
from solver.layers.soft_caps import soft_cap_ops
from solver.spec.alignment import VECTOR
from solver.spec.recipes import FP32, HALF

ATTENTION_SCORES = "attention_scores"  #: what unfused attention keeps of its scores

#: Reads and writes of a score, and of its gradient, in fp32, which fused kernels do not take. Forward: the mask in place, then
#: softmax. Backward: softmax 3; the mask was set on a view, so autograd (CopySlices) copies the gradient, clones it, masks a
#: clone and copies it back: 2 each, and 4 for the mask.
WIDE_SOFTMAX = (4, 13)


def core_ops(shapes: Shapes) -> list[Op]:
    """Return the ops between the projections: from q, k and v after the rotary embedding to the context."""
    core = _flash_core(shapes) if shapes.run.attention == "flash" else _unfused_core(shapes)
    return [*_repeated(shapes), *_quantised(shapes), *core]


def _in_fp8(shapes: Shapes) -> bool:
    """Whether attention multiplies in 8 bits here: not in layers that stay 16-bit."""
    return shapes.run.fp8_attention and shapes.recipe is not None


def _quantised(shapes: Shapes) -> list[Op]:
    """Casts of q, k and v, and of the gradient of the context, for attention in 8 bits; its projections are not part of it."""
    if not _in_fp8(shapes) or shapes.recipe is None:
        return []
    recipe, context = shapes.recipe, shapes.context_elements
    cast = HALF * recipe.reads + recipe.element * (2 if recipe.by_axis else 1)
    return [
        *memory_bound("attention.qkv_cast", ATTENTION, CAST, shapes.tokens * _qkv_width(shapes), cast, 0.0, ATTENTION_CORE),
        *memory_bound("attention.context_cast", ATTENTION, CAST, context, 0.0, cast),
    ]


def _repeated(shapes: Shapes) -> list[Op]:
    """Copies of keys and values to as many heads as there are of queries, and the sums of their gradients."""
    if not shapes.framework.kernels.repeats_kv or np.all(shapes.heads == shapes.kv_heads):
        return []
    moved = shapes.tokens * (shapes.kv_heads + shapes.heads) * shapes.kv_width * (shapes.heads > shapes.kv_heads)
    return memory_bound("kv.repeat", ATTENTION, "copy", moved, shapes.element, shapes.element)


def _qkv_width(shapes: Shapes) -> Array:
    """Width of one token's queries, keys and values on this rank."""
    return shapes.heads * shapes.model.qk_head_dim + shapes.core_kv_heads * shapes.kv_width


def _heads_after_cp(shapes: Shapes) -> tuple[Array, Array]:
    shared = shapes.heads_shared
    return np.maximum(shapes.heads // shared, 1), np.maximum(shapes.core_kv_heads // shared, 1)


def _flash(
    shapes: Shapes,
    name: str,
    count: Array,
    seq_q: Array,
    seq_kv: Array,
    causal: bool,
    blocks: Array = 1,
    window: bool = False,
    held: Array | None = None,
) -> list[Op]:
    """One call of the kernel, forward and backward; blocks: parts of each sequence that it treats like sequences.

    held: the keys that the rank holds, which have gradients, where a query sees fewer (seq_kv). window: these are the keys of a
    window. The backward passes of cuDNN's 8-bit kernels compute the whole causal triangle then
    (predictor.kernels.fp8_attention: 0.5, 1.8, 6.3, 23.7 and 91.5 ms of fp8 at 2k to 32k tokens, 0.2 to 3.6 ms in 16 bits).
    """
    heads, kv_heads = _heads_after_cp(shapes)
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

    ran = shapes.run.precision if _in_fp8(shapes) else ""
    queries = dims["batch"] * seq_q * heads
    keys = dims["batch"] * (seq_kv if held is None else held) * kv_heads
    gradients = queries * shapes.model.qk_head_dim + keys * shapes.kv_width
    written = {FORWARD: queries * shapes.model.value_head_dim, INPUT_GRAD: gradients}
    forward, backward = ({**dims, "backward": which} for which in (False, True))
    if window and ran:
        backward |= {"seq_kv": seq_q, "causal": True}
    return [
        Op(name, ATTENTION, FLASH_ATTN, FORWARD, forward, count=count, variant=ran, recomputed_by=ATTENTION_CORE),
        Op(name, ATTENTION, FLASH_ATTN, INPUT_GRAD, backward, count=count, variant=ran),
        *fill_ops(shapes, name, ATTENTION, written, count, ATTENTION_CORE),
    ]


def _seen(shapes: Shapes) -> int:
    """Return the keys that a query's tile touches on average under a window or in chunks, or half of the sequence.

    A window that moves along the tile's rows adds a tile; a whole causal triangle is never exceeded.
    """
    kind, seq_len = shapes.kind, shapes.run.seq_len
    # a window that moves along the rows of a tile touches a tile of columns more, which are as wide
    moving = QUERY_TILE if kind.window else 0
    return max(min(math.ceil(kind.seen_tokens(seq_len)) + moving, seq_len // 2), 1)


def _blocks(shapes: Shapes, length: int) -> tuple[int, float]:
    """Return in how many blocks of ``length`` tokens a sequence is, and what share of the work of as many full ones they have.

    Chunks: the last one is what remains. Packed documents, which stand for all of them: as many as their tokens make.
    """
    seq_len = shapes.run.seq_len
    whole, rest = divmod(seq_len, length)
    blocks = whole + (rest > 0)
    work = seq_len / length if shapes.run.document_tokens else whole + (rest / length) ** 2
    return blocks, work / blocks


def _whole_sequence(shapes: Shapes, count: Array, seq: Array) -> list[Op]:
    """Causal attention of ``seq`` tokens to themselves, within the window or the chunks of this kind of layer."""
    kind = shapes.kind
    if kind.chunk:
        blocks, share = _blocks(shapes, kind.chunk)
        return _flash(shapes, "attention", count * share, kind.chunk, kind.chunk, True, blocks)
    if kind.window:
        return _flash(shapes, "attention", count, seq, _seen(shapes), False, window=True, held=seq)
    return _flash(shapes, "attention", count, seq, seq, True)


def _flash_core(shapes: Shapes) -> list[Op]:
    """Flash attention; under context parallelism the causal work is shared evenly (zigzag order of the sequence).

    ring: one causal step on the rank's own part, then cp - 1 steps of half blocks, overlapped with sending keys and values for
    the next step (backward also sends their gradients). allgather: keys and values are all-gathered before attention, their
    gradients reduce-scattered after it. a2a: heads are exchanged for sequence, twice. a2a+ring: heads among neighbours, a ring
    across (hierarchical). torch's is a ring either way. Windows and chunks across ranks work by
    allgather and a2a only (solver.spec.feasibility). Sources: Liu et al. 2023 (arXiv
    2310.01889), Jacobs et al. 2023 (arXiv 2309.14509), Transformer Engine's and Llama 3's context parallelism as published.
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
            *_flash(shapes, "attention.shared", several, local, _seen(shapes), False, held=run.seq_len),
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
            else _flash(shapes, "attention", ones * share, local, local, True, blocks)
        ),
        *_flash(shapes, "attention.step", steps * share, local, np.maximum(local // 2, 1), False, blocks),
        *ring_ops(shapes, steps),
    ]


def _layout_copies(shapes: Shapes) -> list[Op]:
    """Copies between the framework's order of dimensions and the kernel's, in both directions; each is a read and a write."""
    of_qkv, of_context = shapes.framework.kernels.attention_layout_copies
    apart = _split_and_join_copies(shapes) if shapes.framework.kernels.splits_and_joins_kv else []
    if not of_qkv + of_context:
        return apart
    width = of_qkv * _qkv_width(shapes) + of_context * shapes.heads * shapes.model.value_head_dim
    several, twice = np.where(shapes.keys.micro_batch_size > 1, 1.0, 0.0), 2 * shapes.element
    copies = memory_bound("layout", ATTENTION, "copy", shapes.tokens * width, twice, twice, ATTENTION_CORE)
    return [*apart, *(replace(op, count=several) for op in copies)]


def _split_and_join_copies(shapes: Shapes) -> list[Op]:
    """Copies of splits_and_joins_kv, counted in torch. Forward: all three, then keys and values twice; backward: keys and
    values, then all three twice. The host's launches are in the time of nanotron's layers as measured."""
    kv = shapes.tokens * shapes.kv_heads * shapes.kv_width
    whole, twice = shapes.tokens * _qkv_width(shapes), 2 * shapes.element
    copies = [
        *memory_bound("layout.split", ATTENTION, "copy", whole + 2 * kv, twice, 0.0, ATTENTION_CORE),
        *memory_bound("layout.split", ATTENTION, "copy", 2 * whole + kv, 0.0, twice, ATTENTION_CORE),
    ]
    return [replace(op, launches=0.0) for op in copies]


def _unfused_core(shapes: Shapes) -> list[Op]:
    """Scores, softmax and context as separate kernels: the s^2 matrix goes through memory (2021-22 code, no flash attention).

    Its context parallelism all-gathers keys and values, whatever cp_comm is, because the kernels need them whole. Products of
    heads that no vector of 16 bytes divides run without tensor cores, at the rate of fp32 (docs/limits.md).
    """
    run, d, v = shapes.run, shapes.model.qk_head_dim, shapes.model.value_head_dim

    seq_q, seq_kv = run.seq_len // shapes.keys.cp, run.seq_len
    batch = shapes.keys.micro_batch_size * shapes.heads

    def gemm(name: str, phase: str, m: Array, n: Array, k: Array, layout: GemmLayout) -> Op:
        dims = {"m": m, "n": n, "k": k, "batch": batch, "layout": layout, "accumulate": False}
        again = ATTENTION_CORE if phase == FORWARD else ()
        scalar = shapes.element == HALF and (d % VECTOR or v % VECTOR)
        dtype = "fp32" if scalar else gemm_dtype(shapes, quantised=False)
        return Op(name, ATTENTION, LINEAR, phase, dims, recomputed_by=again, dtype=dtype)

    probabilities, wide = batch * seq_q * seq_kv, shapes.element == FP32
    forward, backward = (passes * shapes.element for passes in (WIDE_SOFTMAX if wide else (2, 3)))
    fused = wide or shapes.fused_softmax
    softmax = memory_bound(
        "softmax", ATTENTION, "softmax", probabilities, forward, backward, ATTENTION_CORE, fused, gradient="softmax_grad"
    )
    # dropout reads and writes the probabilities and a one-byte mask
    scores = probabilities * float(shapes.dropout)
    masked = 2 * shapes.element + 1
    dropout = memory_bound("dropout", ATTENTION, "residual", scores, masked, masked, ATTENTION_CORE)
    return [
        *kv_gather(shapes),
        gemm("scores", FORWARD, seq_q, seq_kv, d, GemmLayout.TN),
        *(soft_cap_ops(shapes, "scores", ATTENTION, probabilities, ATTENTION_CORE) if shapes.model.capped_scores else []),
        *softmax,
        *dropout,
        gemm("context", FORWARD, seq_q, v, seq_kv, GemmLayout.NN),
        gemm("context", INPUT_GRAD, seq_q, seq_kv, v, GemmLayout.TN),
        gemm("context_values", INPUT_GRAD, seq_kv, v, seq_q, GemmLayout.NT),  # no weights: nothing of it can be postponed
        gemm("scores", INPUT_GRAD, seq_q, d, seq_kv, GemmLayout.NN),
        gemm("scores_keys", INPUT_GRAD, seq_kv, d, seq_q, GemmLayout.NT),
    ]


def _ring(shapes: Shapes) -> np.ndarray:
    """Return the ranks of Transformer Engine's ring of keys and values; 1 where they go another way."""
    rings = (
        "ring" in shapes.run.cp_comm and shapes.run.attention == "flash" and not shapes.framework.kernels.torch_context_parallel
    )
    return shapes.keys.cp // shapes.heads_shared if rings else np.ones_like(shapes.keys.cp)


def _ring_kv(shapes: Shapes) -> np.ndarray:
    """Return the bytes of the keys and values of one step of a ring."""
    return shapes.kv_elements * shapes.element


def core_saved(shapes: Shapes) -> list[Saved]:
    """Return what the core saves: q, k, v, the context, and the log-sum-exp (or the score matrix).

    What an exchange between context-parallel ranks made of q, k and v is no longer the projections' output: all of it behind an
    all-to-all, and in a ring keys and values, of which the last ones received are kept (Transformer Engine's
    AttnFuncWithCPAndKVP2P and AttnFuncWithCPAndQKVOA2A, as read).
    """
    qkv = shapes.tokens * _qkv_width(shapes) * shapes.element
    exchanged = np.where(shapes.heads_shared > 1, qkv, np.where(_ring(shapes) > 1, _ring_kv(shapes), 0))
    context = shapes.context_elements * shapes.element

    copied = shapes.copies_kept_inputs  # by the output projection, so that the context is the core's alone, if not a gate's
    again = ATTENTION_CORE if copied and not shapes.model.attention_gate else WHOLE_LAYER
    saved = [Saved("qkv", qkv - exchanged), Saved("qkv_exchanged", exchanged), Saved("context", context, again)]
    if copied:
        quantised = shapes.context_elements * shapes.input_element
        saved.append(Saved("context_quantised", quantised))

    if shapes.run.attention == "flash":
        saved.append(Saved("log_sum_exp", shapes.tokens * shapes.heads * FP32, ATTENTION_CORE))
    else:
        scores = _scores(shapes)
        # softmax output, eager also in fp32; with dropout also its mask and its output (5 a s^2 b, arXiv 2205.05198 equation 2)
        per_score = 2 * shapes.element + 1 if shapes.dropout else shapes.element
        per_score += _wide_copy(shapes) + shapes.element * shapes.model.capped_scores  # the tangent's output
        saved.append(Saved(ATTENTION_SCORES, scores * per_score, ATTENTION_CORE))
    return saved


def core_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients alive in the core's backward pass.

    Flash: gradients of q, k, v and context, and the fp32 sum of the query gradients (FlashAttention 2); where keys and values
    are all-gathered, these of whole sequences, and their gradients except in a ring of torch. In a ring backward has two
    buffers of keys, values and their gradients each, and the sum of the queries' gradients; forward, which may take more, keys,
    values and context of every step (Transformer Engine's AttnFuncWithCPAndKVP2P, as read). Unfused: gradients of
    probabilities and scores, and their fp32 copies where softmax runs in eager kernels.
    """
    if shapes.run.attention == "flash":
        gradients = (shapes.heads + shapes.core_kv_heads) * shapes.kv_width * shapes.element
        whole = (1 if shapes.framework.kernels.torch_context_parallel else 2) * (shapes.run.cp_comm == "allgather")
        gathered = whole * np.where(shapes.keys.cp > 1, whole_kv(shapes), 0) * shapes.element
        backward = shapes.tokens * (gradients + shapes.heads * FP32 * shapes.model.qk_head_dim) + gathered
        ring, kv, heads = _ring(shapes), _ring_kv(shapes), shapes.tokens * shapes.heads * shapes.element
        backward = backward + np.where(ring > 1, 4 * kv + heads * shapes.model.qk_head_dim, 0)
        forward = np.where(ring > 1, ring * (kv + heads * shapes.model.value_head_dim), 0)
        return np.maximum(backward, forward)

    return _scores(shapes) * 2 * (shapes.element + _wide_copy(shapes))


def _wide_copy(shapes: Shapes) -> int:
    """Bytes of the fp32 copy of a 16-bit score that eager kernels take the softmax of."""
    return 0 if shapes.fused_softmax or shapes.element == FP32 else FP32


def _scores(shapes: Shapes) -> np.ndarray:
    """Return the scores of one micro batch on one rank, float64, which their number may need."""
    found: np.ndarray = 1.0 * shapes.tokens * shapes.heads * shapes.run.seq_len
    return found


def scores_buffer(shapes: Shapes) -> np.ndarray:
    """Return the bytes of the buffer in which Megatron's own unfused attention computes its scores."""
    return _scores(shapes) * shapes.element * (shapes.framework.memory.scores_buffer and shapes.run.attention == "unfused")
