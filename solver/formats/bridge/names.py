"""Settings of Megatron-Bridge's YAML files by the arguments of Megatron-LM that they are, and what else the files may hold.

Sources: NVIDIA-NeMo/Megatron-Bridge src/megatron/bridge/training/config.py (commit 003e863), models/gpt_provider.py (0254ddd),
training/mixed_precision.py (0509780), training/comm_overlap.py (0685ff5), utils/yaml_utils.py
(355cef4), examples/recipes/kimi/conf/kimi_k2_pretrain_l8.yaml
(87107da); names of transformer_config.py as megatron_args.py read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver.formats.megatron.flags import LEFT_OUT, MODELLED, UNMODELLED
from solver.formats.syntax.known_keys import Described, Known, keys


def _same(words: str) -> dict[str, str]:
    """Return flag -> key of the section model, for those that differ by dashes alone."""
    return {flag: flag.replace("-", "_") for flag in words.split()}


#: Flag -> key of ``model``, with the same value.
VALUES: Mapping[str, str] = {
    **_same(
        "num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels normalization "
        "position-embedding-type vocab-size make-vocab-size-divisible-by seq-length mtp-num-layers q-lora-rank kv-lora-rank "
        "qk-head-dim qk-pos-emb-head-dim v-head-dim moe-router-topk moe-ffn-hidden-size moe-shared-expert-intermediate-size "
        "moe-router-score-function moe-router-num-groups moe-router-group-topk moe-token-dispatcher-type "
        "moe-flex-dispatcher-backend tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size "
        "expert-model-parallel-size expert-tensor-parallel-size pipeline-model-parallel-layout cp-comm-type "
        "recompute-granularity recompute-method recompute-num-layers attention-backend attention-dropout hidden-dropout "
        "cross-entropy-fusion-impl cpu-offloading-num-layers transformer-impl cuda-graph-impl cuda-graph-scope "
        "wgrad-deferral-limit experimental-attention-variant linear-conv-kernel-dim linear-key-head-dim linear-value-head-dim "
        "linear-num-key-heads linear-num-value-heads hybrid-override-pattern mamba-state-dim mamba-head-dim mamba-num-groups "
        "mamba-num-heads"
    ),
    "num-experts": "num_moe_experts",
    "microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
#: Switch -> key of ``model`` that is true with it.
SWITCHES: Mapping[str, str] = {
    **_same(
        "sequence-parallel multi-latent-attention qk-layernorm add-qkv-bias moe-router-enable-expert-bias moe-grouped-gemm "
        "moe-permute-fusion moe-router-fusion moe-router-force-load-balancing overlap-moe-expert-parallel-comm "
        "account-for-embedding-in-pipeline-split "
        "account-for-loss-in-pipeline-split cross-entropy-loss-fusion deterministic-mode delay-wgrad-compute "
        "defer-embedding-wgrad-compute fine-grained-activation-offloading attention-output-gate moe-shared-expert-gate"
    ),
    "swiglu": "gated_linear_unit",
}
#: Flag -> key of ``model`` that ``comm_overlap``, where it stands, sets to its own value of it.
OVERLAPS: Mapping[str, str] = _same(
    "overlap-moe-expert-parallel-comm delay-wgrad-compute defer-embedding-wgrad-compute wgrad-deferral-limit"
)
#: Switch -> key of ``model`` that is false with it, and true unless stated.
INVERTED: Mapping[str, str] = {
    "disable-bias-linear": "add_bias_linear",
    "untie-embeddings-and-output-weights": "share_embeddings_and_output_weights",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
}
#: Keys of ``model`` that say what is trained, and not how.
OF_THE_MODEL = frozenset((
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "normalization",
    "position_embedding_type", "vocab_size", "make_vocab_size_divisible_by", "should_pad_vocab", "mtp_num_layers",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "moe_router_topk", "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size", "moe_router_score_function", "moe_router_num_groups", "moe_router_group_topk",
    "moe_layer_freq", "num_moe_experts", "multi_latent_attention", "qk_layernorm", "add_qkv_bias",
    "moe_router_enable_expert_bias", "gated_linear_unit", "activation_func", "add_bias_linear",
    "share_embeddings_and_output_weights", "attention_output_gate", "moe_shared_expert_gate", "experimental_attention_variant",
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "hybrid_override_pattern", "is_hybrid_model", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads",
))  # fmt: skip
#: Values of GPTModelProvider that differ from the defaults of Megatron-LM's arguments.
DEFAULTS: Mapping[str, Any] = {"cross_entropy_loss_fusion": True}
#: torch's types of what the optimizer keeps -> Megatron's words.
MOMENTS: Mapping[str, str] = {
    "torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8",
}  # fmt: skip

#: Megatron-Core's enumeration of attention backends (transformer/enums.py).
BACKEND = "megatron.core.transformer.enums.AttnBackend"
BACKENDS: Mapping[str, int] = {"flash": 1, "fused": 2, "unfused": 3, "local": 4, "auto": 5}

_BF16: Mapping[str, Any] = {"bf16": True, "grad_reduce_in_fp32": True}
_ENDS: Mapping[str, Any] = {
    "first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1,
}  # fmt: skip
#: Named recipes of mixed precision.
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "bf16_mixed": _BF16,
    "fp16_mixed": {"fp16": True, "grad_reduce_in_fp32": False},
    "bf16_with_fp8_delayed_scaling_mixed": {**_BF16, "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_param_gather": True},
    "bf16_with_fp8_current_scaling_mixed": {
        **_BF16, **_ENDS, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True,
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {**_BF16, "fp8": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": {**_BF16, "fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
    "bf16_with_nvfp4_mixed": {**_BF16, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}  # fmt: skip

_NEUTRAL_MODEL = (
    "_target_ activation_func apply_rope_fusion attention_softmax_in_fp32 autocast_dtype bf16 fp16 params_dtype pipeline_dtype "
    "bias_activation_fusion bias_dropout_fusion init_method_std layernorm_epsilon masked_softmax_fusion moe_aux_loss_coeff "
    "moe_hybridep_num_sms moe_router_bias_update_rate moe_router_dtype moe_router_load_balancing_type moe_router_pre_softmax "
    "moe_router_topk_scaling_factor moe_z_loss_coeff mtp_loss_scaling_factor parallel_output persist_layer_norm rotary_base "
    "init_model_with_meta_device rotary_percent scatter_embedding_sequence_parallel use_te_rng_tracker"
)
#: Keys of ``model`` in a complete configuration that change neither memory nor time as modelled, or that other keys decide.
_NEUTRAL_COMPLETE = (
    "apply_query_key_layer_scaling async_tensor_model_parallel_allreduce barrier_with_L1_time batch_p2p_comm batch_p2p_sync "
    "calculate_per_token_loss clone_scatter_output_in_embedding config_logger_dir cpu_offloading_activations "
    "cuda_graph_retain_backward_graph cuda_graph_use_single_mempool "
    "cuda_graph_warmup_steps deallocate_pipeline_outputs disable_bf16_reduced_precision_matmul "
    "embedding_init_method_std enable_autocast factor fp4 fp4_recipe fp8 fp8_amax_compute_algo "
    "fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin fp8_multi_head_attention fp8_param fp8_recipe "
    "first_last_layers_bf16 generation_config glu_linear_offset hf_model_id high_freq_factor inference_rng_tracker "
    "inference_sampling_seed is_hybrid_model layernorm_zero_centered_gamma low_freq_factor "
    "memory_efficient_layer_norm mlp_chunks_for_prefill moe_input_jitter_eps "
    "moe_per_layer_logging moe_token_drop_policy moe_token_dropping mscale mscale_all_dim num_layers_at_end_in_bf16 "
    "num_layers_at_start_in_bf16 old_context_len perform_initialization rope_scaling rope_scaling_factor rotary_interleaved "
    "rotary_scaling_factor scale_factor seq_len_interpolation_factor softmax_scale test_mode tp_comm_bootstrap_backend "
    "use_cpu_initialization use_mamba_mem_eff_path variable_seq_lengths yarn_beta_fast yarn_beta_slow "
    "yarn_correction_range_round_to_int yarn_mscale yarn_mscale_all_dim yarn_original_max_position_embeddings "
    "yarn_rotary_scaling_factor"
)
#: Dotted keys of a complete configuration that say nothing with this value, and are named with another; of other keys that are
#: not known here, what is null, false, zero or empty says nothing.
USUAL: Mapping[str, Any] = {
    f"model.tp_comm_{part}": True for part in ("bulk_dgrad", "bulk_wgrad", "overlap_ag", "overlap_rs", "split_ag", "split_rs")
}
_TAKEN = {*VALUES.values(), *SWITCHES.values(), *INVERTED.values(), *_NEUTRAL_MODEL.split(), *_NEUTRAL_COMPLETE.split()}
#: Flag -> key of ``model`` that is named as it and means the same: of kinds of layers, of what has a small effect, and of what
#: is not modelled.
NAMED_ALIKE: Mapping[str, str] = {
    flag: key
    for flag in (
        "activation-func-clamp-value", "moe-expert-capacity-factor", "moe-layer-recompute", "moe-pad-expert-input-to-capacity",
        "linear-attention-freq", "no-rope-freq", "qk-l2-norm", "window-attn-skip-freq", "window-size", *MODELLED, *UNMODELLED,
        *LEFT_OUT,
    )
    if (key := flag.replace("-", "_")) not in _TAKEN and not (key.startswith(("no_", "disable_")) and key != "no_rope_freq")
}  # fmt: skip
KNOWN: Known = keys(
    "checkpoint peft dataset dist ft inprocess_restart logger nvrx_straggler profiling rerun_state_machine rng scheduler "
    "straggler tensor_inspect tokenizer validation",
    model=keys(
        " ".join((*_TAKEN, *NAMED_ALIKE.values())) + " cpu_offloading fp8_wgrad overlap_p2p_comm transformer_layer_spec "
        "hierarchical_context_parallel_sizes moe_enable_deepep moe_layer_freq moe_shared_expert_overlap recompute_modules "
        "offload_modules "
        "should_pad_vocab tp_comm_overlap use_te_rng_tracker enable_cuda_graph external_cuda_graph "
        "use_transformer_engine_op_fuser moe_mlp_glu_interleave_size tp_only_amax_red"
    ),
    train=keys(
        "_target_ micro_batch_size global_batch_size train_iters train_samples eval_interval eval_iters exit_interval "
        "exit_duration_in_mins "
        "manual_gc manual_gc_eval manual_gc_interval rampup_batch_size exit_signal"
    ),
    ddp=keys(
        "_target_ use_distributed_optimizer overlap_grad_reduce overlap_param_gather grad_reduce_in_fp32 average_in_collective "
        "check_for_nan_in_grad num_distributed_optimizer_instances use_megatron_fsdp data_parallel_sharding_strategy "
        "align_param_gather bucket_size check_for_large_grads fp8_param_gather delay_wgrad_compute gradient_reduce_div_fusion "
        "outer_dp_sharding_strategy preserve_fp32_weights reuse_grad_buf_for_mxfp8_param_ag keep_fp8_transpose_cache nccl_ub "
        "fsdp_double_buffer pad_buckets_for_high_nccl_busbw"
    ),
    optimizer=keys(
        "_target_ optimizer use_distributed_optimizer optimizer_cpu_offload optimizer_offload_fraction bf16 fp16 lr min_lr "
        "use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype weight_decay adam_beta1 adam_beta2 adam_eps clip_grad "
        "decoupled_weight_decay fp8_recipe hysteresis main_grads_dtype main_params_dtype initial_loss_scale loss_scale_window "
        "min_loss_scale overlap_param_gather params_dtype pin_cpu_grads pin_cpu_params reuse_grad_buf_for_mxfp8_param_ag "
        "sgd_momentum store_param_remainders"
    ),
    mixed_precision=keys(
        "_target_ bf16 fp16 params_dtype pipeline_dtype autocast_enabled grad_reduce_in_fp32 fp8 fp8_recipe fp4 "
        "fp4_recipe fp8_dot_product_attention fp8_multi_head_attention "
        "first_last_layers_bf16 fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_param fp8_param_gather "
        "num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 reuse_grad_buf_for_mxfp8_param_ag loss_scale fp8_wgrad "
        "hysteresis initial_loss_scale loss_scale_window min_loss_scale"
    ),
    comm_overlap=keys(
        "_target_ tp_comm_overlap tp_comm_overlap_cfg overlap_p2p_comm batch_p2p_comm overlap_grad_reduce overlap_param_gather "
        "overlap_moe_expert_parallel_comm delay_wgrad_compute defer_embedding_wgrad_compute wgrad_deferral_limit "
        "data_parallel_size align_param_gather bucket_size tp_comm_bootstrap_backend overlap_param_gather_with_optimizer_step"
    ),
)
#: Dotted key -> what is left out of the estimate where it is false or a number; flags that say the same are Megatron's.
LEFT_OUT_KEYS: Described = {
    "model.bias_activation_fusion": ((True, None), "the kernels of an unfused activation"),
    "model.bias_dropout_fusion": ((True, None), LEFT_OUT["no-bias-dropout-fusion"]),
    "ddp.bucket_size": ((None, 0), LEFT_OUT["ddp-bucket-size"]),
    "dist.use_tp_pp_dp_mapping": ((False, None), LEFT_OUT["use-tp-pp-dp-mapping"]),
}
_OFF = (False, None, "none")
DESCRIBED: Described = {
    "peft": ((None,), "training adapters alone"),
    "model.enable_cuda_graph": (_OFF, "the older switch of CUDA graphs (cuda_graph_impl is read)"),
    "model.external_cuda_graph": (_OFF, "the older switch of CUDA graphs (cuda_graph_impl is read)"),
    "train.rampup_batch_size": ((None,), "a batch that grows"),
    "optimizer.optimizer": (("adam",), "another optimizer than Adam under Megatron-Bridge"),
    "model.fp8_wgrad": ((True, None), "weight gradients of an fp8 run in 16 bits"),
    "dist.use_torch_fsdp2": ((False, None), "FSDP2 under Megatron-Core"),
    "ddp.outer_dp_sharding_strategy": (("no_shard",), "states that are sharded over the instances too"),
}
