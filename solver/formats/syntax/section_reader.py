"""Checked access to the sections of a file: a wrong value is reported with its line and what would be valid."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from profiler.errors import InputError
from solver.formats.syntax.literal_python import Section

_MOST = 10**9  #: upper limit of any size, count or length
_SHOWN = 8  #: items of a list that a message repeats; a longer one may repeat others thousands of times


class SectionReader:
    """Checked values of one section of the file; every key that is requested is added to ``read``."""

    def __init__(self, section: Section, path: str, where: str, read: set[str]) -> None:
        self._section, self._path, self._where, self.read = section, path, where, read

    def __contains__(self, key: str) -> bool:
        return self._section.get(key) is not None

    @property
    def place(self) -> str:
        """The file and, in it, the section."""
        return f"{self._where}: {self._path}" if self._path else self._where

    def full(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def wrong(self, key: str, wanted: str) -> InputError:
        """Return the error that ``key`` should have been ``wanted``, with its line where the file has the key."""
        if key not in self:
            return InputError(f"{self._where}: {self.full(key)} is missing; it must be {wanted}")
        line, value = self._section.lines.get(key), self._section[key]
        shown = f"{value!r:.60}" if _is_plain(value) else f"a {type(value).__name__.lower()}"
        place = f", line {line}" if line else ""
        return InputError(f"{self._where}{place}: {self.full(key)} is {shown}; it must be {wanted}")

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        self.read.add(self.full(key))
        return self._section[key]

    def section(self, key: str) -> SectionReader:
        """Return the section ``key``, or an empty one."""
        value = self._section.get(key)
        if value is None:
            value = Section()
        elif not isinstance(value, Section):
            raise self.wrong(key, "a section, dict(...)")
        return SectionReader(value, self.full(key), self._where, self.read)

    def sized(self, key: str) -> SectionReader:
        """Return a section that may also be written as its size only: ``tensor=4`` is ``tensor=dict(size=4)``."""
        value = self._section.get(key)
        if value is None or isinstance(value, Section):
            return self.section(key)
        self.read.add(self.full(key))
        section = Section()
        section.put("size", value, self._section.lines.get(key, 0))
        return SectionReader(section, self.full(key), self._where, self.read)

    def whole(self, key: str, default: int | None = None, least: int | None = 1) -> int:
        """Return a whole number of at least ``least``; 4096.0 is accepted, because ``8192 / 2`` gives it."""
        value = self.get(key, default)
        good = isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1
        if not good or abs(value) > _MOST or (least is not None and value < least):
            raise self.wrong(key, "a whole number" + ("" if least is None else f" of at least {least}"))
        return int(value)

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
            raise self.wrong(key, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool) and value not in (0, 1):
            raise self.wrong(key, "True or False")
        return bool(value)

    def choice(self, key: str, allowed: Collection[str], default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, f"one of {', '.join(allowed)}")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts, or the parts of one text between commas; none where the key is missing."""
        value = self.get(key, [])
        listed = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(part, str) for part in listed):
            raise self.wrong(key, "a list of texts")
        return listed


def _is_plain(value: Any) -> bool:
    """Whether a value is short enough to be repeated in a message: a scalar, or a short list of texts."""
    if isinstance(value, list):
        return len(value) <= _SHOWN and all(isinstance(item, str) for item in value)
    return isinstance(value, int | float | str)
