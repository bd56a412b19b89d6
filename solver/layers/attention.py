"""The attention block: projections, rotary embedding, the core, and the sequence exchange of ISP and context parallelism."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.ops import ATTENTION_CORE, WHOLE_LAYER, column_linears, gemm_dtype, memory_bound, row_linear
from solver.layers.program import (
    FLASH_ATTN,
    FORWARD,
    INPUT_GRAD,
    LINEAR,
    LINEARS,
    WEIGHT_GRAD,
    Array,
    Op,
    Saved,
    Weight,
    message,
)
from solver.layers.shapes import Shapes
from solver.spec.cluster import Placement
from solver.spec.precision import FP32
from solver.spec.strategy import Recompute, TpMode

MODULE = "attention"


def attention_ops(shapes: Shapes) -> list[Op]:
    """Return the ops of one attention block, forward and backward."""
    model = shapes.model
    q_width = model.num_attention_heads * model.head_dim
    core = _flash_core(shapes) if shapes.run.attention == "flash" else _unfused_core(shapes)
    return [
        *column_linears(shapes, MODULE, model.hidden_size, _projections(shapes)),
        *_qk_norm(shapes),
        *_head_exchange(shapes),
        *_rope(shapes),
        *core,
        *row_linear(shapes, "wo", MODULE, model.hidden_size, q_width // shapes.split),
    ]


def _qk_norm(shapes: Shapes) -> list[Op]:
    """Return the norms of queries and keys: one kernel, or a chain of eager ones."""
    if shapes.model.qk_norm == "none":
        return []
    fused = shapes.run.fused_norm or shapes.run.compile
    return memory_bound("qk_norm", MODULE, "norm", _qk_elements(shapes), 2 * shapes.element, 3 * shapes.element, fused=fused)


def _qk_elements(shapes: Shapes) -> Array:
    return shapes.tokens * (shapes.heads + shapes.kv_heads) * shapes.model.head_dim


def _rope(shapes: Shapes) -> list[Op]:
    """Rotary embedding of queries and keys: read and written once, by one kernel or by a chain of eager kernels."""
    if shapes.model.position != "rope":
        return []
    twice = 2 * shapes.element
    return memory_bound("rope", MODULE, "rope", _qk_elements(shapes), twice, twice, fused=shapes.fused_elementwise)


def _projections(shapes: Shapes) -> dict[str, Array]:
    """Columns of the q, k and v projections on one rank, as one GEMM or three.

    Key and value heads are replicated where tp exceeds them.
    """
    model = shapes.model
    q = model.num_attention_heads // shapes.split * model.head_dim
    kv = np.maximum(model.num_key_value_heads // shapes.split, 1) * model.head_dim
    return {"wqkv": q + 2 * kv} if shapes.framework.kernels.fused_qkv else {"wq": q, "wk": kv, "wv": kv}


def _columns(shapes: Shapes) -> Array:
    return sum(_projections(shapes).values())


def _heads_after_cp(shapes: Shapes) -> tuple[Array, Array]:
    if shapes.run.cp_comm != "a2a":
        return shapes.heads, shapes.kv_heads
    cp = shapes.keys.cp
    return np.maximum(shapes.heads // cp, 1), np.maximum(shapes.kv_heads // cp, 1)


def _flash(shapes: Shapes, name: str, count: Array, seq_q: Array, seq_kv: Array, causal: bool) -> list[Op]:
    heads, kv_heads = _heads_after_cp(shapes)
    d = shapes.model.head_dim
    dims = {"batch": shapes.keys.micro_batch_size, "seq_q": seq_q, "seq_kv": seq_kv, "heads": heads,
            "kv_heads": kv_heads, "head_dim": d, "v_head_dim": d, "causal": causal}  # fmt: skip
    return [
        Op(name, MODULE, FLASH_ATTN, FORWARD, {**dims, "backward": False}, count=count, recomputed_by=ATTENTION_CORE),
        Op(name, MODULE, FLASH_ATTN, INPUT_GRAD, {**dims, "backward": True}, count=count),
    ]


def _flash_core(shapes: Shapes) -> list[Op]:
    """Flash attention; under context parallelism the causal work is shared evenly (zigzag order of the sequence).

    ring: one causal step on the rank's own part, then cp - 1 steps of half blocks, overlapped with sending keys and values for
    the next step (backward also sends their gradients). allgather: keys and values are all-gathered before attention, their
    gradients reduce-scattered after it. a2a: heads are exchanged for sequence, twice. Sources: Liu et al. 2023 (arXiv
    2310.01889), Jacobs et al. 2023 (arXiv 2309.14509), Transformer Engine's and Llama 3's context parallelism as published.
    """
    run, cp = shapes.run, shapes.keys.cp
    local, ones = run.seq_len // cp, np.ones(len(cp))
    copies = _layout_copies(shapes)
    if run.cp_comm == "a2a":
        return [*copies, *_context_exchange(shapes), *_flash(shapes, "attention", ones, run.seq_len, run.seq_len, True)]
    if run.cp_comm == "allgather":
        single, several = np.where(cp == 1, 1.0, 0.0), np.where(cp > 1, 1.0, 0.0)
        gather, scatter = _kv_gather(shapes)
        return [
            *copies,
            gather,
            *_flash(shapes, "attention", single, run.seq_len, run.seq_len, True),
            *_flash(shapes, "attention.shared", several, local, np.maximum(run.seq_len // 2, 1), False),
            scatter,
        ]
    steps = (cp - 1) * 1.0
    return [
        *copies,
        *_flash(shapes, "attention", ones, local, local, True),
        *_flash(shapes, "attention.step", steps, local, np.maximum(local // 2, 1), False),
        *_kv_ring(shapes, steps),
    ]


def _layout_copies(shapes: Shapes) -> list[Op]:
    """Copies between the framework's order of dimensions and the kernel's, in both directions; each is a read and a write."""
    of_qkv, of_context = shapes.framework.kernels.attention_layout_copies
    if not of_qkv + of_context:
        return []
    heads = of_qkv * (shapes.heads + 2 * shapes.kv_heads) + of_context * shapes.heads
    several, twice = np.where(shapes.keys.micro_batch_size > 1, 1.0, 0.0), 2 * shapes.element
    copies = memory_bound("layout", MODULE, "copy", shapes.tokens * heads * shapes.model.head_dim, twice, twice, ATTENTION_CORE)
    return [replace(op, count=several) for op in copies]


def _kv_ring(shapes: Shapes, steps: np.ndarray) -> list[Op]:
    """Send of keys and values, overlapped with each step of the ring; backward also sends their gradients."""
    group = shapes.groups.cp
    apart = group.inter > 1  # the slowest hop of the ring is its bottleneck
    hop = Placement(np.where(apart, 1, 2), np.where(apart, 2, 1), group.strided)
    size = shapes.tokens * 2 * shapes.kv_heads * shapes.model.head_dim * shapes.element

    def send(phase: str, tensors: int, again: tuple[Recompute, ...]) -> Op:
        under = (f"attention.step.{phase}",)
        return Op("kv.send", MODULE, "p2p", phase, message(tensors * size, hop), "cp", steps, under, recomputed_by=again)

    return [send(FORWARD, 1, ATTENTION_CORE), send(INPUT_GRAD, 2, ())]


def _kv_gather(shapes: Shapes) -> list[Op]:
    """Context parallelism by all-gather.

    Keys and values of all cp ranks are all-gathered before attention, their gradients are reduce-scattered after it.
    """
    several = np.where(shapes.keys.cp > 1, 1.0, 0.0)
    whole = shapes.tokens * 2 * shapes.kv_heads * shapes.model.head_dim * shapes.element * shapes.keys.cp
    dims = message(whole, shapes.groups.cp)
    return [
        Op("kv.all_gather", MODULE, "all_gather", FORWARD, dims, "cp", several, recomputed_by=ATTENTION_CORE),
        Op("kv.reduce_scatter", MODULE, "reduce_scatter", INPUT_GRAD, dims, "cp", several),
    ]


def _exchange(shapes: Shapes, name: str, stream: str, sizes: dict[str, Array], where: np.ndarray) -> list[Op]:
    """All-to-alls between sequence and heads, forward and mirrored in backward, with the copies that split and concatenate."""
    ops: list[Op] = []
    for tensor, size in sizes.items():
        for phase, again in ((FORWARD, WHOLE_LAYER), (INPUT_GRAD, ())):
            dims = message(size, getattr(shapes.groups, stream))
            ops.append(Op(f"{name}.{tensor}", MODULE, "all2all", phase, dims, stream, where, recomputed_by=again))
            ops.append(
                Op(f"{name}.{tensor}.copy", MODULE, "memory_bound", phase, {"bytes": 4.0 * size}, count=where,
                   recomputed_by=again, memory_kind="copy")
            )  # fmt: skip
    return ops


def _head_exchange(shapes: Shapes) -> list[Op]:
    """ISP (DeepSpeed-Ulysses): all-to-alls of q, k, v and context between heads and sequence over the tensor group.

    They are not overlapped.
    """
    model, where = shapes.model, (shapes.keys.is_mode(TpMode.ISP) & (shapes.keys.tp > 1)).astype(float)
    q = shapes.local_tokens * model.num_attention_heads * model.head_dim * shapes.element
    kv = shapes.local_tokens * 2 * np.maximum(model.num_key_value_heads, shapes.keys.tp) * model.head_dim * shapes.element
    return _exchange(shapes, "exchange", "tp", {"q": q, "kv": kv, "context": q}, where)


def _context_exchange(shapes: Shapes) -> list[Op]:
    """Context parallelism by all-to-all: this rank's heads of q, k, v and context over the cp group."""
    d, where = shapes.model.head_dim, np.where(shapes.keys.cp > 1, 1.0, 0.0)
    qkv = shapes.tokens * (shapes.heads + 2 * np.maximum(shapes.kv_heads, shapes.keys.cp)) * d * shapes.element
    context = shapes.tokens * shapes.heads * d * shapes.element
    return _exchange(shapes, "context_exchange", "cp", {"qkv": qkv, "context": context}, where)


