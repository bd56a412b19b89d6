"""The model that arguments of Megatron-LM's pretrain_gpt.py describe.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py (defaults, validate_args) and training/tokenizer of autumn 2025, as
read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.megatron_flags import COUNTS, LATENT
from solver.formats.megatron_values import choice, whole

#: Vocabulary of a tokenizer where --vocab-size does not state it. The SentencePiece model of Megatron-LM's own tests has 128k.
TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "GPTSentencePieceTokenizer": 128000}


def model_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = whole(flags, "num-attention-heads"), whole(flags, "hidden-size")
    ffn = whole(flags, "ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 if "swiglu" in flags else 4 * hidden)
    bias = "disable-bias-linear" not in flags
    tp, latent = whole(flags, "tensor-model-parallel-size", 1), "multi-latent-attention" in flags
    vocab = _vocabulary(flags)
    multiple = whole(flags, "make-vocab-size-divisible-by", 128) * tp
    position = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}
    rotary = "rope" if "use-rotary-position-embeddings" in flags else "learned_absolute"
    model = {
        "name": "megatron",
        "num_hidden_layers": whole(flags, "num-layers"),
        **{key: whole(flags, flag) for flag, key in COUNTS.items() if flag in flags},
        **{key: whole(flags, flag, default) for flag, (key, default) in LATENT.items() if latent},
        "intermediate_size": ffn,
        "num_key_value_heads": whole(flags, "num-query-groups", 1) if "group-query-attention" in flags else heads,
        "head_dim": whole(flags, "kv-channels", hidden // heads),
        "vocab_size": vocab,
        "padded_vocab_size": -(-vocab // multiple) * multiple,
        "gated_mlp": "swiglu" in flags,
        "qkv_bias": bias or "add-qkv-bias" in flags,
        "output_bias": bias,
        "mlp_bias": bias,
        "norm": choice(flags, "normalization", "LayerNorm", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
        "tie_word_embeddings": "untie-embeddings-and-output-weights" not in flags,
        "position": choice(flags, "position-embedding-type", rotary, position),
        "max_position_embeddings": whole(flags, "max-position-embeddings", 0),
        "qk_norm": "head" if "qk-layernorm" in flags and not latent else "none",  # latent attention always norms its ranks
    }
    model["qk_norm_bias"] = model["qk_norm"] == "head" and model["norm"] == "layernorm"  # of the same class as the others
    return {**model, **(_experts(flags, ffn) if "num-experts" in flags else {})}


def _vocabulary(flags: Mapping[str, Any]) -> int:
    tokenizer = str(flags.get("tokenizer-type", "GPT2BPETokenizer"))
    if "vocab-size" in flags:
        return whole(flags, "vocab-size") + (tokenizer == "NullTokenizer")  # which adds the end of a document
    if tokenizer not in TOKENIZERS:
        raise InputError(f"Megatron's --tokenizer-type {tokenizer}: state its --vocab-size")
    return TOKENIZERS[tokenizer]


def _experts(flags: Mapping[str, Any], ffn: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "moe_intermediate_size": whole(flags, "moe-ffn-hidden-size", ffn),
        "num_experts_per_tok": whole(flags, "moe-router-topk", 2),
        "router_score": str(flags.get("moe-router-score-function", "softmax")),
        "router_bias": "moe-router-enable-expert-bias" in flags,
    }
    if "moe-layer-freq" in flags:
        found["moe_layer_freq"] = _pattern(flags["moe-layer-freq"])
    return found


def _pattern(given: Any) -> int | list[int]:
    """Return ``--moe-layer-freq``: a number n (every n-th layer), or a list expression like ([0]*3+[1]*11)."""
    if isinstance(given, int):
        return given
    parts = re.fullmatch(r"\(?(\[[01]\](\*\d{1,4})?(\+\[[01]\](\*\d{1,4})?)*)\)?", str(given).replace(" ", ""))
    if not parts:
        raise InputError(f"Megatron's --moe-layer-freq is {shown(given)}; it must be a number or like ([0]*3+[1]*11)")
    pieces = re.findall(r"\[([01])\](?:\*(\d+))?", parts[1])
    return [int(kind) for kind, times in pieces for _ in range(int(times or 1))]
