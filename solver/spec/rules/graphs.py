"""Rules of CUDA graphs: of which modules they are, and what keeps experts out of them."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.layer_kinds import dense_layers
from solver.spec.model import ModelSpec
from solver.spec.run import Run


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
    whole = run.graphs_layers and model.is_mixture_of_experts
    reads = not run.moe_capacity_factor and run.moe_dispatcher != "hybridep"
    return (f"that no CUDA graph holds dropless experts whose rows the host reads ({run.moe_dispatcher})",) * (whole and reads)


def graphs_offered(framework: Framework, s: Run) -> tuple[tuple[bool, str], ...]:
    offered, what = framework.can_run.cuda_graph_modules, f"{framework.name} does not offer CUDA graphs of"
    return tuple((name in offered, f"{what} {name} alone") for name in s.modules_graphed)
