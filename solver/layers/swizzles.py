"""Kernels that put the scales of block-scaled operands into the order that GEMMs read, before every product ("swizzles")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from predictor.kernels.gemm_layout import GemmLayout
from solver.layers.program import GROUPED_LINEAR, LINEAR, MEMORY_BOUND, QKV_LINEARS, UP_LINEARS, Array, Op
from solver.layers.shapes import Shapes
from solver.spec.recipes import recipe_name

SWIZZLE = "swizzle"  #: the kind of memory-bound kernel
_INPUT, _WEIGHT, _GRADIENT = "input", "weight", "output"
#: The two operands of a linear's three products.
_OPERANDS = {
    GemmLayout.TN: (_INPUT, _WEIGHT),
    GemmLayout.NN: (_GRADIENT, _WEIGHT),
    GemmLayout.NT: (_GRADIENT, _INPUT),
}


def with_swizzles(shapes: Shapes, ops: Sequence[Op]) -> list[Op]:
    """Return ``ops`` and, for each operand of a block-scaled GEMM, the kernel that reads and writes its scales.

    The host launches it inside the linear's function. Casts of newer releases write the scales of a rank's own tensors in this
    order (Kernels.swizzled_casts); those of weights, which are cached, and of what the tensor group all-gathers are not.
    Source: Transformer Engine 2.8, csrc/extensions/gemm.cpp (generic_gemm, te_general_grouped_gemm); its pull request 2486.
    """
    recipe, kernels = shapes.recipe, shapes.framework.kernels
    if recipe is None or not recipe.swizzled or not kernels.transformer_engine:
        return list(ops)
    by_cast = recipe_name(shapes.run.precision, shapes.run.fp8_recipe) in kernels.swizzled_casts
    return [
        *ops,
        *(
            Op(
                f"{op.name}.{operand}_swizzle",
                op.module,
                MEMORY_BOUND,
                op.phase,
                {"bytes": 2.0 * recipe.swizzled * elements},
                count=op.count * (_gathered(shapes, op, operand) if by_cast else 1.0),
                variant=SWIZZLE,
                launches=0.0,
                recomputed_by=op.recomputed_by,
            )
            for op in ops
            if op.kind in (LINEAR, GROUPED_LINEAR) and op.dtype == shapes.run.precision
            for operand, elements in _operands(op)
        ),
    ]


def _operands(op: Op) -> Iterator[tuple[str, Array]]:
    """Yield both operands of a GEMM and their elements, shape [keys]."""
    dims = op.dims
    if op.kind == LINEAR:
        layout, (m, n, k), batch = dims["layout"], (dims["m"], dims["n"], dims["k"]), dims["batch"]
    else:
        layout, batch, rows = dims["passes"], dims["groups"], dims["tokens_per_group"]
        forward = (rows, dims["n"], dims["k"])
        m, n, k = {
            GemmLayout.TN: forward,
            GemmLayout.NN: (rows, dims["k"], dims["n"]),
            GemmLayout.NT: (dims["n"], dims["k"], rows),
        }[GemmLayout(layout)]
    first, second = _OPERANDS[GemmLayout(layout)]
    yield first, 1.0 * batch * m * k
    yield second, 1.0 * batch * n * k


def _gathered(shapes: Shapes, op: Op, operand: str) -> Array:
    """Return whether an operand's scales are in the casts' order although casts can write the other: 1 or 0, [keys]."""
    if operand == _WEIGHT:
        return 1.0
    column = op.name in (*QKV_LINEARS, *UP_LINEARS)
    gathered = operand == (_INPUT if column else _GRADIENT) and op.kind == LINEAR and shapes.gathers_quantised
    return np.where(shapes.sequence_split, float(gathered), 0.0)
