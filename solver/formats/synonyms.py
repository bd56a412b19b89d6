"""Other names of schedules, number formats and context-parallel communication, and the framework release that made a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from solver.spec.frameworks import framework_of
from solver.spec.strategy import CHOICES

#: Prefixes of the names of profiles of Hopper and later.
_SINCE_HOPPER = ("h100", "h200", "b200")
#: Letters and digits of a word -> this project's word. This project's own words match in any spelling; other words stay as
#: they are.
_WORDS: Mapping[str, Mapping[str, str]] = {
    "schedule": {"1f1binterleaved": "interleaved", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v"},
    "cp_comm": {"p2p": "ring", "alltoall": "a2a", "ulysses": "a2a", "a2ap2p": "a2a+ring"},
    "grad_dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "precision": {"bfloat16": "bf16", "bf16mixed": "bf16", "float16": "fp16", "half": "fp16", "fp16mixed": "fp16",
                  "float8": "fp8", "fp8hybrid": "fp8", "fp8e4m3": "fp8", "fp8delayed": "fp8", "fp8cs": "fp8", "fp8mx": "mxfp8",
                  "float32": "fp32"},
    "recompute": {"": "none", "false": "none", "no": "none", "off": "none", "true": "full", "yes": "full", "uniform": "full",
                  "block": "full", "layer": "full", "coreattn": "selective", "op": "selective"},
}  # fmt: skip
_OTHER_KEYS = {"cp_comm_type": "cp_comm", "pipeline_schedule": "schedule", "dtype": "precision"}


def normalized_run(run: Mapping[str, Any], hardware: str, assumptions: list[str]) -> dict[str, Any]:
    """Return ``run`` in this project's names; any interpretation beyond spelling is added to ``assumptions``."""
    named = {_OTHER_KEYS.get(key, key) if _OTHER_KEYS.get(key, key) not in run else key: value for key, value in run.items()}
    ours = {key: _word(key, value) for key, value in named.items()}
    framework = framework_of(str(ours.get("framework", "")))
    if ours.get("recompute") == "selective" and framework.recomputation.selective_is_full:
        ours["recompute"] = "full"
    stated = framework.name in str(ours.get("framework", "")).lower()  # the run names its release
    release = None if stated else _release(framework.name, ours, hardware)
    if release:
        assumptions.append(f"framework: {release[0]}, {release[1]}")
        ours["framework"] = f"{release[0]}, {ours['framework']}"  # the rest of the name still applies
    return ours


def _word(key: str, value: Any) -> Any:
    if key not in _WORDS or not isinstance(value, str | bool):
        return value
    own = {_spelling(choice): choice for choice in CHOICES[key]}
    return {**own, **_WORDS[key]}.get(_spelling(str(value).removeprefix("torch.")), value)


def _spelling(word: str) -> str:
    return re.sub("[^a-z0-9]", "", word.lower())


def _release(framework: str, run: Mapping[str, Any], hardware: str) -> tuple[str, str] | None:
    """Return the release that a run must have used, and the reason, where its framework name means an earlier one."""
    if framework == "megatron-lm-2023" and hardware.startswith(_SINCE_HOPPER):
        return "megatron-core", "which Megatron-LM stands on since Hopper"
    if framework == "megatron-lm-2023" and run.get("zero") == 3:
        return "megatron-deepspeed-2021", "since Megatron-LM of that time has no ZeRO-3 of its own and ran DeepSpeed's"
    later = hardware.startswith(_SINCE_HOPPER) or run.get("tp_mode") in ("msp", "fsp", "isp") or run.get("wp", 1) != 1
    if framework == "internevo-2023" and later:
        return "internevo-2024", "whose tensor-parallel modes and kernels the releases of 2023 lack"
    return None
