"""Number formats in Megatron-LM's arguments: those of the layers' arithmetic, and those of gradients.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py (validate_args) and megatron/core/distributed of autumn 2025, as read:
gradients are reduced in fp32 or have the type of the weights; Megatron-FSDP's own types count only where they are not in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError
from solver.formats.megatron.values import choice
from solver.spec.recipes import FP8_RECIPES

#: Megatron-FSDP's types of gradients: as they are kept, and as they are reduced.
GRADIENT_TYPES = ("megatron-fsdp-main-grads-dtype", "megatron-fsdp-grad-comm-dtype")


def precision_of(flags: Mapping[str, Any]) -> str:
    if "fp4-format" in flags:
        return "nvfp4"
    if "fp8-format" in flags:
        if "bf16" not in flags:
            raise InputError("Megatron's --fp8-format without --bf16: weights in fp32 under fp8 are not modelled")
        return "mxfp8" if flags.get("fp8-recipe") == "mxfp8" else "fp8"
    return "bf16" if "bf16" in flags else "fp16" if "fp16" in flags else "fp32"


def recipe_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return fp8_recipe where it is stated; mxfp8 is a precision of its own."""
    if not {"fp8-format", "fp8-recipe"} <= flags.keys():
        return {}
    recipe = choice(flags, "fp8-recipe", "delayed", {name: name for name in (*FP8_RECIPES, "mxfp8")})
    return {} if recipe == "mxfp8" else {"fp8_recipe": recipe}


def reduces_in_fp32(flags: Mapping[str, Any]) -> bool:
    """Whether gradients are accumulated and reduced in fp32: bf16 implies it unless that is turned off, or the optimizer's own
    gradients are narrower (--main-grads-dtype); fp16 does not."""
    if "fp16" in flags and "bf16" not in flags:
        return "accumulate-allreduce-grads-in-fp32" in flags
    narrow = "grad-reduce-in-bf16" in flags or flags.get("main-grads-dtype", "fp32") != "fp32"
    return not narrow or flags.keys().isdisjoint(("bf16", "fp8-format", "fp4-format"))


def gradients_of(flags: Mapping[str, Any]) -> str:
    """Return the type of gradients. Raises InputError where Megatron-FSDP keeps them in another one than it reduces them in."""
    if reduces_in_fp32(flags):
        return "fp32"
    own = "fp16" if precision_of(flags) == "fp16" else "bf16"
    if "use-megatron-fsdp" not in flags:
        return own
    main, communicated = GRADIENT_TYPES
    kept = choice(flags, main, "auto", {"auto": own, "fp32": "fp32", own: own})
    reduced = choice(flags, communicated, "auto", {"auto": kept, "fp32": "fp32", own: own})
    if kept != reduced:
        raise InputError(
            f"Megatron's --{main} {flags.get(main, 'auto')} and --{communicated} {flags.get(communicated, 'auto')}: gradients "
            f"that are kept in {kept} and reduced in {reduced} are not modelled; give both the same type"
        )
    return kept


def gradient_flags(precision: str, gradients: str) -> dict[str, bool]:
    """Return the flags with which ``gradients_of`` finds this type; precisions below 16 bits are over bf16."""
    half = precision == "fp16"
    return {
        "grad-reduce-in-bf16": not half and gradients == "bf16",
        "accumulate-allreduce-grads-in-fp32": half and gradients == "fp32",
    }


def remains_only(flags: Mapping[str, Any]) -> bool:
    """Whether the precision-aware optimizer keeps of the fp32 weights only what bf16 weights lack: on the device, and not
    beside weights that Megatron-FSDP shards. Source: megatron/core/optimizer/__init__.py and optimizer_config.py."""
    quantised = "fp8-format" in flags and flags.get("fp8-recipe", "delayed") != "delayed"
    elsewhere = {"optimizer-cpu-offload", "use-megatron-fsdp", "fp4-format"} & flags.keys()
    return "use-precision-aware-optimizer" in flags and "bf16" in flags and not quantised and not elsewhere
