"""The core of attention, flash or unfused: kinds of windows, and the sequence exchange of context parallelism."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from solver.layers.ops import ATTENTION_CORE, filled, gemm_dtype, memory_bound
from solver.layers.program import FLASH_ATTN, FORWARD, INPUT_GRAD, LINEAR, Array, Op, Saved, message
from solver.layers.shapes import Shapes
from solver.spec.cluster import Placement
from solver.spec.recipes import FP32
from solver.spec.strategy import Recompute

MODULE = "attention"
#: Rows and columns of the tiles of a flash-attention kernel: a window that moves along the rows of a tile touches a tile more.
TILE = 128


#: Reads and writes of a score, and of its gradient, in fp32, which fused kernels do not take. Forward: the mask in place, then
#: softmax. Backward: softmax 3; the mask was set on a view, so autograd (CopySlices) copies the gradient, clones it, masks a
#: clone and copies it back: 2 each, and 4 for the mask.
WIDE_SOFTMAX = (4, 13)


def core_ops(shapes: Shapes) -> list[Op]:
    """Return the ops between the projections: from q, k and v after the rotary embedding to the context."""
    return [*_repeated(shapes), *(_flash_core(shapes) if shapes.run.attention == "flash" else _unfused_core(shapes))]


def _repeated(shapes: Shapes) -> list[Op]:
    """Copies of keys and values to as many heads as there are of queries, and the sums of their gradients."""
    if not shapes.framework.kernels.repeats_kv or np.all(shapes.heads == shapes.kv_heads):
        return []
    moved = shapes.tokens * (shapes.kv_heads + shapes.heads) * _kv_dims(shapes) * (shapes.heads > shapes.kv_heads)
    return memory_bound("kv.repeat", MODULE, "copy", moved, shapes.element, shapes.element)


def _kv_dims(shapes: Shapes) -> int:
    """Width of a key and its value."""
    return shapes.model.qk_head_dim + shapes.model.value_head_dim


def _qkv_width(shapes: Shapes) -> Array:
    """Width of one token's queries, keys and values on this rank."""
    return shapes.heads * shapes.model.qk_head_dim + shapes.core_kv_heads * _kv_dims(shapes)