def _unfused_core(shapes: Shapes) -> list[Op]:
    """Scores, softmax and context as separate kernels: the s^2 matrix goes through memory (2021-22 code, no flash attention).

    Its context parallelism all-gathers keys and values, whatever cp_comm is, because the kernels need them whole.
    """
    run, d = shapes.run, shapes.model.head_dim
    seq_q, seq_kv = run.seq_len // shapes.keys.cp, run.seq_len
    batch = shapes.keys.micro_batch_size * shapes.heads

    def gemm(name: str, phase: str, m: Array, n: Array, k: Array, layout: int) -> Op:
        dims = {"m": m, "n": n, "k": k, "batch": batch, "layout": layout, "accumulate": False}
        again = ATTENTION_CORE if phase == FORWARD else ()
        return Op(name, MODULE, LINEAR, phase, dims, recomputed_by=again, dtype=gemm_dtype(shapes, quantised=False))

    probabilities, fused = batch * seq_q * seq_kv, shapes.framework.kernels.fused_softmax
    passes = 2 * shapes.element, 3 * shapes.element
    # dropout reads and writes the probabilities and a one-byte mask
    scores = batch * seq_q * seq_kv * float(shapes.framework.kernels.dropout)
    masked = 2 * shapes.element + 1
    dropout = memory_bound("dropout", MODULE, "residual", scores, masked, masked, ATTENTION_CORE)
    return [
        *_kv_gather(shapes),
        gemm("scores", FORWARD, seq_q, seq_kv, d, 0),
        *memory_bound("softmax", MODULE, "softmax", probabilities, *passes, ATTENTION_CORE, fused=fused),
        *dropout,
        gemm("context", FORWARD, seq_q, d, seq_kv, 1),
        gemm("context", INPUT_GRAD, seq_q, seq_kv, d, 0),
        gemm("context", WEIGHT_GRAD, seq_kv, d, seq_q, 2),
        gemm("scores", INPUT_GRAD, seq_q, d, seq_kv, 1),
        gemm("scores", WEIGHT_GRAD, seq_kv, d, seq_q, 2),
    ]


