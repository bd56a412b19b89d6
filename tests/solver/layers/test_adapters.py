"""Low-rank adapters: sizes and work by hand, what freezing the other weights saves, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from references import op_flops
from toy import TINY, estimated, layer_keys, make_problem, toy_cost

from profiler.errors import InputError
from solver.layers.decoder import embedding_program, layer_program
from solver.layers.head import head_program
from solver.layers.program import ADAPTERS, FORWARD, LINEAR, WEIGHT_GRAD, LayerProgram
from solver.search.search import search
from solver.spec.cluster import cluster_of
from solver.spec.model import ModelSpec
from solver.spec.model_size import adapter_parameters, flops_per_token
from solver.spec.strategy import Strategy
from solver.step.data_parallel_ops import synchronisation_ops
from solver.step.parameter_groups import parameter_groups
from solver.step.solutions import Solutions

RUN = {"framework": "nemo-automodel", "precision": "bf16"}


def layer(tp: int = 1, **constants: Any) -> LayerProgram:
    run = Strategy(world_size=8, dp=8, seq_len=256, **(RUN | constants))
    return layer_program(layer_keys("mtp", tp=tp), TINY, run, cluster_of(toy_cost().device))


def gemm_flops(program: LayerProgram, *parts: str) -> float:
    """Return the FLOPs of the GEMMs whose name holds one of ``parts``; of all GEMMs without adapters where none is given."""
    chosen = [
        op
        for op in program.ops
        if op.kind == LINEAR and (any(part in op.name for part in parts) if parts else "lora" not in op.name)
    ]
    return sum(float(np.ravel(op_flops(op) * op.count)[0]) for op in chosen)


def step(model: ModelSpec = TINY, **layout: Any) -> Solutions:
    constants = {key: layout.pop(key) for key in ("lora_rank", "compile") if key in layout}
    problem = make_problem(model, 8, toy_cost(), 256, **RUN, **constants)
    return estimated(problem, [problem.layout(**{"zero": 3, "zero_shard_size": 8, "num_micro_batches": 1, **layout})])


def test_sizes_by_hand() -> None:
    """q 64 x 64, k and v 64 x 32, o 64 x 64, gate and up 64 x 128, down 128 x 64; of each rank 4 rows and columns."""
    by_hand = 4 * ((64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3)
    assert layer(lora_rank=4).weight_elements(ADAPTERS)[0] == by_hand == 4096
    assert adapter_parameters(TINY, 4) == TINY.num_hidden_layers * by_hand
    assert layer().weight_elements(ADAPTERS)[0] == 0
    halved = 4 * ((64 + 32) + 2 * (64 + 16) + (32 + 64) + 2 * (64 + 64) + (64 + 64))  # A whole, B cut; the reverse for o, down
    assert layer(tp=2, lora_rank=4).weight_elements(ADAPTERS)[0] == halved


def test_work_by_hand() -> None:
    """Frozen linears have two passes of three; A and B three each, of 2 m r k and 2 m n r."""
    trained, frozen = layer(), layer(lora_rank=4)
    assert gemm_flops(frozen) == pytest.approx(gemm_flops(trained) * 2 / 3, rel=1e-12)
    assert gemm_flops(frozen, "lora_a", "lora_b") == 3 * 2 * 256 * 4096
    assert not [op.label for op in frozen.ops if op.phase == WEIGHT_GRAD and "lora" not in op.name]
    saved = {tensor.name: float(np.ravel(tensor.bytes)[0]) for tensor in frozen.saved}
    assert saved["adapters"] == 7 * 256 * 4 * 2
    assert {name: size for name, size in saved.items() if name != "adapters"} == {
        t.name: float(np.ravel(t.bytes)[0]) for t in trained.saved
    }


def test_scaling_and_addition_by_hand() -> None:
    """Outputs 64 + 2 * 32 + 64 + 2 * 128 + 64 a token, inputs 4 * 64 + 2 * 64 + 128, X A^T 7 * 4, 2 bytes each, 256 tokens."""
    outputs, inputs, scaled = 512 * 256 * 2, 512 * 256 * 2, 7 * 4 * 256 * 2
    for compiled, passes in ((False, 2 + 2), (True, 0)):
        ops = [op for op in layer(lora_rank=4, compile=compiled).ops if ".lora_" in op.name and op.kind != LINEAR]
        assert sum(float(np.ravel(op.dims["bytes"])[0]) for op in ops) == 3 * outputs + passes * scaled + 3 * inputs


def test_embedding_and_head_are_frozen() -> None:
    run = Strategy(world_size=8, dp=8, seq_len=256, lora_rank=4, **RUN)
    given_ = layer_keys("mtp"), TINY, run, cluster_of(toy_cost().device)
    assert {op.phase for op in embedding_program(*given_).ops} == {FORWARD}
    assert WEIGHT_GRAD not in {op.phase for op in head_program(*given_).ops}


def test_only_adapters_are_reduced_and_updated() -> None:
    problem = make_problem(TINY, 8, toy_cost(), 256, lora_rank=4, **RUN)
    found = estimated(problem, [problem.layout(zero=0, num_micro_batches=1)])
    splits = found.layouts.splits
    ops = synchronisation_ops(problem, parameter_groups(found.priced), splits)
    reduced = sum(float(np.ravel(op.dims["bytes"])[0]) for op in ops if op.name == "gradients.all_reduce")
    assert reduced == 2 * 4096 * 2  # 16-bit gradients of two layers


def test_memory_by_hand() -> None:
    """Without ZeRO: 2 bytes of a frozen weight, 2 + 2 + 12 of an adapter's."""
    held = step(zero=0, zero_shard_size=1, lora_rank=4, num_micro_batches=2).memory.parts[:3, 0]
    frozen = 2 * (36864 + 2 * 64) + 2 * 256 * 64 + 64
    assert held == pytest.approx([2 * frozen + 2 * 8192, 2 * 8192, 12 * 8192])
    sharded = step(lora_rank=4, num_micro_batches=2).memory.parts[:3, 0]
    # the fp32 shards are the only copy of a trained weight; its gradients stay whole until the second micro batch
    assert sharded.sum() == pytest.approx((2 * frozen + 8192 * 12) / 8 + 2 * 8192)


