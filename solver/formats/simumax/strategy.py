"""SimuMax's strategy file as the fields of a layout run by Megatron-Core."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.simumax.configs import ModelConfig, StrategyConfig
from solver.formats.simumax.recompute import recompute_of

#: What runs the layout. ZeRO-2 and ZeRO-3 are not in Megatron-Core's distributed optimizer, but in Megatron FSDP.
FRAMEWORK, SHARDING_FRAMEWORK = "megatron-core-0.12", "megatron-bridge-25"
KEEPING, FREEING = "2.3.0", "2.2"  #: the first Transformer Engine that keeps dummy gradients, and the last that does not
ORIGINALS = "2.6.0"  #: the first with save_original_input
_SIZES = {
    "seq_len": "seq_len",
    "world_size": "world_size",
    "tp_size": "tp",
    "cp_size": "cp",
    "pp_size": "pp",
    "micro_batch_size": "micro_batch_size",
    "micro_batch_num": "num_micro_batches",
    "interleaving_size": "vpp",
    "zero_state": "zero",
    "num_layers_in_first_pipeline_stage": "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage": "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
    "use_fused_norm": "fused_norm",
    "enable_dropout": "dropout",
    "pp_comm_async": "p2p_overlap",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "cross_entropy_loss_fusion": "cross_entropy_fusion",
}
_CONTEXT = {"a2a": "a2a", "p2p": "ring", "ring": "ring", "all_gather": "allgather", "allgather": "allgather"}


@dataclass(frozen=True)
class LayoutRead:
    """A layout. fields: Strategy field names -> values. notes: what is priced otherwise than the file may mean, in words."""

    fields: dict[str, Any]
    notes: tuple[str, ...]


def layout_of(config: StrategyConfig, model: ModelConfig) -> LayoutRead:
    """Return the layout of a strategy for a model, whose file says how experts run.

    Raises InputError for a field that is missing, and for a combination that is not modelled.
    """
    _check(config)
    sharded = config.zero_state > 1
    fields = {ours: getattr(config, theirs) for theirs, ours in _SIZES.items()}
    fields |= {
        "framework": f"{SHARDING_FRAMEWORK if sharded else FRAMEWORK}{_engine(config)}",
        "zero_shard_size": -1 if config.zero_state else 1,  # all ranks that hold the same parameters
        "tp_mode": "msp" if config.enable_sequence_parallel and config.tp_size > 1 else "mtp",
        "cp_comm": _CONTEXT[config.cp_comm_type],
        "precision": "fp8" if config.fp8 else config.dtype,
        "grad_dtype": "bf16" if config.grad_reduce_in_bf16 or not config.use_fp32_accum_grad else "fp32",
        "attention": "flash" if config.use_flash_sdp and not config.use_math_sdp else "unfused",
        "gradient_accumulation_fusion": config.use_fused_grad_accumulation and config.use_accm_weight,
        "cross_entropy_fusion_impl": "te",
        "overlap_param_gather": False,  # SimuMax has no such switch, and the runs behind its accuracy had it off
        "tp_comm_overlap": False,
    }
    recompute, notes = recompute_of(config, model)
    fields |= recompute
    if sharded:
        notes = (*notes, f"zero_state {config.zero_state} is run by Megatron FSDP, for Megatron-Core shards the optimizer only")
    if model.has_experts:
        fields |= _experts(config, model)
        if not config.dispatch_probs:
            notes = (*notes, "dispatch_probs false is priced as true: probabilities are applied in the experts' activation")
    elif config.ep_size > 1:  # etp_size splits nothing either, but files state it as tp_size
        raise InputError(f"strategy field ep_size is {config.ep_size}, but model {model.model_name} has no experts")
    return LayoutRead(fields, notes)


def _check(config: StrategyConfig) -> None:
    """Raise InputError for what is missing, and for sizes that are not modelled."""
    missing = [name for name in ("seq_len", "micro_batch_size", "micro_batch_num") if getattr(config, name) is None]
    if missing:
        raise InputError(
            f"strategy field {missing[0]} is missing; a strategy states seq_len, micro_batch_size, micro_batch_num"
        )
    group = config.microbatch_group_size_per_vp_stage
    if config.interleaving_size > 1 and group not in (None, config.pp_size):
        raise InputError(
            f"strategy field microbatch_group_size_per_vp_stage is {shown(group)}, which is not modelled: interleaving takes "
            f"micro batches in groups of pp_size; it must be {config.pp_size}"
        )
    if not 0 < config.mem_factor <= 1:
        raise InputError(f"strategy field mem_factor is {config.mem_factor:g}; it must be above 0 and at most 1")


def _engine(config: StrategyConfig) -> str:
    """Return what the name of a framework says of its release of Transformer Engine: one that the file states, or, as SimuMax
    has it, one that keeps no dummy gradients."""
    if config.te_version is None:
        return f", transformer-engine {FREEING}"
    release = re.match(r"v?(\d{1,3}\.\d{1,3})", config.te_version)
    if not release:
        raise InputError(f"strategy field te_version is {shown(config.te_version)}; it must be a release such as 2.11.0")
    return f", transformer-engine {release[1]}"


def _experts(config: StrategyConfig, model: ModelConfig) -> dict[str, Any]:
    padded = model.moe_pad_expert_input_to_capacity
    if padded and not model.capacity:
        raise InputError("model field capacity is 0; it must be positive where moe_pad_expert_input_to_capacity is true")
    return {
        "ep": config.ep_size,
        "etp": config.etp_size,
        "moe_dispatcher": "alltoall",
        "moe_capacity_factor": float(model.capacity) if padded else 0.0,
        "moe_grouped_gemm": model.group_linear_mode == "parallel",
    }
