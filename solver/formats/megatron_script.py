"""A shell script that launches Megatron-LM, as a run's configuration: its arguments must stand in it literally."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiler.errors import InputError, printable, shown
from solver.formats.file_run import FileRun, Source
from solver.formats.megatron_run import run_of_arguments

PROGRAM = "pretrain_gpt.py"
_LAUNCH = ("nnodes", "nproc-per-node")  #: torchrun's, with - or _


def read_script(source: Source) -> FileRun:
    """Return the run of a script, whose layout has all fields of a Strategy.

    Raises InputError for a script that does not launch pretrain_gpt.py by torchrun with a number of GPUs, for arguments that a
    shell would still have to expand, and for what solver.formats.megatron_args refuses.
    """
    path = source.path
    try:
        words = shlex.split(source.text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"{path}: it cannot be read as a command: {error}") from None
    at = next((i for i, word in enumerate(words) if word.endswith(PROGRAM)), None)
    if at is None:
        raise InputError(f"{path}: no {PROGRAM} in it, which a script of Megatron-LM launches")
    flags = _flags(words[at + 1 :], path)
    launch = {key: words[i + 1] for i, word in enumerate(words[:at]) for key in _LAUNCH
              if word.lstrip("-").replace("_", "-") == key}  # fmt: skip
    if set(launch) != set(_LAUNCH) or not all(value.isdecimal() for value in launch.values()):
        raise InputError(f"{path}: torchrun's --nnodes and --nproc-per-node must say the number of GPUs, as numbers")
    world = int(launch["nnodes"]) * int(launch["nproc-per-node"])
    return run_of_arguments(flags, world, path)


def _flags(words: Sequence[str], path: Path) -> dict[str, Any]:
    """Return flag -> value (a number where it is one, a list's words joined) of the words after the program."""
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


def _value(text: str) -> Any:
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        return text