@settings(max_examples=40)
@given(st.sampled_from([(0, 1), (1, 8), (2, 8), (3, 8)]), st.integers(1, 64))
def test_a_larger_rank_is_never_faster_nor_smaller(zero: tuple[int, int], rank: int) -> None:
    layout = {"zero": zero[0], "zero_shard_size": zero[1]}
    small, large = (step(lora_rank=r, **layout) for r in (rank, rank + 1))
    assert small.times.seconds[0] < large.times.seconds[0] and small.memory.allocated[0] < large.memory.allocated[0]


def test_model_flops_leave_out_the_gradients_of_frozen_weights() -> None:
    whole, frozen = flops_per_token(TINY, 256), flops_per_token(TINY, 256, frozen=True)
    assert whole - frozen == 2.0 * (2 * 36864 + 256 * 64)
    found = step(lora_rank=4)
    assert found.flops_per_second[0] == pytest.approx(found.tgs[0] * frozen)


@pytest.mark.parametrize(
    ("constants", "changes", "message"),
    [
        ({"framework": "megatron-core"}, {}, "adapters are not modelled with megatron-core"),
        ({"precision": "fp8"}, {}, "adapters are not modelled with precision fp8"),
        ({}, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}, "not modelled with experts"),
        ({"lora_rank": -1}, {}, "lora_rank is -1"),
    ],
)
def test_what_is_not_described_is_refused(constants: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search(make_problem(TINY.replace(**changes), 8, toy_cost(), 256, **{**RUN, "lora_rank": 4, **constants}), 64)


def test_a_search_offers_no_selective_recomputation() -> None:
    found = search(make_problem(TINY, 8, toy_cost(), 256, lora_rank=4, **RUN), 64, top=1000)
    levels = set(found.best.layouts.recompute.tolist())
    assert levels == {0, 2}


def test_frozen_weights_are_gathered_all_the_same() -> None:
    """FSDP2 gathers every parameter of a unit, and with ZeRO-2 in every micro batch; the adapters' are few."""

    def gathered(rank: int) -> float:
        problem = make_problem(TINY, 8, toy_cost(), 256, **(RUN | {"lora_rank": rank}))
        found = estimated(problem, [problem.layout(zero=2, zero_shard_size=8, num_micro_batches=4)])
        ops = synchronisation_ops(problem, parameter_groups(found.priced), found.layouts.splits)
        sent = [op for op in ops if op.name == "parameters.all_gather" and op.kind == "all_gather"]
        return sum(float(np.ravel(op.dims["bytes"] * op.count)[0]) for op in sent)

    assert gathered(0) < gathered(4) < 1.1 * gathered(0)
