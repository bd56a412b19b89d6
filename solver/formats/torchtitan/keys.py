"""Keys of torchtitan's TOML files: their tables by release, what they mean here, and what is not modelled.

Sources: pytorch/torchtitan torchtitan/config_manager.py (commit 0011fb9, late 2024) with the presets of train_configs, and
torchtitan/config/job_config.py (000204a, mid 2025) with those of models/llama3/train_configs; job_config.py and
distributed/pipeline_parallel.py of the wheel 0.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from solver.formats.syntax.known_keys import Described, Known, keys


@dataclass(frozen=True)
class Release:
    """A release of torchtitan: its name here, what it calls itself, and where its settings stand.

    ranks, pipeline: tables of the sizes of data and tensor parallelism, and of pipeline and context parallelism. batch: key of
    the sequences of a rank. flavors: (model, flavor) -> a model that is shipped here. year: settings stand in other tables, and
    layers are divided otherwise, from 2025 and from 2026 on. converters: names of quantisations.
    """

    framework: str
    version: str
    ranks: str
    pipeline: str
    batch: str
    known: Known
    described: Described
    flavors: Mapping[tuple[str, str], str]
    schedules: Mapping[str, str]
    year: int
    converters: Mapping[str, str] = field(default_factory=lambda: {"float8": "fp8", "mx": "mxfp8"})


_JOB = keys("config_file dump_folder description use_for_integration_test print_args")
_PROFILING = keys(
    "enable_profiling save_traces_folder profile_freq enable_memory_snapshot save_memory_snapshot_folder profiler_active "
    "profiler_warmup"
)
_METRICS = keys(
    "log_freq enable_tensorboard disable_color_printing enable_color_printing save_tb_folder save_for_all_ranks rank_0_only "
    "enable_wandb"
)
_CHECKPOINT = keys(
    "enable_checkpoint enable folder initial_load_path initial_load_model_only interval interval_type last_save_model_only "
    "model_weights_only export_dtype create_seed_checkpoint async_mode keep_latest_k load_step exclude_from_loading "
    "enable_first_step_checkpoint last_save_in_hf enable_ft_dataloader_checkpoints initial_load_in_hf "
    "initial_load_in_hf_quantized initial_load_dequantize load_only"
)
_COMM = keys("init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder")
_RANKS = "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree"
_PIPELINE = (
    "pipeline_parallel_degree pipeline_parallel_split_points pipeline_parallel_schedule enable_async_tensor_parallel "
    "context_parallel_degree context_parallel_rotate_method enable_compiled_autograd"
)
_TRAINING = "dataset dataset_path seq_len max_norm steps mixed_precision_param mixed_precision_reduce compile gc_freq seed"
_ESTIMATION = keys("enable enabled disable_fake_mode")

#: As torch.distributed.pipelining spells them (get_schedule_class takes any case).
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
_OFF = (False,)
_COMMON: Described = {
    "training.mixed_precision_reduce": (
        ("float32",),
        "reduction in fewer bits, which torchtitan does not offer (job_config.py),",
    ),
    "memory_estimation.enabled": (_OFF, "a run that only estimates"),
    "memory_estimation.enable": (_OFF, "a run that only estimates"),
}
_LLAMA3 = {("llama3", "8B"): "llama3_8b", ("llama3", "70B"): "llama3_70b", ("llama3", "405B"): "llama3_405b"}

R2025 = Release(
    framework="torchtitan-2025-06",
    year=2025,
    version="torchtitan 0.1 (June 2025)",
    ranks="parallelism",
    pipeline="parallelism",
    batch="local_batch_size",
    known=keys(
        "",
        job=_JOB,
        profiling=_PROFILING,
        metrics=_METRICS,
        checkpoint=_CHECKPOINT,
        comm=_COMM,
        memory_estimation=_ESTIMATION,
        model=keys("name flavor tokenizer_path hf_assets_path converters print_after_conversion"),
        optimizer=keys("name lr beta1 beta2 eps weight_decay implementation early_step_in_backward"),
        lr_scheduler=keys("warmup_steps decay_ratio decay_type lr_min min_lr_factor"),
        training=keys(f"{_TRAINING} local_batch_size global_batch_size enable_cpu_offload gc_debug deterministic"),
        parallelism=keys(
            f"{_RANKS} {_PIPELINE} fsdp_reshard_after_forward disable_loss_parallel pipeline_parallel_layers_per_stage "
            "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size expert_parallel_degree"
        ),
        activation_checkpoint=keys("mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop"),
        float8=keys(
            "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp force_recompute_fp8_weight_in_bwd "
            "recipe_name filter_fqns emulate moe_fqns_prototype"
        ),
        mx=keys("mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns"),
        compile=keys("enable components"),
        fault_tolerance=keys(
            "enable process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method sync_steps "
            "should_quantize fragment_sync_delay fragment_update_alpha"
        ),
        experimental=keys("custom_import custom_args_module"),
        validation=keys("enable enabled dataset dataset_path local_batch_size seq_len freq steps dataloader"),
    ),
    described={
        **_COMMON,
        "training.enable_cpu_offload": (_OFF, "parameters on the host"),
        "parallelism.enable_compiled_autograd": (_OFF, "a compiled backward pass"),
        "parallelism.disable_loss_parallel": (_OFF, "a loss on whole logits"),
        "parallelism.pipeline_parallel_schedule_csv": (("",), "a schedule of one's own"),
        "parallelism.expert_parallel_degree": ((1,), "a mixture of experts under torchtitan"),
        "optimizer.name": (("AdamW", "Adam"), "another optimizer"),
        "optimizer.implementation": (("fused",), "an optimizer of several kernels"),
        "optimizer.early_step_in_backward": (_OFF, "an update within the backward pass"),
        "mx.recipe_name": (("mxfp8",), "another recipe"),
        "float8.emulate": (_OFF, "emulated fp8"),
        "fault_tolerance.enable": (_OFF, "fault tolerance"),
    },
    flavors=_LLAMA3,
    schedules=_SCHEDULES,
)

R2024 = Release(
    framework="torchtitan-2024-12",
    version="torchtitan of December 2024",
    ranks="training",
    pipeline="experimental",
    batch="batch_size",
    known=keys(
        "",
        job=_JOB,
        profiling=_PROFILING,
        metrics=_METRICS,
        checkpoint=_CHECKPOINT,
        comm=_COMM,
        memory_estimation=_ESTIMATION,
        model=keys("name flavor norm_type tokenizer_path"),
        optimizer=keys("name lr fused"),
        training=keys(f"{_TRAINING} {_RANKS} batch_size warmup_steps enable_loss_parallel deterministic"),
        experimental=keys(f"{_PIPELINE} pipeline_parallel_microbatches"),
        activation_checkpoint=keys("mode selective_ac_option"),
        float8=keys(
            "enable_float8_linear enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp scaling_type_input "
            "scaling_type_weight scaling_type_grad_output"
        ),
    ),
    described={
        **_COMMON,
        "experimental.enable_compiled_autograd": (_OFF, "a compiled backward pass"),
        "training.enable_loss_parallel": ((True,), "a loss on whole logits"),
        "model.norm_type": (("rmsnorm", "fused_rmsnorm"), "another norm"),
        "optimizer.name": (("AdamW", "Adam"), "another optimizer"),
        "optimizer.fused": (_OFF, "a fused optimizer in this release"),
        "float8.scaling_type_input": (("dynamic",), "delayed scaling"),
        "float8.scaling_type_weight": (("dynamic",), "delayed scaling"),
        "float8.scaling_type_grad_output": (("dynamic",), "delayed scaling"),
    },
    year=2024,
    flavors=_LLAMA3 | {("llama2", size): f"llama2_{size.lower()}" for size in ("7B", "13B", "70B")},
    schedules=_SCHEDULES,
)

HEAD_APART = {"filter_fqns": ["output"]}  #: the head stays in 16 bits
_QWEN3 = {
    ("qwen3", size): f"qwen3_{size.lower().replace('-', '_').replace('.', '_')}"
    for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B")
}
#: Of models/deepseek_v3/__init__.py; none has modules of multi-token prediction.
_DEEPSEEK = {
    ("deepseek_v3", size): name
    for size, name in {"16B": "deepseek_v2_lite", "236B": "deepseek_v2", "671B": "deepseek_v3"}.items()
}
_GPT_OSS = {("gpt_oss", size): f"gpt_oss_{size}" for size in ("20b", "120b")}
#: Of models/llama4/__init__.py: with chunks and layers without rotary embedding (irope), and without.
_LLAMA4 = {
    ("llama4", f"{size}{kind}"): name
    for size, name in {"17bx16e": "llama4_scout", "17bx128e": "llama4_maverick"}.items()
    for kind in ("", "_irope")
}
#: Endings of flavors, or names of models, that have torch's FlexAttention.
FLEX_FLAVORS = ("_flex", "_irope")
_FLEX_MODELS = ("deepseek_v3", "gpt_oss")
VARLEN_FLAVOR = "_varlen"  #: ending of those with variable-length FlashAttention


def attention_kernels(name: str, flavor: str) -> str:
    """Return whose kernels a flavor's attention has where they are not scaled_dot_product_attention's; else ""."""
    flex = name in _FLEX_MODELS or flavor.endswith(FLEX_FLAVORS)
    return "FlexAttention's" if flex else "variable-length FlashAttention's" * flavor.endswith(VARLEN_FLAVOR)


_FLOAT8 = "enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name filter_fqns emulate"
_LINEAR = {"float8": keys(_FLOAT8), "mx": keys("mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns")}
R2026 = Release(
    framework="torchtitan-2026-02",
    version="torchtitan 0.2.2 (February 2026)",
    ranks="parallelism",
    pipeline="parallelism",
    batch="local_batch_size",
    known={
        **{table: known for table, known in R2025.known.items() if table not in ("float8", "mx")},
        "job": keys("config_file dump_folder description print_args print_config save_config_file custom_config_module"),
        "model": keys("name flavor hf_assets_path tokenizer_path converters print_after_conversion"),
        "lr_scheduler": keys("warmup_steps total_steps decay_ratio decay_type min_lr_factor"),
        "training": keys(
            "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype "
            "mixed_precision_param mixed_precision_reduce gc_freq gc_debug dataloader"
        ),
        "parallelism": keys(
            f"{_RANKS} fsdp_reshard_after_forward disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree "
            "module_fqns_per_model_part pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
            "pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv "
            "pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap context_parallel_degree "
            "context_parallel_load_balancer context_parallel_rotate_method expert_parallel_degree "
            "expert_tensor_parallel_degree expert_parallel_comm_backend"
        ),
        "activation_checkpoint": keys(
            "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget "
            "visualize_memory_budget_pareto preserve_rng_state determinism_check debug"
        ),
        "compile": keys("enable components backend"),
        "quantize": keys(
            "",
            linear=_LINEAR,
            grouped_mm={"float8": keys("fqns"), "mx": keys("recipe_name fqns")},
        ),
        "debug": keys("seed deterministic deterministic_warn_only moe_force_load_balance print_config save_config_file"),
        "comm": {**_COMM, **keys("save_traces_file_prefix mode")},
    },
    described={
        **{
            key: rule
            for key, rule in R2025.described.items()
            if key.split(".")[0] not in ("mx", "float8")
            and key not in ("parallelism.expert_parallel_degree", "parallelism.enable_compiled_autograd")
        },
        "training.dtype": (("float32",), "weights and optimizer states in 16 bits"),
        "parallelism.context_parallel_load_balancer": (("headtail",), "another order of the sequence"),
        "parallelism.expert_tensor_parallel_degree": ((1,), "tensor parallelism within experts under torchtitan"),
        "activation_checkpoint.early_stop": (_OFF, "recomputation that stops early, in this release,"),
        "quantize.linear.float8.emulate": (_OFF, "emulated fp8"),
        "quantize.linear.mx.recipe_name": (("mxfp8_cublas",), "another recipe"),
        "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
            ([], ["moe.router.gate"]),
            "recomputation of GEMMs by their shapes",
        ),
        "compile.backend": (("inductor",), "another compiler"),
    },
    flavors=_LLAMA3
    | _QWEN3
    | _DEEPSEEK
    | _GPT_OSS
    | _LLAMA4
    | {("llama3", f"8B_{kind}"): "llama3_8b" for kind in ("flex", "varlen")},
    schedules=_SCHEDULES,
    year=2026,
    converters={"quantize.linear.float8": "fp8", "quantize.linear.mx": "mxfp8"},
)

RELEASES = (R2026, R2025, R2024)
