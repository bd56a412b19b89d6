"""Bytes per element of each tensor role in training, from the run's precision and the framework's mixed-precision scheme."""

from __future__ import annotations

from dataclasses import dataclass

from solver.spec.framework import Framework
from solver.spec.recipes import FP32, HALF
from solver.spec.strategy import Strategy

QUANTISED = ("fp8", "mxfp8", "nvfp4")  #: formats of the linears only; everything else is then 16-bit
BLOCK_SCALED = ("mxfp8", "nvfp4")  #: of these, those that only units made for them multiply
MOMENTS = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0}  #: bytes of a moment; scales of 8-bit blocks are below a percent
GRAD_BYTES = {"fp32": FP32, "bf16": HALF, "fp16": HALF}


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element by role.

    activation: also GEMM operands and the weights all-gathered for them. weight: as stored between steps (ZeRO 0 to 2).
    gradient: as accumulated and reduced. states: Adam's moments, and the fp32 master copy of 16-bit weights.
    """

    activation: int
    weight: int
    gradient: int
    states: float
    sharded: float  #: weight and states under ZeRO-3, whose shards are the master weights, so that there is no second copy


def activation_bytes(run: Strategy) -> int:
    return FP32 if run.precision == "fp32" else HALF


def element_bytes(run: Strategy, framework: Framework) -> ElementBytes:
    """Return the bytes per element of a run.

    In fp32 and under autocast the weights are the fp32 master copy; otherwise 16-bit weights are held in addition to it.
    """
    activation = activation_bytes(run)
    wide = activation == FP32 or framework.memory.fp32_weights
    weight = FP32 if wide else HALF
    moments = 2 * MOMENTS[run.optimizer_states]
    return ElementBytes(activation, weight, GRAD_BYTES[run.grad_dtype], moments + (0 if wide else FP32), moments + FP32)
