"""Recomputation of single modules of a layer: bytes and ops by hand, and between nothing and the whole layer."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from toy import DEVICE, estimated, layer_keys, make_problem, toy_layout

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.formats.config_file import load_run_config
from solver.formats.model_file import shipped_model
from solver.layers.decoder import layer_program
from solver.layers.graphs import _CAPTURED
from solver.layers.recompute import AFTER_LAST_SAVED, DISCARDED
from solver.report.explain import explain
from solver.search.search import search
from solver.spec.choices import RECOMPUTE_MODULES, Recompute
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import known_framework
from solver.spec.layer_kinds import PLAIN, LayerKind, layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.rules.recomputation import modules_of
from solver.spec.strategy import Strategy
from solver.step.memory import MEMORY_PARTS

MODEL = load_run_config("configs/models/deepseek_v2_lite.json").model
DENSE = load_run_config("configs/models/llama3_8b.json").model
CORE = "megatron-core"
BASE = {"zero": 1, "zero_shard_size": 8, "num_micro_batches": 4}


def test_every_name_of_the_tables_is_that_of_an_op_or_a_tensor() -> None:
    """Recomputation and CUDA graphs know ops by name: one that no model has would silently be left out."""
    models = [shipped_model(name) for name in ("llama3_8b", "gpt3_175b", "deepseek_v3", "gpt_oss_120b", "qwen3_next_80b_a3b")]
    models += [MODEL.replace(gated_mlp=False)]
    ops, modules, tensors = set[str](), set[str](), set[str]()
    for model in models:
        for framework in ("megatron-core", "torchtitan", "nemo-automodel", "megatron-bridge-25", "megatron-core-0.8"):
            run, cluster = toy_layout(8, framework=framework, precision="bf16"), cluster_of(DEVICE)
            for kind in layer_kinds(model).kinds:
                program = layer_program(layer_keys("msp", tp=2, ep=2), model, run, cluster, kind)
                ops |= {op.name for op in program.ops}
                modules |= {op.module for op in program.ops}
                tensors |= {tensor.name for tensor in program.saved}
    assert {"core_attn", *DISCARDED} == set(RECOMPUTE_MODULES)
    for found in DISCARDED.values():
        assert set(found.ops) <= ops and set(found.modules) <= modules
    saved = {name for found in DISCARDED.values() for name in found.saved}
    assert saved <= tensors
    assert set(AFTER_LAST_SAVED) <= ops | {"w2.all_reduce"}
    assert set().union(*_CAPTURED.values()) <= ops | modules | {"attention_norm", "mlp_norm"}


def measured(
    h100_model: CostModel, modules: str, recompute: str = "selective", model: ModelSpec = MODEL, framework: str = CORE
) -> tuple[float, float]:
    """Return (seconds, bytes of activations) of a step."""
    problem = make_problem(model, 8, h100_model, framework=framework, recompute_modules=modules)
    ranks = {"ep": 8} if model.is_mixture_of_experts else {}
    found = estimated(problem, [problem.layout(**BASE, **ranks, recompute=recompute)])
    return float(found.times.seconds[0]), float(found.memory.parts[MEMORY_PARTS.index("activations"), 0])


def test_bytes_by_hand(h100_model: CostModel) -> None:
    tokens, h, layers = 4096, DENSE.hidden_size, DENSE.num_hidden_layers
    _, plain = measured(h100_model, "core_attn", "none", DENSE)
    saved = {
        "layernorm": 0,  # over Transformer Engine norms are parts of linears
        "mlp": tokens * (DENSE.intermediate_size * 3 + h) * 2,  # the norm's output, gate, up and their product
        "core_attn": tokens * DENSE.num_attention_heads * 4,  # the log-sum-exp of flash attention
    }
    for name, each in saved.items():
        assert plain - measured(h100_model, name, "selective", DENSE)[1] == pytest.approx(layers * each, rel=1e-12)
    whole, less = (measured(h100_model, "layernorm", how, DENSE, "generic")[1] for how in ("none", "selective"))
    assert whole - less == pytest.approx(layers * 2 * tokens * h * 2, rel=1e-12)  # norms that are modules of their own


@pytest.mark.parametrize(
    ("model", "framework", "graphs", "norms"),
    [
        ("llama3_8b", CORE, "", 0),
        ("llama3_8b", "megatron-core-local", "", 2),
        ("llama3_8b", "generic", "", 2),
        ("qwen3_30b_a3b", CORE, "", 1),  # the norm before experts
        ("qwen3_30b_a3b", CORE, "moe_router", 0),  # which the router's graph returns
        ("qwen3_30b_a3b", CORE, "moe_router+moe_preprocess", 1),
        ("deepseek_v2_lite", CORE, "", 2),  # and that before latent attention
        ("qwen3_next_80b_a3b", CORE, "", 1),
    ],
)
def test_only_norms_that_are_modules_are_recomputed(model: str, framework: str, graphs: str, norms: int) -> None:
    given = {"cuda_graphs": True, "cuda_graph_modules": graphs} if graphs else {}
    run = toy_layout(8, 4096, framework=framework, recompute_modules="layernorm", moe_dispatcher="alltoall", **given)
    spec = shipped_model(model)
    for kind in layer_kinds(spec).kinds[-2:]:
        program = layer_program(layer_keys("msp", ep=2 if kind.experts else 1), spec, run, cluster_of(DEVICE), kind)
        less = program.saved_bytes(Recompute.NONE)[0] - program.saved_bytes(Recompute.SELECTIVE)[0]
        expected = norms if kind.experts or not spec.is_mixture_of_experts else norms - 1  # a dense layer's second is a part
        assert less == pytest.approx(expected * 4096 * spec.hidden_size * 2, rel=1e-12)


def test_every_module_costs_time_and_saves_memory(h100_model: CostModel) -> None:
    nothing, whole = measured(h100_model, "core_attn", "none"), measured(h100_model, "core_attn", "full")
    there = modules_of(known_framework(CORE), MODEL)
    assert there == RECOMPUTE_MODULES
    alone = {name: measured(h100_model, name) for name in there}
    for name, (seconds, held) in alone.items():
        assert nothing[0] < seconds < whole[0] and whole[1] < held < nothing[1], name
    for one, other in combinations(("layernorm", "mla_up_proj", "moe_act", "core_attn"), 2):
        seconds, held = measured(h100_model, f"{one}+{other}")
        assert nothing[1] - held == pytest.approx(2 * nothing[1] - alone[one][1] - alone[other][1], rel=1e-9), (
            "disjoint tensors"
        )
        assert seconds > max(alone[one][0], alone[other][0])
    assert alone["moe"][1] < alone["moe_act"][1] and alone["moe"][0] > alone["shared_experts"][0]


def test_what_runs_again_is_the_module(h100_model: CostModel) -> None:
    problem = make_problem(MODEL, 8, h100_model, framework="megatron-core", recompute_modules="moe_act+layernorm")
    found = estimated(problem, [problem.layout(**BASE, ep=8, recompute="selective")])
    again = {line.name for line in explain(found, 0).lines if line.part == "recompute" and "host" not in line.name}
    assert {name.split(": ")[-1] for name in again} == {"norm1.recompute", "norm2.recompute", "experts.activation.recompute"}


def test_names_are_put_in_order() -> None:
    assert Strategy(world_size=1, seq_len=1, recompute_modules="moe_act+layernorm").recompute_modules == "layernorm+moe_act"
    listed = Strategy(world_size=1, seq_len=1, recompute_modules=["moe", "core_attn"])  # type: ignore[arg-type]
    assert listed.modules_recomputed == ("core_attn", "moe")
    with pytest.raises(InputError, match="recompute_modules is 'attention'; it must be one or several of core_attn"):
        Strategy(world_size=1, seq_len=1, recompute_modules="attention")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recompute": "none"}, "changes nothing with recompute none"),
        ({"recompute_modules": "mla_up_proj"}, "has no mla_up_proj"),
        ({"framework": "nemo-24"}, "nemo-24 does not offer to recompute mlp alone"),
        ({"recompute_modules": "moe_act"}, "has no moe_act"),
        ({"recompute_modules": "layernorm"}, "llama3_8b under megatron-core-0.12 has no layernorm to recompute: its norms are"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(h100_model: CostModel, changes: dict[str, str], sentence: str) -> None:
    problem = make_problem(DENSE, 8, h100_model, framework="megatron-core")
    run = problem.layout(**BASE, recompute="selective", recompute_modules="mlp").replace(**changes)
    with pytest.raises(InputError, match=sentence):
        check_layout(DENSE, problem.cluster, run)


def test_a_search_recomputes_the_modules_that_are_stated(h100_model: CostModel) -> None:
    problem = make_problem(DENSE, 8, h100_model, framework="megatron-core", recompute_modules="core_attn+mlp")
    found = search(problem, 64, fixed={"recompute": "selective"}).best
    best = found.layouts.strategy(0, found.problem.run)
    assert best.recompute_modules == "core_attn+mlp"
    plain = search(problem, 64, fixed={"recompute": "none"}).best
    assert plain.layouts.strategy(0, plain.problem.run).recompute_modules == "core_attn", "it recomputes nothing"
    with pytest.raises(InputError, match="has no moe_act"):
        search(make_problem(DENSE, 8, h100_model, framework="megatron-core", recompute_modules="moe_act"), 64)
    assert np.isfinite(found.times.seconds).all()


def test_all_modules_recompute_all_but_the_projections_of_attention(h100_model: CostModel) -> None:
    every = "+".join(modules_of(known_framework(CORE), DENSE))
    assert every == "core_attn+mlp"
    (_, held), (_, whole) = measured(h100_model, every, model=DENSE), measured(h100_model, "core_attn", "full", DENSE)
    tokens, heads, kv = 4096, DENSE.num_attention_heads * DENSE.head_dim, DENSE.num_key_value_heads * DENSE.head_dim
    kept = tokens * 2 * (heads + 2 * kv + heads + 2 * DENSE.hidden_size)  # q, k, v; the context; what norms wrote and read
    assert held - whole == pytest.approx(DENSE.num_hidden_layers * kept, rel=1e-9)
    assert measured(h100_model, every, model=DENSE)[0] < measured(h100_model, "core_attn", "full", DENSE)[0]


def kept(model: ModelSpec, kind: LayerKind = PLAIN, **constants: Any) -> dict[str, float]:
    """Return the bytes of each tensor that a layer saves of 4,096 tokens on one rank."""
    run = toy_layout(1, 4096, framework="megatron-core", **constants)
    program = layer_program(layer_keys("mtp"), model, run, cluster_of(DEVICE), kind)
    return {tensor.name: float(np.ravel(tensor.bytes)[0]) for tensor in program.saved}


@pytest.mark.parametrize(("recipe", "again"), [("tensorwise", True), ("delayed", False)])
def test_the_down_projection_of_experts_casts_what_moe_act_recomputes(recipe: str, again: bool) -> None:
    # where its input is kept in 16 bits (not with delayed scales), which the recomputation fills, it is quantised again
    experts = replace(layer_kinds(MODEL, 4096).kinds[-1], quantised=True)
    settings = {"framework": "megatron-bridge-26", "precision": "fp8", "fp8_recipe": recipe, "recompute_modules": "moe_act"}
    run = toy_layout(8, 4096, **settings)
    program = layer_program(layer_keys("mtp"), MODEL, run, cluster_of(DEVICE), experts)
    (cast,) = [op for op in program.ops if op.label == "experts.w2.input_cast.forward"]
    assert (Recompute.SELECTIVE in cast.recomputed_by) == again
    (activation,) = [op for op in program.ops if op.label == "experts.activation.forward"]
    assert Recompute.SELECTIVE in activation.recomputed_by


def test_inputs_of_linears_that_are_not_fused_are_quantised_once_each() -> None:
    # fp8: latent attention's two down projections each keep a copy of norm1's output; of norm2's the router keeps 16 bits and
    # the shared expert a copy. Of a dense layer's norms one linear each keeps a copy
    values, experts = 4096 * MODEL.hidden_size, layer_kinds(MODEL, 4096).kinds[-1]
    assert experts.experts and MODEL.shared_expert_intermediate_size
    half, eight = kept(MODEL, experts), kept(MODEL, replace(experts, quantised=True), precision="fp8")
    assert (half["norm1_output"], half["norm2_output"]) == (2 * values, 2 * values)
    assert (eight["norm1_output"], eight["norm2_output"]) == (2 * values, 3 * values)
    dense = kept(DENSE, replace(PLAIN, quantised=True), precision="fp8")
    assert (dense["norm1_output"], dense["norm2_output"]) == (4096 * DENSE.hidden_size,) * 2


@pytest.mark.parametrize("framework", ["megatron-core", "megatron-bridge"])
def test_modules_of_multi_token_prediction_are_recomputed_with_all_layers_and_not_block_by_block(
    framework: str, h100_model: CostModel
) -> None:
    # four layers, and the same with a module: full recomputation takes four layers again, or five and a projection
    def steps(modules: int, **layout: Any) -> tuple[float, float]:
        model = MODEL.replace(num_hidden_layers=4, first_k_dense_replace=0, num_nextn_predict_layers=modules)
        problem = make_problem(model, 8, h100_model, framework=framework)
        found = estimated(problem, [problem.layout(**BASE, ep=8, **layout)])
        return float(found.times.seconds[0]), float(found.memory.parts[MEMORY_PARTS.index("loss"), 0])

    def added(modules: int, **layout: Any) -> float:
        return steps(modules, **layout)[0] - steps(modules, recompute="none")[0]

    whole = [added(modules, recompute="full") for modules in (0, 1)]
    assert whole[1] - whole[0] == pytest.approx(whole[0] / 4, rel=0.35)  # a layer of four, and the module's projection
    block = [added(modules, recompute="full", recompute_layers=4) for modules in (0, 1)]
    assert block[1] == pytest.approx(block[0], rel=0.02)
    losses = [steps(1, **how)[1] for how in ({"recompute": "none"}, {"recompute": "full"})]
    assert losses[1] < losses[0]
