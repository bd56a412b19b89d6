"""accelerate's YAML for DeepSpeed: settings in the file itself, or in the JSON that it names.

Source: the files that TRL 1.16 ships, as read; what accelerate makes of them as it is known, not read. Buckets and thresholds
that neither states are DeepSpeed's own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.deepspeed.config import read_deepspeed
from solver.formats.deepspeed.names import AUTO, PRECISIONS
from solver.formats.file_run import FileRun, Source
from solver.formats.syntax.known_keys import Known, keys, unread_keys
from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader

SETTINGS = keys(
    "deepspeed_config_file deepspeed_multinode_launcher deepspeed_hostfile deepspeed_inclusion_filter "
    "deepspeed_exclusion_filter gradient_accumulation_steps gradient_clipping offload_optimizer_device "
    "offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag zero3_save_16bit_model zero_stage"
)
_STAGE = 2  #: of ZeRO, unless a file states it (DeepSpeedPlugin)
_DEVICES = ("none", "cpu", "nvme")


def read_deepspeed_settings(sections: Section, file: SectionReader, known: Known, source: Source, world: int) -> FileRun:
    """Return the run of a file whose distributed_type is DEEPSPEED on the ranks that it states.

    Raises InputError for a JSON that is not there, and for what solver.formats.deepspeed refuses.
    """
    given = file.section("deepspeed_config")
    name = given.get("deepspeed_config_file")
    text = source.beside(str(name)) if name else json.dumps(_settings(given, file))
    if text is None:
        raise given.wrong("deepspeed_config_file", "a JSON beside it")
    run = read_deepspeed(replace(source, text=text, world=world))
    ranks = run.layout.get("world_size", world)
    if ranks != world:
        raise InputError(f"{source.path}: num_processes is {world}, but its script launches {ranks}; write the same there")
    machines = file.whole("num_machines", 1)
    layout = {**run.layout, "world_size": world, "dp": world, "zero_shard_size": world if run.layout["zero"] else 1}
    assumed = tuple(key for key in run.assumed if key != "world_size")
    ignored = (*unread_keys(sections, known, "", file.read), *(key for key in run.ignored if key.startswith("-")))
    per_node = world // machines if machines > 1 else 0
    return replace(run, layout=layout, assumed=assumed, ignored=ignored, gpus_per_node=per_node)


def _settings(given: SectionReader, file: SectionReader) -> dict[str, Any]:
    """Return DeepSpeed's settings as accelerate makes them of its own."""
    precision, steps = str(file.get("mixed_precision", "no")), given.get("gradient_accumulation_steps", AUTO)
    if precision not in (*PRECISIONS, "no"):
        raise file.wrong("mixed_precision", f"one of {', '.join(PRECISIONS)} or no")
    if steps != AUTO and type(steps) is not int:
        raise InputError(f"{given.place}.gradient_accumulation_steps is {shown(steps)}; it must be a whole number or auto")
    zero: dict[str, Any] = {"stage": given.whole("zero_stage", _STAGE, least=0)}
    for part in ("optimizer", "param"):
        device = given.choice(f"offload_{part}_device", _DEVICES, "none")
        zero |= {f"offload_{part}": {"device": device}} if device != "none" else {}
    return {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": steps,
        "zero_optimization": zero,
        **{name: {"enabled": name == precision} for name in PRECISIONS},
    }
