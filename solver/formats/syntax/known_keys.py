"""Checking the keys of a file: an unknown one is refused by name, and so is a value whose effect is not modelled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, closest
from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader

#: A name maps to the keys of its section, or to None where anything is allowed: a value, or a section that is never read.
Known = Mapping[str, Any]
#: Dotted key -> (values that are described, what another one would mean).
Described = Mapping[str, tuple[tuple[Any, ...], str]]


def keys(words: str, **sections: Known) -> Known:
    """Return the keys of a section: names of plain values in one text, sections by name."""
    return {**dict.fromkeys(words.split()), **sections}


def check_keys(value: Any, known: Known | None, path: str, where: str) -> None:
    """Raise InputError for a key of the section ``path`` ("": the file) or below it that is not known, with what is."""
    if known is None or not isinstance(value, Section):
        return
    for key, below in value.items():
        if key not in known:
            raise unknown_key(key, known, path, value, where)
        check_keys(below, known[key], f"{path}.{key}" if path else key, where)


def unknown_key(key: str, known: Known, path: str, section: Section, where: str) -> InputError:
    """Return the error that a section has no such key."""
    place, kind = (f"{path} has no key", "keys") if path else ("there is no section or setting", "names")
    line = f", line {section.lines[key]}" if key in section.lines else ""
    return InputError(
        f"{where}{line}: {place} {key!r}{closest(key, known, least=0.67)}; known {kind} are {', '.join(sorted(known))}"
    )


def unread_keys(section: Section, known: Known, path: str, read: set[str]) -> list[str]:
    """Return the dotted names of known keys that were not read; a section of which nothing was read is listed as a whole."""
    found: list[str] = []
    for key, value in section.items():
        full = f"{path}.{key}" if path else key
        if key not in known or full in read:
            continue
        if isinstance(value, Section) and any(name.startswith(f"{full}.") for name in read):
            found += unread_keys(value, known[key] or {}, full, read)
        else:
            found.append(full)
    return found


def open_sections(sections: Section, known: Known, described: Described, where: str) -> SectionReader:
    """Return a reader of a file's sections. Raises InputError for keys that are not known and values that are not modelled."""
    check_keys(sections, known, "", where)
    file = SectionReader(sections, "", where, set())
    check_described(file, described)
    return file


def check_described(file: SectionReader, rules: Described) -> None:
    """Raise InputError for a value whose effect is not modelled, with what the effect is."""
    for dotted, (allowed, what) in rules.items():
        *sections, key = dotted.split(".")
        place = file
        for name in sections:
            place = place.section(name)
        if key in place and place.get(key) not in allowed:
            raise place.wrong(key, f"{' or '.join(map(repr, allowed))}, because {what} is not modelled")
