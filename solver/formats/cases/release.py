"""The framework release that made a run, where the name that it states means another one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.profile.devices import DATASHEETS
from solver.spec.framework import Framework
from solver.spec.frameworks import FRAMEWORKS, framework_of
from solver.spec.frameworks.deepspeed import MEGATRON_DEEPSPEED, TRANSFORMERS_DEEPSPEED
from solver.spec.frameworks.megatron import GENERIC
from solver.spec.model import ModelSpec

#: Architectures before Hopper, on which a Megatron-LM that names no release is the one of 2023.
_BEFORE_HOPPER = ("volta", "ampere")
#: Architectures whose first GPUs came later than what the bare name of some frameworks means: since then they trained.
_FIRST_USED = {"blackwell": "2025-01", "cdna4": "2025-06"}
_FOLDS_SINCE = 9  #: Megatron-Core 0.9: experts are folded anew, end stages of their own (solver.spec.frameworks.megatron)
_OWN_LAYERS = "megatron|neox"  #: names of DeepSpeed's users that have Megatron's layers


def with_release(run: Mapping[str, Any], model: ModelSpec, hardware: str, assumptions: list[str]) -> dict[str, Any]:
    """Return ``run`` with the release that made it before the name that it states, and what was usual with it at that time.

    hardware: a device of configs/devices. Each change is an assumption.
    """
    name = str(run.get("framework", ""))
    framework = framework_of(name)
    found = dict(run)
    can = framework.can_run
    release = None if framework.name in name.lower() else _release(framework, name, run, model, hardware)
    if release is None and ((run.get("tp", 1) != 1 and not can.tp_modes) or (run.get("pp", 1) != 1 and not can.pipeline)):
        release = GENERIC.name, f"since {framework.name} does not divide a model so"
    if release:
        assumptions.append(f"framework: {release[0]}, {release[1]}")
        found["framework"] = GENERIC.name if release[0] == GENERIC.name else f"{release[0]}, {name}"
        framework = framework_of(found["framework"])  # the rest of the name still applies
    if framework.family == MEGATRON_DEEPSPEED.family and "attention" not in run and (model.gated_mlp or _is_modern(hardware)):
        found["attention"] = "flash"
        assumptions.append("attention: flash (gated MLPs, and GPUs since Hopper, came after FlashAttention)")
    splits = {"sequence_parallel", "tp_mode"} & run.keys()
    if framework.name == GENERIC.name and _is_modern(hardware) and run.get("tp", 1) != 1 and not splits:
        found["sequence_parallel"] = True
        assumptions.append("sequence_parallel: true (usual since Hopper)")
    return found


def _is_modern(hardware: str) -> bool:
    return hardware in DATASHEETS and DATASHEETS[hardware].architecture not in _BEFORE_HOPPER


def _release(
    framework: Framework, name: str, run: Mapping[str, Any], model: ModelSpec, hardware: str
) -> tuple[str, str] | None:
    """Return the release that a run must have used, and the reason, where its framework's name means another one."""
    modern, words = _is_modern(hardware), name.lower()
    if framework.name == "fsdp" and "megatron" in words:  # as ms-swift's other engine
        return ("megatron-core" if modern else "megatron-lm-2023"), "the engine that the name states"
    core = re.search(r"core\W*[vr]?\W*0\.(\d+)", words)
    if framework.name == "megatron-core-0.12" and core and int(core[1]) < _FOLDS_SINCE:
        return "megatron-core-0.8", "the nearest release that is described"
    if framework.name == "megatron-lm-2023" and modern:
        return "megatron-core", "which Megatron-LM stands on since Hopper"
    if framework.name == "megatron-lm-2023" and run.get("zero") == 3:
        return "megatron-deepspeed-2021", "since Megatron-LM of that time has no ZeRO-3 of its own and ran DeepSpeed's"
    later = modern or run.get("tp_mode") in ("msp", "fsp", "isp") or run.get("wp", 1) != 1
    if framework.name == "internevo-2023" and later:
        return "internevo-2024", "whose tensor-parallel modes and kernels the releases of 2023 lack"
    if framework.name == "llm-foundry-2023" and run.get("grad_dtype") == "fp32":
        return "llm-foundry-2023-10", "whose benchmarks reduce in fp32 (mixed_precision DEFAULT)"
    whole = all(run.get(key, 1) == 1 for key in ("tp", "cp", "pp"))
    plain = framework.name == MEGATRON_DEEPSPEED.name and not re.search(_OWN_LAYERS, words)
    if plain and whole and (model.gated_mlp or modern):
        return TRANSFORMERS_DEEPSPEED.name, "whose modules DeepSpeed trains where ranks do not divide the model"
    return _of_its_time(framework, words, hardware)


def _of_its_time(framework: Framework, words: str, hardware: str) -> tuple[str, str] | None:
    """Return the first release of a family since the GPU came, where a name without a number means an earlier one."""
    since = _FIRST_USED.get(DATASHEETS[hardware].architecture) if hardware in DATASHEETS else None
    if since is None or re.search(r"\d", words) or framework.released >= since:
        return None
    later = [f for f in FRAMEWORKS if f.family == framework.family and f.released >= since]
    return (min(later, key=lambda f: f.released).name, f"the first since {hardware} came") if later else None