def attention_saved(shapes: Shapes) -> list[Saved]:
    """Return the saved tensors: q, k, v after the rotary embedding, the context, and the log-sum-exp (or the score matrix)."""
    d = shapes.model.head_dim
    qkv = shapes.tokens * (shapes.heads + 2 * shapes.kv_heads) * d * shapes.element
    context = shapes.tokens * shapes.heads * d * shapes.element
    saved = [Saved("qkv", qkv), Saved("context", context)]
    if shapes.model.qk_norm != "none":
        saved.append(Saved("qk_norm_input", _qk_elements(shapes) * shapes.element))
    if shapes.run.attention == "flash":
        saved.append(Saved("log_sum_exp", shapes.tokens * shapes.heads * FP32, ATTENTION_CORE))
    else:
        scores = shapes.tokens * shapes.heads * shapes.run.seq_len
        # softmax output, eager also in fp32; with dropout also its mask and its output (5 a s^2 b, arXiv 2205.05198 equation 2)
        per_score = 2 * shapes.element + 1 if shapes.framework.kernels.dropout else shapes.element
        per_score += 0 if shapes.framework.kernels.fused_softmax else FP32
        saved.append(Saved("probabilities", scores * per_score, ATTENTION_CORE))
    return saved


def attention_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients alive in the core's backward pass.

    Flash: gradients of q, k, v and context, and the fp32 sum of the query gradients (FlashAttention 2). Unfused: gradients of
    probabilities and scores, and their fp32 copies where softmax runs in eager kernels.
    """
    if shapes.run.attention == "flash":
        elements = shapes.tokens * (2 * shapes.heads + 2 * shapes.kv_heads) * shapes.element
        return (elements + shapes.tokens * shapes.heads * FP32) * shapes.model.head_dim
    scores = shapes.tokens * shapes.heads * shapes.run.seq_len
    return scores * 2 * (shapes.element + (0 if shapes.framework.kernels.fused_softmax else FP32))


def attention_weights(shapes: Shapes) -> list[Weight]:
    """Return the projection weights (and biases) of one rank; ISP shards the weights of the whole block over wp."""
    model, isp = shapes.model, shapes.keys.is_mode(TpMode.ISP)
    q_width = model.num_attention_heads * model.head_dim
    share = np.where(isp, shapes.keys.wp, 1)
    bias = _columns(shapes) * model.qkv_bias + model.hidden_size * model.output_bias
    linears = _columns(shapes) * model.hidden_size + q_width // shapes.split * model.hidden_size
    return [Weight("attention.linears", linears / share, group=LINEARS), Weight("attention.bias", bias / share)]
