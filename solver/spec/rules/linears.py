"""Rules of linear attention: which frameworks train it, and what it goes together with."""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.run import Run


def linear_rules(framework: Framework, model: ModelSpec, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken); nothing for models without linear attention."""
    if not model.has_linear_attention:
        return ()
    what = f"linear attention, which {model.name} has,"
    return (
        (framework.can_run.linear_attention, f"{what} is not modelled under {framework.name}"),
        (not s.document_tokens, f"{what} does not meet packed documents (Megatron-Core's gated_delta_net.py)"),
        (not s.deterministic, f"{what} is not modelled with deterministic kernels"),
        (not s.lora_rank, f"{what} is not modelled with adapters (lora_rank)"),
    )


def linear_divides(model: ModelSpec, tp: int) -> bool:
    """Whether tp shards the heads of linear attention evenly (Megatron-Core's transformer_config.py)."""
    return not model.has_linear_attention or model.linear_num_key_heads % tp == 0
