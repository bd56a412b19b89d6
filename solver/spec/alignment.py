"""Sizes of linears that kernels can read in whole vectors: what quantised GEMMs refuse, and what others pay for."""

from __future__ import annotations

from collections.abc import Iterator

from solver.spec.can_run import CanRun
from solver.spec.layer_kinds import dense_layers
from solver.spec.model import ModelSpec

#: What the sizes of a quantised GEMM must be multiples of: Transformer Engine's assert_dim_for_fp8_exec (pytorch/utils.py),
#: torch._scaled_mm, and the blocks of MXFP8 and NVFP4.
MULTIPLES = {"fp8": 16, "mxfp8": 32, "nvfp4": 16}
#: torchtitan converts linears of multiples of this alone, in every format (components/quantization/utils.py, module_filter_fn).
CONVERTED = 16
#: 16-bit elements of the 16 bytes that tensor cores' operands are loaded by (NVIDIA, Matrix Multiplication Background).
VECTOR = 8


def widths(model: ModelSpec, tp: int = 1) -> Iterator[tuple[str, int]]:
    """Yield the sizes of a layer's linears on one tensor-parallel rank, and what they are called."""
    yield "hidden_size", model.hidden_size
    yield "width of the queries", model.num_attention_heads * model.head_dim // tp
    yield "width of the keys", max(model.num_key_value_heads // tp, 1) * model.head_dim
    if dense_layers(model):
        yield "intermediate_size", model.intermediate_size // tp
    if model.is_mixture_of_experts:
        yield "moe_intermediate_size", model.moe_intermediate_size
    if model.shared_expert_intermediate_size:
        yield "shared_expert_intermediate_size", model.shared_expert_intermediate_size // tp


def quantised_broken(model: ModelSpec, can_run: CanRun, precision: str, tp: int = 1) -> str:
    """Return which size of a quantised run's linears its GEMMs do not run with, or "".

    A framework that leaves linears of other sizes in 16 bits goes by their whole sizes.
    """
    if not (multiple := MULTIPLES.get(precision, 0)):
        return ""
    for (name, size), (_, whole) in zip(widths(model, tp), widths(model), strict=True):
        if size % multiple and not (can_run.leaves_unaligned and whole % CONVERTED):
            rank = f" on each of tp {tp} ranks" if tp > 1 else ""
            return f"precision {precision} needs linears of multiples of {multiple}; the {name} of {model.name} is {size}{rank}"
    return ""


def left_in_16_bits(model: ModelSpec, can_run: CanRun, precision: str) -> tuple[str, ...]:
    """Return in words that linears which a framework does not convert are priced as the quantised ones, if there are."""
    names = [f"{name} {size}" for name, size in widths(model) if size % CONVERTED]
    if not (names and can_run.leaves_unaligned and precision in MULTIPLES):
        return ()
    return (f"that linears whose sizes are no multiples of {CONVERTED} ({', '.join(names)}) stay in 16 bits",)


def unaligned(model: ModelSpec) -> tuple[str, ...]:
    """Return in words that GEMMs of sizes which no vector of 16 bytes divides are priced as their neighbours', if there are."""
    names = [f"{name} {size}" for name, size in widths(model) if size % VECTOR]
    return (f"what GEMMs lose whose sizes are no multiples of {VECTOR} ({', '.join(names)})",) if names else ()
