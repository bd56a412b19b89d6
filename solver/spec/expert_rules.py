"""Rules of layouts of models with experts, latent attention, windows and chunks: what divides, and what a framework runs."""

from __future__ import annotations

from solver.spec.framework import CanRun
from solver.spec.model import ModelSpec


def experts_divide(model: ModelSpec, ranks: int, ep: int, etp: int) -> bool:
    """Whether ``ranks`` of a pipeline stage hold whole experts, ep * etp ranks a copy of all; without experts both are 1."""
    if not model.is_mixture_of_experts:
        return ep == etp == 1
    return model.num_experts % ep == 0 and model.moe_intermediate_size % etp == 0 and ranks % (ep * etp) == 0


def experts_run(can_run: CanRun, tp: int, ranks: int, ep: int, etp: int) -> bool:
    """Whether the framework runs this ep and etp: folded over all ranks of a stage, or tensor-parallel groups of experts that
    are those of the rest, and expert groups within what is left."""
    if can_run.folds_experts:
        return etp == 1 or can_run.splits_experts
    return etp == tp and (ranks // tp) % ep == 0


def attends_in_parts(model: ModelSpec, seq_len: int) -> bool:
    """Whether some layer's attention sees only a window or a chunk of a sequence."""
    return 0 < model.sliding_window < seq_len or 0 < model.attention_chunk_size < seq_len


def context_exchange_runs(model: ModelSpec, seq_len: int, cp_comm: str, cp: int) -> bool:
    """Whether context parallelism works: keys that pass in a ring do not meet the windows and chunks (Transformer Engine
    refuses p2p with a window)."""
    return cp == 1 or cp_comm != "ring" or not attends_in_parts(model, seq_len)


def mode_runs(model: ModelSpec, tp_mode: str, tp: int) -> bool:
    """Whether a tensor-parallel mode is described for the model.

    Experts need the sequence split (Megatron-Core asserts it); neither they nor latent attention are described under ISP.
    """
    special = model.is_mixture_of_experts or model.has_latent_attention
    if tp_mode == "isp":
        return not special
    return tp == 1 or tp_mode != "mtp" or not model.is_mixture_of_experts


def overlap_runs(overlaps: bool, pp: int, vpp: int, recompute: str) -> bool:
    """Whether the exchange of one micro batch may run beside another's compute.

    Two must be under way on a stage, and whole layers must not be recomputed (asserted in Megatron-Core's
    transformer_config.py).
    """
    return not overlaps or ((pp == 1 or vpp > 1) and recompute != "full")
