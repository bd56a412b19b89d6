"""Quantised runs: what the kernels that quantise read and write, what is all-gathered, which layers stay 16-bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from solver.layers.decoder import layer_program
from solver.layers.program import LINEAR, Op
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.layer_kinds import PLAIN, layer_kinds
from solver.spec.recipes import RECIPES, recipe_of, weight_recipe
from tests.toy import DEVICE, TINY, layer_keys, toy_layout

T, H = 32, 64  #: tokens and hidden size of TINY's layer


def ops_of(mode: str = "mtp", tp: int = 1, kind: Any = PLAIN, **constants: Any) -> dict[str, Op]:
    constants = {"framework": "megatron-core", "precision": "fp8", **constants}
    run = toy_layout(8, T, **constants)
    return {op.label: op for op in layer_program(layer_keys(mode, tp), TINY, run, cluster_of(DEVICE), kind).ops}


def moved(op: Op) -> float:
    return float(np.ravel(op.dims["bytes"])[0])


@pytest.mark.parametrize(
    ("recipe", "cast", "transpose"),
    [
        ("delayed", 2 + 1, 1),  # read 16 bits, write 8, and the transpose
        ("tensorwise", 2 * 2 + 1, 1),  # the largest value first
        ("blockwise", 2 + 2 * (1 + 4 / 128), None),  # both copies from one kernel
        ("mxfp8", 2 + 2 * (1 + 1 / 32), None),
        ("nvfp4", 2 * 2 + 2 * (0.5 + 1 / 16), None),
    ],
)
def test_bytes_of_the_casts_of_the_output_projection(recipe: str, cast: float, transpose: float | None) -> None:
    run = {"fp8_recipe": recipe} if recipe in ("delayed", "tensorwise", "blockwise") else {"precision": recipe}
    ops = ops_of(**run)
    assert moved(ops["wo.input_cast.forward"]) == T * H * cast
    assert moved(ops["wo.output_cast.input_grad"]) == T * H * cast
    # the Hadamard transform of NVFP4 is of tokens, not of weights
    assert ops["wo.input_cast.forward"].variant == ("hadamard_quantize" if recipe == "nvfp4" else "quantize")
    if recipe == "nvfp4":
        assert ops_of(framework="torchtitan", **run)["wo.weight_cast.forward"].variant == "quantize"
    for side in ("input", "output"):
        turned = ops.get(f"wo.{side}_transpose.input_grad")
        assert (turned is None) if transpose is None else turned is not None and moved(turned) == T * H * transpose


def test_a_scale_of_the_tensor_itself_takes_kernels_of_its_own() -> None:
    scales = {
        recipe: [op for label, op in ops_of(fp8_recipe=recipe).items() if label.startswith("wo.input_scale")]
        for recipe in ("delayed", "tensorwise", "blockwise")
    }
    assert scales["delayed"] == scales["blockwise"] == []
    (found,) = scales["tensorwise"]
    assert (found.count, found.launches) == (3.0, 0.0) and moved(found) == 1.0


def test_a_norm_writes_quantised_values_where_the_scale_is_known() -> None:
    for recipe, casts in (("delayed", False), ("tensorwise", True), ("blockwise", True)):
        assert ("wqkv.input_cast.forward" in ops_of(fp8_recipe=recipe)) == casts
    # its transpose is then a kernel of its own: read and write
    assert moved(ops_of()["wqkv.input_transpose.input_grad"]) == T * H * 2
    # torchtitan quantises after the norm, and its weights in every micro batch
    eager = ops_of(framework="torchtitan", fp8_recipe="delayed")
    assert moved(eager["wq.input_cast.forward"]) == T * H * 3
    assert moved(eager["wo.weight_cast.forward"]) == H * H * 3
    assert not any("weight_cast" in label for label in ops_of())


def test_under_a_sequence_split_each_rank_casts_its_share_and_all_gathers_bytes() -> None:
    half, quantised = (ops_of("msp", 2, precision=p, fp8_recipe="tensorwise") for p in ("bf16", "fp8"))
    assert moved(quantised["wqkv.input_cast.forward"]) == T / 2 * H * 5
    assert moved(quantised["wqkv.input_transpose.input_grad"]) == T * H * 2  # of what was gathered
    assert moved(quantised["wo.output_cast.input_grad"]) == T / 2 * H * 5
    for label in ("wqkv.all_gather.forward", "wqkv.regather.input_grad", "w2.all_gather.input_grad"):
        assert moved(half[label]) == 2 * moved(quantised[label]) == T * H * 2
    for label in ("wo.reduce_scatter.forward", "wqkv.reduce_scatter.input_grad"):  # sums stay 16-bit
        assert moved(half[label]) == moved(quantised[label])


@pytest.mark.parametrize(("framework", "ranks"), [("torchtitan", 1), ("megatron-core", 4)])
def test_what_is_gathered_in_16_bits_is_cast_whole(framework: str, ranks: int) -> None:
    # mxfp8: read 2 bytes, write values and scales in both orders; torchtitan's 4 ranks each cast all tokens, gathered before
    ops = ops_of("msp", 4, framework=framework, precision="mxfp8")
    assert moved(ops["wo.output_cast.input_grad"]) == T * H * (2 + 2 * (1 + 1 / 32)) / ranks


def test_one_scale_of_all_shares_takes_an_all_reduce() -> None:
    """Transformer Engine's with_amax_reduction: inputs of column-parallel linears forward, of row-parallel ones backward."""
    (found,) = {
        tuple(label for label in ops_of("msp", 2, **run) if "_amax" in label)
        for run in ({"fp8_recipe": "tensorwise"}, {"precision": "nvfp4"})
    }
    assert set(found) == {
        "wqkv.input_amax.forward",
        "wo.output_amax.input_grad",
        "w13.input_amax.forward",
        "w2.output_amax.input_grad",
    }
    op = ops_of("msp", 2, fp8_recipe="tensorwise")["wqkv.input_amax.forward"]
    assert (moved(op), op.kind, float(op.count[0])) == (4, "all_reduce", 1.0)
    for mode, tp, run in (
        ("mtp", 2, {}),
        ("msp", 1, {}),
        ("msp", 2, {"fp8_recipe": "delayed"}),
        ("msp", 2, {"precision": "mxfp8"}),
    ):
        assert not any("_amax" in label for label in ops_of(mode, tp, **{"fp8_recipe": "tensorwise", **run}))


