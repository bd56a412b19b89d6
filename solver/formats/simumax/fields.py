"""The fields of SimuMax's model and strategy files as data: kinds of values, defaults, and what becomes of each.

A field is read, or listed (it changes neither time nor memory here), or may only have some values, because what others do is
not modelled. Source of names and defaults: MooreThreads/SimuMax, docs/strategy.md, docs/model.md and the configuration classes
of release 1.2; ``no_sync`` and ``skip_ckpt_micro_batch_num`` are of older files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

READ, LISTED = "read", "listed"


@dataclass(frozen=True)
class Field:
    """One field. kind: a key of KINDS. only: the values that may be stated (empty: any). why: of listing, or of ``only``."""

    kind: str
    default: Any = None
    use: str = READ
    only: tuple[Any, ...] = ()
    why: str = ""


#: Kind of a value -> how messages name it.
KINDS = {
    "size": "a whole number of at least 1",
    "count": "a whole number of at least 0",
    "flag": "true or false",
    "number": "a number",
    "text": "a text",
    "texts": "a list of texts",
    "object": "an object",
}

_SIZE, _NONE, _OFF, _ON = Field("size"), Field("count", 0), Field("flag", False), Field("flag", True)
_NET = Field("text", "auto", LISTED, ("auto",), "the links of a group follow from where its ranks are")

_RELEASE = Field("text", None, LISTED, why="te_version alone decides: dummy gradients are kept since Transformer Engine 2.3")


def _listed(kind: str, default: Any, why: str) -> Field:
    return Field(kind, default, LISTED, why=why)


MODEL: Mapping[str, Field] = {
    "model_name": Field("text", "model"),
    "model_type": _listed("text", None, "expert_num tells"),
    "attention_type": Field("text", "mha", only=("mha", "gqa", "mqa", "mla"), why="other kinds of attention are not modelled"),
    "hidden_size": _SIZE,
    "head_num": _SIZE,
    "kv_head_num": _SIZE,
    "head_size": _SIZE,
    "intermediate_size": _SIZE,
    "layer_num": _SIZE,
    "vocab_size": _SIZE,
    "orig_vocab_size": _SIZE,
    "use_swiglu": Field("flag", True),
    "expert_num": Field("size", 1),
    "topk": _SIZE,
    "moe_ffn_hidden_size": _SIZE,
    "moe_shared_expert_intermediate_size": _NONE,
    "dense_layers": _NONE,
    "capacity": Field("number", 1),
    "moe_pad_expert_input_to_capacity": _ON,
    "group_linear_mode": Field("text", "parallel", only=("parallel", "sequential"), why="these are the ways to run experts"),
    "v_head_dim": _NONE,
    "qk_head_dim": _NONE,
    "qk_pos_emb_head_dim": _NONE,
    "q_lora_rank": _NONE,
    "kv_lora_rank": _NONE,
    "make_vocab_size_divisible_by": Field("size", 128),
    "padded_vocab_size": _ON,
}

STRATEGY: Mapping[str, Field] = {
    "seq_len": _SIZE,
    "micro_batch_size": _SIZE,
    "micro_batch_num": _SIZE,
    "dtype": Field("text", "bf16", only=("bf16", "fp16", "fp32"), why="these are the number formats of weights"),
    "fp8": _OFF,
    "world_size": Field("size", 8),
    "tp_size": Field("size", 1),
    "cp_size": Field("size", 1),
    "pp_size": Field("size", 1),
    "ep_size": Field("size", 1),
    "etp_size": Field("size", 1),
    "cp_comm_type": Field(
        "text",
        "a2a",
        only=("a2a", "p2p", "ring", "all_gather", "allgather"),
        why="a hierarchical exchange needs two sizes, which the file does not state",
    ),
    "cp_a2a_mode": Field("text", "async_cp", LISTED, ("async_cp", "sync_cp"), "exchanges of heads are priced in full"),
    "order_of_paralielism": Field("text", "tp-cp-ep-dp-pp", LISTED, ("tp-cp-ep-dp-pp",), "ranks are numbered in this order"),
    "moe_dispatcher_policy": Field("text", "all2all", only=("all2all", "all2all-seq"), why="SimuMax has no other"),
    "num_layers_in_first_pipeline_stage": _NONE,
    "num_layers_in_last_pipeline_stage": _NONE,
    "account_for_embedding_in_pipeline_split": _OFF,
    "account_for_loss_in_pipeline_split": _OFF,
    "grad_reduce_in_bf16": _OFF,
    "use_fp32_accum_grad": _ON,
    "cache_groupgemm_col_fp8_inputs": Field("flag", False, LISTED, (False,), "keeping quantised inputs twice is not modelled"),
    "offload_groupgemm_col_inputs": Field("flag", False, LISTED, (False,), "experts' inputs on the host are not modelled"),
    "enable_sequence_parallel": _ON,
    "interleaving_size": Field("size", 1),
    "microbatch_group_size_per_vp_stage": _SIZE,
    "pp_schedule": Field("text", "1f1b", LISTED, ("1f1b",), "Megatron-Core runs 1F1B, and interleaves it"),
    "pp_comm_async": _ON,
    "enable_straggler_model": _listed("flag", True, "waiting for the slowest rank is priced by this program's own law"),
    "zero_state": Field("count", 1, only=(0, 1, 2, 3), why="ZeRO has these stages"),
    "attention_sparse_ratio": Field("number", 0.0, LISTED, (0, 0.0), "attention is priced as its causal kernels run"),
    "enable_dropout": _OFF,
    "use_accm_weight": _ON,
    "use_fused_grad_accumulation": _ON,
    "enable_recompute": _ON,
    "recompute_granularity": Field(
        "text",
        None,
        only=("full_block", "attn_only", "mlp_only", "sdp_only", "selective_recompute"),
        why="SimuMax has no other",
    ),
    "recompute_layer_num": _NONE,
    "attn_recompute": _OFF,
    "mla_rms_recompute": _OFF,
    "mlp_recompute": _OFF,
    "mlp_rms_recompute": _OFF,
    "recompute_variance": _listed("flag", False, "what the backward pass needs of a module is recomputed, and no more"),
    "megatron_recompute": _OFF,
    "megatron_recompute_modules": Field("texts"),
    "use_flash_sdp": _ON,
    "use_math_sdp": _OFF,
    "use_fused_norm": _ON,
    "use_fused_swiglu": Field("flag", True, LISTED, (True,), "Megatron-Core fuses the gated activation"),
    "cross_entropy_loss_fusion": _OFF,
    "overlap_grad_reduce": _OFF,
    "te_version": Field("text"),
    **dict.fromkeys(
        ("te_dummy_wgrad_min_version", "te_cp_a2a_save_pre_posta2a_min_version", "te_grouped_linear_dummy_wgrad_min_version"),
        _RELEASE,
    ),
    **dict.fromkeys(("tp_net", "cp_net", "pp_net", "dp_net", "ep_net", "etp_net", "edp_net"), _NET),
    "dispatch_probs": _listed("flag", False, "experts' activations take in the probabilities, as since Megatron-Core 0.13"),
    "mem_factor": Field("number", 0.94),
    "no_sync": Field("flag", True, LISTED, (True,), "gradients are reduced once a step"),
    "skip_ckpt_micro_batch_num": Field("count", 0, LISTED, (0,), "every micro batch recomputes as much"),
}

SYSTEM: Mapping[str, Field] = {
    "sys_name": Field("text", "system"),
    "num_per_node": Field("size", 8),
    "accelerator": Field("object"),
    "networks": Field("object"),
    "FC8": _OFF,
    "intra_with_pcie": _OFF,
}
