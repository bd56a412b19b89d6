"""Which framework a shell script launches, by the words in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from profiler.errors import InputError, printable
from solver.formats.accelerate.config import settings_of_script
from solver.formats.accelerate.trainer import read_trainer
from solver.formats.deepspeed.config import read_deepspeed
from solver.formats.deepspeed.config import settings_of_script as deepspeed_settings
from solver.formats.file_run import FileRun, Source
from solver.formats.launch.trainer_script import trainer_at
from solver.formats.launch.words import program_at, script_words, settings_after
from solver.formats.megatron.script import HYBRID_PROGRAM, PROGRAM, read_script
from solver.formats.yaml_files import read_yaml_file

#: Argument of a program whose settings are read and whose launch is not -> (its framework, the program if that tells it).
_SETTINGS = {
    "--job.config_file": ("torchtitan", ""),
    "--job.config-file": ("torchtitan", ""),
    "--config-file": ("nanotron", "run_train.py"),
    "--config": ("InternEvo", "train.py"),
}


def _named_settings(words: Sequence[str]) -> str:
    """Return a sentence on the settings of a program whose script is not read, or "" where none is named."""
    for argument, (framework, program) in _SETTINGS.items():
        starts = not program or program_at(words, program) is not None
        named = next((value for word, value in pairwise(words) if word == argument), "")
        if starts and named and not named.startswith("-"):
            file = printable(named)
            return f"it starts {framework} with {file}: give that file to --config, with --world_size where it states no ranks"
    return ""


def read_script_file(source: Source) -> FileRun:
    """Return the run that a script launches. Raises InputError for a script of no framework that is known here."""
    words = script_words(source)
    if program_at(words, "accelerate") is not None:
        return read_yaml_file(settings_of_script(source))
    if program_at(words, "primus-cli") is not None:
        return read_yaml_file(settings_after(source, "--config", "an experiment, --config NAME.yaml"))
    if any(word.startswith("--deepspeed") for word in words):
        return read_deepspeed(deepspeed_settings(source))
    if program_at(words, PROGRAM) is None and program_at(words, HYBRID_PROGRAM) is None and trainer_at(words) is not None:
        return read_trainer(source)
    none = program_at(words, PROGRAM) is None and program_at(words, HYBRID_PROGRAM) is None
    if none and (named := _named_settings(words)):
        raise InputError(f"{source.path}: {named}")
    return read_script(source)
