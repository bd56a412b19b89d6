"""How many ranks the command that starts a program starts: torchrun's, deepspeed's, mpirun's, or Slurm's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

from profiler.errors import InputError, printable
from solver.formats.file_run import Source
from solver.formats.launch import deepspeed_ranks

#: torchrun's and deepspeed's, with - or _.
_LAUNCH = {"nodes": ("nnodes", "num-nodes"), "each": ("nproc-per-node", "num-gpus")}
#: Slurm's options and what they say of a node, or of all.
_SLURM = {
    "--nodes": "nodes",
    "-N": "nodes",
    "--gpus-per-node": "gpus",
    "--gres": "gpus",
    "--ntasks-per-node": "tasks",
    "--gpus-per-task": "per_task",
    "--gpus": "all",
    "-G": "all",
    "--ntasks": "started",
    "-n": "started",
}
END = ";"  #: stands between two commands


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


def ranks_of_launch(words: Sequence[str], source: Source, variables: Mapping[str, str]) -> Launch:
    """Return what the command that the words end with says (torchrun's or deepspeed's), else what Slurm is asked for,
    else the GPUs that the user states.

    words: of the script up to the program. variables: of its environment. Raises InputError where nothing says it in numbers.
    """
    words = list(takewhile(lambda word: word != END, reversed(words)))[::-1]
    pairs = [(words[i], words[i + 1]) for i in range(len(words) - 1)]
    pairs += [(name, value) for name, is_, value in (word.partition("=") for word in words) if is_]
    launch = {key: value for name, value in pairs if (key := launch_key(name))}
    by_torchrun = any(word.endswith("torchrun") or "torch.distributed" in word for word in words)
    by_deepspeed = deepspeed_ranks.starts(words)
    if by_torchrun:
        launch.setdefault("nodes", "1")  # its own default
    elif by_deepspeed:
        launch = deepspeed_ranks.asked(dict(pairs), variables, source) | launch
    starts_ranks = by_torchrun or by_deepspeed or "each" in launch
    of_slurm = _slurm_ranks(source.text, pairs if "srun" in words else (), starts_ranks)
    launch |= {key: value for key, value in of_slurm.items() if not launch.get(key, "").isdecimal()}
    if not by_torchrun and (by_mpi := _mpi_ranks(words)):
        return by_mpi
    if set(launch) == set(_LAUNCH) and all(_number(value) is not None for value in launch.values()):
        return Launch(int(launch["nodes"]), int(launch["each"]))
    if source.world:
        return Launch(1, source.world)
    unknown = next((value for value in launch.values() if "$" in value), "")
    why = f"; {printable(unknown)} is not known from the script alone" if unknown else ""
    raise InputError(
        f"{source.path}: its launcher must say the number of GPUs, as numbers (torchrun's --nnodes and --nproc-per-node, "
        f"deepspeed's --num_nodes and --num_gpus){why}; or give --world_size"
    )


def _slurm_ranks(text: str, pairs: Sequence[tuple[str, str]], starts_ranks: bool) -> dict[str, str]:
    """Return nodes and ranks on each as srun's own words (``pairs`` of option and value) or #SBATCH lines ask for them.

    starts_ranks: a task starts a rank on every GPU that it gets, as torchrun does; otherwise it is a rank.
    """
    whole = _asked([*_of_batch(text), *pairs])
    nodes = whole.get("nodes", 0)
    started = 0 if starts_ranks else whole.get("started", 0)
    nodes = nodes or started // whole.get("tasks", started or 1)  # on one node, as far as is said
    tasks = whole.get("tasks") or (whole.get("started", 0) // nodes if nodes else 0)
    gpus = whole.get("gpus") or (whole.get("all", 0) // nodes if nodes else 0) or whole.get("per_task", 0) * tasks
    each = gpus if starts_ranks else tasks or gpus
    return {key: str(value) for key, value in (("nodes", nodes), ("each", each)) if value}


def _mpi_ranks(words: Sequence[str]) -> Launch | None:
    """Return what mpirun or mpiexec is told to start; None where the command is another one, or says no number of ranks."""
    at = next((i for i, word in enumerate(words) if word.rpartition("/")[2] in ("mpirun", "mpiexec")), None)
    if at is None:
        return None
    told = {name: re.sub(r"ppr:(\d+):node", r"\1", value) for name, value in pairwise(words[at + 1 :])}
    ranks = next(filter(None, (_number(told.get(name, "")) for name in ("-np", "--np", "-n"))), 0)
    on_each = ("-npernode", "--npernode", "-N", "-ppn", "--ppn", "--map-by", "-map-by")
    each = next(filter(None, (_number(told.get(name, "")) for name in on_each)), 0)
    if not ranks:
        return None
    return Launch(ranks // each, each) if each and ranks % each == 0 else Launch(1, ranks)


def _of_batch(text: str) -> list[tuple[str, str]]:
    """Return the options of #SBATCH lines and their values."""
    lines = " ".join(re.findall(r"(?m)^#SBATCH[ \t]+([^#\n]*)", text))
    return re.findall(r"(?:^|(?<=\s))(-N|-G|-n|--[\w-]+)[= \t]*([^\s=]\S*)", lines)


def _asked(options: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Return what options ask Slurm for, by the words of _SLURM."""
    asked = {_SLURM[name]: _number(_gpus(value)) for name, value in options if name in _SLURM}
    return {name: value for name, value in asked.items() if value is not None}


def gpu_types(text: str) -> tuple[str, ...]:
    """Return the types of GPUs that #SBATCH lines ask for, as in gpu:a100:8."""
    asked = (value for name, value in _of_batch(text) if _SLURM.get(name) in ("gpus", "all", "per_task"))
    return tuple(
        dict.fromkeys(kind for value in asked for kind in re.findall(r"(?:^|gpu:)([a-z]\w+):\d+", value) if kind != "gpu")
    )


def slurm_variables(text: str) -> dict[str, str]:
    """Return the variables that Slurm sets for a script that asks for nodes and tasks in numbers."""
    asked = _asked(_of_batch(text))
    nodes, tasks = asked.get("nodes", 0), asked.get("tasks", 0)
    found = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_NTASKS": asked.get("started") or nodes * tasks,
        "SLURM_GPUS_PER_NODE": asked.get("gpus", 0),
    }
    return {name: str(value) for name, value in found.items() if value}


def _gpus(value: str) -> str:
    """Return the number in a request such as 8, a100:8, gpu:8 or gpu:a100:8,nvme:1."""
    parts = [part.split(":") for part in value.split(",")]
    return next((part[-1] for part in parts if part[0] == "gpu"), parts[0][-1] if len(parts) == 1 else "")


def _number(text: str) -> int | None:
    """Return a number of nodes or ranks; None where the text is none, or one that no cluster has."""
    return int(text) if text.isdecimal() and len(text) < 8 else None


def launch_key(word: str) -> str:
    """Return what an option of torchrun or deepspeed says, of _LAUNCH; "" for other words."""
    name = word.lstrip("-").replace("_", "-")
    return next((key for key, names in _LAUNCH.items() if name in names), "") if word.startswith("-") else ""
