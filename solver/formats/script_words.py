"""The words of a shell script that launches a framework: they are read, never run, so they must stand in it literally."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiler.errors import InputError, printable, shown
from solver.formats.file_run import Source


def script_words(source: Source) -> list[str]:
    """Return the words of a script; comments are left out. Raises InputError where a shell could not read them."""
    try:
        return shlex.split(source.text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"{source.path}: it cannot be read as a command: {error}") from None


def program_at(words: Sequence[str], program: str) -> int | None:
    """Return the place of a program, which may stand in a folder."""
    return next((i for i, word in enumerate(words) if word == program or word.endswith(f"/{program}")), None)


def arguments(words: Sequence[str], path: Path) -> dict[str, Any]:
    """Return argument -> value (a number where it is one, a list's words joined, true for a switch).

    Raises InputError for a variable, for an argument that stands twice, and for a word that belongs to none.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if "$" in word:
            raise InputError(f"{path}: {printable(word)} is a variable; write its value, as the shell would")
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if name in found:
                raise InputError(f"{path}: {name} is given twice")
            found[name] = [value] if value else []
        elif not name:
            raise InputError(f"{path}: {shown(word)} belongs to no argument")
        else:
            found[name].append(word)
    return {name: _value(" ".join(values)) if values else True for name, values in found.items()}


def launched_settings(source: Source, name: str, wanted: str) -> Source:
    """Return the settings that a script names, with the script as what stands beside them under their name.

    wanted: what the script must name. Raises InputError where no such file is there.
    """
    text = source.beside(name) if name else None
    if text is None:
        raise InputError(f"{source.path}: it must name {wanted}, beside the script")
    path = source.path.parent / name
    own = path.with_suffix(".sh").name
    return Source(path, text, lambda relative: source.text if relative == own else source.beside(relative))


def whole_argument(given: dict[str, Any], name: str, path: Path) -> int:
    """Return an argument that is a positive whole number. Raises InputError otherwise."""
    value = given.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        what = f"is {shown(value)}" if name in given else "is missing"
        raise InputError(f"{path}: {name} {what}; it must be a positive whole number")
    return value


def _value(text: str) -> Any:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text
