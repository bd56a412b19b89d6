"""Bytes of the MLP and of eager norms, worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy import DEVICE, TINY, layer_keys, moved, saved_bytes, tiny, toy_layout

from solver.layers.decoder import layer_program
from solver.layers.program import LayerProgram
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.model import ModelSpec
from solver.spec.model_size import parameters

WIDE = TINY.replace(intermediate_size=1024)


def program(model: ModelSpec, mode: str = "mtp", tp: int = 1, **constants: Any) -> LayerProgram:
    return layer_program(layer_keys(mode, tp), model, toy_layout(tp, 32, **constants), cluster_of(DEVICE))


@pytest.mark.parametrize(("mode", "tokens", "columns"), [("mtp", 32, 512), ("msp", 32, 512), ("isp", 16, 1024)])
def test_gradients_of_a_wide_mlp_are_the_largest_working_set(mode: str, tokens: int, columns: int) -> None:
    # over two ranks: gradients of gate and up, two bytes each, and that of the residual stream (a rank's half of it, not MTP)
    stream = 32 * 64 * 2 // (1 if mode == "mtp" else 2)
    assert np.ravel(program(WIDE, mode, 2).transient_bytes)[0] == stream + 2 * tokens * columns * 2
    plain = WIDE.replace(gated_mlp=False)
    assert np.ravel(program(plain, mode, 2).transient_bytes)[0] == stream + tokens * columns * 2


def test_bytes_of_activations() -> None:
    # gated: gate and up read, their product written; backward reads those and its gradient and writes two. Two bytes each
    elements = 32 * 128
    for framework, kinds in (
        ("generic", ("gated_act", "gated_act_grad")),
        ("pytorch-ddp", ("gated_act_eager", "gated_act_eager_grad")),
    ):
        found = moved(program(TINY, framework=framework))
        assert found["activation.forward"] == (kinds[0], elements * 6)
        assert found["activation.input_grad"] == (kinds[1], elements * 10)
    # eager kernels take the halves of one tensor, gate and up, value by value
    halves = moved(program(TINY, framework="nanotron"))
    assert halves["activation.forward"] == ("gated_act_split", elements * 6)
    assert halves["activation.input_grad"] == ("gated_act_split_grad", elements * 10)
    # not gated: one read and one write; backward reads one more
    found = moved(program(TINY.replace(gated_mlp=False)))
    assert (found["activation.forward"], found["activation.input_grad"]) == (("act", elements * 4), ("act_grad", elements * 6))


def test_eager_gates_keep_the_activated_half() -> None:
    # gate and up; their product, and where kernels are eager also the activated gate. Two bytes each
    eager, fused = (saved_bytes(program(TINY, framework=framework)) for framework in ("pytorch-ddp", "generic"))
    assert eager["act_input"] == fused["act_input"] == 32 * 2 * 128 * 2
    assert (eager["act_output"], fused["act_output"]) == (32 * 2 * 128 * 2, 32 * 128 * 2)


def test_eager_norms_keep_their_input_in_fp32() -> None:
    # two norms of 32 * 64 values in four bytes; none where norms are fused or compiled
    fused, eager, compiled = (
        float(program(TINY, **how).saved_bytes(Recompute.NONE)[0])
        for how in ({}, {"fused_norm": False}, {"fused_norm": False, "compile": True})
    )
    assert eager - fused == 2 * 32 * 64 * 4 and compiled == fused
    found = moved(program(TINY, fused_norm=False))
    assert found["norm1.forward"] == ("norm_eager", 32 * 64 * 4)
    assert found["norm2.input_grad"] == ("norm_eager_grad", 32 * 64 * 6)


def test_the_backward_kernel_of_a_fused_norm_is_the_frameworks() -> None:
    # Transformer Engine's and Apex's FastLayerNorm; Apex's FusedLayerNorm; torch's own, which torch.compile's is like
    def backward(framework: str, **how: object) -> str:
        found = moved(program(TINY, framework=framework, fused_norm=True, **how))
        assert found["norm1.forward"][0] == "norm"
        return found["norm1.input_grad"][0]

    assert backward("megatron-core-0.12") == backward("megatron-lm-2023") == backward("nanotron") == "norm_grad"
    assert backward("megatron-deepspeed") == backward("megatron-lm-2021") == "norm_grad_apex"
    assert backward("fsdp") == backward("llm-foundry") == "norm_grad_torch"
    assert backward("megatron-core-0.12", compile=True) == "norm_grad_torch"


def test_the_fused_loss_holds_the_logits_and_nothing_else() -> None:
    # 32 tokens of 256 16-bit logits, which become their gradient; inputs of the final norm and the projection
    def head(framework: str) -> tuple[float, float]:
        found = tiny(framework, run={"cross_entropy_fusion": True, "cross_entropy_fusion_impl": "te"}).table.head
        return float(found.saved[0][0]) - 2 * 32 * 64 * 2, float(found.transient[0])

    logits = 32 * 256
    assert head("nemo-24") == (2 * logits, 256 * 64 * 2)  # and an empty gradient of the vocabulary's weight
    # InternEvo casts them to fp32; beside them is the 16-bit gradient of the cast, or first what a log takes exponentials of
    assert head("internevo-2023") == (4 * logits, 2 * logits) and head("internevo-2024") == (4 * logits, 4 * logits)


@pytest.mark.parametrize(("gated", "biases"), [(True, 2 * 128 + 64), (False, 128 + 64)])
def test_biases_of_the_mlp(gated: bool, biases: int) -> None:
    # of gate and up, or of the up projection alone, and of the output; over two ranks the output's is whole on each
    model = TINY.replace(gated_mlp=gated)
    assert parameters(model.replace(mlp_bias=True)) - parameters(model) == 2 * biases
    one, two = (program(model.replace(mlp_bias=True), tp=tp).weight_elements("others")[0] - 2 * 64 for tp in (1, 2))
    assert (one, two) == (biases, (biases - 64) / 2 + 64)


@pytest.mark.parametrize(("framework", "kept"), [("megatron-core", 1), ("megatron-lm-2023", 2), ("torchtitan", 2)])
def test_inputs_of_quantised_linears_are_kept_in_a_byte(framework: str, kept: int) -> None:
    # Transformer Engine keeps what it multiplied; the output projection can then no longer share the core's 16-bit context
    found = {precision: saved_bytes(program(TINY, framework=framework, precision=precision)) for precision in ("bf16", "fp8")}
    for name in ("norm1_output", "norm2_output", "act_output"):
        assert found["fp8"][name] * 2 == found["bf16"][name] * kept
    assert ("context_quantised" in found["fp8"]) == (kept == 1)
    assert found["fp8"]["qkv"] == found["bf16"]["qkv"]


def test_a_norm_that_gathers_serves_all_linears_that_read_it() -> None:
    def collectives(mode: str) -> list[str]:
        layer = program(TINY, mode, 2, framework="aleph alpha")
        return sorted(f"{op.label} {op.kind}" for op in layer.ops if op.stream == "tp" and np.ravel(op.count)[0])

    # sequence split: one all-gather each for q, k and v and for gate and up, one reduce-scatter of their gradients, and the
    # reverse around the row linears; else gate and up each all-reduce the gradient of the input that they share
    assert [name for name in collectives("msp") if name.endswith("all_gather")] == [
        "w1.all_gather.forward all_gather",
        "w2.all_gather.input_grad all_gather",
        "wo.all_gather.input_grad all_gather",
        "wqkv.all_gather.forward all_gather",
    ]
    assert len([name for name in collectives("msp") if name.endswith("reduce_scatter")]) == 4
    assert len([name for name in collectives("mtp") if "input_grad" in name and name.endswith("all_reduce")]) == 3
    # the gradients of gate and up are added before they are scattered: 32 tokens of 64 values, two bytes read twice and written
    sums = moved(program(TINY, "msp", 2, framework="aleph alpha"))
    assert sums["norm2.gradients.input_grad"] == ("residual", 32 * 64 * 6)


@pytest.mark.parametrize("norms", [1, 2, 4])
def test_each_eager_norm_keeps_an_fp32_copy_of_its_input(norms: int) -> None:
    """32 tokens of 64 values in 4 bytes; with one norm (attention and MLP side by side) no second one reads the residual."""
    model = TINY.replace(norms_per_layer=norms)
    saved = saved_bytes(program(model, fused_norm=False))
    assert saved["norms_fp32"] == norms * 32 * 64 * 4
    assert ("residual1" in saved) == ("norm2_output" in saved) == (norms > 1)
    assert "norms_fp32" not in {each.name for each in program(model, fused_norm=True).saved}
