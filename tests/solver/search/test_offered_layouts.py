"""Whatever a run has constant, every layout that a search offers is one that the check of a stated layout lets pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from toy import DEVICE, all_layouts, make_problem, toy_cost

from profiler.errors import InputError
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import FRAMEWORKS
from solver.spec.model import ModelSpec

DENSE = ModelSpec(
    name="dense",
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=32,
    vocab_size=1000,
)
LATENT = DENSE.replace(
    name="latent",
    num_key_value_heads=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=256,
    shared_expert_intermediate_size=256,
    first_k_dense_replace=1,
    kv_lora_rank=64,
    q_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
)
MODELS = (
    DENSE,
    DENSE.replace(tie_word_embeddings=True, qk_norm="head"),
    DENSE.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
    LATENT,
    LATENT.replace(num_nextn_predict_layers=1),
)
LOW_PRECISION = replace(DEVICE, peak_flops={"bf16": 1e15, "fp8": 2e15, "mxfp8": 2e15})
HOST = cluster_of(LOW_PRECISION, {"host_link_gb_s": 50, "host_memory_gb_s": 100})
#: Constants of a run; those that only work together stand together.
ENTRIES: tuple[dict[str, Any], ...] = (
    {"precision": "fp16"},
    {"precision": "fp8"},
    {"precision": "fp8", "fp8_recipe": "tensorwise"},
    {"precision": "fp8", "fp8_recipe": "blockwise"},
    {"precision": "mxfp8"},
    {"precision": "fp8", "fp8_param_gather": True},
    {"precision": "fp8", "fp8_recipe": "delayed", "fp8_attention": True},
    {"precision": "fp8", "fp8_recipe": "tensorwise", "num_layers_at_start_in_bf16": 1},
    {"grad_dtype": "fp32"},
    {"attention": "unfused"},
    {"overlap_grad_reduce": False},
    {"overlap_param_gather": False},
    {"tp_comm_overlap": True},
    {"p2p_overlap": True},
    {"cross_entropy_fusion": True},
    {"cross_entropy_fusion": True, "cross_entropy_fusion_impl": "native"},
    {"cross_entropy_fusion": True, "cross_entropy_fusion_impl": "linear"},
    {"cp_comm": "a2a"},
    {"cp_comm": "allgather"},
    {"moe_dispatcher": "allgather"},
    {"moe_dispatcher": "deepep"},
    {"moe_dispatcher": "hybridep"},
    {"moe_grouped_gemm": False},
    {"moe_shared_expert_overlap": True},
    {"moe_exchange_overlap": True},
    {"moe_exchange_overlap": True, "delay_wgrad_compute": True},
    {"defer_embedding_wgrad_compute": True},
    {"compile": True},
    {"cuda_graphs": True},
    {"cuda_graphs": True, "cuda_graph_modules": "attn"},
    {"cuda_graphs": True, "cuda_graph_modules": "attn+moe_router"},
    {"cuda_graphs": True, "cuda_graph_modules": "mlp"},
    {"lora_rank": 16},
    {"optimizer": "muon", "overlap_grad_reduce": False},
    {"optimizer_states": "bf16"},
    {"optimizer_states": "remainder"},
    {"optimizer_offload_fraction": 0.5},
    {"offload_gradients": True, "optimizer_offload_fraction": 1.0},
    {"offload_layers": 2},
    {"offload_modules": "core_attn"},
    {"offload_modules": "attn_norm"},
    {"offload_modules": "core_attn+attn_proj"},
    {"recompute_modules": "mlp"},
    {"recompute_modules": "layernorm"},
    {"recompute_modules": "moe"},
    {"recompute_modules": "moe_act"},
    {"recompute_modules": "mla_up_proj"},
    {"recompute_modules": "core_attn+moe_act"},
    {"micro_batch_group": 8},
    {"moe_fused_experts": True, "precision": "mxfp8", "recompute_modules": "moe_act"},
)
CONSTANTS = st.lists(st.sampled_from(ENTRIES), max_size=3).map(
    lambda entries: {k: v for one in entries for k, v in one.items()}
)
NAMES = [framework.name for framework in FRAMEWORKS]


def passed(framework: str, model: ModelSpec, constants: dict[str, Any], every: int = 1) -> int:
    """Check every n-th layout of a search over 8 ranks; return how many there were, 0 where the search is refused."""
    try:
        problem = make_problem(model, 8, toy_cost(device=LOW_PRECISION), 512, HOST, framework=framework, **constants)
        layouts = all_layouts(problem, 16)
    except InputError:
        return 0
    for index in range(0, len(layouts), every):
        check_layout(model, problem.cluster, layouts.strategy(index, problem.run))
    return len(layouts)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])  # most refuse something
@given(st.sampled_from(NAMES), st.sampled_from(MODELS), CONSTANTS)
def test_what_a_search_offers_passes_the_check(framework: str, model: ModelSpec, constants: dict[str, Any]) -> None:
    assume(passed(framework, model, constants, every=17))


@pytest.mark.parametrize("constants", ENTRIES, ids=str)
def test_each_of_these_constants_is_one_that_some_framework_runs(constants: dict[str, Any]) -> None:
    assert any(passed(framework, model, constants, every=1000) for framework in NAMES for model in MODELS)


@pytest.mark.parametrize(
    ("framework", "constants", "offers"),
    [
        ("torchtitan-2025-06", {"precision": "fp8", "fp8_recipe": "tensorwise", "fp8_param_gather": True}, True),
        ("torchtitan-2025-06", {"precision": "mxfp8", "fp8_param_gather": True}, False),
        ("megatron-core-0.12", {"offload_layers": 4, "cuda_graphs": True}, False),
        ("megatron-bridge-26", {"offload_modules": "core_attn"}, True),
        ("megatron-lm-zero-bubble", {"overlap_param_gather": True, "overlap_grad_reduce": False}, True),
    ],
)
def test_runs_whose_search_once_offered_what_the_check_refuses(framework: str, constants: dict[str, Any], offers: bool) -> None:
    assert (passed(framework, DENSE, constants) > 0) == offers


def test_schedules_that_split_the_backward_pass_gather_no_parameters_beside_compute() -> None:
    """The zero-bubble fork overlaps no all-gather with it, so such a schedule comes with ZeRO-0."""
    constants = {"overlap_param_gather": True, "overlap_grad_reduce": False}
    problem = make_problem(DENSE, 8, toy_cost(), 512, framework="megatron-lm-zero-bubble", **constants)
    layouts = all_layouts(problem, 16)
    rows = [layouts.strategy(i, problem.run) for i in range(len(layouts))]
    found = {(row.schedule, row.zero) for row in rows}
    assert ("zb-h1", 0) in found and ("1f1b", 1) in found and ("zb-h1", 1) not in found
