"""A layout as a YAML file of nanotron; what solver.formats.nanotron.config reads as the same layout, with its sources."""

from __future__ import annotations

from typing import Any

from profiler.errors import require
from solver.formats.hugging_face.untimed import stated_number
from solver.formats.launch.torchrun import torchrun
from solver.formats.nanotron.config import DTYPES, ENGINES, MODES, USUAL_PADDING
from solver.formats.syntax.yaml_text import write_yaml
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

VERSION = "nanotron of winter 2024-25"


def nanotron_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of NAME.yaml. Raises InputError for what nanotron's settings do not express, by name."""
    _refuse(model, run)
    comments = [
        f"{model.name} on {run.world_size} GPUs, for {VERSION}.",
        "The dataset and the tokenizer are yours to name; without a dataset it trains on random tokens.",
        f"CUDA_DEVICE_MAX_CONNECTIONS=1 {torchrun(run, gpus_per_node)} run_train.py --config-file {name}.yaml",
    ]
    return {f"{name}.yaml": write_yaml(_sections(model, run, name), comments)}


def _refuse(model: ModelSpec, run: Strategy) -> None:
    rules = (
        (not model.is_mixture_of_experts, f"{model.name}: mixtures of experts under nanotron are not modelled"),
        (run.cp == 1, f"cp {run.cp}: context parallelism under nanotron is not modelled"),
        (run.pp == 1 or run.schedule in ENGINES.values(), f"schedule {run.schedule}: nanotron runs 1f1b and gpipe"),
        (run.precision in DTYPES.values(), f"precision {run.precision}: nanotron trains in {', '.join(DTYPES.values())}"),
        (run.tp == 1 or run.tp_mode in MODES.values(), f"tp_mode {run.tp_mode}: nanotron has {' and '.join(MODES.values())}"),
        (run.zero < 2, f"zero {run.zero}: nanotron has ZeRO-0 and 1"),
        (
            not run.zero or run.zero_shard_size == run.dp,
            f"zero_shard_size {run.zero_shard_size}: nanotron's ZeRO shards over all {run.dp} data-parallel ranks",
        ),
        (run.recompute != "selective", "recompute selective: nanotron recomputes whole layers"),
        (
            run.recompute == "none" or run.recompute_layers < 0 or run.recompute_layers * run.pp >= model.num_hidden_layers,
            f"recompute_layers {run.recompute_layers}: nanotron recomputes all layers or none",
        ),
    )
    require(rules)


def _sections(model: ModelSpec, run: Strategy, name: str) -> dict[str, Any]:
    theirs = {ours: word for word, ours in (*ENGINES.items(), *MODES.items(), *DTYPES.items())}
    split = run.tp_mode == "msp" and run.tp > 1
    return {
        "general": {"project": "foretrain", "run": name, "seed": 42, "ignore_sanity_checks": True},
        "parallelism": {
            "dp": run.dp,
            "pp": run.pp,
            "tp": run.tp,
            "expert_parallel_size": 1,
            "pp_engine": theirs[run.schedule] if run.pp > 1 else "1f1b",
            "tp_mode": "REDUCE_SCATTER" if split else "ALL_REDUCE",
            "tp_linear_async_communication": split,
            "tp_recompute_allgather": True,
            "recompute_layer": run.recompute == "full",
        },
        "model": {
            "ddp_bucket_cap_mb": 25,
            "dtype": theirs[run.precision],
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": model.padded_vocab_size // run.tp or USUAL_PADDING,
            "model_config": _model(model, run),
        },
        "tokens": {
            "sequence_length": run.seq_len,
            "micro_batch_size": run.micro_batch_size,
            "batch_accumulation_per_replica": run.num_micro_batches,
            "train_steps": 1000,
            "val_check_interval": -1,
            "limit_val_batches": 0,
            "limit_test_batches": 0,
        },
        "optimizer": {
            "zero_stage": run.zero,
            "accumulate_grad_in_fp32": run.grad_dtype == "fp32",
            "clip_grad": 1.0,
            "weight_decay": 0.01,
            "optimizer_factory": {
                "name": "adamW",
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "adam_eps": 1.0e-8,
                "torch_adam_is_fused": True,
            },
            "learning_rate_scheduler": {
                "learning_rate": 0.0003,
                "lr_warmup_steps": 2,
                "lr_warmup_style": "linear",
                "lr_decay_style": "cosine",
                "lr_decay_steps": 998,
                "min_decay_lr": 1.0e-5,
            },
        },
        "data_stages": [
            {"name": "training", "start_training_step": 1, "data": {"dataset": None, "num_loading_workers": 1, "seed": 42}}
        ],
        "tokenizer": {"tokenizer_name_or_path": "gpt2", "tokenizer_revision": None, "tokenizer_max_length": None},
        "checkpoints": {
            "checkpoint_interval": 1000,
            "checkpoints_path": "checkpoints",
            "save_initial_state": False,
            "resume_checkpoint_path": None,
            "checkpoints_path_is_shared_file_system": False,
        },
        "logging": {"iteration_step_info_interval": 1, "log_level": "info", "log_level_replica": "info"},
    }


#: Keys of a config.json without a part in any time that its model has too.
CARRIED = frozenset(("rope_theta", "rms_norm_eps"))


def _model(model: ModelSpec, run: Strategy) -> dict[str, Any]:
    return {
        "is_llama_config": True,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_hidden_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "vocab_size": model.vocab_size,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings or run.seq_len,
        "tie_word_embeddings": model.tie_word_embeddings,
        "rms_norm_eps": stated_number(model, "rms_norm_eps") or 1.0e-5,
        "rope_theta": float(stated_number(model, "rope_theta") or 10000.0),
        "rope_scaling": None,
        "rope_interleaved": False,
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "pretraining_tp": 1,
        "use_cache": True,
    }
