"""The architecture behind each Hugging Face model_type: what its code decides, and how its config is read."""

from __future__ import annotations

from collections.abc import Mapping

from solver.formats.hugging_face import (
    readers_dense,
    readers_experts,
    readers_hybrid,
    readers_linear,
    readers_qwen_experts,
    readers_recent,
    readers_sparse,
    readers_sparse_windows,
)
from solver.formats.hugging_face.readers import (
    ALL,
    GPT,
    LLAMA,
    NONE,
    Family,
    biases,
    class_of,
    read_flags,
    read_llama,
    read_window,
)
from solver.formats.hugging_face.readers_gpt import (
    read_baichuan,
    read_bigcode,
    read_bloom,
    read_chatglm,
    read_falcon,
    read_first_qwen,
    read_gpt2,
    read_gpt_neo,
    read_gpt_neox,
    read_gptj,
    read_mpt,
    read_nemotron,
    read_opt,
    read_phi,
    read_starcoder2,
)
from solver.formats.hugging_face.readers_llama import (
    read_cohere,
    read_cohere2,
    read_gemma,
    read_gemma2,
    read_gemma3,
    read_glm,
    read_internlm,
    read_qwen,
    read_qwen3,
    read_smollm3,
    read_stablelm,
)

_GPT2_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
_LLAMA = Family(fixed=LLAMA, special=read_llama, class_defaults=class_of(32000, 4096, 11008, 32, 32, 32, 2048))
_GEMMA = {**LLAMA, **NONE}

FAMILIES: Mapping[str, Family] = {
    **readers_dense.FAMILIES,
    **readers_experts.FAMILIES,
    **readers_hybrid.FAMILIES,
    **readers_linear.FAMILIES,
    **readers_qwen_experts.FAMILIES,
    **readers_recent.FAMILIES,
    **readers_sparse.FAMILIES,
    **readers_sparse_windows.FAMILIES,
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
        fixed={**LLAMA, "norm": "layernorm", "norm_bias": False, "norms_per_layer": 1}, tied=True, special=read_cohere2
    ),
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
        class_defaults=class_of(256000, 2304, 9216, 26, 8, 4),
    ),
    "gemma3_text": Family(
        fixed={**_GEMMA, "norms_per_layer": 4, "qk_norm": "head"},
        tied=True,
        special=read_gemma3,
        class_defaults=class_of(262208, 2304, 9216, 26, 8, 4, 131072),
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
    "gptj": Family(
        fixed={**GPT, **biases(mlp_bias=True), "norms_per_layer": 1, "head_bias": True}, keys=_GPT2_KEYS, special=read_gptj
    ),
    "granite": _LLAMA,
    "internlm2": Family(fixed=LLAMA, special=read_internlm),
    "llama": _LLAMA,
    "minicpm": Family(fixed={**LLAMA, **NONE}, tied=True),
    "mistral": Family(
        fixed={**LLAMA, **NONE},
        special=read_window,
        class_defaults=class_of(32000, 4096, 14336, 32, 32, 8, 131072),
    ),
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
    "qwen": Family(fixed=LLAMA, keys={"kv_channels": "head_dim"}, special=read_first_qwen),
    "qwen2": Family(
        fixed=LLAMA,
        special=read_qwen,
        class_defaults=class_of(151936, 4096, 22016, 32, 32, 32, 32768),
    ),
    "qwen3": Family(fixed={**LLAMA, "qk_norm": "head"}, special=read_qwen3),
    "smollm3": Family(fixed=LLAMA, tied=True, special=read_smollm3),
    "stablelm": Family(fixed={**LLAMA, "norm": "layernorm"}, special=read_stablelm),
    "starcoder2": Family(fixed=GPT, tied=True, special=read_starcoder2),
}

#: Class names of config.json files that state no model_type.
ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GptOssForCausalLM": "gpt_oss",
    "GPT2LMHeadModel": "gpt2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "BailingMoeV2ForCausalLM": "bailing_moe_v2",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "ApertusForCausalLM": "apertus",
    "ArceeForCausalLM": "arcee",
    "CwmForCausalLM": "cwm",
    "Exaone4ForCausalLM": "exaone4",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "GemmaForCausalLM": "gemma",
    "FalconForCausalLM": "falcon",
    "InternLM2ForCausalLM": "internlm2",
    "OPTForCausalLM": "opt",
    "BloomForCausalLM": "bloom",
    "AfmoeForCausalLM": "afmoe",
    "Cohere2MoeForCausalLM": "cohere2_moe",
    "ExaoneForCausalLM": "exaone",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "FlexOlmoForCausalLM": "flex_olmo",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "HeliumForCausalLM": "helium",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "HYV3ForCausalLM": "hy_v3",
    "HyperCLOVAXForCausalLM": "hyperclovax",
    "InternLM3ForCausalLM": "internlm3",
    "Jais2ForCausalLM": "jais2",
    "OlmoHybridForCausalLM": "olmo_hybrid",
    "SolarOpenForCausalLM": "solar_open",
    "VaultGemmaForCausalLM": "vaultgemma",
    "YoutuForCausalLM": "youtu",
}
