"""Values of Megatron-LM's flags, each of its kind or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.megatron_flags import MAY_BE_ZERO


def whole(flags: Mapping[str, Any], flag: str, default: int | None = None) -> int:
    value = flags.get(flag, default)
    least = int(flag not in MAY_BE_ZERO)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        given = "has no value" if value is True else f"is {shown(value)}" if flag in flags else "is missing"
        raise InputError(f"Megatron's --{flag} {given}; it must be a whole number of at least {least}")
    return value


def share(flags: Mapping[str, Any], flag: str, default: float) -> float:
    value = flags.get(flag, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"Megatron's --{flag} is {shown(value)}; it must be a number from 0 to 1")
    return float(value)


def choice(flags: Mapping[str, Any], flag: str, default: str, meaning: Mapping[str, str]) -> str:
    value = str(flags.get(flag, default))
    if value not in meaning:
        raise InputError(f"Megatron's --{flag} is {shown(value)}; known here are {', '.join(meaning)}")
    return meaning[value]
