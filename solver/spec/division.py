"""What divides a model over tensor-, context- and pipeline-parallel ranks: sizes, and what a framework runs."""

from __future__ import annotations

from solver.spec.can_run import CanRun
from solver.spec.framework import Framework
from solver.spec.layer_kinds import dense_layers
from solver.spec.model import ModelSpec
from solver.spec.rules.linears import linear_divides
from solver.spec.rules.state_space import state_space_divides
from solver.spec.run import Run

#: Fewest tokens of one sequence per rank: a smaller share is not worth a split (kernels would be all launch time).
MIN_LOCAL_TOKENS = 128


def heads_divide(model: ModelSpec, tp: int) -> bool:
    """Whether tp shards the query heads evenly, and shards or (where tp exceeds them) replicates key and value heads evenly."""
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    widths = (model.intermediate_size * (dense_layers(model) > 0), model.shared_expert_intermediate_size)
    shared = kv % tp == 0 or tp % kv == 0
    divided = linear_divides(model, tp) and state_space_divides(model, tp)
    return heads % tp == 0 and shared and divided and not any(width % tp for width in widths)


def sequence_divides(seq_len: int, cp: int, split: int, least: int = MIN_LOCAL_TOKENS) -> bool:
    """Whether the sequence can be split over context- and tensor-parallel ranks.

    Context parallelism cuts a causal sequence into 2 * cp chunks; ``split`` ranks (tp, or 1 under MTP) share the rest. least:
    fewest tokens of a rank.
    """
    chunks = 2 * cp if cp > 1 else 1
    long_enough = cp * split == 1 or seq_len // (cp * split) >= least
    return seq_len % (chunks * split) == 0 and long_enough


def tensor_parallel_runs(can_run: CanRun, model: ModelSpec, tp: int) -> bool:
    """Whether the framework runs this tensor-parallel size; kv heads are sharded, or copied where it can."""
    linear = can_run.splits_linear_attention or not model.has_linear_attention
    heads = can_run.replicated_kv_heads or model.num_key_value_heads % tp == 0
    experts = can_run.experts_beside_tp or not model.is_mixture_of_experts
    return tp == 1 or (bool(can_run.tp_modes) and linear and heads and experts)


def tensor_overlap_runs(framework: Framework, run: Run, tp_mode: str, tp: int) -> bool:
    """Whether tensor parallelism overlaps as the run says: Transformer Engine's buffers are of sequence parallelism."""
    return tp == 1 or tp_mode != "mtp" or not (run.tp_comm_overlap and framework.kernels.transformer_engine)


def not_piped(can_run: CanRun, model: ModelSpec) -> str:
    """Return in words what keeps the framework from dividing this model into pipeline stages, or ""."""
    if not can_run.pipelines_qk_norm and model.qk_norm != "none":
        return "norms of q and k"
    return "" if can_run.divides_sinks or not model.attention_sinks else "attention sinks"


def context_runs(can_run: CanRun, model: ModelSpec, cp: int) -> bool:
    """Whether the framework divides the sequences of this model: not everywhere where it predicts several tokens or has
    attention sinks, and nowhere with linear attention or Mamba-2."""
    predicts = can_run.predicts_with_context or not model.num_nextn_predict_layers
    sinks = can_run.divides_sinks or not model.attention_sinks
    return cp == 1 or (predicts and sinks and not (model.has_linear_attention or model.is_hybrid))


def not_divided(model: ModelSpec) -> str:
    """Return in words what keeps the sequences of a model whole where context_runs says so."""
    if model.is_hybrid:
        return "Mamba-2" if model.has_state_space else "layers of one block"
    if model.has_linear_attention:
        return "linear attention"
    return "multi-token prediction" if model.num_nextn_predict_layers else "attention sinks"
