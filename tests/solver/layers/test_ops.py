"""Linears and their collectives: what overlaps with what, the share that cannot, and fp32 accumulation; worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy import DEVICE, TINY, layer_keys, toy_layout

from solver.layers.decoder import layer_program
from solver.layers.head import head_program
from solver.layers.program import LINEAR, Op
from solver.spec.cluster import cluster_of
from solver.spec.layer_kinds import PLAIN


def ops_of(mode: str, tp: Any, build: Any = layer_program, window: int = 0, **constants: Any) -> dict[str, Op]:
    """Return the ops of TINY with sequences of 32 tokens, by label."""
    kinds = (replace(PLAIN, window=window),) if window else ()
    program = build(layer_keys(mode, tp), TINY, toy_layout(8, 32, **constants), cluster_of(DEVICE), *kinds)
    return {op.label: op for op in program.ops}


def test_the_last_chunk_of_a_pipelined_reduce_scatter_overlaps_with_nothing() -> None:
    # a message that overlaps with its own GEMM is sent in parts, and the GEMM runs in as many: one for each rank where it is
    # gathered, of which the rank's own waits for nothing; four where it is scattered, of which the last has no GEMM beside it
    ops = ops_of("msp", [2, 4], framework="megatron-core", tp_comm_overlap=True)
    for label in (
        "wqkv.all_gather.forward",
        "w13.all_gather.forward",
        "wo.reduce_scatter.forward",
        "w2.reduce_scatter.forward",
        "w2.all_gather.input_grad",
    ):
        name, op, phase = label.split(".")
        parts = [4, 4] if op == "reduce_scatter" else [2, 4]
        assert ops[label].exposed_share == (1 / 4 if op == "reduce_scatter" else 0), label
        assert ops[f"{name}.{phase}"].dims["parts"].tolist() == parts
        assert ops[label].overlaps_with == (f"{name}.{phase}",)
    assert "parts" not in ops["w13.weight_grad"].dims and "parts" not in ops["w13.input_grad"].dims
    # those of other GEMMs are sent as a whole
    assert ops["w13.reduce_scatter.input_grad"].overlaps_with == ("w13.weight_grad",)
    assert not np.any(ops["w13.reduce_scatter.input_grad"].exposed_share)


def test_without_user_buffers_no_collective_overlaps_with_its_own_gemm() -> None:
    ops = ops_of("msp", 2, framework="megatron-core")
    assert not any(op.overlaps_with for op in ops.values() if op.stream == "tp")


@pytest.mark.parametrize(("framework", "overlaps"), [("internevo", True), ("megatron-lm", True), ("megatron-core", False)])
def test_the_head_reduces_its_input_gradient_beside_its_weight_gradient(framework: str, overlaps: bool) -> None:
    # asynchronous since Megatron-LM of 2022; Transformer Engine's GEMMs leave no room
    under = (("vocab.weight_grad",), ("vocab.input_grad",)) if overlaps else ((), ())
    for mode, op in (("mtp", "all_reduce"), ("msp", "reduce_scatter")):
        assert ops_of(mode, 2, head_program, framework=framework)[f"vocab.{op}.input_grad"].overlaps_with == under[0]
    assert ops_of("fsp", 2, head_program, framework=framework)["vocab.regather.input_grad"].overlaps_with == under[1]


@pytest.mark.parametrize(
    ("precision", "grad_dtype", "adds"),
    [("bf16", "fp32", True), ("bf16", "bf16", False), ("fp32", "fp32", False), ("fp8", "fp32", True)],
)
def test_only_fp32_gradients_of_narrower_gemms_are_accumulated(precision: str, grad_dtype: str, adds: bool) -> None:
    def accumulated(**run: Any) -> set[str]:
        ops = ops_of("mtp", 1, framework="megatron-core", precision=precision, grad_dtype=grad_dtype, **run)
        return {label for label, op in ops.items() if op.kind == LINEAR and op.dims["accumulate"]}

    assert accumulated() == ({f"{name}.weight_grad" for name in ("wqkv", "wo", "w13", "w2")} if adds else set())
    assert not accumulated(gradient_accumulation_fusion=False), "a kernel of its own adds what these GEMMs write"


@pytest.mark.parametrize("framework", ["llm-foundry-2024", "fsdp", "torchtitan-2025-06", "nanotron"])
def test_gemms_of_autograd_write_16_bits_whatever_gradients_are(framework: str) -> None:
    ops = ops_of("mtp", 1, framework=framework, grad_dtype="fp32")
    assert not any(np.any(op.dims["accumulate"]) for op in ops.values() if op.kind == LINEAR)


def test_deterministic_runs_fill_new_tensors_before_they_are_written() -> None:
    # torch.use_deterministic_algorithms: outputs of linears and of attention, 32 tokens, 2 bytes; weight gradients that are not
    # added to fp32 buffers: q, k, v 64 x 128
    ops = ops_of("mtp", 1, framework="megatron-core", grad_dtype="bf16", deterministic=True)
    filled = {label: float(np.ravel(op.dims["bytes"])[0]) for label, op in ops.items() if ".fill" in label}
    assert filled["wqkv.fill.forward"] == 32 * 128 * 2 and filled["wqkv.fill.input_grad"] == 32 * 64 * 2
    assert filled["wqkv.fill.weight_grad"] == 64 * 128 * 2
    assert filled["attention.fill.forward"] == 32 * 64 * 2
    assert filled["attention.fill.input_grad"] == 32 * (64 + 2 * 32) * 2  # of queries, keys and values
    windowed = ops_of("mtp", 1, framework="megatron-core", window=8, deterministic=True)
    assert windowed["attention.input_grad"].dims["seq_kv"] < 32, "a query sees some of the keys, all of which have gradients"
    assert windowed["attention.fill.input_grad"].dims["bytes"] == filled["attention.fill.input_grad"]
    fp32 = ops_of("mtp", 1, framework="megatron-core", grad_dtype="fp32", deterministic=True)
    assert np.all(fp32["wqkv.fill.weight_grad"].dims["bytes"] == 0)
    # a ring of one rank takes no further step, and fills nothing for it
    assert float(np.ravel(ops["attention.step.fill.forward"].count)[0]) == 0
    assert not any("fill" in label for label in ops_of("mtp", 1, framework="megatron-core"))


@pytest.mark.parametrize(("precision", "layer", "head"), [("fp8", "fp8", "bf16"), ("fp16", "bf16", "bf16"), ("fp32",) * 3])
def test_all_linears_but_the_head_are_quantised(precision: str, layer: str, head: str) -> None:
    # 16-bit formats run equally fast and share the name of one
    assert {op.dtype for op in ops_of("mtp", 1, precision=precision).values() if op.kind == LINEAR} == {layer}
    assert {op.dtype for op in ops_of("mtp", 1, head_program, precision=precision).values() if op.kind == LINEAR} == {head}


def test_gradients_of_an_input_that_several_linears_read_are_added() -> None:
    # 32 tokens of 64 values in 16 bits: two reads and a write for each gradient but the first; by rank where each linear
    # scatters its own, of whole tokens where they scatter together
    labels, one = ("norm1.gradients.input_grad", "norm2.gradients.input_grad"), 32 * 64 * 2

    def moved(mode: str, tp: int, **constants: Any) -> list[float]:
        ops = ops_of(mode, tp, **constants)
        return [float(np.ravel(ops[label].dims["bytes"])[0]) if label in ops else 0.0 for label in labels]

    assert moved("mtp", 1, framework="megatron-core") == [
        0,
        0,
    ]  # one linear for queries, keys and values, and one for gate and up
    assert moved("mtp", 1, framework="torchtitan") == [2 * 3 * one, 3 * one]
    assert moved("mtp", 1, framework="torchtitan", compile=True) == [2 * one, one]  # the norm's kernel reads one more
    assert moved("msp", 4, framework="torchtitan") == [2 * 3 * one, 3 * one]
    assert moved("msp", 4, framework="internevo-2024") == [0, 3 * one / 4]
    adds = ops_of("mtp", 1, framework="torchtitan")[labels[0]]
    assert adds.launches == 2


def test_torchs_collectives_copy_along_the_sequence() -> None:
    # 32 tokens of 64 values in two bytes are read and written once more by each all-gather and reduce-scatter of both passes
    def copies(**run: Any) -> dict[str, float]:
        ops = ops_of("msp", 2, framework="torchtitan-2025-06", precision="bf16", **run)
        return {
            label: float(np.ravel(op.dims["bytes"])[0])
            for label, op in ops.items()
            if op.name.endswith(".copy") and np.any(op.count)
        }

    whole = 2 * 32 * 64 * 2
    both = {
        f"{name}.copy.{phase}"
        for name, phase in (
            ("wq.all_gather", "forward"),
            ("wq.reduce_scatter", "input_grad"),
            ("wo.reduce_scatter", "forward"),
            ("wo.all_gather", "input_grad"),
            ("w1.all_gather", "forward"),
            ("w1.reduce_scatter", "input_grad"),
            ("w2.reduce_scatter", "forward"),
            ("w2.all_gather", "input_grad"),
        )
    }
    assert copies() == dict.fromkeys(both, whole)
    # torch's pass fuses all but the reduce-scatters whose input several GEMMs make: q, k and v, and gate and up
    summed = {"wq.reduce_scatter.copy.input_grad", "w1.reduce_scatter.copy.input_grad"}
    assert copies(tp_comm_overlap=True, compile=True) == dict.fromkeys(summed, whole)
    others = ops_of("msp", 2, framework="megatron-core").values()
    assert not any(op.name.endswith(".copy") and np.any(op.count) for op in others)


def test_torchs_overlapped_reduce_scatter_is_an_all_to_all_and_a_sum() -> None:
    """In as many parts as ranks, of which the last has nothing beside it; a kernel sums what came: whole x (1 + 1 / tp)."""
    ops = ops_of(
        "msp", np.array([1, 2, 4]), framework="torchtitan-2025-06", precision="bf16", tp_comm_overlap=True, compile=True
    )
    whole = 32 * 64 * 2
    for name in ("wo", "w2"):
        sums = ops[f"{name}.partials.forward"]
        assert sums.dims["bytes"].tolist() == [2 * whole, 1.5 * whole, 1.25 * whole] and sums.count.tolist() == [0, 1, 1]
        assert ops[f"{name}.reduce_scatter.forward"].exposed_share.tolist() == [1, 1 / 2, 1 / 4]
        assert ops[f"{name}.reduce_scatter.forward"].overlaps_with == (f"{name}.forward",)
    for name in ("wq", "w1"):  # their input gradients are sums of several products, which the pass does not fuse
        assert not ops[f"{name}.reduce_scatter.input_grad"].overlaps_with
        assert f"{name}.partials.input_grad" not in ops
    of_nemo = ops_of("msp", np.array([1, 2, 4]), framework="nemo-25", precision="bf16", tp_comm_overlap=True)
    assert not any(".partials" in label for label in of_nemo)


def test_gemms_beside_an_all_reduce_run_whole() -> None:
    # only what is gathered or scattered part by part is multiplied so: without a sequence split the GEMMs are in one piece
    ops = ops_of("mtp", 2, framework="generic", tp_comm_overlap=True)
    parts = {label: np.ravel(op.dims["parts"]).tolist() for label, op in ops.items() if "parts" in op.dims}
    assert {"w13.forward", "wo.forward", "w2.input_grad"} <= parts.keys() and all(each == [1] for each in parts.values())


@pytest.mark.parametrize(
    ("release", "sequences", "copied"),
    [("torchtitan-2025-06", 1, 4), ("torchtitan-2026-02", 1, 0), ("torchtitan-2026-02", 2, 4)],
)
def test_newer_releases_of_torch_view_what_is_gathered_of_one_sequence(release: str, sequences: int, copied: int) -> None:
    run = toy_layout(8, 32, framework=release)
    ops = layer_program(layer_keys("msp", 2, micro_batch_size=sequences), TINY, run, cluster_of(DEVICE)).ops
    assert sum(op.name.endswith("all_gather.copy") and bool(np.any(op.count)) for op in ops) == copied
    assert sum(op.name.endswith("reduce_scatter.copy") and bool(np.any(op.count)) for op in ops) == 4
