"""nanotron's YAML files as a model and a layout, and the keys that they may hold.

Sources: huggingface/nanotron src/nanotron/config/config.py (commit 00708b8), parallelism_config.py (19f88fb), models_config.py,
and examples/config_tiny_llama.yaml (09fd0ec). A missing key has nanotron's default.
"""

from __future__ import annotations

from typing import Any

from profiler.errors import InputError
from solver.formats.file_run import FileRun, Source
from solver.formats.nanotron.rules import RULES
from solver.formats.rule import Arguments, broken, flattened
from solver.formats.syntax.known_keys import Described, Known, keys, open_sections, unread_keys
from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec

FRAMEWORK = "nanotron"
ENGINES = {"1f1b": "1f1b", "afab": "gpipe"}
MODES = {"ALL_REDUCE": "mtp", "REDUCE_SCATTER": "msp"}
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
#: make_vocab_size_divisible_by that pads as a model whose padding is not stated is padded here.
USUAL_PADDING = 128

KNOWN: Known = keys(
    "checkpoints data_stages general lighteval logging profiler tokenizer s3_upload metrics_logging",
    model=keys(
        "ddp_bucket_cap_mb dtype init_method make_vocab_size_divisible_by",
        model_config=keys(
            "bos_token_id eos_token_id hidden_act hidden_size initializer_range intermediate_size is_llama_config "
            "max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads pad_token_id pretraining_tp "
            "rms_norm_eps rope_interleaved rope_scaling rope_theta tie_word_embeddings use_cache vocab_size "
            # of its Qwen2 (models_config.py, Qwen2Config), which SmolLM3 is too
            "is_qwen2_config _attn_implementation _fused_rms_norm _fused_rotary_emb _use_doc_masking _use_qkv_packed "
            "attention_bias flex_attention_mask interleaved_rotary log_attn_probs moe_config no_rope_layer "
            "ring_attn_heads_k_stride sliding_window_size z_loss_coefficient z_loss_enabled"
        ),
    ),
    optimizer=keys(
        "accumulate_grad_in_fp32 clip_grad learning_rate_scheduler weight_decay weight_decay_exclude_named_params zero_stage",
        optimizer_factory=keys("adam_beta1 adam_beta2 adam_eps name torch_adam_is_fused"),
    ),
    parallelism=keys(
        "dp pp tp pp_engine tp_mode tp_linear_async_communication tp_recompute_allgather recompute_layer moe_layer_recompute "
        "expert_parallel_size context_parallel_size"
    ),
    tokens=keys(
        "batch_accumulation_per_replica limit_test_batches limit_val_batches micro_batch_size sequence_length train_steps "
        "val_check_interval"
    ),
)
#: Keys whose effect is left out of the estimate, with what it is.
_LEFT_OUT = {
    "is_qwen2_config": "what kernels of nanotron's Qwen2 take otherwise than those of its Llama, which are estimated",
    "_use_doc_masking": "attention that ends where documents do",
}
DESCRIBED: Described = {
    "model.ddp_bucket_cap_mb": ((25,), "another size of buckets"),
    "model.model_config.hidden_act": (("silu",), "another activation than a gated one"),
    "model.model_config.is_llama_config": ((True,), "another model than nanotron's Llama"),
    "model.model_config.is_qwen2_config": ((True,), "another model than nanotron's Llama"),
    "model.model_config._attn_implementation": ((None, "flash_attention_2"), "another kernel of attention"),
    "model.model_config.attention_bias": ((False,), "biases under nanotron"),
    "model.model_config.moe_config": ((None,), "a mixture of experts under nanotron"),
    "model.model_config.sliding_window_size": ((None,), "a window of attention under nanotron"),
    "model.model_config.z_loss_enabled": ((False,), "another loss"),
    "optimizer.optimizer_factory.name": (("adamW", "adam"), "another optimizer than Adam"),
    "optimizer.optimizer_factory.torch_adam_is_fused": ((True,), "an Adam of several kernels"),
    "parallelism.expert_parallel_size": ((1,), "a mixture of experts under nanotron"),
    "parallelism.context_parallel_size": ((1,), "context parallelism under nanotron"),
}


def is_nanotron(sections: Section) -> bool:
    return "parallelism" in sections and "tokens" in sections


