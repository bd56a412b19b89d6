"""YAML as sections that know their lines, and sections as YAML.

PyYAML reads, as the frameworks themselves do, so words mean what they mean there: yes and off are flags, 1e-5 is a text. Only
its safe types are made. Aliases are refused, which could make a small file a large one, and so is a key that stands twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from profiler.errors import InputError, printable
from solver.formats.syntax.literal_python import Section

#: libyaml's reader and writer where PyYAML was built with them, ten times as fast.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_MOST_DEPTH = 40
_TOO_DEEP = "nested too deeply"
_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


def read_yaml(text: str, path: Path) -> Section:
    """Return the mapping of a YAML text. Raises InputError with the line for what is not YAML or not read here."""
    try:
        _check_events(text, path)
        loader = _LOADER(text)
        try:
            node = loader.get_single_node()
            found = None if node is None else _value(node, loader, path)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        if "nesting depth" in str(error.problem):  # libyaml's own limit, since PyYAML 6.0.4; it reads ahead of _check_events
            raise InputError(f"{path}{line}: {_TOO_DEEP}") from None
        raise InputError(f"{path}{line}: not valid YAML: {printable(str(error.problem))}") from None
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not valid YAML: {printable(str(error))}") from None
    if not isinstance(found, Section):
        raise InputError(f"{path}: a YAML configuration is a mapping of keys")
    return found


def write_yaml(section: Mapping[str, Any], comments: list[str]) -> str:
    """Return the text of nested mappings of numbers, texts, flags, None and lists, in their order; comments stand above."""
    body = yaml.dump(dict(section), Dumper=_DUMPER, sort_keys=False, width=120, allow_unicode=True)
    return "".join(f"# {comment}\n" for comment in comments) + str(body)


def _check_events(text: str, path: Path) -> None:
    """Raise InputError for an alias, and for what is nested more deeply than a reader that calls itself can follow."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or depth > _MOST_DEPTH:
            what = _TOO_DEEP if depth > _MOST_DEPTH else "an alias, which is not read; write its value"
            raise InputError(f"{path}, line {event.start_mark.line + 1}: {what}")


def _value(node: Any, loader: Any, path: Path) -> Any:
    """Return the value of a node, of mappings as sections. Raises InputError for a tag, and for a key that stands twice."""
    line = node.start_mark.line + 1
    if isinstance(node, yaml.CollectionNode) and node.tag not in _TAGS:
        raise InputError(f"{path}, line {line}: the tag {printable(node.tag)}, which is not read")
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, loader, path) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node, deep=True)
    section = Section()
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError(f"{path}, line {line}: a key that is no text")
        name = str(key_node.value)
        if name in section:
            raise InputError(f"{path}, line {line}: the key {printable(name)!r} stands twice")
        section.put(name, _value(value_node, loader, path), line)
    return section
