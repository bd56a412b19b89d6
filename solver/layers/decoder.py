"""Programs of a decoder layer and of the embedding (the head is in solver/layers/head.py)."""

from __future__ import annotations

import numpy as np

from solver.layers.adapters import adapted_ops, adapter_weights, adapters_saved, frozen_ops
from solver.layers.block import attention_block, mlp_block
from solver.layers.graphs import graphed_ops
from solver.layers.moe import token_buffer
from solver.layers.norm import norm_ops, unfused_norm_saved
from solver.layers.offloading import offloaded_saved
from solver.layers.ops import memory_bound
from solver.layers.program import (
    COMPUTE,
    DOWN_LINEAR,
    FORWARD,
    INPUT_GRAD,
    OUTPUT_LINEAR,
    QKV_LINEARS,
    UP_LINEARS,
    LayerKeys,
    LayerProgram,
    Op,
    Saved,
    Weight,
    message,
    weight_gemms,
)
from solver.layers.recompute import recomputed_ops, recomputed_saved
from solver.layers.shapes import Shapes
from solver.layers.swizzles import with_swizzles
from solver.layers.tensor_parallel import tp_collective, with_sequence_copies
from solver.layers.unfused_core import scores_buffer
from solver.spec.choices import TpMode
from solver.spec.cluster import Cluster
from solver.spec.layer_kinds import PLAIN, LayerKind
from solver.spec.model import ModelSpec
from solver.spec.model_size import norms_of
from solver.spec.precision import GRAD_BYTES
from solver.spec.run import Run


def layer_program(keys: LayerKeys, model: ModelSpec, run: Run, cluster: Cluster, kind: LayerKind = PLAIN) -> LayerProgram:
    """Return the program of one decoder layer: norm, attention, residual, norm, MLP, residual; pre-norm order.

    Models with one norm per layer feed it to attention and MLP; those with four also norm what these return. A layer may be one
    of both blocks, with its norm and residual addition.
    """
    shapes = Shapes.of(keys, model, run, cluster, kind)
    attention, mlp, after = attention_block(model, kind), mlp_block(model, kind), model.norms_per_layer == 4
    of_attention = [
        *norm_ops(shapes, "norm1"),
        *attention.ops(shapes),
        *(norm_ops(shapes, "attention_norm") if after else []),
        *_residual(shapes, "residual1"),
    ]
    of_mlp = [
        *(norm_ops(shapes, "norm2") if model.norms_per_layer > 1 else []),
        *mlp.ops(shapes),
        *(norm_ops(shapes, "mlp_norm") if after else []),
        *_residual(shapes, "residual2"),
    ]
    ops = [*(of_attention if kind.mixes_tokens else []), *(of_mlp if kind.has_mlp else [])]
    saved = _saved(shapes, attention.saved(shapes), mlp.saved(shapes), kind)
    norms = Weight("norms", norms_of(model, kind) * model.norm_parameters + model.qk_norm_parameters * kind.softmax)
    weights = [*attention.weights(shapes), *mlp.weights(shapes), norms, *adapter_weights(shapes, ops)]
    saved = [*offloaded_saved(shapes, recomputed_saved(shapes, ops, saved)), *adapters_saved(shapes, ops)]
    ops = graphed_ops(shapes, with_swizzles(shapes, with_sequence_copies(shapes, recomputed_ops(shapes, ops))))
    gathers, ops = _weight_gathers(shapes, tuple(frozen_ops(shapes, ops))), adapted_ops(shapes, ops)
    stream = shapes.norm_tokens * model.hidden_size * shapes.stream_element
    working = stream + np.maximum(mlp.working_bytes(shapes), attention.working_bytes(shapes))
    buffer = scores_buffer(shapes) * kind.softmax + token_buffer(shapes)
    return LayerProgram("layer", keys, (*ops, *gathers), tuple(saved), tuple(weights), buffer, working)


