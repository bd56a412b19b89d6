"""Bytes of weights, gradients and states by precision and framework, and messages of a shared input, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy import BYTE, CONTENTION, DEVICE, LINK, TINY, estimated, make_problem, toy_cost, toy_layout

from predictor.cost_model import CostModel
from predictor.kernels.memory_bound import MemoryBoundModel
from predictor.network.overlap import contention
from profiler.errors import InputError
from profiler.profile.profile import Device, Table
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import framework_of
from solver.spec.precision import ElementBytes, element_bytes
from solver.step.memory import MEMORY_PARTS
from solver.step.solutions import Solutions
from solver.step.time import TIME_PARTS


def sizes(precision: str, framework: str, grad_dtype: str = "fp32") -> ElementBytes:
    return element_bytes(toy_layout(1, precision=precision, grad_dtype=grad_dtype), framework_of(framework))


def test_bytes_of_every_precision() -> None:
    assert sizes("bf16", "internevo", "bf16") == ElementBytes(activation=2, weight=2, gradient=2, states=12, sharded=12)
    assert sizes("fp8", "nemo") == ElementBytes(activation=2, weight=2, gradient=4, states=12, sharded=12)
    assert sizes("bf16", "pytorch") == ElementBytes(activation=2, weight=4, gradient=4, states=8, sharded=12)
    assert sizes("fp32", "pytorch") == ElementBytes(activation=4, weight=4, gradient=4, states=8, sharded=12)
    assert {sizes(p, f).sharded for p in ("bf16", "fp32") for f in ("pytorch", "torchtitan")} == {12}


def tiny(world_size: int = 1, layout: Mapping[str, Any] | None = None, **constants: Any) -> Solutions:
    run = {"framework": "pytorch", "grad_dtype": "fp32", **constants}
    problem = make_problem(TINY, world_size, toy_cost(), 32, **run)
    return estimated(problem, [problem.layout(zero=0, **(layout or {}))])


def test_fp32_weights_and_states_are_16_bytes_per_parameter() -> None:
    # two layers of 36,864 + 128, embedding and head of 256 * 64, final norm of 64
    parameters = 2 * (36_864 + 128) + 2 * 16_384 + 64
    for precision in ("fp32", "bf16"):
        found = tiny(layout={"num_micro_batches": 2}, precision=precision)
        assert found.memory.parts[:3, 0].tolist() == [4.0 * parameters, 4.0 * parameters, 8.0 * parameters]


def test_copies_of_autocast_come_and_go_with_the_activations() -> None:
    # at the loss of 256 sequences: of the linears of both layers, unless they are recomputed, and of the head; 2 bytes each
    for level, layers in (("none", 2), ("full", 0)):
        layout = {"recompute": level, "micro_batch_size": 256, "num_micro_batches": 2}
        found = tiny(layout=layout, precision="bf16", framework="profiler-train")
        held = dict(zip(MEMORY_PARTS, found.memory.parts[:, 0], strict=True))
        layer, head = found.table.layers[0], found.table.head
        saved = layer.saved[int(Recompute[level.upper()]), 0]
        assert held["activations"] == 2 * saved + layers * 2 * 36_864
        assert held["loss"] == head.saved[0, 0] + head.transient[0] + 2 * (16_384 + 64)
        assert sum(held.values()) == found.memory.allocated[0]


def test_ddp_keeps_buckets_as_large_as_all_gradients_and_casts_its_weights() -> None:
    # gradient_as_bucket_view is off, unlike in this project's trainer: 4 bytes of each of 106,816 parameters
    def gradients(framework: str, micro_batches: int) -> float:
        layout = {"dp": 2, "num_micro_batches": micro_batches}
        return float(tiny(2, layout, precision="bf16", framework=framework).memory.parts[1, 0])

    each = 4.0 * (2 * (36_864 + 128) + 2 * 16_384 + 64)
    assert [gradients("pytorch", 2), gradients("profiler-train", 2)] == [2 * each, each]
    assert [gradients("pytorch", 1), gradients("profiler-train", 1)] == [each, each]  # buckets, and views of them
    plain = tiny(2, {"dp": 2}, precision="bf16")
    # each linear's weight is read in fp32 and written in 16 bits, its gradient the other way round
    casts = [op.dims["bytes"] for op in plain.table.layer.estimates.ops if op.name.endswith(".autocast")]
    assert float(np.sum(casts)) == 2 * 6 * 36_864


def test_fp32_activations_take_twice_the_bytes_and_time_of_bf16() -> None:
    wide, half = (tiny(precision=precision, framework="profiler-train") for precision in ("fp32", "bf16"))
    kept = [s.table.layer.saved[0, 0] for s in (wide, half)]
    # the log-sum-exp of attention (4 heads * 32 tokens) is fp32 in both
    assert kept[0] - 512 == 2 * (kept[1] - 512)
    streams = [
        [op for op in s.table.layer.estimates.ops if op.kind == "memory_bound" and "autocast" not in op.name]
        for s in (wide, half)
    ]
    assert [op.dims["bytes"] for op in streams[0]] == [2 * op.dims["bytes"] for op in streams[1]]
    assert {op.dtype for op in wide.table.layer.estimates.ops if op.kind == "linear"} == {"fp32"}


def test_projections_of_one_input_communicate_once_where_the_framework_does_so() -> None:
    # (q, k, v) and (gate, up): two all-gathers forward, two reduce-scatters backward, and those of the two row-split linears
    def messages(framework: str) -> int:
        found = tiny(2, {"tp": 2, "dp": 1, "tp_mode": "msp"}, framework=framework)
        ops = found.table.layer.estimates.ops
        return int(sum(np.ravel(op.count)[0] for op in ops if op.stream == "tp"))

    assert messages("pytorch") == 4 + 4
    assert messages("aleph alpha") == 4 + 4  # its norm gathers


def test_a_measured_chain_of_eager_kernels_takes_its_measured_time() -> None:
    # 1 us and 1e-11 s per byte; where it was not measured, tests/predictor/kernels/test_memory_bound.py
    size = np.geomspace(1e5, 1e9, 12).round()
    rows = Table.from_columns("memory_bound", {"kind": "rope_eager", "bytes": size, "seconds": 1e-6 + size * 1e-11})
    assert MemoryBoundModel.fit(rows, DEVICE).predict("rope_eager", 1e8).seconds == pytest.approx(1.001e-3, rel=0.01)


def test_contention_is_that_of_the_overlap_measurements() -> None:
    # overlapped with a GEMM slowed by 1.25 a message takes 1.5 times its exposed time: 1.5 * (1 - 1 / 1.25) = 0.3 is lost
    gemm, message = [1.25] * 3 + [9.0], [1.5] * 3 + [9.0]
    columns = {"bytes": [2**22] * 3 + [1024], "gemm_slowdown": gemm, "collective_slowdown": message, "seconds": 1.0}
    assert contention(DEVICE, Table.from_columns("overlap", columns)) == (pytest.approx(0.3), 0.0)
    assert contention(DEVICE, Table.from_columns("overlap", {})) == (CONTENTION, 0.0)
    assert pytest.approx(24 / DEVICE.num_sms) == CONTENTION


def test_ddp_copies_gradients_through_buckets_and_fsdp_through_buffers() -> None:
    parameters = 2 * (36_864 + 128) + 2 * 16_384 + 64
    one, two = (tiny(n, overlap_grad_reduce=False, precision="fp32") for n in (1, 2))
    # four passes of 4 bytes over the gradients, and their all-reduce
    added = two.times.seconds[0] - one.times.seconds[0]
    assert added == pytest.approx(parameters * 4 * (4 * BYTE + LINK) + 4 * LINK, rel=1e-9)


def test_block_scaled_fp8_has_the_same_peak() -> None:
    cost = toy_cost(device=replace(DEVICE, peak_flops={"bf16": 1e15, "fp8": 2e15, "mxfp8": 2e15}))
    problems = [make_problem(TINY, 1, cost, 64, precision=name, framework="megatron-core") for name in ("fp8", "mxfp8")]
    plain, scaled = (estimated(each, [each.layout()]) for each in problems)
    assert plain.mfu[0] / plain.tgs[0] == pytest.approx(scaled.mfu[0] / scaled.tgs[0], rel=1e-12)


@pytest.mark.parametrize("precision", ["mxfp8", "nvfp4"])
def test_block_scaled_formats_need_their_units(h100_model: CostModel, precision: str) -> None:
    message = f"precision {precision} does not run on NVIDIA H100 SXM 80GB, whose number formats are bf16, fp16, fp32, fp8"
    with pytest.raises(InputError, match=message):
        make_problem(TINY, 1, h100_model, 64, precision=precision, framework="megatron-core")


@pytest.mark.parametrize("framework", ["internevo", "nanotron", "megatron-deepspeed", "megatron-lm-2021"])
def test_frameworks_without_quantised_linears_are_named(h100_model: CostModel, framework: str) -> None:
    with pytest.raises(InputError, match=f"precision fp8 is none of {framework}.*'s, whose linears are 16-bit or fp32"):
        make_problem(TINY, 1, h100_model, 64, precision="fp8", framework=framework)


def quantised(device: Device = DEVICE, **constants: Any) -> Solutions:
    """Return a step of TINY on two ranks that share the optimizer (ZeRO-1), under Megatron-Core in fp8."""
    run = {"framework": "megatron-core", "precision": "fp8", **constants}
    run |= {"overlap_param_gather": False, "overlap_grad_reduce": False}
    problem = make_problem(TINY, 2, toy_cost(device=device), 64, **run)
    return estimated(problem, [problem.layout(zero=1, zero_shard_size=2)])


def test_quantised_weights_are_held_beside_the_16_bit_ones_or_instead() -> None:
    # two layers of 36,864 weights in linears; a byte for the quantised copy and one for its transpose
    linears, weights = 2 * 36_864, MEMORY_PARTS.index("weights")
    plain, beside, instead = (
        quantised(**c).memory.parts[weights, 0] for c in ({"precision": "bf16"}, {}, {"fp8_param_gather": True})
    )
    assert beside - plain == 2 * linears and instead == plain
    # a chip that reads both orders needs no transpose
    newer = replace(DEVICE, peak_flops={**DEVICE.peak_flops, "mxfp8": 2e15})
    beside, instead = (quantised(newer, fp8_param_gather=p).memory.parts[weights, 0] for p in (False, True))
    assert (beside - plain, instead - plain) == (linears, -linears)
    # scales along an axis need both copies all the same
    assert quantised(newer, precision="mxfp8").memory.parts[weights, 0] - plain == 2 * linears * 33 / 32
    # the first layer stays 16-bit
    assert quantised(num_layers_at_start_in_bf16=1).memory.parts[weights, 0] - plain == linears


def test_quantised_weights_are_gathered_in_a_byte() -> None:
    gather, optimizer = TIME_PARTS.index("parameter_gather"), TIME_PARTS.index("optimizer")
    plain, beside, instead = (quantised(**c).times.parts[:, 0] for c in ({"precision": "bf16"}, {}, {"fp8_param_gather": True}))
    linears = 2 * 36_864
    assert beside[gather] == plain[gather]
    assert plain[gather] - instead[gather] == pytest.approx(linears * LINK, rel=1e-9)
    # a layer that stays in bf16 is gathered in 16 bits
    half = quantised(fp8_param_gather=True, num_layers_at_end_in_bf16=1, fp8_recipe="tensorwise").times.parts[:, 0]
    assert plain[gather] - half[gather] == pytest.approx(linears / 2 * LINK, rel=1e-9)
    # 16 bits read, a copy and its transpose written, once a step; or the transpose alone, read and written
    assert beside[optimizer] - plain[optimizer] == pytest.approx(linears * 4 * BYTE, rel=1e-9)
    assert instead[optimizer] - plain[optimizer] == pytest.approx(linears * 2 * BYTE, rel=1e-9)


def test_what_a_framework_does_not_offer_in_quantised_runs_is_refused() -> None:
    for run, wrong in (
        ({"framework": "nemo-automodel", "fp8_param_gather": True, "zero": 3}, "does not offer fp8_param_gather"),
        ({"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 1}, "more layers are to stay in bf16"),
    ):
        with pytest.raises(InputError, match=wrong):
            check_layout(TINY, cluster_of(DEVICE), toy_layout(2, 64, precision="fp8", **run))
