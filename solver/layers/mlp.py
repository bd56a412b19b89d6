"""The MLP block: up (and gate) projection, activation, down projection."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.ops import bias_ops, gradient_sums, memory_bound
from solver.layers.program import LINEARS, MLP, Array, Op, Saved, Weight
from solver.layers.shapes import Shapes
from solver.layers.tensor_parallel import column_linears, row_linear
from solver.spec.model_size import mlp_biases, mlp_linears


def mlp_ops(shapes: Shapes, intermediate: int, prefix: str = "", module: str = MLP) -> list[Op]:
    """Return the ops of one MLP block; gate and up are one GEMM or two, depending on the framework.

    intermediate: width of the whole MLP. prefix: before the names of the ops.
    """
    model = shapes.model
    width, names = intermediate // shapes.split, shapes.up_linears
    widths = {name: width * (model.up_matrices // len(names)) for name in names}
    return [
        *gradient_sums(shapes, f"{prefix}norm2", module, len(widths)),
        *column_linears(shapes, module, model.hidden_size, {prefix + name: n for name, n in widths.items()}),
        *bias_ops(shapes, f"{prefix}w1", module, shapes.linear_tokens * sum(widths.values()), model.mlp_bias),
        *activation_ops(shapes, f"{prefix}activation", module, shapes.linear_tokens * width),
        *row_linear(shapes, f"{prefix}w2", module, model.hidden_size, width),
        *bias_ops(shapes, f"{prefix}w2", module, shapes.norm_tokens * model.hidden_size, model.mlp_bias),
    ]


def activation_ops(shapes: Shapes, name: str, module: str, elements: Array) -> list[Op]:
    """Return the activation of ``elements`` outputs. With a gate: gate and up are read, one is written; backward also reads the
    output's gradient and writes two, which eager kernels copy into one tensor where gate and up are its halves. Without: one is
    read, one is written. The host's time for all is that of the first.
    """
    gated, element = shapes.model.gated_mlp, shapes.element
    kind, forward, backward = ("gated_act", 3, 5) if gated else ("act", 2, 3)
    fused = shapes.fused_elementwise or not gated
    ops = memory_bound(
        name, module, kind, elements, forward * element, backward * element, fused=fused, gradient=f"{kind}_grad"
    )
    if not fused and shapes.framework.kernels.fused_gate_up:
        ops = [replace(op, variant=op.variant.replace("_eager", "_split")) for op in ops]
        joined = memory_bound(f"{name}.join", module, "residual", elements, 0.0, 4.0 * element)
        ops += [replace(op, launches=0.0) for op in joined]
    return ops


def mlp_saved(shapes: Shapes, intermediate: int) -> list[Saved]:
    """Return the saved tensors: input (twice as wide with a gate) and output of the activation.

    The output is the down projection's input; eager gates also keep the activated half.
    """
    model = shapes.model
    elements = shapes.linear_tokens * (intermediate // shapes.split)
    eager_gate = model.gated_mlp and not shapes.fused_elementwise
    return [
        Saved("act_input", elements * shapes.element * model.up_matrices),
        Saved("act_output", elements * (shapes.input_element + shapes.element * eager_gate)),
    ]


def mlp_working_bytes(shapes: Shapes) -> np.ndarray:
    """Return the bytes of gradients alive when the activation's backward pass ends.

    These are the gradients of its input (those of its output replace the saved output).
    """
    elements = shapes.linear_tokens * (shapes.model.intermediate_size // shapes.split)
    return elements * shapes.element * shapes.model.up_matrices


def mlp_weights(shapes: Shapes, intermediate: int, prefix: str = "mlp.") -> list[Weight]:
    """Return the weights and biases of one rank."""
    model, share = shapes.model, shapes.weight_shards
    width = intermediate // shapes.split
    return [
        Weight(f"{prefix}linears", mlp_linears(model, width) / share, group=LINEARS),
        Weight(f"{prefix}bias", mlp_biases(model, width) / share),
    ]