def _saved(shapes: Shapes, of_attention: list[Saved], of_mlp: list[Saved], kind: LayerKind) -> list[Saved]:
    """Return what a layer keeps without recomputation.

    A column linear keeps its input: the local shard, or all of it (MTP always, MSP where the framework does so). Linears that
    are not fused keep quantised copies of their own: latent attention's two down projections of norm1's output, and of norm2's
    perhaps the shared expert's, beside the 16-bit input that the router keeps (Megatron-Core's moe_utils.py).
    """
    model, shard = shapes.model, shapes.keeps_shard | shapes.keys.is_mode(TpMode.ISP)
    linear_input = np.where(shard, shapes.local_tokens, shapes.tokens) * model.hidden_size * shapes.input_element
    stream = shapes.norm_tokens * model.hidden_size * shapes.stream_element
    quantised = shapes.input_element != shapes.element
    shared = linear_input * (shapes.copies_kept_inputs and model.shared_expert_intermediate_size > 0)
    mlp_input = stream + shared if quantised and kind.experts else linear_input
    of_queries, of_gate = _copies(shapes)
    first = [Saved("norm1_output", linear_input * (of_queries + (quantised and model.has_latent_attention)))]
    second = [Saved("residual1", stream)] if kind.blocks == 2 else []
    return [
        Saved("layer_input", stream, dropped_by=()),
        *(first if kind.mixes_tokens else []),
        *of_attention,
        *([*second, Saved("norm2_output", mlp_input * of_gate)] if kind.has_mlp and model.norms_per_layer > 1 else []),
        *of_mlp,
        *([Saved("branch_outputs", kind.blocks * stream)] if model.norms_per_layer == 4 else []),
        *_dropout_masks(shapes),
        *unfused_norm_saved(shapes),
    ]


def _copies(shapes: Shapes) -> tuple[np.ndarray, np.ndarray]:
    """Return how many copies of the norms' outputs the linears after them keep, [keys]: each its own of an fp32 one, and of
    what each all-gathers itself and keeps whole (InternEvo's msp: modules/linear.py, save_total_input)."""
    kernels, group = shapes.framework.kernels, shapes.framework.tensor_parallel
    projections, ups = 1 if kernels.fused_qkv else 3, 1 if kernels.fused_gate_up else shapes.model.up_matrices
    if shapes.wide_stream:
        return np.full(len(shapes.keys), projections), np.full(len(shapes.keys), ups)
    apart = shapes.sequence_split & ~shapes.keeps_shard & ~shapes.gathered_by_norm & (not group.shares_input)
    return np.where(apart, projections, 1), np.where(apart, ups, 1)


def embedding_program(keys: LayerKeys, model: ModelSpec, run: Run, cluster: Cluster) -> LayerProgram:
    """Return the program of the token (and learned position) lookup; the table is split over the tensor group."""
    shapes = Shapes.of(keys, model, run, cluster)
    elements = shapes.tokens * model.hidden_size
    mtp, isp = keys.is_mode(TpMode.MTP), keys.is_mode(TpMode.ISP)
    positions = model.learned_positions(run.seq_len) * model.hidden_size
    ops = [
        # the lookup reads and writes each element; its gradient is added to a row of the table: read twice, written once
        *memory_bound("lookup", "embedding", "embedding", elements, 2 * shapes.stream_element, 4 * shapes.stream_element),
        *_table_gradient(shapes),
        tp_collective(shapes, "sum", "embedding", "all_reduce", FORWARD, mtp),
        tp_collective(shapes, "sum", "embedding", "reduce_scatter", FORWARD, shapes.sequence_split),
        tp_collective(shapes, "gather", "embedding", "all_gather", FORWARD, isp),
        tp_collective(shapes, "gather", "embedding", "all_gather", INPUT_GRAD, shapes.sequence_split | isp),
        *(norm_ops(shapes, "embedding_norm") if model.embedding_norm else []),
    ]
    weights = (
        Weight("embedding", shapes.vocab * model.hidden_size),
        Weight("positions", positions),
        Weight("embedding_norm", model.embedding_norm * model.norm_parameters),
    )
    if run.lora_rank:  # nothing before the first adapter has a gradient
        ops = [op for op in ops if op.phase == FORWARD]
    return LayerProgram("embedding", keys, tuple(with_sequence_copies(shapes, ops)), (), weights)


