"""The arguments that Megatron-LM prints at the start of its log, as a model and a layout.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py (_print_args: every argument by its Python name, sorted, dots up to
its value), as read in autumn 2025. Every argument is printed, most of them defaults; those that arguments.py beside it
does not know are left aside, for a log cannot leave them out as a script can.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from solver.formats.config_file import RunConfig
from solver.formats.megatron.flags import FREQUENCIES, KNOWN, UNMODELLED
from solver.formats.megatron.given import with_what_they_need
from solver.formats.megatron.python_names import FLAGS, INVERTED
from solver.formats.megatron.run import run_of_arguments

_BLOCK = re.compile(r"-+ arguments -+\n(.*?)-+ end of arguments -+", re.DOTALL)
_START = re.compile(r"^.*-{3,} arguments -{3,}$", re.MULTILINE)
_LINE = re.compile(r"^[^\S\n]*(?:\[?[^\s\[\]]*\]?:\s+)?([a-z][a-z0-9_]*) \.{2,} ?(.*)$", re.MULTILINE)
_NAMES = {**FLAGS, "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank"}
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


def has_arguments(text: str) -> bool:
    """Whether a log begins with Megatron's arguments."""
    return _BLOCK.search(text) is not None


def jobs_in(text: str) -> list[str]:
    """Return what a log holds of each job that printed its arguments into it; the whole where at most one did."""
    starts = [found.start() for found in _START.finditer(text)]
    ends = [*starts[1:], len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)] if len(starts) > 1 else [text]


def config_in_log(text: str, path: Path) -> RunConfig:
    """Return the model and the layout that a log's arguments state. Raises InputError for what is not modelled, by name."""
    jobs = jobs_in(text)
    block = _BLOCK.search(jobs[-1])
    printed = dict(_LINE.findall(block[1])) if block else {}
    if "world_size" not in printed:
        raise InputError(f"{path}: it holds no arguments as Megatron-LM prints them, with world_size among them")
    flags = _flags({name: _value(value.strip()) for name, value in printed.items()})
    world = _value(printed["world_size"])
    run = run_of_arguments(flags, world, path)
    several = (f"the log holds {len(jobs)} jobs one after the other: the last one is read",) if len(jobs) > 1 else ()
    return RunConfig(path.stem, run.model, run.layout, run.layout["seq_len"], path, notes=(*several, *run.notes))


def _flags(printed: Mapping[str, Any]) -> dict[str, Any]:
    """Return flag -> value of what is given and known, in the words that the reader of arguments takes."""
    given = {_NAMES.get(name, name.replace("_", "-")): value for name, value in printed.items() if name not in INVERTED}
    given |= {flag: True for name, flag in INVERTED.items() if printed.get(name) is False}
    set_ = {flag: value for flag, value in given.items() if not (value is None or value is False or value in ("none", []))}
    if "num-virtual-stages-per-pipeline-rank" in set_:  # the same, computed from it
        set_.pop("num-layers-per-virtual-pipeline-stage", None)
    said = with_what_they_need(set_).items()
    return {f"--{flag}": _word(flag, value) for flag, value in said if flag in KNOWN or flag in UNMODELLED}


def _value(text: str) -> Any:
    """Return a printed Python value; words and what is no literal stay text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _word(flag: str, value: Any) -> Any:
    if flag in FREQUENCIES and isinstance(value, list):
        return value
    if flag == "cp-comm-type" and isinstance(value, list):
        return value[0]
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, str) and "." in value:  # an enumeration's member, or torch's type
        last = value.rsplit(".", 1)[1]
        return _DTYPES.get(last, last)
    return value
