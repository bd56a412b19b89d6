"""Rules of recomputation: of which modules, of how many layers, and what it excludes."""

from __future__ import annotations

from profiler.errors import first_broken
from solver.spec.can_run import CanRun
from solver.spec.choices import RECOMPUTE_MODULES
from solver.spec.framework import Framework
from solver.spec.layer_kinds import dense_layers
from solver.spec.model import ModelSpec
from solver.spec.norms import norms_apart
from solver.spec.rules.quantised import delays
from solver.spec.run import Run
from solver.spec.strategy import Strategy

#: Rules of Megatron-Core's transformer_config.py.
LAYERS_ALONE = "offload_layers needs pp 1, no recomputation and no CUDA graphs"
#: Modules whose recomputation keeps a quantised input, which Transformer Engine does not do where scales are delayed.
_QUANTISED_MODULES = {"layernorm", "moe_act"}


def modules_of(framework: Framework, model: ModelSpec) -> tuple[str, ...]:
    """Return the modules of RECOMPUTE_MODULES that layers of the model have in a framework."""
    experts, shared = model.is_mixture_of_experts, model.shared_expert_intermediate_size > 0
    missing = {
        "layernorm": not norms_apart(framework, model, experts),
        "mla_up_proj": not model.has_latent_attention,
        "mlp": not dense_layers(model),
        "moe_act": not experts,
        "moe": not experts,
        "shared_experts": not (experts and shared),
    }
    return tuple(module for module in RECOMPUTE_MODULES if not missing.get(module))


def module_missing(framework: Framework, model: ModelSpec, module: str) -> str:
    if module == "layernorm":
        return f"{model.name} under {framework.name} has no layernorm to recompute: its norms are parts of its linears"
    return f"{model.name} has no {module} to recompute"


def module_rules(framework: Framework, model: ModelSpec, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of the modules that are recomputed; rules of Megatron-Core's transformer_config.py."""
    modules, there = s.modules_recomputed, modules_of(framework, model)
    return (
        (
            modules == ("core_attn",) or s.recompute == "selective",
            f"recompute_modules {s.recompute_modules} changes nothing with recompute {s.recompute}; give recompute selective",
        ),
        *((module in there, module_missing(framework, model, module)) for module in modules),
    )


def groups_rule(framework: Framework, model: ModelSpec, run: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of layers that are recomputed several at a time.

    Multi-token prediction's are not: asserted in Megatron-Core's multi_token_prediction.py.
    """
    alone, what = not framework.can_run.recomputes_groups, framework.name
    if model.num_nextn_predict_layers and not alone:
        alone, what = True, f"{what} beside multi-token prediction"
    return not alone or run.recompute_group == 1, (
        f"{what} recomputes layers one by one, not {run.recompute_group} at a time (recompute_group)"
    )


def partial_runs(can_run: CanRun, layers: int) -> bool:
    """Whether the framework recomputes ``layers`` of a stage's layers (-1: all)."""
    return layers < 0 or bool(can_run.recompute_shares)


def recompute_broken(framework: Framework, run: Run, level: str) -> str:
    """Return what of a run does not go together with a level of recomputation, or ""."""
    if level == "full" and run.cuda_graphs:
        return "CUDA graphs exclude recompute full"
    if level == "full" and run.offload_modules:
        return "offload_modules leaves nothing to full recomputation; give none or selective"
    if level != "none" and run.offload_layers:
        return LAYERS_ALONE
    return _modules_broken(framework, run) if level == "selective" else ""


def _modules_broken(framework: Framework, run: Run) -> str:
    """Return what of a run does not go together with the modules that it recomputes, or ""; rules of Megatron-Core's
    transformer_config.py."""
    modules = run.modules_recomputed
    quantised = sorted(_QUANTISED_MODULES & set(modules))
    rules = (
        (not run.lora_rank, "adapters (lora_rank) are not modelled with recompute selective"),
        (
            not (quantised and delays(framework, run)),
            f"recomputing {(*quantised, '')[0]} in fp8 needs another fp8_recipe than delayed",
        ),
        (
            "core_attn" not in modules or "core_attn" not in run.modules_offloaded,
            "core_attn is recomputed, so nothing of it is kept on the host; leave it out of offload_modules",
        ),
        ("moe_act" not in modules or run.moe_grouped_gemm, "recomputing moe_act needs moe_grouped_gemm"),
        ("moe_act" not in modules or not run.moe_fused_experts, "moe_fused_experts leaves no moe_act to recompute"),
        (
            "shared_experts" not in modules or not run.moe_shared_expert_overlap,
            "shared_experts are not recomputed together with moe_shared_expert_overlap",
        ),
        ("moe" not in modules or "moe_router" not in run.modules_graphed, "CUDA graphs of moe_router exclude recomputing moe"),
    )
    return first_broken(rules)
