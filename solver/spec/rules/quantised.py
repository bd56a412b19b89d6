"""Rules of quantised runs: which layers stay in 16 bits, and what is gathered narrow."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.precision import QUANTISED
from solver.spec.recipes import delays_scales
from solver.spec.run import Run


def delays(framework: Framework, run: Run) -> bool:
    """Whether a run's linears are scaled by the values of earlier steps, by Transformer Engine."""
    return framework.kernels.transformer_engine and delays_scales(run.precision, run.fp8_recipe)


def ends_rule(framework: Framework, s: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of layers that stay in bf16, which scales of earlier steps exclude (Megatron-Core's
    transformer_config.py)."""
    ends = s.num_layers_at_start_in_bf16 + s.num_layers_at_end_in_bf16
    return not (ends and delays(framework, s)), "layers that stay in bf16 need another fp8_recipe than delayed"


def gather_rule(framework: Framework, s: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of weights that are all-gathered in 8 bits."""
    gathers = s.fp8_param_gather and s.precision in QUANTISED
    offered = framework.memory.quantised_weights or (framework.can_run.gathers_fp8_shards and s.precision == "fp8")
    return offered or not gathers, f"{framework.name} does not offer fp8_param_gather with precision {s.precision}"


def amax_rule(framework: Framework, s: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of the ranks over which largest values are found."""
    stated = s.fp8_amax_reduction != "all"
    return not stated or delays(framework, s), (
        f"fp8_amax_reduction {s.fp8_amax_reduction} changes nothing without fp8_recipe delayed under Transformer Engine"
    )