@pytest.mark.parametrize(("recipe", "again"), [("delayed", 0), ("tensorwise", 5), ("blockwise", 2), ("mxfp8", 2), ("nvfp4", 4)])
def test_an_input_that_is_kept_in_16_bits_is_cast_again(recipe: str, again: float) -> None:
    """Megatron-Core's set_save_original_input; the context is the core's output and the projection's input."""
    run = {"fp8_recipe": recipe} if recipe in ("delayed", "tensorwise", "blockwise") else {"precision": recipe}
    ops = ops_of(**run)
    found = ops.get("wo.input_again_cast.input_grad")
    assert (moved(found) if found else 0) == T * H * again
    assert "wo.input_again_cast.input_grad" not in ops_of(framework="megatron-core-0.8", **run)

    def saved(framework: str) -> dict[str, Any]:
        run_ = toy_layout(8, T, framework=framework, **{"precision": "fp8", **run})
        program = layer_program(layer_keys("mtp", 1), TINY, run_, cluster_of(DEVICE), PLAIN)
        return {tensor.name: tensor for tensor in program.saved}

    kept, before = saved("megatron-core"), saved("megatron-core-0.8")
    assert ("context_quantised" in kept) == (recipe == "delayed") and "context_quantised" in before
    # of attention that runs again the core's own output is not kept, if the projection does not read it
    assert [Recompute.SELECTIVE in one["context"].dropped_by for one in (kept, before)] == [recipe == "delayed", True]


def test_a_layer_that_stays_16_bit_is_one_of_a_bf16_run() -> None:
    assert ops_of(kind=replace(PLAIN, quantised=False)).keys() == ops_of(precision="bf16").keys()
    assert {op.dtype for op in ops_of(kind=replace(PLAIN, quantised=False)).values() if op.kind == LINEAR} == {"bf16"}
    model = TINY.replace(num_hidden_layers=4)
    ends = layer_kinds(model, bf16_ends=(1, 2))
    assert [ends.kinds[k].quantised for k in ends.of_layer] == [False, True, False, False]


