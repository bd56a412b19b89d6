"""Linear attention: a layer by hand, its model and its rules."""

from __future__ import annotations

from typing import Any

import pytest
from toy import DEVICE, TINY, column, dims_of, layer_keys, make_problem, saved_bytes, toy_layout

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.formats.model_file import shipped_model
from solver.layers.decoder import layer_program
from solver.layers.program import CHUNK_SCAN, LayerProgram
from solver.search.search import search
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_framework, check_rules
from solver.spec.layer_kinds import LayerKind, layer_kinds
from solver.spec.layer_types import FULL_ATTENTION, LINEAR_ATTENTION
from solver.spec.model import ModelSpec
from solver.spec.model_size import flops_per_token, layer_parameters, parameters
from solver.spec.strategy import Strategy

#: 2 heads of keys and 4 of values, of 16 values each; 3 of 4 layers have linear attention.
SEQ, HIDDEN, KEYS, VALUES, HEADS, DIM = 256, 64, 2 * 16, 4 * 16, 4, 16
LINEAR = TINY.replace(
    num_hidden_layers=4,
    layer_types=(LINEAR_ATTENTION,) * 3 + (FULL_ATTENTION,),
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
)
KIND = LayerKind(linear=True, rope=False)


def program(model: ModelSpec = LINEAR, mode: str = "msp", kind: LayerKind = KIND, **given: Any) -> LayerProgram:
    sizes = {name: given.pop(name) for name in ("tp", "micro_batch_size") if name in given}
    return layer_program(layer_keys(mode, **sizes), model, toy_layout(64, SEQ, **given), cluster_of(DEVICE), kind)


def test_a_layer_by_hand() -> None:
    layer = program()
    projected = 2 * KEYS + 2 * VALUES + 2 * HEADS  # q, k, v, the gate, and two rates a head
    assert (dims_of(layer, "wqkvzba.forward")["n"], dims_of(layer, "wqkvzba.forward")["k"]) == (projected, HIDDEN)
    assert (dims_of(layer, "wo.forward")["n"], dims_of(layer, "wo.forward")["k"]) == (HIDDEN, VALUES)
    scan = dims_of(layer, "delta_rule.forward")
    assert (scan["batch"], scan["seq"], scan["heads"], scan["key_dim"], scan["value_dim"]) == (1, SEQ, HEADS, DIM, DIM)
    convolved = 2 * KEYS + VALUES
    assert dims_of(layer, "conv.forward")["bytes"] == SEQ * convolved * 4
    # keys of 2 heads are read, those of 4 heads written; queries likewise
    assert dims_of(layer, "qk.repeat.forward")["bytes"] == SEQ * (2 * KEYS + 2 * HEADS * DIM) * 2
    assert not [op for op in layer.ops if op.kind == "flash_attn" or op.name == "rope"]
    kept = saved_bytes(layer)
    assert kept["conv_input"] == SEQ * convolved * 2
    assert kept["linear_qkv"] == SEQ * (2 * KEYS + 2 * HEADS * DIM + VALUES) * 2
    assert kept["chunk_triangles"] == SEQ * HEADS * 64 * 2
    assert kept["context"] == kept["gate"] == kept["context_gated"] == kept["out_norm_output"] == SEQ * VALUES * 2
    linears = HIDDEN * projected + VALUES * HIDDEN
    others = convolved * 4 + 2 * HEADS + DIM
    of_mlp = 3 * HIDDEN * LINEAR.intermediate_size
    assert layer.weight_elements()[0] == linears + others + of_mlp + 2 * HIDDEN == layer_parameters(LINEAR, KIND)


def test_tensor_parallelism_divides_all_but_the_norm() -> None:
    whole, half = program(), program(tp=2)
    assert dims_of(half, "delta_rule.forward")["heads"] == HEADS / 2
    assert dims_of(half, "conv.forward")["bytes"] == dims_of(whole, "conv.forward")["bytes"] / 2
    for name in ("conv_input", "linear_qkv", "chunk_triangles", "context", "gate"):
        assert saved_bytes(half)[name] == saved_bytes(whole)[name] / 2
    rest = DIM + 2 * HIDDEN  # of the norms
    assert half.weight_elements()[0] - rest == (whole.weight_elements()[0] - rest) / 2


def test_only_whole_layers_are_recomputed() -> None:
    layer = program()
    (scan,) = [op for op in layer.ops if op.kind == CHUNK_SCAN and op.phase == "forward"]
    assert scan.recomputed_by == (Recompute.FULL,)
    softmax = program(kind=LayerKind())
    assert softmax.saved_bytes(Recompute.SELECTIVE)[0] < softmax.saved_bytes(Recompute.NONE)[0]
    assert layer.saved_bytes(Recompute.SELECTIVE)[0] == layer.saved_bytes(Recompute.NONE)[0]


