"""Whatever a run has constant, every layout that a search offers is one that the check of a stated layout lets pass."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import DEVICE, all_layouts, make_problem, toy_cost

from profiler.errors import InputError
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import FRAMEWORKS
from solver.spec.model import ModelSpec

DENSE = ModelSpec(name="dense", hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=16,
                  num_key_value_heads=4, head_dim=32, vocab_size=1000)  # fmt: skip
LATENT = DENSE.replace(
    name="latent", num_key_value_heads=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256,
    shared_expert_intermediate_size=256, first_k_dense_replace=1, kv_lora_rank=64, q_lora_rank=64, qk_nope_head_dim=32,
    qk_rope_head_dim=16, v_head_dim=32,
)  # fmt: skip
MODELS = (
    DENSE,
    DENSE.replace(tie_word_embeddings=True, qk_norm="head"),
    DENSE.replace(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
    LATENT,
    LATENT.replace(num_nextn_predict_layers=1),
)
HOST = cluster_of(DEVICE, {"host_link_gb_s": 50, "host_memory_gb_s": 100})
VALUES: dict[str, list[Any]] = {
    "precision": ["fp16", "fp8", "mxfp8"], "fp8_recipe": ["tensorwise", "blockwise"], "fp8_param_gather": [True],
    "fp8_attention": [True], "num_layers_at_start_in_bf16": [1], "grad_dtype": ["fp32"], "attention": ["unfused"],
    "overlap_grad_reduce": [False], "overlap_param_gather": [False], "tp_comm_overlap": [True], "p2p_overlap": [True],
    "cross_entropy_fusion": [True], "cross_entropy_fusion_impl": ["native", "linear"], "cp_comm": ["a2a", "all_gather"],
    "moe_dispatcher": ["allgather", "deepep", "hybridep"], "moe_grouped_gemm": [False], "moe_shared_expert_overlap": [True],
    "moe_exchange_overlap": [True], "defer_embedding_wgrad_compute": [True], "delay_wgrad_compute": [True],
    "compile": [True], "cuda_graphs": [True], "cuda_graph_modules": ["attn", "attn+moe_router", "mlp"], "lora_rank": [16],
    "optimizer": ["muon"], "optimizer_states": ["bf16", "remainder"], "optimizer_offload_fraction": [0.5],
    "offload_gradients": [True], "offload_layers": [2], "offload_modules": ["core_attn", "attn_norm", "core_attn+attn_proj"],
    "recompute_modules": ["mlp", "layernorm", "moe", "moe_act", "mla_up_proj", "core_attn+moe_act"], "micro_batch_group": [8],
    "zero": [0, 1, 3], "recompute": ["selective", "full"],
}  # fmt: skip
CONSTANTS = st.lists(st.sampled_from(sorted(VALUES)), max_size=3, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: st.sampled_from(VALUES[name]) for name in names})
)


def passed(framework: str, model: ModelSpec, constants: dict[str, Any], every: int = 1) -> int:
    """Check every n-th layout of a search over 8 ranks; return how many there were, 0 where the search is refused."""
    try:
        problem = make_problem(model, 8, toy_cost(), 512, HOST, framework=framework, **constants)
        layouts = all_layouts(problem, 16)
    except InputError:
        return 0
    for index in range(0, len(layouts), every):
        check_layout(model, problem.cluster, layouts.strategy(index, problem.run))
    return len(layouts)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([framework.name for framework in FRAMEWORKS]), st.sampled_from(MODELS), CONSTANTS)
def test_what_a_search_offers_passes_the_check(framework: str, model: ModelSpec, constants: dict[str, Any]) -> None:
    passed(framework, model, constants, every=17)


@pytest.mark.parametrize(
    ("framework", "constants", "offers"),
    [
        ("torchtitan-2025-06", {"precision": "fp8", "fp8_recipe": "tensorwise", "fp8_param_gather": True}, False),
        ("megatron-core-0.12", {"offload_layers": 4, "cuda_graphs": True}, False),
        ("megatron-bridge-26", {"offload_modules": "core_attn"}, True),
        ("megatron-lm-zero-bubble", {"zero": 0, "overlap_param_gather": True, "overlap_grad_reduce": False}, True),
    ],
)
def test_runs_whose_search_once_offered_what_the_check_refuses(framework: str, constants: dict[str, Any], offers: bool) -> None:
    assert (passed(framework, DENSE, constants) > 0) == offers


def test_schedules_that_split_the_backward_pass_gather_no_parameters_beside_compute() -> None:
    """The zero-bubble fork overlaps no all-gather with it, so such a schedule comes with ZeRO-0, whatever the run's default."""
    for default in (0, 1):
        constants = {"zero": default, "overlap_param_gather": True, "overlap_grad_reduce": False}
        problem = make_problem(DENSE, 8, toy_cost(), 512, framework="megatron-lm-zero-bubble", **constants)
        layouts = all_layouts(problem, 16)
        rows = [layouts.strategy(i, problem.run) for i in range(len(layouts))]
        found = {(row.schedule, row.zero) for row in rows}
        assert ("zb-h1", 0) in found and ("1f1b", 1) in found and ("zb-h1", 1) not in found
