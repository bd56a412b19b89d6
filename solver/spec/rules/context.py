"""Rules of context parallelism: with which exchange attention is divided, and what its all-to-alls divide."""

from __future__ import annotations

from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.run import Run


def context_exchange_broken(model: ModelSpec, run: Run) -> str:
    """Return what the exchange of context parallelism does not work with, and what does instead; "" where it works.

    Keys that pass in a ring do not meet windows and chunks (Transformer Engine refuses p2p with a window; torch's is a ring by
    any method), and a release exchanges packed documents in some ways only. Transformer Engine asserts a ring, or one across
    all-to-alls, for latent attention, and all-to-alls for attention sinks (context_parallel.py, attn_forward_func_with_cp).
    Attention of plain kernels is not divided: get_attention_backend there turns it off, and Megatron's own asserts cp 1.
    """
    framework = framework_of(run.framework)
    if run.attention == "unfused":
        return "with attention unfused; use attention flash, or cp 1"
    packed = framework.can_run.packed_exchanges
    if run.document_tokens and run.cp_comm not in packed:
        instead = f"cp_comm {' or '.join(packed)}" if packed else "cp 1"
        return f"with packed documents under {run.framework}; use {instead}"
    if run.fp8_attention and run.cp_comm == "allgather":
        return "with fp8_attention; use cp_comm ring or a2a"
    in_parts = 0 < model.sliding_window < run.seq_len or 0 < model.attention_chunk_size < run.seq_len
    if in_parts and ("ring" in run.cp_comm or framework.kernels.torch_context_parallel):
        instead = "a2a" if model.attention_sinks else "a2a or allgather"
        return f"with windows and chunks, which {framework.name}'s ring attention does not have; use cp_comm {instead}"
    if framework.kernels.transformer_engine and model.has_latent_attention and "ring" not in run.cp_comm:
        return "with latent attention under Transformer Engine; use cp_comm ring"
    if framework.kernels.transformer_engine and model.attention_sinks and run.cp_comm != "a2a":
        return "with attention sinks under Transformer Engine; use cp_comm a2a"
    return ""


def heads_divide_by_cp(model: ModelSpec, run: Run, tp: int, cp: int) -> bool:
    """Whether all-to-alls of context parallelism can share a tensor rank's heads over their ranks: those of queries and of keys
    and values, as Transformer Engine asserts."""
    shared = run.cp_a2a_size if run.cp_comm == "a2a+ring" else cp if run.cp_comm == "a2a" else 1
    return cp == 1 or (cp % shared == 0 and all(heads % shared == 0 for heads in heads_of_rank(model, tp)))


def heads_of_rank(model: ModelSpec, tp: int) -> tuple[int, int]:
    """Return the heads of queries, and of keys and values, that attention has on a rank of a tensor group: latent attention
    is expanded to all of them."""
    kv_heads = model.num_attention_heads if model.has_latent_attention else model.num_key_value_heads
    return max(model.num_attention_heads // tp, 1), max(kv_heads // tp, 1)
