"""The model that arguments of Megatron-LM's pretrain_gpt.py describe.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py (defaults, validate_args) and training/tokenizer of autumn 2025, as
read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.cases.synonyms import spelling
from solver.formats.hugging_face.readers_hybrid import layers_of_pattern
from solver.formats.megatron.flags import COUNTS, LATENT, LINEAR, MAMBA_ARGUMENTS, MAMBA_FIXED
from solver.formats.megatron.values import choice, whole
from solver.formats.model_file import ASSUMED_VOCAB, shipped_model, shipped_models
from solver.formats.syntax.literal_python import read_assignments
from solver.spec.layer_types import LINEAR_ATTENTION, MAMBA, SLIDING_ATTENTION, marked_layers

#: Vocabulary of a tokenizer where --vocab-size does not state it. The SentencePiece model of Megatron-LM's own tests has 128k.
TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "GPTSentencePieceTokenizer": 128000}


def model_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    heads, hidden = whole(flags, "num-attention-heads"), whole(flags, "hidden-size")
    ffn = whole(flags, "ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 if "swiglu" in flags else 4 * hidden)
    bias, latent = "disable-bias-linear" not in flags, "multi-latent-attention" in flags
    position = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}
    rotary = "rope" if "use-rotary-position-embeddings" in flags else "learned_absolute"
    layers = whole(flags, "num-layers")
    model = {
        "name": "megatron",
        "num_hidden_layers": layers,
        **{key: whole(flags, flag) for flag, key in COUNTS.items() if flag in flags},
        **{key: whole(flags, flag, default) for flag, (key, default) in LATENT.items() if latent},
        **_vocabulary(flags),
        "intermediate_size": ffn,
        "num_key_value_heads": whole(flags, "num-query-groups", 1) if "group-query-attention" in flags else heads,
        "head_dim": whole(flags, "kv-channels", hidden // heads),
        "gated_mlp": not flags.keys().isdisjoint(("swiglu", "quick-geglu")),
        "clamped_gate": "activation-func-clamp-value" in flags,
        "qkv_bias": not latent and (bias or "add-qkv-bias" in flags),  # latent attention has one of its output alone
        "output_bias": bias,
        "mlp_bias": bias,
        "norm": choice(flags, "normalization", "LayerNorm", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
        "tie_word_embeddings": "untie-embeddings-and-output-weights" not in flags,
        "position": choice(flags, "position-embedding-type", rotary, position),
        "scaled_rope": not latent and (flags.get("position-embedding-type") == "yarn" or "enable-gpt-oss" in flags),
        "max_position_embeddings": whole(flags, "max-position-embeddings", 0),
        # latent attention always norms its ranks; a norm without weights (--qk-l2-norm) does the work of one with them
        "qk_norm": "none" if latent or flags.keys().isdisjoint(("qk-layernorm", "qk-l2-norm")) else "head",
        **_attention(flags, layers),
    }
    model["qk_norm_bias"] = model["qk_norm"] == "head" and model["norm"] == "layernorm"  # of the same class as the others
    experts = _experts(flags, ffn, layers) if "num-experts" in flags else {}
    return {**model, **experts, **_hybrid(flags, layers, hidden)}


def _hybrid(flags: Mapping[str, Any], layers: int, hidden: int) -> dict[str, Any]:
    """Return which block each layer is, and the sizes of Mamba-2, where a pattern states the layers."""
    if "hybrid-override-pattern" not in flags:
        if {"is-hybrid-model", "spec"} & flags.keys():
            raise InputError("Megatron's layers of one block each need --hybrid-override-pattern, one letter a layer")
        return {}
    kinds = layers_of_pattern(flags["hybrid-override-pattern"], layers, "Megatron's --hybrid-override-pattern")
    found: dict[str, Any] = {"layer_types": kinds, "one_block_layers": True}
    if MAMBA in kinds:
        found |= MAMBA_FIXED | {key: whole(flags, flag, default) for flag, (key, default) in MAMBA_ARGUMENTS.items()}
        found["mamba_num_heads"] = whole(flags, "mamba-num-heads", 2 * hidden // found["mamba_head_dim"])
    return found


def _vocabulary(flags: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens of the tokenizer, and the rows of the tables, which are padded unless they are stated."""
    tokenizer = str(flags.get("tokenizer-type", "GPT2BPETokenizer"))
    rows = whole(flags, "padded-vocab-size") if "padded-vocab-size" in flags else 0
    if "vocab-size" in flags:
        tokens = whole(flags, "vocab-size") + (tokenizer == "NullTokenizer")  # which adds the end of a document
    elif not rows and tokenizer not in TOKENIZERS:
        raise InputError(f"Megatron's --tokenizer-type {tokenizer}: state its tokens, --vocab-size there or --vocab_size here")
    else:
        tokens = rows or TOKENIZERS[tokenizer]
    multiple = whole(flags, "make-vocab-size-divisible-by", 128) * whole(flags, "tensor-model-parallel-size", 1)
    return {"vocab_size": min(tokens, rows or tokens), "padded_vocab_size": rows or -(-tokens // multiple) * multiple}


def vocabulary_left_open(flags: Mapping[str, Any], assumptions: list[str]) -> dict[str, int]:
    """Return the tokens of a tokenizer that published arguments name without its size: of the shipped model that the name of
    --tokenizer-model begins with, else ASSUMED_VOCAB."""
    tokenizer = str(flags.get("tokenizer-type", "GPT2BPETokenizer"))
    if {"vocab-size", "padded-vocab-size"} & flags.keys() or tokenizer in TOKENIZERS:
        return {}
    called = spelling(str(flags.get("tokenizer-model", "")).rstrip("/").rpartition("/")[2])
    alike = max((name for name in shipped_models() if called.startswith(spelling(name))), key=len, default="")
    found = shipped_model(alike).vocab_size if alike else ASSUMED_VOCAB
    source = f"as {alike} has it" if alike else "assumed"
    assumptions.append(f"vocab_size: {found} ({source}; the arguments name {tokenizer} and no size)")
    return {"vocab-size": found}


def _attention(flags: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the window of attention, which the token itself is beside (transformer/utils.py), and the layers that have it;
    whether heads have a sink; and the layers with rotary embedding."""
    found: dict[str, Any] = {
        "attention_sinks": flags.get("softmax-type") == "learnable",
        "attention_gate": "attention-output-gate" in flags,
    }
    if "no-rope-freq" in flags:
        found["no_rope_layers"] = [1 - skips for skips in _layers_of(flags, "no-rope-freq", layers)]
    if "experimental-attention-variant" in flags:
        found |= _linear(flags, layers)
    if "window-size" not in flags:
        return found
    if "layer_types" in found:
        raise InputError("Megatron's --window-size with --experimental-attention-variant gated_delta_net is not modelled")
    left, right = _window(flags["window-size"])
    if right > 0:
        raise InputError(
            f"Megatron's --window-size {left},{right}: a window on tokens that follow is not modelled; {left},0 is"
        )
    found["sliding_window"] = left + 1 if left >= 0 else 0
    if left >= 0 and "window-attn-skip-freq" in flags:
        kinds = _layers_of(flags, "window-attn-skip-freq", layers)
        every = next((n for n, has in enumerate(kinds, 1) if not has), 0)
        regular = kinds == [int(not every or n % every != 0) for n in range(1, layers + 1)]
        listed = marked_layers(SLIDING_ATTENTION, kinds)
        found |= {"sliding_window_every": every} if regular else {"layer_types": listed}
    return found


def _linear(flags: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the layers with linear attention, all but every n-th or as listed, and its sizes."""
    if "linear-attention-freq" not in flags:
        raise InputError("Megatron's --experimental-attention-variant gated_delta_net needs --linear-attention-freq")
    kinds = marked_layers(LINEAR_ATTENTION, _layers_of(flags, "linear-attention-freq", layers))
    return {"layer_types": kinds, **{key: whole(flags, flag, default) for flag, (key, default) in LINEAR.items()}}


def _window(given: Any) -> tuple[int, int]:
    """Return (tokens before, tokens after) that a token sees: "127,0", "(127, 0)", or a pair; -1: all."""
    numbers = re.fullmatch(r"[(\[]?\s*(-?\d{1,9})\s*,\s*(-?\d{1,9})\s*[)\]]?", str(given))
    if not numbers:
        raise InputError(f"Megatron's --window-size is {shown(given)}; it must be two numbers, as 127,0")
    return int(numbers[1]), int(numbers[2])


def _experts(flags: Mapping[str, Any], ffn: int, layers: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "moe_intermediate_size": whole(flags, "moe-ffn-hidden-size", ffn),
        "num_experts_per_tok": whole(flags, "moe-router-topk", 2),
        "router_score": str(flags.get("moe-router-score-function", "softmax")),
        # learned where linears have biases (transformer/moe/router.py), or adjusted
        "router_bias": "disable-bias-linear" not in flags or "moe-router-enable-expert-bias" in flags,
        "shared_expert_gate": "moe-shared-expert-gate" in flags,
    }
    if "moe-layer-freq" in flags:
        given = flags["moe-layer-freq"]
        found["moe_layer_freq"] = int(given) if str(given).isdecimal() else _layers_of(flags, "moe-layer-freq", layers)
    return found


def _layers_of(flags: Mapping[str, Any], flag: str, layers: int) -> list[int]:
    """Return a 1 or a 0 for each layer: as a list expression says, like ([0]*3+[1]*11); or 0 for every n-th, and of
    ``--no-rope-freq`` 1 for it, where the flag is a number n."""
    given = flags[flag]
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return [int((n % given == 0) == (flag == "no-rope-freq")) for n in range(1, layers + 1)]
    kinds = given if isinstance(given, list) else _expression(str(given))
    if not isinstance(kinds, list) or any(kind not in (0, 1) for kind in kinds):
        raise InputError(f"Megatron's --{flag} is {shown(given)}; it must be a number or like ([0]*3+[1]*11)")
    if len(kinds) != layers:
        raise InputError(f"Megatron's --{flag} is of {len(kinds)} layers; --num-layers is {layers}")
    return [int(kind) for kind in kinds]


def _expression(text: str) -> Any:
    """Return the value of an expression of lists, + and *; None for what is none."""
    try:
        return read_assignments(f"layers = ({text})", "").values["layers"]
    except InputError:
        return None
