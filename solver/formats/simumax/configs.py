"""The three configurations of SimuMax: checked values under its names, which a script may change between two estimates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from profiler.errors import InputError, closest, shown
from profiler.text_file import read_text
from solver.formats.simumax.fields import KINDS, LISTED, MODEL, STRATEGY, SYSTEM, Field

_Kind = TypeVar("_Kind", bound="Config")
_MAX_BYTES = 8 << 20  #: of a file; SimuMax's largest, a system with many shapes, has 92 kB


class Config:
    """Values by SimuMax's names, as attributes; a name that is not stated has SimuMax's default.

    Raises InputError for an unknown name, for a value of the wrong kind, and for one that is not modelled.
    """

    what: ClassVar[str] = "configuration"
    fields: ClassVar[Mapping[str, Field]] = {}

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "stated", {})
        for name, value in values.items():
            setattr(self, name, value)

    stated: dict[str, Any]  #: what was stated; the only state of a configuration

    @classmethod
    def init_from_dict(cls: type[_Kind], config_dict: Mapping[str, Any]) -> _Kind:
        return cls(**config_dict)

    @classmethod
    def init_from_config_file(cls: type[_Kind], config_file: str | Path) -> _Kind:
        """Read a JSON file. Raises InputError for one that cannot be read."""
        return cls._named(config_file, cls.read_json_file(config_file))

    @classmethod
    def of(cls: type[_Kind], given: Config | Mapping[str, Any] | str | Path | None) -> _Kind:
        """Return what is given as a configuration of this kind: one, a mapping of its fields, or a file."""
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping):
            return cls.init_from_dict(given)
        if not isinstance(given, str | Path):
            raise InputError(f"the {cls.what} configuration is {shown(given)}; give a file, a mapping or a {cls.__name__}")
        return cls.init_from_config_file(given)

    @classmethod
    def _named(cls: type[_Kind], path: str | Path, values: Mapping[str, Any]) -> _Kind:
        try:
            return cls(**values)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @staticmethod
    def read_json_file(json_file: str | Path) -> dict[str, Any]:
        """Return the object that a JSON file holds."""
        try:
            found = json.loads(read_text(Path(json_file), "a file of SimuMax", _MAX_BYTES))
        except json.JSONDecodeError as error:
            raise InputError(f"{json_file}, line {error.lineno}: not valid JSON: {error.msg}") from None
        except (RecursionError, ValueError) as error:
            raise error if isinstance(error, InputError) else InputError(f"{json_file}: not valid JSON: {error}") from None
        if not isinstance(found, dict):
            raise InputError(f"{json_file}: a file of SimuMax holds an object {{...}}, not a {type(found).__name__}")
        return found

    def __getattr__(self, name: str) -> Any:
        if name not in type(self).fields:
            raise AttributeError(f"a {type(self).what} configuration has no field {name!r}")
        value = self.stated.get(name)
        return type(self).fields[name].default if value is None else value

    def __setattr__(self, name: str, value: Any) -> None:
        fields, what = type(self).fields, type(self).what
        if name.startswith("_"):  # remarks
            return
        if name not in fields:
            raise InputError(f"{what} field {name!r} is not known{closest(name, fields)}; remove it if it changes nothing")
        check_value(f"{what} field {name}", value, fields[name])
        self.stated[name] = value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.stated.items())})"

    def to_dict(self) -> dict[str, Any]:
        """Return every field with its value."""
        return {name: getattr(self, name) for name in type(self).fields}

    def changed(self: _Kind, **values: Any) -> _Kind:
        """Return a copy with other values in some fields."""
        return type(self)(**{**self.stated, **values})

    @property
    def ignored(self) -> tuple[str, ...]:
        """Stated fields that change neither time nor memory here, each with the reason."""
        fields = type(self).fields
        return tuple(f"{name}: {fields[name].why}" for name in self.stated if fields[name].use == LISTED)


def check_value(where: str, value: Any, field: Field) -> None:
    """Raise InputError where a value is not of its field's kind or is one that is not modelled; null counts as not stated."""
    if value is None:
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    good = {
        "size": whole and 1 <= value < 1 << 40,
        "count": whole and 0 <= value < 1 << 40,
        "flag": isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12,
        "text": isinstance(value, str),
        "object": isinstance(value, Mapping),
        "texts": isinstance(value, list | tuple) and all(isinstance(one, str) for one in value),
    }
    if not good[field.kind]:
        raise InputError(f"{where} is {shown(value)}; it must be {KINDS[field.kind]}")
    if field.only and value not in field.only:
        allowed = " or ".join(dict.fromkeys(_word(one) for one in field.only))
        raise InputError(f"{where} is {shown(value)}, which is not modelled: {field.why}; it must be {allowed}")


def _word(value: Any) -> str:
    """Return a value as JSON has it, a text without its quotes."""
    return value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else json.dumps(value)


class ModelConfig(Config):
    """SimuMax's model file."""

    what: ClassVar[str] = "model"
    fields: ClassVar[Mapping[str, Field]] = MODEL

    @property
    def has_experts(self) -> bool:
        return bool(self.expert_num > 1)


class StrategyConfig(Config):
    """SimuMax's strategy file."""

    what: ClassVar[str] = "strategy"
    fields: ClassVar[Mapping[str, Field]] = STRATEGY

    @property
    def shard_size(self) -> int:
        """Ranks that hold one copy of the model, context parallelism included."""
        return int(self.tp_size * self.cp_size * self.pp_size)

    @property
    def dp_size(self) -> int:
        if self.world_size % self.shard_size:
            raise InputError(
                f"strategy: world_size {self.world_size} is no multiple of tp_size * cp_size * pp_size = {self.shard_size}"
            )
        return int(self.world_size // self.shard_size)

    @property
    def edp_size(self) -> int:
        return int(self.world_size // (self.ep_size * self.etp_size * self.pp_size))

    @property
    def global_batch_size(self) -> int:
        """Sequences of a step."""
        return int(self.micro_batch_size * self.micro_batch_num * self.dp_size)


class SystemConfig(Config):
    """SimuMax's system file."""

    what: ClassVar[str] = "system"
    fields: ClassVar[Mapping[str, Field]] = SYSTEM
