"""The layer program: FLOPs, weights, messages and saved bytes of every mode, against formulas written out here."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references import flops
from toy import DEVICE, TINY, layer_keys, layer_linear_parameters, toy_layout

from solver.layers.decoder import embedding_program, layer_program
from solver.layers.head import head_program
from solver.layers.program import COMPUTE, FLASH_ATTN, FORWARD, LINEAR, LayerProgram
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of, placement
from solver.spec.frameworks import known_framework
from solver.spec.model import ModelSpec
from solver.spec.model_size import flops_per_token, parameters

MODES = ("mtp", "msp", "fsp", "isp")
GQA = ModelSpec(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=32,
    vocab_size=1000,
)
PLAIN = GQA.replace(num_key_value_heads=16, gated_mlp=False, intermediate_size=2048)
WIDE = GQA.replace(head_dim=48)  # heads * head_dim is not the hidden size
MODELS = {"gqa": GQA, "plain": PLAIN, "wide": WIDE}
SEQ = 1024


def program(
    model: ModelSpec,
    mode: str,
    tp: Any = 1,
    *,
    build: Any = layer_program,
    cp: Any = 1,
    wp: Any = 1,
    micro_batch_size: Any = 1,
    **constants: Any,
) -> LayerProgram:
    keys = layer_keys(mode, tp, cp, wp, micro_batch_size)
    return build(keys, model, toy_layout(1, SEQ, **constants), cluster_of(DEVICE))


def messages(layer: LayerProgram, stream: str, key: int = 0) -> Counter[tuple[str, str]]:
    """Count the messages of each (kind, pass) on one process group."""
    found: Counter[tuple[str, str]] = Counter()
    for op in layer.ops:
        times = int(np.broadcast_to(op.count, len(layer.keys))[key])
        if op.stream == stream and times:
            found[op.kind, "forward" if op.phase == FORWARD else "backward"] += times
    return found


def sizes(layer: LayerProgram, stream: str, key: int = 0) -> dict[str, float]:
    """Return the bytes of each message by op label."""
    return {
        op.label: float(np.broadcast_to(op.dims["bytes"], len(layer.keys))[key])
        for op in layer.ops
        if op.stream == stream and np.broadcast_to(op.count, len(layer.keys))[key]
    }


def attention_flops(model: ModelSpec, seq: int = SEQ) -> float:
    """Causal, forward (2 GEMMs) and backward (5): 7 GEMMs of 2 * head_dim FLOPs per head for each of s (s + 1) / 2 pairs."""
    return 7 * 2 * model.head_dim * model.num_attention_heads * seq * (seq + 1) / 2


# FLOPs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_all_ranks_together_do_the_flops_of_the_layer(mode: str, tp: int, name: str) -> None:
    model = MODELS[name]
    for micro_batch in (1, 3):
        layer = program(model, mode, tp, micro_batch_size=micro_batch)
        expected = 6.0 * layer_linear_parameters(model) * SEQ * micro_batch + attention_flops(model) * micro_batch
        assert flops(layer)[0] * tp == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("how", ["ring", "a2a"])
@pytest.mark.parametrize("mode", MODES)
def test_context_ranks_share_the_flops_evenly(mode: str, how: str) -> None:
    one_rank = flops(program(GQA, mode))[0]
    shared = flops(program(GQA, mode, tp=[1, 1, 2, 4], cp=[2, 4, 2, 2], cp_comm=how)) * [2, 4, 4, 8]
    np.testing.assert_allclose(shared, one_rank, rtol=1e-12)


def test_all_gathered_keys_do_all_flops_except_on_the_diagonal() -> None:
    # each of cp ranks has s / cp queries times s / 2 keys on average; the exact causal sum has s / 2 + 1 / 2 keys
    one_rank, shared = flops(program(GQA, "mtp"))[0], flops(program(GQA, "mtp", cp=4, cp_comm="allgather"))[0] * 4
    assert shared == pytest.approx(one_rank - attention_flops(GQA) / (SEQ + 1), rel=1e-12)


def test_replicated_key_and_value_heads_are_computed_on_every_rank() -> None:
    # 16 ranks, 8 key-value heads: each rank projects 1 query head, 1 key and 1 value head
    layer = program(GQA, "mtp", tp=16)
    qkv = next(op for op in layer.ops if op.label == "wqkv.forward")
    assert qkv.dims["n"].tolist() == [3 * 32]
    extra = 6 * 512 * (2 * 16 - 2 * 8) * 32 * SEQ
    assert flops(layer)[0] * 16 == pytest.approx(
        6 * layer_linear_parameters(GQA) * SEQ + attention_flops(GQA) + extra, rel=1e-12
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_linear_has_three_gemms_of_the_same_flops(mode: str) -> None:
    layer = program(GQA, mode, tp=4)
    gemms = {op.label: op.dims for op in layer.ops if op.kind == LINEAR}
    for name in ("wqkv", "wo", "w1", "w3", "w2"):
        f, i, w = (gemms[f"{name}.{phase}"] for phase in ("forward", "input_grad", "weight_grad"))
        assert (i["m"], i["n"], i["k"]) == (f["m"], f["k"], f["n"])
        assert (w["m"], w["n"], w["k"]) == (f["n"], f["k"], f["m"])
        assert (f["layout"], i["layout"], w["layout"]) == (0, 1, 2)


def test_shapes_of_a_split_layer() -> None:
    # GQA over 4 ranks: 4 query and 2 + 2 key-value heads of 32, 384 of 1536 columns; ISP: a quarter of the rows, all columns
    split = {op.label: op.dims for op in program(GQA, "msp", tp=4).ops if op.kind in (LINEAR, FLASH_ATTN)}
    whole = {op.label: op.dims for op in program(GQA, "isp", tp=4).ops if op.kind in (LINEAR, FLASH_ATTN)}
    mnk = {name: tuple(int(np.ravel(d[x])[0]) for x in "mnk") for name, d in split.items() if "m" in d}
    assert mnk["wqkv.forward"] == (1024, 8 * 32, 512) and mnk["wo.forward"] == (1024, 512, 128)
    assert mnk["w1.forward"] == mnk["w3.forward"] == (1024, 384, 512) and mnk["w2.forward"] == (1024, 512, 384)
    mnk = {name: tuple(int(np.ravel(d[x])[0]) for x in "mnk") for name, d in whole.items() if "m" in d}
    assert mnk["wqkv.forward"] == (256, 32 * 32, 512) and mnk["wo.forward"] == (256, 512, 512)
    assert mnk["w2.forward"] == (256, 512, 1536)
    for dims in (split["attention.forward"], whole["attention.forward"]):
        assert (dims["heads"][0], dims["kv_heads"][0], dims["head_dim"], dims["seq_q"][0]) == (4, 2, 32, 1024)


@given(
    heads=st.integers(1, 8),
    group=st.integers(1, 4),
    d=st.integers(1, 16),
    hidden=st.integers(1, 64),
    ffn=st.integers(1, 64),
    gated=st.booleans(),
    mode=st.sampled_from(MODES),
    tp=st.sampled_from([1, 2, 4]),
)
def test_flops_of_any_model(heads: int, group: int, d: int, hidden: int, ffn: int, gated: bool, mode: str, tp: int) -> None:
    model = GQA.replace(
        hidden_size=hidden,
        intermediate_size=4 * ffn,
        num_attention_heads=4 * heads * group,
        num_key_value_heads=4 * heads,
        head_dim=d,
        gated_mlp=gated,
    )
    expected = 6.0 * layer_linear_parameters(model) * SEQ + attention_flops(model)
    assert flops(program(model, mode, tp))[0] * tp == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("framework", ["generic", "megatron-core", "torchtitan", "nemo-automodel", "nanotron"])
@pytest.mark.parametrize("level", ["NONE", "SELECTIVE", "FULL"])
def test_one_tensor_rank_splits_no_sequence_in_any_mode(framework: str, level: str) -> None:
    whole, split = (program(GQA, mode, framework=framework) for mode in ("mtp", "msp"))
    assert whole.saved_bytes(Recompute[level]) == split.saved_bytes(Recompute[level])
    assert [op.dims for op in whole.ops if op.kind == "memory_bound"] == [
        op.dims for op in split.ops if op.kind == "memory_bound"
    ]


def test_unfused_attention_computes_the_whole_square() -> None:
    # two GEMMs forward, four backward, of 2 * head_dim FLOPs for each head and each of s * s pairs
    layer = program(GQA, "mtp", attention="unfused")
    scores = 6 * 2 * GQA.head_dim * GQA.num_attention_heads * SEQ * SEQ
    assert flops(layer)[0] == pytest.approx(6 * layer_linear_parameters(GQA) * SEQ + scores, rel=1e-12)


def test_the_head_is_counted() -> None:
    # vocabulary 1000 padded to 1024 = 128 * 8, over 2 ranks; ISP splits the head by columns like the other modes
    for mode in MODES:
        assert flops(program(GQA, mode, tp=2, build=head_program))[0] * 2 == 6 * 512 * 1024 * SEQ


def test_model_flops_per_token_are_those_of_the_program() -> None:
    model = GQA.replace(vocab_size=1024)
    layer, head = flops(program(model, "mtp"))[0], flops(program(model, "mtp", build=head_program))[0]
    # a causal token sees s / 2 keys (the program also counts its own key); MFU counts 3 passes of attention, the program 3.5
    per_token = (
        (layer - attention_flops(model)) / SEQ * 4 + head / SEQ + 4 * attention_flops(model, SEQ - 1) / (SEQ - 1) * 6 / 7
    )
    assert flops_per_token(model, SEQ) == pytest.approx(per_token, rel=1e-12)


# weights


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_one_rank(name: str) -> None:
    model = MODELS[name]
    norms = 2 * model.hidden_size
    for tp in (1, 2, 8):
        for mode in ("mtp", "msp", "fsp"):
            layer = program(model, mode, tp)
            assert layer.weight_elements("linears")[0] * tp == layer_linear_parameters(model)
            assert layer.weight_elements("others")[0] == norms
        isp = program(model, "isp", tp, wp=[1, 4])
        assert isp.weight_elements("linears").tolist() == [
            layer_linear_parameters(model),
            layer_linear_parameters(model) / 4,
        ]
        assert isp.weight_elements("others").tolist() == [norms, norms]


def test_all_weights_are_the_parameters_of_the_model() -> None:
    for changes in (
        {},
        {
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
            "head_bias": True,
            "norm": "layernorm",
            "position": "learned",
            "max_position_embeddings": 2048,
            "embedding_norm": True,
        },
        {"norms_per_layer": 4, "qk_norm": "head"},
        {"norms_per_layer": 1, "qk_norm": "all", "norm_weight": False},
    ):
        model = PLAIN.replace(vocab_size=1024, **changes)
        parts = [program(model, "mtp", build=b).weight_elements()[0] for b in (layer_program, embedding_program, head_program)]
        assert 4 * parts[0] + parts[1] + parts[2] == parameters(model)


def test_vocabulary_is_padded_and_split() -> None:
    # 1000 -> 1024 (a multiple of 128 * 8) over 8 ranks: 128 rows each
    assert program(GQA, "mtp", tp=8, build=embedding_program).weight_elements()[0] == 128 * 512
    given_size = GQA.replace(padded_vocab_size=1040)
    assert program(given_size, "mtp", tp=8, build=embedding_program).weight_elements()[0] == 130 * 512


# messages: internevo_semantics table of collectives, gated MLP whose gate and up projections are two GEMMs

FORWARD_TP = {
    "mtp": {("all_reduce", "forward"): 2},
    "msp": {("all_gather", "forward"): 3, ("reduce_scatter", "forward"): 2},
    "fsp": {("all_gather", "forward"): 3, ("reduce_scatter", "forward"): 2},
    "isp": {("all2all", "forward"): 3},
}
BACKWARD_TP = {
    "mtp": {("all_reduce", "backward"): 3},
    "msp": {("all_gather", "backward"): 2, ("reduce_scatter", "backward"): 3},
    "fsp": {("all_gather", "backward"): 5, ("reduce_scatter", "backward"): 3},
    "isp": {("all2all", "backward"): 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_internevo_collectives_of_a_gated_layer(mode: str) -> None:
    layer = program(GQA, mode, tp=4, framework="internevo")
    assert messages(layer, "tp") == Counter({**FORWARD_TP[mode], **BACKWARD_TP[mode]})
    assert not messages(layer, "wp") and not messages(layer, "cp")


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_sends_nothing(mode: str) -> None:
    for build in (layer_program, embedding_program, head_program):
        layer = program(GQA, mode, build=build)
        assert not any(messages(layer, stream) for stream in ("tp", "cp", "wp"))


def test_a_plain_mlp_has_one_column_linear_less() -> None:
    assert messages(program(PLAIN, "mtp", tp=4), "tp") == Counter({("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2})
    assert messages(program(PLAIN, "fsp", tp=4), "tp") == Counter(
        {
            ("all_gather", "forward"): 2,
            ("reduce_scatter", "forward"): 2,
            ("all_gather", "backward"): 4,
            ("reduce_scatter", "backward"): 2,
        }
    )


def test_megatron_collectives() -> None:
    # gate and up are one GEMM: g and g-bar of arXiv 2205.05198 figure 5; the saved shard is all-gathered again in backward
    assert messages(program(GQA, "msp", tp=4, framework="megatron-lm"), "tp") == Counter(
        {
            ("all_gather", "forward"): 2,
            ("reduce_scatter", "forward"): 2,
            ("all_gather", "backward"): 2 + 2,
            ("reduce_scatter", "backward"): 2,
        }
    )
    assert messages(program(GQA, "mtp", tp=4, framework="megatron-lm"), "tp") == Counter(
        {("all_reduce", "forward"): 2, ("all_reduce", "backward"): 2}
    )


@pytest.mark.parametrize("mode", ["mtp", "msp", "fsp"])
def test_tensor_messages_are_the_whole_activation(mode: str) -> None:
    # b * s * h * 2 bytes for any tp; context ranks have their part of the sequence
    for tp in (2, 8):
        layer = program(GQA, mode, tp, micro_batch_size=3)
        assert set(sizes(layer, "tp").values()) == {3 * 1024 * 512 * 2}
        assert set(sizes(program(GQA, mode, tp, cp=2), "tp").values()) == {512 * 512 * 2}


def test_isp_exchanges_heads_with_the_volume_of_grouped_queries() -> None:
    # this rank's quarter of the sequence: 256 tokens * 32 dims * 2 bytes, times 16 query, 2 * 8 key-value, 16 context heads
    unit = 256 * 32 * 2
    expected = {"exchange.q": 16 * unit, "exchange.kv": 16 * unit, "exchange.context": 16 * unit}
    layer = program(GQA, "isp", tp=4)
    assert sizes(layer, "tp") == {
        f"{name}.{phase}": size for name, size in expected.items() for phase in ("forward", "input_grad")
    }
    ungrouped = program(GQA.replace(num_key_value_heads=16), "isp", tp=4)
    assert sizes(ungrouped, "tp")["exchange.kv.forward"] == 32 * unit
    assert sizes(program(GQA.replace(num_key_value_heads=2), "isp", tp=2), "tp")["exchange.kv.forward"] == 4 * 2 * unit
    # two key-value heads for four ranks: each is replicated once, so four are sent
    assert sizes(program(GQA.replace(num_key_value_heads=2), "isp", tp=4), "tp")["exchange.kv.forward"] == 8 * unit


def test_isp_weights_are_all_gathered_twice_and_reduce_scattered_once() -> None:
    layer = program(GQA, "isp", tp=2, wp=8)
    assert messages(layer, "wp") == Counter(
        {("all_gather", "forward"): 5, ("all_gather", "backward"): 5, ("reduce_scatter", "backward"): 5}
    )
    size = sizes(layer, "wp")
    linears = {"wqkv": 512 * 32 * 32, "wo": 512 * 512, "w1": 512 * 1536, "w3": 512 * 1536, "w2": 512 * 1536}
    assert {name: size[f"{name}.weights.forward"] for name in linears} == {n: 2.0 * e for n, e in linears.items()}
    assert {name: size[f"{name}.weights.input_grad"] for name in linears} == {n: 2.0 * e for n, e in linears.items()}
    assert {name: size[f"{name}.gradients.input_grad"] for name in linears} == {n: 2.0 * e for n, e in linears.items()}
    # the whole message for any number of shards, and no message where the weights are not sharded
    assert sizes(program(GQA, "isp", tp=2, wp=32), "wp") == size
    assert not messages(program(GQA, "isp", tp=2, wp=1), "wp")


def test_isp_without_prefetch_all_gathers_a_third_time_to_recompute() -> None:
    def recomputed(overlap: bool) -> int:
        layer = program(GQA, "isp", tp=2, wp=8, overlap_weight_gather=overlap)
        return sum(op.stream == "wp" and Recompute.FULL in op.recomputed_by for op in layer.ops)

    assert recomputed(True) == 0 and recomputed(False) == 5


def test_placement_of_groups() -> None:
    # nodes of 8: tp 4 and wp 8 inside a node, wp 32 over four nodes; cp 4 with stride 4 has two ranks in each node
    def place(layer: LayerProgram, stream: str) -> tuple[int, int]:
        op = next(op for op in layer.ops if op.stream == stream)
        return int(op.dims["intra"][0]), int(op.dims["inter"][0])

    assert place(program(GQA, "isp", tp=4, wp=8), "tp") == (4, 1)
    assert place(program(GQA, "isp", tp=4, wp=8), "wp") == (8, 1)
    assert place(program(GQA, "isp", tp=4, wp=32), "wp") == (8, 4)
    assert place(program(GQA, "mtp", tp=4, cp=4, cp_comm="a2a"), "cp") == (2, 2)


def test_context_parallel_messages() -> None:
    kv = 512 * 2 * 8 * 32 * 2  # this rank's 512 tokens, 8 key and 8 value heads of 32, two bytes
    ring = program(GQA, "mtp", cp=2, cp_comm="ring")
    assert messages(ring, "cp") == Counter({("p2p", "forward"): 1, ("p2p", "backward"): 1})
    assert sizes(ring, "cp") == {"kv.send.forward": kv, "kv.send.input_grad": 2 * kv}
    assert messages(program(GQA, "mtp", cp=4, cp_comm="ring"), "cp")["p2p", "forward"] == 3
    gathered = program(GQA, "mtp", cp=2, cp_comm="allgather")
    # fused attention gathers again for its backward pass, and exchanges the context that it kept beside the gradient
    again = {"kv.regather.input_grad": 2 * kv}
    assert sizes(gathered, "cp") == {"kv.all_gather.forward": 2 * kv, "kv.reduce_scatter.input_grad": 2 * kv, **again}
    q = 512 * 16 * 32 * 2
    exchanged = program(GQA, "mtp", cp=2, cp_comm="a2a")
    assert sizes(exchanged, "cp")["context_exchange.qkv.forward"] == q + kv
    assert sizes(exchanged, "cp")["context_exchange.context.forward"] == q
    assert sizes(exchanged, "cp")["context_exchange.kept_context.input_grad"] == q
    assert "context_exchange.kept_context.forward" not in sizes(exchanged, "cp")


@pytest.mark.parametrize("how", ["ring", "a2a", "allgather"])
@pytest.mark.parametrize("attention", ["flash", "unfused"])
def test_context_ranks_always_exchange_keys_and_values(how: str, attention: str) -> None:
    layer = program(GQA, "mtp", cp=2, cp_comm=how, attention=attention)
    sent = messages(layer, "cp")
    assert sum(n for (_, phase), n in sent.items() if phase == "forward") >= 1
    assert sum(n for (_, phase), n in sent.items() if phase == "backward") >= 1


# saved activations


def test_saved_bytes_by_hand() -> None:
    # 1024 tokens, hidden 512, 16 query + 2 * 8 key-value heads of 32, width 1536, gate:
    # input, norm output, residual, norm output: 4 * 1024 * 512 * 2 = 4,194,304; q, k, v: 1024 * 1024 * 2 = 2,097,152;
    # context: 1024 * 512 * 2 = 1,048,576; log-sum-exp: 1024 * 16 * 4 = 65,536;
    # gate, up, product: 3 * 1024 * 1536 * 2 = 9,437,184
    layer = program(GQA, "mtp")
    assert layer.saved_bytes(Recompute.NONE)[0] == 4_194_304 + 2_097_152 + 1_048_576 + 65_536 + 9_437_184 == 16_842_752
    assert layer.saved_bytes(Recompute.SELECTIVE)[0] == 16_842_752 - 65_536
    assert layer.saved_bytes(Recompute.FULL)[0] == 1024 * 512 * 2


def test_saved_bytes_of_the_modes_by_hand() -> None:
    # over 4 ranks; s h = 1024 * 512 elements; norms and residuals have a quarter of the rows, except under MTP
    sh, inside = 1024 * 512 * 2, (2_097_152 + 1_048_576 + 65_536 + 9_437_184) / 4
    kept = {mode: float(program(GQA, mode, tp=4).saved_bytes(Recompute.NONE)[0]) for mode in MODES}
    assert kept == {
        "mtp": 4 * sh + inside,
        "msp": 2 * sh / 4 + 3 * sh + inside,  # InternEvo saves the all-gathered inputs of wqkv, of the gate and of up
        "fsp": 4 * sh / 4 + inside,
        "isp": 4 * sh / 4 + inside,
    }


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_saved_bytes_are_those_of_the_sequence_parallel_paper(tp: int) -> None:
    # Korthikanti et al. 2022 (arXiv 2205.05198): s b h (34 + 5 a s / h) / t, and s b h (10 + 24 / t + 5 a s / (h t))
    # without sequence parallelism; GPT with dropout, as Megatron-LM runs it
    gpt = PLAIN.replace(norm="layernorm", position="learned")
    sbh, square = 1024 * 3 * 512, 5 * 16 * 1024 * 1024 * 3
    for mode, expected in (("msp", (34 * sbh + square) / tp), ("mtp", 10 * sbh + (24 * sbh + square) / tp)):
        layer = program(gpt, mode, tp, micro_batch_size=3, framework="megatron-lm", attention="unfused")
        assert layer.saved_bytes(Recompute.NONE)[0] == pytest.approx(expected, rel=1e-12)
        without = layer.saved_bytes(Recompute.NONE) - layer.saved_bytes(Recompute.SELECTIVE)
        assert without[0] == pytest.approx(square / tp, rel=1e-12)
        assert layer.saved_bytes(Recompute.FULL)[0] == 2 * sbh / (tp if mode == "msp" else 1)


@pytest.mark.parametrize("mode", MODES)
def test_deeper_recomputation_saves_less_and_computes_more(mode: str) -> None:
    layer = program(GQA, mode, tp=[1, 2, 4, 8], micro_batch_size=2)
    none, selective, full = (layer.saved_bytes(level) for level in Recompute)
    assert (full < selective).all() and (selective < none).all()

    def recomputed(level: Recompute) -> set[str]:
        return {op.label for op in layer.ops if level in op.recomputed_by}

    assert recomputed(Recompute.NONE) == {"norm1.forward", "residual1.forward", "norm2.forward"}  # checkpoints of their own
    assert recomputed(Recompute.SELECTIVE) == {"attention.forward"} | {
        label for label in recomputed(Recompute.SELECTIVE) if label.startswith(("kv.", "attention."))
    }
    forward = {op.label for op in layer.ops if op.phase == FORWARD and op.stream in (COMPUTE, "tp")}
    assert forward - recomputed(Recompute.FULL) <= {"residual2.forward"}
    assert all(op.phase == FORWARD for op in layer.ops if op.recomputed_by)


def test_saved_bytes_grow_with_the_micro_batch_and_shrink_with_context_ranks() -> None:
    for mode in MODES:
        one, two, four = program(GQA, mode, tp=2, micro_batch_size=[1, 2, 4]).saved_bytes(Recompute.NONE)
        assert (two, four) == (2 * one, 4 * one)
        assert program(GQA, mode, tp=2, cp=2).saved_bytes(Recompute.NONE)[0] == one / 2


# norms of architectures that have other than two per layer


def norm_bytes(model: ModelSpec, build: Any = layer_program) -> dict[str, float]:
    """Bytes of every norm op of one layer without parallelism, by label."""
    ops = program(model, "mtp", build=build).ops
    return {op.label: float(np.ravel(op.dims["bytes"])[0]) for op in ops if op.variant.startswith("norm")}


def test_norms_of_queries_and_keys_by_hand() -> None:
    # GQA's tokens x (heads + kv heads) x head_dim elements: read and written in 16 bits, three accesses in backward
    elements = SEQ * (GQA.num_attention_heads + GQA.num_key_value_heads) * GQA.head_dim
    found = norm_bytes(GQA.replace(qk_norm="head"))
    assert (found["qk_norm.forward"], found["qk_norm.input_grad"]) == (elements * 4, elements * 6)
    assert not any(label.startswith("qk_norm") for label in norm_bytes(GQA))
    saved = {tensor.name: np.ravel(tensor.bytes)[0] for tensor in program(GQA.replace(qk_norm="all"), "mtp").saved}
    assert saved["qk_norm_input"] == elements * 2


def test_one_norm_per_layer_or_four() -> None:
    names = {count: {label.split(".")[0] for label in norm_bytes(GQA.replace(norms_per_layer=count))} for count in (1, 2, 4)}
    assert names == {1: {"norm1"}, 2: {"norm1", "norm2"}, 4: {"norm1", "norm2", "attention_norm", "mlp_norm"}}
    stream = SEQ * GQA.hidden_size * 2
    kept = {count: program(GQA.replace(norms_per_layer=count), "mtp").saved_bytes(Recompute.NONE)[0] for count in (1, 2, 4)}
    assert kept[2] - kept[1] == 2 * stream and kept[4] - kept[2] == 2 * stream  # norm2: what it reads and writes


def test_the_norm_of_embeddings() -> None:
    found = norm_bytes(GQA.replace(embedding_norm=True), embedding_program)
    assert found == {
        "embedding_norm.forward": SEQ * GQA.hidden_size * 5,  # Apex's, on average of 16-bit and fp32 inputs
        "embedding_norm.input_grad": SEQ * GQA.hidden_size * 8,
    }


@pytest.mark.parametrize(
    ("framework", "recorded"),
    [
        # torchtitan 0.2.2's own Llama: 100,810,752, where a CPU's norms keep four tensors in fp32 and a GPU's their two inputs
        ("torchtitan-2026-02", 100_810_752 - 4 * 2048 * 1024 * 4 + 2 * 2048 * 1024 * 2),
        # transformers 4.57's Llama: 105,005,056, with a mask and copies of keys and values that a GPU's attention does without
        ("fsdp", 105_005_056 - 2048 * 2048 * 2 - 2 * 2048 * 512 * 2),
    ],
)
def test_a_layer_keeps_what_autograd_was_seen_to_keep(framework: str, recorded: int) -> None:
    """Storages of saved tensors of one more layer: 2,048 tokens of width 1,024, 16 heads and 8 of keys and values, gates of
    2,816, in 16 bits. What norms keep for each token, 4 bytes twice, is left out."""
    assert kept_by_a_layer(framework, intermediate_size=2816) == recorded - 2 * 2048 * 4


def test_a_layernorm_of_torch_keeps_its_input() -> None:
    # transformers 4.57's StarCoder2 with an MLP of 4,096: 75,644,928, with a mask and copies of keys and values, and mean and
    # deviation of each token of two norms
    found = kept_by_a_layer("fsdp", intermediate_size=4096, gated_mlp=False, norm="layernorm")
    assert found == 75_644_928 - 2048 * 2048 * 2 - 2 * 2048 * 512 * 2 - 4 * 4096


def test_eager_norms_of_queries_and_keys_keep_wide_copies() -> None:
    # transformers 4.57's Qwen3: 124,076,032, with a mask and copies of keys and values; each token's norms keep 4 bytes
    found = kept_by_a_layer("fsdp", intermediate_size=2816, qk_norm="head")
    assert found == 124_076_032 - 2048 * 2048 * 2 - 2 * 2048 * 512 * 2 - (16 + 8 + 2) * 2048 * 4


def kept_by_a_layer(framework: str, **changes: Any) -> float:
    """Return the bytes that a layer of GQA saves for its backward pass."""
    model = GQA.replace(hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=64, **changes)
    flags = {**known_framework(framework).flags, "framework": framework, "zero": 0, "recompute": "none"}
    layer = layer_program(layer_keys("mtp"), model, toy_layout(1, 2048, **flags), cluster_of(DEVICE))
    kept = [tensor for tensor in layer.saved if Recompute.NONE not in tensor.dropped_by]
    return sum(float(np.ravel(tensor.bytes)[0]) for tensor in kept)


def test_torchtitan_copies_keys_and_values_to_every_query_head() -> None:
    # 1,024 tokens, 16 query heads and 8 of keys and values of 32 values each: 8 read and 16 written, then summed back
    layer, plain = (program(GQA, "mtp", framework=name) for name in ("torchtitan", "megatron-core"))
    values = 1024 * 2 * 32
    moved = {op.phase: float(op.dims["bytes"][0]) for op in layer.ops if op.name == "kv.repeat"}
    assert moved == {"forward": values * (8 + 16) * 2, "input_grad": values * (8 + 16) * 2}
    assert not [op for op in plain.ops if op.name == "kv.repeat"]
    kept = [float(tensor.bytes[0]) for each in (layer, plain) for tensor in each.saved if tensor.name == "qkv"]
    assert kept == [1024 * 32 * 3 * 16 * 2, 1024 * 32 * (16 + 2 * 8) * 2]


@pytest.mark.parametrize("compiled", [True, False])
def test_context_parallelism_of_torch_by_hand(compiled: bool) -> None:
    """1,024 tokens over cp 4: 256 of 16 heads of 32 each, keys and values repeated to all heads; sums of gradients in fp32."""
    ring = program(GQA, "msp", cp=4, cp_comm="allgather", framework="torchtitan", compile=compiled)
    values, ops = 256 * 16 * 32, {op.label: op for op in ring.ops}
    assert sizes(ring, "cp") == {
        "kv.all_gather.forward": 4 * 2 * values * 2,
        "kv.all_gather.input_grad": 4 * 2 * values * 2,
        "kv.gradients.input_grad": 2 * values * 4,
    }
    assert ops["kv.gradients.input_grad"].count == 4 and ops["kv.all_gather.forward"].count == 1
    under = [] if compiled else ["attention.forward", "attention.input_grad", "attention.step.input_grad"]
    assert [label for op in ring.ops if op.stream == "cp" for label in op.overlaps_with] == under
    moved = {
        name: float(ops[f"attention.{name}.input_grad"].dims["bytes"][0] * ops[f"attention.{name}.input_grad"].count[0])
        for name in ("gradients", "joined_gradients", "wide_gradients")
    }
    adding = 7.5 if compiled else 11.5
    assert moved == {
        "gradients": pytest.approx(3 * values * (10 + adding * 3)),
        "joined_gradients": 2 * values * 8 * 4,
        "wide_gradients": 3 * values * 10,
    }
    merges = [op for op in ring.ops if op.name in ("attention.correction", "attention.wide_context")]
    # eager, all rows take 38 bytes a value and half of them 27; to fp32 and back 12 once
    assert sum(float(op.dims["bytes"][0] * op.count[0]) for op in merges) == values * (7.5 * 3 if compiled else 32.5 * 3 + 12)
    passed = program(GQA, "msp", cp=4, cp_comm="ring", framework="torchtitan", compile=compiled)
    assert sizes(passed, "cp") == {
        "kv.send.forward": 2 * values * 2,
        "kv.send.input_grad": 2 * values * 2,
        "kv.gradients.input_grad": 2 * values * 4,
    }
    assert next(op.count for op in passed.ops if op.name == "kv.send") == 3
    joined = [float(op.dims["bytes"][0] * op.count[0]) for op in passed.ops if op.name == "attention.joined_keys"]
    assert joined == ([] if compiled else [2 * values * 4 * 3] * 2)


@given(st.sampled_from([2, 3, 4, 6, 8, 9, 72]), st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
def test_placement_is_that_of_the_group_that_touches_most_nodes(node: int, size: int, stride: int, blocks: int) -> None:
    # all groups of a job, rank by rank: blocks of size * stride ranks follow each other, until they fill nodes
    span = size * stride
    world = blocks * int(np.lcm(span, node))
    groups = [range(block + first, block + span, stride) for block in range(0, world, span) for first in range(stride)]
    touched = max(len({rank // node for rank in group}) for group in groups)
    found = placement(size, stride, node)
    assert touched == found.inter and found.intra == -(-size // touched)


def test_every_token_is_scored_for_all_experts() -> None:
    # four experts more in each of two layers, of which a token still goes to one: 64 products each, forward and twice backward
    few = TINY.replace(num_experts=4, num_experts_per_tok=1, moe_intermediate_size=128)
    assert flops_per_token(few.replace(num_experts=8), 32) - flops_per_token(few, 32) == 6 * 2 * 4 * 64


def test_weights_of_isp_hide_until_their_linears_need_them() -> None:
    """The first linears' arrive before the block begins; the others also beside what runs before them (isp.py's hooks)."""
    ops = {op.label: op for op in program(GQA, "isp", tp=2, wp=2, overlap_weight_gather=True).ops}
    first, last = ops["wqkv.weights.forward"].overlaps_with, ops["w2.weights.forward"].overlaps_with
    assert {"wo.forward", "w2.forward"} <= set(first) and "wqkv.forward" not in first and "attention.forward" not in first
    assert set(first) < set(last) and {"wqkv.forward", "attention.forward"} <= set(last)
    assert last == ops["wo.weights.forward"].overlaps_with
