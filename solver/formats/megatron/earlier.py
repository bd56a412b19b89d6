"""Arguments that earlier releases of Megatron-LM had, as those of today that mean the same.

Source: definitions of these arguments in NVIDIA/Megatron-LM megatron/arguments.py of 2020 to 2023 and in its forks, read in
excerpts; that of --activations-checkpoint-method as it is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown

#: Switch of an earlier release -> today's argument and its value.
_SWITCHES: Mapping[str, tuple[str, str]] = {"fp8-hybrid": ("fp8-format", "hybrid"), "fp8-e4m3": ("fp8-format", "e4m3")}
#: Arguments without a place here, with the values that change nothing.
_GONE: Mapping[str, tuple[object, ...]] = {
    "data-impl": ("mmap", "lazy", "cached", "infer"),
    "DDP-impl": ("local",),
    "no-contiguous-buffers-in-local-ddp": (True,),  # where gradients lie, not what is summed or sent
}
#: Whole layers are recomputed where one of these stands: 2020 to 2021 the first, 2021 to 2022 the second.
_CHECKPOINTS, _METHOD = "checkpoint-activations", "activations-checkpoint-method"
#: How many layers share a checkpoint, or of a stage are recomputed with the method block.
_COUNTS = ("checkpoint-num-layers", "activations-checkpoint-num-layers")
EARLIER = frozenset((*_SWITCHES, *_GONE, _CHECKPOINTS, _METHOD, *_COUNTS))


def as_today(flags: Mapping[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """Return arguments with those of earlier releases as today's; says which were, and what today's release ignores.

    Raises InputError for an earlier argument beside today's of the same meaning, and for one whose effect is not modelled.
    """
    for flag, same in _GONE.items():
        if flag in flags and flags[flag] not in same:
            raise InputError(f"Megatron's --{flag} {shown(flags[flag])} is not modelled; {shown(same[0])} is")
    found = {flag: value for flag, value in flags.items() if flag not in EARLIER}
    earlier = sorted(flags.keys() & EARLIER)
    today = {_SWITCHES[flag][0]: _SWITCHES[flag][1] for flag in earlier if flag in _SWITCHES} | _recomputed(flags)
    twice = sorted(found.keys() & today.keys())
    if twice:
        raise InputError(f"Megatron's --{earlier[0]} is an earlier release's --{twice[0]}; leave one out")
    if earlier:
        names = ", ".join(f"--{flag}" for flag in earlier)
        assumptions.append(
            f"framework: {names}: of an earlier release, whose run is estimated as today's; --framework megatron-lm-2021 and "
            "megatron-lm-2023 are earlier ones"
        )
    return _selective(found | today, assumptions)


def _recomputed(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return today's arguments of what an earlier release recomputes: whole layers, unless it says none."""
    if _CHECKPOINTS not in flags and _METHOD not in flags:
        return {}
    method = flags.get(_METHOD, "uniform")
    if method not in ("uniform", "block"):
        raise InputError(f"Megatron's --{_METHOD} is {shown(method)}; it must be uniform or block")
    count = next((flags[flag] for flag in _COUNTS if flag in flags), 1)
    return {"recompute-granularity": "full", "recompute-method": method, "recompute-num-layers": count}


def _selective(flags: dict[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """Return arguments without a granularity that --recompute-activations overrules (validate_args), which is said."""
    if "recompute-activations" not in flags or flags.get("recompute-granularity") != "full":
        return flags
    assumptions.append("ignored, as Megatron does with --recompute-activations: --recompute-granularity full")
    overruled = ("recompute-granularity", "recompute-method", "recompute-num-layers")
    return {flag: value for flag, value in flags.items() if flag not in overruled}
