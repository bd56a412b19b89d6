"""Rules of weight gradients that wait: Megatron-Core's model_parallel_config.py and transformer_config.py, as read."""

from __future__ import annotations

from solver.spec.choices import ONE_F_ONE_B
from solver.spec.framework import Framework
from solver.spec.run import Run

NO_DRAIN = "defer_embedding_wgrad_compute fills a pipeline of schedule 1f1b that drains; give pp above 1, or leave it out"


def deferral_rules(framework: Framework, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of weight gradients that wait, whatever the pipeline (deferral_runs)."""
    deferred, name = s.defer_embedding_wgrad_compute, framework.name
    return (
        (framework.can_run.defers_head or not deferred, f"{name} does not offer defer_embedding_wgrad_compute"),
        (
            not deferred or framework.fuses_accumulation(s.gradient_accumulation_fusion),
            "defer_embedding_wgrad_compute needs gradient_accumulation_fusion",
        ),
        (deferred or not s.wgrad_deferral_limit, "wgrad_deferral_limit changes nothing without defer_embedding_wgrad_compute"),
        (s.moe_exchange_overlap or not s.delay_wgrad_compute, "delay_wgrad_compute needs moe_exchange_overlap"),
    )


def deferral_runs(deferred: bool, pp: int, schedule: str) -> bool:
    """Whether the head's weight gradients may wait until the pipeline drains: one that drains, and no split backward passes."""
    return not deferred or (pp > 1 and schedule in ONE_F_ONE_B)
