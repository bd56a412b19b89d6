"""A layout as a YAML file of Megatron-Bridge; what solver.formats.bridge.config reads as the same layout."""

from __future__ import annotations

import re
from typing import Any

from profiler.errors import InputError
from solver.formats.bridge.names import BACKEND, BACKENDS, INVERTED, MOMENTS, OF_THE_MODEL, OVERLAPS, SWITCHES, VALUES
from solver.formats.file_run import model_path
from solver.formats.hugging_face.export import config_json
from solver.formats.launch.torchrun import torchrun
from solver.formats.megatron.arguments import FRAMEWORK
from solver.formats.megatron.export import megatron_arguments
from solver.formats.megatron.flags import SHARDING
from solver.formats.megatron.layer_kinds import plain
from solver.formats.syntax.yaml_text import write_yaml
from solver.spec.dropout import applies_dropout
from solver.spec.layer_kinds import has_experts
from solver.spec.model import VOCAB_MULTIPLE, ModelSpec
from solver.spec.strategy import Strategy

VERSION = "Megatron-Bridge 0.2 and later"
#: Columns of gate and up projection in turn, as the fused kernels of MXFP8 experts want them (perf_recipes/qwen/common.py).
GLU_INTERLEAVED = 32
Values = dict[str, Any]


def bridge_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of NAME.yaml, and of a config.json where only the model's own recipe has all of the model.

    Raises InputError for what Megatron's arguments do not express, by name.
    """
    megatron = run.replace(
        framework=FRAMEWORK,
        tp_comm_overlap=False,
        moe_shared_expert_overlap=False,
        moe_fused_experts=False,
        fp8_attention=False,
        fp8_amax_reduction="all",
        zero=min(run.zero, 1),
        dropout=applies_dropout(model, run),
    )
    flags = {flag.lstrip("-"): value for flag, value in megatron_arguments(model, megatron, kinds=True).items()}
    comments = [
        f"{model.name} on {run.world_size} GPUs, for {VERSION}. Data and tokenizer are yours to name.",
        f"Over a recipe of a GPT model: {torchrun(run, gpus_per_node)} PRETRAIN.py --config-file {name}.yaml",
    ]
    beside: dict[str, str] = {}
    if not plain(model):  # windows are tuples, and activations functions, which a recipe of the model has
        comments.append(f"That recipe must be one of the model, as {model_path(name)} describes it.")
        beside = {model_path(name): config_json(model)}
    if run.moe_fused_experts:
        comments.append("Fused experts also need NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 in the environment.")
    sections = {
        "model": _model(model, run, flags),
        "train": {key: flags[key.replace("_", "-")] for key in ("micro_batch_size", "global_batch_size")}
        | {"train_iters": 1000},
        "dataset": {"sequence_length": run.seq_len},
        "mixed_precision": _precision(run, flags),
        "ddp": _ddp(run, flags),
        "optimizer": _optimizer(flags),
        "comm_overlap": _overlap(run, flags),
    }
    if run.zero > 1:
        sections["checkpoint"] = {"ckpt_format": "fsdp_dtensor"}  # asserted in training/config.py
    if run.cuda_graphs:
        sections["rng"] = {"te_rng_tracker": True}  # asserted in models/gpt_provider.py
    return {f"{name}.yaml": write_yaml(sections, comments), **beside}


def _model(model: ModelSpec, run: Strategy, flags: Values) -> Values:
    """Return the section model: what is not stated would be as the recipe beneath has it, so switches are stated either way."""
    found: Values = {key: flags[flag] for flag, key in VALUES.items() if flag in flags}
    found |= {key: flag in flags for flag, key in SWITCHES.items()} | {key: flag not in flags for flag, key in INVERTED.items()}
    found |= {
        "vocab_size": model.vocab_size,
        "should_pad_vocab": True,
        "num_query_groups": model.num_key_value_heads,
        "activation_func": _target(f"torch.nn.functional.{'silu' if model.gated_mlp else 'gelu'}"),
        "moe_shared_expert_overlap": run.moe_shared_expert_overlap,
        "apply_rope_fusion": run.rope_fusion is not False,
        "make_vocab_size_divisible_by": flags.get("make-vocab-size-divisible-by", VOCAB_MULTIPLE),
        "virtual_pipeline_model_parallel_size": flags.get("num-virtual-stages-per-pipeline-rank"),
        "recompute_granularity": flags.get("recompute-granularity"),
        "cpu_offloading": "cpu-offloading-num-layers" in flags,
        "attention_backend": _backend(flags["attention-backend"]),
    }
    if model.has_latent_attention:
        found.pop("num_query_groups")
    if run.moe_fused_experts:
        found |= {"use_transformer_engine_op_fuser": True, "moe_mlp_glu_interleave_size": GLU_INTERLEAVED}
    if run.fp8_amax_reduction == "tensor":
        found["tp_only_amax_red"] = True
    if "recompute-modules" in flags:
        found["recompute_modules"] = flags["recompute-modules"].split(" ")
    if "offload-modules" in flags:
        found["offload_modules"] = flags["offload-modules"].split(" ")
    if "hierarchical-context-parallel-sizes" in flags:
        found["hierarchical_context_parallel_sizes"] = [
            int(size) for size in re.findall(r"\d+", flags["hierarchical-context-parallel-sizes"])
        ]
    if model.is_mixture_of_experts:
        found["moe_router_dtype"] = None if run.moe_router_fp32 is False else "fp32"
        found["moe_layer_freq"] = [int(has_experts(model, layer)) for layer in range(model.num_hidden_layers)]
    return found if plain(model) else {key: value for key, value in found.items() if key not in OF_THE_MODEL}


def _precision(run: Strategy, flags: Values) -> Values:
    quantised = "fp8-format" in flags or "fp4-format" in flags
    found: Values = {
        "bf16": "bf16" in flags,
        "fp16": "fp16" in flags,
        "grad_reduce_in_fp32": run.grad_dtype == "fp32",
    }
    if not quantised:
        return found
    start, end = run.num_layers_at_start_in_bf16, run.num_layers_at_end_in_bf16
    found |= {
        "first_last_layers_bf16": start + end > 0,
        "num_layers_at_start_in_bf16": start,
        "num_layers_at_end_in_bf16": end,
    }
    if run.fp8_attention:
        found["fp8_dot_product_attention"] = True
    if run.precision == "nvfp4":
        return found | {"fp4": flags["fp4-format"], "fp4_recipe": "nvfp4"}
    found |= {
        "fp8": "e4m3" if run.precision == "mxfp8" else "hybrid",
        "fp8_recipe": flags["fp8-recipe"],
        "fp8_param_gather": run.fp8_param_gather,
    }
    if run.precision == "mxfp8" and run.fp8_param_gather:
        found["reuse_grad_buf_for_mxfp8_param_ag"] = True
    return found


def _ddp(run: Strategy, flags: Values) -> Values:
    """Return the section ddp. Gradients and parameters are sharded by Megatron-FSDP."""
    found: Values = {
        "use_distributed_optimizer": run.zero > 0,
        "overlap_grad_reduce": run.overlap_grad_reduce,
        "overlap_param_gather": run.overlap_param_gather and run.zero > 0,
        "grad_reduce_in_fp32": run.grad_dtype == "fp32",
        "num_distributed_optimizer_instances": flags.get("num-distributed-optimizer-instances", 1),
    }
    if run.zero > 1:
        strategy = next(word for word, stage in SHARDING.items() if stage == run.zero)
        found |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy, "average_in_collective": False}
    return found


def _optimizer(flags: Values) -> Values:
    types = {word: name for name, word in MOMENTS.items()}
    found: Values = {
        "use_distributed_optimizer": "use-distributed-optimizer" in flags,
        "use_precision_aware_optimizer": "use-precision-aware-optimizer" in flags,
        "optimizer_cpu_offload": "optimizer-cpu-offload" in flags,
    }
    for moment in ("exp-avg-dtype", "exp-avg-sq-dtype"):
        if moment in flags:
            found[moment.replace("-", "_")] = _target(types[flags[moment]])
    if "optimizer-offload-fraction" in flags:
        found["optimizer_offload_fraction"] = flags["optimizer-offload-fraction"]
    return found


def _overlap(run: Strategy, flags: Values) -> Values:
    """Return the section comm_overlap, which decides over ddp and model (CommOverlapConfig.setup)."""
    found: Values = {
        "tp_comm_overlap": run.tp_comm_overlap,
        "overlap_grad_reduce": run.overlap_grad_reduce,
        "overlap_param_gather": run.overlap_param_gather and run.zero > 0,
        "data_parallel_size": run.dp,
        **{key: flags[flag] for flag, key in OVERLAPS.items() if flag in flags},
    }
    if run.pp > 1 and run.vpp > 1:
        found |= {"overlap_p2p_comm": run.p2p_overlap, "batch_p2p_comm": not run.p2p_overlap}
    if run.tp_comm_overlap and run.tp_mode != "msp" and run.tp > 1:
        raise InputError("tp_comm_overlap with tp_mode mtp: Megatron-Bridge turns it off without sequence parallelism")
    return found


def _backend(name: str) -> Values:
    """Return how its YAML writes a member of an enumeration."""
    return {"_target_": BACKEND, "_call_": True, "_args_": [BACKENDS[name]], "_name_": name}


def _target(name: str) -> Values:
    """Return how its YAML names a type or a function of torch."""
    return {"_target_": name, "_call_": False}
