"""Rules on what all layouts of a run share: recomputed modules, CUDA graphs, overlaps, dispatch, offload and its host."""

from __future__ import annotations

from profiler.errors import InputError, first_broken, require
from solver.spec.choices import RECOMPUTE_MODULES
from solver.spec.cluster import PCIE_4, PCIE_5, Cluster
from solver.spec.framework import Framework
from solver.spec.layer_kinds import dense_layers
from solver.spec.model import ModelSpec
from solver.spec.norms import norms_apart
from solver.spec.precision import QUANTISED
from solver.spec.recipes import delays_scales
from solver.spec.rules.adapters import adapter_rules
from solver.spec.rules.deferral import deferral_rules
from solver.spec.rules.experts import dispatch_broken, dispatch_rules, fused_experts_broken
from solver.spec.rules.linears import linear_rules
from solver.spec.rules.optimizers import optimizer_rules
from solver.spec.rules.state_space import state_space_rules
from solver.spec.rules.states import LAYERS_ALONE
from solver.spec.run import Run
from solver.spec.strategy import Strategy


def projection_rule(framework: Framework, s: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of a cross entropy that is fused with the vocabulary's projection."""
    fuses = s.cross_entropy_fusion and s.cross_entropy_fusion_impl == "linear"
    return framework.can_run.fuses_projection or not fuses, f"{framework.name} does not offer cross_entropy_fusion_impl linear"


def modules_of(framework: Framework, model: ModelSpec) -> tuple[str, ...]:
    """Return the modules of RECOMPUTE_MODULES that layers of the model have in a framework."""
    experts, shared = model.is_mixture_of_experts, model.shared_expert_intermediate_size > 0
    missing = {
        "layernorm": not norms_apart(framework, model, experts),
        "mla_up_proj": not model.has_latent_attention, "mlp": not dense_layers(model), "moe_act": not experts,
        "moe": not experts, "shared_experts": not (experts and shared),
    }  # fmt: skip
    return tuple(module for module in RECOMPUTE_MODULES if not missing.get(module))


def _no_module(framework: Framework, model: ModelSpec, module: str) -> str:
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
        *((module in there, _no_module(framework, model, module)) for module in modules),
    )


