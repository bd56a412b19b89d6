"""States and activations on the host, and narrow moments: bytes and seconds by hand, limits, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import estimated, make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from profiler.profile.devices import DEVICES
from solver import estimate
from solver.formats.config_file import load_run_config
from solver.report.explain import explain
from solver.search.search import search
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.model import ModelSpec
from solver.spec.model_size import parameters
from solver.step.layouts import Layouts
from solver.step.memory import MEMORY_PARTS
from solver.step.offload import serialised_ranks
from solver.step.problem import Problem
from solver.step.solutions import Solutions
from solver.step.time import TIME_PARTS

LINK, MEMORY = 50e9, 40e9
HOST = {"host_link_gb_s": LINK / 1e9, "host_memory_gb_s": MEMORY / 1e9}
MODEL = load_run_config("configs/models/llama3_8b.json").model
LAYOUT = {"zero": 1, "zero_shard_size": 8, "num_micro_batches": 4}


def stepped(cost: CostModel, layout: dict[str, Any] | None = None, host: bool = True, **constants: Any) -> Solutions:
    cluster = cluster_of(DEVICES["h100_sxm"], HOST if host else {})
    values = {"framework": "megatron-core", "precision": "bf16", **constants}
    problem = make_problem(MODEL, 8, cost, 8192, cluster, **values)
    return estimated(problem, [problem.layout(**{**LAYOUT, **(layout or {})})])


def part(found: Solutions, name: str) -> float:
    return float(found.times.parts[TIME_PARTS.index(name), 0])


def held(found: Solutions, name: str) -> float:
    return float(found.memory.parts[MEMORY_PARTS.index(name), 0])


def test_moments_on_the_host_by_hand(h100_model: CostModel) -> None:
    here, half = stepped(h100_model), stepped(h100_model, optimizer_offload_fraction=0.5)
    owned = parameters(MODEL) / 8  # of a rank under ZeRO-1
    # two fp32 moments and the fp32 weights (HybridDeviceOptimizer beside the precision-aware optimizer)
    assert held(here, "optimizer") - held(half, "optimizer") == pytest.approx(0.5 * 12 * owned, rel=1e-3)
    # gradients there in fp32 and weights back in 16 bits, and of the host's memory Adam's 28 bytes for each parameter that
    # moves and 6 for its 16 bits
    on_host = 0.5 * owned * (6 / LINK + 34 / MEMORY)
    on_device = stepped(h100_model, optimizer_offload_fraction=1.0)
    rest = part(half, "optimizer") - on_host
    assert part(on_device, "optimizer") - 2 * on_host < rest < part(here, "optimizer")
    for name in ("compute", "bubble", "gradient_sync"):
        assert part(half, name) == part(here, name)


def test_fp32_weights_stay_where_no_optimizer_is_precision_aware(h100_model: CostModel) -> None:
    here, away = (stepped(h100_model, framework="megatron-bridge-26", optimizer_offload_fraction=share) for share in (0.0, 1.0))
    owned = parameters(MODEL) / 8
    assert held(here, "optimizer") - held(away, "optimizer") == pytest.approx(8 * owned, rel=1e-3)
    assert part(away, "optimizer") == pytest.approx(owned * (8 / LINK + 28 / MEMORY), rel=0.1)


def test_narrow_moments_by_hand(h100_model: CostModel) -> None:
    owned, plain = parameters(MODEL) / 8, held(stepped(h100_model), "optimizer")
    for name, moment in (("bf16", 2), ("8bit", 1)):
        found = stepped(h100_model, optimizer_states=name)
        # of the fp32 weights the optimizer keeps the 16 bits that the weights lack
        assert held(found, "optimizer") == pytest.approx(owned * (2 + 2 * moment), rel=1e-3)
        assert plain - held(found, "optimizer") == pytest.approx((2 + 2 * (4 - moment)) * owned, rel=1e-3)
        assert part(found, "optimizer") > part(stepped(h100_model), "optimizer"), "widened for the step and narrowed again"


def test_fp32_copies_of_16_bit_gradients_stay_beside_an_optimizer_on_the_host(h100_model: CostModel) -> None:
    # HybridDeviceOptimizer: of the parameters that the device updates
    owned, grads = parameters(MODEL) / 8, {"grad_dtype": "bf16"}
    here = stepped(h100_model, **grads)
    for share in (0.25, 1.0):
        away = stepped(h100_model, **grads, optimizer_offload_fraction=share)
        assert held(away, "gradients") - held(here, "gradients") == pytest.approx(4 * (1 - share) * owned, rel=1e-6, abs=1)
    # without a precision-aware optimizer the gradients that it gets are in fp32 already
    bridge = [stepped(h100_model, framework="megatron-bridge-26", **grads, optimizer_offload_fraction=s) for s in (0.0, 0.25)]
    assert held(bridge[0], "gradients") == held(bridge[1], "gradients")


def test_activations_on_the_host_by_hand(h100_model: CostModel) -> None:
    here, away = stepped(h100_model), stepped(h100_model, offload_layers=8)
    layers, each = MODEL.num_hidden_layers, held(here, "activations") / MODEL.num_hidden_layers
    assert held(away, "activations") == pytest.approx((layers - 8 + 2) * each)  # two are on the device at a time
    slow = make_problem(
        MODEL,
        8,
        h100_model,
        8192,
        cluster_of(DEVICES["h100_sxm"], {"host_link_gb_s": 5}),
        framework="megatron-core",
        precision="bf16",
        offload_layers=8,
    )
    found = estimated(slow, [slow.layout(**LAYOUT)])
    compute = part(here, "compute") / 4 * 0.99  # of a micro batch; embedding and head are a little of it
    # the eight share the time of all layers; none waits where each transfer is shorter than its share
    late = 8 * 2 * each / 5e9
    assert part(found, "offload_exposed") / 4 == pytest.approx(max(late - compute, 0), rel=0.05)
    assert part(away, "offload_exposed") == 0.0 < part(stepped(h100_model, offload_layers=31), "offload_exposed")
    names = {line.name: line.seconds for line in explain(found, 0).lines}
    assert names["activations to and from the host"] == part(found, "offload_exposed")


@settings(max_examples=25, deadline=None)
@given(st.floats(0, 1), st.integers(0, 31))
def test_offload_never_takes_memory_and_never_saves_time(h100_model: CostModel, fraction: float, layers: int) -> None:
    here = stepped(h100_model, grad_dtype="fp32")
    away = stepped(h100_model, grad_dtype="fp32", optimizer_offload_fraction=fraction, offload_layers=layers)
    assert away.memory.allocated[0] <= here.memory.allocated[0] * (1 + 1e-12)
    assert away.times.seconds[0] >= here.times.seconds[0] * (1 - 1e-12)
    assert away.times.parts[:, 0].sum() == pytest.approx(away.times.seconds[0])


@pytest.mark.parametrize(
    ("layout", "constants", "sentence"),
    [
        ({}, {"framework": "megatron-core-0.8", "optimizer_offload_fraction": 0.5}, "does not offer to offload optimizer"),
        ({"zero": 3}, {"framework": "torchtitan", "optimizer_states": "bf16"}, "does not offer optimizer_states bf16"),
        ({}, {"optimizer_states": "remainder", "precision": "mxfp8"}, "remainder is of weights in bf16"),
        (
            {},
            {"optimizer_states": "remainder", "optimizer_offload_fraction": 0.5},
            "in fp32 on both: leave optimizer_states remai",
        ),
        (
            {},
            {"optimizer_states": "bf16", "optimizer_offload_fraction": 0.5},
            "in fp32 on both: leave optimizer_states bf16 out",
        ),
        (
            {"zero": 3},
            {"framework": "megatron-bridge-26", "optimizer_states": "remainder"},
            "runs with ZeRO-0 to 2, not ZeRO-3",
        ),
        ({}, {"framework": "torchtitan", "expandable_segments": True}, "changes nothing under torchtitan"),
        ({"pp": 2, "dp": 4, "zero_shard_size": 4}, {"offload_layers": 4}, "offload_layers needs pp 1"),
        ({"recompute": "full"}, {"offload_layers": 4}, "offload_layers needs pp 1, no recomputation"),
        ({}, {"offload_layers": 32}, "leaves none of the 32 layers"),
        ({}, {"optimizer_offload_fraction": 1.5}, "optimizer_offload_fraction is 1.5"),
    ],
)
def test_what_no_framework_runs_is_refused(
    h100_model: CostModel, layout: dict[str, Any], constants: dict[str, Any], sentence: str
) -> None:
    problem = make_problem(MODEL, 8, h100_model, 8192, cluster_of(DEVICES["h100_sxm"], HOST), framework="megatron-core")
    with pytest.raises(InputError, match=sentence):
        check_layout(MODEL, problem.cluster, problem.layout(**LAYOUT, **constants).replace(**layout))


def test_a_host_must_be_described(h100_model: CostModel) -> None:
    for constants, key in (({"optimizer_offload_fraction": 0.1}, "host_link_gb_s"), ({"offload_layers": 1}, "host_link_gb_s")):
        with pytest.raises(InputError, match=f"needs {key} of the cluster"):
            stepped(h100_model, host=False, **constants)
    only = cluster_of(DEVICES["h100_sxm"], {"host_link_gb_s": 50})
    make_problem(MODEL, 8, h100_model, 8192, only, offload_layers=2)
    with pytest.raises(InputError, match="needs host_memory_gb_s of the cluster"):
        make_problem(MODEL, 8, h100_model, 8192, only, optimizer_offload_fraction=0.5)


def test_a_search_offloads_what_is_stated(h100_model: CostModel) -> None:
    cluster = cluster_of(DEVICES["h100_sxm"], {**HOST, "memory_gib": 40})
    problem = make_problem(MODEL, 8, h100_model, 8192, cluster, framework="megatron-core", precision="bf16", offload_layers=16)
    found = search(problem, 64).best
    best = found.layouts.strategy(0, found.problem.run)
    assert (best.pp, best.recompute, best.offload_layers) == (1, "none", 16)
    other = make_problem(MODEL, 8, h100_model, 8192, cluster, framework="torchtitan", offload_layers=16)
    with pytest.raises(InputError, match="does not offer to offload activations"):
        search(other, 64)


def test_constants_of_a_layout_are_those_of_its_problem(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, 8192, framework="megatron-core")
    with pytest.raises(InputError, match=r"optimizer_states is 'bf16' in a layout, but 'fp32' in the problem"):
        estimate(problem, [problem.layout(**LAYOUT, optimizer_states="bf16")])


def offloaded(cost: CostModel, micro_batches: int = 4, zero: int = 2, **constants: Any) -> Solutions:
    cluster = cluster_of(DEVICES["h100_sxm"], HOST)
    values = {"framework": "deepspeed", "attention": "flash", "overlap_grad_reduce": False, **constants}
    problem = make_problem(MODEL, 8, cost, 8192, cluster, precision="bf16", grad_dtype="bf16", **values)
    layout = {"zero": zero, "zero_shard_size": 8, "num_micro_batches": micro_batches}
    return estimated(problem, [problem.layout(**layout)])


def test_gradients_on_the_host_by_hand(h100_model: CostModel) -> None:
    away = {"optimizer_offload_fraction": 1.0, "offload_gradients": True}
    here, there = offloaded(h100_model), offloaded(h100_model, **away)
    owned = parameters(MODEL) / 8
    # both moments and the fp32 weights; the gradients' part in 16 bits, and the copies of it that the framework keeps
    assert held(here, "optimizer") - held(there, "optimizer") == pytest.approx(12 * owned, rel=1e-3)
    assert not here.problem.framework.memory.keeps_half_gradients * (here.problem.element_bytes.gradient > 2)
    table = 128256 * 4096  # the largest weight, of whose gradient the device keeps a buffer
    assert held(here, "gradients") - held(there, "gradients") == pytest.approx(2 * owned - 2 * table, rel=1e-3)
    # to the host in 16 bits; after the first also back from it before, and of the last one also in fp32; partitions are larger
    # than buckets of 500 million, so that the ranks copy one after the other
    way = 8 * owned * 2 / LINK
    late = way + 2 * 2 * way + 4 * way
    assert part(there, "gradient_sync") - part(here, "gradient_sync") == pytest.approx(late, rel=1e-3, abs=1e-9)
    assert sum(line.seconds for line in explain(there, 0).lines) == pytest.approx(float(there.times.seconds[0]), rel=1e-9)
    # Adam moves 28 bytes of the host's memory, clipping 8, the cast 6; 16-bit weights come back
    assert part(there, "optimizer") == pytest.approx(owned * (42 / MEMORY + 2 / LINK), rel=0.1)


@pytest.mark.parametrize(("zero", "micro_batches", "ways"), [(2, 1, 2), (2, 4, 1 + 4 + 4), (3, 1, 4), (3, 4, 2 + 4 + 4)])
def test_gradients_cross_the_link_by_hand(h100_model: CostModel, zero: int, micro_batches: int, ways: int) -> None:
    # under ZeRO-2 the ranks copy one after the other, under ZeRO-3 a part of each parameter at once
    away = {"optimizer_offload_fraction": 1.0, "offload_gradients": True}
    here, there = (offloaded(h100_model, micro_batches, zero, **more) for more in ({}, away))
    way = parameters(MODEL) / (8 if zero == 3 else 1) * 2 / LINK
    assert part(there, "gradient_sync") - part(here, "gradient_sync") == pytest.approx(ways * way, rel=1e-3)


def test_buckets_gradient_copies_and_shards_of_deepspeed_by_hand(h100_model: CostModel) -> None:
    """A second bucket with overlap_comm under ZeRO-2, one more for what is joined to be reduced; what joins and widens
    gradients is there at the step only; ZeRO-3 shards 16-bit weights beside the fp32 ones."""
    one, two = (offloaded(h100_model, overlap_grad_reduce=overlaps) for overlaps in (False, True))
    assert held(two, "gradients") - held(one, "gradients") == 500e6 * 2
    owned = parameters(MODEL) / 8
    assert held(one, "gradients") == pytest.approx(2 * owned + 2 * 500e6 * 2, rel=1e-6)
    three = offloaded(h100_model, zero=3)
    assert held(three, "weights") == pytest.approx(2 * owned, rel=1e-6)


def test_as_many_ranks_copy_in_turn_as_a_bucket_has_owners(h100_model: CostModel) -> None:
    """8 ranks, buckets of 500 million: of 4 billion parameters each rank has one; of fewer several share one."""
    problem = make_problem(MODEL, 8, h100_model, 8192, framework="deepspeed")
    splits = Layouts.of([problem.layout(num_micro_batches=1)] * 4).splits.take(np.zeros(4, dtype=int))
    assert serialised_ranks(problem, splits, np.array([4e8, 1e9, 4e9, 8e9])).tolist() == [1, 2, 8, 8]
    hidden = make_problem(MODEL, 8, h100_model, 8192, framework="transformers-deepspeed")  # buckets of 4096 squared
    assert serialised_ranks(hidden, splits, np.array([4e8] * 4)).tolist() == [8] * 4


def test_a_slow_link_is_waited_for(h100_model: CostModel) -> None:
    slow = cluster_of(DEVICES["h100_sxm"], {"host_link_gb_s": 1, "host_memory_gb_s": 40})
    problem = make_problem(
        MODEL,
        8,
        h100_model,
        8192,
        slow,
        framework="deepspeed",
        precision="bf16",
        grad_dtype="bf16",
        attention="flash",
        optimizer_offload_fraction=1.0,
        offload_gradients=True,
    )
    one, four = (estimated(problem, [problem.layout(zero=3, zero_shard_size=8, num_micro_batches=m)]) for m in (1, 4))
    way, backward = parameters(MODEL) / 8 * 2 / 1e9, float(one.times.pipelines.backward[0])
    assert way > backward
    more = part(four, "gradient_sync") - part(one, "gradient_sync")
    reduces = [part(offloaded(h100_model, m, 3, overlap_grad_reduce=True), "gradient_sync") for m in (1, 4)]
    late = (2 * way - backward) + 2 * (2 * way - backward) + (4 * way - backward) - (4 * way - backward)
    assert more - (reduces[1] - reduces[0]) == pytest.approx(late, rel=0.02)


@pytest.mark.parametrize(
    ("constants", "zero", "reason"),
    [
        ({"offload_gradients": True}, 2, "needs optimizer_offload_fraction"),
        ({"optimizer_offload_fraction": 1.0}, 2, "keeps gradients where its optimizer is"),
        ({"optimizer_offload_fraction": 1.0, "offload_gradients": True}, 1, "runs with ZeRO-2 to 3, not ZeRO-1"),
        (
            {"optimizer_offload_fraction": 1.0, "offload_gradients": True, "framework": "generic"},
            2,
            "does not offer to offload gradients",
        ),
    ],
)
def test_gradients_stay_here_where(constants: dict[str, Any], zero: int, reason: str, h100_model: CostModel) -> None:
    found = offloaded(h100_model)
    run = found.problem.layout(zero=zero, zero_shard_size=8, **constants)
    with pytest.raises(InputError, match=reason):
        check_layout(MODEL, found.problem.cluster, run)


EXPERTS = load_run_config("configs/models/deepseek_v2_lite.json").model


def moved(
    cost: CostModel, model: ModelSpec, layout: dict[str, Any] | None = None, link: float = 50, **constants: Any
) -> Solutions:
    cluster = cluster_of(DEVICES["h100_sxm"], {"host_link_gb_s": link})
    problem = make_problem(model, 8, cost, 8192, cluster, framework="megatron-core", precision="bf16", **constants)
    return estimated(problem, [problem.layout(**{**LAYOUT, **(layout or {})})])


def test_modules_on_the_host_by_hand(h100_model: CostModel) -> None:
    here, away = moved(h100_model, MODEL), moved(h100_model, MODEL, offload_modules="core_attn")
    layers, h, tokens = MODEL.num_hidden_layers, MODEL.hidden_size, 8192
    heads = h + 2 * MODEL.num_key_value_heads * MODEL.head_dim
    core = 2 * tokens * heads  # queries, keys and values; their statistics are small
    assert held(here, "activations") - held(away, "activations") == pytest.approx((layers - 1) * core)
    two = {"pp": 2, "dp": 4, "zero_shard_size": 4, "num_micro_batches": 8}  # two micro batches in flight
    before, after = (moved(h100_model, MODEL, two, offload_modules=what) for what in ("", "core_attn"))
    assert held(before, "activations") - held(after, "activations") == pytest.approx((2 * layers / 2 - 1) * core)
    # the context is the projection's input too, and leaves with it alone
    both = moved(h100_model, MODEL, offload_modules="core_attn+attn_proj")
    assert held(away, "activations") - held(both, "activations") == pytest.approx((layers - 1) * 2 * tokens * h)
    slow = moved(h100_model, MODEL, link=1, offload_modules="core_attn")
    late = layers * 2 * core / 1e9
    assert part(away, "offload_exposed") == 0
    assert late - part(here, "compute") / 4 < part(slow, "offload_exposed") / 4 < late


def test_small_tensors_stay_and_norms_that_are_part_of_a_linear_move_with_it(h100_model: CostModel) -> None:
    here = moved(h100_model, MODEL)
    away = moved(h100_model, MODEL, offload_modules="qkv_linear")
    stream = 2 * 8192 * MODEL.hidden_size
    assert held(here, "activations") - held(away, "activations") == pytest.approx((MODEL.num_hidden_layers - 1) * 2 * stream)
    few = {"tp": 8, "dp": 1, "tp_mode": "msp", "zero": 0, "zero_shard_size": 1}  # of a rank 1,024 tokens of 512, half a million
    short = make_problem(
        MODEL,
        8,
        h100_model,
        1024,
        cluster_of(DEVICES["h100_sxm"], HOST),
        framework="megatron-core",
        offload_modules="core_attn",
    )
    layout = short.layout(**{**LAYOUT, **few})
    plain = Problem(short.model, short.layout(offload_modules=""), short.cluster, short.cost)
    assert held(estimated(short, [layout]), "activations") == held(estimated(plain, [layout]), "activations")


def test_experts_and_latent_attention_on_the_host(h100_model: CostModel) -> None:
    ranks = {"ep": 8, "etp": 1}
    sizes = {
        what: held(moved(h100_model, EXPERTS, ranks, offload_modules=what), "activations")
        for what in ("", "attn_norm", "mlp_norm", "expert_fc1", "moe_act")
    }
    h, layers, rows = EXPERTS.hidden_size, EXPERTS.num_hidden_layers, 8192 * EXPERTS.num_experts_per_tok
    of_experts = layers - EXPERTS.first_k_dense_replace - 1  # one layer's stay
    assert sizes[""] - sizes["attn_norm"] == pytest.approx((layers - 1) * 2 * 8192 * h)
    assert sizes[""] - sizes["mlp_norm"] == pytest.approx(of_experts * 2 * 8192 * h)
    assert sizes[""] - sizes["expert_fc1"] == pytest.approx(of_experts * 2 * rows * h)
    assert sizes[""] - sizes["moe_act"] == pytest.approx(of_experts * 2 * rows * 2 * EXPERTS.moe_intermediate_size)


@pytest.mark.parametrize(
    ("model", "layout", "constants", "sentence"),
    [
        (MODEL, {}, {"offload_modules": "moe_act"}, "has no moe_act to keep on the host"),
        (MODEL, {}, {"offload_modules": "attn_norm"}, "has no attn_norm to keep on the host"),
        (MODEL, {}, {"offload_modules": "attn_proj"}, "offload_modules attn_proj needs core_attn beside it"),
        (MODEL, {"recompute": "full"}, {"offload_modules": "core_attn"}, "leaves nothing to full recomputation"),
        (MODEL, {"recompute": "selective"}, {"offload_modules": "core_attn"}, "core_attn is recomputed"),
        (MODEL, {}, {"offload_modules": "core_attn", "offload_layers": 2}, "not both"),
        (MODEL, {}, {"offload_modules": "core_attn", "cuda_graphs": True}, "CUDA graphs of whole layers"),
        (MODEL, {}, {"offload_modules": "core_attn", "framework": "megatron-core-0.8"}, "does not offer to offload modules"),
    ],
)
def test_modules_that_no_framework_keeps_on_the_host_are_refused(
    h100_model: CostModel, model: ModelSpec, layout: dict[str, Any], constants: dict[str, Any], sentence: str
) -> None:
    problem = make_problem(model, 8, h100_model, 8192, cluster_of(DEVICES["h100_sxm"], HOST), framework="megatron-core")
    with pytest.raises(InputError, match=sentence):
        check_layout(model, problem.cluster, problem.layout(**LAYOUT, **constants).replace(**layout))


@settings(max_examples=25, deadline=None)
@given(
    st.sets(st.sampled_from(["qkv_linear", "core_attn", "expert_fc1", "moe_act", "mlp_norm", "attn_norm"])), st.floats(0.5, 500)
)
def test_modules_away_never_take_memory_and_never_save_time(h100_model: CostModel, names: set[str], link: float) -> None:
    ranks = {"ep": 8, "etp": 1}
    here = moved(h100_model, EXPERTS, ranks)
    away = moved(h100_model, EXPERTS, ranks, link, offload_modules="+".join(sorted(names)))
    assert away.memory.allocated[0] <= here.memory.allocated[0] * (1 + 1e-12)
    assert away.times.seconds[0] >= here.times.seconds[0] * (1 - 1e-12)
    assert away.times.parts[:, 0].sum() == pytest.approx(away.times.seconds[0])


def _slow(cost: CostModel, layout: dict[str, Any], **constants: Any) -> Solutions:
    """Return the estimate with what the core attention saves on a host behind a link of 1 GB/s."""
    cluster = cluster_of(DEVICES["h100_sxm"], {"host_link_gb_s": 1.0, "host_memory_gb_s": 40.0})
    problem = make_problem(
        MODEL, 8, cost, 8192, cluster, framework="megatron-core", precision="bf16", offload_modules="core_attn", **constants
    )
    return estimated(problem, [problem.layout(**{**LAYOUT, **layout})])


def test_the_first_micro_batch_waits_for_the_host_on_every_stage(h100_model: CostModel) -> None:
    # two stages of two chunks: beside what each of 4 micro batches waits for on the slowest stage, the pipeline fills and
    # drains later by half of what the other stage waits for
    layout = {"pp": 2, "vpp": 2, "dp": 4, "zero_shard_size": 4}
    here = stepped(h100_model, layout)
    away = _slow(h100_model, layout)
    waited = part(away, "offload_exposed") / 4
    assert waited > 0
    assert part(away, "bubble") - part(here, "bubble") == pytest.approx(waited / 2, rel=1e-6)


def test_what_comes_back_has_the_recomputed_forward_pass_to_do_so(h100_model: CostModel) -> None:
    # of each of 32 layers and 4 micro batches what it saves goes under its forward pass, and comes back under the backward pass
    # and what that runs again
    found = _slow(h100_model, {"recompute": "selective"}, recompute_modules="mlp")
    terms, level = found.terms, 1
    forward, backward = (float(each[0].sum(axis=0)[0]) for each in (terms.layers.forward, terms.layers.backward))
    transfer, again = float(terms.layers.offloaded[0, level, 0]) / 1e9, float(terms.layers.recompute[0, level, 0])
    assert transfer > backward + again > backward
    assert part(found, "offload_exposed") == pytest.approx(4 * 32 * (2 * transfer - forward - backward - again), rel=1e-9)
