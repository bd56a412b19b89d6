"""Kernels that put scales of block-scaled operands into the order of the GEMMs: which, how many bytes, by which releases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from solver.layers.decoder import layer_program
from solver.layers.program import GROUPED_LINEAR, Op
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.layer_kinds import PLAIN, LayerKind
from tests.toy import DEVICE, TINY, layer_keys, toy_layout

T, H = 32, 64  #: tokens and hidden size of TINY's layer
MOE = TINY.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)


def swizzles_of(kind: LayerKind = PLAIN, model: Any = TINY, mode: str = "mtp", tp: int = 1, **run: Any) -> dict[str, Op]:
    run = toy_layout(8, T, **{"framework": "megatron-core", **run})
    program = layer_program(layer_keys(mode, tp), model, run, cluster_of(DEVICE), kind)
    return {op.label: op for op in program.ops if op.variant == "swizzle" and np.any(op.count)}


@pytest.mark.parametrize(("precision", "scale"), [("mxfp8", 1 / 32), ("nvfp4", 1 / 16)])
def test_every_product_reads_the_scales_of_two_operands(precision: str, scale: float) -> None:
    found = swizzles_of(precision=precision)
    of_output = {label: float(np.ravel(op.dims["bytes"])[0]) for label, op in found.items() if label.startswith("wo.")}
    square, tokens = 2 * scale * H * H, 2 * scale * T * H  # each is read and written
    assert of_output == {
        "wo.input_swizzle.forward": tokens,
        "wo.weight_swizzle.forward": square,
        "wo.output_swizzle.input_grad": tokens,
        "wo.weight_swizzle.input_grad": square,
        "wo.output_swizzle.weight_grad": tokens,
        "wo.input_swizzle.weight_grad": tokens,
    }
    assert found["wo.input_swizzle.forward"].recomputed_by == (Recompute.FULL,)
    assert all(np.all(op.launches == 0) for op in found.values())  # launched inside the linear's function


@pytest.mark.parametrize("run", [{"precision": "bf16"}, {"precision": "fp8", "fp8_recipe": "blockwise"}])
def test_other_formats_need_none(run: dict[str, str]) -> None:
    assert not swizzles_of(**run)


def test_frameworks_without_transformer_engine_are_described_without() -> None:
    assert not swizzles_of(precision="mxfp8", framework="torchtitan")


def test_newer_casts_leave_weights_and_what_is_all_gathered() -> None:
    run = {"framework": "megatron-bridge-26", "precision": "mxfp8"}
    assert {label.split(".")[1] for label in swizzles_of(**run)} == {"weight_swizzle"}
    assert len(swizzles_of(**{**run, "precision": "nvfp4"})) == 6 * 4  # four linears, whose casts write the old order
    split = {label for label in swizzles_of(mode="msp", tp=2, **run) if "weight_swizzle" not in label}
    columns = {f"{name}.input_swizzle.{phase}" for name in ("wqkv", "w13") for phase in ("forward", "weight_grad")}
    rows = {f"{name}.output_swizzle.{phase}" for name in ("wo", "w2") for phase in ("input_grad", "weight_grad")}
    assert split == columns | rows


def test_experts_are_one_kernel_for_each_operand() -> None:
    kind = LayerKind(experts=True)
    found = swizzles_of(kind, MOE, precision="mxfp8")
    run = toy_layout(8, T, framework="megatron-core", precision="mxfp8")
    ops = layer_program(layer_keys("mtp", 1), MOE, run, cluster_of(DEVICE), kind).ops
    gemm = next(op for op in ops if op.kind == GROUPED_LINEAR and op.label == "experts.w2.forward")
    d = {name: float(np.ravel(size)[0]) for name, size in gemm.dims.items()}
    assert float(np.ravel(found["experts.w2.weight_swizzle.forward"].dims["bytes"])[0]) == d["groups"] * d["n"] * d["k"] / 16
    rows = d["groups"] * d["tokens_per_group"]
    assert float(np.ravel(found["experts.w2.output_swizzle.weight_grad"].dims["bytes"])[0]) == rows * d["n"] / 16
    counts = {label: float(np.ravel(op.count)[0]) for label, op in found.items() if label.startswith("expert")}
    assert set(counts.values()) == {1.0}
    assert len(counts) == 12  # two operands of three products of two linears