def read_nanotron(sections: Section, source: Source) -> FileRun:
    """Return the run of a file. Raises InputError for keys and values that are not known or not modelled."""
    where = str(source.path)
    file = open_sections(sections, KNOWN, DESCRIBED, where)
    parallelism = file.section("parallelism")
    dp, tp, pp = (parallelism.whole(key) for key in ("dp", "tp", "pp"))
    layout = {
        **framework_of(FRAMEWORK).flags,
        "framework": FRAMEWORK,
        "world_size": dp * tp * pp,
        "dp": dp,
        "tp": tp,
        "pp": pp,
        **_parallelism(parallelism, tp, pp),
        **_optimizer(file, dp),
        **_tokens(file.section("tokens")),
    }
    model = _model(file.section("model"), tp, source.path.stem)
    config = file.section("model").section("model_config")
    notes = tuple(f"left out of the estimate: {what} ({key})" for key, what in _LEFT_OUT.items() if config.flag(key, False))
    refusals = broken(RULES, Arguments(flattened(sections), dp * tp * pp))
    return FileRun(model, layout, (), tuple(unread_keys(sections, KNOWN, "", file.read)), notes, refusals)


def _parallelism(parallelism: SectionReader, tp: int, pp: int) -> dict[str, Any]:
    """Return modes and schedule. nanotron's linears communicate beside compute only where activations are split."""
    mode = parallelism.text("tp_mode", "ALL_REDUCE").upper()
    if mode not in MODES:
        raise parallelism.wrong("tp_mode", f"one of {', '.join(MODES)}")
    beside = parallelism.flag("tp_linear_async_communication", False)
    again = parallelism.flag("tp_recompute_allgather", True)
    if tp > 1 and beside != (mode == "REDUCE_SCATTER"):
        raise parallelism.wrong(
            "tp_linear_async_communication", "true with REDUCE_SCATTER and false with ALL_REDUCE; others are not modelled"
        )
    if tp > 1 and not again:
        raise parallelism.wrong("tp_recompute_allgather", "true, because keeping gathered inputs is not modelled")
    engine = parallelism.choice("pp_engine", ENGINES, "afab")
    return {
        "tp_mode": MODES[mode] if tp > 1 else "mtp",
        "schedule": ENGINES[engine] if pp > 1 else "1f1b",
        "vpp": 1,
        "recompute": "full" if parallelism.flag("recompute_layer", False) else "none",
        "recompute_layers": -1,
    }


def _optimizer(file: SectionReader, dp: int) -> dict[str, Any]:
    optimizer, model = file.section("optimizer"), file.section("model")
    precision = DTYPES[model.choice("dtype", DTYPES, "bfloat16")]
    zero = optimizer.whole("zero_stage", 0, least=0)
    if zero > 1:
        raise optimizer.wrong("zero_stage", "0 or 1, the stages that nanotron has")
    wide = optimizer.flag("accumulate_grad_in_fp32", True)
    return {
        "zero": zero,
        "zero_shard_size": dp if zero else 1,
        "precision": precision,
        "grad_dtype": "fp32" if wide else precision,
    }


def _tokens(tokens: SectionReader) -> dict[str, int]:
    return {
        "seq_len": tokens.whole("sequence_length"),
        "micro_batch_size": tokens.whole("micro_batch_size"),
        "num_micro_batches": tokens.whole("batch_accumulation_per_replica"),
    }


def _model(model: SectionReader, tp: int, name: str) -> ModelSpec:
    """Return nanotron's Llama; its vocabulary is padded to a multiple of make_vocab_size_divisible_by * tp."""
    config = model.section("model_config")
    hidden, heads, vocab = (config.whole(key) for key in ("hidden_size", "num_attention_heads", "vocab_size"))
    if hidden % heads:
        raise config.wrong("num_attention_heads", f"a divisor of hidden_size {hidden}")
    multiple = model.whole("make_vocab_size_divisible_by", 1)
    padded = -(-vocab // (multiple * tp)) * multiple * tp
    try:
        return ModelSpec(
            name=name,
            hidden_size=hidden,
            intermediate_size=config.whole("intermediate_size"),
            num_hidden_layers=config.whole("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=config.whole("num_key_value_heads", heads),
            head_dim=hidden // heads,
            vocab_size=vocab,
            padded_vocab_size=0 if multiple == USUAL_PADDING else padded,
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            max_position_embeddings=config.whole("max_position_embeddings", 0, least=0),
            no_rope_layers=_no_rope(config),
        )
    except InputError as error:
        raise InputError(f"{config.place}: {error}") from None


def _no_rope(config: SectionReader) -> tuple[int, ...]:
    """Return which layers have rotary embedding: all but every no_rope_layer-th."""
    if config.get("no_rope_layer") is None:
        return ()
    every = config.whole("no_rope_layer")
    return tuple(int((layer + 1) % every != 0) for layer in range(config.whole("num_hidden_layers")))
