"""SimuMax's strategy file, with its model file beside it, as a model and a layout, and as what a layout is written as.

NAME.json is the strategy, NAME_model/config.json its model: SimuMax's own file, or a Hugging Face config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError
from profiler.text_file import json_object
from solver.formats.file_run import FileRun, Source, model_path
from solver.formats.model_file import model_beside
from solver.formats.simumax.configs import ModelConfig, StrategyConfig
from solver.formats.simumax.model import is_model, model_of
from solver.formats.simumax.strategy import FRAMEWORK, KEEPING, ORIGINALS, SHARDING_FRAMEWORK, layout_of
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

_MARKS = ("tp_size", "micro_batch_num")
_CONTEXT = {"ring": "p2p", "a2a": "a2a", "allgather": "all_gather"}


def is_strategy(plain: Mapping[str, Any]) -> bool:
    return any(mark in plain for mark in _MARKS)


def read_strategy(source: Source) -> FileRun:
    """Return the run of a strategy file. Raises InputError for fields and values that are not known or not modelled."""
    plain = json_object(source.text, source.path)
    beside = source.beside(model_path(source.path.stem))
    described = json_object(beside, source.path.parent / model_path(source.path.stem)) if beside is not None else {}
    other = None if is_model(described) else model_beside(source, "SimuMax's strategy holds no model")
    try:
        strategy = StrategyConfig(**plain)
        own = _experts_of(other) if other else ModelConfig(**described)
        model = other or model_of(own, strategy.tp_size)
        read = layout_of(strategy, own)
    except InputError as error:
        raise InputError(f"{source.path}: {error}") from None
    layout = {**framework_of(read.fields["framework"]).flags, **read.fields}
    if "zero" in layout and not layout["zero"]:
        layout["zero_shard_size"] = 1
    ignored = tuple(name.split(":")[0] for name in strategy.ignored)
    return FileRun(model.replace(name=source.path.stem), {**layout, "dp": strategy.dp_size}, (), ignored, read.notes)


def _experts_of(model: ModelSpec) -> ModelConfig:
    """Return what of SimuMax's model file a strategy depends on, for a model that is described otherwise."""
    kind = "mla" if model.has_latent_attention else "gqa"
    return ModelConfig(
        model_name=model.name, attention_type=kind, expert_num=max(model.num_experts, 1), moe_pad_expert_input_to_capacity=False
    )


def simumax_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of NAME.json and of its model. What they cannot say is refused when they are read again."""
    files = {f"{name}.json": _strategy(model, run), model_path(name): _model(model, run)}
    return {file: json.dumps(values, indent=1) + "\n" for file, values in files.items()}


def _strategy(model: ModelSpec, run: Strategy) -> dict[str, Any]:
    framework = framework_of(run.framework)
    memory = framework.memory
    if framework.name not in (FRAMEWORK, SHARDING_FRAMEWORK):
        raise InputError(f"the layout is {run.framework}'s; SimuMax's strategies are of {FRAMEWORK}")
    if run.cp > 1 and run.cp_comm not in _CONTEXT:
        raise InputError(f"cp_comm {run.cp_comm}: SimuMax's files do not state the sizes of its groups")
    values: dict[str, Any] = {
        "seq_len": run.seq_len,
        "micro_batch_size": run.micro_batch_size,
        "micro_batch_num": run.num_micro_batches,
        "dtype": "bf16" if run.precision == "fp8" else run.precision,
        "fp8": run.precision == "fp8",
        "world_size": run.world_size,
        "tp_size": run.tp,
        "cp_size": run.cp,
        "pp_size": run.pp,
        "ep_size": run.ep,
        "etp_size": run.etp,
        "interleaving_size": run.vpp,
        "zero_state": run.zero,
        "enable_sequence_parallel": run.tp_mode == "msp",
        "enable_dropout": run.dropout is True,
        "num_layers_in_first_pipeline_stage": run.num_layers_in_first_pipeline_stage or None,
        "num_layers_in_last_pipeline_stage": run.num_layers_in_last_pipeline_stage or None,
        "account_for_embedding_in_pipeline_split": run.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": run.account_for_loss_in_pipeline_split,
        "use_fused_norm": run.fused_norm,
        "use_flash_sdp": run.attention == "flash",
        "use_math_sdp": run.attention != "flash",
        "use_fp32_accum_grad": run.grad_dtype == "fp32",
        "grad_reduce_in_bf16": False,
        "use_fused_grad_accumulation": run.gradient_accumulation_fusion is not False,
        "te_version": ORIGINALS if memory.original_inputs else KEEPING if memory.dummy_gradients else None,
        "cross_entropy_loss_fusion": run.cross_entropy_fusion,
        "overlap_grad_reduce": run.overlap_grad_reduce,
        "pp_comm_async": run.p2p_overlap,
        **_recomputation(model, run),
    }
    if run.cp > 1:
        values["cp_comm_type"] = _CONTEXT[run.cp_comm]
    return {key: value for key, value in values.items() if value is not None}


def _recomputation(model: ModelSpec, run: Strategy) -> dict[str, Any]:
    if run.recompute == "none":
        return {"enable_recompute": False}
    layers = run.recompute_layers if run.recompute_layers >= 0 else model.num_hidden_layers  # of a stage: at most all
    level = {"enable_recompute": True, "recompute_layer_num": layers}
    if run.recompute == "full":
        return level | {"recompute_granularity": "full_block"}
    modules = list(run.modules_recomputed)
    return level | {
        "recompute_granularity": "selective_recompute",
        "megatron_recompute": True,
        "megatron_recompute_modules": modules,
    }


def _model(model: ModelSpec, run: Strategy) -> dict[str, Any]:
    latent, experts = model.has_latent_attention, model.is_mixture_of_experts
    values: dict[str, Any] = {
        "model_type": "moe" if experts else "dense",
        "model_name": model.name,
        "hidden_size": model.hidden_size,
        "head_num": model.num_attention_heads,
        "kv_head_num": model.num_key_value_heads,
        "head_size": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "layer_num": model.num_hidden_layers,
        "vocab_size": model.vocab_size,
        "use_swiglu": model.gated_mlp,
        "attention_type": "mla" if latent else "gqa",
    }
    if latent:
        values |= {
            "q_lora_rank": model.q_lora_rank,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_head_dim": model.qk_nope_head_dim,
            "qk_pos_emb_head_dim": model.qk_rope_head_dim,
            "v_head_dim": model.v_head_dim,
        }
    if experts:
        capacity = run.moe_capacity_factor
        values |= {
            "expert_num": model.num_experts,
            "topk": model.num_experts_per_tok,
            "dense_layers": model.first_k_dense_replace,
            "moe_ffn_hidden_size": model.moe_intermediate_size,
            "moe_shared_expert_intermediate_size": model.shared_expert_intermediate_size,
            "capacity": capacity or 1,
            "moe_pad_expert_input_to_capacity": capacity > 0,
            "group_linear_mode": "parallel" if run.moe_grouped_gemm else "sequential",
        }
    return values
