"""Mamba-2 and layers of one block: layers by hand, their model, rules and searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hybrid import ATTENTION, GROUPS, HEADS, HIDDEN, HYBRID, MAMBA, MLP, SEQ, STATE, WIDTH
from toy import DEVICE, TINY, dims_of, layer_keys, make_problem, saved_bytes, toy_layout

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.commands.console import main
from solver.formats.config_file import load_run_config
from solver.formats.model_file import shipped_model
from solver.layers.decoder import layer_program
from solver.layers.program import STATE_SPACE, LayerProgram
from solver.search.search import search
from solver.spec.choices import Recompute
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_framework, check_rules
from solver.spec.layer_kinds import LayerKind, layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import flops_per_token, layer_parameters, parameters
from solver.spec.strategy import Strategy


def program(kind: LayerKind, model: ModelSpec = HYBRID, mode: str = "msp", **given: Any) -> LayerProgram:
    sizes = {name: given.pop(name) for name in ("tp", "micro_batch_size") if name in given}
    return layer_program(layer_keys(mode, **sizes), model, toy_layout(64, SEQ, **given), cluster_of(DEVICE), kind)


def test_a_layer_by_hand() -> None:
    layer, convolved = program(MAMBA), WIDTH + 2 * GROUPS * STATE
    projected = WIDTH + convolved + HEADS  # the gate, values, keys, queries, and a step a head
    assert (dims_of(layer, "win.forward")["n"], dims_of(layer, "win.forward")["k"]) == (projected, HIDDEN)
    assert (dims_of(layer, "wo.forward")["n"], dims_of(layer, "wo.forward")["k"]) == (HIDDEN, WIDTH)
    scan = dims_of(layer, "state_space.forward")
    assert [scan[name] for name in ("batch", "seq", "heads", "head_dim", "state_dim", "groups", "chunk", "backward")] == [
        1,
        SEQ,
        HEADS,
        16,
        STATE,
        GROUPS,
        128,
        0,
    ]
    assert dims_of(layer, "conv.forward")["bytes"] == SEQ * convolved * 4
    assert dims_of(layer, "conv.input_grad")["bytes"] == SEQ * convolved * 10  # forward again, and two read, one written
    assert {op.module for op in layer.ops if op.stream == "compute"} == {"mamba", "norm", "residual"}
    assert not [op for op in layer.ops if op.module == "mlp" or op.kind == "flash_attn" or "norm2" in op.name]
    assert {op.name for op in layer.ops if op.module == "residual"} == {"residual1"}
    kept = saved_bytes(layer)
    assert kept["layer_input"] == kept["norm1_output"] == SEQ * HIDDEN * 2
    assert kept["mamba_projected"] == SEQ * projected * 2
    assert kept["mamba_ungated"] == kept["mamba_context"] == kept["mamba_normed"] == SEQ * WIDTH * 2
    assert set(kept) == {"layer_input", "norm1_output", "mamba_projected", "mamba_ungated", "mamba_context", "mamba_normed"}
    linears, others = HIDDEN * projected + WIDTH * HIDDEN, convolved * 5 + 3 * HEADS + WIDTH
    assert layer.weight_elements()[0] == linears + others + HIDDEN == layer_parameters(HYBRID, MAMBA)


def test_attention_and_mlp_in_layers_of_their_own_are_those_of_one_layer() -> None:
    """But for what the second norm reads, which is the layer's own input there."""
    both, parts = program(LayerKind()), (program(ATTENTION), program(MLP))
    assert sorted(op.label for op in both.ops) == sorted(op.label for part in parts for op in part.ops)
    for name, size in saved_bytes(both).items():
        assert (
            size == sum(saved_bytes(part).get(name, 0) for part in parts) / (2 if name == "layer_input" else 1)
            or name == "residual1"
        )
    assert saved_bytes(both)["residual1"] == saved_bytes(parts[1])["layer_input"]
    plain = TINY.replace(position="none")
    assert both.weight_elements()[0] == sum(part.weight_elements()[0] for part in parts) == layer_parameters(plain, LayerKind())


def test_tensor_parallelism_divides_all_but_the_norm_of_the_layer() -> None:
    whole, half = program(MAMBA), program(MAMBA, tp=2)
    assert (dims_of(half, "state_space.forward")["heads"], dims_of(half, "state_space.forward")["groups"]) == (
        HEADS / 2,
        GROUPS / 2,
    )
    for name in ("mamba_projected", "mamba_ungated", "mamba_context", "mamba_normed"):
        assert saved_bytes(half)[name] == saved_bytes(whole)[name] / 2
    assert half.weight_elements()[0] - HIDDEN == (whole.weight_elements()[0] - HIDDEN) / 2


def test_nothing_of_it_is_recomputed() -> None:
    layer = program(MAMBA)
    assert layer.saved_bytes(Recompute.SELECTIVE)[0] == layer.saved_bytes(Recompute.NONE)[0]
    assert {op.kind for op in layer.ops if Recompute.SELECTIVE in op.recomputed_by} == set()
    assert [op.kind for op in layer.ops].count(STATE_SPACE) == 2


