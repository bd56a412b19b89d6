"""Settings of DeepSpeed's JSON and arguments of Megatron-DeepSpeed, by what they mean here.

Sources: microsoft/DeepSpeed deepspeed/runtime/zero/config.py (commit 03dc2b9) and runtime/config.py, as far as the latter is
documented; microsoft/Megatron-DeepSpeed examples_deepspeed/pretrain_llama2_distributed.sh (b644fba) and megatron/arguments.py,
bigscience-workshop/Megatron-DeepSpeed train/176B_test.sh and megatron/arguments.py. Its other arguments are those of
Megatron-LM, whose fork it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver.formats.syntax.known_keys import Described, Known, keys

FRAMEWORK = "megatron-deepspeed"
TRAINERS = "transformers-deepspeed"  #: framework of settings whose script is transformers' trainer, or that have no script
AUTO = "auto"  #: a value that transformers' Trainer fills in from its own arguments
PRECISIONS = ("bf16", "fp16")
#: Values of normalization and of data_types.grad_accum_dtype.
NORMS: Mapping[str, str] = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
GRADIENTS = ("fp32", "bf16", "fp16")

KNOWN: Known = keys(
    "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer scheduler "
    "steps_per_print wall_clock_breakdown dump_state prescale_gradients gradient_predivide_factor "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer flops_profiler tensorboard wandb csv_monitor comms_logger "
    "communication_data_type sparse_gradients activation_checkpointing aio _comment curriculum_learning",
    amp=keys("enabled opt_level"),
    bf16=keys(
        "enabled auto_cast immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
    ),
    tensor_parallel=keys("autotp_size tp_overlap_comm vocab_parallel_lm_head preset_model partition_config dtype tp"),
    fp16=keys(
        "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale"
    ),
    data_types=keys("grad_accum_dtype"),
    zero_optimization=keys(
        "stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
        "allgather_bucket_size overlap_comm load_from_fp32_weights sub_group_size round_robin_gradients "
        "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save ignore_unused_parameters zero_hpz_partition_size zero_quantized_weights "
        "zero_quantized_gradients mics_shard_size memory_efficient_linear",
        offload_optimizer=keys("device pin_memory buffer_count fast_init ratio nvme_path pipeline_read pipeline_write"),
        offload_param=keys("device pin_memory buffer_count buffer_size max_in_cpu nvme_path"),
    ),
)
_OFF, _NONE = (False,), ("none", None)
_ADAM = ("Adam", "AdamW", "FusedAdam", "adam", "adamw", AUTO)
DESCRIBED: Described = {
    "optimizer.type": (_ADAM, "another optimizer"),
    "communication_data_type": ((None, AUTO, "fp16", "bf16", "bfp16"), "a reduction in other numbers than the passes'"),
    "activation_checkpointing.partition_activations": (_OFF, "checkpoints that ranks share"),
    "activation_checkpointing.cpu_checkpointing": (_OFF, "checkpoints on the host"),
    "zero_optimization.reduce_scatter": ((True, AUTO), "an all-reduce of all gradients"),
    "zero_optimization.zero_hpz_partition_size": ((1,), "a second partition of the weights"),
    "zero_optimization.zero_quantized_weights": (_OFF, "quantised all-gathers"),
    "zero_optimization.zero_quantized_gradients": (_OFF, "quantised reductions"),
    "zero_optimization.mics_shard_size": ((-1,), "sharding over some ranks"),
    "zero_optimization.offload_param.device": (_NONE, "parameters on the host"),
    "sparse_gradients": (_OFF, "sparse gradients"),
    "curriculum_learning.enabled": (_OFF, "sequences that grow during training"),
    "amp.enabled": (_OFF, "apex's mixed precision"),
    "bf16.bf16_master_weights_and_grads": (_OFF, "master weights in 16 bits"),
    "bf16.bf16_optimizer_states": (_OFF, "an optimizer's states in 16 bits"),
    "tensor_parallel.autotp_size": ((0, 1), "tensor parallelism of DeepSpeed"),
}

#: Keys of zero_optimization that may stand without this prefix (zero/config.py: populate_by_name).
STAGE_3 = "stage3_"
STAGE_3_FIELDS = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
)
#: Switches of Megatron-DeepSpeed -> Megatron-LM's argument and value.
SWITCHES: Mapping[str, tuple[str, str]] = {
    "use-rotary-position-embeddings": ("position-embedding-type", "rope"),
    "use-flash-attn-v2": ("attention-backend", "flash"),
    "use-flash-attn": ("attention-backend", "flash"),
    "checkpoint-activations": ("recompute-granularity", "full"),
}
#: Arguments of Megatron-DeepSpeed -> Megatron-LM's of the same value.
RENAMED: Mapping[str, str] = {"pad-vocab-size-to": "padded-vocab-size"}
#: --pp-partition-method with which both embeddings, which are one table, count as layers: stages are of as many.
ENDS_COUNT = "type:transformer|embedding"
#: Arguments whose effect is not modelled, with the values that change nothing and what others do.
NOT_MODELLED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "moe-expert-parallel-size": ((1,), "mixtures of experts of DeepSpeed"),
    "num-experts": ((1, "1"), "mixtures of experts of DeepSpeed"),
    "ds-sequence-parallel-size": ((1,), "sequence parallelism of DeepSpeed"),
    "partition-activations": ((), "checkpoints that ranks share"),
    "checkpoint-in-cpu": ((), "checkpoints on the host"),
    "curriculum-learning": ((), "sequences that grow during training"),
    "random-ltd": ((), "tokens that layers drop"),
    "data-efficiency-curriculum-learning": ((), "sequences that grow during training"),
    "pp-partition-method": (("type:transformer", ENDS_COUNT), "another assignment of layers to stages"),
}
#: Those of Megatron-DeepSpeed's own whose values nothing here depends on: they may be the environment's.
PATHS_AND_COUNTS = keys(
    "deepspeed_config lr-decay-tokens lr-warmup-tokens train-tokens log-path codecarbon-dir kill-switch-path "
    "universal-checkpoint skip-train-iteration-range tokenizer-name-or-path train-weighted-split-paths "
    "train-weighted-split-paths-path valid-weighted-split-paths valid-weighted-split-paths-path test-weighted-split-paths "
    "test-weighted-split-paths-path"
)
#: Arguments that are read elsewhere, that DeepSpeed's JSON overrides, or that change neither memory nor time.
OWN = keys(
    "deepspeed deepspeed_config deepspeed_mpi zero-stage deepspeed-activation-checkpointing no-pipeline-parallel data-impl "
    "cpu-optimizer rotary-position-embeddings-theta layernorm-epsilon no-query-key-layer-scaling "
    "zero-contigious-gradients zero-reduce-scatter zero-reduce-bucket-size zero-allgather-bucket-size contigious-checkpointing "
    "synchronize-each-layer lr-decay-tokens lr-warmup-tokens train-tokens override-lr-scheduler use-checkpoint-lr-scheduler "
    "log-batch-size-to-tensorboard log-optimizer-states-to-tensorboard log-path log-level log-level-replica codecarbon-dir "
    "reset-progress kill-switch-path universal-checkpoint abort-on-unmet-fused-kernel-constraints no-load-lr-state "
    "skip-train-iteration-range moe-loss-coeff moe-train-capacity-factor moe-eval-capacity-factor moe-min-capacity "
    "create-moe-param-group mlp-type topk disable-moe-token-dropping tokenizer-name-or-path valid-num-workers "
    "train-weighted-split-paths train-weighted-split-paths-path valid-weighted-split-paths valid-weighted-split-paths-path "
    "test-weighted-split-paths test-weighted-split-paths-path"
)
#: Parameters of a bucket of gradients unless a file states them (zero/config.py), and the fewest with which the size of
#: buckets is of little effect.
BUCKET, LEAST_BUCKET = 500_000_000, 10_000_000
