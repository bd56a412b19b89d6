"""ZeRO-3's messages, copies and waiting, computed by hand on the toy machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from round_trip import model_of
from toy import BYTE, LINK, NETWORK, TINY, make_problem, part, tiny, toy_cost

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.search.search import search
from solver.spec.frameworks import framework_of
from solver.step.message_counts import linear_tensors
from solver.step.sharded_weights import exposed_by_sharding, messages, neighbours_of
from solver.step.side_stream import SideStreamWork
from solver.step.solutions import Solutions
from solver.step.time import sharded_casts

#: Weights of a layer's linears, and its norms.
LAYER = 36_864 + 128
EXPOSED = {"overlap_grad_reduce": False, "overlap_param_gather": False, "compile": True, "grad_dtype": "fp32"}


def _sharded(framework: str, recompute: str = "none", **model: Any) -> Solutions:
    return tiny(framework, 8, TINY.replace(**model), EXPOSED, zero=3, zero_shard_size=8, recompute=recompute)


def test_fsdp_copies_between_parameters_and_buffers() -> None:
    # torch's FSDP of DDP's release: bf16 weights are copied twice (read and written once), fp32 gradients twice
    found = _sharded("pytorch-ddp")
    assert part(found, "gradient_sync")[0] == part(found, "parameter_gather")[0] == 0  # all of it is in the layers
    gather, scatter = found.terms.once.sharded.gather[0], found.terms.once.sharded.scatter[0]
    assert gather.communication[0] == pytest.approx(LAYER * 2 * LINK, rel=1e-12)
    assert gather.kernels[0] == pytest.approx(LAYER * 2 * 2 * BYTE, rel=1e-12)
    assert scatter.communication[0] == pytest.approx(LAYER * 4 * LINK, rel=1e-12)
    assert scatter.kernels[0] == pytest.approx(LAYER * 4 * 2 * BYTE, rel=1e-12)


def test_tied_tables_are_sent_once_by_fsdp() -> None:
    # embedding and head of 16,384 each and the final norm of 64, or one table: 2 bytes all-gathered, 4 reduce-scattered
    apart, tied = (_sharded("generic", tie_word_embeddings=tie).terms.once.sharded.root[0] for tie in (False, True))
    assert apart == pytest.approx((2 * 16_384 + 64) * 6 * LINK, rel=1e-12)
    assert tied == pytest.approx((16_384 + 64) * 6 * LINK, rel=1e-9)


def test_a_head_that_is_a_unit_of_its_own_hides_behind_the_last_layer() -> None:
    # torchtitan: the root has the embedding alone, 6 bytes each; the head's messages are overlapped with a layer's passes. Of
    # the eighth that a rank holds 6 bytes are the cast to 16 bits and 4 the copy into the message
    exposed = _sharded("torchtitan-2026-02").terms.once.sharded
    assert exposed.root[0] == pytest.approx(16_384 * (6 * LINK + (2 * 2.0 + 4 * 2.7 + 10 / 8) * BYTE), rel=1e-9)
    assert exposed.head is not None
    assert [work.communication[0] for work in exposed.head] == pytest.approx([(16_384 + 64) * size * LINK for size in (2, 4)])
    assert _sharded("torchtitan-2026-02", tie_word_embeddings=True).terms.once.sharded.head is None
    whole, part_ = (
        tiny(name, 8, TINY, {"grad_dtype": "fp32"}, zero=3, zero_shard_size=8, micro_batch_size=2048)
        for name in ("torchtitan-2025-06", "torchtitan-2026-02")
    )
    # the layers' compute is longer than the head's messages, of which contention is left: a tenth
    saved = part(whole, "fsdp_exposed")[0] - part(part_, "fsdp_exposed")[0]
    assert saved == pytest.approx(0.9 * (16_384 + 64) * 6 * LINK, rel=0.01)


def test_accelerate_gathered_the_root_of_fsdp2_again_for_its_backward_pass() -> None:
    # each 2 bytes all-gathered, and copied twice, behind a cast and a copy of an eighth (10 bytes); FSDP1, whose root stays,
    # does so once, with the cast alone (6)
    elements, reduced, gathered = 2 * 16_384 + 64, 4 * LINK + 4 * 2 * BYTE, 2 * LINK + (4 + 10 / 8) * BYTE
    twice = elements * (2 * gathered + reduced)
    assert _sharded("fsdp2-2025-10").terms.once.sharded.root[0] == pytest.approx(twice, rel=1e-9)
    # since accelerate 1.14 the embedding is apart from the head, once
    newest = _sharded("fsdp2").terms.once.sharded
    assert newest.root[0] == pytest.approx(16_384 * (gathered + reduced), rel=1e-9) and newest.head is not None
    # whose gradients autograd joins in 16 bits (4), before they are cast (6) and divided in fp32 (8)
    once = elements * (2 * LINK + 4 * LINK + (4 + 6 + 8 + 6 / 8) * BYTE)
    assert _sharded("fsdp").terms.once.sharded.root[0] == pytest.approx(once, rel=1e-9)


def test_layers_stand_between_layers_of_other_kinds() -> None:
    # 0 0 1 0 1: the first 0 stands for what is before it, the last 1 for what is behind it
    first, second = neighbours_of(np.array([0, 0, 1, 0, 1]), 2)
    assert first == ((0, 0, 1 / 3), (0, 1, 1 / 3), (1, 1, 1 / 3)) and second == ((0, 0, 1 / 2), (0, 1, 1 / 2))


def test_a_layer_is_gathered_beside_the_one_before_it() -> None:
    # a dense layer and one of experts, seconds forward and backward: beside the dense one (2, 4) the experts are gathered (5),
    # then the dense one is gathered and the experts reduced (1 + 6); beside the experts (4, 8) the same
    found = tiny("torchtitan-2025-06", 8, TINY, {"grad_dtype": "fp32"}, zero=3, zero_shard_size=8)

    def work(*seconds: float) -> tuple[SideStreamWork, ...]:
        return tuple(SideStreamWork(np.array([each]), np.zeros(1), np.zeros(1)) for each in seconds)

    kinds = np.array([0, 1])
    weights = replace(
        found.terms.once.sharded, gather=work(1, 5), scatter=work(2, 6), neighbours=neighbours_of(kinds, 2), head=None
    )
    forward, backward = np.array([[2.0], [4.0]]), np.array([[4.0], [8.0]])
    nothing = np.zeros((2, 1))
    layers = exposed_by_sharding(weights, found.layouts, forward, backward, nothing)[0]
    assert layers[:, 0].tolist() == [(5 - 2) + (1 + 6 - 4), (5 - 4) + 0]


def test_megatron_fsdp_gathers_and_shards_what_it_multiplies() -> None:
    run = {"precision": "fp8", "fp8_recipe": "tensorwise"}
    found = {
        on: tiny("megatron-bridge-26", 8, TINY, EXPOSED | run | {"fp8_param_gather": on}, zero=3, zero_shard_size=8)
        for on in (False, True)
    }
    sent = {on: one.terms.once.sharded.gather[0].communication[0] for on, one in found.items()}
    assert sent[False] == pytest.approx(LAYER * 2 * LINK) and sent[True] == pytest.approx((36_864 + 2 * 128) * LINK)
    # shards of an eighth: 16 bits of all weights, or one byte of the linears' (beside 12 bytes of fp32 weights and moments)
    elements, linears = 2 * LAYER + 2 * 16_384 + 64, 2 * 36_864
    weights = {on: one.memory.parts[0, 0] for on, one in found.items()}
    assert weights[False] == pytest.approx(2 * elements / 8) and weights[True] == pytest.approx((2 * elements - linears) / 8)
    assert tiny("generic", 8, TINY, EXPOSED, zero=3, zero_shard_size=8).memory.parts[0, 0] == 0


def test_torchtitan_quantises_shards_before_it_gathers_them() -> None:
    """enable_fsdp_float8_all_gather: the linears of a layer go in one byte and its norms in two. A rank casts its eighth: of 16
    bits 10 bytes for each weight (cast, and copied), of 8 bits two reads of fp32, a byte and its copy. What is sent is copied
    from the shards and to the weights, read and written."""
    run = {"precision": "fp8", "fp8_recipe": "tensorwise"}
    found = {
        on: tiny("torchtitan", 8, TINY, EXPOSED | run | {"fp8_param_gather": on}, zero=3, zero_shard_size=8)
        for on in (False, True)
    }
    gather = {on: one.terms.once.sharded.gather[0] for on, one in found.items()}
    wide, narrow = LAYER * 2, 36_864 + 128 * 2
    for on, sent, cast in ((False, wide, LAYER * 10 / 8), (True, narrow, (128 * 10 + 36_864 * 11) / 8)):
        assert gather[on].communication[0] == pytest.approx(sent * LINK, rel=1e-12)
        assert gather[on].kernels[0] == pytest.approx((cast + sent * 2) * BYTE, rel=1e-12)
    casts = {on: {op.name for op in one.table.layers[0].estimates.ops if ".weight_" in op.name} for on, one in found.items()}
    assert {name.rpartition(".")[2] for name in casts[True]} == {"weight_transpose"}
    assert {name.rpartition(".")[2] for name in casts[False]} == {"weight_cast", "weight_scale", "weight_transpose"}


def test_tensors_gathered_one_by_one_wait_for_lists_of_all_ranks() -> None:
    # four tensors of a layer, each of which 8 ranks' views and copies are made for
    found = _sharded("megatron-deepspeed-2021")
    lists = framework_of("megatron-deepspeed-2021").data_parallel.list_seconds_per_rank
    gather = found.terms.once.sharded.gather[0]
    assert gather.communication[0] == pytest.approx(LAYER * 2 * LINK, rel=1e-12)
    assert gather.kernels[0] == pytest.approx(4 * 8 * lists, rel=1e-12)
    # nothing overlaps: two layers gather twice and reduce once, embedding and head two tensors each way
    messages = 2 * (2 * LAYER * 2 + LAYER * 4) + (2 * 16_384 + 64) * 6
    expected = messages * LINK + (2 * 3 * 4 + 2 * 2) * 8 * lists
    assert part(found, "fsdp_exposed")[0] == pytest.approx(expected, rel=1e-12)


def test_recomputation_gathers_three_of_four_tensors_again() -> None:
    kept, recomputed = (_sharded("megatron-deepspeed-2021", how) for how in ("none", "full"))
    more = part(recomputed, "fsdp_exposed")[0] - part(kept, "fsdp_exposed")[0]
    assert more == pytest.approx(2 * 3 / 4 * kept.terms.once.sharded.gather[0].exposed[0], rel=1e-9)


def test_each_overlap_of_fsdp_hides_its_own_messages() -> None:
    def exposed(**overlaps: bool) -> float:
        found = tiny("generic", 8, TINY, EXPOSED | overlaps, zero=3, zero_shard_size=8, micro_batch_size=256)
        return float(part(found, "fsdp_exposed")[0])

    neither, gathers = exposed(), exposed(overlap_param_gather=True)
    reduces, both = exposed(overlap_grad_reduce=True), exposed(overlap_grad_reduce=True, overlap_param_gather=True)
    layers, ends = 2 * LAYER * (2 * 2 + 4), (2 * 16_384 + 64) * 6
    assert neither == pytest.approx((layers + ends) * LINK, rel=1e-12), (
        "two gathers and a reduction of each layer, one of the ends"
    )
    assert neither > gathers > both and neither > reduces > both


def test_layer_by_layer_gathers_overlap_and_know_no_lists() -> None:
    found = _sharded("megatron-deepspeed")
    assert found.terms.once.sharded.gather[0].kernels[0] == pytest.approx(2 * 2 * LAYER / 1e12)  # a copy: read and written
    assert part(found, "fsdp_exposed")[0] < part(_sharded("megatron-deepspeed-2021"), "fsdp_exposed")[0]


@pytest.mark.parametrize(
    ("framework", "gathers", "reductions"),
    [
        ("fsdp2", (1, 1), (1, 1)),
        ("megatron-deepspeed-2021", (4, 2), (4, 2)),
        ("megatron-deepspeed", (4, 2), (218e6 / 500e6, 2)),
        ("transformers-deepspeed", (7, 2), (7, 2)),
    ],
)
def test_messages_of_deepspeed_by_hand(
    framework: str, gathers: tuple[float, float], reductions: tuple[float, float], h100_model: CostModel
) -> None:
    # a layer of 218 million parameters, and both ends of 1,051 million: of 50 million and in buckets of 500 million; of 0.9 and
    # 1 times 4096 squared, which its seven matrices are too few for
    problem = make_problem(model_of("llama3_8b"), 8, h100_model, framework=framework)
    layer, ends = np.array([218e6]), np.array([1051e6])
    found = [messages(problem, name, size, size) for name, size in (("layer0", layer), ("root", ends))]
    assert [float(gathered[0]) for gathered, _ in found] == pytest.approx(gathers)
    assert [float(reduced[0]) for _, reduced in found] == pytest.approx(reductions)


@pytest.mark.parametrize(("zero", "same"), [(1, False), (2, False), (3, True)])
def test_deepspeed_overlaps_reductions_of_zero_3_unless_told(zero: int, same: bool) -> None:
    def found(overlaps: bool | None) -> tuple[float, float]:
        run = {"overlap_grad_reduce": overlaps, "precision": "bf16", "grad_dtype": "bf16"}
        one = tiny("transformers-deepspeed", 8, TINY, run, dp=8, zero=zero, zero_shard_size=8, num_micro_batches=2)
        return float(one.times.seconds[0]), float(one.memory.allocated[0])

    assert framework_of("transformers-deepspeed").flags_of("bf16")["overlap_grad_reduce"] is None
    assert found(None) == found(same) != found(not same)
    with pytest.raises(InputError, match="overlap_grad_reduce of megatron-core-0.12 is true or false"):
        search(make_problem(TINY, 8, toy_cost(), framework="megatron-core", overlap_grad_reduce=None), 8)


@pytest.mark.parametrize(("framework", "tensors"), [("megatron-deepspeed", 4), ("aleph-alpha-scaling", 5), ("llm-foundry", 5)])
def test_tensors_of_a_gated_layer(framework: str, tensors: int) -> None:
    assert linear_tensors(tiny(framework, 8, dp=8).problem) == tensors


def test_nothing_hides_the_first_gather_nor_the_ends() -> None:
    # layers that compute far longer than their messages: the contention of these is left, a tenth of two gathers and a
    # reduction each; and the first layer's gather and reduction and both ends', for which nothing runs
    found = tiny(
        "generic",
        8,
        TINY,
        {"grad_dtype": "fp32", "overlap_grad_reduce": True, "overlap_param_gather": True},
        zero=3,
        zero_shard_size=8,
        micro_batch_size=4096,
    )
    exposed = 2 * LAYER * (2 * 2 + 4) / 10 + LAYER * (2 + 4) + (2 * 16_384 + 64) * 6
    assert part(found, "fsdp_exposed")[0] == pytest.approx(exposed * LINK, rel=1e-9)


def test_deepspeed_copies_gradients_into_buckets_and_overlaps_only_sharded_ones() -> None:
    elements = 2 * LAYER + 2 * 16_384 + 64
    alone = {"overlap_grad_reduce": False}
    for zero in (0, 1):  # one after the other: 12 bytes a parameter are copied once, and the buckets all-reduced
        found = tiny("megatron-deepspeed", 8, TINY, alone, zero=zero, zero_shard_size=8 if zero else 1, micro_batch_size=256)
        copied = found.terms.once.all_reduce.kernels[0]
        assert copied == pytest.approx(12 * elements / 1e12, rel=1e-9)
    large = TINY.replace(num_hidden_layers=32, hidden_size=4096, intermediate_size=16_384)  # several buckets of 500 million
    for zero, pp, hides in ((0, 1, False), (1, 1, True), (1, 2, False)):
        layout = {"zero": zero, "zero_shard_size": 8 // pp if zero else 1, "pp": pp, "dp": 8 // pp, "micro_batch_size": 256}
        late, beside = (
            part(tiny("megatron-deepspeed", 8, large, {"overlap_grad_reduce": overlaps}, **layout), "gradient_sync")[0]
            for overlaps in (False, True)
        )
        assert (beside < late) == hides and beside <= late


@pytest.mark.parametrize(
    ("grad_dtype", "fused", "moved"), [("bf16", True, 4), ("fp32", True, 0), ("bf16", False, 4 + 4), ("fp32", False, 6)]
)
def test_what_megatron_fsdp_does_to_gradients_before_it_reduces_them(grad_dtype: str, fused: bool, moved: int) -> None:
    # 16-bit gradients are divided in place (2 bytes read, 2 written); those that no GEMM adds are copied to the buffer
    run = {"grad_dtype": grad_dtype, "gradient_accumulation_fusion": fused}
    found = tiny("megatron-bridge-25", 8, TINY, run, zero=3, zero_shard_size=8, micro_batch_size=1)
    assert found.terms.once.sharded.scatter[0].kernels[0] == pytest.approx(LAYER * moved * BYTE, rel=1e-9)


def test_megatron_fsdp_reduces_across_groups_of_shards_once_a_step() -> None:
    # two groups of 8 on two nodes: fp32 gradients of a shard cross the network in one of four micro batches, in torch in each
    def reduced(framework: str, count: int) -> float:
        layout = {"zero": 3, "zero_shard_size": 8, "num_micro_batches": count}
        found = tiny(framework, 16, TINY, {"grad_dtype": "fp32"}, **layout)
        return float(found.terms.once.sharded.scatter[0].communication[0])

    inside, across = LAYER * 4 * LINK, LAYER / 8 * 4 * NETWORK
    assert [reduced("megatron-bridge-25", m) for m in (1, 4)] == pytest.approx([inside + across, inside + across / 4], rel=1e-9)
    assert [reduced("fsdp", m) for m in (1, 4)] == pytest.approx([inside + across] * 2, rel=1e-9)


def test_transposes_of_weights_are_made_in_every_pass_of_megatron_fsdp(h100_model: CostModel) -> None:
    model, layout = model_of("llama3_8b"), {"framework": "megatron-bridge-25", "precision": "fp8", "fp8_param_gather": True}
    problem = make_problem(model, 8, h100_model, **layout)
    assert sharded_casts(problem, np.array([4, 4]), np.array([False, True])).tolist() == [8, 12]
    blocks = make_problem(model, 8, h100_model, **{**layout, "precision": "bf16", "fp8_param_gather": False})
    assert sharded_casts(blocks, np.array([4]), np.array([True])).tolist() == [1]


def test_a_layer_of_multi_token_prediction_is_a_unit_of_its_own() -> None:
    # the root has embedding, head and norms alone; the module's layer, with 36,864 weights in its linears, and its projection
    # of 2 * 64 * 64 are gathered and reduced like the last layer
    plain, found = (_sharded("generic", num_nextn_predict_layers=modules).terms.once.sharded for modules in (0, 1))
    assert plain.predicting is None and found.predicting is not None
    assert found.root[0] - plain.root[0] == pytest.approx((2 * 64 + 3 * 64) * 6 * LINK, rel=1e-9)  # of its norms
    linears = 36_864 + 2 * 64 * 64
    assert [work.communication[0] for work in found.predicting] == pytest.approx([linears * size * LINK for size in (2, 4)])
    problem = make_problem(TINY.replace(num_nextn_predict_layers=1), 8, toy_cost(), framework="torchtitan")
    assert problem.model.num_nextn_predict_layers == 0  # torchtitan has none
