"""Mamba-2: one projection, a short convolution, the state-space kernels with a gate, a norm of each group, one projection.

Sources: Dao and Gu 2024 (arXiv 2405.21060); Megatron-Core 0.16's ssm/mamba_mixer.py, as read, and mamba_ssm 2.2's
ops/triton/ssd_combined.py, as read: mamba_split_conv1d_scan_combined keeps the projection and runs the convolution again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.norm import norm_passes
from solver.layers.ops import memory_bound
from solver.layers.program import FORWARD, INPUT_GRAD, LINEARS, MAMBA, OTHERS, STATE_SPACE, Array, Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.layers.tensor_parallel import column_linears, row_linear
from solver.spec.recipes import FP32

#: Kernels that the host launches each way: the state-space kernels (predictor.kernels.state_space), the fp32 decays and biases
#: before them, and sums over heads of the gradients of decay, bias and skip after them.
SCAN_LAUNCHES = (9, 22)


def state_space_ops(shapes: Shapes) -> list[Op]:
    """Return the ops of one block, forward and backward."""
    elements, e = shapes.tokens * _values(shapes), shapes.element
    convolved = shapes.tokens * _convolved(shapes)
    several = shapes.keys.micro_batch_size > 1  # tokens of one sequence already lie one after the other
    return [
        *column_linears(shapes, MAMBA, shapes.model.hidden_size, {"win": _projected(shapes)}),
        *memory_bound("mamba.input", MAMBA, "copy", shapes.tokens * _projected(shapes) * several, 2 * e, 2 * e),
        *memory_bound("conv", MAMBA, "act", convolved, 2 * e, 5 * e),  # backward it runs again
        *_scan(shapes),
        *memory_bound("mamba.output", MAMBA, "copy", elements * several, 2 * e, 2 * e),
        *norm_passes(shapes, "out_norm", MAMBA, elements),
        *row_linear(shapes, "wo", MAMBA, shapes.model.hidden_size, _values(shapes)),
    ]


def _values(shapes: Shapes) -> Array:
    """Values of one token on one rank; the gate is as wide."""
    return shapes.model.mamba_width // shapes.split


def _convolved(shapes: Shapes) -> Array:
    return shapes.model.mamba_convolved // shapes.split


def _projected(shapes: Shapes) -> Array:
    """Columns of the projection: the gate, what the convolution runs over, and a step per head."""
    return _values(shapes) + _convolved(shapes) + shapes.model.mamba_num_heads // shapes.split


def _scan(shapes: Shapes) -> list[Op]:
    """The state-space kernels over whole sequences."""
    model = shapes.model
    dims = {
        "batch": shapes.keys.micro_batch_size,
        "seq": shapes.run.seq_len,
        "heads": model.mamba_num_heads // shapes.split,
        "head_dim": model.mamba_head_dim,
        "state_dim": model.mamba_state_dim,
        "groups": model.mamba_num_groups // shapes.split,
        "chunk": model.mamba_chunk_size,
    }
    forward = Op("state_space", MAMBA, STATE_SPACE, FORWARD, {**dims, "backward": False}, launches=SCAN_LAUNCHES[0])
    backward = {**dims, "backward": True}
    return [forward, replace(forward, phase=INPUT_GRAD, dims=backward, launches=SCAN_LAUNCHES[1])]


def state_space_saved(shapes: Shapes) -> list[Saved]:
    """Return what backward needs: the whole projection, the output before its gate, and the input and output of the norm."""
    elements, e = shapes.tokens * _values(shapes), shapes.element
    wide = [] if shapes.fused_norm else [Saved("out_norm_fp32", elements * FP32)]
    return [
        Saved("mamba_projected", shapes.tokens * _projected(shapes) * e),
        Saved("mamba_ungated", elements * e),
        Saved("mamba_context", elements * e),
        Saved("mamba_normed", elements * shapes.input_element),
        *wide,
    ]


def state_space_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes alive in the backward pass: the gradient of the projection, the convolution's output and its gradient,
    the gradient of the ungated output and, in fp32, states of all chunks and products of queries with keys, with theirs."""
    model = shapes.model
    states = model.mamba_width * model.mamba_state_dim / model.mamba_chunk_size
    wide = 2 * (states + model.mamba_num_groups * model.mamba_chunk_size) * FP32 / shapes.split
    narrow = (_projected(shapes) + 2 * _convolved(shapes) + _values(shapes)) * shapes.element
    return shapes.tokens * (narrow + wide)


def state_space_weights(shapes: Shapes) -> list[Weight]:
    """Return the weights of one rank: both projections; the convolution's, a decay, a bias and a skip per head, the norm's."""
    model = shapes.model
    linears = (_projected(shapes) + _values(shapes)) * model.hidden_size
    heads = 3 * model.mamba_num_heads // shapes.split
    others = _convolved(shapes) * (model.mamba_conv_kernel_dim + 1) + heads + _values(shapes)
    return [Weight("mamba.linears", linears, group=LINEARS), Weight("mamba.conv", others, OTHERS)]
