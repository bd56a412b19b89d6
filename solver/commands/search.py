"""Every layout of a problem: the search that ``--run_all_solu`` and ``foretrain search`` run."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rich.console import Console

from profiler.errors import InputError
from profiler.units import GIB
from solver.api import configured_strategy, estimate, time_attention
from solver.formats.config_file import RunConfig
from solver.options.axes import check_constants, parse_constant_axes, parse_constants, parse_fixed, parse_varied
from solver.options.batch import searched_batch
from solver.options.inputs import Inputs
from solver.options.terminal_run import progress_bar
from solver.options.writing import why_not_expressed, write_layout
from solver.report.decision import decision_of_search
from solver.report.describe import describe
from solver.report.html import write_report
from solver.report.output import (
    balanced_dict,
    search_dict,
    variants_list,
    write_csv,
    write_json,
)
from solver.report.pictures import pareto_figure, save_figure, scaling_figure, stages_figure
from solver.report.terminal import LEAST_CHANGE, balance_text, show_search
from solver.search.balance import Balanced, balanced
from solver.search.best_layout import Variant, to_launch
from solver.search.divisions import Division
from solver.search.fixed import LIMITED, fixed_but
from solver.search.hints import faster_settings
from solver.search.laid_out import search_with_strings
from solver.search.search import SearchResult, search
from solver.search.variants import search_variants
from solver.spec.strategy import Strategy
from solver.step.memory import OUT_OF_MEMORY
from solver.step.problem import Problem
from solver.step.solutions import Solutions

#: Seconds that a search may have taken to be run once more with another setting, and the time that is worth a line.
_QUICK, _WORTH = 4.0, 0.02


def search_all(args: argparse.Namespace, inputs: Inputs, console: Console) -> None:
    """Search every layout; print the report and write the files that were requested."""
    whole = inputs
    inputs = inputs.for_search(parse_varied(args.search) if args.search is not None else None)
    problem, config = inputs.problem, inputs.config
    sequences, rounded = searched_batch(args, problem, config)
    fixed = parse_fixed(args.fix or "")
    check_constants(parse_constants(args.set or ""), fixed)
    max_sizes = {name: size for name in LIMITED if (size := getattr(args, f"max_{name}")) is not None}
    if args.search is not None:
        left = {"schedule", *Division._fields} if inputs is not whole else set()  # what a layout string of its own replaced
        own = _written(whole.problem, config, fixed)
        left |= {"zero_shard_size"} if own.zero_shard_size == own.replicas else set()  # which follow from the other sizes
        stated = [name for name in config.layout if name not in left]
        fixed = fixed_but(parse_varied(args.search), fixed, own, stated)
    problem, timed = time_attention(problem, inputs.profile, sequences, timing=not args.no_timing, folder=inputs.times)
    others: list[Variant] = []
    with progress_bar("estimating layouts") as report:
        if args.also:
            axes = parse_constant_axes(args.also)
            others, result = search_variants(
                problem, sequences, axes, args.top, report, fixed=fixed, max_sizes=max_sizes, jobs=args.jobs
            )
        else:
            others, result = search_with_strings(
                problem, sequences, args.top, fixed=fixed, jobs=args.jobs, progress=report, max_sizes=max_sizes
            )
    chosen = balanced(result.best, 0) if args.balance else None
    answer = chosen.solutions if chosen else to_launch(result)
    unstated = why_not_expressed(args, answer)
    launched = "" if chosen else _launched_line(args, result, answer)
    others_said = (_own_layout(whole, result, sequences), _with_overlap(result, sequences))
    hints = (_balance_line(result, chosen), *others_said) if chosen else (*others_said, _with_balance(result))
    remarks = [line for line in (unstated, launched, *hints) if line] + ([] if args.also else _with_settings(result))
    show_search(console, result, inputs.profile_text, inputs.notes(timed, rounded, problem=result.problem), others, remarks)
    if chosen:
        console.print(balance_text(chosen))
    found = inputs.plain | {"remarks": remarks} | ({"also": variants_list(others)} if others else {}) | balanced_dict(chosen)
    found |= {"not_expressed": unstated} if unstated else {}
    _write_search(args, result, answer, inputs.profile_text, found, console)
    write_layout(args, answer, inputs.config, console)


def _launched_line(args: argparse.Namespace, result: SearchResult, answer: Solutions) -> str:
    """Say which files are of another layout than the first of the search, because that one may not fit."""
    options = [f"--{name}" for name in ("export", "trace", "memory_trace") if getattr(args, name)]
    if not options or answer is result.best:
        return ""
    return f"{', '.join(options)}: of the layout that is sure to fit and takes as long as the first, {_described(answer, 0)}"


def _own_layout(inputs: Inputs, result: SearchResult, sequences: int) -> str:
    """Say that the config's own layout, with the same batch, is faster than what the search found, where it is."""
    if not {"tp", "pp", "cp", "ep"} & inputs.config.layout.keys():
        return ""
    try:
        own = configured_strategy(inputs.problem, inputs.config, sequences)
        found = estimate(inputs.problem, [own])
    except InputError:  # another batch, or not on these GPUs
        return ""
    change = float(found.times.seconds[0] / result.best.times.seconds[0]) - 1
    if change > -_WORTH or found.verdict(0) == OUT_OF_MEMORY:
        return ""
    return f"The config's own layout is faster (its step is {-change:.1%} shorter): {_described(found, 0)}"


