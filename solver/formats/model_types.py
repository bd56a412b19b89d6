"""The architecture behind each Hugging Face model_type: what its code decides, and how its config is read."""

from __future__ import annotations

from collections.abc import Mapping

from solver.formats.model_readers import (
    ALL,
    GPT,
    LLAMA,
    NONE,
    Family,
    biases,
    read_baichuan,
    read_bigcode,
    read_bloom,
    read_chatglm,
    read_cohere,
    read_falcon,
    read_flags,
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_glm,
    read_gpt2,
    read_gpt_neo,
    read_gpt_neox,
    read_gptj,
    read_internlm,
    read_llama,
    read_mpt,
    read_nemotron,
    read_opt,
    read_phi,
    read_qwen,
    read_qwen3,
    read_smollm3,
    read_stablelm,
    read_starcoder2,
    read_window,
)

_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
_LLAMA_CLASS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_LLAMA = Family(fixed=LLAMA, special=read_llama, class_defaults=_LLAMA_CLASS)
_GEMMA = {**LLAMA, **NONE}

FAMILIES: Mapping[str, Family] = {
    "baichuan": Family(fixed={**LLAMA, **NONE}, special=read_baichuan),
    "bloom": Family(
        fixed={**GPT, **ALL, "position": "alibi", "embedding_norm": True},
        tied=True,
        special=read_bloom,
        keys={
            "n_embed": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "seq_length": "max_position_embeddings",
        },
    ),
    "chatglm": Family(
        fixed=LLAMA,
        special=read_chatglm,
        keys={
            "num_layers": "num_hidden_layers",
            "ffn_hidden_size": "intermediate_size",
            "kv_channels": "head_dim",
            "padded_vocab_size": "vocab_size",
            "seq_length": "max_position_embeddings",
        },
    ),
    "codegen": Family(
        fixed={**GPT, **biases(mlp_bias=True), "norms_per_layer": 1, "head_bias": True}, keys=_GPT2_KEYS, special=read_gptj
    ),
    "cohere": Family(
        fixed={**LLAMA, "norm": "layernorm", "norm_bias": False, "norms_per_layer": 1}, tied=True, special=read_cohere
    ),
    "cohere2": Family(
        fixed={**LLAMA, "norm": "layernorm", "norm_bias": False, "norms_per_layer": 1}, tied=True, special=read_cohere
    ),
    "deepseek_v2": Family(fixed={**LLAMA, **NONE}),
    "deepseek_v3": Family(fixed={**LLAMA, **NONE}),
    "falcon": Family(
        fixed=GPT,
        tied=True,
        special=read_falcon,
        keys={"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    ),
    "gemma": Family(fixed=_GEMMA, tied=True, special=read_gemma),
    "gemma2": Family(
        fixed={**_GEMMA, "norms_per_layer": 4},
        tied=True,
        special=read_gemma2,
        class_defaults={
            "vocab_size": 256000,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
        },
    ),
    "gemma3_text": Family(
        fixed={**_GEMMA, "norms_per_layer": 4, "qk_norm": "head"},
        tied=True,
        special=read_gemma3,
        class_defaults={
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "glm": Family(fixed=LLAMA, special=read_glm),
    "glm4": Family(fixed={**LLAMA, "norms_per_layer": 4}, special=read_glm),
    "gpt2": Family(fixed={**GPT, **ALL, "position": "learned"}, tied=True, keys=_GPT2_KEYS, special=read_gpt2),
    "gpt_bigcode": Family(fixed={**GPT, **ALL, "position": "learned"}, tied=True, keys=_GPT2_KEYS, special=read_bigcode),
    "gpt_neo": Family(
        fixed={**GPT, **biases(output_bias=True, mlp_bias=True), "position": "learned"},
        tied=True,
        special=read_gpt_neo,
        keys={"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"},
    ),
    "gpt_neox": Family(fixed=GPT, special=read_gpt_neox),
    "gpt_oss": Family(fixed=LLAMA, special=read_llama),
    "gptj": Family(
        fixed={**GPT, **biases(mlp_bias=True), "norms_per_layer": 1, "head_bias": True}, keys=_GPT2_KEYS, special=read_gptj
    ),
    "granite": _LLAMA,
    "internlm2": Family(fixed=LLAMA, special=read_internlm),
    "llama": _LLAMA,
    "minicpm": Family(fixed={**LLAMA, **NONE}, tied=True),
    "minicpm3": Family(fixed={**LLAMA, **NONE}, tied=True),
    "mistral": Family(
        fixed={**LLAMA, **NONE},
        special=read_window,
        class_defaults={
            **_LLAMA_CLASS,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "mixtral": Family(fixed={**LLAMA, **NONE}, special=read_window),
    "mpt": Family(
        fixed=GPT,
        tied=True,
        special=read_mpt,
        keys={
            "d_model": "hidden_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "max_seq_len": "max_position_embeddings",
        },
    ),
    "nemotron": Family(fixed=GPT, special=read_nemotron),
    "olmo": Family(fixed={**LLAMA, **NONE, "norm": "layernorm", "norm_weight": False}, special=read_flags),
    "olmo2": Family(fixed={**LLAMA, "qk_norm": "all"}, special=read_flags),
    "opt": Family(fixed={**GPT, "position": "learned"}, tied=True, keys={"ffn_dim": "intermediate_size"}, special=read_opt),
    "phi": Family(fixed={**GPT, **ALL, "norms_per_layer": 1, "head_bias": True}, special=read_phi),
    "phi3": Family(fixed={**LLAMA, **NONE}, special=read_window),
    "qwen2": Family(
        fixed=LLAMA,
        special=read_qwen,
        class_defaults={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 32768,
        },
    ),
    "qwen2_moe": Family(fixed=LLAMA, special=read_qwen),
    "qwen3": Family(fixed={**LLAMA, "qk_norm": "head"}, special=read_qwen3),
    "qwen3_moe": Family(fixed={**LLAMA, "qk_norm": "head"}, special=read_qwen3),
    "smollm3": Family(fixed=LLAMA, tied=True, special=read_smollm3),
    "stablelm": Family(fixed={**LLAMA, "norm": "layernorm"}, special=read_stablelm),
    "starcoder2": Family(fixed=GPT, tied=True, special=read_starcoder2),
}

#: Class names of config.json files that state no model_type.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "GPT2LMHeadModel": "gpt2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "FalconForCausalLM": "falcon",
    "InternLM2ForCausalLM": "internlm2",
    "OPTForCausalLM": "opt",
    "BloomForCausalLM": "bloom",
}

_ENCODER, _BOTH, _STATE = "an encoder", "an encoder-decoder", "a state-space model"
#: Other model types, so that the refusal says what they are.
NOT_DECODERS: Mapping[str, str] = {
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "deberta-v2": _ENCODER,
    "electra": _ENCODER,
    "modernbert": _ENCODER,
    "vit": _ENCODER,
    "clip": _ENCODER,
    "t5": _BOTH,
    "bart": _BOTH,
    "whisper": _BOTH,
    "mt5": _BOTH,
    "mamba": _STATE,
    "mamba2": _STATE,
    "jamba": "a hybrid of attention, state-space layers and experts",
    "rwkv": "a recurrent model",
    "dbrx": "a mixture of experts",
    "llama4_text": "a mixture of experts",
    "grok-1": "a mixture of experts",
}
