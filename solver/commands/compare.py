"""The command ``foretrain compare``: layouts, devices, clusters or configs side by side, part by part."""

from __future__ import annotations

import argparse
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from profiler.errors import InputError, closest, printable
from solver.api import configured_strategy, estimate, time_attention, without_filling
from solver.options.arguments import add_json_argument, add_machine_arguments, add_world_size_argument
from solver.options.axes import parse_constants, parse_pairs
from solver.options.batch import batch_or_default
from solver.options.inputs import Inputs, load_inputs, named_config
from solver.report.compare import Side, comparison_dict, comparison_table, verdicts
from solver.report.output import write_json
from solver.search.fixed import check_fixed
from solver.spec.bounds import whole_number
from solver.spec.strategy import AXES, Strategy

#: What a side may name apart from axes of a layout and constants of a run: word -> option.
_OPTIONS = {
    "config": "config",
    "model_size": "model_size",
    "profile": "profile",
    "as": "as_device",
    "cluster": "cluster",
    "framework": "framework",
    "seq_len": "seq_len",
    "world_size": "world_size",
    "global_batch_size": "global_batch_size",
}
#: What a side names replaces these options; a profile is taken as it was measured, unless the side says ``as`` too.
_REPLACES = {
    "config": ("model_size",),
    "model_size": ("config", "env", "vocab_size"),
    "profile": ("pre_profiling_data_path", "as_device"),
}
_NUMBERS = ("seq_len", "world_size", "global_batch_size")
_OF_RECOMPUTE = ("recompute", "recompute_layers", "recompute_modules", "recompute_stage_layers")
_AS_STATED = "."
_MOST = 6  #: columns that a terminal holds


