"""The MLP block: up (and gate) projection, activation, down projection."""

from __future__ import annotations

import numpy as np

from solver.layers.ops import column_linears, memory_bound, row_linear
from solver.layers.program import Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.spec.strategy import TpMode

MODULE = "mlp"


def mlp_ops(shapes: Shapes) -> list[Op]:
    """Ops of one MLP block; gate and up are one GEMM or two as the framework does it."""
    model = shapes.model
    width = model.intermediate_size // shapes.split
    if not model.gated_mlp:
        widths = {"w1": width}
    else:
        widths = {"w13": 2 * width} if shapes.framework.kernels.fused_gate_up else {"w1": width, "w3": width}
    elements = shapes.linear_tokens * width
    # gated: read gate and up, write one; backward reads its gradient too and writes two. plain: one in, one out.
    kind, forward, backward = ("gated_act", 3, 5) if model.gated_mlp else ("act", 2, 3)
    fused = shapes.fused_elementwise or not model.gated_mlp
    passes = forward * shapes.element, backward * shapes.element
    return [
        *column_linears(shapes, MODULE, model.hidden_size, widths),
        *memory_bound("activation", MODULE, kind, elements, *passes, fused=fused),
        *row_linear(shapes, "w2", MODULE, model.hidden_size, width),
    ]


def mlp_saved(shapes: Shapes) -> list[Saved]:
    """The activation's input (twice as wide with a gate) and its output, the down projection's input; eager gates also keep the
    activated half."""
    model = shapes.model
    elements = shapes.linear_tokens * (model.intermediate_size // shapes.split)
    eager_gate = model.gated_mlp and not shapes.fused_elementwise
    return [
        Saved("act_input", elements * shapes.element * (2 if model.gated_mlp else 1)),
        Saved("act_output", elements * shapes.element * (2 if eager_gate else 1)),
    ]


def mlp_working_bytes(shapes: Shapes) -> np.ndarray:
    """Gradients alive when the activation's backward pass ends: those of its input (its output's replace the saved output)."""
    elements = shapes.linear_tokens * (shapes.model.intermediate_size // shapes.split)
    return elements * shapes.element * (2 if shapes.model.gated_mlp else 1)


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
