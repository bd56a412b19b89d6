"""Which of Megatron-LM's arguments count: those that it ignores, that are refused, left out of the estimate, or left open.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py of autumn 2025, as read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, closest, shown
from solver.formats.megatron.flags import IDLE, KNOWN, LATENT, LEFT_OUT, LINEAR, MODELLED, MUON, OPTIMIZERS, UNMODELLED
from solver.formats.megatron.precision import GRADIENT_TYPES, reduces_in_fp32
from solver.formats.megatron.values import whole

#: Arguments (by the beginning of the flag) that say nothing where another one is not given.
NEEDS = {
    "moe-": "num-experts",
    "expert-": "num-experts",
    "num-query-groups": "group-query-attention",
    **dict.fromkeys(LATENT, "multi-latent-attention"),
    "window-attn-skip-freq": "window-size",
    "fp8-": "fp8-format",
    **dict.fromkeys((*LINEAR, "linear-attention-freq"), "experimental-attention-variant"),
    "mamba-": "hybrid-override-pattern",
    "cross-entropy-fusion-impl": "cross-entropy-loss-fusion",
    "optimizer-offload-fraction": "optimizer-cpu-offload",
    "cpu-offloading-num-layers": "cpu-offloading",
    "offload-modules": "fine-grained-activation-offloading",
    "activation-offload-fraction": "fine-grained-activation-offloading",
    "min-offloaded-tensor-size": "fine-grained-activation-offloading",
    "delta-offload-bytes": "fine-grained-activation-offloading",
    "exp-avg": "use-precision-aware-optimizer",
    "num-distributed-optimizer-instances": "use-distributed-optimizer",
    "recompute-": "recompute-granularity",
    "hierarchical-": "hierarchical-context-parallel-sizes",
    "megatron-fsdp-": "use-megatron-fsdp",
    "outer-dp-": "use-megatron-fsdp",
    "data-parallel-sharding-strategy": "use-megatron-fsdp",
}
#: Of these, what Megatron reads or refuses alone where it is an argument of its own, not a value of a complete list.
_NEED_NONE = {
    "cpu-offloading-num-layers",
    "expert-model-parallel-size",
    "expert-tensor-parallel-size",
    "num-distributed-optimizer-instances",
}
#: Values that a flag which is ignored would have anyway.
_USUAL = ("auto", "fp32", "no_shard")


def without_ignored(flags: Mapping[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """Return the flags without those that Megatron does not read beside the others; says which of them would change a run."""
    useful = with_what_they_need(flags)
    alone = {flag: f"without --{_needed(flag)}" for flag in (flags.keys() & KNOWN) - useful.keys() - _NEED_NONE}
    if "use-megatron-fsdp" in flags and reduces_in_fp32(flags):
        alone |= dict.fromkeys(GRADIENT_TYPES, "where gradients are reduced in fp32, without --grad-reduce-in-bf16")
    if flags.keys().isdisjoint(("bf16", "fp8-format", "fp4-format")):
        alone["grad-reduce-in-bf16"] = "without --bf16"
    ignored = [flag for flag in flags if flag in alone]
    assumptions += [f"ignored, as Megatron does {alone[flag]}: --{flag}" for flag in ignored if flags[flag] not in _USUAL]
    return _without_parts_of_linears({flag: value for flag, value in flags.items() if flag not in alone}, assumptions)


def _without_parts_of_linears(flags: dict[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """Return the flags without norms to recompute where these are parts of linears (solver.spec.norms): Megatron ignores it."""
    modules = re.findall(r"[a-z_]+", str(flags.get("recompute-modules", "")))
    apart = flags.get("num-experts") not in (None, "None") or "multi-latent-attention" in flags
    if "layernorm" not in modules or apart or flags.get("transformer-impl") == "local":
        return flags
    assumptions.append("ignored, as Megatron does where norms are parts of linears: layernorm of --recompute-modules")
    rest = {flag: value for flag, value in flags.items() if flag != "recompute-modules"}
    others = " ".join(name for name in modules if name != "layernorm")
    if others:
        return rest | {"recompute-modules": others}
    return {flag: value for flag, value in rest.items() if flag != "recompute-granularity"}


def with_what_they_need(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of a complete list of arguments without those that say nothing, since another one is not given."""
    given = flags.keys() | ({"recompute-granularity"} if "recompute-activations" in flags else set())
    return {flag: value for flag, value in flags.items() if _needed(flag) in given}


