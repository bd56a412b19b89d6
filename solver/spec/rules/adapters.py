"""Rules of training adapters alone (lora_rank): with which frameworks, models and settings they are described."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.frameworks import FRAMEWORKS
from solver.spec.model import ModelSpec
from solver.spec.precision import QUANTISED
from solver.spec.run import Run


def adapter_rules(framework: Framework, model: ModelSpec, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken); nothing where all weights are trained."""
    if not s.lora_rank:
        return ()
    what = f"lora_rank {s.lora_rank}: adapters are not modelled with"
    return (
        (framework.can_run.adapters, f"{what} {framework.name}; they are with {', '.join(_with_adapters())}"),
        (not model.is_mixture_of_experts, f"{what} experts, which {model.name} has"),
        (not model.has_latent_attention, f"{what} latent attention, which {model.name} has"),
        (not model.num_nextn_predict_layers, f"{what} multi-token prediction, which {model.name} has"),
        (s.precision not in QUANTISED, f"{what} precision {s.precision}"),
    )


def _with_adapters() -> list[str]:
    return [framework.name for framework in FRAMEWORKS if framework.can_run.adapters]
