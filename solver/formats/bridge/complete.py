"""Megatron-Bridge's complete configuration, which it prints at the start of a run and saves as run_config.yaml.

Source: NVIDIA-NeMo/Megatron-Bridge training/config.py (ConfigContainer), utils/yaml_utils.py, and what release 0.1 printed.
"""

from __future__ import annotations

import re

from profiler.errors import InputError, printable
from solver.formats.bridge.names import KNOWN, USUAL
from solver.formats.syntax.known_keys import Known
from solver.formats.syntax.literal_python import Section

_CONTAINER = "ConfigContainer"
_PRINTED = re.compile(r"^-+ Task Configuration -+\n(.*?)^-{10,}$", re.DOTALL | re.MULTILINE)
#: Of the precision, what the model says where no section does.
_PRECISION = ("bf16", "fp16", "fp8", "fp8_recipe", "fp8_param", "fp4", "fp4_recipe")
_LAYERS = "transformer_layer_spec"


def printed(text: str) -> str | None:
    """Return the configuration that a log of Megatron-Bridge holds, on the same lines; None where it holds none."""
    found = _PRINTED.search(text)
    return "\n" * text.count("\n", 0, found.start(1)) + found[1] if found else None


def is_complete(sections: Section) -> bool:
    return str(sections.get("_target_", "")).endswith(_CONTAINER)


def completed(sections: Section, where: str) -> tuple[Section, tuple[str, ...]]:
    """Return the sections and keys that are known, without what is null, and the names of others that are on.

    A complete configuration states hundreds of defaults; a key that is not known here says nothing where it has its usual value
    (bridge_names.USUAL; else null, false, zero or empty), or is a function or a type. Raises InputError for adapters.
    """
    if isinstance(sections.get("peft"), Section):
        raise InputError(f"{where}: peft: adapters under Megatron-Bridge are not modelled; null is")
    unknown: list[str] = []
    found = _kept(sections, {**KNOWN, "_target_": None, "peft": None}, "", unknown)
    del found["_target_"]
    model = found.get("model")
    if isinstance(model, Section):
        layers = model.pop(_LAYERS, None)
        name = str(layers.get("_target_")) if isinstance(layers, Section) else ""
        if name and not name.endswith("default_layer_spec"):
            unknown.append(f"model.{_LAYERS} ({name})")
        if "mixed_precision" not in found:
            precision = Section()
            precision.update({key: model[key] for key in _PRECISION if key in model})
            found["mixed_precision"] = precision
    return found, tuple(unknown)


def _kept(section: Section, known: Known, path: str, unknown: list[str]) -> Section:
    """Return the known keys of a section, and of those below it; notes the others that are on."""
    found = Section()
    for key, value in section.items():
        full = f"{path}.{key}" if path else key
        if value is None:
            continue
        if key in known:
            below = known[key]
            kept = _kept(value, below, full, unknown) if isinstance(value, Section) and below is not None else value
            found.put(key, kept, section.lines.get(key, 0))
        elif full in USUAL:
            plain = value.get("_target_") if isinstance(value, Section) else value
            unknown += [f"{full} ({printable(str(plain), 60)})"] if plain != USUAL[full] else []
        elif value and not (isinstance(value, Section) and "_target_" in value):
            unknown.append(full)
    return found