def test_a_gate_of_softmax_attention_is_a_second_query_projection() -> None:
    gated, plain = (program(LINEAR.replace(attention_gate=gate), kind=LayerKind()) for gate in (True, False))
    width = LINEAR.num_attention_heads * LINEAR.head_dim
    assert dims_of(gated, "wqkv.forward")["n"] - dims_of(plain, "wqkv.forward")["n"] == width
    assert dims_of(gated, "gate.forward")["bytes"] == SEQ * width * 6
    assert dims_of(gated, "gate.input_grad")["bytes"] == SEQ * width * 10
    assert saved_bytes(gated).keys() - saved_bytes(plain).keys() == {"gate", "context_gated"}
    assert gated.weight_elements()[0] - plain.weight_elements()[0] == HIDDEN * width


def test_model_flops_do_not_grow_with_the_sequence_but_for_softmax_layers() -> None:
    kinds = layer_kinds(LINEAR)
    assert [kind.linear for kind in kinds.kinds] == [True, False]
    assert kinds.counts.tolist() == [3, 1]
    grown = flops_per_token(LINEAR, 2 * SEQ) - flops_per_token(LINEAR, SEQ)
    assert grown == 6 * LINEAR.num_attention_heads * 2 * LINEAR.head_dim * SEQ / 2  # of one layer of four
    linear, softmax = LINEAR.replace(layer_types=(LINEAR_ATTENTION,) * 4), 4 * (4 * DIM * DIM * HEADS + (2 * KEYS + VALUES) * 4)
    rest = 6 * (parameters(linear) - LINEAR.vocab_size * HIDDEN - 9 * HIDDEN - 4 * ((2 * KEYS + VALUES) * 4 + 2 * HEADS + DIM))
    assert flops_per_token(linear, SEQ) == rest + 6 * softmax


def test_published_models_have_the_published_numbers_of_parameters() -> None:
    # qwen3_next: what transformers 4.57.1 builds of its config.json; the others as they are called
    model = shipped_model("qwen3_next_80b_a3b")
    assert parameters(model) == 79_674_391_296
    assert parameters(model, active=True) / 1e9 == pytest.approx(3.87, abs=0.01)
    for name, total, active in (
        ("qwen3_5_27b", 26.90, 26.90),
        ("qwen3_5_35b_a3b", 34.66, 3.455),
        ("qwen3_5_397b_a17b", 396.3, 17.35),
    ):
        found = shipped_model(name)
        assert parameters(found) / 1e9 == pytest.approx(total, rel=5e-4)
        assert parameters(found, active=True) / 1e9 == pytest.approx(active, rel=5e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp": 2, "dp": 2}, "does not run linear attention with context parallelism"),
        ({"framework": "nemo-25"}, "is not modelled under nemo-25"),
        ({"document_lengths": "64"}, "does not meet packed documents"),
        ({"deterministic": True}, "not modelled with deterministic kernels"),
        (
            {"framework": "nemo-automodel", "tp": 2, "dp": 2, "tp_mode": "msp"},
            "does not run tp 2 of 2 kv heads and linear attention",
        ),
    ],
)
def test_what_frameworks_do_not_run_is_refused(changes: dict[str, Any], message: str) -> None:
    model = LINEAR.replace(num_key_value_heads=2)
    run = Strategy(**{"world_size": 4, "dp": 4, "seq_len": SEQ, "framework": "megatron-core", "fused_norm": True, **changes})
    with pytest.raises(InputError, match=message):
        check_framework(model, run)


def test_tp_divides_the_heads_of_keys() -> None:
    model = LINEAR.replace(num_attention_heads=4, num_key_value_heads=4, linear_num_key_heads=2)
    with pytest.raises(InputError, match="tp 4 does not divide the model's heads"):
        check_rules(model, Strategy(world_size=4, tp=4, dp=1, seq_len=SEQ, framework="megatron-core", tp_mode="msp"))


def test_a_search_offers_no_context_parallelism_and_no_isp(h100_model: CostModel) -> None:
    problem = make_problem(LINEAR, 8, h100_model, SEQ, framework="megatron-core-0.12", fused_norm=True)
    found = search(problem, 16, top=1000)
    assert len(found.best.layouts) > 10
    assert set(column(found.best.layouts, "cp").tolist()) == {1}
    assert found.rejected["megatron-core-0.12 does not run linear attention with context parallelism"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 0}, "layer_types has linear_attention; state linear_num_key_heads"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"layer_types": ()}, "sizes of linear attention need layer_types with linear_attention"),
    ],
)
def test_contradicting_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        LINEAR.replace(**changes)
