"""The command ``foretrain explain``: why a layout, what stands next to it, how sure that is, and what measurement tells."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from profiler.errors import InputError
from profiler.files import write_text
from profiler.units import GIB
from solver.api import configured_strategy
from solver.formats.config_file import RunConfig
from solver.options.arguments import add_json_argument, add_machine_arguments, add_world_size_argument, check_report
from solver.options.axes import parse_fixed
from solver.options.batch import batch_or_default, searched_batch
from solver.options.inputs import Inputs, load_inputs
from solver.options.terminal_run import progress_bar
from solver.report.breakdown import breakdown
from solver.report.decision import MEASUREMENTS, Decision, decision_of, decision_of_search, kept_out, standing
from solver.report.describe import describe
from solver.report.explain import Explanation
from solver.report.html import write_report
from solver.report.measuring_plan import MOST, measuring_plan
from solver.report.output import csv_text, layout_dict, problem_dict, solution_dict, write_json
from solver.report.terminal import heading, verdict_text
from solver.report.words import seconds
from solver.search.best_layout import to_launch
from solver.search.laid_out import search_with_strings
from solver.search.neighbours import Neighbourhood
from solver.search.search import SearchResult, search
from solver.step.problem import Problem

_OPS = 15  #: ops that are listed


def add_explain_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of an explanation."""
    add_machine_arguments(p)
    add_world_size_argument(p)
    p.add_argument("--own", action="store_true", help="explain the layout that the config states instead of the best one")
    p.add_argument("--fix", metavar="AXIS=VALUE,...", help="explain the best of the layouts with these")
    p.add_argument("--jobs", type=int, default=1, help="processes that share the search (default 1)")
    p.add_argument(
        "--measurements",
        type=Path,
        metavar="OUT.csv",
        help=f"the {MOST} shapes whose measurement would shrink the uncertainty most",
    )
    p.add_argument("--report", type=Path, metavar="OUT.html", help="write all of it as one page, with pictures")
    add_json_argument(p)


def explain_layout(args: argparse.Namespace, console: Console) -> None:
    """Print why a layout takes what it takes, its rivals, its neighbours and what would decide; write it to ``--json``."""
    check_report(args.report)
    if args.measurements and args.measurements.suffix.lower() != ".csv":
        raise InputError(f"--measurements {args.measurements}: the file must end in .csv")
    if args.own and args.fix:
        raise InputError("--fix chooses among the layouts of a search, --own takes the config's; leave one out")
    whole = load_inputs(args)
    inputs = whole.for_search()
    if args.own and inputs is not whole:
        raise InputError(
            f"{whole.config.source} says what each stage holds, which --own cannot vary: foretrain predict takes its layout, "
            "explain without --own a search's"
        )
    decision, rounded, result = _decision(args, inputs)
    rivals = decision.rivals
    console.print(heading(rivals, inputs.profile_text, inputs.notes(rounded)))
    console.print(verdict_text(rivals))
    console.print(breakdown(rivals, 0))
    for table in (_ops_table(decision.why[0]), _rivals_table(decision), _steps_table(decision.around)):
        console.print(table)
    console.print(standing(decision.around), style="bold", markup=False)
    for line in kept_out(decision.around):
        console.print(line, markup=False)
    console.print(_sensitivity_table(decision))
    console.print(_what_would_decide(decision), style="bold", markup=False)
    if args.measurements:
        planned = measuring_plan(decision.why[0])
        write_text(args.measurements, csv_text([one.to_dict() for one in planned]))
        told = f"{sum(one.share for one in planned):.0%} of the squared uncertainty of kernels and collectives"
        console.print(f"wrote {args.measurements}: {len(planned)} shapes, {told}", markup=False)
    if args.report:
        launched = None if args.own else to_launch(result)
        write_report(args.report, decision, inputs.profile_text, inputs.notes(rounded), shlex.join(sys.argv), result, launched)
        console.print(f"wrote {args.report}", markup=False)
    if args.json:
        write_json(args.json, _as_dict(decision, inputs))
        console.print(f"wrote {args.json}", markup=False)


def _decision(args: argparse.Namespace, inputs: Inputs) -> tuple[Decision, str, SearchResult]:
    problem, config = inputs.problem, inputs.config
    if not args.own:
        fixed = parse_fixed(args.fix or "")
        batch, rounded = searched_batch(args, problem, config)
        with progress_bar("estimating layouts") as report:
            _, result = search_with_strings(problem, batch, fixed=fixed, jobs=args.jobs, progress=report)
        notes = "\n".join(filter(None, (rounded, _not_own(problem, config, result))))
        return decision_of_search(result), notes, result
    sequences, rounded = batch_or_default(args, problem, config)
    own = configured_strategy(problem, config, sequences)
    with progress_bar("estimating layouts") as report:
        result = search(problem, own.global_batch_sequences, progress=report, jobs=args.jobs)
    others = [result.best_of_sizes.layouts.strategy(i, problem.run) for i in range(len(result.best_of_sizes))]
    return decision_of(problem, own, others), rounded, result