def graph_rules(model: ModelSpec, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of the modules that are CUDA graphs; rules of Megatron-Core's transformer_config.py."""
    modules = s.modules_graphed
    missing = {"mlp": not dense_layers(model), "moe_router": not model.is_mixture_of_experts}
    return (
        (s.cuda_graphs or not modules, f"cuda_graph_modules {s.cuda_graph_modules} changes nothing without cuda_graphs"),
        (not (modules and s.compile), "cuda_graph_modules changes nothing with compile, where the host launches nothing"),
        *((not missing.get(module), f"{model.name} has no {module} to be a CUDA graph") for module in modules),
        ("moe_preprocess" not in modules or "moe_router" in modules, "CUDA graphs of moe_preprocess need those of moe_router"),
    )


def graphs_left_out(model: ModelSpec, run: Run) -> tuple[str, ...]:
    """Return in words what may keep experts out of CUDA graphs of whole layers: that the host reads how many rows each has.

    Source: Megatron-Core's token_dispatcher.py (_maybe_dtoh_and_synchronize), unless a capacity makes the rows equal; kernels
    of hybrid-EP may leave the rows to the device.
    """
    whole = run.cuda_graphs and not run.modules_graphed and model.is_mixture_of_experts
    reads = not run.moe_capacity_factor and run.moe_dispatcher != "hybridep"
    return (f"that no CUDA graph holds dropless experts whose rows the host reads ({run.moe_dispatcher})",) * (whole and reads)


def loss_rules(framework: Framework, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of a loss that is compiled, or is not, apart from the model."""
    return (
        (
            framework.can_run.compiles_loss_apart or s.compile_loss is None,
            f"{framework.name} does not offer compile_loss; leave it out",
        ),
        (
            s.compile_loss is None or not s.cross_entropy_fusion,
            "compile_loss changes nothing with cross_entropy_fusion; leave it out",
        ),
    )


def attention_rules(framework: Framework, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of what is stated of attention's kernels."""
    flash = s.attention == "flash"
    return (
        (framework.can_run.fp8_attention or not s.fp8_attention, f"{framework.name} does not offer fp8_attention"),
        (
            not s.fp8_attention or (flash and s.precision in QUANTISED),
            f"fp8_attention needs attention flash and precision {', '.join(QUANTISED)}, not {s.attention} and {s.precision}",
        ),
        (flash or not s.flash_generation, f"flash_generation changes nothing with attention {s.attention}; leave it out"),
        (not flash or s.fused_softmax is None, "fused_softmax changes nothing with attention flash; leave it out"),
    )


def ends_rule(framework: Framework, s: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of layers that stay in bf16, which scales of earlier steps exclude (Megatron-Core's
    transformer_config.py)."""
    ends = s.num_layers_at_start_in_bf16 + s.num_layers_at_end_in_bf16
    delayed = framework.kernels.transformer_engine and delays_scales(s.precision, s.fp8_recipe)
    return not (ends and delayed), "layers that stay in bf16 need another fp8_recipe than delayed"


def gather_rule(framework: Framework, s: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of weights that are all-gathered in 8 bits."""
    gathers = s.fp8_param_gather and s.precision in QUANTISED
    return framework.memory.quantised_weights or not gathers, f"{framework.name} does not offer fp8_param_gather"


def offload_rules(model: ModelSpec, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of the modules whose activations wait on the host; rules of Megatron-Core's
    transformer_config.py. Its norms are modules of their own before experts and latent attention only."""
    modules, what = s.modules_offloaded, "to keep on the host"
    there = dict.fromkeys(("mlp_norm", "expert_fc1", "moe_act"), model.is_mixture_of_experts)
    there["attn_norm"] = model.has_latent_attention
    graphed = s.cuda_graphs and not s.modules_graphed
    return (
        *((there.get(name, True), f"{model.name} has no {name} {what} under Megatron-Core") for name in modules),
        ("attn_proj" not in modules or "core_attn" in modules, "offload_modules attn_proj needs core_attn beside it"),
        (not modules or not s.offload_layers, "give offload_modules or offload_layers, not both"),
        (not (s.offload_layers and s.cuda_graphs), LAYERS_ALONE),
        (not (modules and graphed), "offload_modules does not go together with CUDA graphs of whole layers"),
    )


def offload_broken(model: ModelSpec, s: Run) -> str:
    """Return the first of these rules that a run breaks, or ""."""
    return first_broken(offload_rules(model, s))


def graphs_offered(framework: Framework, s: Run) -> tuple[tuple[bool, str], ...]:
    offered, what = framework.can_run.cuda_graph_modules, f"{framework.name} does not offer CUDA graphs of"
    return tuple((name in offered, f"{what} {name} alone") for name in s.modules_graphed)


def overlap_rules(framework: Framework, s: Run, splits_tensors: bool, shards: bool) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of overlaps and the allocator.

    splits_tensors: a layout splits tensors (tp above 1), or may do so; shards: it shards states, or may do so.
    """
    can, name = framework.can_run, framework.name
    gathers_alone = s.overlap_param_gather and s.optimizer != "muon" and not s.overlap_grad_reduce
    return (
        (
            framework.data_parallel.overlaps_sharded_unless_told or s.overlap_grad_reduce is not None,
            f"overlap_grad_reduce of {name} is true or false in all ZeRO stages",
        ),
        (
            not (splits_tensors and s.tp_comm_overlap and can.compiles_tp_overlap) or s.compile,
            f"{name}: tp_comm_overlap, the overlap of tensor parallelism, needs compile",
        ),
        (
            not (shards and gathers_alone and can.gathers_after_reducing),
            f"{name}: overlap_param_gather needs overlap_grad_reduce: turn both on or both off",
        ),
        (
            not s.expandable_segments or framework.memory.gaps(True) != framework.memory.gaps(False),
            f"expandable_segments changes nothing under {name}",
        ),
        (can.micro_batch_groups or not s.micro_batch_group, f"{name} does not offer micro_batch_group"),
        compile_rule(framework, s),
        (
            framework.data_parallel.defers_sync or framework.data_parallel.no_sync or s.defer_grad_sync is None,
            f"{name} does not offer defer_grad_sync; leave it out",
        ),
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


def compile_rule(framework: Framework, run: Run) -> tuple[bool, str]:
    """Return (holds, what is broken): Transformer Engine's modules are kernels, which torch does not compile."""
    return not (run.compile and framework.kernels.transformer_engine), (
        f"{framework.name} runs Transformer Engine's modules, which torch.compile leaves as they are; leave out compile"
    )


def check_run(framework: Framework, model: ModelSpec, run: Run) -> None:
    """Raise InputError where a search's framework or model does not run what all its layouts share."""
    require(
        (
            *attention_rules(framework, run),
            *loss_rules(framework, run),
            ends_rule(framework, run),
            gather_rule(framework, run),
            compile_rule(framework, run),
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
            raise InputError(_no_module(framework, model, module))


def _check_graphs(framework: Framework, model: ModelSpec, run: Run) -> None:
    """Raise InputError where the modules of a search's CUDA graphs are not there or not offered."""
    require((*graph_rules(model, run), *graphs_offered(framework, run)))


def _check_overlaps(framework: Framework, model: ModelSpec, run: Run) -> None:
    """Raise InputError where what a search overlaps does not go together, or not with its framework."""
    rules = overlap_rules(framework, run, True, True)
    if model.is_mixture_of_experts:
        rules += (*dispatch_rules(framework, model, run), (not (broken := dispatch_broken(run)), broken))
    require(rules)


def check_host(cluster: Cluster, run: Run) -> None:
    """Raise InputError where a run offloads to a host that the cluster does not describe."""
    moves = run.optimizer_offload_fraction > 0 or run.offload_layers or run.offload_modules
    needs = [("host_link_gb_s", cluster.host_link, moves),
             ("host_memory_gb_s", cluster.host_memory, run.optimizer_offload_fraction)]  # fmt: skip
    for key, stated, used in needs:
        if used and not stated:
            raise InputError(
                f"offloading to the host needs {key} of the cluster, as --cluster dgx_h100 states it: what one GPU reaches of "
                f"it while all of its node do (PCIe 4 x16 about {PCIE_4 / 1e9:g} GB/s each way, PCIe 5 x16 {PCIE_5 / 1e9:g}, "
                "NVLink-C2C 400; memory of the host a few tens)"
            )
