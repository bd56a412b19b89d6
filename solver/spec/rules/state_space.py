"""Rules of Mamba-2 and of layers that are one block each: which frameworks train them, and what they go together with.

Source: Megatron-Core 0.16's ssm/mamba_block.py and mamba_mixer.py, as read: its stack calls every layer as it is, so that
nothing recomputes whole layers, has no virtual stages, and divides its layers evenly or by the layers of the end stages.
"""

from __future__ import annotations

from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.run import Run


def state_space_rules(framework: Framework, model: ModelSpec, s: Run) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) for a run; nothing for models without such layers."""
    if not model.is_hybrid:
        return ()
    what = f"Mamba-2 or layers of one block, which {model.name} has,"
    modelled = framework.can_run.state_space
    return (
        (modelled, f"{what} are not modelled under {framework.name}"),
        (model.one_block_layers or not modelled, f"{framework.name} runs Mamba-2 only in layers that are one block each"),
        (not s.document_tokens, f"{what} are not modelled with packed documents"),
        (not s.deterministic, f"{what} are not modelled with deterministic kernels"),
        (not s.lora_rank, f"{what} are not modelled with adapters (lora_rank)"),
    )


def state_space_divides(model: ModelSpec, tp: int) -> bool:
    """Whether tp shards the heads of Mamba-2 and their groups evenly (Megatron-Core's mamba_mixer.py)."""
    return model.mamba_num_groups % tp == 0