def add_compare_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of a comparison."""
    p.add_argument(
        "sides",
        nargs="+",
        metavar="SIDE",
        help=f"2 to {_MOST} sides, each stating how it differs from the options: a config file, or NAME=VALUE,... of "
        f"{', '.join(_OPTIONS)}, an axis of a layout or a constant of a run; {_AS_STATED} means no difference",
    )
    add_machine_arguments(p)
    add_world_size_argument(p)
    add_json_argument(p)


def compare(args: argparse.Namespace, console: Console) -> None:
    """Print the sides of a comparison part by part, which is faster and how sure that is; write them to ``--json``."""
    if not 2 <= len(args.sides) <= _MOST:
        raise InputError(
            f"{len(args.sides)} side(s): compare 2 to {_MOST}, as in foretrain compare --config A.py . tp=4, where . is the "
            "config's own layout"
        )
    twice = next((side for side in args.sides if args.sides.count(side) > 1), None)
    if twice is not None:
        raise InputError(f"{printable(twice)} is given twice; a side that is compared with itself says nothing")
    with Console(stderr=True).status("estimating the sides"):
        sides = [_named_side(args, text) for text in args.sides]
    for number, (side, inputs, _) in enumerate(sides, 1):
        console.print(f"{number}: {side.name}: {side.headline()}; {inputs.profile_text}", markup=False)
    noted = (inputs.notes(rounded, stated=set(AXES) & inputs.config.layout.keys()) for _, inputs, rounded in sides)
    for note in dict.fromkeys(note for notes in noted for note in notes.split("\n") if note):
        console.print(note, markup=False)
    found = [side for side, *_ in sides]
    console.print(comparison_table(found))
    for line in verdicts(found):
        console.print(line, style="bold", markup=False)
    if args.json:
        write_json(args.json, comparison_dict(found, [inputs.profile_text for _, inputs, _ in sides]))
        console.print(f"wrote {args.json}", markup=False)


def _named_side(args: argparse.Namespace, text: str) -> tuple[Side, Inputs, str]:
    """Return one side as ``_side`` does; an error names it."""
    try:
        return _side(args, text)
    except InputError as error:
        raise InputError(f"side {printable(text)}: {error}") from None


def _side(args: argparse.Namespace, text: str) -> tuple[Side, Inputs, str]:
    """Return one side (the options of the command, with what ``text`` says otherwise), its inputs, a note on its batch."""
    options, axes = _otherwise(args, text)
    config = named_config(options, args.world_size or options.world_size or 0)
    written = copy(options)  # on the GPUs of the command where it names some: there the config's own batch is read
    written.set = args.set  # what the side sets may need what else it names
    written.world_size = args.world_size or config.layout.get("world_size") or options.world_size
    options.world_size = options.world_size or config.layout.get("world_size")
    read = load_inputs(written, config)
    config, own = read.config, configured_strategy(read.problem, read.config)
    kept = without_filling(config, own)
    if {"pp", "vpp"} & axes.keys():  # a schedule of other stages
        kept.pop("schedule", None)
    if own.tp == 1 and axes.get("tp", 1) > 1:  # the config's mode was none; what is usual under the framework, then
        kept["tp_mode"] = "msp" if read.problem.framework.tensor_parallel.splits_sequence else "mtp"
    if axes.get("recompute", own.recompute) != own.recompute:  # what is recomputed goes with the level
        kept = {name: value for name, value in kept.items() if name not in _OF_RECOMPUTE}
    inputs = load_inputs(options, replace(config, layout=kept | axes))
    if "num_micro_batches" in axes:
        sequences, rounded = None, ""
    elif options.global_batch_size is None and "num_micro_batches" in config.layout:
        sequences, rounded = own.global_batch_sequences, ""
        if inputs.problem.run.world_size != own.world_size:
            steps = own.num_micro_batches
            rounded = (
                f"every side has the batch of {own.world_size} GPUs; num_micro_batches={steps} keeps the config's steps instead"
            )
    else:
        sequences, rounded = batch_or_default(options, inputs.problem, inputs.config)
    strategies = [configured_strategy(inputs.problem, inputs.config, sequences)]
    problem, _ = time_attention(inputs.problem, inputs.profile, strategies, folder=inputs.times)
    source = inputs.profile.derivation
    return Side(text, estimate(problem, strategies), source.kernels.name if source else inputs.profile.name), inputs, rounded


def _otherwise(args: argparse.Namespace, text: str) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Return the options of a side, and the axes of a layout that it names."""
    options = copy(args)
    if text == _AS_STATED:
        return options, {}
    stated = parse_pairs("a side's", text, "name once, as in tp=4,pp=2") if "=" in text else {"config": text}
    axes = {name: stated.pop(name) for name in [*stated] if name in AXES}
    check_fixed(axes)
    if {"num_micro_batches", "global_batch_size"} <= axes.keys() | stated.keys():
        raise InputError("num_micro_batches and global_batch_size both state the batch; give one")
    if {"config", "model_size"} <= stated.keys():
        raise InputError("config and model_size both state the model; give one")
    for option in (name for word in stated for name in _REPLACES.get(word, ())):
        setattr(options, option, None)
    for word in [word for word in stated if word in _OPTIONS]:
        value = stated.pop(word)
        if value == "":
            raise InputError(f"{word} is empty; leave it out for what the options say")
        if word in _NUMBERS:
            whole_number(word, value)
        setattr(options, _OPTIONS[word], Path(str(value)) if word == "config" else value if word in _NUMBERS else str(value))
    unknown = next((name for name in stated if name not in Strategy.__dataclass_fields__), None)
    if unknown is not None:
        words, meant = ", ".join((*_OPTIONS, *AXES)), closest(unknown.lower(), (*_OPTIONS, *Strategy.__dataclass_fields__))
        raise InputError(f"{printable(unknown)}{meant} is none of {words}, nor a constant of a run (docs/settings.md)")
    constants = (parse_constants(args.set) if args.set else {}) | stated
    options.set = ",".join(f"{name}={value}" for name, value in constants.items())
    return options, axes
