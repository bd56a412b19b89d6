"""Rules of layouts of models with experts, latent attention, windows and chunks: what divides, and what a framework runs."""

from __future__ import annotations

from solver.spec.can_run import CanRun
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.run import Run
from solver.spec.strategy import Strategy


def experts_divide(model: ModelSpec, ranks: int, ep: int, etp: int) -> bool:
    """Whether ``ranks`` of a pipeline stage hold whole experts, ep * etp ranks a copy of all; without experts both are 1."""
    if not model.is_mixture_of_experts:
        return ep == etp == 1
    return model.num_experts % ep == 0 and model.moe_intermediate_size % etp == 0 and ranks % (ep * etp) == 0


def experts_run(can_run: CanRun, model: ModelSpec, tp: int, ranks: int, ep: int, etp: int) -> bool:
    """Whether the framework runs this ep and etp: folded over all ranks of a stage, or tensor-parallel groups of experts that
    are those of the rest, and expert groups within what is left."""
    if can_run.folds_experts:
        splits = can_run.splits_experts and (can_run.splits_biased_experts or not model.mlp_bias)
        return (etp == 1 or splits) and (tp == 1 or ep > 1 or can_run.splits_alone)
    return etp == tp and (ranks // tp) % ep == 0


def expert_groups_broken(run: Run, ep: int, etp: int) -> str:
    """Return which constant of a run needs other groups of experts, or ""."""
    if run.moe_fused_experts and etp > 1:
        return f"moe_fused_experts needs whole experts: etp 1, not {etp}"
    return "moe_exchange_overlap needs ep above 1" if run.moe_exchange_overlap and ep == 1 else ""


def mode_broken(model: ModelSpec, tp_mode: str, tp: int) -> str:
    """Return why a tensor-parallel mode does not run the model, or "".

    Experts need the sequence split (Megatron-Core asserts it); neither they nor latent or linear attention, nor Mamba-2, are
    described under ISP.
    """
    special = model.is_mixture_of_experts or model.has_latent_attention or model.has_linear_attention or model.attention_gate
    special = special or model.is_hybrid
    if tp_mode == "isp" and special:
        return "tp_mode isp is not modelled with experts, latent, linear or gated attention, or Mamba-2; msp is"
    if tp > 1 and tp_mode == "mtp" and model.is_mixture_of_experts:
        return f"experts with tp {tp} need the sequence split too, as tp_mode msp does (sequence parallelism)"
    return ""


def fused_experts_broken(can_run: CanRun, model: ModelSpec, run: Run) -> str:
    """Return what is wrong with moe_fused_experts, or ""; rules of Megatron-Core's experts.py."""
    if not run.moe_fused_experts:
        return ""
    if not can_run.fuses_experts:
        return f"{run.framework} does not offer moe_fused_experts"
    if run.precision != "mxfp8" or not run.moe_grouped_gemm or not (model.is_mixture_of_experts and model.gated_mlp):
        return "moe_fused_experts needs experts with a gate, precision mxfp8 and moe_grouped_gemm"
    return ""


def overlap_runs(overlaps: bool, pp: int, vpp: int, recompute: str, predicts_further: int = 0) -> bool:
    """Whether the exchange of one micro batch may run beside another's compute.

    Two must be under way on a stage, whole layers must not be recomputed, and multi-token prediction is of one layer, with a
    pipeline (asserted in Megatron-Core's transformer_config.py).
    """
    predicts = predicts_further == 0 or (predicts_further == 1 and pp > 1)
    return not overlaps or ((pp == 1 or vpp > 1) and recompute != "full" and predicts)


def predicted_beside(framework: Framework, model: ModelSpec) -> int:
    """Return the layers of multi-token prediction that keep Megatron-Core from exchanging tokens beside compute."""
    return model.num_nextn_predict_layers if framework.kernels.transformer_engine else 0


def dispatchers_of(can_run: CanRun, model: ModelSpec) -> tuple[str, ...]:
    """Return the ways in which tokens of this model reach their experts in a framework."""
    plain = model.qk_norm == "none" and not model.attention_sinks
    return tuple(name for name in can_run.dispatchers if plain or name != "deepep" or not can_run.plain_deepep)


def suggested_dispatchers(can_run: CanRun, model: ModelSpec, vendor: str, several_hosts: bool) -> tuple[str, ...]:
    """Return those that a search suggests on a device: kernels on GPUs that they are made for.

    vendor: first word of the device's name. several_hosts: its NVLink domain spans hosts. Source: Megatron-Bridge
    (training/flex_dispatcher_backend.py, validate_flex_dispatcher_backend): DeepEP on Ampere, Hopper, B200 and B300, hybrid-EP
    also on GB200 and GB300.
    """
    nvidia = vendor == "NVIDIA"
    runs = {"deepep": nvidia and not several_hosts or can_run.deepep_of_amd and vendor == "AMD", "hybridep": nvidia}
    return tuple(name for name in dispatchers_of(can_run, model) if runs.get(name, True))


def dispatch_broken(run: Run) -> str:
    """Return what does not go together with how tokens reach their experts, or ""; rules of Megatron-Core's
    transformer_config.py."""
    if run.moe_shared_expert_overlap and run.moe_dispatcher != "alltoall":
        return f"moe_shared_expert_overlap needs moe_dispatcher alltoall, not {run.moe_dispatcher}"
    if run.moe_shared_expert_overlap and run.moe_exchange_overlap:
        return "moe_shared_expert_overlap and moe_exchange_overlap hide the same exchange: leave one out"
    if run.moe_exchange_overlap and run.moe_dispatcher == "allgather":
        return "moe_exchange_overlap needs another moe_dispatcher than allgather"
    if run.moe_capacity_factor and run.moe_dispatcher == "deepep":
        return "moe_capacity_factor needs another moe_dispatcher than deepep, which drops no tokens"
    return ""


def dispatch_rules(framework: Framework, model: ModelSpec, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of how tokens reach their experts in a framework."""
    can, name = framework.can_run, framework.name
    of_model = f" for {model.name}" * (s.moe_dispatcher in can.dispatchers)
    return (
        (s.moe_dispatcher in dispatchers_of(can, model), f"{name} does not offer moe_dispatcher {s.moe_dispatcher}{of_model}"),
        (s.moe_routing in can.routings, f"{name} does not offer moe_routing {s.moe_routing}"),
        (can.experts_in_fp16 or s.precision != "fp16", f"{name} does not train experts in fp16"),
        (can.overlaps_exchange or not s.moe_exchange_overlap, f"{name} does not offer moe_exchange_overlap"),
    )


def expert_rules(framework: Framework, model: ModelSpec, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of experts in a framework; nothing for models without."""
    can, name, ranks = framework.can_run, framework.name, s.tp * s.cp * s.dp
    if not model.is_mixture_of_experts:
        return ()
    return (
        (can.experts, f"mixtures of experts under {name} are not modelled"),
        (
            experts_run(can, model, s.tp, ranks, s.ep, s.etp),
            f"{name} does not run ep {s.ep} and etp {s.etp} with tp {s.tp}"
            + ", as described here" * (not can.splits_alone)
            + " and biases of experts" * (model.mlp_bias and s.etp > 1),
        ),
        *dispatch_rules(framework, model, s),
        (not (wrong := fused_experts_broken(can, model, s)), wrong),
        (not (wrong := expert_groups_broken(s, s.ep, s.etp)), wrong),
        (
            overlap_runs(s.moe_exchange_overlap, s.pp, s.vpp, s.recompute, predicted_beside(framework, model)),
            "moe_exchange_overlap needs interleaved stages (or one; several with multi-token prediction, of one layer) and no "
            "full recomputation",
        ),
        (not (wrong := dispatch_broken(s)), wrong),
    )
