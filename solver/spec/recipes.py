"""Recipes of 8-bit and 4-bit training: how linears quantise their operands, which are 16-bit everywhere else.

Sources: Transformer Engine's linear.py, layernorm_linear.py and quantised tensors (0.12 to 2.x), as read; names as in
Megatron-Core's ``--fp8-recipe``. Block-scaled formats: OCP Microscaling Formats 1.0 and the NVFP4 recipe (arXiv 2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass

HALF, FP32 = 2, 4  #: bytes of a 16-bit and of a 32-bit element


@dataclass(frozen=True)
class Recipe:
    """How a 16-bit tensor becomes an operand of a quantised GEMM.

    element: bytes of a quantised value with its share of the scales. reads: passes over the 16-bit tensor (two where its
    largest value must be known first). by_axis: scales lie along the axis that the GEMM sums over, so that forward, input
    gradient and weight gradient need copies that are quantised along different axes; otherwise a copy is the transpose of the
    other. rotates: a random Hadamard transform rotates the copy that a weight gradient reads. in_norm: a norm before the linear
    writes its output quantised. grouped: one kernel quantises the rows of all experts. gathers_wide: ZeRO-1 gathers in 16
    bits weights that are held quantised. swizzled: bytes of a value's share of scales that GEMMs read in an order of their own.
    """

    element: float
    reads: int = 1
    by_axis: bool = False
    rotates: bool = False
    in_norm: bool = False
    grouped: bool = False
    gathers_wide: bool = False
    swizzled: float = 0.0


#: By name; ``delayed``, ``tensorwise`` and ``blockwise`` are recipes of fp8, the other two are formats of their own.
RECIPES = {
    "delayed": Recipe(1.0, in_norm=True, grouped=True),  # scale from the largest values of past steps
    "tensorwise": Recipe(1.0, reads=2),  # scale from this tensor's largest value
    "blockwise": Recipe(1.0 + 4 / 128, by_axis=True),  # an fp32 scale for 128 values
    # an 8-bit exponent for 32 values
    "mxfp8": Recipe(1.0 + 1 / 32, by_axis=True, in_norm=True, gathers_wide=True, swizzled=1 / 32),
    # an fp8 scale for 16 values, and one for the tensor
    "nvfp4": Recipe(0.5 + 1 / 16, reads=2, by_axis=True, rotates=True, swizzled=1 / 16),
}
FP8_RECIPES = ("delayed", "tensorwise", "blockwise")


def recipe_name(precision: str, fp8_recipe: str) -> str:
    """Return the name in RECIPES of a run's precision; it is in none where linears are not quantised."""
    return fp8_recipe if precision == "fp8" else precision


def delays_scales(precision: str, fp8_recipe: str) -> bool:
    """Whether linears are quantised with scales from the largest values of past steps."""
    return recipe_name(precision, fp8_recipe) == "delayed"


def recipe_of(precision: str, fp8_recipe: str) -> Recipe | None:
    """Return the recipe of a run's precision; None where its linears are not quantised."""
    return RECIPES.get(recipe_name(precision, fp8_recipe))


@dataclass(frozen=True)
class WeightRecipe:
    """What a framework that keeps quantised weights holds and moves. Bytes per parameter of a quantised linear.

    held: beyond what is held of a weight in 16 bits (negative where no 16-bit weight is). gathered: in ZeRO-1's all-gather; 0:
    as a 16-bit weight. cast: moved once a step by the kernels that quantise and transpose. sharded: of what ZeRO-3 keeps of it
    beside the fp32 weights, and unit: in each of its all-gathers; 0: as a 16-bit weight.
    """

    held: float
    gathered: float
    cast: float
    sharded: float = 0.0
    unit: float = 0.0


def weight_recipe(recipe: Recipe, copies: int, primary: bool) -> WeightRecipe:
    """Return what is kept of a weight: ``copies`` quantised ones, beside the 16-bit weight or (``primary``) in its place.

    Primary weights are written quantised by the optimizer and gathered so, except for those of MXFP8, which are gathered in 16
    bits through the gradients' buffer and quantised after (Megatron-Core's reuse_grad_buf_for_mxfp8_param_ag). Blocks of 128 x
    128 weights have one scale in either order: one copy is the transpose of the other. Megatron-FSDP shards both copies of
    MXFP8, and gathers the one that a pass needs.
    """
    quantised = recipe.element * copies
    if not primary:
        return WeightRecipe(quantised, 0.0, HALF * recipe.reads + quantised)
    if recipe.gathers_wide:
        return WeightRecipe(quantised - HALF, 0.0, HALF * recipe.reads + quantised, quantised, recipe.element)
    transposes = 2 * recipe.element * (copies - 1)
    return WeightRecipe(quantised - HALF, recipe.element, transposes, recipe.element, recipe.element)
