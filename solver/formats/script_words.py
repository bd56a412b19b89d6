"""The words of a shell script that launches a framework, and the arguments in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from profiler.errors import InputError, printable, shown
from solver.formats.file_run import Source
from solver.formats.shell_script import Shell, read_shell

#: torchrun's and deepspeed's, with - or _.
LAUNCH = {"nodes": ("nnodes", "num-nodes"), "each": ("nproc-per-node", "num-gpus")}
#: Variables of the environment that say where ranks are, not how many.
_PLACES = {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "RDZV_ID", "RDZV_ENDPOINT", "CUDA_DEVICE_MAX_CONNECTIONS"}
#: Variables that change how NCCL sends.
_UNMODELLED = (
    "NCCL_PROTO", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NET_GDR_LEVEL",
    "NCCL_CROSS_NIC", "NCCL_COLLNET_ENABLE",
)  # fmt: skip
#: What a deterministic run sets, and what these change in another one.
_DETERMINISTIC = ("NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO")
#: Slurm's options and what they say of a node, or of all.
_SLURM = {"--nodes": "nodes", "-N": "nodes", "--gpus-per-node": "gpus", "--gres": "gpus", "--ntasks-per-node": "tasks",
          "--gpus-per-task": "per_task", "--gpus": "all", "-G": "all", "--ntasks": "started", "-n": "started"}  # fmt: skip
_END = ";"  #: stands between two commands


def script_words(source: Source) -> list[str]:
    """Return the words of a script's commands, with the script's own variables put in; comments are left out.

    Raises InputError where a shell could not read them.
    """
    return [word.text for word in _shell(source).words]


def defaults_taken(source: Source, program: str, ignored: Collection[str]) -> tuple[str, ...]:
    """Return a line with the script's defaults of the environment's variables that decide the run of a program, if any do.

    ignored: arguments that decide nothing.
    """
    shell = _shell(source)
    words = [word.text for word in shell.words]
    at = program_at(words, program)
    if at is None:
        return ()
    used = {name for before, word in pairwise(shell.words[:at]) if _launch_key(before.text) for name in word.defaults}
    name = ""
    for word in takewhile(lambda word: word.text != _END, shell.words[at + 1 :]):
        name = word.text.partition("=")[0] if word.text.startswith("--") else name
        used |= set() if name in ignored else word.defaults
    written = {name: f"${name}" if name.isdecimal() else name for name in used - _PLACES}
    taken = "; ".join(f"{written[name]} is {shell.defaults[name]}" for name in sorted(written))
    others = "environment or its arguments say" if any(name.isdecimal() for name in written) else "environment says"
    told = [f"the script's own, unless the {others} otherwise: {taken}"] if taken else []
    if shell.sourced:
        files = printable(", ".join(dict.fromkeys(shell.sourced)), 160)
        told.append(f"not read, though the script runs it and it may set variables: {files}")
    return tuple(told)


class Launch(NamedTuple):
    """Nodes, and the ranks that a launch starts on each."""

    nodes: int
    each: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.each

    @property
    def gpus_per_node(self) -> int:
        """GPUs that a node must have; 0 for a launch on one node, which may have more."""
        return self.each if self.nodes > 1 else 0


def ranks_of_launch(words: Sequence[str], source: Source) -> Launch:
    """Return what the command that the words end with says (torchrun's or deepspeed's), else what Slurm is asked for,
    else the GPUs that the user states.

    words: of the script up to the program. Raises InputError where nothing says it in numbers.
    """
    words = list(takewhile(lambda word: word != _END, reversed(words)))[::-1]
    pairs = [(words[i], words[i + 1]) for i in range(len(words) - 1)]
    pairs += [(name, value) for name, is_, value in (word.partition("=") for word in words) if is_]
    launch = {key: value for name, value in pairs if (key := _launch_key(name))}
    by_torchrun = any(word.endswith("torchrun") or "torch.distributed" in word for word in words)
    if by_torchrun:
        launch.setdefault("nodes", "1")  # its own default
    of_slurm = slurm_ranks(source.text, pairs if "srun" in words else (), by_torchrun or "each" in launch)
    launch |= {key: value for key, value in of_slurm.items() if not launch.get(key, "").isdecimal()}
    if set(launch) == set(LAUNCH) and all(value.isdecimal() and len(value) < 8 for value in launch.values()):
        return Launch(int(launch["nodes"]), int(launch["each"]))
    if source.world:
        return Launch(1, source.world)
    unknown = next((value for value in launch.values() if "$" in value), "")
    why = f"; {printable(unknown)} is not known from the script alone" if unknown else ""
    raise InputError(
        f"{source.path}: torchrun's --nnodes and --nproc-per-node must say the number of GPUs, as numbers{why}; or give "
        "--world_size"
    )


def slurm_ranks(text: str, pairs: Sequence[tuple[str, str]], starts_ranks: bool) -> dict[str, str]:
    """Return nodes and ranks on each as srun's own words (``pairs`` of option and value) or #SBATCH lines ask for them.

    starts_ranks: a task starts a rank on every GPU that it gets, as torchrun does; otherwise it is a rank.
    """
    whole = _asked([*_of_batch(text), *pairs])
    nodes = whole.get("nodes", 0)
    tasks = whole.get("tasks") or (whole.get("started", 0) // nodes if nodes else 0)
    gpus = whole.get("gpus") or (whole.get("all", 0) // nodes if nodes else 0) or whole.get("per_task", 0) * tasks
    each = gpus if starts_ranks else tasks or gpus
    return {key: str(value) for key, value in (("nodes", nodes), ("each", each)) if value}


def _of_batch(text: str) -> list[tuple[str, str]]:
    """Return the options of #SBATCH lines and their values."""
    lines = " ".join(re.findall(r"(?m)^#SBATCH[ \t]+([^#\n]*)", text))
    return re.findall(r"(?:^|(?<=\s))(-N|-G|-n|--[\w-]+)[= \t]*([^\s=]\S*)", lines)


