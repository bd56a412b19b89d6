"""A shell script that launches Megatron-LM, as a run's configuration: its arguments must stand in it literally."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profiler.errors import InputError
from solver.formats.file_run import FileRun, Source
from solver.formats.megatron_run import run_of_arguments
from solver.formats.script_words import arguments, program_at, script_words

PROGRAM = "pretrain_gpt.py"
#: torchrun's and deepspeed's, with - or _.
_LAUNCH = {"nodes": ("nnodes", "num-nodes"), "each": ("nproc-per-node", "num-gpus")}


def read_script(source: Source) -> FileRun:
    """Return the run of a script, whose layout has all fields of a Strategy.

    Raises InputError for a script that does not launch pretrain_gpt.py by torchrun with a number of GPUs, for arguments that a
    shell would still have to expand, and for what solver.formats.megatron_args refuses.
    """
    path, words = source.path, script_words(source)
    at = program_at(words, PROGRAM)
    if at is None:
        raise InputError(f"{path}: no {PROGRAM} in it, which a script of Megatron-LM launches")
    flags = arguments(words[at + 1 :], path)
    return run_of_arguments(flags, ranks_of_launch(words[:at], path), path)


def ranks_of_launch(words: Sequence[str], path: Path) -> int:
    """Return the GPUs of torchrun's or deepspeed's words before the program. Raises InputError where they are no numbers."""
    launch = {name: words[i + 1] for i, word in enumerate(words[:-1]) for name, keys in _LAUNCH.items()
              if word.lstrip("-").replace("_", "-") in keys}  # fmt: skip
    if set(launch) != set(_LAUNCH) or not all(value.isdecimal() for value in launch.values()):
        raise InputError(f"{path}: torchrun's --nnodes and --nproc-per-node must say the number of GPUs, as numbers")
    return int(launch["nodes"]) * int(launch["each"])
