"""The command ``foretrain fit``: the largest micro batch and sequence that fit, the fewest GPUs, and what breaks next."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from profiler.units import GIB
from solver.api import configured_strategy
from solver.largest import Limit, Tried, fewest_gpus, largest_micro_batch, longest_sequence
from solver.options.arguments import add_json_argument, add_machine_arguments, add_world_size_argument
from solver.options.batch import batch_or_default
from solver.options.inputs import load_inputs
from solver.report.describe import describe, describe_strategy
from solver.report.output import layout_dict, write_json
from solver.report.words import token_rate
from solver.spec.strategy import AXES


def add_fit_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the question what fits."""
    add_machine_arguments(p)
    add_world_size_argument(p)
    add_json_argument(p)


def fit(args: argparse.Namespace, console: Console) -> None:
    """Print what fits with the config's layout, with certainty and at the point estimate, and write it to ``--json``."""
    inputs = load_inputs(args)
    problem, config = inputs.problem, inputs.config
    sequences, rounded = batch_or_default(args, problem, config)
    layout = configured_strategy(problem, config, sequences)
    with Console(stderr=True).status("estimating the memory"):
        gpus = fewest_gpus(problem, config, layout.global_batch_sequences)
        limits = (largest_micro_batch(problem, layout), longest_sequence(problem, layout), gpus)
    run, device = problem.run, problem.cost.device.name
    notes = inputs.notes(rounded, stated=set(AXES) & config.layout.keys())
    console.print(
        f"{problem.model.name}, {run.precision}, {run.framework}, {run.world_size} x {device}, {describe_strategy(layout)}, "
        f"{problem.cluster.memory_bytes / GIB:.1f} GiB per GPU; {inputs.profile_text}\n{notes}",
        markup=False,
    )
    for limit in limits:
        console.print(_text(limit, layout.global_batch_sequences), markup=False)
    if not any(limit.surely or limit.likely for limit in limits):
        console.print("\nnothing of this layout fits: foretrain search finds layouts of the model that do", markup=False)
    if args.json:
        write_json(args.json, {"limits": [_row(limit) for limit in limits]})
        console.print(f"wrote {args.json}", markup=False)


def _text(limit: Limit, sequences: int) -> str:
    """Return the largest value that fits surely, the one that may, and what breaks next. sequences: of the layout's batch."""
    best = limit.surely or limit.likely
    broken = [f" {_broken(limit.breaks, sequences)}"] if limit.breaks else []
    if best is None:
        return "".join(
            [f"\n{limit.what}: ", "none that was tried fits;" if broken else f"none can be run: {limit.refused}", *broken]
        )
    lines = [
        f"\n{limit.what}: {best.value:,} {'fits' if limit.surely else 'is at risk'}{_batch(best, sequences)}: {best.text()}"
    ]
    lines += [f"  {describe(best.solutions, 0)}, {token_rate(best.solutions.tgs[0])} tokens/GPU/s"]
    if limit.likely and limit.surely and limit.likely.value != limit.surely.value:
        lines.append(f"  {limit.likely.value:,} is at risk{_batch(limit.likely, sequences)}: {limit.likely.text()}")
    notes = [f"  {limit.note}"] if limit.note else []
    return "\n".join([*lines, *([f" {text}" for text in broken] or [f"  {limit.ends}"]), *notes])


def _broken(breaks: Tried, sequences: int) -> str:
    name, size = breaks.largest_part()
    return f"{breaks.value:,} does not fit{_batch(breaks, sequences)}: {breaks.text()}, of which {name} {size / GIB:.1f}"


def _batch(tried: Tried, sequences: int) -> str:
    """Return the batch of what was tried, where it is not the layout's."""
    found = round(float(tried.solutions.tokens[0]) / tried.solutions.problem.run.seq_len)
    return "" if found == sequences else f" (in a batch of {found:,} sequences instead of {sequences:,})"


def _row(limit: Limit) -> dict[str, Any]:
    def one(tried: Tried | None) -> dict[str, Any] | None:
        if tried is None:
            return None
        memory = tried.solutions.memory
        return {
            "value": tried.value,
            "verdict": tried.verdict,
            "peak_memory_bytes": float(memory.device[0]),
            "memory_bound_bytes": float(memory.bound[0]),
            "largest_part": tried.largest_part()[0],
            "tgs": float(tried.solutions.tgs[0]),
            "layout": layout_dict(tried.solutions, 0),
        }

    return {"of": limit.what, "surely": one(limit.surely), "likely": one(limit.likely), "breaks": one(limit.breaks)}
