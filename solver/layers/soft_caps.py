"""The kernels of a soft cap: divide, hyperbolic tangent, multiply; one kernel where torch.compile fuses them."""

from __future__ import annotations

from dataclasses import replace

from solver.layers.ops import WHOLE_LAYER, memory_bound
from solver.layers.program import Array, Op
from solver.layers.shapes import Shapes
from solver.spec.choices import Recompute

#: Reads and writes of a value forward and backward, and kernels. The tangent's gradient reads its output: 2 + 3 + 2 backward.
EAGER, COMPILED = (6, 7, 3), (2, 3, 1)


def soft_cap_ops(
    shapes: Shapes, name: str, module: str, values: Array, recomputed_by: tuple[Recompute, ...] = WHOLE_LAYER
) -> list[Op]:
    """Return the ops that cap ``values`` values of one rank."""
    forward, backward, kernels = COMPILED if shapes.run.compile else EAGER
    ops = memory_bound(
        f"{name}.soft_cap", module, "residual", values, forward * shapes.element, backward * shapes.element, recomputed_by
    )
    return [replace(op, launches=float(kernels)) for op in ops]
