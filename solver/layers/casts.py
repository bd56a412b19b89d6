"""Kernels that quantise the operands of linears in 8-bit and 4-bit runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.layers.ops import WHOLE_LAYER
from solver.layers.program import BEFORE_ANOTHER, FORWARD, INPUT_GRAD, MEMORY_BOUND, Array, Op, message
from solver.layers.shapes import Shapes
from solver.spec.recipes import FP32, HALF

#: Kinds of memory-bound kernels.
CAST, ROTATED_CAST, TRANSPOSE = "quantize", "hadamard_quantize", "transpose"


BLOCK = 128  #: values that a norm of cuDNN quantises together
#: Further kernels of a cast that first looks for the largest value: it is set to zero, searched, and becomes a scale
#: (Transformer Engine's Float8CurrentScalingQuantizer). One call of the host launches all.
SCALE_KERNELS = 3.0


def input_casts(shapes: Shapes, name: str, module: str, tokens: Array, width: Array, split: Array, *, normed: bool) -> list[Op]:
    """Return the kernels that quantise the input of a linear: ``tokens`` rows of ``width`` values.

    split: whether each tensor rank quantises its share, and the quantised shares are all-gathered. normed: a norm comes
    directly before, which writes quantised values itself where framework and recipe do so.
    """
    recipe = shapes.recipe
    if recipe is None:
        return []
    kernels = shapes.framework.kernels
    blocks = not recipe.by_axis or (kernels.norm_quantises_blocks and shapes.model.hidden_size % BLOCK == 0)
    in_norm = normed and recipe.in_norm and kernels.norm_quantises and blocks
    return _casts(shapes, f"{name}.input", module, FORWARD, tokens, width, split, in_norm=in_norm)


def kept_input_casts(shapes: Shapes, name: str, module: str, tokens: Array, width: Array) -> list[Op]:
    """Return the kernels that quantise a linear's input again in the backward pass, where only its 16-bit copy is kept
    (for another module that needs it).

    The backward copy that they write is one that the forward pass did not, so these bytes are no addition. What is added: the
    input is read a second time and, unless scales follow an axis, also written in the forward order, to be transposed.
    """
    recipe = shapes.recipe
    if recipe is None or not shapes.casts_kept_inputs:
        return []
    moved = 1.0 * tokens * width * (HALF * recipe.reads + recipe.element * (not recipe.by_axis))
    cast = Op(f"{name}.input_again_cast", module, MEMORY_BOUND, INPUT_GRAD, {"bytes": moved}, variant=CAST)
    scale = replace(cast, name=f"{name}.input_again_scale", dims={"bytes": 1.0}, count=SCALE_KERNELS, launches=0.0)
    return [cast] if recipe.reads == 1 else [cast, scale]


def gradient_casts(shapes: Shapes, name: str, module: str, tokens: Array, width: Array, split: Array = False) -> list[Op]:
    """Return the kernels that quantise the gradient of a linear's output; arguments as of ``input_casts``."""
    return [] if shapes.recipe is None else _casts(shapes, f"{name}.output", module, INPUT_GRAD, tokens, width, split)


def weight_casts(shapes: Shapes, name: str, module: str, elements: Array) -> list[Op]:
    """Return the kernels that quantise the ``elements`` of a weight in every micro batch, where no quantised copy is kept."""
    if shapes.recipe is None or shapes.framework.memory.quantised_weights:
        return []
    if shapes.run.fp8_param_gather:  # gathered as it is multiplied; but for the order that the backward pass reads
        dims = {"bytes": 2.0 * elements * shapes.recipe.element}
        return [Op(f"{name}.weight_transpose", module, MEMORY_BOUND, INPUT_GRAD, dims, variant=TRANSPOSE)]
    return _casts(shapes, f"{name}.weight", module, FORWARD, elements, 1, False, rotates=False)


def _largest_of_all(shapes: Shapes, cast: Op, split: Array) -> list[Op]:
    """The all-reduce that finds one scale for the shares of a tensor that is all-gathered in quantised values.

    Source: Transformer Engine's with_amax_reduction (module/linear.py) of the inputs of column-parallel and of the gradients of
    row-parallel linears; torchao's casts of a DTensor reduce likewise.
    """
    where = np.asarray(split) & (shapes.keys.tp > 1)
    if not (shapes.gathers_quantised and where.any()):
        return []
    return [
        replace(
            cast,
            name=cast.name.replace("_cast", "_amax"),
            kind="all_reduce",
            dims=message(FP32, shapes.groups.tp),
            stream="tp",
            count=np.where(where, 1.0, 0.0),
            variant=BEFORE_ANOTHER,
        )
    ]


def _casts(
    shapes: Shapes,
    name: str,
    module: str,
    phase: str,
    tokens: Array,
    width: Array,
    split: Array,
    *,
    in_norm: bool = False,
    rotates: bool = True,
) -> list[Op]:
    """Return a cast of ``tokens`` rows of ``width`` values, and the transposed copy that another pass reads.

    Where scales lie along an axis, the same kernel writes a second set of values; else the copy is a transpose, written by the
    cast itself or, of gathered values and those that a norm quantised (in_norm), by a separate kernel. rotates: whether a
    recipe that rotates values does so here; it leaves weights as they are.
    """
    recipe = shapes.recipe
    assert recipe is not None
    whole = 1.0 * tokens * width
    split = np.asarray(split) & shapes.gathers_quantised  # else the values are all-gathered first, and each rank casts all
    cast_here = np.where(split, whole / shapes.keys.tp, whole)
    copies = 1 + recipe.by_axis
    again = WHOLE_LAYER if phase == FORWARD else ()
    cast = Op(
        f"{name}_cast",
        module,
        MEMORY_BOUND,
        phase,
        {"bytes": cast_here * (HALF * recipe.reads + recipe.element * copies)},
        variant=ROTATED_CAST if recipe.rotates and rotates else CAST,
        recomputed_by=again,
    )
    separate = np.where(split | in_norm, 1.0, 0.0)
    transpose = Op(
        f"{name}_transpose",
        module,
        MEMORY_BOUND,
        INPUT_GRAD,
        {"bytes": whole * recipe.element * (1.0 + separate)},
        variant=TRANSPOSE,
        launches=separate,
    )
    scale = replace(cast, name=f"{name}_scale", dims={"bytes": 1.0}, count=SCALE_KERNELS, launches=0.0)
    scaled = [cast] if recipe.reads == 1 else [cast, scale, *_largest_of_all(shapes, cast, split)]
    return [*([] if in_norm else scaled), *([] if recipe.by_axis else [transpose])]
