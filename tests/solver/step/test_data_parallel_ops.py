"""Messages and copies of gradients, parameters and pipeline stages, computed by hand on the toy machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy import BYTE, LINK, NETWORK, TINY, estimated, make_problem, part, tiny, toy_cost

from predictor.cost_model import CostModel
from solver.step.data_parallel_ops import synchronisation_ops
from solver.step.layouts import Layouts
from solver.step.optimizer_ops import adam_bytes
from solver.step.parameter_groups import parameter_groups

#: Two layers of 36,864 weights and 2 * 64 of norms, embedding and head of 256 * 64 each, final norm of 64.
PARAMETERS = 2 * 36_864 + 2 * 128 + 2 * 16_384 + 64
EXPOSED = {"overlap_grad_reduce": False, "overlap_param_gather": False, "compile": True}


def test_hybrid_sharding_reduces_shards_across_groups() -> None:
    # 16 ranks on two nodes, shards over the 8 of one node: fp32 gradients are reduce-scattered inside the node, and each rank's
    # eighth is all-reduced with its copy in the other node; bf16 parameters are all-gathered inside the node only
    run = {**EXPOSED, "grad_dtype": "fp32"}
    found = tiny("generic", 16, run=run, zero=1, zero_shard_size=8)
    assert part(found, "gradient_sync")[0] == pytest.approx(PARAMETERS * 4 * (LINK + NETWORK / 8), rel=1e-12)
    assert part(found, "parameter_gather")[0] == pytest.approx(PARAMETERS * 2 * LINK, rel=1e-12)


def test_the_fullest_stage_is_a_middle_one_where_layers_do_not_divide() -> None:
    # 5 layers on 4 stages are 1, 2, 1 and 1; a middle stage's 2 layers are more than a layer and the head (16,384 + 64)
    found = tiny("generic", 4, TINY.replace(num_hidden_layers=5), EXPOSED, dp=1, pp=4, zero=0)
    parameters = 2 * (36_864 + 128)
    # Adam moves 30 bytes per parameter, norm and clipping of bf16 gradients 4, zeroing them 2 (and dividing them by the number
    # of ranks 4, where they are several); the norm's 4 bytes are sent in the node
    assert part(found, "optimizer")[0] == pytest.approx(parameters * 36 * BYTE + 4 * LINK, rel=1e-12)
    two = tiny("generic", 8, TINY.replace(num_hidden_layers=5), EXPOSED, dp=2, pp=4, zero=0)
    assert part(two, "optimizer")[0] == pytest.approx(parameters * 40 * BYTE + 4 * LINK, rel=1e-12)


def _tables_of_gathers(framework: str, ranks: int, pp: int = 1) -> list[dict[str, Any]]:
    """Return kind, bytes and count of the messages that gather TINY's parameters from ``ranks`` ZeRO-1 ranks of a stage."""
    problem = make_problem(TINY, ranks * pp, toy_cost(), 32, framework=framework)
    run = problem.layout(dp=ranks, pp=pp, zero=1, zero_shard_size=ranks)
    layouts, found = Layouts.of([run]), estimated(problem, [run])
    ops = synchronisation_ops(problem, parameter_groups(found.priced), layouts.splits)
    gathers = [op for op in ops if op.name == "parameters.all_gather"]
    return [
        {"kind": op.kind, "bytes": float(np.ravel(op.dims["bytes"])[0]), "count": float(np.ravel(op.count)[0])}
        for op in gathers
    ]


