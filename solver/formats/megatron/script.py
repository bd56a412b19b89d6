"""A shell script that launches Megatron-LM, as a run's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from profiler.errors import InputError, printable, shown
from solver.formats.file_run import FileRun, Source
from solver.formats.launch.ranks import ranks_of_launch
from solver.formats.launch.words import (
    arguments,
    environment,
    of_environment,
    one_command,
    program_at,
    script_notes,
    script_words,
)
from solver.formats.megatron.arguments import least_ranks
from solver.formats.megatron.flags import ARRANGEMENTS, KNOWN, UNMODELLED
from solver.formats.megatron.run import run_of_arguments

PROGRAM = "pretrain_gpt.py"
HYBRID_PROGRAM = "pretrain_mamba.py"  #: of models whose layers are one block each
_PATTERNS = ("--hybrid-override-pattern", "--hybrid-layer-pattern")  #: of such models, by release


#: Arguments among those that are not read that take several values.
_LISTS = (
    "--data-path",
    "--train-data-path",
    "--valid-data-path",
    "--test-data-path",
    "--tiktoken-special-tokens",
    "--iterations-to-skip",
    "--profile-ranks",
)


def _check_values(words: Sequence[str], path: Path) -> None:
    """Raise InputError for words that argparse would refuse: arguments without their dashes, and second values of an argument
    that is not read."""
    name, values = "", 0
    for word in words:
        if word.startswith("--"):
            name, _, value = word.partition("=")
            values = 1 if value else 0
            continue
        values += 1
        plain = word.lstrip("-")
        if "-" in plain and (plain in KNOWN or plain in UNMODELLED):
            raise InputError(f"{path}: {shown(word)} stands behind {name}; the argument is --{plain}")
        if values > 1 and name.lstrip("-") in ARRANGEMENTS and name not in _LISTS:
            if word.startswith("$"):  # arguments of which only the shell knows that they are none
                raise InputError(f"{path}: {printable(word)} is not known from the script alone; write its value")
            raise InputError(f"{path}: {shown(word)} stands behind {name}, which takes one value")


def _program(words: Sequence[str], path: Path) -> tuple[str, int]:
    """Return the program that a script launches, and the place of its word. Raises InputError for none, and for several."""
    hybrid = program_at(words, PROGRAM) is None and program_at(words, HYBRID_PROGRAM) is not None
    program = HYBRID_PROGRAM if hybrid else PROGRAM
    at = program_at(words, program)
    if at is None:
        raise InputError(
            f"{path}: it launches none of the programs that are read: {PROGRAM} or {HYBRID_PROGRAM} of Megatron-LM by "
            "torchrun, srun or mpirun, run_clm.py or another program around transformers' trainer by accelerate launch "
            "--config_file, by torchrun or with --deepspeed, primus-cli"
        )
    if program_at(words[at + 1 :], program) is not None:
        raise InputError(f"{path}: it launches {program} more than once; keep the launch that is meant")
    return program, at


def read_script(source: Source) -> FileRun:
    """Return the run of a script, whose layout has all fields of a Strategy.

    Raises InputError for a script that does not launch pretrain_gpt.py by torchrun with a number of GPUs, for arguments that
    only the shell knows, and for what solver.formats.megatron.arguments refuses.
    """
    path, words = source.path, script_words(source)
    program, at = _program(words, path)
    hybrid = program == HYBRID_PROGRAM
    ignored = [f"--{name}" for name in ARRANGEMENTS]
    repeated: list[str] = []
    given = one_command(words[at + 1 :])
    flags = arguments(given, path, ignored, repeated)
    _check_values(given, path)
    for name, value in flags.items():
        if str(value).lower() in ("true", "false") and value is not True and name not in ignored:
            raise InputError(
                f"{path}: {name} takes no value in Megatron-LM, but {value} stands behind it; leave it out, or both"
            )
    if hybrid == flags.keys().isdisjoint(_PATTERNS):
        need = f"{HYBRID_PROGRAM} and {' or '.join(_PATTERNS)} belong together"
        raise InputError(f"{path}: {need}; {program} runs {'without it' if hybrid else 'with it'}")
    if source.vocab_size:
        flags.setdefault("--vocab-size", source.vocab_size)
    launch, (settings, left_out) = ranks_of_launch(words[:at], source, environment(source, at)), of_environment(source, at)
    assumed: tuple[str, ...] = ()
    told: list[str] = []
    world = launch.world_size
    if launch.nodes == 1 and world < least_ranks(flags):  # whose nodes are still to be filled in
        told.append(f"it launches {world} GPUs, fewer than its parallel sizes need")
        world, assumed = source.world or world, () if source.world else ("world_size",)
    elif source.world not in (0, world):
        told.append(f"it launches {world} GPUs; its arguments are taken for {source.world}")
        world = source.world
    run = run_of_arguments(flags, world, path, assumed, environment=environment(source, at))
    if not {"--vocab-size", "--tokenizer-type"} & flags.keys():
        vocab = f"{run.model.vocab_size:,} (GPT-2's)"
        told.append(f"vocabulary of {vocab}: neither --vocab-size nor --tokenizer-type is stated")
    if flags.get("--transformer-impl") == "local" and "--use-flash-attn" in flags:
        told.append("--use-flash-attn changes nothing with --transformer-impl local, whose attention is unfused")
    twice = [
        f"{name} stands more than once; argparse takes the last, {flags[name]}"
        for name in dict.fromkeys(repeated)
        if name not in ignored and flags[name] is not True
    ]
    notes = (*told, *run.notes, *twice, *script_notes(source, at, ignored), *left_out)
    return replace(run, layout={**run.layout, **settings}, notes=notes, gpus_per_node=launch.gpus_per_node)
