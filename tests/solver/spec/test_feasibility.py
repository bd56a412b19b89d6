"""Which layouts can be estimated: the edges of every rule, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from toy import DEVICE, TINY, toy_layout

from profiler.errors import InputError
from solver.spec.can_run import CanRun
from solver.spec.cluster import cluster_of
from solver.spec.division import heads_divide, sequence_divides, tensor_parallel_runs
from solver.spec.feasibility import check_layout, check_world, stages_broken
from solver.spec.frameworks import framework_of
from solver.spec.rules.context import heads_divide_by_cp
from solver.spec.rules.kernels import compile_rule
from solver.spec.rules.states import zero_runs
from solver.spec.strategy import Strategy

MODEL = TINY.replace(num_hidden_layers=8)  # 4 query heads, 2 key and value heads, width 128


@pytest.mark.parametrize(
    ("seq_len", "cp", "split", "divides"),
    [
        (33, 1, 1, True),  # one rank takes any sequence
        (256, 1, 2, True),
        (254, 1, 2, False),  # 128 tokens for each rank, and one less
        (257, 1, 2, False),  # an odd one out
        (260, 2, 1, True),
        (258, 2, 1, False),  # two context ranks cut a causal sequence into four chunks
        (1040, 2, 4, True),
        (1032, 2, 4, False),  # each chunk is shared by four tensor ranks: multiples of 16
        (1536, 3, 4, True),
        (1548, 3, 4, False),  # multiples of 24
    ],
)
def test_sequences(seq_len: int, cp: int, split: int, divides: bool) -> None:
    assert sequence_divides(seq_len, cp, split) == divides


@pytest.mark.parametrize(
    ("world", "node", "fills"),
    [(8, 8, True), (16, 8, True), (12, 8, False), (4, 8, True), (3, 8, False), (1, 8, True), (6, 3, True)],
)
def test_worlds_fill_nodes(world: int, node: int, fills: bool) -> None:
    if fills:
        check_world(world, node)
    else:
        with pytest.raises(InputError, match="does not fill nodes"):
            check_world(world, node)


def test_the_largest_world() -> None:
    check_world(1_048_576, 8)
    with pytest.raises(InputError, match="up to 1048576 GPUs"):
        check_world(1_048_576 + 8, 8)


def test_heads_are_sharded_or_replicated_evenly() -> None:
    # 4 query and 2 key-value heads: 1, 2 or 4 ranks; 3 do not divide the queries, 8 exceed them
    assert [heads_divide(MODEL, tp) for tp in (1, 2, 3, 4, 8)] == [True, True, False, True, False]
    assert not heads_divide(MODEL.replace(num_attention_heads=12, num_key_value_heads=3), 2)  # 3 heads are neither
    assert not heads_divide(MODEL.replace(intermediate_size=126), 4)
    # all-to-all shards a tensor rank's heads again: 4 / 1 and 2 / 1 heads over 2 ranks, not over 4; other exchanges keep them
    run = Strategy(world_size=1, seq_len=1)
    assert [heads_divide_by_cp(MODEL, run.replace(cp_comm="a2a"), 1, cp) for cp in (1, 2, 4)] == [True, True, False]
    assert not heads_divide_by_cp(MODEL, run.replace(cp_comm="a2a"), 2, 2)  # one key-value head
    assert heads_divide_by_cp(MODEL.replace(num_key_value_heads=4), run.replace(cp_comm="a2a"), 2, 2)
    both = run.replace(cp_comm="a2a+ring", cp_a2a_size=2)
    assert [heads_divide_by_cp(MODEL, both, 1, cp) for cp in (1, 2, 3, 4, 8)] == [True, True, False, True, True]
    assert heads_divide_by_cp(MODEL, run, 2, 4)


def staged(pp: int, first: int = 0, last: int = 0, vpp: int = 1, counts: tuple[bool, bool] = (False, False)) -> Strategy:
    return Strategy(
        world_size=pp,
        seq_len=64,
        pp=pp,
        vpp=vpp,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=counts[0],
        account_for_loss_in_pipeline_split=counts[1],
    )


def test_what_a_framework_can_run() -> None:
    all_of_it = CanRun(zero_stages=(0, 1, 2, 3))
    alone = CanRun(zero_stages=(0, 3), tp_modes=(), pipeline=False, replicated_kv_heads=False)
    assert [tensor_parallel_runs(alone, MODEL, tp) for tp in (1, 2)] == [True, False]
    copies, none = CanRun(zero_stages=(0,)), CanRun(zero_stages=(0,), replicated_kv_heads=False)
    assert [tensor_parallel_runs(copies, MODEL, 4), tensor_parallel_runs(none, MODEL, 4)] == [True, False]
    assert tensor_parallel_runs(none, MODEL, 2)
    # 7 layers on 4 stages: 1 on the last leaves 2 each; without it, or with a first of 1 as well, they are uneven
    rigid = CanRun(zero_stages=(0, 1), uneven_stages=False, stated_end_stages=True, counts_embedding_and_loss=True)
    ends = [(0, 0), (0, 1), (1, 1), (2, 1)]
    assert [not stages_broken(rigid, 7, staged(4, first, last)) for first, last in ends] == [False, True, False, True]
    assert (
        not stages_broken(all_of_it, 7, staged(4))
        and stages_broken(alone, 8, staged(4)).startswith("has no pipeline parallelism, so it does not run 8 layers in 4")
        and not stages_broken(alone, 8, staged(1))
    )
    assert not stages_broken(rigid, 8, staged(2, 4, 4)) and stages_broken(rigid, 8, staged(2, 4, 3))
    # 7 layers and the loss, or the embedding, are 8 items; both are 9
    counted = [(True, False), (False, True), (True, True)]
    assert [not stages_broken(rigid, 7, staged(4, counts=which)) for which in counted] == [True, True, False]
    assert "give one of them" in stages_broken(rigid, 7, staged(4, 1, counts=(True, False)))
    assert "into 3 chunks" in stages_broken(rigid, 8, staged(4, vpp=3)) and not stages_broken(rigid, 8, staged(4, vpp=2))
    assert "need pp above 1" in stages_broken(rigid, 8, staged(1, 4))
    even = CanRun(zero_stages=(0, 1), uneven_stages=False)
    assert "does not offer num_layers" in stages_broken(even, 7, staged(4, 0, 1))
    assert "does not offer account_for" in stages_broken(even, 7, staged(4, counts=(True, False)))
    # gradients or weights are sharded only without a pipeline
    assert [zero_runs(all_of_it, zero, 2) for zero in range(4)] == [True, True, False, False]
    assert zero_runs(all_of_it, 3, 1) and not zero_runs(alone, 1, 1)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"dp": 2, "pp": 4, "vpp": 3, "num_micro_batches": 4}, "of 4 pipeline stages into 3 chunks each"),
        ({"dp": 2, "pp": 4, "vpp": 2, "num_micro_batches": 6}, "multiples of pp 4, not 6"),
        ({"dp": 8, "vpp": 2}, "interleaves pipeline stages, but pp is 1"),
        (
            {"dp": 1, "pp": 8, "num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 1},
            "leave too few of 8",
        ),
        ({"dp": 8, "recompute_layers": 9}, "more than the model's 8 layers"),
        ({"dp": 8, "wp": 2}, "needs tp_mode isp"),
        ({"dp": 8, "wp": 3, "tp_mode": "isp"}, "wp 3 does not divide the 8 ranks"),
        ({"dp": 8, "zero_shard_size": 3}, "does not divide the 8 ranks that share parameters"),
        ({"dp": 8, "zero_shard_size": 4, "wp": 4, "tp_mode": "isp"}, "does not divide the 2 ranks that share parameters"),
        ({"dp": 4, "tp": 2, "zero_shard_size": 8}, "does not divide the 4 ranks that share parameters"),
        ({"dp": 4, "cp": 2, "seq_len": 1026}, r"seq_len 1026 cannot be split by tp 1 \* cp 2"),
    ],
)
def test_the_first_broken_rule_is_named(layout: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_layout(MODEL, cluster_of(DEVICE), toy_layout(8, framework="internevo-2024", **layout))


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "pp": 4, "vpp": 2, "num_micro_batches": 8, "p2p_overlap": True},
        {"dp": 1, "pp": 8},
        {"dp": 4, "pp": 2, "vpp": 4, "num_micro_batches": 2, "p2p_overlap": True},
        {"dp": 2, "pp": 4, "num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 3},
        {"dp": 8, "recompute": "full", "recompute_layers": 8},
        {"dp": 4, "tp": 2, "wp": 4, "tp_mode": "isp", "zero_shard_size": 2},
        {"dp": 4, "cp": 2, "wp": 2, "tp_mode": "isp", "zero_shard_size": 4},
    ],
)
def test_layouts_at_the_edge_of_the_rules(layout: dict[str, Any]) -> None:
    check_layout(MODEL, cluster_of(DEVICE), toy_layout(8, framework="internevo-2024", **layout))


def test_transformer_engine_s_modules_are_not_compiled() -> None:
    for framework, runs in (("megatron-core", False), ("megatron-bridge", False), ("torchtitan", True), ("fsdp", True)):
        holds, broken = compile_rule(framework_of(framework), Strategy(world_size=1, seq_len=1, compile=True))
        assert holds == runs and "leave out compile" in broken