def test_what_is_kept_and_moved_of_a_quantised_weight() -> None:
    delayed, mxfp8 = RECIPES["delayed"], RECIPES["mxfp8"]
    # a quantised copy and its transpose beside the 16-bit weight: cast once a step
    weight = weight_recipe(delayed, 2, primary=False)
    assert (weight.held, weight.gathered, weight.cast) == (2, 0, 2 + 2)
    # quantised weights alone: gathered in a byte, then transposed; as much memory as in 16 bits, or half without the transpose
    primary = weight_recipe(delayed, 2, primary=True)
    assert (primary.held, primary.gathered, primary.cast) == (0, 1, 2)
    alone = weight_recipe(delayed, 1, primary=True)
    assert (alone.held, alone.gathered, alone.cast) == (-1, 1, 0)
    # scales along an axis: gathered in 16 bits, both copies made after
    scaled = weight_recipe(mxfp8, 2, primary=True)
    assert (scaled.held, scaled.gathered, scaled.cast) == (2 * 33 / 32 - 2, 0, 2 + 2 * 33 / 32)
    assert (scaled.sharded, scaled.unit) == (2 * 33 / 32, 33 / 32) and (primary.sharded, primary.unit) == (1, 1)
    # one scale for 128 x 128 values, whichever way they are read: gathered in 8 bits, the other copy is a transpose
    blocks = weight_recipe(RECIPES["blockwise"], 2, primary=True)
    assert (blocks.held, blocks.gathered, blocks.cast) == pytest.approx((2 * 33 / 32 - 2, 33 / 32, 2 * 33 / 32))
    assert recipe_of("bf16", "delayed") is None and recipe_of("mxfp8", "delayed") is mxfp8


def test_attention_in_fp8_casts_its_operands_and_takes_less_time() -> None:
    plain, quantised = (ops_of(precision="fp8", framework="megatron-bridge-26", fp8_attention=on) for on in (False, True))
    assert {label for label in quantised if label not in plain} == {
        "attention.qkv_cast.forward",
        "attention.context_cast.input_grad",
    }
    # of q, k and v (half as many heads each), and of the gradient of the context: 2 bytes read, 1 written
    assert moved(quantised["attention.qkv_cast.forward"]) == T * 2 * H * 3
    assert moved(quantised["attention.context_cast.input_grad"]) == T * H * 3
    assert (plain["attention.forward"].variant, quantised["attention.forward"].variant) == ("", "fp8")
    ends = ops_of(kind=replace(PLAIN, quantised=False), precision="fp8", framework="megatron-bridge-26", fp8_attention=True)
    assert ends["attention.forward"].variant == "" and "attention.qkv_cast.forward" not in ends
    # MXFP8 reads once and writes both orders, a byte and a 32nd each
    scaled = ops_of(precision="mxfp8", framework="megatron-bridge-26", fp8_attention=True)
    assert moved(scaled["attention.qkv_cast.forward"]) == pytest.approx(T * 2 * H * (2 + 2 * 33 / 32))
    assert scaled["attention.forward"].variant == "mxfp8"


def test_windows_save_nothing_of_the_backward_pass_in_fp8() -> None:
    window = replace(PLAIN, window=16)
    for on, keys, causal in ((False, 16 + 128, False), (True, T, True)):
        found = ops_of(kind=window, precision="fp8", framework="megatron-bridge-26", fp8_attention=on)
        forward, backward = found["attention.forward"].dims, found["attention.input_grad"].dims
        assert forward["seq_kv"] == min(16 + 128, T // 2) and not forward["causal"]
        assert (backward["seq_kv"], backward["causal"]) == (min(keys, T // 2) if not on else T, causal)


@pytest.mark.parametrize(
    ("recipe", "gathered"), [("tensorwise", 1.0), ("blockwise", 2 * (1 + 4 / 128)), ("mxfp8", 2 * (1 + 1 / 32))]
)
def test_scales_along_an_axis_are_gathered_for_either_product_of_a_row_parallel_gradient(recipe: str, gathered: float) -> None:
    run = {"precision": "mxfp8"} if recipe == "mxfp8" else {"fp8_recipe": recipe}
    ops = ops_of("msp", 2, **run)
    assert moved(ops["wo.all_gather.input_grad"]) == moved(ops["w2.all_gather.input_grad"]) == T * H * gathered
    once = gathered if recipe == "tensorwise" else gathered / 2
    assert moved(ops["wqkv.all_gather.forward"]) == T * H * once  # of which each pass gathers the order that it reads


@pytest.mark.parametrize(
    ("framework", "hidden", "casts"),
    [("megatron-core", 256, True), ("megatron-bridge", 256, False), ("megatron-bridge", 64, True)],
)
def test_norms_of_cudnn_write_mxfp8(framework: str, hidden: int, casts: bool) -> None:
    """Performance launchers turn them on; widths must be multiples of 128."""
    run = toy_layout(8, T, framework=framework, precision="mxfp8")
    ops = layer_program(layer_keys("mtp"), TINY.replace(hidden_size=hidden), run, cluster_of(DEVICE)).ops
    assert ("wqkv.input_cast.forward" in {op.label for op in ops}) == casts
