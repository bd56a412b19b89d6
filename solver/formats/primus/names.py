"""Settings of AMD's Primus over Megatron-LM: what its base files set, and its own keys beside Megatron's arguments.

Sources, AMD-AGI/Primus as read in 2026: primus/configs/models/megatron/language_model.yaml (0158a86), llama_base.yaml
(1b29bf7), deepseek_v3_base.yaml (8cc70b6), primus/configs/modules/megatron/pre_trainer.yaml (44a21d1),
primus_megatron_module.yaml, zero_bubble.yaml (4795c54), primus_turbo.yaml (0232423); of backends/megatron
core/pipeline_parallel/zerobubble (README.md, utils.py) and patches/recompute_layer_patches.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from solver.formats.syntax.known_keys import keys

#: What the base files of trainer and language model set beyond the defaults of Megatron's arguments.
BASE: Mapping[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "seq_length": 1024,
    "bf16": True,
    "use_distributed_optimizer": True,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "sequence_parallel": True,
    "moe_token_dispatcher_type": "allgather",
}
#: What the base file of models without dropout adds.
LLAMA_BASE: Mapping[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
#: What the base files of DeepSeek's models add, which Kimi's and others extend.
DEEPSEEK_BASE: Mapping[str, Any] = {
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "moe_permute_fusion": True,
    "moe_shared_expert_overlap": True,
}
#: Files of models (without their ending, in letters and digits) -> the shipped model that they describe.
MODELS: Mapping[str, str] = {
    "llama27b": "llama2_7b",
    "llama213b": "llama2_13b",
    "llama270b": "llama2_70b",
    "llama38b": "llama3_8b",
    "llama318b": "llama3_8b",
    "llama370b": "llama3_70b",
    "llama3170b": "llama3_70b",
    "llama3370b": "llama3_70b",
    "llama31405b": "llama3_405b",
    "llama417b16e": "llama4_scout",
    "llama417b128e": "llama4_maverick",
    "mixtral8x7bv01": "mixtral_8x7b",
    "mixtral8x22bv01": "mixtral_8x22b",
    "deepseekv2lite": "deepseek_v2_lite",
    "deepseekv2": "deepseek_v2",
    "deepseekv3": "deepseek_v3",
    "kimik2": "kimi_k2",
    "gptoss20b": "gpt_oss_20b",
    "gptoss120b": "gpt_oss_120b",
    "grok1": "grok_1",
    "qwen330ba3b": "qwen3_30b_a3b",
    "qwen3235ba22b": "qwen3_235b_a22b",
    "qwen34b": "qwen3_4b",
    "qwen38b": "qwen3_8b",
    "qwen314b": "qwen3_14b",
    "qwen332b": "qwen3_32b",
}
WITHOUT_MODEL = "language_model"  #: the base file of models, whose sizes the overrides then state
#: Schedule -> (patch_zero_bubble, zero_bubble_v_schedule, zero_bubble_v_schedule_mem_setup).
ZERO_BUBBLE: Mapping[str, tuple[bool, bool, str]] = {
    "zb-1p": (True, False, "half"),
    "zb-v": (True, True, "zb"),
    "v-half": (True, True, "half"),
    "v-min": (True, True, "min"),
}
#: Its own keys that are read.
READ = (
    "recompute_layer_ids",
    "patch_zero_bubble",
    "zero_bubble_v_schedule",
    "zero_bubble_v_schedule_mem_setup",
    "use_turbo_deepep",
    "enable_primus_turbo",
)
#: Its own keys that change neither memory nor time as modelled.
IDLE = keys(
    "stderr_sink_level file_sink_level sink_level log_avg_skip_iterations log_avg_reset_interval "
    "disable_last_saving auto_continue_train disable_tensorboard disable_wandb disable_mlflow wandb_project "
    "wandb_exp_name wandb_save_dir use_rocm_mem_info use_rocm_mem_info_iters moe_router_force_load_balancing "
    "disable_compile_dependencies no_load_optim no_load_rng no_save_optim no_save_rng num_shared_experts "
    "enable_zero_bubble enable_zb_runtime allow_padding_num_layers zero_bubble_pipeline_timers_start_iter "
    "zero_bubble_pipeline_timers_end_iter pp_warmup dump_pp_data create_attention_mask_in_dataloader "
    "no_persist_layer_norm data_path turbo_deepep_use_comm_stream stash_modules disable_scaling_patches"
)
#: Its own switches whose small effect is left out of the estimate, with what it is.
LEFT_OUT: Mapping[str, str] = {
    "use_turbo_attention": "Primus-Turbo's attention",
    "use_turbo_gemm": "Primus-Turbo's GEMMs",
    "use_turbo_parallel_linear": "Primus-Turbo's GEMMs",
    "use_turbo_grouped_mlp": "Primus-Turbo's grouped GEMMs",
    "use_turbo_grouped_gemm": "Primus-Turbo's grouped GEMMs",
    "use_turbo_rms_norm": "Primus-Turbo's norms",
    "moe_use_legacy_grouped_gemm": "grouped GEMMs by another library",
    "moe_use_fused_router_with_aux_score": "fused kernels of the router",
    "use_turbo_fused_act_with_probs": "a fused activation of experts",
    "turbo_deepep_num_cu": "another number of compute units than DeepEP's own",
    "no_fp8_weight_transpose_cache": "transposed fp8 weights that are made anew",
}
#: Its own switches that are not modelled, with what they do.
UNMODELLED: Mapping[str, str] = {
    "patch_primus_pipeline": "schedules of Primus's own pipeline",
    "patch_moe_overlap": "its own overlap of the exchange of tokens",
    "use_turbo_mega_moe": "a fused layer of experts",
    "use_rocmoe": "another layer of experts",
    "turbo_sync_free_moe_stage": "experts without synchronisation with the host",
    "enable_turbo_attention_float8": "attention in fp8",
    "enable_1f1b_v": "a V-shaped 1F1B",
    "decoder_pipeline_manual_split_list": "stages in its own words (pipeline_model_parallel_layout is read)",
    "cpu_offload": "offload of chunks",
}
