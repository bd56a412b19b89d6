"""A layout as accelerate's YAML, with the model as a config.json and the batch in a script that launches both."""

from __future__ import annotations

import shlex
from typing import Any

from profiler.errors import InputError, require
from solver.formats.accelerate.config import DTYPES, FSDP1, FSDP2, STRATEGIES
from solver.formats.file_run import model_path
from solver.formats.hugging_face.export import config_json
from solver.formats.launch.torchrun import nodes_of
from solver.formats.launch.trainer_script import SYNC_RELEASES, trainer_lines
from solver.formats.syntax.yaml_text import write_yaml
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

VERSION = {FSDP1: "accelerate 0.24 and later (FSDP1)", FSDP2: "accelerate 1.14 and later (FSDP2)"}
_OF_DDP = "accelerate 0.24 and later (DDP)"


def accelerate_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of NAME.yaml, NAME.sh and the model. Raises InputError for what they do not express, by name."""
    _refuse(model, run)
    framework = framework_of(run.framework).name
    machines, _ = nodes_of(run, gpus_per_node)
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": "FSDP" if framework in VERSION else "MULTI_GPU" if run.world_size > 1 else "NO",
        "downcast_bf16": "no",
        "mixed_precision": next(word for word, dtype in DTYPES.items() if dtype == run.precision),
        "num_machines": machines,
        "num_processes": run.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if framework in VERSION:
        settings["fsdp_config"] = _fsdp(run, framework, machines)
    if framework == FSDP2 and run.zero_shard_size != run.dp:
        settings["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": run.dp // run.zero_shard_size,
            "parallelism_config_dp_shard_size": run.zero_shard_size,
        }
    if run.compile:
        settings["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": False}
    comment = f"{model.name} on {run.world_size} GPUs, for {VERSION.get(framework, _OF_DDP)}."
    syncs = framework in VERSION and run.zero > 0 and run.num_micro_batches > 1 and not run.defer_grad_sync
    wide = {"bf16": "--bf16", "fp16": "--fp16"}.get(run.precision, "")
    script = [
        "#!/bin/sh",
        f"# {comment}",
        "# Run it on every node, with its --machine_rank and the first one's --main_process_ip.",
        "# DATASET and TOKENIZER are yours; the model is made anew from its config.json.",
        *([f"# {SYNC_RELEASES}."] if syncs else []),
        f"accelerate launch --config_file {shlex.quote(f'{name}.yaml')} \\",
        *trainer_lines(run, name, wide, syncs=syncs),
    ]
    return {
        f"{name}.yaml": write_yaml(settings, [comment]),
        f"{name}.sh": "\n".join(script),
        model_path(name): config_json(model),
    }


def _refuse(model: ModelSpec, run: Strategy) -> None:
    framework = framework_of(run.framework).name
    rules = (
        (
            run.tp * run.cp * run.pp == 1,
            f"tp {run.tp}, cp {run.cp}, pp {run.pp}: accelerate's files are for data parallelism",
        ),
        (run.precision in DTYPES.values(), f"precision {run.precision}: accelerate's mixed_precision is {', '.join(DTYPES)}"),
        (
            framework not in VERSION or run.grad_dtype == run.precision,
            f"grad_dtype {run.grad_dtype}: accelerate's FSDP reduces in the type of mixed precision ({run.precision}): "
            f"--set grad_dtype={run.precision}",
        ),
        (run.recompute != "selective", "recompute selective: accelerate's fsdp_activation_checkpointing is of whole layers"),
        (
            run.recompute == "none" or not 0 <= run.recompute_layers < model.num_hidden_layers,
            f"recompute_layers {run.recompute_layers}: accelerate recomputes all layers or none",
        ),
        (run.recompute == "none" or framework in VERSION, "recompute full: accelerate's DDP leaves it to the program"),
        (framework != FSDP2 or run.zero > 1, f"zero {run.zero}: FSDP2 shards parameters; DDP is --framework pytorch-ddp"),
        (framework in VERSION or not run.zero, f"zero {run.zero}: accelerate's DDP keeps whole copies (--fix zero=0)"),
    )
    require(rules)


def _fsdp(run: Strategy, framework: str, machines: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "fsdp_version": 1,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": run.recompute == "full",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if framework == FSDP2:
        return found | {"fsdp_version": 2, "fsdp_reshard_after_forward": run.zero == 3}
    of_node = run.zero > 0 and run.zero_shard_size != run.world_size
    if of_node and run.zero_shard_size * machines != run.world_size:
        raise InputError(
            f"zero_shard_size {run.zero_shard_size}: FSDP1 shards over all {run.world_size} ranks or the "
            f"{run.world_size // machines} of a node"
        )
    strategy = next((word for word, meant in STRATEGIES.items() if meant == (run.zero, of_node)), None)
    if strategy is None:
        raise InputError(f"zero {run.zero}: FSDP1 has stages 0, 2 and 3")
    return found | {
        "fsdp_sharding_strategy": strategy,
        "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False,
        "fsdp_sync_module_states": True,
        "fsdp_use_orig_params": True,
    }
