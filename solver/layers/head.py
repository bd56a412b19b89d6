"""Program of the head: final norm, vocabulary projection, cross entropy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.adapters import frozen_ops
from solver.layers.norm import norm_ops
from solver.layers.ops import linear, memory_bound
from solver.layers.program import FORWARD, INPUT_GRAD, VOCABULARY, WEIGHT_GRAD, LayerKeys, LayerProgram, Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.layers.soft_caps import soft_cap_ops
from solver.layers.tensor_parallel import tp_collective, with_sequence_copies
from solver.spec.choices import TpMode
from solver.spec.cluster import Cluster
from solver.spec.model import ModelSpec
from solver.spec.recipes import FP32, HALF
from solver.spec.run import Run

#: Bytes per logit of Megatron-Core's compiled functions, between which it all-reduces (core/fusions/fused_cross_entropy.py and
#: tensor_parallel/cross_entropy.py). Forward: to fp32 with the maximum 6, less it in place 8, exponentials 8, their sum 4,
#: divided by it 8. Backward: the probabilities copied for the target's update 8, times the loss's gradient 8, to 16 bits 6.
#: Measured of Megatron-Core 0.16 on H100 (linkedin/Liger-Kernel 7097ab9,
#: benchmark/data/all_benchmark_data_megatron.csv: 8,192 x 131,072 logits take 11.8 ms, 20.0 with the backward pass), at the
#: rate of copies: 34 and 24 bytes.
NATIVE_LOSS_BYTES, NATIVE_LOSS_KERNELS = (34.0, 24.0), 3


def head_program(keys: LayerKeys, model: ModelSpec, run: Run, cluster: Cluster) -> LayerProgram:
    """Return the program of the head.

    The vocabulary is split by columns; the loss works on the sharded logits or, in some frameworks, on all-gathered logits.
    """
    shapes = Shapes.of(keys, model, run, cluster)
    shard = shapes.keeps_shard | keys.is_mode(TpMode.ISP)
    stream = shapes.norm_tokens * model.hidden_size * shapes.stream_element
    vocab_input = np.where(shard, shapes.local_tokens, shapes.tokens) * model.hidden_size * shapes.element
    probabilities, transient = _loss_bytes(shapes)
    # the tangent's output; with the projection a chunk's is gone with the chunk
    tangents = shapes.tokens * shapes.vocab * shapes.element * (model.capped_logits and not _with_projection(shapes))
    saved = (
        Saved("final_norm_input", stream, dropped_by=()),
        Saved("vocab_input", vocab_input, dropped_by=()),
        Saved("probabilities", probabilities + tangents, dropped_by=()),
    )
    weights = (
        Weight("final_norm", model.norm_parameters),
        Weight(VOCABULARY, shapes.vocab * (model.hidden_size + model.head_bias)),
    )
    capped = soft_cap_ops(shapes, "logits", "loss", shapes.tokens * shapes.vocab, ()) if model.capped_logits else []
    ops = frozen_ops(shapes, [*norm_ops(shapes, "final_norm"), *_vocab_ops(shapes), *capped, *_loss_ops(shapes)])
    ops = with_sequence_copies(shapes, ops)
    output = np.zeros(len(keys)) if _with_projection(shapes) else _logits(shapes) * shapes.element
    return LayerProgram(
        "head",
        keys,
        tuple(ops),
        saved,
        weights,
        transient_bytes=transient,
        output_bytes=output,
        output_beside_loss=output * (shapes.framework.memory.drops_logits and not _holds_logits(shapes)),
    )


def _vocab_ops(shapes: Shapes) -> list[Op]:
    """The projection as a column-parallel linear: all-gathered input under a sequence split, reduced input gradient."""
    mtp, isp = shapes.keys.is_mode(TpMode.MTP), shapes.keys.is_mode(TpMode.ISP)
    sequence = shapes.sequence_split | isp
    overlapped, exposed = shapes.overlaps_backward_collectives, shapes.exposed_backward
    wgrad, dgrad = (("vocab.weight_grad",), ("vocab.input_grad",)) if overlapped else ((), ())
    return [
        tp_collective(shapes, "vocab.all_gather", "head", "all_gather", FORWARD, sequence),
        *_in_chunks(
            shapes,
            linear(shapes, VOCABULARY, "head", shapes.vocab, shapes.model.hidden_size, tokens=shapes.tokens, quantised=False),
        ),
        tp_collective(shapes, "vocab.reduce_scatter", "head", "reduce_scatter", INPUT_GRAD, sequence, wgrad, exposed),
        tp_collective(shapes, "vocab.all_reduce", "head", "all_reduce", INPUT_GRAD, mtp, wgrad, shapes.exposed_all_reduce),
        tp_collective(shapes, "vocab.regather", "head", "all_gather", INPUT_GRAD, shapes.keeps_shard | isp, dgrad, exposed),
    ]


def _with_projection(shapes: Shapes) -> bool:
    return shapes.run.cross_entropy_fusion and shapes.run.cross_entropy_fusion_impl == "linear"


def _in_chunks(shapes: Shapes, gemms: list[Op]) -> list[Op]:
    """Return the projection's GEMMs; where the loss is fused with it, over chunks of tokens with as many logits as all inputs
    have elements (Hsu et al. 2024, Liger Kernel, arXiv 2410.10989 section 3.2): their gradients follow at once."""
    if not _with_projection(shapes):
        return gemms
    chunks = np.maximum(shapes.vocab // shapes.model.hidden_size, 1)
    return [replace(op, dims={**op.dims, "parts": chunks}) if op.phase != WEIGHT_GRAD else op for op in gemms]


def _logits(shapes: Shapes) -> np.ndarray:
    """Number of logits that one rank's loss works on: its vocabulary shard, or all where the framework all-gathers them."""
    return shapes.tokens * shapes.vocab * (1 if shapes.framework.tensor_parallel.vocab_parallel_loss else shapes.keys.tp)


