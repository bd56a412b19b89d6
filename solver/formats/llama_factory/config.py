"""LLaMA-Factory's YAML: the arguments of its program around transformers' trainer, which torchrun starts on all GPUs of a node.

Sources: hiyouga/LLaMA-Factory examples/train_full/llama3_full_sft.yaml (commit 03da9a7); llamafactory/launcher.py of the wheel
0.9.5.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from solver.formats.accelerate.trainer import read_trainer
from solver.formats.deepspeed.config import read_deepspeed, settings_of_script
from solver.formats.file_run import FileRun, Source
from solver.formats.syntax.literal_python import Section

GPUS = 8  #: of a node, where nobody states them
_PROGRAM = "llamafactory/launcher.py"
_MARKS = ("stage", "finetuning_type")


def is_llama_factory(sections: Section) -> bool:
    return "model_name_or_path" in sections and any(mark in sections for mark in _MARKS)


def read_llama_factory(sections: Section, source: Source) -> FileRun:
    """Return the run of a file, as its program would be given the same as arguments.

    Raises InputError for what the trainer's reader refuses (adapters, other objectives), without a config.json beside it, and
    without the settings of DeepSpeed that it names, which may lie beside it under their own name.
    """
    given = {key: value for key, value in sections.items() if value is not None}
    words = [word for key, value in given.items() for word in (f"--{key}", _written(value))]
    launch = f"torchrun --nnodes 1 --nproc_per_node {source.world or GPUS} {_PROGRAM}"
    script = replace(source, text=f"{launch} {shlex.join(words)}\n", beside=_beside(source))
    run = read_deepspeed(settings_of_script(script)) if "deepspeed" in given else read_trainer(script)
    run = replace(run, model=run.model.replace(name=source.path.stem))
    return run if source.world else replace(run, assumed=(*run.assumed, "world_size"))


def _written(value: Any) -> str:
    """Return a value as an argument."""
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _beside(source: Source) -> Callable[[str], str | None]:
    """Return what reads a file that settings name from the repository's folder: there, or beside them."""

    def beside(relative: str) -> str | None:
        found = source.beside(relative)
        return source.beside(Path(relative).name) if found is None else found

    return beside