def _needed(flag: str) -> str:
    """Return the flag without which one says nothing: itself where there is none."""
    return next((other for begin, other in NEEDS.items() if flag.startswith(begin) and flag != other), flag)


def left_out(flags: Mapping[str, Any]) -> list[str]:
    """Return a line for each flag whose small effect is left out of the estimate."""
    found = sorted(flag for flag in flags.keys() & LEFT_OUT.keys() if not _is_idle(flag, flags[flag]))
    said = [f"left out of the estimate: {LEFT_OUT[flag]} (--{flag})" for flag in found]
    if {"use-precision-aware-optimizer", "use-megatron-fsdp"} <= flags.keys():
        what = "what its optimizer saves of the weights that Megatron-FSDP shards"
        said.append(f"left out of the estimate: {what} (--use-precision-aware-optimizer)")
    if "moe-expert-capacity-factor" in flags and "moe-pad-expert-input-to-capacity" not in flags:
        said.append(
            "left out of the estimate: tokens beyond an expert's capacity, which are dropped (--moe-expert-capacity-factor)"
        )
    return said


def _is_idle(flag: str, value: Any) -> bool:
    """Whether a value, or every one of several in a list or apart by spaces, does nothing."""
    words = value.split() if isinstance(value, str) else value if isinstance(value, list) else [value]
    return all(word in IDLE.get(flag, ()) for word in words)


def refuse(flags: Mapping[str, Any]) -> None:
    """Raise InputError for a flag, or a value of one, that is not known or whose effect is not modelled."""
    for flag, what in UNMODELLED.items():
        if flag in flags and not _is_idle(flag, flags[flag]):
            raise InputError(f"Megatron's --{flag}: {what} is not modelled")
    for flag, (values, what) in MODELLED.items():
        given = flags.get(flag, values[0])
        if (" ".join(map(str, given)) if isinstance(given, list) else str(given)) not in values:
            raise InputError(f"Megatron's --{flag} {shown(flags[flag])}: {what} is not modelled; {' and '.join(values)} can be")
    optimizer = flags.get("optimizer", "adam")
    if not isinstance(optimizer, str) or optimizer not in OPTIMIZERS:
        raise InputError(f"Megatron's --optimizer {shown(optimizer)} is not modelled; {', '.join(OPTIMIZERS)} are")
    if OPTIMIZERS[optimizer][0] == "muon":
        for flag, usual in MUON.items():
            if str(flags.get(flag, usual)) != usual:
                raise InputError(f"Megatron's --{flag} {shown(flags[flag])} is not modelled; {usual} is")
        if whole(flags, "num-distributed-optimizer-instances", 1) > 1:
            raise InputError(
                "Megatron's --num-distributed-optimizer-instances is not of dist_muon, which assigns to all replicas"
            )
        if "use-distributed-optimizer" in flags:
            why = "leave it out: dist_muon shards without it"
            raise InputError(f"Megatron's --optimizer {optimizer} does not run with --use-distributed-optimizer; {why}")
    if {"swiglu", "squared-relu"} <= flags.keys():
        raise InputError("Megatron's --swiglu does not run with --squared-relu; leave one of them out")
    unknown = sorted(flags.keys() - KNOWN - UNMODELLED.keys())
    if unknown:
        meant = closest(unknown[0].replace("_", "-"), sorted({*KNOWN, *UNMODELLED}), least=0.8)
        left = "" if meant else "; remove it if it changes neither memory nor time"
        raise InputError(f"Megatron's --{unknown[0]} is not known here{meant}{left}")


def left_open(flags: Mapping[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """Return what is assumed where a collector of arguments kept none that say it; says so."""
    found: dict[str, Any] = {}
    if "swiglu" in flags and not any(flag.endswith("-dropout") for flag in flags):
        found |= {"attention-dropout": 0.0, "hidden-dropout": 0.0}
        assumptions.append("dropout: none, as models with gated MLPs are trained; the arguments state none")
    if "fp8-format" in flags and not {"bf16", "fp16"} & flags.keys():
        found["bf16"] = True
        assumptions.append("precision: bf16 where it is not fp8; the arguments state none")
    if "fp16" in flags and not reduces_in_fp32(flags):
        assumptions.append("grad_dtype: fp16, which --fp16 has without --accumulate-allreduce-grads-in-fp32")
    if "use-megatron-fsdp" in flags and "data-parallel-sharding-strategy" not in flags:
        found["data-parallel-sharding-strategy"] = "optim_grads_params"
        assumptions.append("zero: 3, for which Megatron-FSDP is turned on; the arguments state no strategy")
    return found
