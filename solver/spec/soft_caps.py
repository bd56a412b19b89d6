"""Soft caps: attention scores, or logits, pass cap * tanh(x / cap) (Gemma 2, arXiv 2408.00118, section 2).

Which frameworks run them: NeMo's and Megatron-Bridge's Gemma 2 as a chain of kernels on the scores of unfused attention,
Hugging Face's also inside FlashAttention's kernels (flash-attention 2.6).
"""

from __future__ import annotations

from solver.spec.can_run import FUSED_CAPS
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.run import Run


def without_soft_caps(model: ModelSpec) -> ModelSpec:
    """Return the model without its soft caps, which it then names as left out."""
    caps = {"soft-capped attention scores": model.capped_scores, "soft-capped logits": model.capped_logits}
    left_out = tuple(what for what, there in caps.items() if there)
    return model.replace(capped_scores=False, capped_logits=False, unmodelled=(*model.unmodelled, *left_out))


def soft_cap_rule(framework: Framework, model: ModelSpec, run: Run) -> tuple[bool, str]:
    """Return (holds, what is broken) of a model's soft caps in a framework."""
    can, leave = framework.can_run.soft_caps, "--approximate leaves the caps out"
    if not can and (model.capped_scores or model.capped_logits):
        return False, f"{framework.name} has no soft caps, which {model.name} has; {leave}"
    fused = model.capped_scores and run.attention == "flash"
    return can == FUSED_CAPS or not fused, f"{framework.name} caps attention scores only with attention unfused; {leave}"


def left_out_of_caps(model: ModelSpec, run: Run) -> tuple[str, ...]:
    """Return what the caps cost beyond what is priced, in words."""
    fused = model.capped_scores and run.attention == "flash"
    return ("what soft-capped scores cost inside a fused attention kernel",) if fused else ()
