"""The time of a step under each schedule, computed by hand on the toy machine; the model is toy.TINY."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy import BYTE, DEVICE, FLOP, LINK, TINY, estimated, make_problem, part, tiny, toy_cost, toy_layout

from profiler.errors import InputError
from solver.spec.feasibility import check_rules
from solver.step.data_parallel_ops import buffer_op
from solver.step.memory import MEMORY_PARTS
from solver.step.offload import exposed_gradient_offload
from solver.step.pipeline import weight_share
from solver.step.solutions import Solutions
from solver.step.stage_seconds import (
    PipelineStages,
    chunk_work,
    end_recomputed,
    ends_of,
    layer_seconds,
    recomputed_limit,
    sends_of,
    stage_work,
)

#: A layer's 36,864 weights and attention, forward and backward, as derived in test_step.py; kernels in bytes.
LAYER = (2_494_464 + 5_056_512) * FLOP + (77_824 + 102_400) * BYTE
#: Autograd joins the gradients of 32 tokens' queries, keys and values, 128 values each, where these are views of one product.
JOIN = 32 * 128 * 4 * BYTE
#: The weight gradients of a layer: 2 * 32 tokens * 36,864 FLOPs.
WEIGHT_GRAD = 2_359_296 * FLOP
#: The head's: 2 * 32 * 64 * 256 FLOPs.
HEAD_WEIGHT_GRAD = 1_048_576 * FLOP
#: The lookup reads, writes and accumulates 2,048 elements: 4 and 8 bytes each. The table's gradient of 256 * 64 elements is
#: zeroed (2 bytes) and added to the 16-bit buffer (6).
EMBEDDING = (2048 * 12 + 256 * 64 * 8) * BYTE
#: 32 tokens of 64 values in two bytes to the next stage of the same node.
SEND = 4096 * LINK
#: Five launches' worth of Python, for which the device idles after a message that Megatron-LM's host has waited for.
RESTART = 5 * 107e-6
RUN = {"compile": True}


@pytest.mark.parametrize(("schedule", "filled"), [("1f1b", 0), ("gpipe", 0), ("zb-h1", 2)])
def test_zero_bubble_fills_the_bubble_with_weight_gradients(
    schedule: str, filled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # arXiv 2401.10241, table 2: the bubble of two stages is that of 1F1B less 2 W (ZB-H1), W of the last stage, head included
    monkeypatch.setattr("solver.step.host.RESTART_LAUNCHES", 0)
    found = tiny(
        "megatron-lm-zero-bubble",
        2,
        run={**RUN, "attention": "flash"},
        schedule=schedule,
        dp=1,
        pp=2,
        zero=0,
        num_micro_batches=4,
    )
    on_first = LAYER + JOIN + EMBEDDING + SEND
    assert part(found, "bubble")[0] == pytest.approx(on_first - filled * (WEIGHT_GRAD + HEAD_WEIGHT_GRAD), rel=1e-9)


def test_fsdp2_adds_whole_gradients_behind_a_pipeline() -> None:
    # of four micro batches the first gradient is cast (2 bytes read, 4 written), each further one is added (6 read, 4 written)
    found = tiny(
        "torchtitan-2025-06", 4, run={**RUN, "grad_dtype": "fp32"}, dp=2, pp=2, zero=2, zero_shard_size=2, num_micro_batches=4
    )
    elements = 36_864 + 2 * 64 + 16_384 + 64  # a layer and the head
    assert part(found, "gradient_accumulation")[0] == pytest.approx(elements * (6 + 3 * 10) * BYTE, rel=1e-9)
    alone = tiny(
        "torchtitan-2025-06", 2, run={**RUN, "grad_dtype": "fp32"}, dp=2, zero=2, zero_shard_size=2, num_micro_batches=4
    )
    assert part(alone, "gradient_accumulation")[0] == 0, "without a pipeline each micro batch is reduced into shards"
    single = tiny(
        "torchtitan-2025-06", 4, run={**RUN, "grad_dtype": "fp32"}, dp=2, pp=2, zero=2, zero_shard_size=2, num_micro_batches=1
    )
    assert part(single, "gradient_accumulation")[0] == 0, "the only micro batch is reduced as it is"


def test_accelerate_keeps_whole_gradients_of_fsdp2_in_their_own_type() -> None:
    # of four micro batches three are added to the first (4 bytes read, 2 written); nothing is cast, and all are there at once
    layout: dict[str, Any] = {"dp": 4, "zero": 3, "zero_shard_size": 4, "num_micro_batches": 4}
    late, each = (
        tiny("fsdp2", 4, run={**RUN, "grad_dtype": "bf16", **defers}, **layout) for defers in ({"defer_grad_sync": True}, {})
    )
    elements = 2 * (36_864 + 2 * 64) + 64 + 2 * 16_384
    assert part(late, "gradient_accumulation")[0] == pytest.approx(elements * 3 * 6 * BYTE, rel=1e-9)
    assert part(each, "gradient_accumulation")[0] == 0 and part(late, "fsdp_exposed")[0] < part(each, "fsdp_exposed")[0]
    gradients = MEMORY_PARTS.index("gradients")
    held = [float(found.memory.parts[gradients, 0]) for found in (late, each)]
    assert held == [2 * elements, 4 * elements / 4]  # shards in fp32 (_fsdp_param_group.py, post_backward)
    with pytest.raises(InputError, match="fsdp2-2025-04 does not offer defer_grad_sync"):
        check_rules(TINY, toy_layout(8, 32, framework="fsdp2-2025-04", zero=3, zero_shard_size=8, defer_grad_sync=True))


@pytest.mark.parametrize("zero", [2, 3])
def test_deferred_gradients_are_added_whole_and_reduced_once(zero: int) -> None:
    # NeMo Automodel, four micro batches: the first gradient is cast, each further one is added; none with one micro batch
    layout = {"dp": 2, "zero": zero, "zero_shard_size": 2}
    run = {**RUN, "grad_dtype": "fp32", "overlap_grad_reduce": False, "overlap_param_gather": False}
    late, each = (
        [tiny("nemo-automodel", 2, run={**run, **defers}, **layout, num_micro_batches=m) for m in (1, 4)]
        for defers in ({}, {"defer_grad_sync": False})
    )
    elements = 2 * (36_864 + 2 * 64) + 64 + 2 * 16_384
    for found, count in ((late[0], 0), (late[1], 6 + 3 * 10), (each[1], 0)):
        assert part(found, "gradient_accumulation")[0] == pytest.approx(elements * count * BYTE, rel=1e-9)
    name = "gradient_sync" if zero == 2 else "fsdp_exposed"
    (one, four), (_, often) = ([part(found, name)[0] for found in pair] for pair in (late, each))
    scatter = elements * (4 * LINK + 4 * 2.7 * BYTE)
    assert often - four == pytest.approx(3 * scatter, rel=1e-6)
    assert four == pytest.approx(one if zero == 2 else 4 * one - 3 * scatter, rel=1e-6)
    gradients = [found.memory.parts[MEMORY_PARTS.index("gradients"), 0] for found in (late[1], each[1])]
    assert gradients == pytest.approx([4 * elements, 2 * elements / 2], rel=1e-9), "reduced ones have the parameters' type"


@pytest.mark.parametrize("zero", [2, 3])
def test_under_no_sync_gradients_are_joined_and_added_in_sixteen_bits(zero: int) -> None:
    # FSDP1, four micro batches: after the first they are joined (2 bytes read, 2 written) and added (4 read, 2 written)
    layout = {"dp": 2, "zero": zero, "zero_shard_size": 2, "num_micro_batches": 4}
    run = {**RUN, "grad_dtype": "bf16", "overlap_grad_reduce": False, "overlap_param_gather": False}
    whole, each = (tiny("fsdp", 2, run={**run, "defer_grad_sync": defers}, **layout) for defers in (True, None))
    elements = 2 * (36_864 + 2 * 64) + 64 + 2 * 16_384
    assert part(whole, "gradient_accumulation")[0] == pytest.approx(elements * 3 * 10 * BYTE, rel=1e-9)
    assert part(each, "gradient_accumulation")[0] == 0
    gradients = [found.memory.parts[MEMORY_PARTS.index("gradients"), 0] for found in (whole, each)]
    assert gradients == pytest.approx([2 * elements, 4 * elements / 2], rel=1e-9)
    saved = 3 * elements * (2 * LINK + 4 * 2 * BYTE)  # three reduce-scatters, and the four passes of their copies
    name = "gradient_sync" if zero == 2 else "fsdp_exposed"
    assert part(each, name)[0] - part(whole, name)[0] == pytest.approx(saved, rel=1e-6)
    if zero == 2:  # the gathered weights stay: once a step instead of four times
        gathered = [part(found, "parameter_gather")[0] for found in (each, whole)]
        assert gathered[0] == pytest.approx(4 * gathered[1], rel=1e-9) and gathered[1] > 0


def test_parameters_of_later_chunks_are_gathered_beside_earlier_ones() -> None:
    # one bucket a stage: of 1F1B nothing hides it; of two chunks the second one's half runs beside the first one's passes, of
    # which a tenth is lost to it
    for vpp, share in ((1, 1.0), (2, 1 / 2 + 0.1 / 2)):
        found = tiny(
            "megatron-core-0.12",
            4,
            TINY.replace(num_hidden_layers=4),
            {"p2p_overlap": True},
            dp=2,
            pp=2,
            vpp=vpp,
            zero=1,
            zero_shard_size=2,
            micro_batch_size=1024,
            num_micro_batches=4,
        )
        gather = found.terms.once.all_gather.communication[0]
        assert gather > 0 and part(found, "parameter_gather")[0] == pytest.approx(share * gather, rel=1e-6)


def test_the_device_idles_where_the_host_has_waited_for_a_message() -> None:
    # five launches of 107 us (Megatron-LM's layers) or 40 us (Transformer Engine's); none in the zero-bubble authors' runtime,
    # nor where sends overlap with the next chunk, nor under other frameworks
    def late(framework: str, **layout: object) -> float:
        run = {**RUN, "attention": "flash", "p2p_overlap": True}
        found = tiny(framework, 2, TINY.replace(num_hidden_layers=4), run, dp=1, pp=2, zero=0, num_micro_batches=4, **layout)
        return float(found.terms.send_recv[0]) - SEND

    assert late("megatron-lm-2023") == pytest.approx(5 * 107e-6)
    assert late("megatron-core-0.12") == pytest.approx(5 * 40e-6)
    assert late("megatron-lm-zero-bubble") == pytest.approx(5 * 107e-6)
    assert late("megatron-lm-zero-bubble", schedule="zb-h1") == pytest.approx(0, abs=1e-12)
    assert late("megatron-lm-2023", schedule="interleaved", vpp=2) == pytest.approx(0, abs=1e-12)
    assert late("generic") == pytest.approx(0, abs=1e-12)


PLANNED = {**RUN, "attention": "flash", "precision": "fp16"}


def test_a_planned_schedule_has_the_bubble_of_its_plan() -> None:
    # two stages, the last with the head, of four micro batches; under zb-1p two stages like the last have a bubble of F + B - W
    # and four messages' lateness: here between that times what the first stage has of the last one's seconds, and what two
    # average stages take beyond the last one's work
    found = tiny("megatron-lm-zero-bubble", 2, run=PLANNED, schedule="zb-1p", dp=1, pp=2, zero=0, num_micro_batches=4)
    last = float(part(found, "compute")[0]) / 4
    weight = WEIGHT_GRAD + HEAD_WEIGHT_GRAD
    first, share = LAYER + JOIN + EMBEDDING, (last - 2 * weight + 4 * SEND) / last
    hidden = max((first + last) / 2 * (4 + share) - 4 * last, 0.0)
    assert part(found, "pp_transfer")[0] == 0
    assert part(found, "bubble")[0] == pytest.approx((share * first + hidden) / 2, rel=1e-9)


def test_what_weight_gradients_need_of_a_micro_batch() -> None:
    # 32 tokens: inputs 64, 64, 64 and 128 wide and output gradients 128 (q, k, v), 64, 256 (gate, up) and 64, in two bytes
    found = tiny("megatron-lm-zero-bubble", 2, run=PLANNED, schedule="zb-1p", dp=1, pp=2, zero=0, num_micro_batches=4)
    needed = 32 * (3 * 64 + 128 + 128 + 64 + 256 + 64) * 2
    assert found.terms.layers.postponed[0, 0] == needed
    share = weight_share(found.terms, found.layouts, found.times.slowest)
    assert share == pytest.approx(needed / found.terms.layers.saved[0, 0, 0]) and 0.3 < share[0] < 1.0


def test_interleaved_sends_overlap_except_for_the_first_and_the_last() -> None:
    # four layers in two stages of two chunks: a stage waits for a send each way per chunk and micro batch, but not at the ends
    # of the pipeline; with overlap only the 2 * 2 - 1 hops of the first micro batch, there and back, are exposed
    def parts(overlap: bool) -> tuple[float, float]:
        found = tiny(
            "megatron-lm",
            2,
            TINY.replace(num_hidden_layers=4),
            {**RUN, "p2p_overlap": overlap},
            dp=1,
            pp=2,
            vpp=2,
            zero=0,
            num_micro_batches=4,
        )
        return float(part(found, "pp_transfer")[0]), float(part(found, "bubble")[0])

    on_first = 2 * (LAYER + JOIN) + EMBEDDING
    assert parts(True) == pytest.approx((0.0, on_first / 2 + 2 * 3 * SEND), rel=1e-9)
    waited = SEND + RESTART
    # the first stage waits for 3 sends too, in each of its two chunks for half as many on average
    assert parts(False) == pytest.approx((4 * 3 * waited, (on_first + 3 * waited) / 2), rel=1e-9)


def test_a_network_that_is_slower_than_the_compute_beside_it_sets_the_pace() -> None:
    # two nodes of one GPU, 1 GB/s between them: 4 micro batches x 2 chunks x 2 passes of a message each, and the exposed hops
    cost = toy_cost(bandwidth=1e9, device=replace(DEVICE, gpus_per_node=1))
    problem = make_problem(TINY.replace(num_hidden_layers=4), 2, cost, 32, framework="megatron-lm", **RUN, p2p_overlap=True)
    found = estimated(problem, [problem.layout(dp=1, pp=2, vpp=2, zero=0, num_micro_batches=4)])
    send = float(found.terms.send_recv[0])
    assert send == pytest.approx(32 * 64 * 2 / 1e9, rel=1e-9)
    assert part(found, "bubble")[0] + part(found, "compute")[0] == pytest.approx((4 * 2 * 2 + 2 * 3) * send, rel=1e-9)


def test_a_stage_that_recomputes_no_layer_does_not_recompute_the_head() -> None:
    layouts: list[dict[str, Any]] = [{}, {"recompute": "full", "recompute_layers": 0}, {"recompute": "full"}]
    none, zero, full = (tiny("aleph alpha", run=RUN, **layout) for layout in layouts)
    assert part(zero, "recompute")[0] == 0 and zero.times.seconds[0] == none.times.seconds[0]
    # two layers' forward pass, the final norm, and the head's 2 * 32 * 64 * 256 FLOPs
    assert part(full, "recompute")[0] > 2 * 2_494_464 * FLOP + 1_048_576 * FLOP


def test_the_bubble_has_the_recomputed_layers_of_the_other_stages() -> None:
    # two stages of two layers, one of them recomputed: the first stage's 2 layers, lookup, one forward pass and sends
    model = TINY.replace(num_hidden_layers=4)
    found = tiny("generic", 2, model, RUN, dp=1, pp=2, zero=0, num_micro_batches=4, recompute="full", recompute_layers=1)
    once = float(part(found, "recompute")[0]) / 4
    assert once == pytest.approx(2_494_464 * FLOP + 77_824 * BYTE, abs=2048 * 6 * BYTE * 1.01)
    assert part(found, "bubble")[0] == pytest.approx(2 * (LAYER + JOIN) + once + EMBEDDING + SEND, rel=1e-9)


def test_recomputation_of_some_layers_counts_those_of_the_slowest_stage() -> None:
    # two of four layers of one stage: their forward pass, two micro batches; the last residual may be left out
    model = TINY.replace(num_hidden_layers=4)
    found = tiny("generic", 1, model, RUN, zero=0, num_micro_batches=2, recompute="full", recompute_layers=2)
    forward = 2_494_464 * FLOP + 77_824 * BYTE
    assert part(found, "recompute")[0] == pytest.approx(2 * 2 * forward, abs=2 * 2 * 2048 * 6 * BYTE * 1.01)


def _stages(found: Solutions) -> PipelineStages:
    problem, terms, layouts = found.problem, found.terms, found.layouts
    layer, _ = layer_seconds(terms, layouts, problem.run)
    ends, sends = ends_of(problem, terms, layouts), sends_of(problem, terms, layouts)
    return PipelineStages(terms, layouts, layer, ends, sends, recomputed_limit(problem, layouts))


def _v_shaped(pp: int, layers: int, everywhere: float = 0.0, at_ends: float = 0.0, **layout: Any) -> np.ndarray:
    """Return the seconds of the first chunk, the last one and any other of V-shaped stages, by pass: [3, 3]."""
    found = tiny(
        "zero-bubble",
        pp,
        TINY.replace(num_hidden_layers=layers),
        {**RUN, "attention": "flash"},
        dp=1,
        pp=pp,
        vpp=2,
        zero=0,
        schedule="zb-v",
        num_micro_batches=2 * pp,
        **layout,
    )
    return chunk_work(_stages(found), np.array([everywhere]), np.array([at_ends]))[..., 0]


def test_chunks_of_a_v_by_hand() -> None:
    # four stages of two chunks of one layer: a pass waits for one message; the last chunk sends nothing forward, and its
    # backward pass brings the gradients to the chunk before; in the middle each pass waits for one
    forward, weight = 2_494_464 * FLOP + 77_824 * BYTE, WEIGHT_GRAD
    first, last, other = _v_shaped(4, 8)
    assert other == pytest.approx([forward + SEND, LAYER + JOIN - forward - weight + SEND, weight], rel=1e-9)
    assert first[0] == pytest.approx(forward + 2048 * 4 * BYTE + SEND, rel=1e-9)  # the lookup reads and writes 2,048 elements
    assert last[2] == pytest.approx(weight + HEAD_WEIGHT_GRAD, rel=1e-9)
    # of two stages the second is where a V turns: half of its passes wait
    assert _v_shaped(2, 4)[2] == pytest.approx(
        [forward + SEND / 2, LAYER + JOIN - forward - weight + SEND / 2, weight], rel=1e-9
    )
    # what every micro batch waits for in all stages and at the ends is shared by the two chunks, and is no forward pass's
    waited = _v_shaped(4, 8, everywhere=6e-6, at_ends=2e-6) - _v_shaped(4, 8)
    np.testing.assert_allclose(waited, [[0, 4e-6, 0]] * 3, rtol=1e-6, atol=1e-15)


def test_the_chunk_with_the_loss_has_a_layer_less_where_that_counts_as_one() -> None:
    # 7 layers and the loss in four stages of two chunks: the first stage has one layer, in the chunk where the V begins
    first, last, other = _v_shaped(4, 7, account_for_loss_in_pipeline_split=True)
    assert first[2] == pytest.approx(WEIGHT_GRAD, rel=1e-9) and last[2] == pytest.approx(HEAD_WEIGHT_GRAD, rel=1e-9)
    assert other[2] == pytest.approx(WEIGHT_GRAD, rel=1e-9)


def test_the_stage_with_both_ends_of_a_v_waits_for_half_of_the_messages() -> None:
    # each of two chunks exchanges with one neighbour alone: two messages a micro batch, where a middle stage has four
    model = TINY.replace(num_hidden_layers=8, vocab_size=4096)
    found = tiny(
        "zero-bubble", 4, model, {**RUN, "attention": "flash"}, dp=1, pp=4, vpp=2, zero=0, schedule="zb-v", num_micro_batches=8
    )
    assert found.times.slowest.has_head[0] == 1
    assert part(found, "pp_transfer")[0] == pytest.approx(8 * 2 * SEND, rel=1e-9)


def test_one_micro_batch_hides_no_exchange_and_each_further_one_hides_its_own() -> None:
    model = TINY.replace(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=128)  # one a rank: plain GEMMs
    run = {**RUN, "moe_exchange_overlap": True}
    one, two, four = (tiny("megatron-core", 2, model, run, dp=2, ep=2, zero=0, num_micro_batches=m) for m in (1, 2, 4))
    each = two.times.hidden[0, 0] * 2
    assert each > 0 and one.times.hidden[0, 0] == 0
    assert four.times.hidden[0, 0] == pytest.approx(each * 3 / 4, rel=1e-9)


def test_every_later_stage_waits_for_the_host_too() -> None:
    # four stages of one layer, of which the first, the last and the second (for all middle ones) are looked at: what each waits
    # for in a micro batch (5 us), and the ends besides (3 us), is in its backward pass
    found = tiny("generic", 4, TINY.replace(num_hidden_layers=4), RUN, dp=1, pp=4, zero=0, num_micro_batches=8)
    plain, waiting = (stage_work(_stages(found), np.array([a]), np.array([b])) for a, b in ((0.0, 0.0), (5e-6, 3e-6)))
    number = plain.number[:, 0]
    for more, expected in ((waiting.each - plain.each, 8e-6 + 0 * number), (waiting.later - plain.later, (3 - number) * 5e-6)):
        np.testing.assert_allclose(more[..., 0], [0 * number, expected, 0 * number], rtol=1e-6, atol=1e-15)
    np.testing.assert_allclose((waiting.total - plain.total)[:, 0], [0, 4 * 5e-6 + 3e-6, 0], rtol=1e-6, atol=1e-15)


def test_modules_behind_the_last_layer_are_not_recomputed_stage_by_stage() -> None:
    model = TINY.replace(num_nextn_predict_layers=1)
    for stated, again in (("", True), ("1+1", False)):
        found = tiny("primus", 2, model, RUN | {"recompute_stage_layers": stated}, dp=1, pp=2, zero=0, recompute="full")
        assert end_recomputed(found.problem, found.layouts).tolist() == [again]
        assert bool(found.terms.ends.head_recompute[2, 0] > 0), "there is something to recompute"


def test_weight_gradients_need_more_than_a_recomputed_layer_keeps() -> None:
    # full recomputation keeps the layer's input alone: 32 tokens of 64 values in two bytes
    found = tiny(
        "megatron-lm-zero-bubble",
        2,
        run={**RUN, "attention": "flash"},
        schedule="zb-1p",
        dp=1,
        pp=2,
        zero=0,
        num_micro_batches=4,
        recompute="full",
    )
    needed = 32 * (3 * 64 + 128 + 128 + 64 + 256 + 64) * 2
    assert weight_share(found.terms, found.layouts, found.times.slowest) == pytest.approx(needed / (32 * 64 * 2))


def test_deepspeed_reduces_buckets_whole_in_every_micro_batch() -> None:
    """use_multi_rank_bucket_allreduce: ZeRO-2 all-reduces, twice the bytes of FSDP's reduce-scatter, four times a step."""
    run = {**RUN, "overlap_grad_reduce": False}
    found, once = (tiny("megatron-deepspeed", 4, run=run, dp=4, zero=2, zero_shard_size=4, num_micro_batches=m) for m in (4, 1))
    zero_1 = tiny("megatron-deepspeed", 4, run=run, dp=4, zero=1, zero_shard_size=4, num_micro_batches=4)
    assert part(once, "gradient_sync")[0] == pytest.approx(part(zero_1, "gradient_sync")[0], rel=1e-9)
    assert part(found, "gradient_sync")[0] == pytest.approx(4 * part(once, "gradient_sync")[0], rel=1e-9)


