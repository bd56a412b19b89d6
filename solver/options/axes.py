"""What options say of axes and constants: --fix, --search, --set and --also as values, before a search checks them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from profiler.errors import InputError, closest, printable
from solver.search.fixed import check_fixed
from solver.search.variants import CONSTANT_AXES
from solver.spec.idle import IN_ONE_RANK
from solver.spec.strategy import AXES, CONSTANTS

_WORDS = {"true": True, "false": False}


def parse_fixed(text: str) -> dict[str, Any]:
    """Return the axes that ``tp=8,recompute=full`` fixes. Raises InputError for what is no axis or no value of one."""
    fixed = parse_pairs("--fix", text, "axis once, as in tp=8,recompute=full")
    check_fixed(fixed)
    return fixed


def parse_varied(text: str) -> tuple[str, ...]:
    """Return the axes of ``tp,cp``. Raises InputError for what is no axis, and for none."""
    return parse_names("--search", text, AXES, "is no axis of a search", "give axes, as in tp,cp, of")


def parse_constants(text: str) -> dict[str, Any]:
    """Return the constants of a run that ``precision=fp8,moe_imbalance=1.2`` sets.

    Raises InputError for an axis of the search, and for what is no choice of a run.
    """
    found = parse_pairs("--set", text, "constant once, as in precision=fp8,moe_dispatcher=deepep")
    constants = sorted({*CONSTANTS} - {"world_size", "seq_len", "framework"})
    for name in found:
        if name in AXES:
            raise InputError(
                f"--set {name}: it is an axis of a search; foretrain search --fix {name}=... fixes it, or a config states it"
            )
        if name not in constants:
            known = f"{closest(name.lower(), (*constants, *AXES))}; constants are {', '.join(constants)}"
            raise InputError(f"--set {name}: it is no constant of a run{known}")
    return found


def check_constants(constants: Mapping[str, Any], fixed: Mapping[str, Any]) -> None:
    """Raise InputError for a constant that changes no layout with what is fixed."""
    for name, axis in ((name, axis) for axis, names in IN_ONE_RANK.items() for name in names):
        if name in constants and fixed.get(axis) == 1 and (axis != "ep" or fixed.get("etp") == 1):
            raise InputError(f"--set {name} changes nothing with --fix {axis}=1; leave one out")


def parse_constant_axes(text: str) -> dict[str, tuple[Any, ...]]:
    """Return the values by axis of ``cp_comm,recompute_modules=moe_act/mla_up_proj+moe_act``; of an axis alone (), which means
    all. Raises InputError for what is none of CONSTANT_AXES."""
    words = [part.partition("=") for part in text.split(",")]
    names = parse_names(
        "--also", ",".join(name for name, *_ in words), CONSTANT_AXES, "is not varied on demand", "give some of"
    )
    asked: dict[str, tuple[Any, ...]] = {}
    for name, values in ((name.strip(), values) for name, _, values in words if name.strip()):
        if name in asked:
            raise InputError(f"--also {printable(text)}: {name} is given twice; give its values once, separated by /")
        asked[name] = tuple(map(parse_value, filter(None, values.split("/"))))
    return {name: asked[name] for name in names}


def parse_pairs(option: str, text: str, each: str) -> dict[str, Any]:
    """Return the names and values of ``name=value,...``: whole numbers, numbers, true, false, or words."""
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or name in found:
            wrong = f"{name} is given twice" if equals else "it has no value"
            raise InputError(f"{option} {part}: {wrong}; give each {each}")
        found[name] = parse_value(value)
    return found


def parse_names(option: str, text: str, allowed: Collection[str], wrong: str, give: str) -> tuple[str, ...]:
    """Return the names of ``tp,cp``, each once. Raises InputError for one that is not allowed, and for none."""
    names = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
    unknown = [name for name in names if name not in allowed]
    if unknown or not names:
        what = f"{printable(unknown[0])} {wrong}" if unknown else "it names no axis"
        raise InputError(f"{option} {printable(text)}: {what}; {give} {', '.join(allowed)}")
    return names


def parse_value(text: str) -> Any:
    """Return a whole number, a number, true, false or None where the text is one, else the text."""
    if re.fullmatch(r"-?[0-9]{1,19}", text):
        return int(text)
    if re.fullmatch(r"-?([0-9]{1,12}(\.[0-9]{0,12})?|\.[0-9]{1,12})(e[-+]?[0-9]{1,3})?", text, re.IGNORECASE):
        return float(text)
    return _WORDS.get(text.lower(), text)
