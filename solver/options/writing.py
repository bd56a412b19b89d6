"""The files of a layout: its launch script, and one step of it as a trace or a picture."""

from __future__ import annotations

import argparse
import pickle

from rich.console import Console

from profiler.errors import printable
from profiler.files import replacing
from profiler.units import GIB
from solver.formats.config_file import RunConfig
from solver.formats.export import not_expressed, not_held, write_export
from solver.options.notes import listed_keys
from solver.report.memory_timeline import memory_through_step, peak_words, snapshot
from solver.report.output import (
    write_json,
)
from solver.report.picture_timeline import timeline_figure
from solver.report.pictures import memory_figure, save_figure
from solver.report.timeline import chrome_trace, step_timeline
from solver.step.memory import FITS
from solver.step.solutions import Solutions


def why_not_expressed(args: argparse.Namespace, solutions: Solutions) -> str:
    """Return why no file of its framework states the first layout, or "": also where one is asked for, which then says so."""
    problem = solutions.problem
    if args.export:
        return ""
    return not_expressed(problem.model, solutions.layouts.strategy(0, problem.run), problem.cluster.gpus_per_node)


_SHOWN = 12  #: settings of a config that a file does not carry over are named, up to so many


def _not_carried(config: RunConfig) -> str:
    """Return which settings of a run's own file an exported one lacks because they enter no prediction, or ""."""
    if not config.layout or not config.ignored:
        return ""
    named = listed_keys(config.ignored, _SHOWN)
    return f"not carried over from {printable(config.source.name)}, which trains otherwise without them: {named}"


def write_layout(args: argparse.Namespace, solutions: Solutions, config: RunConfig, console: Console) -> None:
    """Write the first layout as a launch script, and one step of it as a trace or a picture, where that is asked for.

    config: what the layout was asked for with.
    """
    problem = solutions.problem
    if args.export:
        run = solutions.layouts.strategy(0, problem.run)
        for path in write_export(args.export, problem.model, run, problem.cluster.gpus_per_node, args.config):
            console.print(f"wrote {path}", markup=False)
        if (verdict := solutions.verdict(0)) != FITS:
            memory = f"{solutions.memory.device[0] / GIB:.1f} GiB, at most {solutions.memory.bound[0] / GIB:.1f}"
            console.print(f"{args.export}: {verdict}, {memory} of {problem.cluster.memory_bytes / GIB:.1f}", markup=False)
        if note := not_held(args.export, problem.model, run):
            console.print(note, markup=False)
        if lost := _not_carried(config):
            console.print(lost, markup=False)
    if args.memory_trace:
        passes, stages = memory_through_step(solutions)
        if args.memory_trace.suffix.lower() == ".pickle":
            with replacing(args.memory_trace) as file:
                pickle.dump(snapshot(passes, stages), file)
        else:
            save_figure(memory_figure(passes, stages, problem.cluster.memory_bytes), args.memory_trace)
        console.print(f"{peak_words(stages)}\nwrote {args.memory_trace}", markup=False)
    if args.trace:
        step = step_timeline(solutions, 0)
        if args.trace.suffix.lower() == ".json":
            write_json(args.trace, chrome_trace(step))
        else:
            save_figure(timeline_figure(step), args.trace)
        console.print(f"wrote {args.trace}", markup=False)
