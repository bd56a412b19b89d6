"""The journal of an unfinished sweep: what its rows were computed from, and the rows so far, a line each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.errors import InputError, shown
from profiler.files import source_digest
from profiler.profile.profiles import find_profile, profile_of
from profiler.text_file import read_text
from solver.formats.config_file import CONFIG_ENDINGS, find_model, load_cluster, load_run_config
from solver.formats.model_file import CONFIGS
from solver.formats.topology_cluster import TOPOLOGY
from solver.options.machines import machine_options

_MOST_BYTES = 1 << 30

_PROGRAM = "program"
_PACKAGES = [CONFIGS.parent / name for name in ("profiler", "predictor", "solver")]


def inputs_of(models: Iterable[str], machines: Iterable[str]) -> dict[str, str]:
    """Return a digest of each input of a sweep, by its name: the program, the models, the machines with their profiles."""
    return {
        _PROGRAM: source_digest([*_PACKAGES, CONFIGS / "network"]),
        **{f"model {name}": _digest(_of_model, name) for name in models},
        **{f"machine {name}": _digest(_of_machine, name) for name in machines},
    }


def _digest(content: Any, name: str) -> str:
    """Return the digest of what is read of an input, or of what it is refused for, which its rows then give as their reason."""
    try:
        text = content(name)
    except InputError as error:  # perhaps for want of a number of GPUs, which the sweep gives
        text = f"{error}\n{_digest_of_file(Path(name))}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _digest_of_file(path: Path) -> str:
    if not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _of_model(name: str) -> str:
    """Return what is read of a model's file, and of the files that it names: a comment in it changes no row."""
    return repr(load_run_config(Path(name) if Path(name).suffix in CONFIG_ENDINGS else find_model(name)))


def _of_machine(name: str) -> str:
    """Return what a profile (of a device file: derived) holds, or what is read of a cluster's file and of its profile."""
    options = machine_options(name)
    if options["cluster"] is None:
        return profile_of(options["profile"], None, options["as_device"])[0].digest
    described = load_cluster(name)
    # a topology is its file's text; one that a template makes depends on its name and on the program alone
    drawn = described.pop(TOPOLOGY, None) is not None and Path(name).is_file()
    text = Path(name).read_text(encoding="utf-8") if drawn else ""
    return repr((sorted(described.items()), text, find_profile(described.get("hardware"))[0].digest))


def read_journal(path: Path, options: Mapping[str, Any], inputs: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the lines of a journal; a last line that was cut off is removed from it.

    Raises InputError where it is none, and where its rows were computed with other options or from other inputs.
    """
    lines = _lines(path)
    if not lines:
        return []
    before, stated = lines[0]["options"], {name: found for line in lines for name, found in line.get("inputs", {}).items()}
    unfinished = f"{path} is an unfinished sweep"
    for name in options:
        if before.get(name) != options[name]:
            was, now = (_shown(name, values.get(name)) for values in (before, options))
            raise InputError(f"{unfinished} {was}, but this one is {now}: finish that with its own options, or delete the file")
    for name in inputs:
        if stated.get(name, inputs[name]) != inputs[name]:
            raise InputError(
                f"{unfinished} whose rows were computed from another content of the {name}: put that back, or delete the "
                "file to compute all rows again"
            )
    return lines


def new_inputs(lines: Sequence[Mapping[str, Any]], inputs: Mapping[str, str]) -> dict[str, str]:
    """Return the inputs that a journal does not state yet."""
    stated = {name for line in lines for name in line.get("inputs", ())}
    return {name: digest for name, digest in inputs.items() if name not in stated}


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = read_text(path, "an unfinished sweep", _MOST_BYTES)
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        with path.open("r+", encoding="utf-8") as file:
            file.truncate(len(whole.encode()))
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no unfinished sweep ({error}); delete it or name another output") from None
    if lines and not all(_sound(line, number) for number, line in enumerate(lines)):
        raise InputError(
            f"{path} is no unfinished sweep of this release, whose first line states options and inputs, and the others points "
            "and rows; delete it or name another output"
        )
    return lines


def _sound(line: Any, number: int) -> bool:
    """Whether a line of a journal holds what it should hold."""
    keys = ("options", "inputs") if number == 0 else ("inputs",) if "inputs" in line else ("point", "row")
    return isinstance(line, dict) and all(isinstance(line.get(key), dict) for key in keys)


def _shown(name: str, value: Any) -> str:
    """Return an option as it was given, or that it was not."""
    if value is None or value is False:
        return f"without --{name}"
    return f"with --{name}" if value is True else f"with --{name} {value if isinstance(value, str) else shown(value)}"
