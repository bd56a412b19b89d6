"""Keys that InternEvo's Python configuration files may hold, by section (from its shipped configs and launch checks)."""

from __future__ import annotations

from solver.formats.syntax.known_keys import Described, Known, keys

_SIZED = keys("size overlap memory_pool launch_allgather_before forward_overlap_per no_tp")

#: Top-level names and, below them, the keys of each section.
KNOWN: Known = keys(
    "JOB_NAME model_type DO_ALERT use_fp32_norm cudnn_deterministic cudnn_benchmark use_apex_adam "
    "metric_dtype enable_tb tensorboard_folder resume_tb_folder batch_count selective_checkpoint "
    "selective_checkpoint_offload cpu_offloading hf fsdp_wrap_cls pad_token_id generation",
    ckpt=keys(
        "enable_save_ckpt save_ckpt_folder load_ckpt_folder load_ckpt_info load_model_only_folder load_optimizer "
        "auto_resume checkpoint_every async_upload async_upload_tmp_folder oss_snapshot_freq snapshot_ckpt_folder "
        "stop_file_path universal_ckpt enable_internevo2hf_ckpt need_metadata"
    ),
    data=keys(
        "type seq_len micro_num micro_bsz valid_micro_num valid_every pack_sample_into_one total_steps "
        "skip_batches rampup_batch_size min_length train_folder valid_folder empty_cache_and_diag_interval "
        "diag_outlier_ratio packed_length batch_size gradient_accumulation fixed_random_dataset_seqlen "
        "use_packed_dataset tokenizer_path tokenizer_chat_template use_shm shm_path data_yaml base_path "
        "num_worker unit_schedule_size random_dataset_len train_one_epoch text_field is_multimodal "
        "dataset_weights dataset_type_ids_map break_mode"
    ),
    grad_scaler=keys("fp16 growth_factor backoff_factor max_scale hysteresis"),
    hybrid_zero_optimizer=keys(
        "overlap_sync_grad overlap_sync_param zero_overlap_communication reduce_bucket_size clip_grad_norm "
        "use_split_tensor_optim all_gather_size"
    ),
    loss=keys("label_smoothing moe_loss_coeff mtp_loss_coeff op_type"),
    adam=keys("lr adam_beta1 adam_beta2 adam_beta2_c adam_eps weight_decay clip_grad fused"),
    lr_scheduler=keys("total_steps init_steps warmup_ratio eta_min last_epoch"),
    beta2_scheduler=keys("init_beta2 c cur_iter"),
    model=keys(
        "checkpoint num_chunks num_attention_heads num_kv_attention_heads head_dim embed_split_hidden vocab_size "
        "embed_grad_scale parallel_output hidden_size num_layers no_bias qkv_bias o_bias mlp_bias mlp_ratio "
        "multiple_of apply_post_layer_norm dtype norm_type layer_norm_epsilon use_flash_attn qk_interleaved "
        "rope_base rope_type rope_scaling_factor max_position_embeddings use_dynamic_ntk_rope use_sliding_window "
        "sliding_window max_window_layers use_swiglu add_unit_offset mlp_layer_fusion enable_qkv_fusion drop_rate "
        "attn_drop_rate deepnorm residual_in_fp32 norm_head adapt_hf is_reward dropout_selective_checkpoint "
        "use_scaled_init init_type embedding_init_std attn_wqkv_init_std attn_other_init_std ffn_uplayer_init_std "
        "ffn_other_init_std out_head_init_std device norm_dtype num_experts num_shared_experts top_k moe_type "
        "moe_use_residual moe_layer_kwargs"
    ),
    parallel=keys(
        "sequence_parallel gqa",
        fsdp=keys("enable mode init_method"),
        zero1=keys("size fsdp"),
        tensor=keys("size mode"),
        pipeline=keys("size interleaved_overlap mode zero_bubble use_zeropp decouple_grad"),
        weight=_SIZED,
        expert=_SIZED,
        expert_weight=_SIZED,
        expert_zero1=keys("size"),
        sequence_2D=keys("enable head_size context_size window_size device_placement_strategy"),
    ),
    monitor=keys("alert tensorboard"),
    moe=keys(
        "top_k capacity_factor eval_capacity_factor min_capacity noisy_gate_policy drop_tokens use_rts "
        "use_fused_gating parallel_mode"
    ),
)
#: Models of InternEvo's registry whose sections say what they are (internlm/model/builder.py and registry.py, as read).
MODEL_TYPES = (
    "INTERNLM2",
    "INTERNLM2_PUBLIC",
    "INTERNLM",
    "INTERNLM_MoE",
    "INTERNLM2_MoE",
    "LLAMA2",
    "BAICHUAN2",
    "QWEN2",
    "QWEN2MOE",
    "MIXTRAL",
    "MIXTRALMOE",
    "GEMMA",
)
#: Parts of other names, and what those models are beside.
OTHER_TYPES = {
    "LLAVA": "its vision tower is not modelled",
    "CHAMELEON": "its image tokens are not modelled",
    "HF": "its sizes are in another file: give its config.json",
}
#: Values of keys that change time or memory and whose other values are not modelled.
DESCRIBED: Described = {
    "model.use_swiglu": ((True,), "an MLP without a gate, which InternEvo itself refuses,"),
    "model.use_sliding_window": ((False,), "a window over the keys"),
    "model.residual_in_fp32": ((False,), "a residual stream of 32 bits"),
    "model.drop_rate": ((0, 0.0), "dropout"),
    "model.attn_drop_rate": ((0, 0.0), "dropout"),
    "model.norm_head": ((False,), "a head whose weights are normed in every pass"),
    "model.deepnorm": ((False,), "a scaled residual stream"),
    "model.apply_post_layer_norm": ((False,), "norms behind the blocks instead of before them"),
    "model.is_reward": ((False,), "a head of one output"),
    "model.moe_use_residual": ((False,), "an MLP beside the experts"),
    "use_fp32_norm": ((False,), "norms in 32 bits"),
    "selective_checkpoint": ((False,), "recomputation of all but attention"),
    "cpu_offloading": ((False,), "activations on the host"),
}