def _asked(options: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return what options ask Slurm for, by the words of _SLURM."""
    asked = {_SLURM[name]: _gpus(value) for name, value in options if name in _SLURM}
    return {name: int(value) for name, value in asked.items() if value.isdecimal()}


def _slurm_variables(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets for a script that asks for nodes and tasks in numbers."""
    asked = _asked(_of_batch(text))
    nodes, tasks = asked.get("nodes", 0), asked.get("tasks", 0)
    found = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS_PER_NODE": tasks,
             "SLURM_NTASKS": asked.get("started") or nodes * tasks, "SLURM_GPUS_PER_NODE": asked.get("gpus", 0)}  # fmt: skip
    return {name: str(value) for name, value in found.items() if value}


def _gpus(value: str) -> str:
    """Return the number in a request such as 8, gpu:8 or gpu:a100:8,nvme:1."""
    parts = [part.split(":") for part in value.split(",")]
    return next((part[-1] for part in parts if part[0] == "gpu" or len(part) == 1), "")


def _launch_key(word: str) -> str:
    name = word.lstrip("-").replace("_", "-")
    return next((key for key, names in LAUNCH.items() if name in names), "") if word.startswith("-") else ""


def _shell(source: Source) -> Shell:
    try:
        return read_shell(source.text, _slurm_variables(source.text))
    except ValueError as error:
        raise InputError(f"{source.path}: it cannot be read as a command: {error}") from None


def environment(source: Source) -> dict[str, str]:
    """Return the variables in capitals whose values a script sets, as far as they are known."""
    return {name: value for name, value in _shell(source).environment.items() if re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}


def of_environment(source: Source) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the layout fields that the variables of a script state, and a line on those that change times unmodelled."""
    variables = environment(source)
    debugging = {"launch_blocking": True} if variables.get("CUDA_LAUNCH_BLOCKING", "0") != "0" else {}
    if variables.get("TORCH_DISTRIBUTED_DEBUG", "") == "DETAIL":
        debugging["collective_checks"] = True
    if any("expandable_segments:True" in variables.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        debugging["expandable_segments"] = True
    names = _UNMODELLED if "--deterministic-mode" in script_words(source) else (*_UNMODELLED, *_DETERMINISTIC)
    set_here = ", ".join(f"{name}={variables[name]}" for name in names if name in variables)
    return debugging, (f"left out, although it may change times: {set_here}",) if set_here else ()


def program_at(words: Sequence[str], program: str) -> int | None:
    """Return the place of a program, which may stand in a folder."""
    return next((i for i, word in enumerate(words) if word == program or word.endswith(f"/{program}")), None)


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
    for word in words[: words.index(_END)] if _END in words else words:
        if "$" in word and name not in ignored and word.partition("=")[0] not in ignored:
            raise InputError(f"{path}: {printable(word)} is not known from the script alone; write its value")
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
    text = source.beside(name) if name else None
    if text is None:
        raise InputError(f"{source.path}: it must name {wanted}, beside the script")
    path = source.path.parent / name
    own = path.with_suffix(".sh").name
    return Source(path, text, lambda relative: source.text if relative == own else source.beside(relative), source.world)


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
