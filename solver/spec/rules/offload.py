"""Rules of what waits on the host: activations, moments and gradients, and the host that they need."""

from __future__ import annotations

from profiler.errors import InputError, first_broken
from profiler.units import GB
from solver.spec.cluster import PCIE_4, PCIE_5, Cluster
from solver.spec.model import ModelSpec
from solver.spec.rules.recomputation import LAYERS_ALONE
from solver.spec.run import Run


def offloads(s: Run) -> tuple[tuple[str, bool], ...]:
    """Return (what, whether it is on the host), as in CanRun.offloads."""
    return (
        ("optimizer", s.optimizer_offload_fraction > 0),
        ("gradients", s.offload_gradients),
        ("activations", s.offload_layers > 0),
        ("modules", bool(s.offload_modules)),
    )


def offload_rules(model: ModelSpec, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of the modules whose activations wait on the host; rules of Megatron-Core's
    transformer_config.py. Its norms are modules of their own before experts and latent attention only."""
    modules, what = s.modules_offloaded, "to keep on the host"
    there = dict.fromkeys(("mlp_norm", "expert_fc1", "moe_act"), model.is_mixture_of_experts)
    there["attn_norm"] = model.has_latent_attention
    return (
        *((there.get(name, True), f"{model.name} has no {name} {what} under Megatron-Core") for name in modules),
        ("attn_proj" not in modules or "core_attn" in modules, "offload_modules attn_proj needs core_attn beside it"),
        (not modules or not s.offload_layers, "give offload_modules or offload_layers, not both"),
        (not (s.offload_layers and s.cuda_graphs), LAYERS_ALONE),
        (not (modules and s.graphs_layers), "offload_modules does not go together with CUDA graphs of whole layers"),
    )


def offload_broken(model: ModelSpec, s: Run) -> str:
    """Return the first of these rules that a run breaks, or ""."""
    return first_broken(offload_rules(model, s))


def check_host(cluster: Cluster, run: Run) -> None:
    """Raise InputError where a run offloads to a host that the cluster does not describe."""
    moves = run.optimizer_offload_fraction > 0 or run.offload_layers or run.offload_modules
    needs = [
        ("host_link_gb_s", cluster.host_link, moves),
        ("host_memory_gb_s", cluster.host_memory, run.optimizer_offload_fraction),
    ]
    for key, stated, used in needs:
        if used and not stated:
            raise InputError(
                f"offloading to the host needs {key} of the cluster, as --cluster dgx_h100 states it: what one GPU reaches of "
                f"it while all of its node do (PCIe 4 x16 about {PCIE_4 / GB:g} GB/s each way, PCIe 5 x16 {PCIE_5 / GB:g}, "
                "NVLink-C2C 400; memory of the host a few tens)"
            )
