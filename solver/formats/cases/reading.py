"""Measured training runs ("cases", one JSON object per line) as models and layouts, with every assumption listed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.errors import InputError, require, shown
from profiler.profile.devices import DATASHEETS, DEVICES, device_named
from profiler.text_file import distinct_keys, read_text
from profiler.units import GB
from solver.formats.cases.layout import count_of, layout_of_case
from solver.formats.cases.model import long_enough, model_of_case
from solver.formats.cases.published_recipes import with_fine_tuning, with_recipe
from solver.formats.cases.release import with_release
from solver.formats.cases.stated_stages import with_stages
from solver.formats.cases.synonyms import normalized_run
from solver.formats.cases.unstated import alternatives
from solver.formats.megatron.arguments import sections_of_megatron
from solver.formats.model_file import shipped_keys
from solver.spec.bounds import NUMBERS, number, whole_number
from solver.spec.cluster import FIGURES, HOST_RATE, PCIE_4, PCIE_5
from solver.spec.framework import Framework
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec, check_model
from solver.spec.rules.adapters import adapter_rules
from solver.spec.rules.sizes import check_sizes
from solver.spec.strategy import Strategy

#: Kinds of measured peak memory: the framework's counter, its allocator's, the whole device's.
MEMORY_KINDS = ("allocated", "reserved", "device")
#: Value of ``memory_of``: the peak of the job's last rank instead of the fullest one's.
LAST_RANK = "last rank"
MAX_BYTES = 1 << 28  #: limit of a file of cases
_LINE = "line"  #: begins the id of what is no case
#: What was measured, and what profiler.train writes beside it.
_MEASURED = (
    "step_s",
    "tgs",
    "peak_memory_gib",
    "memory_kind",
    "memory_of",
    "out_of_memory",
    "spread",
    "repeats",
    "losses",
    "gradient_norm",
)
_CASE_KEYS = ("id", "hardware", "model", "run", "measured")


@dataclass(frozen=True)
class Case:
    """One measured run; ``model`` and ``strategy`` are None where ``skipped`` states why the run cannot be expressed."""

    id: str
    hardware: str
    cluster: Mapping[str, Any]
    model: ModelSpec | None
    strategy: Strategy | None
    measured: Mapping[str, Any]
    assumptions: tuple[str, ...]
    skipped: str | None = None
    #: Layouts that the run may have had, ``strategy`` first, where it does not state all (solver.formats.cases.unstated).
    alternatives: tuple[Strategy, ...] = ()

    @property
    def source(self) -> str:
        """The collection that the case belongs to: its id up to the first dash or colon."""
        return self.id.split(":")[0].split("-")[0]


def read_cases(path: Path) -> list[Case]:
    """Return all cases of a JSON-lines file, in order; a line that is no case is one that is skipped, named by its number.

    Raises InputError for a file that cannot be read or holds no case at all.
    """
    text = read_text(path, "a file of cases, JSON objects one a line", MAX_BYTES)
    cases = [_case_of_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if all(case.strategy is None and case.id.startswith(_LINE) for case in cases):
        reasons = f": {cases[0].id}: {cases[0].skipped}" if cases else ""
        raise InputError(f"{path}: holds no case; a case is a JSON object on a line{reasons}")
    return cases


def _case_of_line(line: str, number: int) -> Case:
    """Return the case of one line of a file; what cannot be read is skipped with the reason."""
    reason = ""
    try:
        plain = json.loads(line, object_pairs_hook=distinct_keys)
        missing = [key for key in _CASE_KEYS if not isinstance(plain, dict) or key not in plain]
        if not missing:
            return case_of(plain)
        reason = f"a case needs {', '.join(_CASE_KEYS)}; {missing[0]} is missing"
    except json.JSONDecodeError as error:
        reason = f"not a JSON object: {error.msg} at column {error.colno}"
    except (InputError, RecursionError) as error:
        reason = str(error) or "nested too deeply"
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"a value of the wrong kind: {str(error)[:80]}"
    return Case(f"{_LINE} {number}", "", {}, None, None, {}, (), reason)


def case_of(plain: Mapping[str, Any]) -> Case:
    """Return one case; what the program cannot express becomes ``skipped``, what the source left out becomes an assumption.

    A null counts as an absent key. Raises InputError where a section is not an object.
    """
    name = str(plain["id"])
    described = plain.get("model")
    if isinstance(described, str):
        plain = {**plain, "model": shipped_keys(described)}
    sections = {key: _section(plain.get(key), name, key) for key in ("cluster", "model", "run", "measured")}
    assumptions: list[str] = []
    hardware = device_named(str(plain["hardware"]))
    if hardware != plain["hardware"]:
        assumptions.append(f"hardware: {hardware}")
    model, skipped = None, ""
    layouts: tuple[Strategy, ...] = ()
    try:
        if "megatron_args" in plain:
            given = _section(plain["megatron_args"], name, "megatron_args")
            sections["model"], sections["run"] = sections_of_megatron(
                given, count_of(sections["run"], "world_size"), assumptions
            )
        model, layouts = _run(sections["model"], sections["run"], hardware, assumptions)
        sections["cluster"] |= _host_link(layouts[0], sections["cluster"], hardware, assumptions)
        _check_figures(sections["cluster"], sections["measured"])
        sections["measured"] = _with_seconds(sections["measured"], layouts[0])
    except InputError as error:
        model, layouts, skipped = None, (), str(error)
    for section, known in (("cluster", FIGURES), ("measured", _MEASURED)):
        unread = sorted(sections[section].keys() - set(known))
        assumptions += [f"not read: {section}.{key}={sections[section][key]}" for key in unread]
    if "inter_node_gbit_per_gpu" not in sections["cluster"]:
        assumptions.append("inter_node_gbit_per_gpu: the hardware's usual network")
    notes, cluster, measured = tuple(assumptions), sections["cluster"], sections["measured"]
    strategy = layouts[0] if layouts else None
    return Case(name, hardware, cluster, model, strategy, measured, notes, skipped or None, layouts)


def _run(
    config: dict[str, Any], run: dict[str, Any], hardware: str, assumptions: list[str]
) -> tuple[ModelSpec, tuple[Strategy, ...]]:
    """Return the model of a run, and the layouts that the run may have had, the assumed one first."""
    model = model_of_case(config, framework_of(str(run.get("framework", ""))), assumptions)
    run = normalized_run(run, assumptions)
    if run.get("ep", 1) != 1 and not model.is_mixture_of_experts:
        raise InputError(f"run key ep is {run['ep']!r}, but the model has no experts")
    model = long_enough(model, count_of(run, "seq_len"), assumptions)
    check_model(model, count_of(run, "seq_len"))
    run = with_release(run, model, hardware, assumptions)
    run = with_fine_tuning(with_recipe(run, model, hardware, assumptions), model, assumptions)
    run = with_stages(run, model.num_hidden_layers)
    strategy = layout_of_case(run, model, assumptions)
    check_sizes(model, strategy)
    framework = framework_of(strategy.framework)
    _check_adapters(framework, model, strategy, assumptions)
    return model, alternatives(run, model, framework, strategy)


def _host_link(s: Strategy, cluster: Mapping[str, Any], hardware: str, assumptions: list[str]) -> dict[str, float]:
    """Return the host of a run that kept something there, as far as neither the case nor the device states it."""
    if not (s.offload_layers or s.offload_modules or s.optimizer_offload_fraction) or hardware not in DEVICES:
        return {}
    generation, rate = (4, PCIE_4) if DATASHEETS[hardware].architecture == "ampere" else (5, PCIE_5)
    found: dict[str, float] = {}
    if "host_link_gb_s" not in cluster and not DEVICES[hardware].host_link:
        found["host_link_gb_s"] = rate / GB
        assumptions.append(f"host_link_gb_s: {rate / GB:g} (assumed: PCIe {generation} x16)")
    if s.optimizer_offload_fraction and "host_memory_gb_s" not in cluster and not DEVICES[hardware].host_memory:
        found["host_memory_gb_s"] = HOST_RATE / GB
        assumptions.append(f"host_memory_gb_s: {HOST_RATE / GB:g} (assumed: a GPU's share of the hosts' memory)")
    return found


def _check_adapters(framework: Framework, model: ModelSpec, s: Strategy, assumptions: list[str]) -> None:
    """Raise InputError for adapters that are not modelled; those of another framework are priced as the described ones."""
    modelled, *others = adapter_rules(framework, model, s) or ((True, ""),)
    require(others)
    if not modelled[0]:
        assumptions.append(f"lora_rank {s.lora_rank}: adapters as under NeMo Automodel, the only ones modelled")


def _section(value: Any, case: str, key: str) -> dict[str, Any]:
    if value is None and key == "cluster":
        return {}
    if not isinstance(value, dict):
        also = " of model keys, or the name of a shipped model" if key == "model" else ""
        raise InputError(f"case {case}: {key} is {value!r}; it must be an object{also}")
    return {name: entry for name, entry in value.items() if entry is not None}


def _check_section(section: str, values: Mapping[str, Any]) -> None:
    try:
        for key in values.keys() & NUMBERS.keys():
            number(key, values[key])
        if "gpus_per_node" in values:
            whole_number("gpus_per_node", values["gpus_per_node"])
    except InputError as error:
        raise InputError(f"{section} key {error}") from None


def _with_seconds(measured: dict[str, Any], layout: Strategy) -> dict[str, Any]:
    """Return what was measured with the seconds of a step, where tokens per GPU per second (tgs) are stated in their place."""
    if "tgs" not in measured:
        return measured
    if "step_s" in measured:
        raise InputError("step_s and tgs both say how long a step takes; leave one out")
    return {**measured, "step_s": layout.tokens / layout.world_size / measured["tgs"]}


def _check_figures(cluster: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Raise InputError for a figure that is not a positive number within its bounds, or an unknown kind of memory."""
    _check_section("cluster", cluster)
    _check_section("measured", measured)
    if measured.get("memory_kind", MEMORY_KINDS[0]) not in MEMORY_KINDS:
        raise InputError(f"memory_kind is {shown(measured['memory_kind'])}; it must be one of {', '.join(MEMORY_KINDS)}")
    if measured.get("memory_of", LAST_RANK) != LAST_RANK:
        raise InputError(f"memory_of is {shown(measured['memory_of'])}; it must be {LAST_RANK!r} or absent")
