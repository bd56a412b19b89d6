"""Bytes per element of each tensor role in training, from the run's precision and the framework's mixed-precision scheme."""

from __future__ import annotations

from dataclasses import dataclass

from solver.spec.framework import Framework
from solver.spec.recipes import FP32, HALF, delays_scales
from solver.spec.run import Run

QUANTISED = ("fp8", "mxfp8", "nvfp4")  #: formats of the linears only; everything else is then 16-bit
PRIMARY = ("fp8", "mxfp8")  #: of these, those in which weights may be stored (fp8_param_gather)
#: Bytes of a moment; scales of 8-bit blocks are below a percent.
MOMENTS = {"fp32": 4.0, "remainder": 4.0, "bf16": 2.0, "8bit": 1.0}
GRAD_BYTES = {"fp32": FP32, "bf16": HALF, "fp16": HALF}


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element by role.

    activation: also GEMM operands and the weights all-gathered for them. weight: as stored between steps (ZeRO 0 to 2).
    gradient: as accumulated and reduced. states: Adam's moments, and what the optimizer keeps of the fp32 master copy of 16-bit
    weights. step: what the optimizer's step adds for as long as it runs.
    """

    activation: int
    weight: int
    gradient: int
    states: float
    sharded: float  #: weight and states under ZeRO-3, whose shards are the master weights, so that there is no second copy
    step: float = 0.0


def activation_bytes(run: Run) -> int:
    return FP32 if run.precision == "fp32" else HALF


def keeps_remainders(run: Run) -> bool:
    """Whether Transformer Engine's Adam can keep of the fp32 weights only the 16 bits that bf16 weights lack: not beside
    quantised weights, but for those of the delayed recipe (megatron/core/optimizer/optimizer_config.py)."""
    return run.precision == "bf16" or delays_scales(run.precision, run.fp8_recipe)


def element_bytes(run: Run, framework: Framework) -> ElementBytes:
    """Return the bytes per element of a run.

    In fp32 and under autocast the weights are the fp32 master copy; otherwise 16-bit weights are held in addition to it. Adam
    of torch has moments as wide as its parameters: narrow ones mean that these are the 16-bit weights. The precision-aware Adam
    of Transformer Engine keeps of the master copy only the 16 bits that the weights lack, where it can, whatever its moments
    are, and makes fp32 copies of all narrow ones for its step (transformer_engine/pytorch/optimizers/fused_adam.py,
    store_param_remainders), as read.
    """
    activation, memory = activation_bytes(run), framework.memory
    moments = 2 * MOMENTS[run.optimizer_states]
    narrow = moments < 2 * FP32
    halves = memory.weights_as_moments and narrow and activation == HALF
    wide = (activation == FP32 or memory.fp32_weights) and not halves
    rest = HALF if memory.fused_adam_copies and run.optimizer_states != "fp32" and keeps_remainders(run) else FP32
    return ElementBytes(
        activation,
        weight=FP32 if wide else HALF,
        gradient=GRAD_BYTES[run.grad_dtype],
        states=moments + (0 if wide or halves else rest),
        sharded=moments + (HALF if halves else FP32),
        step=2.0 * FP32 if memory.fused_adam_copies and narrow else 0.0,
    )
