"""What a trainer's log says of its run, beside the layout that it is compared with: one log of another run teaches nonsense."""

from __future__ import annotations

import math
import re
from pathlib import Path

from profiler.errors import InputError
from profiler.profile.devices import DATASHEETS, device_named
from solver.spec.strategy import Strategy

#: A whole number after a name, which nanotron's shortened ones (1.02K) are not.
_COUNT = r"[\s.:=]+([0-9]{1,9})(?![\w.]|,\d)"
#: What is said -> names of it in the logs and argument lists of Megatron-LM, NeMo, torchtitan, nanotron and DeepSpeed.
_NAMES = {
    "global batch size": r"(?:global[_ ]batch[_ ]size|print\]\s+train_batch_size)",  # DeepSpeed's; others' is of one device
    "micro batch size": r"(?:micro[_ ]batch[_ ]size|train_micro_batch_size_per_gpu)",
    "ZeRO stage": r"zero_optimization_stage",
    "sequence length": r"(?:sequence[_ ]length|(?:encoder_)?seq_length|seq_len)",
    "world size": r"world[_ ]size",
    "tensor-parallel size": r"tensor_model_parallel_size",
    "pipeline-parallel size": r"pipeline_model_parallel_size",
}
#: torchtitan: Building 2-D device mesh with ['dp_shard', 'tp'], [8, 4].
_MESH = re.compile(r"device mesh with \[[^\]]*\], \[(\d+(?:, ?\d+)*)\]")
#: Since 0.2: Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=8, cp=1, tp=4, ep=1, etp=1.
_DEGREES = re.compile(r"device mesh with parallelism: (\w+=\d+(?:, \w+=\d+)*)")
_GPU = re.compile(r"\b((?:NVIDIA|AMD Instinct)[ -][A-Z]{1,2}\d{2,3}[\w-]*)((?: [\w-]+){0,3})")


def check_statements(text: str, path: Path, run: Strategy, hardware: str) -> None:
    """Raise InputError where a log states another batch, sequence, size or GPU than the layout and the profile have.

    hardware: name of the profile.
    """
    ours = {
        "global batch size": run.global_batch_sequences,
        "micro batch size": run.micro_batch_size,
        "sequence length": run.seq_len,
        "world size": run.world_size,
        "tensor-parallel size": run.tp,
        "pipeline-parallel size": run.pp,
        "ZeRO stage": run.zero,
    }
    for what, name in _NAMES.items():
        said = re.findall(rf"\b{name}{_COUNT}", text)
        if said and str(ours[what]) not in said:  # a batch that grows is said often, and so are sizes of smaller groups
            raise InputError(
                f"{path}: its {what} is {said[-1]}, but that of the layout is {ours[what]}; give the run's own layout"
            )
    if meshes := _MESH.findall(text):
        ranks = max(math.prod(map(int, sizes.split(","))) for sizes in meshes)
        if ranks != run.world_size:
            raise InputError(f"{path}: its device mesh has {ranks} ranks, but the layout has {run.world_size}")
    for degrees in _DEGREES.findall(text):
        _check_degrees(dict(part.split("=") for part in degrees.split(", ")), path, run)
    if hardware in DATASHEETS:
        for gpu, more in set(_GPU.findall(text)):
            words = [gpu, *more.split()]
            spellings = [" ".join(words[:count]) for count in range(len(words), 0, -1)]
            named = next((found for word in spellings if (found := device_named(word)) in DATASHEETS), hardware)
            if _chip(named) != _chip(hardware):
                raise InputError(f"{path}: it ran on {named}, but the profile is {hardware}; give --profile {named}")


def _check_degrees(said: dict[str, str], path: Path, run: Strategy) -> None:
    """Raise InputError where torchtitan's degrees are of another layout."""
    theirs: dict[str, int] = {axis: int(said[axis]) for axis in ("tp", "pp", "cp", "ep") if axis in said}
    theirs["dp"] = int(said.get("dp_replicate", 1)) * int(said.get("dp_shard", 1))
    for axis, degree in theirs.items():
        if degree != getattr(run, axis):
            raise InputError(f"{path}: its device mesh has {axis} {degree}, but the layout has {getattr(run, axis)}")


def _chip(device: str) -> str:
    """Return the chip of a device's name, whose boards and memories a driver does not always tell apart."""
    found = re.match(r"g?([a-z]+\d+)", device)
    return found[1] if found else device
