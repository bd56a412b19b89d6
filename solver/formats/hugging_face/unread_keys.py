"""Keys of a ``config.json`` that its family does not read: which change nothing, and which announce other shapes or work.

Source: the configuration classes of the transformers library (4.41, 4.57 and 5.24) and published checkpoints, whose keys were
sorted by hand. A key that is in no list here is reported as not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: Names, formats, tokens, generation, initialisation, dropout, epsilons, positions and factors: no shape and no work.
_HARMLESS = frozenset(
    _words(
        """
    model_type architectures auto_map transformers_version transformers.js_config torch_dtype dtype name notes tokenizer_class
    tokenizer_name custom_pipelines _name_or_path _commit_hash _attn_implementation _attn_implementation_autoset
    _attn_implementation_internal _experts_implementation attn_implementation _flash_attn_2_enabled _from_model_config
    _num_labels _diffusers_version use_flash_attn use_flash_attention use_flash_attention_2 use_cache
    cache_implementation cache_config
    return_dict return_dict_in_generate output_scores output_router_logits torchscript use_bfloat16 gradient_checkpointing
    is_decoder prefix problem_type finetuning_task task_specific_params id2label label2id num_labels tf_legacy_loss
    chunk_size_feed_forward is_llama_config unsloth_fixed max_batch_size quantization quantization_config compression_config
    bos_token eos_token pad_token unk_token bad_words_ids suppress_tokens begin_suppress_tokens max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences remove_invalid_values
    exponential_decay_length_penalty max_new_tokens generation_config num_logits_to_keep logits_to_keep inference_mode
    n_special predict_special_tokens output_past summary_activation summary_proj_to_labels summary_type summary_use_proj
    initializer_range initializer_factor initializer_cutoff_factor embedding_initializer_range init_std init_device init_config
    attention_dropout hidden_dropout residual_dropout resid_dropout embedding_dropout embed_dropout activation_dropout
    classifier_dropout dropout dropout_rate attn_pdrop resid_pdrop embd_pdrop emb_pdrop hidden_dropout_prob
    attention_probs_dropout_prob ffn_dropout attn_dropout summary_first_dropout mlp_dropout
    rms_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon eps hidden_act hidden_activation
    activation_function swiglu_limit swiglu_alpha
    rope_theta rope_scaling rope_parameters rope_local_base_freq rope_interleave rope_interleaved rope_type rope_ratio rope_pct
    rope_percent rope_base rotary rotary_dim rotary_pct rotary_emb_base rotary_percent rotary_base rotary_emb_fraction
    partial_rotary_factor original_max_position_embeddings max_window_layers max_sequence_length model_max_length seq_length
    seq_len initial_context_length offset_alibi
    attention_multiplier embedding_multiplier residual_multiplier logits_scaling logit_scale embedding_scale residual_scale
    scale_emb scale_depth dim_model_base mup_denominator use_mup clip_qkv scale_attn_weights scale_attn_by_inverse_layer_idx
    query_pre_attn_scalar attention_softmax_in_fp32 scale_attention_softmax_in_fp32 reorder_and_upcast_attn slow_but_exact
    pretraining_tp skip_bias_add skip_bias_add_qkv
    router_aux_loss_coef router_z_loss_coef router_jitter_noise input_jitter_noise router_dtype aux_loss_alpha seq_aux
    norm_topk_prob routed_scaling_factor scoring_func z_loss_weight use_bidirectional_attention
    """
    )
)
_HARMLESS_NAMES = re.compile(r"\w*_token_ids?|\w*_token_index|\w+_version|fuse_\w+")
#: Keys that announce other work where they are off.
_MUST_BE_ON = _words(
    "is_causal causal use_rope use_rotary_pos_emb use_rmsnorm rmsnorm pre_norm use_gated_activation use_swiglu "
    "use_learned_position_embeddings"
)
#: Values with which a key that announces other work changes nothing.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "position_embedding_type": ("rope", "rope_gptj", "rotary"),
    "attention_type": ("full", "softmax", "full_attention", "causal"),
    "attn_type": ("full", "softmax"),
    "norm_type": ("rms", "rmsnorm", "layer_norm"),
    "mlp_type": ("default",),
    **dict.fromkeys(_MUST_BE_ON, (True,)),
    **dict.fromkeys(
        _words(
            "total_ut_steps num_loops num_loop n_recurrent_loops loop_num_passes layer_repeats num_repeats hc_mult hc_count "
            "num_residual_streams altup_num_inputs cla_factor cla_share_factor num_mem_blocks moe_layer_freq num_experts "
            "num_expert_group interpolate_factor full_attn_mod"
        ),
        (1,),
    ),
}
_NORMS: Mapping[str, tuple[object, ...] | None] = {"use_qk_norm": (True,)}  #: of q and k, which these families have
#: By model_type: keys of its own that change nothing, with these values (None: any).
_OF_FAMILY: Mapping[str, Mapping[str, tuple[object, ...] | None]] = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text", "olmo2", "olmo3", "olmoe", "dots1"), _NORMS),
    # the convolution's and the state's numbers, fp32 as the kernels keep them
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), {"mamba_ssm_dtype": ("float32",)}),
    "apertus": {"qk_norm": (True,), "post_norm": (False,)},
    "bailing_moe_v2": {"use_rmsnorm": (True,)},
    "falcon": {"ff_factor": (4,)},
    "cohere2": {"layer_switch": None},
    "gpt_bigcode": dict.fromkeys(_words("inference_runner pad_key_length pre_allocate_kv_cache validate_runner_input")),
    "qwen2_5_vl": {"vision_config": None},
    "ernie4_5": {"compression_ratio": None},
    "ernie4_5_moe": dict.fromkeys(
        _words(
            "compression_ratio add_tail_layers global_aux_loss moe_aux_loss_lambda moe_group_orthogonal_loss moe_z_loss_lambda "
            "moe_orthogonal_loss_lambda use_fast_ln model_name use_rmsnorm"
        )
    ),
    "hunyuan_v1_dense": {
        **dict.fromkeys(
            _words(
                "add_classification_head class_num dense_list im_start_id im_end_id im_newline_id mask_init_id text_start_id "
                "text_end_id image_token_id video_start_id video_end_id pad_id pool_type skip_cls_token enable_lm_head_fp32 "
                "moe_drop_tokens moe_random_routing_dropped_token"
            )
        ),
        "num_shared_expert": (1, [1]),
        "moe_topk": (1,),
    },
}
#: Keys that announce other work and that no word below is in.
_OTHER_KEYS = frozenset(
    _words(
        """
    total_ut_steps hyper_connections expansion_rate use_lang_emb n_langs use_cla yoco attention_k_eq_v nsa_config moba_config
    block_types attention_types full_attn_idxs attn_type_list attn_layer_offset attn_layer_period attention_type attn_type
    lambda_std_dev lambda_init qk_l2_clip_threshold qk_norm_type use_qk_norm qk_layernorm alibi learnable_sink_init
    attention_sinks is_causal causal prefix_lm cca_time0 cca_time1 ssm_cfg expand n_groups time_step_limit n_group topk_group
    topk_method decoder_sparse_step first_k_dense_replace route_scale mod_capacity router_capacity use_parallel_residual
    parallel_attn use_parallel_block norm_after do_layer_norm_before ngpt_alpha_init layernorm_embedding norm_type pre_norm
    apply_residual_connection_post_layernorm multiple_of use_double_wide_mlp mlp_ratio mlp_type ffn_type d_ff expansion_ratio
    use_gated_activation use_swiglu attention_bias mlp_bias qkv_bias use_bias bias no_bias add_bias_linear multi_query
    multi_query_attention multi_query_group_num kv_channels is_encoder_decoder is_encoder tie_encoder_decoder d_model encoder
    decoder num_codebooks visual r target_modules use_prompt pre_seq_len output_attentions output_hidden_states n_predict
    position_embedding_type num_hashes num_buckets interpolate_factor full_attn_mod cross_attn_k patch_in_forward
    """
    )
)
#: Words in keys that announce other work: experts, parts of attention, patterns of layers, loops, residual streams, other
#: sequence mixers, adapters, other modalities, and any further size.
_OTHER_WORDS = re.compile(
    r"expert|moe(_|$)|(^|_)(lora|rank)|rank$|sliding|swa_|window|soft_?cap|chunk|mamba|ssm|(^|_)conv|cross_att|compress|sparse|nextn"
    r"|mtp|layer_types|linear_att|linear_(key|value|num|conv|head)|head_dim|dim_head|heads|_size$|_size_|_layers?$|layers_|_layer_ids"
    r"|layer_idx|gate|gating|pattern|(^|_)loop|recurren|_cycles|repeat|residual_stream|(^|_)hc_|altup|laurel|per_layer|(^|_)ple_|ngram"
    r"|index(er)?_|lightning|retention|rwkv|delta|kda|gla|differential|cla_|kv_shar|shared_kv|mixture|early_exit|layer_?drop|adapter"
    r"|prefix_(lm|tun|proj)|prompt_|(vision|audio|speech|image|video|encoder|decoder|text|llm|language|vq|vit)_(config|layers|dim|ffn)"
    r"|bidirectional|engram|memory|token_merg|pruned|bit(s|linear|_)|bitnet|codebook|_dim$|_inner$|_width$|_factor$|multipliers?$"
    r"|num_blocks|_blocks?$|_config$|_configs$|_norm$|_bias$"
)
_OFF: tuple[object, ...] = (None, False, 0, 0.0, "", [], {})


def is_harmless(key: str, called: str) -> bool:
    """Whether a key of a config of model_type ``called`` says nothing about shapes or work."""
    return is_harmless_name(key) or key in _OF_FAMILY.get(called, {})


def is_harmless_name(key: str) -> bool:
    """Whether a key of this name says nothing of shapes or work in any family."""
    return key in _HARMLESS or bool(_HARMLESS_NAMES.fullmatch(key))


def is_other_work(key: str, value: Any, called: str) -> bool:
    """Whether a key that the family ``called`` does not read announces other shapes or other work, with this value."""
    if key in _MUST_BE_ON and value is False:
        return True
    if any(value is off or value == off for off in _OFF):
        return False
    family = _OF_FAMILY.get(called, {})
    allowed = family[key] if key in family else _NEUTRAL.get(key, ())
    if allowed is None or value in allowed:
        return False
    return not is_harmless_name(key) and (key in _OTHER_KEYS or bool(_OTHER_WORDS.search(key)))