def _loss_ops(shapes: Shapes) -> list[Op]:
    """Ops of the loss. Fused (or compiled): logits read and gradient written, twice. Eager: a chain of kernels in fp32.

    On sharded logits the maximum, the sum of exponentials and the target's logit are all-reduced, one fp32 per token each;
    natively the last two are one message.
    """
    logits, everywhere = _logits(shapes), shapes.keys.tp > 1
    native = shapes.run.cross_entropy_fusion and shapes.run.cross_entropy_fusion_impl == "native"
    if shapes.framework.tensor_parallel.vocab_parallel_loss:
        size = shapes.tokens * FP32
        parts = {"max": size, "sum": 2 * size} if native else dict.fromkeys(("max", "sum", "target"), size)
        exchange = [
            tp_collective(shapes, f"loss.{part}", "loss", "all_reduce", FORWARD, everywhere, size=sent)
            for part, sent in parts.items()
        ]
    else:
        sent = logits * shapes.element
        exchange = [tp_collective(shapes, "logits.all_gather", "loss", "all_gather", FORWARD, everywhere, size=sent)]
    if native:
        ops = memory_bound("cross_entropy", "loss", "residual", logits, *NATIVE_LOSS_BYTES, ())
        return [*(replace(op, launches=float(NATIVE_LOSS_KERNELS)) for op in ops), *exchange]
    exchange += _copied_logits(shapes, logits)
    if passes := shapes.framework.kernels.loss_metric:
        exchange += memory_bound("metric", "loss", "residual", logits, passes * FP32, 0.0, ())
    fused = shapes.run.cross_entropy_fusion or _compiled(shapes)
    if shapes.framework.kernels.wide_logits and fused:  # the chain of kernels has a cast of its own
        cast = shapes.element + FP32
        exchange += memory_bound("logits.cast", "loss", "residual", logits, cast, cast, ())
        return [*memory_bound("cross_entropy", "loss", "cross_entropy", logits, 2 * FP32, 2 * FP32, ()), *exchange]
    twice = 2 * shapes.element
    return [*memory_bound("cross_entropy", "loss", "cross_entropy", logits, twice, twice, (), fused=fused), *exchange]


