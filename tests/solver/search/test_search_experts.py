"""Searches over layouts of models with experts, latent attention and windows: complete, obedient, and explained."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from toy import DEVICE, all_layouts, column, make_problem, toy_cost

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.report.explain import explain
from solver.search.search import search
from solver.search.space import enumerate_splits
from solver.spec.choices import Recompute
from solver.spec.feasibility import check_layout
from solver.spec.model import ModelSpec
from solver.step.layouts import Layouts
from solver.step.per_stage import memory_of_stages, time_of_stages
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts
from solver.step.time import TIME_PARTS

#: Two dense layers, six with experts; latent attention; one module of multi-token prediction.
DEEP = ModelSpec(
    name="deep",
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=96,
    q_lora_rank=256,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    vocab_size=32000,
    num_experts=12,
    num_experts_per_tok=3,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    first_k_dense_replace=2,
    router_score="sigmoid",
    router_bias=True,
    router_groups=4,
    router_topk_groups=2,
    num_nextn_predict_layers=1,
)
#: Layers with a window and full ones in turn, and experts in every layer.
WINDOWS = ModelSpec(
    name="windows",
    hidden_size=1024,
    intermediate_size=1024,
    num_hidden_layers=6,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=32000,
    sliding_window=512,
    sliding_window_every=2,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=1024,
    attention_sinks=True,
)


def problem_of(model: ModelSpec, h100_model: CostModel, world: int = 16, **constants: Any) -> Problem:
    return make_problem(model, world, h100_model, **{"framework": "megatron-core", "cp_comm": "a2a", **constants})


@pytest.fixture(scope="module", params=["deep", "windows"])
def found(request: pytest.FixtureRequest, h100_model: CostModel) -> Solutions:
    problem = problem_of({"deep": DEEP, "windows": WINDOWS}[request.param], h100_model)
    return estimate_layouts(problem, all_layouts(problem, 32))


def test_sizes_multiply_to_the_world(found: Solutions) -> None:
    splits = found.layouts.splits
    assert (splits.tp * splits.cp * splits.dp * splits.pp == 16).all()
    edp = splits.tp * splits.cp * splits.dp // (splits.ep * splits.etp)
    assert (splits.etp * splits.ep * edp * splits.pp == 16).all()
    assert {1, 2, 4} <= set(splits.ep.tolist()) and {1, 2} <= set(splits.etp.tolist())


def test_every_layout_may_run_and_no_allowed_expert_group_is_missing(found: Solutions) -> None:
    problem = found.problem
    seen = set()
    for row in range(0, len(found.layouts), 97):
        layout = found.layouts.strategy(row, problem.run)
        check_layout(problem.model, problem.cluster, layout)
        seen.add((layout.ep, layout.etp))
    splits = found.layouts.splits
    listed = set(
        zip(splits.tp.tolist(), splits.cp.tolist(), splits.pp.tolist(), splits.ep.tolist(), splits.etp.tolist(), strict=True)
    )
    for tp, cp, pp, ep, etp in product((1, 2, 4), (1, 2), (1, 2), range(1, 13), (1, 2, 4)):
        ranks = 16 // pp
        possible = ranks % (ep * etp) == 0 and problem.model.num_experts % ep == 0 and tp % etp == 0
        # Megatron-Core predicts no further tokens beside cp; all-to-alls share the 4 heads of keys and values
        possible &= cp == 1 or (problem.model is WINDOWS and tp * cp <= 4)
        assert ((tp, cp, pp, ep, etp) in listed) == possible, (tp, cp, pp, ep, etp)


def test_the_best_is_the_best_of_all(found: Solutions) -> None:
    fits = found.memory.device <= found.problem.cluster.memory_bytes
    best = search(found.problem, 32, top=5).best
    np.testing.assert_allclose(best.times.seconds, np.sort(found.times.seconds[fits])[:5], rtol=1e-12)


def test_parts_lines_and_stages_add_up(found: Solutions) -> None:
    np.testing.assert_allclose(found.times.parts.sum(axis=0), found.times.seconds, rtol=1e-9)
    for index in range(0, len(found.layouts), 1499):
        why = explain(found, index)
        assert sum(line.seconds for line in why.lines) == pytest.approx(why.seconds, rel=1e-9)
        stages, row = time_of_stages(found, index), found.layouts.row[index]
        np.testing.assert_allclose(stages.sum(axis=0), found.times.seconds[index], rtol=1e-9)
        # the slowest of all stages is the one that the closed form waits for, and the fullest the one that it names
        assert stages[TIME_PARTS.index("bubble")].min() == pytest.approx(
            found.times.parts[TIME_PARTS.index("bubble"), index], abs=1e-9
        )
        memory = memory_of_stages(found, index).allocated
        assert memory.max() == pytest.approx(found.memory.allocated[index], rel=1e-9)
        assert memory[found.memory.stage[index]] == pytest.approx(memory.max(), rel=1e-9)
        assert len(memory) == found.layouts.splits.pp[row]


def test_imbalance_never_helps(h100_model: CostModel) -> None:
    # (without the host, which is the slower one in the smallest of these layers)
    even, uneven = (problem_of(DEEP, h100_model, moe_imbalance=load, compile=True) for load in (1.0, 1.3))
    layouts = all_layouts(problem_of(DEEP, h100_model), 32)
    layouts = layouts.take(np.arange(0, len(layouts), 211))
    one, other = (estimate_layouts(problem, layouts) for problem in (even, uneven))
    assert (other.times.seconds >= one.times.seconds).all() and (other.memory.device >= one.memory.device).all()
    alone = column(layouts, "ep") == 1
    np.testing.assert_array_equal(one.times.seconds[alone], other.times.seconds[alone])
    assert (other.times.seconds[~alone] > one.times.seconds[~alone]).all()


def test_the_exchange_runs_beside_another_micro_batch(h100_model: CostModel) -> None:
    graphs = {"compile": True}  # the host launches nothing: it could not launch two passes at once any faster
    apart, beside = (problem_of(DEEP, h100_model, moe_exchange_overlap=flag, **graphs) for flag in (False, True))
    layouts = all_layouts(problem_of(DEEP, h100_model, moe_exchange_overlap=True), 32)
    splits = layouts.splits
    assert ((splits.pp == 1) | (splits.vpp > 1)).all() and not (layouts.recompute == Recompute.FULL).any()
    one, other = (estimate_layouts(problem, layouts) for problem in (apart, beside))
    assert (other.times.seconds <= one.times.seconds).all()
    exposed = TIME_PARTS.index("ep_exposed")
    several = (column(layouts, "ep") > 1) & (column(layouts, "num_micro_batches") > 2 * column(layouts, "pp"))
    assert (other.times.parts[exposed] < one.times.parts[exposed])[several].all()
    alone = column(layouts, "num_micro_batches") == 1  # one micro batch has no other beside it
    np.testing.assert_array_equal(one.times.seconds[alone], other.times.seconds[alone])
    for index in np.flatnonzero(several)[::499]:
        assert sum(line.seconds for line in explain(other, int(index)).lines) == pytest.approx(other.times.seconds[index])
        np.testing.assert_allclose(time_of_stages(other, int(index)).sum(axis=0), other.times.seconds[index], rtol=1e-9)


def test_how_much_of_the_exchange_is_hidden_by_hand(h100_model: CostModel) -> None:
    # one stage, 4 micro batches: 3 of 4 have another beside them
    plain = DEEP.replace(num_nextn_predict_layers=0)
    beside, delayed = (
        problem_of(plain, h100_model, moe_exchange_overlap=True, cuda_graphs=True, delay_wgrad_compute=flag)
        for flag in (False, True)
    )
    layout = {"ep": 4, "num_micro_batches": 4, "zero_shard_size": 16}
    found, later = (estimate_layouts(problem, Layouts.of([problem.layout(**layout)])) for problem in (beside, delayed))
    part = found.table.layers[1]
    apart = part.times.forward.sum(axis=0) + part.times.backward.sum(axis=0)
    assert found.times.hidden[1, 0] == pytest.approx(3 / 4 * (apart - part.paired[0])[0], rel=1e-9)
    assert later.times.hidden[1, 0] == pytest.approx(3 / 4 * (apart - part.paired[1])[0], rel=1e-9)
    assert later.times.hidden[1, 0] >= found.times.hidden[1, 0] > 0.5 * 3 / 4 * part.times.forward[-1, 0]
    assert found.times.hidden[0, 0] == 0, "dense layers send no tokens"


def test_larger_groups_of_micro_batches_hide_less(h100_model: CostModel) -> None:
    plain = DEEP.replace(num_nextn_predict_layers=0)
    shape = {"ep": 4, "pp": 2, "dp": 8, "vpp": 2, "num_micro_batches": 12, "zero_shard_size": 8}
    shares = []
    for group in (0, 2, 4, 6):
        problem = problem_of(plain, h100_model, moe_exchange_overlap=True, cuda_graphs=True, micro_batch_group=group)
        found = estimate_layouts(problem, Layouts.of([problem.layout(**shape)]))
        part, key = found.table.layers[1], int(found.terms.key[0])
        apart = (part.times.forward.sum(axis=0) + part.times.backward.sum(axis=0))[key]
        shares.append(float(found.times.hidden[1, 0] / (apart - part.paired[0, key])))
    # alone are the forwards before the first backward pass: (2 + group) / 2 micro batches of 12
    assert shares == pytest.approx([1 - 2 / 12, 1 - 2 / 12, 1 - 3 / 12, 1 - 4 / 12], rel=1e-9)


def test_only_the_projection_to_the_vocabulary_is_deferred(h100_model: CostModel) -> None:
    shape = {"pp": 2, "dp": 8, "num_micro_batches": 8, "zero_shard_size": 8}
    problem = problem_of(DEEP, h100_model, defer_embedding_wgrad_compute=True)
    found = estimate_layouts(problem, Layouts.of([problem.layout(**shape)]))
    assert float(found.terms.ends.projection_weight_grad[0]) < 0.5 * float(found.terms.ends.head_weight_grad[0])
    tokens = problem.run.seq_len
    at_once = problem_of(DEEP, h100_model)
    before = estimate_layouts(at_once, Layouts.of([at_once.layout(**shape)]))
    more = memory_of_stages(found, 0).allocated[-1] - memory_of_stages(before, 0).allocated[-1]
    assert more == pytest.approx(8 * tokens * (DEEP.hidden_size + DEEP.vocab_size) * 2, rel=1e-6)


def test_schedules_that_split_the_backward_pass_delay_weight_gradients(h100_model: CostModel) -> None:
    problem = problem_of(DEEP, h100_model, framework="generic", moe_exchange_overlap=True, cuda_graphs=True)
    shape = {"ep": 4, "pp": 2, "dp": 8, "vpp": 2, "num_micro_batches": 8, "zero_shard_size": 8}
    wave, interleaved = (
        estimate_layouts(problem, Layouts.of([problem.layout(**shape, schedule=name)])) for name in ("dualpipev", "1f1b")
    )
    part, key = wave.table.layers[1], int(wave.terms.key[0])
    apart = (part.times.forward.sum(axis=0) + part.times.backward.sum(axis=0))[key]
    share = 1 - ((2 * 1 + 2) / 2) / 8  # of the micro batches have another beside them
    for found, row in ((interleaved, 0), (wave, 1)):
        assert found.times.hidden[1, 0] == pytest.approx(share * (apart - part.paired[row, key]), rel=1e-9)


@pytest.mark.parametrize(
    ("constants", "reason"),
    [
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute needs moe_exchange_overlap"),
        ({"wgrad_deferral_limit": 4}, "changes nothing without defer_embedding_wgrad_compute"),
    ],
)
def test_what_cannot_be_delayed_is_refused(constants: dict[str, Any], reason: str, h100_model: CostModel) -> None:
    problem = problem_of(DEEP, h100_model, **constants)
    with pytest.raises(InputError, match=reason):
        check_layout(DEEP, problem.cluster, problem.layout(ep=4))
    with pytest.raises(InputError, match=reason):
        search(problem, 32)


GRAPHS = {"cuda_graphs": True, "cuda_graph_modules": "moe_router"}
#: Settings that Megatron-Core refuses together.
TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({"moe_dispatcher": "allgather", "moe_exchange_overlap": True}, "needs another moe_dispatcher than allgather"),
    ({"precision": "fp8", "fp8_recipe": "delayed", "num_layers_at_start_in_bf16": 1}, "stay in bf16 need another fp8_recipe"),
    (
        {
            "optimizer": "muon",
            "precision": "fp8",
            "fp8_recipe": "tensorwise",
            "fp8_param_gather": True,
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
        },
        "gathers fp8 weights",
    ),
    ({"recompute_modules": "moe_act", "moe_grouped_gemm": False}, "recomputing moe_act needs moe_grouped_gemm"),
    (
        {"recompute_modules": "shared_experts", "moe_shared_expert_overlap": True, "moe_dispatcher": "alltoall"},
        "shared_experts are not recomputed together with",
    ),
    ({"recompute_modules": "moe", **GRAPHS}, "CUDA graphs of moe_router exclude recomputing moe"),
]


@pytest.mark.parametrize(("constants", "reason"), TOGETHER)
def test_what_megatron_refuses_together_is_neither_predicted_nor_searched(
    constants: dict[str, Any], reason: str, h100_model: CostModel
) -> None:
    problem = problem_of(DEEP.replace(num_nextn_predict_layers=0), h100_model, **constants)
    recompute = {"recompute": "selective"} if "recompute_modules" in constants else {}
    with pytest.raises(InputError, match=reason):
        check_layout(problem.model, problem.cluster, problem.layout(ep=4, **recompute))
    if recompute:  # a search leaves the level out
        levels = search(problem, 32, top=1000).best.layouts.recompute
        assert int(Recompute.SELECTIVE) not in levels
    else:
        with pytest.raises(InputError, match=reason):
            search(problem, 32)


def test_multi_token_prediction_costs_a_layer_and_a_loss(h100_model: CostModel) -> None:
    with_it, without = (problem_of(DEEP.replace(num_nextn_predict_layers=n), h100_model) for n in (1, 0))
    layout = with_it.layout(num_micro_batches=2, zero_shard_size=16)
    one, other = (estimate_layouts(p, Layouts.of([layout])) for p in (with_it, without))
    assert one.times.seconds[0] > 1.05 * other.times.seconds[0]
    assert one.memory.device[0] > other.memory.device[0]


def test_rings_do_not_pass_windows(h100_model: CostModel) -> None:
    ring = problem_of(WINDOWS, h100_model, cp_comm="ring")
    space = enumerate_splits(ring, 32)
    assert set(space.splits.cp.tolist()) == {1}
    assert any("windows" in reason for reason in space.rejected)
    with pytest.raises(InputError, match="ring does not work with windows"):
        check_layout(WINDOWS, ring.cluster, ring.layout(cp=2, dp=8))
    with pytest.raises(InputError, match="attention sinks under Transformer Engine; use cp_comm a2a"):
        check_layout(WINDOWS, ring.cluster, ring.layout(cp=2, dp=8, cp_comm="allgather"))
    plain = WINDOWS.replace(attention_sinks=False)
    short = problem_of(plain, h100_model, cp_comm="ring", seq_len=512)  # the window is no window then
    assert 2 in enumerate_splits(short, 32).splits.cp


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"ep": 5, "dp": 15, "world_size": 15}, "do not divide 12 experts"),
        ({"tp": 2, "tp_mode": "mtp", "dp": 8}, "experts with tp 2 need the sequence split too"),
        ({"framework": "megatron-core-0.8", "moe_dispatcher": "deepep"}, "does not offer moe_dispatcher deepep"),
        ({"framework": "fsdp", "zero": 3}, "mixtures of experts under fsdp are not modelled"),
        (
            {"framework": "megatron-core-0.8", "tp": 2, "tp_mode": "msp", "dp": 8, "ep": 2},
            "does not run ep 2 and etp 1 with tp 2",
        ),
    ],
)
def test_what_does_not_run_is_refused(h100_model: CostModel, layout: dict[str, Any], message: str) -> None:
    problem = problem_of(DEEP, h100_model)
    cluster = problem.cluster
    if layout.get("world_size") == 15:
        cluster = replace(cluster, gpus_per_node=15)
    with pytest.raises(InputError, match=message):
        check_layout(DEEP, cluster, problem.layout(**layout))


def test_experts_with_biases_are_whole_under_megatron_core(h100_model: CostModel) -> None:
    biased = WINDOWS.replace(mlp_bias=True)
    assert set(enumerate_splits(problem_of(WINDOWS, h100_model), 32).splits.etp.tolist()) == {1, 2, 4}
    for framework in ("megatron-core", "megatron-bridge-26.06"):
        problem = problem_of(biased, h100_model, framework=framework)
        assert set(enumerate_splits(problem, 32).splits.etp.tolist()) == {1}
        with pytest.raises(InputError, match="does not run ep 2 and etp 2 with tp 2 and biases of experts"):
            check_layout(biased, problem.cluster, problem.layout(tp=2, dp=8, ep=2, etp=2, tp_mode="msp"))
    assert 2 in enumerate_splits(problem_of(biased, h100_model, framework="generic"), 32).splits.etp


def test_ranks_that_experts_do_not_divide_are_refused(h100_model: CostModel) -> None:
    with pytest.raises(InputError, match="ep 3 . etp 1 does not divide the 16 ranks"):
        problem_of(DEEP, h100_model).layout(ep=3)


def test_a_framework_without_experts_searches_none(h100_model: CostModel) -> None:
    with pytest.raises(InputError, match="mixtures of experts under .* are not modelled"):
        search(problem_of(DEEP, h100_model, framework="megatron-deepspeed"), 32)


def test_the_fullest_stage_has_most_on_the_device(found: Solutions) -> None:
    """Not the stage that has most allocated: another may have more that comes and goes, and so more gaps between it."""
    memory = found.memory
    for index in np.random.default_rng(1).choice(len(found), 60, replace=False):
        stages = memory_of_stages(found, int(index))
        assert memory.device[index] == pytest.approx(stages.device.max(), rel=1e-9)
        assert memory.bound[index] == pytest.approx(stages.bound.max(), rel=1e-9)
        at = int(memory.stage[index])
        assert (memory.device[index], memory.allocated[index]) == pytest.approx(
            (stages.device[at], stages.allocated[at]), rel=1e-9
        )


def test_fused_experts_are_whole() -> None:
    device = replace(DEVICE, peak_flops={"bf16": 1e15, "fp8": 2e15, "mxfp8": 2e15})
    for fused, widths in ((False, {1, 2, 4}), (True, {1})):
        problem = make_problem(
            WINDOWS,
            16,
            toy_cost(device=device),
            framework="megatron-bridge-26.06",
            cp_comm="a2a",
            precision="mxfp8",
            moe_fused_experts=fused,
        )
        splits = enumerate_splits(problem, 32).splits
        assert set(splits.etp.tolist()) == widths and 2 in splits.tp
