"""The MLP block: up (and gate) projection, activation, down projection."""

from __future__ import annotations

import numpy as np

from solver.ops import column_linear, memory_bound, row_linear
from solver.program import BF16, Op, Saved, Weight
from solver.shapes import Shapes
from solver.strategy import TpMode

MODULE = "mlp"


def mlp_ops(shapes: Shapes) -> list[Op]:
    """Ops of one MLP block; gate and up are one GEMM or two as the framework does it."""
    model = shapes.model
    width = model.intermediate_size // shapes.split
    if not model.gated_mlp:
        columns = column_linear(shapes, "w1", MODULE, width, model.hidden_size)
    elif shapes.framework.fused_gate_up:
        columns = column_linear(shapes, "w13", MODULE, 2 * width, model.hidden_size)
    else:
        columns = [op for name in ("w1", "w3") for op in column_linear(shapes, name, MODULE, width, model.hidden_size)]
    elements = shapes.linear_tokens * width
    # gated: read gate and up, write one; backward reads its gradient too and writes two. plain: one in, one out.
    kind, forward, backward = ("gated_act", 3, 5) if model.gated_mlp else ("act", 2, 3)
    if model.gated_mlp and not shapes.fused_elementwise:  # activation and product apart: 2 + 3, and 3 + 5 backward
        kind, forward, backward = "residual", 5, 8
    return [
        *columns,
        *memory_bound("activation", MODULE, kind, elements, forward * BF16, backward * BF16),
        *row_linear(shapes, "w2", MODULE, model.hidden_size, width),
    ]


def mlp_saved(shapes: Shapes) -> list[Saved]:
    """The activation's input (twice as wide with a gate) and its output, the down projection's input."""
    model = shapes.model
    elements = shapes.linear_tokens * (model.intermediate_size // shapes.split)
    return [
        Saved("act_input", elements * BF16 * (2 if model.gated_mlp else 1)),
        Saved("act_output", elements * BF16),
    ]


def mlp_weights(shapes: Shapes) -> list[Weight]:
    model, isp = shapes.model, shapes.keys.is_mode(TpMode.ISP)
    share = np.where(isp, shapes.keys.wp, 1)
    width = model.intermediate_size // shapes.split
    matrices = 3 if model.gated_mlp else 2
    bias = (matrices - 1) * width + model.hidden_size if model.bias else 0
    return [
        Weight("mlp.linears", matrices * width * model.hidden_size / share, wp_sharded=True),
        Weight("mlp.bias", bias / share),
    ]
