"""What a script gives ``accelerate launch`` beside the settings that it names.

That the command line comes before the file is how accelerate is known to do it; its launch.py was not read for it.
"""

from __future__ import annotations

from collections.abc import Callable

from profiler.errors import InputError, shown
from solver.formats.file_run import Source, script_beside
from solver.formats.launch.trainer_script import trainer_at
from solver.formats.launch.words import arguments, script_words
from solver.formats.rule import flattened
from solver.formats.syntax.literal_python import Section

#: Arguments that say where it runs, or how a process is started.
_PLACES = {
    "--config_file",
    "--machine_rank",
    "--main_process_ip",
    "--main_process_port",
    "--rdzv_backend",
    "--rdzv_conf",
    "--role",
    "--tee",
    "--log_dir",
    "--max_restarts",
    "--monitor_interval",
    "--same_network",
    "--multi_gpu",
    "--use_fsdp",
    "--use_deepspeed",
    "--quiet",
}
#: Those that are taken from the script; of others the settings must say the same.
_RANKS = ("num_processes", "num_machines")


def launched_sections(sections: Section, source: Source) -> tuple[Section, tuple[str, ...]]:
    """Return the settings with the ranks that the script of the same name launches, and a line on each that they state
    otherwise.

    Raises InputError where the script gives accelerate another value of anything else.
    """
    script = script_beside(source)
    words = script_words(script) if script else []
    start = next((i + 1 for i, word in enumerate(words) if word == "launch"), len(words))
    program = next((i for i in range(start, len(words)) if words[i].endswith(".py")), len(words))
    if script is None or program == len(words):
        return sections, ()
    end = trainer_at(words) or program
    given = arguments(words[start:end], script.path, _PLACES)
    changed, plain = Section(), flattened(sections)
    changed.update(sections)
    changed.lines.update(sections.lines)
    notes: list[str] = []
    for argument, value in given.items():
        name = argument.lstrip("-")
        own = next((plain[key] for key in plain if key.rpartition(".")[2] == name), None)
        if argument in _PLACES or str(value).lower() == str(own).lower():
            continue
        if name not in _RANKS:
            there = "nothing of it" if own is None else shown(own)
            raise InputError(
                f"{script.path}: {argument} is {shown(value)}, but {source.path.name} says {there}; write the same there"
            )
        changed[name] = value
        if own is not None:
            notes.append(f"{argument} {value} of the script is taken, as accelerate does, not {own} of {source.path.name}")
    return changed, tuple(notes)


def without_script(source: Source) -> Callable[[str], str | None]:
    """Return what reads a file beside the settings, but for the script of the same name."""
    own = source.path.with_suffix(".sh").name
    return lambda relative: None if relative == own else source.beside(relative)