def test_every_rank_broadcasts_its_tensors_but_no_more_ranks_than_tensors() -> None:
    # InternEvo assigns whole tensors: 7 in each of two layers, so 14 of 16 ranks send; bf16 parameters in equal parts
    # a rank's parameters outside the layers are in the same buffer: they add bytes and no messages (one for all, to price them)
    linears, others = 2 * 36_864, PARAMETERS - 2 * 36_864
    for ranks, senders in ((8, 8), (16, 14)):
        assert _tables_of_gathers("internevo-2024", ranks) == [
            {"kind": "broadcast", "bytes": pytest.approx(2 * size / count), "count": count}
            for size, count in ((linears, senders), (others, 1))
        ]
    assert [gather["count"] for gather in _tables_of_gathers("internevo-2024", 16, pp=2)] == [7, 1], "those of a stage's layer"
    # others all-gather them at once: one bucket each
    assert [gather["kind"] for gather in _tables_of_gathers("generic", 8)] == ["all_gather"] * 2
    assert [gather["count"] for gather in _tables_of_gathers("generic", 8)] == [1, 1]


def test_deepspeed_gathers_in_its_own_buckets_whatever_the_trainer_fills_in_for_those_of_gradients() -> None:
    # reduce_bucket_size is 64 x 64 parameters, so that a reduction takes many messages; allgather_bucket_size stays 5e8
    assert [gather["count"] for gather in _tables_of_gathers("transformers-deepspeed", 8)] == [1, 1]


def test_messages_of_fsdp_are_of_its_units() -> None:
    """A layer each and one of what is outside them, however large the layers are, where other frameworks fill buckets."""
    large = TINY.replace(hidden_size=8192, intermediate_size=28672, head_dim=2048, num_hidden_layers=4)

    def counts(framework: str, zero: int) -> dict[str, list[float]]:
        problem = make_problem(large, 8, toy_cost(), 32, framework=framework)
        found = estimated(problem, [problem.layout(zero=zero, zero_shard_size=8)])
        splits = found.layouts.splits
        ops = synchronisation_ops(problem, parameter_groups(found.priced), splits)
        names = {"gradients.reduce_scatter", "parameters.all_gather"}
        sent = [op for op in ops if op.name in names and op.stream == "dp" and op.kind in ("reduce_scatter", "all_gather")]
        return {name: [float(np.ravel(op.count)[0]) for op in sent if op.name == name] for name in names}

    assert counts("fsdp", 2) == dict.fromkeys(("gradients.reduce_scatter", "parameters.all_gather"), [4.0, 1.0])
    linears = 4 * (8192 * 2048 * (4 + 2 * 2) + 8192 * 4 * 2048 + 3 * 8192 * 28672)
    assert counts("generic", 1)["gradients.reduce_scatter"][0] == pytest.approx(linears / 40e6)


