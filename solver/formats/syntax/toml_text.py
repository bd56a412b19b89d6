"""TOML as sections that know their lines, and sections as TOML."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from solver.formats.syntax.literal_python import Section

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_HEADER = re.compile(r"\s*\[\s*([\w.-]+)\s*\]")
_KEY = re.compile(r"\s*([\w-]+)\s*=")


def read_toml(text: str, path: Path) -> Section:
    """Return the tables of a TOML text. Raises InputError for what is not TOML."""
    try:
        plain = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    return _section(plain, "", _lines(text))


def write_toml(tables: Mapping[str, Mapping[str, Any]], comments: list[str]) -> str:
    """Return the text of tables of numbers, texts, flags and lists of them; comments stand above. None is left out."""
    parts = [f"# {comment}\n" for comment in comments]
    for name, table in tables.items():
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in table.items() if value is not None]
        parts += [f"\n[{name}]\n", *lines] if lines else []
    return "".join(parts)


def _lines(text: str) -> dict[str, int]:
    """Return dotted key -> line of keys that stand at the start of a line."""
    found, table = dict[str, int](), ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = header[1] + "."
            found[header[1]] = number
        elif key := _KEY.match(line):
            found[table + key[1]] = number
    return found


def _section(plain: Mapping[str, Any], path: str, lines: Mapping[str, int]) -> Section:
    section = Section()
    for key, value in plain.items():
        full = f"{path}{key}"
        section[key] = _section(value, f"{full}.", lines) if isinstance(value, dict) else value
        if full in lines:
            section.lines[key] = lines[full]
    return section
