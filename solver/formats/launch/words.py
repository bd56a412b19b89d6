"""The words of a shell script that launches a framework, and the arguments in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

from profiler.errors import InputError, printable, shown
from solver.formats.file_run import Source
from solver.formats.launch.ranks import END, gpu_types, launch_key, slurm_variables
from solver.formats.shell.script import Shell, read_shell

#: Variables of the environment that say where ranks are, not how many.
_PLACES = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "RDZV_ID", "RDZV_ENDPOINT", "CUDA_DEVICE_MAX_CONNECTIONS"}
#: Programs that start others.
_STARTS = re.compile(
    r"python[\d.]*|torchrun|deepspeed|srun|mpirun|mpiexec|accelerate|torch\.distributed\.\w+|[a-z]*sh|primus-cli"
)
#: Variables that change how NCCL sends.
_UNMODELLED = (
    "NCCL_PROTO",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_NVLS_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_MIN_CTAS",
    "NCCL_MAX_CTAS",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_CROSS_NIC",
    "NCCL_COLLNET_ENABLE",
)
#: What a deterministic run sets, and what these change in another one.
_DETERMINISTIC = ("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")


def _by_env(word: str) -> str:
    """Return how the command line states the variable in a word, where it is a plain one."""
    found = re.search(r"\$\{?([A-Za-z_]\w*)", word)
    return f", or, unless the script itself sets it, give --env {found[1]}=VALUE" if found else ""


def script_words(source: Source) -> list[str]:
    """Return the words of a script's commands, with the script's own variables put in; comments are left out.

    Raises InputError where a shell could not read them.
    """
    return [word.text for word in _shell(source).words]


def script_notes(source: Source, at: int, ignored: Collection[str] = ()) -> tuple[str, ...]:
    """Return lines on what a script says beside the arguments of the program at a place of its words: its defaults of the
    environment's variables that decide the run, files that it runs, and the GPUs that it asks Slurm for.

    ignored: arguments that decide nothing.
    """
    shell = _shell(source)
    used = {name for before, word in pairwise(shell.words[:at]) if launch_key(before.text) for name in word.defaults}
    name = ""
    for word in takewhile(lambda word: word.text != END, shell.words[at + 1 :]):
        name = word.text.partition("=")[0] if word.text.startswith("--") else name
        used |= set() if name in ignored else word.defaults
    written = {name: f"${name}" if name.isdecimal() else name for name in used - _PLACES}
    taken = "; ".join(f"{written[name]} is {shell.defaults[name]}" for name in sorted(written))
    others = (
        "environment (--env) or its arguments say" if any(name.isdecimal() for name in written) else "environment (--env) says"
    )
    told = [f"the script's own, unless the {others} otherwise: {taken}"] if taken else []
    if shell.sourced:
        files = printable(", ".join(dict.fromkeys(shell.sourced)), 160)
        told.append(f"not read, though the script runs it and it may set variables: {files}")
    if types := gpu_types(source.text):
        told.append(f"the script asks Slurm for GPUs of type {', '.join(types)}: --profile says which are estimated")
    return tuple(told)


def _shell(source: Source) -> Shell:
    known = {"PWD": ".", **slurm_variables(source.text), **source.variables}
    try:
        return _read(source.text, tuple(known.items()))
    except ValueError as error:
        raise InputError(f"{source.path}: it cannot be read as a command: {error}") from None


@lru_cache(maxsize=8)  # what reads a script asks several times for its words
def _read(text: str, known: tuple[tuple[str, str], ...]) -> Shell:
    return read_shell(text, dict(known))


def environment(source: Source, at: int) -> dict[str, str]:
    """Return the variables in capitals that a script, or another shell that it starts, sets for the command which word ``at``
    is of, as far as their values are known."""
    shell = _shell(source)
    variables = {**shell.environment, **dict(shell.words[at].environment)}
    return {name: value for name, value in variables.items() if re.fullmatch(r"[A-Z][A-Z0-9_]*", name) and "$" not in value}


def of_environment(source: Source, at: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the layout fields that the variables of ``environment`` state, and a line on those that change times
    unmodelled."""
    variables = environment(source, at)
    debugging = {"launch_blocking": True} if variables.get("CUDA_LAUNCH_BLOCKING", "0") != "0" else {}
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "") == "DETAIL":
        debugging["collective_checks"] = True
    if any("expandable_segments:True" in variables.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        debugging["expandable_segments"] = True
    names = _UNMODELLED if "--deterministic-mode" in script_words(source) else (*_UNMODELLED, *_DETERMINISTIC)
    set_here = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
    return debugging, (f"left out, although it may change times: {set_here}",) if set_here else ()


def program_at(words: Sequence[str], program: str) -> int | None:
    """Return the place of a program that a command starts, which may stand in a folder: a launcher or Python is before it, or
    an argument behind it, where other commands only copy it or change its rights."""
    start = 0
    for end in [*(i for i, word in enumerate(words) if word == END), len(words)]:
        command, first = words[start:end], start
        start = end + 1
        at = next((i for i, word in enumerate(command) if word == program or word.endswith(f"/{program}")), None)
        if at is None:
            continue
        starts = any(_STARTS.fullmatch(word.rpartition("/")[2]) for word in command[:at])
        if at == 0 or starts or any(word.startswith("--") for word in command[at + 1 :]):
            return first + at
    return None


def one_command(words: Sequence[str]) -> Sequence[str]:
    """Return the words of the command that they begin with."""
    return words[: words.index(END)] if END in words else words


def arguments(
    words: Sequence[str], path: Path, ignored: Collection[str] = (), repeated: list[str] | None = None
) -> dict[str, Any]:
    """Return argument -> value (a number where it is one, a list's words joined, true for a switch) of one command.

    ignored: arguments whose values need not be known. repeated: takes the arguments that stand more than once, of which the
    last counts; without it they are refused. Raises InputError for a variable that only the shell knows, for an argument that
    stands twice, and for a word that belongs to none.
    """
    found: dict[str, list[str]] = {}
    name = ""
    for word in one_command(words):
        if "$" in word and name not in ignored and word.partition("=")[0] not in ignored:
            raise InputError(f"{path}: {printable(word)} is not known from the script alone; write its value{_by_env(word)}")
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if name in found and repeated is None:
                raise InputError(f"{path}: {name} is given twice")
            if name in found and repeated is not None:
                repeated.append(name)
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
    written = _shell(source).files.get(name)
    if written is not None and (unknown := re.search(r"\$\{?\w[^\s,\"]*", written)):
        raise InputError(
            f"{source.path}: {unknown[0]} in {printable(name)}, which it writes, is not known from the script alone; write its "
            f"value{_by_env(unknown[0])}"
        )
    text = written if written is not None else source.beside(name) if name else None
    if text is None:
        missing = f"{printable(name)}, which it names, is not there: put it" if name else f"it must name {wanted},"
        raise InputError(f"{source.path}: {missing} beside the script")
    return with_script(source, source.path.parent / name, text)


def with_script(source: Source, path: Path, text: str) -> Source:
    """Return the settings ``text`` at ``path`` of a script, which stands beside them under their name."""
    own = path.with_suffix(".sh").name

    def beside(relative: str) -> str | None:
        return source.text if relative == own else source.beside(relative)

    return replace(source, path=path, text=text, beside=beside, script=source.path)


def settings_after(source: Source, argument: str, wanted: str) -> Source:
    """Return the settings that a script names after an argument, as launched_settings."""
    words = script_words(source)
    name = next((name for word, name in pairwise(words) if word == argument), "")
    return launched_settings(source, name, wanted)


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