@pytest.mark.parametrize("framework", ["fsdp", "llm-foundry-2024", "torchtitan-2026-02", "nemo-automodel"])
@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_weights_that_stay_gathered_between_passes_cost_no_time(framework: str, ranks: int, h100_model: CostModel) -> None:
    """SHARD_GRAD_OP sends one all-gather of a unit less than FULL_SHARD, and nothing more."""
    model = TINY.replace(
        hidden_size=4096,
        intermediate_size=14336,
        head_dim=128,
        num_attention_heads=32,
        num_hidden_layers=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    problem = make_problem(model, ranks, h100_model, 8192, framework=framework)
    found = estimated(problem, [problem.layout(zero=zero, zero_shard_size=ranks) for zero in (2, 3)])
    assert found.times.seconds[0] <= found.times.seconds[1] < 1.1 * found.times.seconds[0]


def test_gradients_of_tied_tables_are_summed_over_the_end_stages() -> None:
    # two stages in one node: the table's 16,384 bf16 gradients; with 16 ranks of data parallelism its copy is in another node
    def once(world: int, **model: Any) -> float:
        found = tiny("generic", world, TINY.replace(**model), EXPOSED, dp=world // 2, pp=2, zero=0)
        return float(found.terms.once.other[0] + found.terms.once.buffer_whole[0])

    # the gradients of a layer and of the larger end are zeroed (2 bytes) and, on several ranks, divided (4)
    buffer = (36_864 + 128 + 16_384 + 64) * 2 * BYTE
    norm = 4 * LINK + buffer
    assert once(2) == pytest.approx(norm, rel=1e-12)
    assert once(2, tie_word_embeddings=True) == pytest.approx(norm + 16_384 * 2 * LINK, rel=1e-12)
    assert once(16, tie_word_embeddings=True) == pytest.approx(3 * buffer + 4 * NETWORK + 16_384 * 2 * NETWORK, rel=1e-12)


@pytest.mark.parametrize(
    ("ranks", "pp", "rate"),
    # a stage of 4 ranks: two stages fill a node, of four some neighbours are in two; a stage of 8 is a node
    [(8, 2, LINK), (16, 4, NETWORK), (16, 2, NETWORK)],
)
def test_the_slowest_hop_of_a_pipeline_sets_its_pace(ranks: int, pp: int, rate: float) -> None:
    model = TINY.replace(num_hidden_layers=4)
    found = tiny("generic", ranks, model, EXPOSED, tp=2, tp_mode="msp", dp=ranks // pp // 2, pp=pp, zero=0)
    assert found.terms.send_recv[0] == pytest.approx(32 * 64 * 2 / 2 * rate, rel=1e-9)


def test_a_v_ends_on_the_stage_where_it_begins() -> None:
    """Under zb-v the first stage updates embedding and head, and adds gradients of tied tables without a message."""
    model = TINY.replace(num_hidden_layers=8, vocab_size=4096)
    times = {}
    for tied in (False, True):
        for schedule, vpp in (("zb-v", 2), ("1f1b", 1)):
            layout = {"dp": 1, "pp": 4, "vpp": vpp, "zero": 0, "schedule": schedule, "num_micro_batches": 8}
            found = tiny("zero-bubble", 4, model.replace(tie_word_embeddings=tied), EXPOSED, **layout)
            times[schedule, tied] = found
    tables, norm = 4096 * 64, 64
    held = {name: float(found.terms.once.parameters[0]) for name, found in times.items()}
    assert held["zb-v", False] == 2 * (36_864 + 128) + 2 * tables + norm
    assert held["1f1b", False] == 2 * (36_864 + 128) + tables + norm
    assert held["zb-v", True] == held["1f1b", True] == held["1f1b", False]
    sent = {name: float(found.terms.once.estimates.row("tied_embedding")[0]) for name, found in times.items()}
    assert sent["zb-v", True] == sent["zb-v", False] == sent["1f1b", False] == 0.0 < sent["1f1b", True]


def test_the_two_tables_that_all_ranks_share_are_broadcast_by_two_of_them() -> None:
    # InternEvo's weight-parallel mode assigns embedding and head apart, under ZeRO-0 too: of 8 ranks two send, half each
    problem = make_problem(TINY, 8, toy_cost(), 32, framework="internevo-2024")
    layout = problem.layout(tp_mode="isp", wp=8, zero=1, zero_shard_size=1)
    found = estimated(problem, [layout])
    groups = parameter_groups(found.priced)
    ops = synchronisation_ops(problem, groups, found.layouts.splits)
    sent = [op for op in ops if op.name == "parameters.all_gather" and np.all(op.count > 0)]
    others = PARAMETERS - 2 * 36_864
    assert [(float(op.count[0]), float(op.dims["bytes"][0])) for op in sent] == [(2.0, others * 2 / 2)]


@pytest.mark.parametrize(
    ("framework", "states", "moved"),
    [
        ("megatron-core", "fp32", 0),
        ("megatron-core", "remainder", 0),
        ("megatron-core", "bf16", 32),
        ("megatron-core", "8bit", 28),
        ("nemo-automodel", "bf16", -8),
    ],
)
def test_narrow_moments_move_more_bytes_where_they_are_widened_for_the_step(framework: str, states: str, moved: int) -> None:
    # 30 bytes of Adam in fp32; torch's reads and writes two moments in 16 bits each, Transformer Engine's widens and narrows
    problem = make_problem(TINY, 8, toy_cost(), 32, framework=framework, optimizer_states=states)
    assert adam_bytes(problem) == 30 + moved