def _with_overlap(result: SearchResult, sequences: int) -> str:
    """Say what overlapping tensor parallelism would bring, where the framework can, a run does not say, and it is much."""
    problem = result.problem
    offered = problem.framework.can_run.tp_comm_overlap and not problem.run.tp_comm_overlap and not problem.chunks
    if not offered or result.seconds > _QUICK or result.fixed.get("tp") == 1 or result.max_sizes.get("tp") == 1:
        return ""
    overlapped = problem.with_run(tp_comm_overlap=True)
    try:
        best = search(overlapped, sequences, 1, fixed=result.fixed, max_sizes=result.max_sizes).best
    except InputError:
        return ""
    change = float(best.times.seconds[0] / result.best.times.seconds[0]) - 1
    if change > -_WORTH:
        return ""
    return f"With --set tp_comm_overlap=true the step is {-change:.1%} shorter: {_described(best, 0)}"


def _with_settings(result: SearchResult) -> list[str]:
    """Say what other settings would bring to the layouts that the search kept, where it is much."""
    return [
        f"With --set {hint.setting} the step is at least {-hint.change:.1%} shorter: {_described(hint.solutions, hint.index)}"
        for hint in faster_settings(result, _WORTH)
    ]


def _described(solutions: Solutions, index: int) -> str:
    """Return a layout in words, with its memory and whether that fits."""
    return f"{describe(solutions, index)}; {solutions.memory.device[index] / GIB:.1f} GiB, {solutions.verdict(index)}"


def _with_balance(result: SearchResult) -> str:
    """Say what assigning layers to the stages by their times would bring, where the framework can and it is much."""
    try:
        found = balanced(result.best, 0).solutions
    except InputError:  # one stage, or none that the framework would assign so
        return ""
    change = float(found.times.seconds[0] / result.best.times.seconds[0]) - 1
    if change > -_WORTH:
        return ""
    return f"With --balance the step is {-change:.1%} shorter: {describe(found, 0)}, {found.verdict(0)}"


def _balance_line(result: SearchResult, chosen: Balanced) -> str:
    """Say first what the layers that were assigned change, because all else in the report is of the layout without."""
    change = float(chosen.solutions.times.seconds[0] / result.best.times.seconds[0]) - 1
    if change > -LEAST_CHANGE:
        return ""
    found = _described(chosen.solutions, 0)
    return f"With layers assigned to stages (--balance, below; --export writes it) the step is {-change:.1%} shorter: {found}"


def _written(problem: Problem, config: RunConfig, fixed: Mapping[str, Any]) -> Strategy:
    """Return the config's layout, or with what is fixed otherwise where the constants of the run need that."""
    try:
        return configured_strategy(problem, config)
    except InputError:
        kept = {name: value for name, value in config.layout.items() if name != "dp" or not fixed.keys() & {"tp", "cp", "pp"}}
        return configured_strategy(problem, replace(config, layout=kept | dict(fixed)))


def _write_search(
    args: argparse.Namespace,
    result: SearchResult,
    answer: Solutions,
    profile_text: str,
    found: dict[str, Any],
    console: Console,
) -> None:
    with Console(stderr=True).status("writing the results"):
        if args.json:
            write_json(args.json, search_dict(result, profile_text) | found)
        if args.csv:
            write_csv(args.csv, result.best)
    if args.report:
        decision, command = decision_of_search(result), shlex.join(sys.argv)
        write_report(args.report, decision, profile_text, str(found["network"]), command, result, answer, found["remarks"])
    if args.plot:
        save_figure(pareto_figure(result), args.plot)
    if args.plot_stages:
        save_figure(stages_figure(result.best), args.plot_stages)
    if args.plot_scaling:
        save_figure(scaling_figure(_scaling(result)), args.plot_scaling)
    for path in filter(None, (args.json, args.csv, args.plot, args.plot_stages, args.plot_scaling, args.report)):
        console.print(f"wrote {path}", markup=False)


def _scaling(result: SearchResult) -> list[SearchResult]:
    """Return the searches with an eighth to eight times as many GPUs, and ``result``; those where nothing fits are left out."""
    run = result.problem.run
    sequences = int(result.best.tokens[0]) // run.seq_len
    found = []
    for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8):
        world = int(run.world_size * factor)
        if world == run.world_size:
            found.append(result)
        elif world >= 1:
            with suppress(InputError):
                found.append(
                    search(result.problem.for_world(world), sequences, 1, fixed=result.fixed, max_sizes=result.max_sizes)
                )
    return found
