"""A program around transformers' trainer that torchrun starts without accelerate's settings: the trainer makes them itself.

Source: huggingface/transformers src/transformers/training_args.py (``fsdp``, ``fsdp_config``) of releases 4: the sharding
strategy and ``auto_wrap`` of --fsdp, and the keys of --fsdp_config, with or without ``fsdp_`` before them. Without --fsdp ranks
are DDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.accelerate.config import DTYPES, STRATEGIES, read_accelerate
from solver.formats.file_run import FileRun, Source
from solver.formats.launch.ranks import ranks_of_launch
from solver.formats.launch.trainer_script import UNREAD, json_argument, trainer_at, trainer_precision
from solver.formats.launch.words import arguments, environment, of_environment, script_words, with_script
from solver.formats.syntax.literal_python import Section

#: Arguments that the settings made here state.
_FSDP = ("--fsdp", "--fsdp_config", "--fsdp_transformer_layer_cls_to_wrap", "--fsdp_min_num_params")
_WRAPS, _OFFLOADS = "auto_wrap", "offload"


def read_trainer(source: Source) -> FileRun:
    """Return the run of a script that starts a trainer's program by torchrun, Slurm or MPI.

    Raises InputError for what accelerate's reader refuses, and for FSDP of another unit than a layer.
    """
    words = script_words(source)
    at = trainer_at(words)
    assert at is not None, "the script was found to start one"
    launch, given = (
        ranks_of_launch(words[:at], source, environment(source, at)),
        arguments(words[at + 1 :], source.path, UNREAD),
    )
    settings, left_out = of_environment(source, at)
    precision = trainer_precision(given, source.path)
    sections = Section.of(
        {
            "distributed_type": "FSDP" if "--fsdp" in given else "MULTI_GPU" if launch.world_size > 1 else "NO",
            "num_processes": launch.world_size,
            "num_machines": launch.nodes,
            "mixed_precision": next(word for word, own in DTYPES.items() if own == precision),
        }
    )
    if "--fsdp" in given:
        sections["fsdp_config"] = Section.of(_fsdp(given, source))
    elif unread := [name for name in _FSDP if name in given]:
        raise InputError(f"{source.path}: {unread[0]} changes nothing without --fsdp; state both or none")
    run = read_accelerate(sections, with_script(source, source.path, source.text), _FSDP)
    return replace(run, layout={**run.layout, **settings}, notes=(*run.notes, *left_out), gpus_per_node=launch.gpus_per_node)


def _fsdp(given: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return accelerate's fsdp_config of --fsdp and what stands beside it."""
    words = str(given["--fsdp"]).lower().split()
    strategies = [word.upper() for word in words if word.upper() in STRATEGIES]
    other = [word for word in words if word.upper() not in STRATEGIES and word not in (_WRAPS, _OFFLOADS)]
    if other or len(strategies) != 1:
        names = ", ".join(name.lower() for name in STRATEGIES)
        raise InputError(f"{source.path}: --fsdp is {shown(given['--fsdp'])}; it must be one of {names}, and auto_wrap")
    if _OFFLOADS in words:
        raise InputError(f"{source.path}: --fsdp with offload is not modelled: parameters on the host")
    stated = _stated(given, source)
    if _WRAPS not in words or float(stated.pop("fsdp_min_num_params", 0) or given.get("--fsdp_min_num_params", 0)):
        raise InputError(
            f"{source.path}: --fsdp needs auto_wrap, and no least number of parameters: another unit of FSDP than a layer is "
            "not modelled"
        )
    if stated.pop("fsdp_version", 1) != 1 or stated.pop("fsdp_xla", False):
        raise InputError(f"{source.path}: --fsdp_config of FSDP2 or XLA is not read; give accelerate's YAML (--config_file)")
    prefetches = [key for key in ("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy") if key in stated]
    stated |= {key: str(stated[key]).upper() for key in prefetches}
    stated.pop("fsdp_limit_all_gathers", None)  # gathers that run ahead are bounded either way
    return {"fsdp_sharding_strategy": strategies[0], **stated}


def _stated(given: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """Return the keys of --fsdp_config, each with ``fsdp_`` before it."""
    plain, _ = json_argument(given, "--fsdp_config", source)
    return {key if key.startswith("fsdp_") else f"fsdp_{key}": value for key, value in plain.items()}
