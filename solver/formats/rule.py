"""What a rule is, and the arguments that it is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


class Arguments(dict[str, Any]):
    """Arguments of a framework by their names there, of sections dotted; what is null is missing.

    world: ranks; 0: not known. environment: variables that the launch sets.
    """

    def __init__(self, given: Mapping[str, Any], world: int = 0, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__({name: value for name, value in given.items() if value is not None})
        self.world, self.environment = world, environment

    def size(self, name: str, default: int = 1) -> int:
        """Return a whole number; ``default`` also for what is none, or is less than it could be: readers say what is wrong."""
        value = self.get(name, default)
        whole = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        return int(value) if whole and value >= min(default, 1) else default

    def text(self, name: str, default: str = "") -> str:
        return str(self.get(name, default))

    def on(self, name: str, default: bool = False) -> bool:
        """Return a switch, which is as ``default`` where it is not stated."""
        return bool(self.get(name, default))

    def sets(self, variable: str, *values: str) -> bool:
        """Whether a variable of the environment is one of ``values``; what the launch does not set may be set before."""
        return self.environment.get(variable, values[0]) in values


@dataclass(frozen=True)
class Rule:
    """says: what must hold, in the framework's names. source: where its code says so."""

    says: str
    source: str
    holds: Callable[[Arguments], bool]


def implies(condition: object, then: object) -> bool:
    """Whether ``then`` holds where ``condition`` does."""
    return not condition or bool(then)


def broken(rules: Sequence[Rule], arguments: Arguments) -> tuple[str, ...]:
    """Return what of the rules does not hold for arguments, with its source."""
    return tuple(f"{rule.says} ({rule.source})" for rule in rules if not rule.holds(arguments))


def flattened(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        name = f"{path}.{key}" if path else str(key)
        found |= flattened(value, name) if isinstance(value, Mapping) else {name: value}
    return found
