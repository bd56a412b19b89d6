"""CUDA graphs of single modules: which launches are left to the host, and what may be asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy import DEVICE, TINY, layer_keys, make_problem, tiny, toy_cost, toy_layout

from profiler.errors import InputError
from solver.layers.decoder import layer_program
from solver.layers.graphs import REPLAY
from solver.layers.program import FORWARD
from solver.search.search import search
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.layer_kinds import PLAIN, LayerKind

MOE = TINY.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=64)
EXPERTS = LayerKind(experts=True)


def launches(kind: LayerKind, modules: str, **given: Any) -> dict[str, float]:
    """Launches of a layer's forward pass by module of the ops, those of none left out."""
    run = toy_layout(64, 256, framework="megatron-core", cuda_graphs=True, cuda_graph_modules=modules, **given)
    program = layer_program(layer_keys("mtp", ep=4 if kind.experts else 1), MOE, run, cluster_of(DEVICE), kind)
    found: dict[str, float] = {}
    for op in program.ops:
        if op.phase == FORWARD and np.ravel(op.count)[0]:
            found[op.module] = found.get(op.module, 0.0) + float(np.ravel(op.launches)[0])
    return {module: number for module, number in found.items() if number}


def test_a_dense_layer_whose_modules_are_all_graphs_is_one_graph() -> None:
    assert launches(PLAIN, "attn+mlp") == {"norm": REPLAY}  # which begins with the first norm
    assert launches(PLAIN, "attn").keys() == {"norm", "mlp", "residual"}
    assert launches(PLAIN, "moe_router") == launches(PLAIN, "")


def test_experts_and_their_exchange_stay_with_the_host() -> None:
    left = launches(EXPERTS, "attn+moe_router+moe_preprocess")
    eager = launches(EXPERTS, "")
    assert left.keys() == {"norm", "expert_exchange", "experts", "residual"} and left["norm"] == REPLAY
    assert left["experts"] == eager["experts"] and left["expert_exchange"] == eager["expert_exchange"] - 1  # permute
    assert eager["residual"] - left["residual"] == 1 and "shared_experts" in eager
    beside = launches(EXPERTS, "attn+moe_router", moe_shared_expert_overlap=True)
    assert beside["shared_experts"] == eager["shared_experts"] and "router" not in beside


def test_graphs_of_more_modules_take_less_time_where_the_host_binds() -> None:
    seconds = [
        float(tiny("megatron-core", 8, TINY, {"cuda_graphs": on, "cuda_graph_modules": modules}, zero=1, dp=8).times.seconds[0])
        for on, modules in ((False, ""), (True, "attn"), (True, "attn+mlp"), (True, ""))
    ]
    assert all(more < less for less, more in zip(seconds[:-1], seconds[1:], strict=True))


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (MOE, {"cuda_graph_modules": "attn"}, "cuda_graph_modules attn changes nothing without cuda_graphs"),
        (TINY, {"cuda_graphs": True, "cuda_graph_modules": "moe_router"}, "tiny has no moe_router to be a CUDA graph"),
        (MOE, {"cuda_graphs": True, "cuda_graph_modules": "moe_preprocess"}, "moe_preprocess need those of moe_router"),
        (MOE, {"cuda_graphs": True, "cuda_graph_modules": "mlp"}, "has no mlp to be a CUDA graph"),
        (
            TINY,
            {"cuda_graphs": True, "cuda_graph_modules": "attn", "framework": "megatron-lm"},
            "does not offer CUDA graphs of attn",
        ),
    ],
)
def test_what_cannot_be_a_graph_is_refused(model: Any, given: dict[str, Any], message: str) -> None:
    run = toy_layout(8, **{"framework": "megatron-core", "dp": 8, "zero": 1, "zero_shard_size": 8, **given})
    with pytest.raises(InputError, match=message):
        check_layout(model, cluster_of(DEVICE), run)
    with pytest.raises(InputError, match=message):
        search(make_problem(model, 8, toy_cost(), 512, **{"framework": "megatron-core", **given}), 8)


def test_unknown_modules_are_named() -> None:
    with pytest.raises(InputError, match="cuda_graph_modules is 'attn\\+moe'; it must be one or several of attn, mlp"):
        toy_layout(8, cuda_graph_modules="attn+moe")
    assert toy_layout(8, cuda_graph_modules=["moe_router", "attn"]).cuda_graph_modules == "attn+moe_router"


def test_what_graphs_hold_is_named() -> None:
    assert toy_layout(8).unmodelled == ()
    assert toy_layout(8, cuda_graphs=True).unmodelled == ("the memory that CUDA graphs hold",)
    both = toy_layout(8, cuda_graphs=True, deterministic=True).unmodelled
    assert len(both) == 2 and both[1] == "the memory that CUDA graphs hold"