def test_kinds_and_flops_of_a_model() -> None:
    found = layer_kinds(HYBRID)
    assert found.kinds == (MAMBA, MLP, ATTENTION) and found.counts.tolist() == [2, 1, 1]
    projected = 2 * WIDTH + 2 * GROUPS * STATE + HEADS
    mamba = HIDDEN * (projected + WIDTH) + 3.5 * WIDTH * STATE
    mlp, heads = 3 * HIDDEN * HYBRID.intermediate_size, HYBRID.num_attention_heads
    attention = 2 * HIDDEN * HYBRID.head_dim * (heads + HYBRID.num_key_value_heads)
    scores = heads * 2 * HYBRID.head_dim * SEQ / 2
    products = 2 * mamba + mlp + attention + scores + HIDDEN * HYBRID.vocab_size
    assert flops_per_token(HYBRID, SEQ) == pytest.approx(6 * products, rel=1e-12)


def test_shipped_hybrids() -> None:
    # 8,100,852,736 parameters of the checkpoint; 24 layers of Mamba-2, 24 MLPs, 4 of attention
    model = shipped_model("nemotron_h_8b")
    assert parameters(model) == 8_100_852_736
    assert [model.layer_types.count(kind) for kind in ("mamba", "mlp", "full_attention")] == [24, 24, 4]
    nano = shipped_model("nemotron3_nano_30b_a3b")
    assert [nano.layer_types.count(kind) for kind in ("mamba", "moe", "full_attention")] == [23, 23, 6]
    assert (nano.router_score, nano.router_bias, nano.gated_mlp, nano.position) == ("sigmoid", True, False, "none")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_chunk_size": 0}, "layer_types has mamba; state mamba_num_heads"),
        ({"mamba_num_groups": 3}, "mamba_num_heads 4 is not a multiple of mamba_num_groups 3"),
        ({"one_block_layers": False}, "layer_types with mlp or moe need one_block_layers"),
        ({"layer_types": ()}, "sizes of Mamba-2 need layer_types with mamba"),
        ({"layer_types": ("mamba", "moe", "mamba", "full_attention")}, "num_experts needs layer_types with moe, and moe needs"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers where layers are one block each"),
        ({"norms_per_layer": 4}, "norms_per_layer is 4 where each block has one"),
    ],
)
def test_models_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        HYBRID.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recompute": "full"}, "does not offer recompute full"),
        (
            {"pp": 2, "dp": 4, "vpp": 2, "schedule": "interleaved", "num_micro_batches": 2, "p2p_overlap": True},
            "does not interleave pipeline stages",
        ),
        ({"cp": 2, "dp": 4}, "cp 2|context parallelism"),
        ({"tp": 4, "dp": 2}, "tp 4"),
        (
            {"framework": "torchtitan-2026-02", "zero": 2, "zero_shard_size": 8, "overlap_param_gather": True},
            "are not modelled under torchtitan-2026-02",
        ),
        ({"lora_rank": 8, "precision": "bf16"}, "lora_rank"),
        ({"document_lengths": "128"}, "packed documents"),
    ],
)
def test_what_no_framework_runs_is_refused(changes: dict[str, Any], message: str) -> None:
    usual = {"world_size": 8, "dp": 8, "seq_len": SEQ * 4, "framework": "megatron-core"}
    with pytest.raises(InputError, match=message):
        run = Strategy(**{**usual, **changes})
        check_rules(HYBRID, run)
        check_framework(HYBRID, run)


def test_a_search_offers_what_its_framework_runs(h100_model: CostModel) -> None:
    model = shipped_model("nemotron3_nano_30b_a3b")
    problem = make_problem(model, 32, h100_model, 8192, framework="megatron-core")
    found = search(problem, 128, 200).best
    for row in range(len(found.layouts)):
        run = found.layouts.strategy(row, problem.run)
        check_rules(model, run)
        assert (run.vpp, run.cp) == (1, 1) and run.recompute != "full" and run.schedule == "1f1b"


def test_a_script_of_pretrain_mamba_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    assert main(["search", "--model_size", "nemotron3_nano_30b_a3b", "--world_size", "64", "--export", str(script)]) == 0
    text = script.read_text()
    assert " pretrain_mamba.py " in text and "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec" in text
    assert "for Megatron-Core 0.16." in text
    back = load_run_config(script).model
    assert parameters(back) == parameters(shipped_model("nemotron3_nano_30b_a3b"))
    assert back.layer_types == shipped_model("nemotron3_nano_30b_a3b").layer_types
    script.write_text(text.replace("pretrain_mamba.py", "pretrain_gpt.py"))
    assert main(["predict", "--config", str(script)]) == 2
    either = "--hybrid-override-pattern or --hybrid-layer-pattern"
    assert f"pretrain_mamba.py and {either} belong together" in capsys.readouterr().err
    script.write_text(text.replace("--hybrid-override-pattern", "--hybrid-layer-pattern"))  # its newer name
    assert load_run_config(script).model == back
    script.write_text(text.replace("MEMEM*", "MEXEM*"))
    assert main(["predict", "--config", str(script)]) == 2
    assert "it must be a text of the letters M, *, -, E, one a layer" in capsys.readouterr().err
