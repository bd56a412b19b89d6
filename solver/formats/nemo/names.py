"""Settings of NeMo 1's training files by the arguments of Megatron-LM that they are, and what else the files may hold.

Source: NVIDIA/NeMo-Framework-Launcher launcher_scripts/conf/training/llama/llama2_7b.yaml (commit 064e676); NVIDIA/NeMo
examples/nlp/language_modeling/conf/megatron_gpt_config.yaml (000763d). NeMo 2's recipes are Python.
"""

from __future__ import annotations

from collections.abc import Mapping

from solver.formats.syntax.known_keys import Described, Known, keys

FRAMEWORK = "nemo-24"
#: Flag -> key of ``model``, with the same value.
VALUES: Mapping[str, str] = {
    "num-layers": "num_layers",
    "hidden-size": "hidden_size",
    "ffn-hidden-size": "ffn_hidden_size",
    "num-attention-heads": "num_attention_heads",
    "num-query-groups": "num_query_groups",
    "kv-channels": "kv_channels",
    "make-vocab-size-divisible-by": "make_vocab_size_divisible_by",
    "micro-batch-size": "micro_batch_size",
    "global-batch-size": "global_batch_size",
    "seq-length": "encoder_seq_length",
    "attention-dropout": "attention_dropout",
    "hidden-dropout": "hidden_dropout",
    "tensor-model-parallel-size": "tensor_model_parallel_size",
    "pipeline-model-parallel-size": "pipeline_model_parallel_size",
    "context-parallel-size": "context_parallel_size",
    "num-virtual-stages-per-pipeline-rank": "virtual_pipeline_model_parallel_size",
    "position-embedding-type": "position_embedding_type",
    "recompute-granularity": "activations_checkpoint_granularity",
    "recompute-method": "activations_checkpoint_method",
    "recompute-num-layers": "activations_checkpoint_num_layers",
    "cpu-offloading-num-layers": "cpu_offloading_num_layers",
    "max-position-embeddings": "max_position_embeddings",
}
#: Switch -> key of ``model`` that is true with it.
SWITCHES: Mapping[str, str] = {
    "sequence-parallel": "sequence_parallel",
    "deterministic-mode": "deterministic_mode",
    "cross-entropy-loss-fusion": "cross_entropy_loss_fusion",
    "fp8-param-gather": "fp8_params",
}
#: Switch -> key of ``model`` that is false with it, and true unless stated.
INVERTED: Mapping[str, str] = {
    "disable-bias-linear": "bias",
    "untie-embeddings-and-output-weights": "share_embeddings_and_output_weights",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
}
NORMS: Mapping[str, str] = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}
ACTIVATIONS: Mapping[str, bool] = {"fast-swiglu": True, "swiglu": True, "gelu": False, "fast-geglu": True, "geglu": True}
PRECISIONS: Mapping[str, str] = {
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "16": "fp16",
    "16-mixed": "fp16",
    "32": "fp32",
    "32-true": "fp32",
}
#: Whether an optimizer shards its states over the data-parallel ranks.
MCORE = "mcore_distributed_optim"
OPTIMIZERS: Mapping[str, bool] = {"distributed_fused_adam": True, MCORE: True, "fused_adam": False}
GRADIENTS: Mapping[str, str] = {"bf16": "bf16", "fp32": "fp32", "32": "fp32"}

_NEUTRAL = (
    "mcore_gpt init_method_std use_scaled_init_method ffn_dropout apply_query_key_layer_scaling "
    "layernorm_epsilon do_layer_norm_weight_decay pre_process post_process persist_layer_norm "
    "openai_gelu normalize_attention_scores rotary_percentage rotary_base apply_rope_fusion attention_type "
    "native_amp_init_scale native_amp_growth_interval hysteresis fp16_lm_cross_entropy "
    "grad_allreduce_chunk_size_mb grad_div_ar_fusion bias_activation_fusion bias_dropout_add_fusion masked_softmax_fusion seed "
    "resume_from_checkpoint use_cpu_initialization onnx_safe apex_transformer_log_level gradient_as_bucket_view "
    "get_attention_mask_from_fusion "
    "sync_batch_comm fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo use_emha tp_comm_atomic_ag "
    "tp_comm_atomic_rs nsys_profile data batch_p2p_comm ub_tp_comm_overlap_cfg gc_interval"
)
KNOWN: Known = keys(
    "name restore_from_path defaults hydra run exp_manager",
    trainer=keys(
        "devices num_nodes accelerator precision logger enable_checkpointing use_distributed_sampler replace_sampler_ddp "
        "enable_model_summary enable_progress_bar "
        "max_epochs max_steps max_time log_every_n_steps val_check_interval limit_val_batches limit_test_batches "
        "accumulate_grad_batches gradient_clip_val benchmark"
    ),
    model=keys(
        " ".join((*VALUES.values(), *SWITCHES.values(), *INVERTED.values(), _NEUTRAL)) + " rampup_batch_size normalization "
        "activation override_vocab_size transformer_engine megatron_amp_O2 use_flash_attention fp8 fp8_e4m3 fp8_hybrid "
        "reduce_amax ub_tp_comm_overlap overlap_p2p_comm cpu_offloading num_micro_batches_with_partial_activation_checkpoints "
        "activations_checkpoint_layers_per_pipeline fsdp fp32_residual_connection headscale transformer_block_type",
        tokenizer=keys(
            "library type model delimiter vocab_file merge_file sentencepiece_legacy use_fast trust_remote_code special_tokens "
            "additional_special_tokens training_sample_size tokenizer_model pad_token"
        ),
        optim=keys(
            "name lr weight_decay betas bucket_cap_mb overlap_grad_sync overlap_param_sync contiguous_grad_buffer "
            "contiguous_param_buffer grad_sync_dtype sched"
        ),
    ),
)
_NONE = (None, 0)
DESCRIBED: Described = {
    "model.rampup_batch_size": ((None,), "a batch that grows"),
    "model.transformer_engine": ((True,), "a model without Transformer Engine"),
    "model.megatron_amp_O2": ((True,), "autocast"),
    "model.fsdp": ((False,), "FSDP under NeMo"),
    "model.fp32_residual_connection": ((False,), "residuals in fp32"),
    "model.headscale": ((False,), "scaled heads"),
    "model.transformer_block_type": (("pre_ln",), "norms after the blocks"),
    "model.num_micro_batches_with_partial_activation_checkpoints": (_NONE, "recomputation of some micro batches"),
    "model.activations_checkpoint_layers_per_pipeline": (_NONE, "other recomputation in each stage"),
}