def _not_own(problem: Problem, config: RunConfig, result: SearchResult) -> str:
    """Say that the best layout of a search is explained, where the config states another."""
    if not {"tp", "pp", "cp", "ep", "zero", "micro_batch_size"} & config.layout.keys():
        return ""
    best = result.best.layouts.strategy(0, problem.run)
    with suppress(InputError):  # it may not run on these GPUs
        if configured_strategy(problem, config, best.global_batch_sequences) == best:
            return ""
    return "explained is the best layout of a search; --own explains the config's"


def _ops_table(why: Explanation) -> Table:
    """Return the ops that take longest, as they count in the step of the slowest stage."""
    table = Table(title="Longest ops, exposed on the slowest stage", title_justify="left")
    for name in ("time", "share", "uncertainty"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("op", "module", "basis"):
        table.add_column(name)
    lines = sorted(why.lines, key=lambda line: -line.seconds)[:_OPS]
    for line in lines:
        basis = line.basis.name.lower() if line.basis is not None else ""
        table.add_row(
            seconds(line.seconds),
            f"{line.seconds / why.seconds:.1%}",
            f"{line.relative_std:.0%}",
            line.name,
            line.module,
            basis,
        )
    return table


def _rivals_table(decision: Decision) -> Table:
    """Return the layout and the best ones of other sizes, with their chances of being the fastest."""
    rivals = decision.rivals
    table = Table(title="Best layouts of other sizes", title_justify="left")
    for name in ("step", "vs. the first", "GiB", "is fastest with"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout")
    times = rivals.times.seconds
    for index, chance in enumerate(decision.chances):
        table.add_row(
            seconds(float(times[index])),
            f"{times[index] / times[0] - 1:+.1%}",
            f"{rivals.memory.device[index] / GIB:.1f}",
            f"{chance:.0%}",
            describe(rivals, index),
        )
    return table


def _steps_table(around: Neighbourhood) -> Table:
    table = Table(title="One step along each axis, the others kept where they can be", title_justify="left")
    table.add_column("axis")
    for name in ("from", "to", "step time", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fits")
    for step in around.steps:
        memory = float(around.solutions.memory.device[step.index]) / GIB
        table.add_row(
            step.axis,
            step.before,
            step.after,
            f"{around.change(step):+.1%}",
            f"{memory:.1f}",
            around.solutions.verdict(step.index),
        )
    return table


def _sensitivity_table(decision: Decision) -> Table:
    table = Table(title="What the uncertainty of each kind of time decides", title_justify="left")
    table.add_column("kind of time")
    for name in ("time", "uncertainty", "step if one standard deviation slower"):
        table.add_column(name, justify="right")
    table.add_column("another layout wins if it is")
    for row in decision.rows:
        turn = ""
        if row.deviations is not None and row.rival is not None:
            word = "slower" if row.deviations > 0 else "faster"
            off = abs(row.deviations) * row.relative_std
            turn = f"{off:.0%} {word} ({abs(row.deviations):.1f} deviations): {describe(decision.rivals, row.rival)}"
        table.add_row(
            MEASUREMENTS[row.kind][0], seconds(row.seconds), f"{row.relative_std:.0%}", f"{row.step_change:+.1%}", turn
        )
    return table


def _what_would_decide(decision: Decision) -> str:
    rows = [row for row in decision.rows if row.deviations is not None and abs(row.deviations) <= 1]
    if rows:
        best = min(rows, key=lambda row: abs(row.deviations or 0.0))
        return f"Most would be decided by {MEASUREMENTS[best.kind][0]}: {MEASUREMENTS[best.kind][1]}."
    largest = decision.rows[0]
    return (
        "No single kind of time, wrong by one standard deviation, would make a layout of other sizes win; the step time "
        f"itself depends most on {MEASUREMENTS[largest.kind][0]}: {MEASUREMENTS[largest.kind][1]}."
    )


def _as_dict(decision: Decision, inputs: Inputs) -> dict[str, Any]:
    rivals, around = decision.rivals, decision.around
    found, times = decision.chances, around.solutions.times.seconds
    return problem_dict(rivals, inputs.profile_text) | {
        "best": [solution_dict(rivals, 0, decision.why[0])],
        "rivals": [
            {"layout": layout_dict(rivals, i), "step_s": float(rivals.times.seconds[i]), "chance": float(found[i])}
            for i in range(len(rivals))
        ],
        "steps": [
            {
                "axis": step.axis,
                "from": step.before,
                "to": step.after,
                "step_s": float(times[step.index]),
                "peak_memory_bytes": float(around.solutions.memory.device[step.index]),
                "verdict": around.solutions.verdict(step.index),
                "layout": layout_dict(around.solutions, step.index),
            }
            for step in around.steps
        ],
        "standing": standing(around),
        "sensitivities": [vars(row) for row in decision.rows],
    }
