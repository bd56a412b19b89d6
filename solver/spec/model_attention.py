"""The attention that a model's own features decide in a framework, where a run states none."""

from __future__ import annotations

from typing import Any

from solver.spec.can_run import UNFUSED_CAPS
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec


def attention_of(framework: Framework, model: ModelSpec) -> dict[str, Any]:
    """Return Strategy's fields of attention that soft caps or attention sinks decide; otherwise {}."""
    if model.capped_scores and framework.can_run.soft_caps == UNFUSED_CAPS:
        return {"attention": "unfused"}
    # FlexAttention's compiled kernels have FlashAttention 2's algorithm, without what later ones overlap
    return {"flash_generation": 2} if model.attention_sinks and framework.kernels.flex_sinks else {}