def _heads_after_cp(shapes: Shapes) -> tuple[Array, Array]:
    shared = shapes.heads_shared
    return np.maximum(shapes.heads // shared, 1), np.maximum(shapes.core_kv_heads // shared, 1)


def _flash(shapes: Shapes, name: str, count: Array, seq_q: Array, seq_kv: Array, causal: bool, blocks: Array = 1) -> list[Op]:
    """One call of the kernel, forward and backward; blocks: parts of each sequence that it treats like sequences."""
    heads, kv_heads = _heads_after_cp(shapes)
    dims = {"batch": shapes.keys.micro_batch_size * blocks, "seq_q": seq_q, "seq_kv": seq_kv, "heads": heads,
            "kv_heads": kv_heads, "head_dim": shapes.model.qk_head_dim, "v_head_dim": shapes.model.value_head_dim,
            "causal": causal}  # fmt: skip

    queries = dims["batch"] * seq_q * heads
    gradients = queries * shapes.model.qk_head_dim + dims["batch"] * seq_kv * kv_heads * _kv_dims(shapes)
    written = {FORWARD: queries * shapes.model.value_head_dim, INPUT_GRAD: gradients}
    return [
        Op(name, MODULE, FLASH_ATTN, FORWARD, {**dims, "backward": False}, count=count, recomputed_by=ATTENTION_CORE),
        Op(name, MODULE, FLASH_ATTN, INPUT_GRAD, {**dims, "backward": True}, count=count),
        *filled(shapes, name, MODULE, written, count, ATTENTION_CORE),
    ]


def _seen(shapes: Shapes) -> int:
    """Return the keys that a query's tile touches on average under a window or in chunks, or half of the sequence.

    A window that moves along the tile's rows adds a tile; a whole causal triangle is never exceeded.
    """
    kind, seq_len = shapes.kind, shapes.run.seq_len
    moving = TILE if kind.window else 0
    return max(min(math.ceil(kind.seen_tokens(seq_len)) + moving, seq_len // 2), 1)


def _whole_sequence(shapes: Shapes, name: str, count: Array, seq: Array) -> list[Op]:
    """Causal attention of ``seq`` tokens to themselves, within the window or the chunks of this kind of layer."""
    kind = shapes.kind
    if kind.chunk:
        return _flash(shapes, name, count, kind.chunk, kind.chunk, True, blocks=-(-seq // kind.chunk))
    if kind.window:
        return _flash(shapes, name, count, seq, _seen(shapes), False)
    return _flash(shapes, name, count, seq, seq, True)


def _flash_core(shapes: Shapes) -> list[Op]:
    """Flash attention; under context parallelism the causal work is shared evenly (zigzag order of the sequence).

    ring: one causal step on the rank's own part, then cp - 1 steps of half blocks, overlapped with sending keys and values for
    the next step (backward also sends their gradients). allgather: keys and values are all-gathered before attention, their
    gradients reduce-scattered after it. a2a: heads are exchanged for sequence, twice. a2a+ring: heads among neighbours, a ring
    across (hierarchical). Windows and chunks across ranks work by
    allgather and a2a only (solver.spec.feasibility). Sources: Liu et al. 2023 (arXiv
    2310.01889), Jacobs et al. 2023 (arXiv 2309.14509), Transformer Engine's and Llama 3's context parallelism as published.
    """
    run, cp = shapes.run, shapes.keys.cp
    local, ones = run.seq_len // cp, np.ones(len(cp))
    copies = _layout_copies(shapes)
    if run.cp_comm == "a2a":
        return [*copies, *_context_exchange(shapes), *_whole_sequence(shapes, "attention", ones, run.seq_len)]
    if run.cp_comm == "allgather":
        single, several = np.where(cp == 1, 1.0, 0.0), np.where(cp > 1, 1.0, 0.0)
        return [
            *copies,
            *_kv_gather(shapes),
            *_kv_regather(shapes),
            *_whole_sequence(shapes, "attention", single, run.seq_len),
            *_flash(shapes, "attention.shared", several, local, _seen(shapes), False),
        ]
    ring = cp // shapes.heads_shared
    local, steps = run.seq_len // ring, (ring - 1) * 1.0
    return [
        *copies,
        *(_context_exchange(shapes) if run.cp_comm == "a2a+ring" else []),
        *_whole_sequence(shapes, "attention", ones, local),
        *_flash(shapes, "attention.step", steps, local, np.maximum(local // 2, 1), False),
        *(_ring_corrections(shapes, steps) if np.any(steps) else []),
        *_kv_ring(shapes, steps),
    ]


def _layout_copies(shapes: Shapes) -> list[Op]:
    """Copies between the framework's order of dimensions and the kernel's, in both directions; each is a read and a write."""
    of_qkv, of_context = shapes.framework.kernels.attention_layout_copies
    if not of_qkv + of_context:
        return []
    width = of_qkv * _qkv_width(shapes) + of_context * shapes.heads * shapes.model.value_head_dim
    several, twice = np.where(shapes.keys.micro_batch_size > 1, 1.0, 0.0), 2 * shapes.element
    copies = memory_bound("layout", MODULE, "copy", shapes.tokens * width, twice, twice, ATTENTION_CORE)
    return [replace(op, count=several) for op in copies]


#: Share of the rows, on average, that a step of a ring over zigzag parts of a causal sequence concerns: all or half of them.
RING_ROWS = 0.75


def _ring_corrections(shapes: Shapes, steps: np.ndarray) -> list[Op]:
    """Sums over the steps of a ring (Transformer Engine's context parallelism, as read).

    Forward rescales and adds each part of the context: the fp32 sum is read and written, the part read, 10 bytes an element.
    Backward adds each part of the gradients of q, k and v, in 16 bits: 6 bytes.
    """
    model = shapes.model
    context = shapes.tokens * shapes.heads * model.value_head_dim * RING_ROWS
    gradients = shapes.tokens * (shapes.heads * model.qk_head_dim + shapes.core_kv_heads * _kv_dims(shapes)) * RING_ROWS
    forward, backward = 2.0 * FP32 + shapes.element, 3.0 * shapes.element
    ops = [
        *memory_bound("attention.correction", MODULE, "residual", context, forward, 0.0, ATTENTION_CORE),
        *memory_bound("attention.gradients", MODULE, "residual", gradients, 0.0, backward),
    ]
    return [replace(op, count=steps) for op in ops]


def _kv_ring(shapes: Shapes, steps: np.ndarray) -> list[Op]:
    """Send of keys and values, overlapped with each step of the ring; backward also sends their gradients."""
    group = shapes.groups.cp_ring
    apart = group.inter > 1  # the slowest hop of the ring is its bottleneck
    hop = Placement(np.where(apart, 1, 2), np.where(apart, 2, 1), group.strided)
    size = shapes.tokens * shapes.core_kv_heads * _kv_dims(shapes) * shapes.element

    def send(phase: str, tensors: int, again: tuple[Recompute, ...]) -> Op:
        under = (f"attention.step.{phase}",)
        return Op("kv.send", MODULE, "p2p", phase, message(tensors * size, hop), "cp", steps, under, recomputed_by=again)

    return [send(FORWARD, 1, ATTENTION_CORE), send(INPUT_GRAD, 2, ())]


def _kv_gather(shapes: Shapes) -> list[Op]:
    """Context parallelism by all-gather.

    Keys and values of all cp ranks are all-gathered before attention, their gradients are reduce-scattered after it.
    """
    several = np.where(shapes.keys.cp > 1, 1.0, 0.0)
    dims = message(_whole_kv(shapes) * shapes.element, shapes.groups.cp)
    return [
        Op("kv.all_gather", MODULE, "all_gather", FORWARD, dims, "cp", several, recomputed_by=ATTENTION_CORE),
        Op("kv.reduce_scatter", MODULE, "reduce_scatter", INPUT_GRAD, dims, "cp", several),
    ]


def _whole_kv(shapes: Shapes) -> Array:
    """Elements of the keys and values of whole sequences, for this rank's heads."""
    return shapes.tokens * shapes.core_kv_heads * _kv_dims(shapes) * shapes.keys.cp


#: Passes over whole keys and values, or their gradients, beside the kernel: forward puts the gathered parts in order (read and
#: written); backward does so again, zeroes the gradients, adds those of a rank's two parts of the sequence (which together see
#: as much as all of it; read twice and written), and puts them back in the order of the ranks.
GATHERED_PASSES = (2, 2 + 1 + 3 + 2)


def _kv_regather(shapes: Shapes) -> list[Op]:
    """What fused attention adds to context parallelism by all-gather: only a rank's own keys and values are kept, so backward
    gathers them again. Source: Transformer Engine's AttnFuncWithCPAndKVAllGather, as read.
    """
    several = np.where(shapes.keys.cp > 1, 1.0, 0.0)
    dims = message(_whole_kv(shapes) * shapes.element, shapes.groups.cp)
    forward, backward = (passes * shapes.element for passes in GATHERED_PASSES)
    copies = memory_bound("kv.order", MODULE, "copy", _whole_kv(shapes), forward, backward, ATTENTION_CORE)
    return [
        Op("kv.regather", MODULE, "all_gather", INPUT_GRAD, dims, "cp", several),
        *(replace(op, count=several) for op in copies),
    ]


def exchange(
    shapes: Shapes, name: str, stream: str, sizes: dict[str, Array], where: np.ndarray, recomputed_by: tuple[Recompute, ...]
) -> list[Op]:  # fmt: skip
    """All-to-alls between sequence and heads, forward and mirrored in backward, with the copies that split and concatenate."""
    ops: list[Op] = []
    for tensor, size in sizes.items():
        for phase, again in ((FORWARD, recomputed_by), (INPUT_GRAD, ())):
            dims = message(size, shapes.groups.cp_heads if stream == "cp" else shapes.groups.tp)
            ops.append(Op(f"{name}.{tensor}", MODULE, "all2all", phase, dims, stream, where, recomputed_by=again))
            ops.append(
                Op(f"{name}.{tensor}.copy", MODULE, "memory_bound", phase, {"bytes": 4.0 * size}, count=where,
                   recomputed_by=again, variant="copy")
            )  # fmt: skip
    return ops


def _context_exchange(shapes: Shapes) -> list[Op]:
    """Context parallelism by all-to-all: this rank's heads of q, k, v and context over the cp group.

    It is part of the attention core (Transformer Engine's DotProductAttention), which runs it again where it is recomputed.
    """
    model, where = shapes.model, np.where(shapes.heads_shared > 1, 1.0, 0.0)
    kv = np.maximum(shapes.core_kv_heads, shapes.heads_shared) * _kv_dims(shapes)
    qkv = shapes.tokens * (shapes.heads * model.qk_head_dim + kv) * shapes.element
    context = shapes.tokens * shapes.heads * model.value_head_dim * shapes.element
    ops = exchange(shapes, "context_exchange", "cp", {"qkv": qkv, "context": context}, where, ATTENTION_CORE)
    # the context is kept as it was after its exchange, so backward exchanges it beside its gradient
    again = exchange(shapes, "context_exchange", "cp", {"kept_context": context}, where, ())
    return [*ops, *(op for op in again if op.phase == INPUT_GRAD)]


def _unfused_core(shapes: Shapes) -> list[Op]:
    """Scores, softmax and context as separate kernels: the s^2 matrix goes through memory (2021-22 code, no flash attention).

    Its context parallelism all-gathers keys and values, whatever cp_comm is, because the kernels need them whole.
    """
    run, d, v = shapes.run, shapes.model.qk_head_dim, shapes.model.value_head_dim

    seq_q, seq_kv = run.seq_len // shapes.keys.cp, run.seq_len
    batch = shapes.keys.micro_batch_size * shapes.heads

    def gemm(name: str, phase: str, m: Array, n: Array, k: Array, layout: int) -> Op:
        dims = {"m": m, "n": n, "k": k, "batch": batch, "layout": layout, "accumulate": False}
        again = ATTENTION_CORE if phase == FORWARD else ()
        return Op(name, MODULE, LINEAR, phase, dims, recomputed_by=again, dtype=gemm_dtype(shapes, quantised=False))

    probabilities, wide = batch * seq_q * seq_kv, shapes.element == FP32
    forward, backward = (passes * shapes.element for passes in (WIDE_SOFTMAX if wide else (2, 3)))
    fused = wide or shapes.framework.kernels.fused_softmax
    softmax = memory_bound("softmax", MODULE, "softmax", probabilities, forward, backward, ATTENTION_CORE, fused)
    # dropout reads and writes the probabilities and a one-byte mask
    scores = probabilities * float(shapes.dropout)
    masked = 2 * shapes.element + 1
    dropout = memory_bound("dropout", MODULE, "residual", scores, masked, masked, ATTENTION_CORE)
    return [
        *_kv_gather(shapes),
        gemm("scores", FORWARD, seq_q, seq_kv, d, 0),
        *softmax,
        *dropout,
        gemm("context", FORWARD, seq_q, v, seq_kv, 1),
        gemm("context", INPUT_GRAD, seq_q, seq_kv, v, 0),
        gemm("context_values", INPUT_GRAD, seq_kv, v, seq_q, 2),  # no weights: nothing of it can be postponed
        gemm("scores", INPUT_GRAD, seq_q, d, seq_kv, 1),
        gemm("scores_keys", INPUT_GRAD, seq_kv, d, seq_q, 2),
    ]


def core_saved(shapes: Shapes) -> list[Saved]:
    """Return what the core saves: q, k, v, the context, and the log-sum-exp (or the score matrix)."""
    qkv = shapes.tokens * _qkv_width(shapes) * shapes.element
    context = shapes.tokens * shapes.heads * shapes.model.value_head_dim * shapes.element

    saved = [Saved("qkv", qkv), Saved("context", context)]
    if shapes.input_element != shapes.element:  # the output projection keeps a copy of its own
        quantised = shapes.tokens * shapes.heads * shapes.model.value_head_dim * shapes.input_element
        saved.append(Saved("context_quantised", quantised))

    if shapes.run.attention == "flash":
        saved.append(Saved("log_sum_exp", shapes.tokens * shapes.heads * FP32, ATTENTION_CORE))
    else:
        scores = shapes.tokens * shapes.heads * shapes.run.seq_len
        # softmax output, eager also in fp32; with dropout also its mask and its output (5 a s^2 b, arXiv 2205.05198 equation 2)
        per_score = 2 * shapes.element + 1 if shapes.dropout else shapes.element
        per_score += _wide_copy(shapes)
        saved.append(Saved("probabilities", scores * per_score, ATTENTION_CORE))
    return saved


def core_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients alive in the core's backward pass.

    Flash: gradients of q, k, v and context, and the fp32 sum of the query gradients (FlashAttention 2); where keys and values
    are all-gathered, these and their gradients of whole sequences. Unfused: gradients of probabilities and scores, and their
    fp32 copies where softmax runs in eager kernels.
    """
    if shapes.run.attention == "flash":
        gradients = (shapes.heads + shapes.core_kv_heads) * _kv_dims(shapes) * shapes.element
        gathered = (shapes.run.cp_comm == "allgather") * np.where(shapes.keys.cp > 1, 2, 0) * _whole_kv(shapes) * shapes.element
        return shapes.tokens * (gradients + shapes.heads * FP32 * shapes.model.qk_head_dim) + gathered

    scores = shapes.tokens * shapes.heads * shapes.run.seq_len
    return scores * 2 * (shapes.element + _wide_copy(shapes))


def _wide_copy(shapes: Shapes) -> int:
    """Bytes of the fp32 copy of a 16-bit score that eager kernels take the softmax of."""
    return 0 if shapes.framework.kernels.fused_softmax or shapes.element == FP32 else FP32


def scores_buffer(shapes: Shapes) -> np.ndarray:
    """Return the bytes of the buffer in which Megatron's own unfused attention computes its scores."""
    scores: np.ndarray = shapes.tokens * shapes.heads * shapes.run.seq_len * shapes.element
    kept: np.ndarray = scores * (shapes.framework.memory.scores_buffer and shapes.run.attention == "unfused")
    return kept
