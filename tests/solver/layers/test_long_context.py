"""Packed documents and hierarchical context parallelism: shapes by hand, limits that they have in common with simpler runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references import op_flops
from toy import DEVICE, TINY, estimated, layer_keys, make_problem, saved_bytes, toy_cost

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.formats.config_file import load_run_config
from solver.layers.decoder import layer_program
from solver.layers.program import FLASH_ATTN, FORWARD
from solver.search.search import search
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.documents import effective_document
from solver.spec.feasibility import check_layout
from solver.spec.layer_kinds import LayerKind, layer_kinds
from solver.spec.strategy import Strategy
from solver.step.solutions import Solutions

MODEL = load_run_config("configs/models/llama3_8b.json").model.replace(max_position_embeddings=131072)


def stepped(cost: CostModel, layout: dict[str, Any] | None = None, seq_len: int = 32768, **constants: Any) -> Solutions:
    problem = make_problem(MODEL, 16, cost, seq_len, framework="megatron-core", precision="bf16", **constants)
    base = {"zero": 1, "zero_shard_size": 16, "num_micro_batches": 1, "tp": 1}
    return estimated(problem, [problem.layout(**{**base, **(layout or {})})])


def attention_flops(cp: int, **constants: Any) -> float:
    """Return the FLOPs of a layer's attention on one rank, forward and backward."""
    run = Strategy(world_size=64, dp=64, seq_len=65536, framework="megatron-core", **constants)
    problem = make_problem(MODEL, 64, toy_cost(), 65536, framework="megatron-core", **constants)
    cluster = cluster_of(problem.cost.device)
    program = layer_program(layer_keys("mtp", cp=cp), MODEL, run, cluster, problem.kinds.kinds[0])
    return sum(float(np.ravel(op_flops(op) * op.count)[0]) for op in program.ops if op.kind == FLASH_ATTN)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1000", 1000),
        ("500:3+1500:1", round((3 * 500**2 + 1500**2) / 3000)),
        ("4096+8192", 4096),  # the longer one is two pieces, which do not see each other
        ("6000:1", round((4096**2 + 1904**2) / 6000)),
    ],
)
def test_documents_by_hand(text: str, tokens: int) -> None:
    assert effective_document(text, 4096) == tokens


