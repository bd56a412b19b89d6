"""Values of Megatron-LM's flags, each of its kind or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.megatron.flags import MAY_BE_ZERO

_LONGEST = 19  #: digits of a number of 64 bits


def whole(flags: Mapping[str, Any], flag: str, default: int | None = None) -> int:
    value = _plain(flags.get(flag, default))
    least = int(flag not in MAY_BE_ZERO)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        given = "has no value" if value is True else f"is {shown(value)}" if flag in flags else "is missing"
        raise InputError(f"Megatron's --{flag} {given}; it must be a whole number of at least {least}")
    return value


def _plain(value: Any) -> Any:
    """Return a value that files state as a text of digits, or as the only one of a list, as it is meant."""
    only = value[0] if isinstance(value, list) and len(value) == 1 else value
    return int(only) if isinstance(only, str) and only.isdecimal() and len(only) < _LONGEST else only


def share(flags: Mapping[str, Any], flag: str, default: float) -> float:
    value = flags.get(flag, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InputError(f"Megatron's --{flag} is {shown(value)}; it must be a number from 0 to 1")
    return float(value)


def choice(flags: Mapping[str, Any], flag: str, default: str, meaning: Mapping[str, str]) -> str:
    value = str(_plain(flags.get(flag, default)))
    word = value.rpartition(".")[2]  # as in AttnBackend.flash
    if word not in meaning:
        raise InputError(f"Megatron's --{flag} is {shown(value)}; known here are {', '.join(meaning)}")
    return meaning[word]
