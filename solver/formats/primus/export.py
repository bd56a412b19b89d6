"""A layout as a YAML experiment of AMD's Primus; what solver.formats.primus.config reads as the same layout."""

from __future__ import annotations

import shlex
from typing import Any

from solver.formats.launch.torchrun import nodes_of
from solver.formats.megatron.arguments import FRAMEWORK
from solver.formats.megatron.export import megatron_arguments
from solver.formats.megatron.python_names import FLAGS, INVERTED
from solver.formats.primus import names
from solver.formats.syntax.yaml_text import write_yaml
from solver.spec.choices import V_SHAPED
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import chunk_layers, layers_of_chunks
from solver.spec.strategy import Strategy

VERSION = "Primus of 2026 over Megatron-LM"
_PYTHON = {flag: key for key, flag in FLAGS.items()}
Values = dict[str, Any]


def primus_files(model: ModelSpec, run: Strategy, gpus_per_node: int, name: str) -> dict[str, str]:
    """Return file name -> text of NAME.yaml, and of NAME.sh that starts it.

    Raises InputError for what Primus or Megatron's arguments do not express.
    """
    zero_bubble = run.schedule in names.ZERO_BUBBLE
    turbo = run.moe_dispatcher == "deepep"
    megatron = run.replace(
        framework=FRAMEWORK,
        recompute_stage_layers="",
        schedule="1f1b" if run.vpp == 1 else "interleaved",
        moe_dispatcher="alltoall" if turbo else run.moe_dispatcher,
    )
    flags = {flag.lstrip("-"): value for flag, value in megatron_arguments(model, megatron).items()}
    overrides: Values = {
        _PYTHON.get(flag, flag.replace("-", "_")): value for flag, value in flags.items() if flag not in INVERTED.values()
    }
    overrides |= {key: False for key in names.BASE if key not in overrides and isinstance(names.BASE[key], bool)}
    overrides |= {key: flag not in flags for key, flag in INVERTED.items() if flag in flags or key in names.BASE}
    del overrides["lr"]  # as its pre_trainer.yaml has it
    if zero_bubble:
        _, v_shaped, memory = names.ZERO_BUBBLE[run.schedule]
        overrides |= {
            "patch_zero_bubble": True,
            "zero_bubble_v_schedule": v_shaped,
            "zero_bubble_v_schedule_mem_setup": memory,
            "no_persist_layer_norm": True,
            "create_attention_mask_in_dataloader": False,
        }
    if turbo:
        overrides |= {"enable_primus_turbo": True, "use_turbo_deepep": True}
    if run.recompute_stage_layers:
        overrides |= {"recompute_method": None, "recompute_num_layers": None, "recompute_layer_ids": _layer_ids(run)}
    trainer = {
        "framework": "megatron",
        "config": "pre_trainer.yaml",
        "model": f"{names.WITHOUT_MODEL}.yaml",
        "overrides": overrides,
    }
    sections = {
        "work_group": "${PRIMUS_TEAM:amd}",
        "user_name": "${PRIMUS_USER:root}",
        "exp_name": name,
        "workspace": "${PRIMUS_WORKSPACE:./output}",
        "modules": {"pre_trainer": trainer},
    }
    nodes, each = nodes_of(run, gpus_per_node)
    how = "direct" if nodes == 1 else f"slurm srun -N {nodes}"
    comments = [f"{model.name} on {run.world_size} GPUs, for {VERSION}. Data and tokenizer are yours to name."]
    script = [
        "#!/bin/sh",
        f"# {comments[0]}",
        f"export NNODES={nodes} GPUS_PER_NODE={each}",
        f"primus-cli {how} -- train pretrain --config {shlex.quote(name)}.yaml",
        "",
    ]
    return {f"{name}.yaml": write_yaml(sections, comments), f"{name}.sh": "\n".join(script)}


def _layer_ids(run: Strategy) -> list[int]:
    """Return the layers that are recomputed, numbered through the model: the first ones of each stage."""
    stages = layers_of_chunks(chunk_layers(run.pipeline_layout), run.pp, run.schedule in V_SHAPED)
    return sorted(
        layer for held, count in zip(stages, run.recomputed_of_stages, strict=True) for layer in held[:count].tolist()
    )