@given(st.lists(st.tuples(st.integers(1, 100_000), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 65536))
def test_a_document_sees_no_more_than_a_sequence(lengths: list[tuple[int, int]], seq_len: int) -> None:
    text = "+".join(f"{tokens}:{share}" for tokens, share in lengths)
    assert 1 <= effective_document(text, seq_len) <= seq_len
    assert effective_document(text, 2 * seq_len) >= effective_document(text, seq_len), "longer sequences see more"


def test_attention_is_that_of_the_documents(h100_model: CostModel) -> None:
    whole, packed = attention_flops(1), attention_flops(1, document_lengths="4096")
    assert packed == pytest.approx(whole / 16, rel=1e-3)
    plain, documents = stepped(h100_model), stepped(h100_model, document_lengths="2048:2+8192:1")
    assert documents.times.seconds[0] < plain.times.seconds[0]
    assert documents.memory.allocated[0] == plain.memory.allocated[0]
    shorter = stepped(h100_model, document_lengths="2048")
    assert shorter.times.seconds[0] < documents.times.seconds[0]
    as_long = stepped(h100_model, document_lengths="32768")
    assert as_long.times.seconds[0] == plain.times.seconds[0], "a document as long as the sequence is the sequence"
    assert documents.flops_per_second[0] < 1.2 * plain.flops_per_second[0], "only what documents see is counted"


def test_both_exchanges_at_their_ends_are_the_simple_ones(h100_model: CostModel) -> None:
    layout = {"cp": 8, "dp": 2}
    ring, exchange = stepped(h100_model, layout), stepped(h100_model, layout, cp_comm="a2a")
    both = stepped(h100_model, layout, cp_comm="a2a+ring", cp_a2a_size=8)
    assert both.times.seconds[0] == pytest.approx(exchange.times.seconds[0], rel=1e-9)
    assert ring.times.seconds[0] != exchange.times.seconds[0]
    alone = [
        stepped(h100_model, {"cp": 1, "dp": 16}, **c).times.seconds[0] for c in ({}, {"cp_comm": "a2a+ring", "cp_a2a_size": 2})
    ]
    assert alone[0] == alone[1], "one rank exchanges nothing"


def test_the_work_of_attention_is_divided_evenly() -> None:
    for how in (
        {},
        {"cp_comm": "a2a"},
        {"cp_comm": "allgather"},
        {"cp_comm": "a2a+ring", "cp_a2a_size": 2},
        {"cp_comm": "a2a+ring", "cp_a2a_size": 4},
    ):
        assert attention_flops(8, **how) == pytest.approx(attention_flops(1) / 8, rel=0.01), how


def test_exchanging_inside_a_node_spares_the_ring_across(h100_model: CostModel) -> None:
    # cp 16 over two nodes: a ring of 16 crosses the network at every step, one of 2 once
    layout = {"cp": 16, "dp": 1, "zero_shard_size": 16}
    parts = {
        name: stepped(h100_model, layout, 65536, **how)
        for name, how in (
            ("ring", {}),
            ("both", {"cp_comm": "a2a+ring", "cp_a2a_size": 8}),
        )
    }
    sent = {name: float(found.times.parts[3, 0]) for name, found in parts.items()}
    assert sent["both"] < sent["ring"]


def test_a_ring_cuts_each_document_over_its_ranks(h100_model: CostModel) -> None:
    """A rank attends to 1/cp of each document's triangle, whatever their lengths; a document as long as the sequence is it."""
    for text in ("4096", "65536", "2048:2+8192:1"):
        alone, shared = (attention_flops(cp, document_lengths=text, cp_comm="ring") for cp in (1, 8))
        assert shared == pytest.approx(alone / 8, rel=0.01)
    layout = {"cp": 4, "dp": 4}
    plain, packed, as_long = (
        stepped(h100_model, layout, **({"document_lengths": text} if text else {})).times.seconds[0]
        for text in ("", "2048", "32768")
    )
    assert packed < plain == as_long


@pytest.mark.parametrize(
    ("constants", "layout", "sentence"),
    [
        ({"cp_comm": "a2a+ring"}, {}, "a2a.ring needs cp_a2a_size above 1"),
        ({"cp_a2a_size": 2}, {}, "needs cp_a2a_size above 1, and nothing else does"),
        ({"cp_comm": "a2a+ring", "cp_a2a_size": 3}, {"cp": 4, "dp": 4}, "does not divide the heads"),
        (
            {"document_lengths": "2048", "cp_comm": "a2a"},
            {"cp": 4, "dp": 4},
            "documents under .*; use cp_comm ring",
        ),
        ({"document_lengths": "many"}, {}, "document_lengths is 'many'"),
        ({"document_lengths": "0:1"}, {}, "document_lengths is '0:1'"),
        ({"cp_comm": "a2a+ring", "cp_a2a_size": 2, "framework": "torchtitan"}, {"cp": 4, "dp": 4}, "by a2a.ring"),
    ],
)
def test_what_cannot_run_is_refused(constants: dict[str, Any], layout: dict[str, Any], sentence: str) -> None:
    problem = make_problem(MODEL, 16, toy_cost(), 8192, framework="megatron-core")
    with pytest.raises(InputError, match=sentence):
        zero = 3 if constants.get("framework") else 1
        run = problem.layout(zero=zero, zero_shard_size=4, num_micro_batches=1, **constants)
        check_layout(MODEL, problem.cluster, run.replace(**layout))


def test_a_search_keeps_to_what_the_exchange_divides(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 16, h100_model, 65536, framework="megatron-core", cp_comm="a2a+ring", cp_a2a_size=4)
    found = search(problem, 16).best
    sizes = {int(cp) for cp in found.layouts.splits.cp}
    assert sizes <= {1, 4, 8, 16}


@pytest.mark.parametrize("cp_comm", ["a2a", "ring", "allgather"])
def test_a_recomputed_attention_core_communicates_again(cp_comm: str) -> None:
    """What its context parallelism sends forward is sent again, all-to-alls like rings."""
    run = Strategy(world_size=64, dp=64, seq_len=65536, framework="megatron-core", cp_comm=cp_comm)
    problem = make_problem(MODEL, 64, toy_cost(), 65536, framework="megatron-core", cp_comm=cp_comm)
    keys, cluster = layer_keys("mtp", cp=8), cluster_of(problem.cost.device)
    program = layer_program(keys, MODEL, run, cluster, problem.kinds.kinds[0])
    sent = [op for op in program.ops if op.stream == "cp" and op.phase == FORWARD and np.ravel(op.count)[0] > 0]
    assert sent and all(Recompute.SELECTIVE in op.recomputed_by for op in sent)


def test_blocks_have_the_work_of_their_tokens() -> None:
    """Documents of 40,000 tokens are 1.6 a sequence of 65,536, not two; of chunks the last one is what remains."""
    whole = attention_flops(1)
    packed = attention_flops(1, document_lengths="40000")
    assert packed == pytest.approx(whole * effective_document("40000", 65536) / 65536, rel=1e-3)
    chunks = MODEL.replace(attention_chunk_size=40000)
    kind = layer_kinds(chunks, 65536).kinds[0]
    run = Strategy(world_size=64, dp=64, seq_len=65536, framework="generic")
    program = layer_program(layer_keys("mtp"), chunks, run, cluster_of(toy_cost().device), kind)
    chunked = sum(float(np.ravel(op_flops(op) * op.count)[0]) for op in program.ops if op.kind == FLASH_ATTN)
    assert chunked == pytest.approx(whole * (40000**2 + 25536**2) / 65536**2, rel=1e-3)


def test_what_a_ring_and_an_all_to_all_keep() -> None:
    # 32 tokens of 4 query heads and 2 of keys and values, 16 wide, over 4 ranks; in a ring keys and values that were received
    # are kept, behind all-to-alls all is a tensor of its own
    def kept(cp: int, **how: Any) -> tuple[float, float]:
        run = Strategy(world_size=64, dp=64, seq_len=4096, framework="megatron-core", **how)
        layer = layer_program(layer_keys("mtp", cp=cp), TINY, run, cluster_of(DEVICE), LayerKind())
        found = saved_bytes(layer)
        return found["qkv"], found["qkv_exchanged"]

    tokens, q, kv = 4096 / 4, 64 * 2, 2 * 32 * 2
    assert kept(1) == (4096 * (q + kv), 0)
    assert kept(4, cp_comm="ring") == (tokens * q, tokens * kv)
    assert kept(4, cp_comm="a2a") == (0, tokens * (q + kv))
    assert kept(4, cp_comm="allgather") == (tokens * (q + kv), 0)


def test_buffers_of_a_ring() -> None:
    # of 8 ranks: forward holds keys, values (128 bytes a token) and context (128) of eight steps; of 2 ranks backward is more:
    # gradients of q and context, of keys and values, four buffers of these, the sum of the queries', and these in fp32
    def working(cp: int) -> float:
        run = Strategy(world_size=64, dp=64, seq_len=4096, framework="megatron-core", cp_comm="ring")
        layer = layer_program(layer_keys("mtp", cp=cp), TINY, run, cluster_of(DEVICE), LayerKind())
        return float(layer.transient_bytes[0])

    backward = {cp: 4096 / cp * (2 * 128 + 128 + 4 * 128 + 128 + 4 * 64) for cp in (2, 8)}
    plain = working(1) - 4096 * (2 * 128 + 128 + 4 * 64)  # the residual stream
    assert working(2) == plain / 2 + backward[2]
    assert working(8) == plain / 8 + max(backward[8], 4096 / 8 * 8 * (128 + 128))