def _copied_logits(shapes: Shapes, logits: np.ndarray) -> list[Op]:
    """Copies of all-gathered logits from torch's buffer to its list and on to one tensor, and of the gradient's share."""
    if not shapes.framework.tensor_parallel.joins_logits:
        return []
    everywhere, once = (shapes.keys.tp > 1) * 1.0, 2.0 * shapes.element
    forward = memory_bound("logits.join", "loss", "copy", logits * everywhere, 2 * once, 0.0, ())
    return [*forward, *memory_bound("logits.split", "loss", "copy", logits * everywhere / shapes.keys.tp, 0.0, once, ())]


def _compiled(shapes: Shapes) -> bool:
    stated = shapes.run.compile_loss
    return shapes.run.compile and shapes.framework.kernels.compiled_loss if stated is None else stated


def _holds_logits(shapes: Shapes) -> bool:
    """Whether the loss itself works in the 16-bit logits or keeps them."""
    return shapes.run.cross_entropy_fusion or _compiled(shapes)


def _loss_bytes(shapes: Shapes) -> tuple[np.ndarray, np.ndarray]:
    """Return (kept, short-lived) bytes of the loss.

    Fused: the 16-bit logits, which become their gradient, and nothing else; Megatron's compiled functions do not work in place,
    and hold two fp32 copies of the logits beside them. Compiled: the logits, later also their gradient.
    With the projection: never all logits.
    Cast to fp32: the fp32 logits, which their gradient overwrites, and as much again while log-softmax works.
    Unfused, Megatron's: fp32 probabilities, which become their gradient in place, in addition to the 16-bit logits (as read).
    Unfused, torch's: the log-softmax output in fp32, in addition the gradients of loss and of log-softmax in fp32 and, unless
    they are dropped (torchtitan's train.py, transformers' compute_loss; traced with torch 2.13), the 16-bit logits; on sharded
    logits one more (torch/distributed/tensor/parallel/loss.py: zeros, their sum with the probabilities, its product).
    Megatron's linears also return to autograd an empty 16-bit gradient of the vocabulary's weight while the logits' gradient is
    alive, unless one stays beside the gradients; those that do not accumulate return a real one.
    """
    logits, memory = _logits(shapes), shapes.framework.memory
    passing = memory.vocab_dummy_gradient and not memory.dummy_gradients  # those that stay are beside the gradients
    returned = passing or shapes.run.gradient_accumulation_fusion is False
    dummy = shapes.vocab * shapes.model.hidden_size * HALF * (returned and not shapes.run.lora_rank)
    if _with_projection(shapes):  # the gradient of the input is kept; the logits of one chunk come and go, also in fp32
        inputs = shapes.tokens * shapes.model.hidden_size
        return inputs * shapes.element, inputs * (shapes.element + FP32) + dummy
    if shapes.framework.kernels.wide_logits:
        wide = shapes.framework.kernels.loss_metric or memory.keeps_exponentials
        per_logit = FP32 if wide else shapes.element  # exponentials for a log; later the gradient
        return logits * FP32, np.maximum(logits * per_logit, dummy)
    if shapes.run.cross_entropy_fusion:
        if shapes.run.cross_entropy_fusion_impl == "native":
            return logits * FP32, np.maximum(logits * (shapes.element + FP32), dummy)
        return logits * shapes.element, dummy
    if _compiled(shapes):
        return logits * shapes.element, logits * shapes.element
    sharded = shapes.framework.tensor_parallel.vocab_parallel_loss & (shapes.keys.tp > 1)
    copies = np.where(sharded, 3, 2) if shapes.framework.kernels.torch_loss else 0
    working = logits * (shapes.element * (not memory.drops_logits) + FP32 * copies)
    # the fp32 probabilities are freed before the head's backward pass
    return logits * FP32, np.maximum(working, dummy + logits * (shapes.element - FP32))