def test_gradients_go_to_the_host_beside_the_backward_pass_only_where_asked() -> None:
    given, turns = (np.array([3.0]), np.array([4.0]), np.array([3])), np.array([5.0])
    beside, after = (exposed_gradient_offload(*given, np.array([3]), turns, overlaps)[0] for overlaps in (True, False))
    assert (beside, after) == ((6 - 4) + (6 - 4) + (12 - 4), 6 + 6 + 12)
    for overlaps in (True, False):  # under ZeRO-2 the host waits for each copy, and five ranks copy in turn
        assert exposed_gradient_offload(*given, np.array([2]), turns, overlaps)[0] == 5 * (3 + 6 + 12)


def test_passes_over_a_buffer_of_gradients_are_of_what_a_rank_keeps() -> None:
    # zeroed and averaged, 2 bytes three times: whole under ZeRO-1, a shard of four under ZeRO-3
    run = {**RUN, "grad_dtype": "bf16", "overlap_grad_reduce": False, "overlap_param_gather": False}
    elements = 2 * (36_864 + 2 * 64) + 64 + 2 * 16_384
    for zero, share in ((1, 1.0), (3, 0.25)):
        found = tiny("generic", 4, run=run, dp=4, zero=zero, zero_shard_size=4, num_micro_batches=2)
        passed = float(found.terms.once.estimates.row(buffer_op(found.problem, zero, 1))[0])
        assert passed == pytest.approx(elements * share * 3 * 2 * BYTE, rel=1e-9)
