"""The time of a step: cases computed by hand, and invariants of every layout on fitted machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from toy import (
    BYTE,
    DEVICE,
    FLOP,
    LINK,
    NETWORK,
    TINY,
    changed,
    column,
    estimated,
    make_problem,
    part,
    some_layouts,
    tiny,
    toy_cost,
    toy_layout,
)

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.report.explain import explain
from solver.schedule.event_simulation import simulate
from solver.spec.feasibility import check_rules
from solver.spec.model import ModelSpec
from solver.step.layouts import Layouts
from solver.step.pipeline_ops import send_recv_ops
from solver.step.problem import Problem, attention_generation
from solver.step.solutions import Solutions, estimate_layouts
from solver.step.time import TIME_PARTS

LLAMA = ModelSpec(
    name="8B",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
)
STATE_PARTS = ("gradient_accumulation", "gradient_sync", "parameter_gather", "optimizer", "stragglers")
TINY_RUN = {"seq_len": 32, "compile": True}  # compiled: the launches of the host take no time


# by hand


def test_two_stages_and_three_micro_batches_by_hand() -> None:
    # TINY, one layer per stage, 32 tokens per micro batch, InternEvo, bf16, no ZeRO.
    # A layer's GEMMs: 36,864 weights * 2 * 32 tokens = 2,359,296 FLOPs forward, twice that backward.
    # Attention: 32 * 33 / 2 = 528 pairs * 4 heads * 2 * 2 * 16 = 135,168 forward, 5 / 2 of it = 337,920 backward.
    # Kernels, bytes per element, forward | backward: two norms of 2,048 elements 8 | 11 (Apex's, the
    # second one of an fp32 copy: on average), rope of 32 * (4 + 2) * 16 = 3,072
    # elements 4 | 4, gate of 32 * 128 = 4,096 elements 6 | 10, two residuals of 2,048 elements 6 | 6. Gate and up are two GEMMs
    # of one input: the second gradient of its 2,048 elements is read, 2 bytes each. Slices of the 32 * (4 + 2 * 2) * 16 = 4,096
    # queries, keys and values 4 | 22, and of the 2,048 queries 0 | 2 more.
    layer_forward = (2_359_296 + 135_168) * FLOP + (2 * 2048 * 8 + 3072 * 4 + 4096 * 6 + 2 * 2048 * 6 + 4096 * 4) * BYTE
    layer_backward = (4_718_592 + 337_920) * FLOP + (
        2 * 2048 * 11 + 3072 * 4 + 4096 * 10 + 2 * 2048 * 6 + 2048 * 2 + 4096 * 22 + 2048 * 2
    ) * BYTE
    assert layer_forward == pytest.approx(2_494_464e-15 + 110_592e-12)
    assert layer_backward == pytest.approx(5_056_512e-15 + 221_184e-12)
    again = (2 * 2048 * 8 + 2048 * 6) * BYTE  # both norms and the addition between them are checkpoints of their own
    # The lookup: 4 | 8 bytes for 2,048 elements, and the table's gradient of 256 * 64 elements is zeroed. The head: final norm,
    # 3 * 2 * 32 * 64 * 256 FLOPs, and the unfused loss of 32 * 256 = 8,192 logits at 38 | 16 bytes; what InternEvo logs of them
    # reads and writes each nine times in fp32.
    embedding = (2048 * 12 + 256 * 64 * 2) * BYTE
    head = 2048 * 19 * BYTE + 3_145_728 * FLOP + 8192 * (54 + 36) * BYTE
    # Each stage sends 32 * 64 * 2 = 4,096 bytes to the other one in the same node.
    send_recv = 4096 * LINK  # each has one neighbour: between two of its passes it sends and receives at once
    layer = layer_forward + layer_backward
    first, last = layer + embedding, layer + head
    assert last > first
    slowest = last + again + send_recv
    bubble = first + again + send_recv  # the first micro batch on the other stage
    # Once per step: 36,864 + 2 * 64 norm weights + the larger table, the head's 256 * 64 + 64: 53,440 parameters. Gradients of
    # two further micro batches are added (6 bytes each), the optimizer moves 62 bytes, and a 4-byte message is sent.
    parameters = 36_864 + 128 + 16_448
    accumulation, optimizer = 2 * parameters * 6 * BYTE, parameters * 62 * BYTE + 4 * LINK
    step = 3 * slowest + bubble + accumulation + optimizer

    problem = make_problem(TINY, 2, toy_cost(), **TINY_RUN)
    layout = problem.layout(dp=1, pp=2, zero=0, num_micro_batches=3)
    found = estimated(problem, [layout])
    assert found.times.seconds[0] == pytest.approx(step, rel=1e-12)
    by_part = dict(zip(TIME_PARTS, found.times.parts[:, 0], strict=True))
    assert by_part == pytest.approx(
        {
            "compute": 3 * last,
            "recompute": 3 * again,
            "tp_exposed": 0,
            "cp_exposed": 0,
            "wp_exposed": 0,
            "ep_exposed": 0,
            "fsdp_exposed": 0,
            "offload_exposed": 0,
            "amax": 0,
            "pp_transfer": 3 * send_recv,
            "bubble": bubble,
            "gradient_accumulation": accumulation,
            "gradient_sync": 0,
            "parameter_gather": 0,
            "optimizer": optimizer,
            "stragglers": 0,
        },
        rel=1e-12,
        abs=1e-30,
    )
    # tokens per second and device: 96 tokens on two devices
    assert found.tgs[0] == pytest.approx(96 / step / 2, rel=1e-12)


def test_full_recomputation_by_hand() -> None:
    # one stage of two layers, two micro batches: the forward pass of each layer is recomputed, embedding and head are not
    layer_forward, again = 2_494_464 * FLOP + 110_592 * BYTE, (2 * 2048 * 8 + 2048 * 6) * BYTE  # without, norms run again
    problem = make_problem(TINY, 1, toy_cost(), **TINY_RUN)
    layout = problem.layout(zero=0, num_micro_batches=2)
    found = estimated(
        problem,
        [
            layout,
            layout.replace(recompute="full"),
            layout.replace(recompute="full", recompute_layers=1),
            layout.replace(recompute="selective"),
        ],
    )
    none, full, half, selective = found.times.seconds
    last_residual = 2048 * 6 * BYTE  # its output is the saved input of the next layer; it may be recomputed or not
    assert full - none == pytest.approx(4 * (layer_forward - again), abs=4 * last_residual * 1.01)
    assert half - none == pytest.approx((full - none) / 2 - 2 * again, rel=1e-9)
    assert selective - none == pytest.approx(4 * (135_168 * FLOP - again), rel=1e-9)


def _layer_streams(mode: str, **constants: object) -> tuple[float, float]:
    """Return the exposed seconds of the tensor group in one layer and micro batch: (forward, backward)."""
    problem = make_problem(TINY, 2, toy_cost(), **{**TINY_RUN, **constants})
    layout = problem.layout(dp=1, tp=2, tp_mode=mode, zero=0)
    found = estimated(problem, [layout])
    key = found.terms.key[0]
    return float(found.table.layer.times.forward[1, key]), float(found.table.layer.times.backward[1, key])


def test_exposed_tensor_communication_by_hand() -> None:
    # 32 * 64 * 2 = 4,096 bytes per message, 1e-11 s per byte: 40.96 ns. A weight-gradient GEMM of wqkv over 2 ranks,
    # 2 * 32 * 64 * 64 FLOPs, takes 0.262 ns, and one of w1 or w3 the same: that much of its message is overlapped, of which a
    # tenth is lost to contention.
    message, overlapped = 4096 * LINK, 3 * 2 * 32 * 64 * 64 * FLOP * 0.9
    forward, backward = _layer_streams("mtp")
    assert forward == pytest.approx(2 * message, rel=1e-12)
    assert backward == pytest.approx(3 * message - overlapped, rel=1e-12)
    forward, backward = _layer_streams("msp")
    assert forward == pytest.approx(5 * message, rel=1e-12)
    assert backward == pytest.approx(5 * message - overlapped, rel=1e-12)
    # the second all-gathers overlap with the input-gradient GEMMs, which take as long as the weight-gradient GEMMs
    forward, backward = _layer_streams("fsp")
    assert forward == pytest.approx(5 * message, rel=1e-12)
    assert backward == pytest.approx(8 * message - 2 * overlapped, rel=1e-12)
    # 16 tokens * (4 query, 2 * 2 key-value, 4 context heads) * 16 * 2 bytes, each way
    forward, backward = _layer_streams("isp")
    assert forward == backward == pytest.approx(16 * 12 * 16 * 2 * LINK, rel=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradient_synchronisation_by_hand(overlap: bool) -> None:
    # 16 data-parallel ranks on two nodes, the whole model on each: 73,728 + 2 * 128 + 2 * 256 * 64 + 64 parameters
    parameters = 2 * 36_864 + 256 + 2 * 16_384 + 64
    problem = make_problem(
        TINY,
        16,
        toy_cost(),
        **TINY_RUN,
        framework="megatron-lm",
        grad_dtype="fp32",
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    found = estimated(problem, [problem.layout(zero=1, zero_shard_size=16), problem.layout(zero=0)])
    reduce_scatter, all_gather = parameters * 4 * NETWORK, parameters * 2 * NETWORK
    # one bucket holds all gradients and all parameters: even where they overlap, no backward pass is left beside it, and no
    # forward pass has begun
    assert part(found, "gradient_sync") == pytest.approx([reduce_scatter, reduce_scatter], rel=1e-12)
    assert part(found, "parameter_gather") == pytest.approx([all_gather, 0], rel=1e-12)
    # 30 bytes of Adam and 8 of norm and clipping per parameter, sharded over 16 ranks or not; the norm's 4 bytes cross nodes;
    # all gradients are zeroed and divided
    whole, rest = parameters * 38 * BYTE, parameters * 3 * 4 * BYTE + 4 * NETWORK
    assert part(found, "optimizer") == pytest.approx([whole / 16 + rest, whole + rest], rel=1e-9)


def test_the_embedding_is_a_bucket_of_its_own_that_overlaps_with_nothing() -> None:
    # a table of 2^20 * 64 parameters, half of all: a bucket (40 million) is less than a third
    model = TINY.replace(vocab_size=2**20)
    problem = make_problem(
        model,
        16,
        toy_cost(),
        **TINY_RUN,
        framework="megatron-lm",
        grad_dtype="fp32",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    found = estimated(problem, [problem.layout(zero=1, zero_shard_size=16)])
    table = 2**20 * 64
    parameters = 2 * 36_864 + 256 + 2 * table + 64
    assert 40e6 / parameters < 0.3 < table / parameters
    layer = found.table.layer.times
    for name, width, phase in (("gradient_sync", 4, layer.backward), ("parameter_gather", 2, layer.forward)):
        compute = 2 * float(phase[:, 0].sum())
        assert compute < (parameters - table) * width * NETWORK
        # a byte between nodes delays compute by a tenth of its time inside a node, which is half as long
        assert part(found, name)[0] == pytest.approx(parameters * width * NETWORK - compute * 0.95, rel=1e-9), name
    # with as much compute as there is: the table's messages alone, and the delay of what is hidden
    long = replace(layer, forward=layer.forward + 1.0, backward=layer.backward + 1.0)
    parts = (replace(found.table.layers[0], times=long),)
    slow = estimate_layouts(problem, found.layouts, replace(found.table, layers=parts))
    for name, width in (("gradient_sync", 4), ("parameter_gather", 2)):
        hidden = (parameters - table) * width * NETWORK
        assert part(slow, name)[0] == pytest.approx(table * width * NETWORK + hidden * 0.05, rel=1e-9), name


def test_zero_2_reduce_scatters_every_micro_batch_and_exposes_the_last_bucket_once() -> None:
    # one bucket holds all gradients: three of four reduce-scatters may overlap with four backward passes of two layers
    parameters = 2 * 36_864 + 256 + 2 * 16_384 + 64
    reduce_scatter = parameters * 4 * NETWORK
    problem = make_problem(
        TINY, 16, toy_cost(), **TINY_RUN, framework="megatron-core", grad_dtype="fp32", overlap_grad_reduce=True
    )
    found = estimated(problem, [problem.layout(zero=2, zero_shard_size=16, num_micro_batches=m) for m in (1, 4)])
    backward = 2 * float(found.table.layer.times.backward[:, 0].sum())
    assert 4 * backward < 3 * reduce_scatter
    # a byte between nodes delays compute by a tenth of its time inside a node, which is half as long
    assert part(found, "gradient_sync") == pytest.approx([reduce_scatter, 4 * reduce_scatter - 4 * backward * 0.95], rel=1e-9)


def _slow_links(vpp: int, **layout: Any) -> Solutions:
    """Return four layers in two stages under Megatron-Core, on 32 ranks of four nodes."""
    problem = make_problem(
        TINY.replace(num_hidden_layers=4),
        32,
        toy_cost(),
        **TINY_RUN,
        framework="megatron-core",
        grad_dtype="fp32",
        overlap_grad_reduce=True,
    )
    return estimated(problem, [problem.layout(dp=16, pp=2, vpp=vpp, zero_shard_size=16, num_micro_batches=4, **layout)])


def test_gradients_of_interleaved_chunks_hide_under_the_last_group_of_the_chunks_before_them() -> None:
    # the second of two chunks is reduced while a group of pp = 2 micro batches runs backward through the first, whose own
    # gradients follow it: at least half of the message is exposed, and the other half here outlasts the window
    found = _slow_links(2)
    last = 2 * 36_864 + 256 + 16_384 + 64  # the parameters of the stage with the head, which are as many as on the first but 64
    message = last * 4 * NETWORK
    window = 2 * 2 * float(found.table.layer.times.backward[:, 0].sum()) / 2
    head = float(found.terms.ends.head.sum())
    assert window < message / 2 and head > 0
    exposed = part(found, "gradient_sync")[0]
    assert exposed == pytest.approx(message - window * 0.95, rel=0.02)
    assert exposed < part(_slow_links(1), "gradient_sync")[0]


def test_a_pipeline_of_torchtitan_reduces_gradients_once_after_its_last_backward_pass() -> None:
    problem = make_problem(
        TINY, 32, toy_cost(), **TINY_RUN, framework="torchtitan", grad_dtype="fp32", overlap_grad_reduce=True
    )
    layouts = [problem.layout(dp=16, pp=2, zero=2, zero_shard_size=16, num_micro_batches=m) for m in (2, 8)]
    few, many = part(estimated(problem, layouts), "gradient_sync")
    # a layer, the head and the final norm; FSDP copies the gradients into the message's buffer, as long as 2.7 reads or writes
    parameters = 36_864 + 128 + 16_384 + 64
    assert few == many == pytest.approx(parameters * 4 * NETWORK + parameters * 4 * 2.7 * BYTE, rel=1e-9)


@pytest.mark.parametrize(("framework", "sent"), [("megatron-lm-2023", 4096 / 2), ("megatron-core", 4096)])
def test_megatron_core_sends_whole_activations_where_ranks_hold_them(framework: str, sent: float) -> None:
    # 32 tokens of 64 values in two bytes; earlier code scatters them over the tensor group and gathers them on the other side
    problem = make_problem(TINY, 4, toy_cost(), **TINY_RUN, framework=framework)
    op, gather = send_recv_ops(problem, Layouts.of([problem.layout(tp=2, pp=2, dp=1, tp_mode="mtp")]).splits)
    assert op.dims["bytes"][0] == sent and gather.count[0] == (sent < 4096)


@pytest.mark.parametrize(("framework", "gathers"), [("fsdp", 4), ("megatron-bridge", 1)])
def test_fsdp_frees_weights_after_each_backward_pass_under_zero_2(framework: str, gathers: int) -> None:
    problem = make_problem(TINY, 16, toy_cost(), **TINY_RUN, framework=framework, grad_dtype="fp32", overlap_param_gather=False)
    found = estimated(problem, [problem.layout(zero=2, zero_shard_size=16, num_micro_batches=m) for m in (1, 4)])
    once, several = part(found, "parameter_gather")
    assert several == pytest.approx(gathers * once, rel=1e-12)


# invariants of all layouts, on fitted machines


@pytest.fixture(scope="module")
def sample(h100_model: CostModel) -> Callable[[str], Solutions]:
    """Return a function from a framework to estimates of random layouts of an 8B model on 64 GPUs under it."""

    @cache
    def get(framework: str = "internevo") -> Solutions:
        problem = make_problem(LLAMA, 64, h100_model, framework=framework)
        return estimate_layouts(problem, some_layouts(problem, 512, 3000, seed=11))

    return get


def step_seconds(solutions: Solutions, layouts: Layouts, problem: Problem | None = None) -> np.ndarray:
    return estimate_layouts(problem or solutions.problem, layouts).times.seconds


@pytest.mark.parametrize("framework", ["internevo", "megatron-lm", "torchtitan"])
def test_parts_add_up_and_none_is_negative(sample: Callable[[str], Solutions], framework: str) -> None:
    found = sample(framework)
    assert np.isfinite(found.times.seconds).all() and (found.times.seconds > 0).all()
    np.testing.assert_allclose(found.times.parts.sum(axis=0), found.times.seconds, rtol=1e-9)
    assert (found.times.parts >= 0).all()


@pytest.mark.parametrize("framework", ["internevo", "megatron-lm", "torchtitan"])
def test_explanations_agree_with_the_estimate(sample: Callable[[str], Solutions], framework: str) -> None:
    found = sample(framework)
    for index in range(0, len(found), 40):
        why = explain(found, index)
        assert why.seconds == found.times.seconds[index]
        assert sum(line.seconds for line in why.lines) == pytest.approx(why.seconds, rel=1e-9)
        shares = why.by_part()
        for name, seconds in zip(TIME_PARTS, found.times.parts[:, index], strict=True):
            assert shares[name] == pytest.approx(seconds, abs=1e-9 * why.seconds), name
        assert sum(why.by_basis().values()) == pytest.approx(1, rel=1e-9)
        low, high = why.interval
        assert 0 < low < why.seconds < high < 2 * why.seconds


def test_one_layout_has_the_same_estimate_as_among_many(sample: Callable[[str], Solutions]) -> None:
    found = sample("internevo")
    for index in range(0, len(found), 150):
        single = estimate_layouts(found.problem, found.layouts.one(index))
        np.testing.assert_allclose(single.times.parts[:, 0], found.times.parts[:, index], rtol=1e-12)
        np.testing.assert_allclose(single.memory.parts[:, 0], found.memory.parts[:, index], rtol=1e-12)
        strategy = found.layouts.strategy(index, found.problem.run)
        assert estimated(found.problem, [strategy]).times.seconds[0] == pytest.approx(found.times.seconds[index], rel=1e-12)


def test_order_does_not_matter(sample: Callable[[str], Solutions]) -> None:
    found = sample("internevo")
    order = np.random.default_rng(0).permutation(len(found))
    np.testing.assert_allclose(step_seconds(found, found.layouts.take(order)), found.times.seconds[order], rtol=1e-12)


def test_weight_sharding_always_takes_time(sample: Callable[[str], Solutions]) -> None:
    found = sample("internevo")
    split = found.layouts.take(np.flatnonzero((column(found.layouts, "wp") > 1) & (found.layouts.zero == 0)))
    assert len(split) > 100
    whole = estimate_layouts(found.problem, changed(split, wp=1))
    costs = estimate_layouts(found.problem, split)
    assert (part(costs, "wp_exposed") > 0).all() and (part(whole, "wp_exposed") == 0).all()
    # every micro batch takes longer; only the sharded state (optimizer and its gradients) may save time, once per step
    once = sum(part(costs, name) for name in STATE_PARTS), sum(part(whole, name) for name in STATE_PARTS)
    assert (costs.times.seconds - once[0] > whole.times.seconds - once[1]).all()
    slower_by = part(costs, "wp_exposed") / part(whole, "compute")
    assert slower_by.max() > 0.05, "it is visible with small micro batches"


def test_zero3_is_never_faster_than_zero1(sample: Callable[[str], Solutions]) -> None:
    # where both stages reduce-scatter and all-gather, as in Megatron-LM (InternEvo broadcasts for ZeRO-1, which may be slower)
    found = sample("generic")
    sharded, terms = np.flatnonzero(found.layouts.zero == 3), found.terms
    partitioned = found.layouts.take(sharded)
    assert len(partitioned) > 30
    # but for passes over a shard of the gradients instead of all, and the stragglers' share of these
    fewer = 1.2 * (terms.once.buffer_whole - terms.once.buffer_shard)[found.layouts.row[sharded]]
    least = step_seconds(found, changed(partitioned, zero=1)) * (1 - 1e-12) - fewer
    for zero in (2, 3):
        seconds = step_seconds(found, changed(partitioned, zero=zero))
        assert (seconds >= least).all()


@pytest.mark.parametrize("framework", ["internevo", "torchtitan"])
def test_a_slower_network_exposes_more(sample: Callable[[str], Solutions], h100_model: CostModel, framework: str) -> None:
    found = sample(framework)
    times = [
        step_seconds(
            found, found.layouts, make_problem(LLAMA, 64, h100_model.with_network(gbit * 1e9 / 8), framework=framework)
        )
        for gbit in (800, 400, 100, 25)
    ]
    for faster, slower in zip(times, times[1:], strict=False):
        assert (slower >= faster * (1 - 1e-12)).all()
    assert np.median(times[-1] / times[0]) > 1.01


def test_recomputation_takes_time(sample: Callable[[str], Solutions]) -> None:
    found = sample("internevo")
    none, selective, full = (
        step_seconds(found, changed(found.layouts, recompute=level, recompute_layers=-1)) for level in range(3)
    )
    assert (none < selective).all() and (selective < full).all()
    some = step_seconds(found, changed(found.layouts, recompute=2, recompute_layers=1))
    assert (none <= some).all() and (some <= full).all()
    # recomputing the forward pass takes about a third of a layer's time, never more than all of it
    assert (full < 1.6 * none).all() and np.median(full / none) > 1.1


def test_more_micro_batches_take_longer_and_fill_the_pipeline(sample: Callable[[str], Solutions]) -> None:
    found = sample("internevo")
    double = estimate_layouts(
        found.problem, changed(found.layouts, num_micro_batches=2 * column(found.layouts, "num_micro_batches"))
    )
    assert (double.times.seconds > found.times.seconds).all()
    assert (double.tgs >= found.tgs * (1 - 1e-9)).all()
    np.testing.assert_allclose(part(double, "bubble"), part(found, "bubble"), rtol=1e-9)


def test_a_slower_device_makes_every_step_slower(sample: Callable[[str], Solutions], a100_model: CostModel) -> None:
    found = sample("internevo")
    slower = step_seconds(found, found.layouts, make_problem(LLAMA, 64, a100_model, framework="internevo"))
    assert (slower > found.times.seconds).all()
    assert 1.5 < np.median(slower / found.times.seconds) < 3.5  # the ratio of peak FLOP/s is 3.2, of memory bandwidth 1.6


def test_overlap_never_hurts(sample: Callable[[str], Solutions], h100_model: CostModel) -> None:
    found = sample("megatron-lm")
    exposed = make_problem(
        LLAMA,
        64,
        h100_model,
        framework="megatron-lm",
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        overlap_weight_gather=False,
    )
    without = step_seconds(found, found.layouts, exposed)
    # without overlap gradients are one message, with it several, whose start-ups a step may wait for
    assert (without >= found.times.seconds * (1 - 1e-3)).all() and (without > found.times.seconds * 1.02).any()


def test_no_layout_exceeds_the_datasheet(sample: Callable[[str], Solutions]) -> None:
    for framework in ("internevo", "megatron-lm"):
        found = sample(framework)
        assert (found.mfu > 0).all() and found.mfu.max() < 0.75


def test_interleaving_shortens_the_bubble(h100_model: CostModel) -> None:
    problem = make_problem(LLAMA, 32, h100_model)
    layouts = [toy_layout(32, dp=8, pp=4, vpp=v, num_micro_batches=16) for v in (1, 2, 4, 8)]
    bubbles = part(estimated(problem, layouts), "bubble")
    compute = part(estimated(problem, layouts), "compute")
    assert (np.diff(bubbles) < 0).all()
    assert bubbles[1] < 0.6 * bubbles[0] and compute.std() == 0


def test_the_pipeline_agrees_with_the_event_simulation(h100_model: CostModel) -> None:
    # 30 layers divide evenly over 2 stages, not over 4, 8 or 16; every stage has its own layers, embedding and head
    problem = make_problem(LLAMA.replace(num_hidden_layers=30), 64, h100_model)
    layouts = some_layouts(problem, 512, 20_000, seed=3)
    keep = (column(layouts, "pp") > 1) & (column(layouts, "vpp") == 1) & (layouts.zero < 3) & (layouts.recompute_layers < 0)
    found = estimate_layouts(problem, layouts.take(np.flatnonzero(keep & (column(layouts, "num_micro_batches") <= 32))[:200]))
    even, errors = [], []
    for index, row in enumerate(found.layouts.row):
        key, terms = found.terms.key[row], found.terms
        forward, backward = terms.layers.forward[0, :, row].sum(), terms.layers.backward[0, :, row].sum()
        backward += terms.layers.recompute[0, found.layouts.recompute[index], row]
        first, last = terms.stages.layers[:2, row].astype(int)
        layers = _stage_sizes(30, first, last, int(terms.splits.pp[row]))
        f, b = layers * forward, layers * backward
        for stage, end in ((0, found.table.embedding.times), (-1, found.table.head.times)):
            f[stage] += end.forward[:, key].sum()
            b[stage] += end.backward[:, key].sum()
        exact = simulate("1f1b", f, b, int(terms.splits.num_micro_batches[row]), transfer=float(terms.send_recv[row])).makespan
        once = sum(part(found, name)[index] for name in STATE_PARTS)
        errors.append((found.times.seconds[index] - once) / exact - 1)
        even.append(len(set(layers.tolist())) == 1)
    assert np.abs(errors)[np.array(even)].max() < 1e-9 and sum(even) > 20
    assert min(errors) > -1e-9 and max(errors) < 0.02, "never too fast, and at most 2% too slow for uneven layers"


def _stage_sizes(layers: int, first: int, last: int, pp: int) -> np.ndarray:
    """Return the layers of every stage: ``first`` and ``last`` as given, the rest assigned evenly to the middle stages."""
    middle, rest = divmod(layers - first - last, max(pp - 2, 1))
    return np.array([first, *(middle + (i < rest) for i in range(pp - 2)), last], dtype=float)


@pytest.mark.parametrize(
    ("framework", "device", "deterministic", "generation"),
    [("megatron-core", 4, True, 2), ("megatron-core", 4, False, 0), ("megatron-core", 3, True, 0), ("aleph alpha", 4, True, 0)],
)
def test_transformer_engine_uses_another_kernel_for_deterministic_runs_on_blackwell(
    framework: str, device: int, deterministic: bool, generation: int
) -> None:
    cost = toy_cost(device=replace(DEVICE, flash_version=device))
    assert attention_generation(toy_layout(8, 32, framework=framework, deterministic=deterministic), cost) == generation


def test_a_run_may_state_its_generation_of_flash_attention() -> None:
    # the second generation is 1.75 times as fast as the first
    cost = toy_cost(device=replace(DEVICE, flash_version=2))
    stated = attention_generation(toy_layout(8, 32, framework="aleph alpha", flash_generation=1), cost)
    assert stated == 1 and cost.with_flash_version(stated).kernels.attention_kernel.behind == (1,)
    assert attention_generation(toy_layout(8, 32, framework="llm-foundry"), cost) == 1
    assert attention_generation(toy_layout(8, 32, framework="llm-foundry", flash_generation=2), cost) == 2
    for model, constants, sentence in (
        (TINY, {"flash_generation": 2, "attention": "unfused"}, "flash_generation changes nothing with attention unfused"),
        (TINY, {"fused_softmax": True}, "fused_softmax changes nothing with attention flash"),
    ):
        with pytest.raises(InputError, match=sentence):
            check_rules(model, toy_layout(8, 32, framework="llm-foundry", **constants))
    with pytest.raises(InputError, match="flash_generation 3 does not run on .*, whose latest is 2"):
        make_problem(TINY, 8, cost, framework="llm-foundry", flash_generation=3)


def test_a_gpu_before_ampere_has_neither_bf16_nor_flash_attention() -> None:
    volta = toy_cost(device=replace(DEVICE, name="volta", peak_flops={"fp16": 1e15}, flash_version=0))
    with pytest.raises(InputError, match="volta does not multiply in bf16; give it precision fp16"):
        make_problem(TINY, 8, volta, precision="bf16", attention="unfused")
    with pytest.raises(InputError, match="no FlashAttention runs on volta; give it attention unfused"):
        make_problem(TINY, 8, volta, precision="fp16")
    of_16_bits = [make_problem(TINY, 8, cost, precision="fp16", attention="unfused") for cost in (volta, toy_cost())]
    layout = of_16_bits[0].layout()
    seconds = [estimate_layouts(problem, Layouts.of([layout])).times.seconds[0] for problem in of_16_bits]
    assert seconds[0] == seconds[1]


def test_a_group_of_four_micro_batches_hides_twice_as_much_of_the_gradients_of_interleaved_chunks() -> None:
    # four micro batches of a chunk's one layer run beside the message instead of pp = 2: two backward passes of a layer more,
    # of which a twentieth is lost to contention
    def sync(group: int) -> tuple[float, float]:
        problem = make_problem(
            TINY.replace(num_hidden_layers=4),
            32,
            toy_cost(),
            **TINY_RUN,
            framework="megatron-core",
            grad_dtype="fp32",
            overlap_grad_reduce=True,
            micro_batch_group=group,
        )
        layout = problem.layout(dp=16, pp=2, vpp=2, zero_shard_size=16, num_micro_batches=4)
        found = estimated(problem, [layout])
        return float(part(found, "gradient_sync")[0]), float(found.table.layer.times.backward[:, 0].sum())

    (usual, backward), (grouped, _) = sync(0), sync(4)
    assert usual - grouped == pytest.approx(2 * backward * 0.95, rel=1e-9)


def test_every_micro_batch_of_fsdp_under_zero_2_hides_its_own_gather() -> None:
    problem = make_problem(TINY, 16, toy_cost(), **TINY_RUN, framework="fsdp", grad_dtype="fp32", overlap_param_gather=True)
    found = estimated(problem, [problem.layout(zero=2, zero_shard_size=16, num_micro_batches=m) for m in (1, 4)])
    once, several = part(found, "parameter_gather")
    assert once < found.terms.once.all_gather.exposed[0], "some of it is hidden"
    assert several == pytest.approx(4 * once, rel=1e-12)


def test_what_nanotron_shards_is_reduced_in_one_message_that_nothing_hides() -> None:
    # a table of 2 MiB is a bucket of its own, behind which DDP's other buckets overlap with the backward pass; the message of
    # ZeRO-1 follows that pass, however many buckets there would be
    model = TINY.replace(vocab_size=2**14)
    problem = make_problem(model, 16, toy_cost(), **TINY_RUN, framework="nanotron", grad_dtype="fp32", overlap_grad_reduce=True)
    found = estimated(problem, [problem.layout(zero=z, zero_shard_size=16 if z else 1) for z in (0, 1)])
    whole, sharded = part(found, "gradient_sync")
    assert whole < found.terms.once.all_reduce.exposed[0]
    assert sharded == pytest.approx(found.terms.once.reduce_scatter.exposed[1], rel=1e-12)


def test_buckets_grow_with_all_ranks_that_hold_copies_those_of_context_parallelism_too() -> None:
    # 32 data-parallel by 2 context-parallel ranks: a bucket has 64 million parameters; the last one is exposed, of the others
    # the twentieth that their contention takes
    model = TINY.replace(hidden_size=4096, intermediate_size=14_336, head_dim=1024)
    problem = make_problem(
        model, 64, toy_cost(), seq_len=512, compile=True, framework="megatron-core", grad_dtype="fp32", overlap_grad_reduce=True
    )
    found = estimated(problem, [problem.layout(dp=32, cp=2, zero=1, zero_shard_size=64)])
    layer = found.table.layer.times
    long = (replace(found.table.layers[0], times=replace(layer, backward=layer.backward + 1e3)),)
    slow = estimate_layouts(problem, found.layouts, replace(found.table, layers=long))
    message, parameters = float(found.terms.once.reduce_scatter.communication[0]), float(found.terms.once.parameters[0])
    last = 64e6 / parameters
    assert 0.1 < last < 0.2
    assert part(slow, "gradient_sync")[0] == pytest.approx(message * (last + (1 - last) * 0.05), rel=1e-6)


def test_gradients_hide_under_the_forward_passes_that_run_again_too() -> None:
    # ZeRO-2 reduces in each of four micro batches; two layers' forward passes run again beside it, of which a twentieth is lost
    problem = make_problem(
        TINY, 16, toy_cost(), **TINY_RUN, framework="megatron-core", grad_dtype="fp32", overlap_grad_reduce=True
    )
    layout = problem.layout(zero=2, zero_shard_size=16, num_micro_batches=4)
    found = estimated(problem, [layout, layout.replace(recompute="full")])
    kept, recomputed = part(found, "gradient_sync")
    again = 2 * float(found.terms.layers.recompute[0, 2, 0])
    assert again > 0 and kept - recomputed == pytest.approx(4 * again * 0.95, rel=1e-9)


@pytest.mark.parametrize(("precision", "moved"), [("bf16", 30 + 2 * 2 + 36), ("fp16", 30 + 2 * 2 + 36 + 28)])
def test_deepspeeds_optimizer_moves_more_of_what_it_shards(precision: str, moved: float) -> None:
    # ZeRO-1 over 2 ranks: norm in fp64, joined and unscaled gradients, copies, of fp16 the search for overflows
    found = tiny(
        "megatron-deepspeed", 2, run={"precision": precision, "grad_dtype": precision}, zero=1, zero_shard_size=2, dp=2
    )
    whole = tiny("megatron-deepspeed", 2, run={"precision": precision, "grad_dtype": precision}, zero=0, dp=2)
    # without ZeRO all parameters, each 30 bytes for Adam, 30 for what is done in 16 bits and two passes; else half of them
    ratio = part(found, "optimizer")[0] / part(whole, "optimizer")[0]
    assert ratio == pytest.approx(moved / 2 / (30 + 30 + 2 * 2), rel=1e-4)  # beside a message of 4 bytes
