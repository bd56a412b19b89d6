"""Settings that change nothing beside others: refused where an option states them, named where a file does, and left out
where two layouts are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from solver.spec.choices import TpMode
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.precision import PRIMARY, QUANTISED

#: Axis -> the constants that change nothing in its groups of one rank.
IN_ONE_RANK: Mapping[str, tuple[str, ...]] = {
    "cp": ("cp_comm", "cp_a2a_size"),
    "tp": ("tp_comm_overlap",),
    "pp": ("p2p_overlap", "micro_batch_group", "pipeline_layout"),
    "ep": ("moe_dispatcher",),
}


def idle_settings(stated: Iterable[str], model: ModelSpec, precision: str, framework: Framework) -> dict[str, str]:
    """Return those of the ``stated`` constants that change nothing of any layout of a run, and why, in words that follow
    "changes nothing"."""
    of_format, scaled = f" with precision {precision}", precision in QUANTISED
    idle = {
        "fp8_param_gather": (precision not in PRIMARY, of_format),
        "fp8_recipe": (precision != "fp8", of_format),
        "fp8_amax_reduction": (precision != "fp8", of_format),
        "fp8_attention": (not scaled, of_format),
        "num_layers_at_start_in_bf16": (not scaled, of_format),
        "num_layers_at_end_in_bf16": (not scaled, of_format),
        "moe_shared_expert_overlap": (not model.shared_expert_intermediate_size, f": {model.name} has no shared experts"),
        "rope_fusion": (model.position != "rope", f": {model.name} has no rotary embedding"),
        "overlap_weight_gather": (TpMode.ISP not in framework.can_run.tp_modes, f" under {framework.name}, which has no isp"),
    }
    found = {}
    for key in stated:
        if key.startswith("moe_") and not model.is_mixture_of_experts:
            found[key] = f": {model.name} has no experts"
        elif key in idle and idle[key][0]:
            found[key] = idle[key][1]
    return found
