"""What a configuration file of a framework is read from, and what reading it returns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from profiler.errors import InputError, printable
from solver.spec.model import ModelSpec

#: Folder beside a file of settings that holds its model's config.json, after the file's name without its ending.
MODEL_FOLDER = "_model"


@dataclass(frozen=True)
class Source:
    """A file with its text. beside: the text of another file, by its path from the same folder, or None where there is none.
    world: GPUs on which it is run, where it does not say so itself; 0: not stated either. vocab_size: tokens of its tokenizer,
    where it only names that; 0: not stated. variables: of the environment in which a script runs, name -> value. script: that
    names the file, if a script does."""

    path: Path
    text: str
    beside: Callable[[str], str | None]
    world: int = 0
    vocab_size: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    script: Path | None = None

    def check_variables(self) -> None:
        """Raise InputError for a variable that changes nothing: neither the file nor the script beside it reads it, or each
        sets it before it does (in a line that begins with that, so that no condition is around it)."""
        script = script_beside(self)
        texts = [self.text, script.text if script else ""]
        for name in self.variables:
            reads = [found.start() if (found := re.search(rf"\$\{{?{name}\b", text)) else None for text in texts]
            if reads == [None, None]:
                raise InputError(f"--env {name}: {self.path} reads no variable of that name")
            own = re.compile(rf"^(?:export )?{name}=(?!.*\$\{{?{name}\b).*$", re.M)
            sets = [own.search(text) for text in texts]
            if all(read is None or (found and found.start() < read) for read, found in zip(reads, sets, strict=True)):
                line = next(found.group() for found in sets if found)
                raise InputError(
                    f"--env {name} changes nothing: {self.path} itself sets it, in {printable(line)}; change it there"
                )


def script_beside(source: Source) -> Source | None:
    """Return the launch script of the same name (NAME.sh beside NAME.json or NAME.yaml), or None where there is none."""
    path = source.path.with_suffix(".sh")
    text = source.beside(path.name)
    return None if text is None else replace(source, path=source.script or path, text=text)


@dataclass(frozen=True)
class FileRun:
    """A run as a framework's file describes it.

    layout: Strategy fields; zero_shard_size -1 means every rank that holds the same parameters. assumed: fields of ``layout``
    that the file leaves to its framework's defaults. ignored: keys of the file that the framework knows and the prediction does
    not use. notes: what was taken for what the file leaves open. refusals: rules of the framework's own that the file breaks,
    so that it would not start (rules.py of its framework). gpus_per_node: ranks that are launched on each of several nodes;
    0: not stated.
    """

    model: ModelSpec
    layout: Mapping[str, Any]
    assumed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    gpus_per_node: int = 0


def model_path(name: str) -> str:
    """Return where the model of the file called ``name`` (without its ending) is, from the file's own folder."""
    return f"{name}{MODEL_FOLDER}/config.json"
