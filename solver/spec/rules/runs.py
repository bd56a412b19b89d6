"""What all layouts of a run share, checked before a search."""

from __future__ import annotations

from profiler.errors import InputError, require
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.rules.adapters import adapter_rules
from solver.spec.rules.deferral import deferral_rules
from solver.spec.rules.experts import dispatch_broken, dispatch_rules, fused_experts_broken
from solver.spec.rules.graphs import graph_rules, graphs_left_out, graphs_offered
from solver.spec.rules.kernels import attention_rules, compile_rule, fusion_rules, loss_rules, projection_rule
from solver.spec.rules.linears import linear_rules
from solver.spec.rules.offload import offload_rules
from solver.spec.rules.optimizers import optimizer_rules
from solver.spec.rules.overlaps import overlap_rules
from solver.spec.rules.quantised import ends_rule, gather_rule
from solver.spec.rules.recomputation import groups_rule, module_missing, modules_of
from solver.spec.rules.state_space import state_space_rules
from solver.spec.run import Run


def check_run(framework: Framework, model: ModelSpec, run: Run) -> None:
    """Raise InputError where a search's framework or model does not run what all its layouts share."""
    require(
        (
            *attention_rules(framework, run),
            *loss_rules(framework, run),
            ends_rule(framework, run),
            gather_rule(framework, run),
            compile_rule(framework, run),
            *fusion_rules(framework, model, run),
        )
    )
    _check_modules(framework, model, run)
    require(
        (
            *adapter_rules(framework, model, run),
            *deferral_rules(framework, run),
            *linear_rules(framework, model, run),
            *state_space_rules(framework, model, run),
        )
    )
    if what := graphs_left_out(model, run):
        instead = "cuda_graph_modules attn+moe_router, a moe_capacity_factor or moe_dispatcher hybridep"
        raise InputError(f"cuda_graphs of whole layers leaves out {what[0]}; state {instead}")
    _check_graphs(framework, model, run)
    if broken := fused_experts_broken(framework.can_run, model, run):
        raise InputError(broken)
    _check_overlaps(framework, model, run)
    optional = groups_rule(framework, model, run), projection_rule(framework, run)
    require((*optimizer_rules(framework, run), *optional, *offload_rules(model, run)))
    if run.offload_layers >= model.num_hidden_layers:
        raise InputError(f"offload_layers {run.offload_layers} leaves none of the {model.num_hidden_layers} layers here")


def _check_modules(framework: Framework, model: ModelSpec, run: Run) -> None:
    """Raise InputError where the modules that a search's selective recomputation is of are not there or not offered."""
    if run.recompute_modules == Run.recompute_modules:
        return
    for module in run.modules_recomputed:
        if module not in framework.can_run.recompute_modules:
            raise InputError(f"{framework.name} does not offer to recompute {module} alone")
        if module not in modules_of(framework, model):
            raise InputError(module_missing(framework, model, module))


def _check_graphs(framework: Framework, model: ModelSpec, run: Run) -> None:
    """Raise InputError where the modules of a search's CUDA graphs are not there or not offered."""
    require((*graph_rules(model, run), *graphs_offered(framework, run)))


def _check_overlaps(framework: Framework, model: ModelSpec, run: Run) -> None:
    """Raise InputError where what a search overlaps does not go together, or not with its framework."""
    rules = overlap_rules(framework, run, True, True)
    if model.is_mixture_of_experts:
        rules += (*dispatch_rules(framework, model, run), (not (broken := dispatch_broken(run)), broken))
    require(rules)