def _table_gradient(shapes: Shapes) -> list[Op]:
    """The gradient of the whole table that autograd makes of a micro batch: zeroed, then, where GEMMs accumulate their weights'
    gradients themselves, added to the buffer by a kernel (elsewhere it is accumulated with all others).
    """
    table = shapes.vocab * shapes.model.hidden_size
    added = (shapes.element + 2 * GRAD_BYTES[shapes.run.grad_dtype]) * shapes.accumulates
    return memory_bound("table", "embedding", "residual", table, 0.0, shapes.element + added)


def _dropout_masks(shapes: Shapes) -> list[Saved]:
    """Masks of the residual branches, one byte per element."""
    elements = shapes.norm_tokens * shapes.model.hidden_size
    return [Saved("dropout_masks", shapes.kind.blocks * elements)] if shapes.dropout else []


def _residual(shapes: Shapes, name: str) -> list[Op]:
    """Residual addition: two reads and a write in forward; backward adds the two gradients of the stream.

    Dropout is fused into the addition: its mask is one more byte, and its gradient one more kernel. Of an fp32 stream the
    branch's gradient is cast to 16 bits.
    """
    elements, mask = shapes.norm_tokens * shapes.model.hidden_size, float(shapes.dropout)
    e, stream = shapes.element, shapes.stream_element
    backward = 3 * stream + (stream + e) * shapes.wide_stream + mask * (2 * e + 1)
    return memory_bound(name, "residual", "residual", elements, 2 * stream + e + mask, backward)


def _weight_gathers(shapes: Shapes, ops: tuple[Op, ...]) -> list[Op]:
    """ISP with wp > 1: each linear's weight is all-gathered in forward and backward, its gradient is reduce-scattered.

    With overlap_weight_gather, the next block's weights are all-gathered while this block runs its output projection and MLP.
    Each linear waits for its own, so that all but the first ones' may arrive while the next block runs, too. Gradients are
    reduce-scattered during the backward pass; a recomputing backward pass reuses the weights that it all-gathered. Without it,
    everything is exposed and recomputation all-gathers a third time. Traffic repeats every micro batch. Source: InternEvo's
    isp.py, as read.
    """
    keys, overlap = shapes.keys, shapes.run.overlap_weight_gather
    where = np.where(keys.is_mode(TpMode.ISP) & (keys.wp > 1), 1.0, 0.0)
    linears = weight_gemms(ops)
    after_attention = (OUTPUT_LINEAR, "norm2", *UP_LINEARS, "activation", DOWN_LINEAR, "residual1", "residual2")
    computed = [op for op in ops if op.stream == COMPUTE]  # of a norm with several kernels all have one label
    whole = tuple(dict.fromkeys(op.label for op in computed if op.phase == FORWARD))
    before = tuple(dict.fromkeys(op.label for op in computed if op.phase == FORWARD and op.name in after_attention))
    backward = tuple(dict.fromkeys(op.label for op in computed if op.phase != FORWARD))
    gathers: list[Op] = []
    for gemm in linears:
        dims = message(1.0 * gemm.dims["n"] * gemm.dims["k"] * shapes.element, shapes.groups.wp)
        forward = before if gemm.name in QKV_LINEARS else whole
        for suffix, op, phase, under in (
            ("weights", "all_gather", FORWARD, forward),
            ("weights", "all_gather", INPUT_GRAD, backward),
            ("gradients", "reduce_scatter", INPUT_GRAD, backward),
        ):
            again = () if overlap or phase != FORWARD else gemm.recomputed_by
            gathers.append(
                Op(
                    f"{gemm.name}.{suffix}",
                    gemm.module,
                    op,
                    phase,
                    dims,
                    "wp",
                    where,
                    under if overlap else (),
                    recomputed_by=again,
                )
            )
    return gathers
