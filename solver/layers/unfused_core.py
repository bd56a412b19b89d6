"""The core of attention by separate kernels: scores, softmax, dropout, context; the scores go through memory."""

from __future__ import annotations

import numpy as np

from predictor.kernels.gemm_layout import GemmLayout
from solver.layers.context_parallel import kv_gather
from solver.layers.ops import ATTENTION_CORE, gemm_dtype, memory_bound
from solver.layers.program import ATTENTION, CONTEXT, FORWARD, INPUT_GRAD, LINEAR, SCORES, Array, Op, Saved
from solver.layers.shapes import Shapes
from solver.layers.soft_caps import soft_cap_ops
from solver.spec.alignment import VECTOR
from solver.spec.recipes import FP32, HALF

ATTENTION_SCORES = "attention_scores"  #: what unfused attention keeps of its scores

#: Reads and writes of a score, and of its gradient, in fp32, which fused kernels do not take. Forward: the mask in place, then
#: softmax. Backward: softmax 3; the mask was set on a view, so autograd (CopySlices) copies the gradient, clones it, masks a
#: clone and copies it back: 2 each, and 4 for the mask.
WIDE_SOFTMAX = (4, 13)


def unfused_core_ops(shapes: Shapes) -> list[Op]:
    """Return scores, softmax and context as separate kernels (code of 2021-22).

    Its context parallelism all-gathers keys and values, whatever cp_comm is, because the kernels need them whole. GEMMs of
    heads whose width is no multiple of 16 bytes run without tensor cores, at the rate of fp32 (docs/limits.md).
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
    dropped, with_mask = probabilities * float(shapes.dropout), 2 * shapes.element + 1  # read, written, a byte of the mask
    dropout = memory_bound("dropout", ATTENTION, "residual", dropped, with_mask, with_mask, ATTENTION_CORE)
    return [
        *kv_gather(shapes),
        gemm(SCORES, FORWARD, seq_q, seq_kv, d, GemmLayout.TN),
        *(soft_cap_ops(shapes, SCORES, ATTENTION, probabilities, ATTENTION_CORE) if shapes.model.capped_scores else []),
        *softmax,
        *dropout,
        gemm(CONTEXT, FORWARD, seq_q, v, seq_kv, GemmLayout.NN),
        gemm(CONTEXT, INPUT_GRAD, seq_q, seq_kv, v, GemmLayout.TN),
        gemm("context_values", INPUT_GRAD, seq_kv, v, seq_q, GemmLayout.NT),  # no weights: nothing of it can be postponed
        gemm(SCORES, INPUT_GRAD, seq_q, d, seq_kv, GemmLayout.NN),
        gemm("scores_keys", INPUT_GRAD, seq_kv, d, seq_q, GemmLayout.NT),
    ]


def scores_saved(shapes: Shapes) -> Saved:
    """Return what is kept of the scores: the softmax's output, in eager kernels also in fp32.

    With dropout also its mask and its output (5 a s^2 b, arXiv 2205.05198 equation 2); with soft caps the tangent's output.
    """
    per_score = 2 * shapes.element + 1 if shapes.dropout else shapes.element
    per_score += _wide_score_bytes(shapes) + shapes.element * shapes.model.capped_scores
    return Saved(ATTENTION_SCORES, _scores(shapes) * per_score, ATTENTION_CORE)


def unfused_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients of probabilities and scores, and of their fp32 copies where softmax is eager: [keys]."""
    return _scores(shapes) * 2 * (shapes.element + _wide_score_bytes(shapes))


def scores_buffer(shapes: Shapes) -> np.ndarray:
    """Return the bytes of the buffer in which Megatron's own unfused attention computes its scores: [keys]."""
    return _scores(shapes) * shapes.element * (shapes.framework.memory.scores_buffer and shapes.run.attention == "unfused")


def _wide_score_bytes(shapes: Shapes) -> int:
    """Bytes of the fp32 copy of a 16-bit score that eager kernels take the softmax of."""
    return 0 if shapes.fused_softmax or shapes.element == FP32 else FP32


def _scores(shapes: Shapes) -> np.ndarray:
    """Number of scores of one micro batch on one rank, as float64: they may exceed int64."""
    scores: np.ndarray = 1.0 * shapes.tokens * shapes.heads * shapes.run.seq_len
    return scores
