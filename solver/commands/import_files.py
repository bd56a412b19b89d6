"""The commands ``foretrain import`` (a job's log beside its prediction, and as a measured run) and ``foretrain learn``."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from predictor.learned import FACTORS, write_learned
from profiler.errors import InputError
from profiler.files import append_line
from profiler.profile.profiles import derived_profiles, known_profiles, shipped_profiles
from profiler.text_file import read_text
from profiler.units import GIB
from solver.api import configured_strategy, estimate
from solver.commands.validate import CostModels
from solver.formats.bridge.complete import printed
from solver.formats.cases.reading import read_cases
from solver.formats.config_file import RunConfig, run_config_of
from solver.formats.file_run import Source
from solver.formats.logs.profiler_trace import Trace, is_trace, read_trace
from solver.formats.logs.statements import check_statements
from solver.formats.logs.step_log import Observation, read_observation
from solver.formats.megatron.log import config_in_log, has_arguments
from solver.formats.yaml_files import read_yaml_file
from solver.learning import Lesson, distinct_runs, learn
from solver.options.arguments import add_json_argument, add_machine_arguments, add_world_size_argument
from solver.options.batch import stated_batch
from solver.options.inputs import Inputs, load_inputs
from solver.options.terminal_run import progress_bar
from solver.report.describe import describe
from solver.report.explain import Explanation, explain
from solver.report.gap import gap, gap_lines, named
from solver.report.health import as_measured, health
from solver.report.output import findings_list, layout_dict, write_json
from solver.report.terminal import show_health
from solver.report.trace_gap import PARTS, predicted_parts, trace_lines, traced
from solver.report.words import seconds
from solver.spec.cluster import cluster_keys
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy
from solver.step.solutions import Solutions

_MOST_BYTES = 256 << 20


def add_import_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of an import."""
    p.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help="a trainer's log, a trace of torch.profiler (.json, "
        '.json.gz), or JSON such as {"step_s": 16.1}; a log of Megatron-LM that prints its arguments needs no '
        "--config",
    )
    add_machine_arguments(p)
    add_world_size_argument(p)
    p.add_argument("--runs", type=Path, metavar="FILE.jsonl", help="append the run to this file, for learn and validate")
    p.add_argument("--id", help="name of the run in --runs (default: the log's)")
    add_json_argument(p)


def add_health_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of a job's health: those of an import that keeps no run."""
    p.add_argument(
        "log",
        type=Path,
        metavar="LOG",
        help='a trainer\'s log, one of nccl-tests, or JSON such as {"all_reduce_busbw_gb_s": 350}',
    )
    add_machine_arguments(p)
    add_world_size_argument(p)
    add_json_argument(p)
    p.set_defaults(runs=None, id=None)


def add_learn_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of learning."""
    p.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUNS.jsonl",
        help="measured runs of one machine, framework and precision (docs/cases.md)",
    )
    p.add_argument("--output", type=Path, required=True, metavar="OUT.json", help="factors, for --learned of other commands")


def import_log(args: argparse.Namespace, console: Console) -> None:
    """Print what was measured beside what is predicted, and what of the gap each setting is; append the run to ``--runs``."""
    inputs = load_inputs(args, _config_of(args))
    problem, config = inputs.problem, inputs.config
    batch, rounded = stated_batch(args, problem, config)
    layout = configured_strategy(problem, config, batch)
    solutions = estimate(problem, [layout])
    trace = read_trace(args.log) if is_trace(args.log) else None
    if trace is not None:
        check_statements(trace.states, args.log, layout, inputs.profile.name)
    if args.runs and not {"micro_batch_size", "num_micro_batches", "dp", "tp", "zero"} & config.layout.keys():
        raise InputError(
            f"{config.source or config.name} states no layout, so the layout of the run is unknown; give the run's own "
            "--config to keep it in --runs"
        )
    observed = Observation(trace.steps) if trace is not None else read_observation(args.log, layout, inputs.profile.name)
    run, findings = problem.run, health(solutions, 0, observed)
    console.print(
        f"{problem.model.name}, {run.precision}, {run.framework}, {run.world_size} x {problem.cost.device.name}; "
        f"{inputs.profile_text}\n{describe(solutions, 0)}\n{inputs.notes(rounded)}",
        markup=False,
    )
    show_health(console, findings)
    plain: dict[str, Any] = {"layout": layout_dict(solutions, 0), "findings": findings_list(findings)}
    if len(observed.steps):
        found = gap(as_measured(problem, observed), layout, float(np.median(observed.steps)))
        given = "your settings and links" if observed.busbw or observed.busbw_in_node else "your settings"
        console.print("\n".join(["", *gap_lines(found, given)]), markup=False)
        plain |= {
            "measured_step_s": found.measured,
            "predicted_step_s": found.predicted,
            "best_step_s": found.best,
            "switches": named(found.switches),
        }
    if trace is not None:
        plain["trace"] = _show_trace(console, trace, explain(solutions, 0))
    if args.runs:
        console.print(_append(args.runs, _case_of(args, inputs, solutions, layout, observed)), markup=False)
    if args.json:
        write_json(args.json, plain)
        console.print(f"wrote {args.json}", markup=False)


def _show_trace(console: Console, trace: Trace, explanation: Explanation) -> dict[str, Any]:
    """Print the median step of a trace beside the predicted one, part by part; return both for JSON."""
    found, ours = traced(trace), predicted_parts(explanation)
    table = Table(
        title=f"The median step of the trace ({trace.said}) beside the prediction, which is of the slowest stage",
        title_justify="left",
    )
    for name in ("part of the step", "predicted", "traced", "traced / predicted"):
        table.add_column(name, justify="left" if name == "part of the step" else "right")
    for name in PARTS:
        if ours[name] or found.parts[name]:
            ratio = f"{found.parts[name] / ours[name]:.2f}" if ours[name] > 1e-9 else "-"
            table.add_row(name, seconds(ours[name]), seconds(found.parts[name]), ratio)
    table.add_row("step", seconds(explanation.seconds), seconds(found.step), f"{found.step / explanation.seconds:.2f}")
    console.print(table)
    console.print("\n".join(trace_lines(found, explanation)), markup=False)
    return {
        "traced": {
            "step_s": found.step,
            "parts_s": dict(found.parts),
            "exposed_s": dict(found.exposed),
            "overlapped_s": found.overlapped,
        },
        "predicted_parts_s": ours,
    }


def _config_of(args: argparse.Namespace) -> RunConfig | None:
    """Return the configuration that the log itself states, where no option names one."""
    if args.config or args.model_size:
        return None
    if is_trace(args.log):
        raise InputError(f"{args.log} is a trace, which does not say what was run: give --config and --world_size")
    text = read_text(args.log, "a log", _MOST_BYTES, replacing=True)
    configuration = printed(text)
    if configuration is not None:
        source = Source(args.log, configuration, lambda _: None, args.world_size or 0)
        return run_config_of(source, read_yaml_file(source))
    if not has_arguments(text):
        raise InputError(f"{args.log} does not say what was run: give --config (or --model_size) and --world_size")
    return config_in_log(text, args.log)


def _case_of(
    args: argparse.Namespace, inputs: Inputs, solutions: Solutions, layout: Strategy, observed: Observation
) -> dict[str, Any]:
    """Return the run as a case. Raises InputError where nothing was measured, or the hardware has no name to find it by."""
    measured: dict[str, Any] = {}
    if len(observed.steps):
        measured["step_s"] = float(np.median(observed.steps))
    if observed.peak_memory:
        measured |= {"peak_memory_gib": observed.peak_memory / GIB, "memory_kind": observed.memory_kind}
    if not measured:
        raise InputError(f"{args.log} has no step time and no peak of memory; there is no run to append")
    hardware = str(args.pre_profiling_data_path) if args.pre_profiling_data_path else inputs.profile.name
    if not args.pre_profiling_data_path and hardware not in (*shipped_profiles(), *derived_profiles()):
        raise InputError(f"runs name a profile that others can find; {hardware} is none of them: leave out --as, or --runs")
    return case_line(args.id or args.log.stem, hardware, solutions, layout, measured)


def _append(path: Path, case: dict[str, Any]) -> str:
    """Append a case to a file of runs, if it is not there yet; return in words what was done.

    Where another run has its id it gets a number of its own.
    """
    there, case = _runs_in(path) if path.is_file() else [], json.loads(json.dumps(case))  # lists, as in the file
    names = (case["id"], *(f"{case['id']}-{number}" for number in range(2, len(there) + 2)))
    name = next(name for name in names if not any(run.get("id") == name and run != {**case, "id": name} for run in there))
    if {**case, "id": name} in there:
        return f"already in {path}"
    append_line(path, json.dumps({**case, "id": name}))
    return f"appended to {path}" + (f" as {name}" if name != case["id"] else "")


def _runs_in(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file. Raises InputError where it holds something else."""
    lines = read_text(path, "a file of cases", _MOST_BYTES).splitlines()
    try:
        found = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        found = [None]
    if not all(isinstance(run, dict) and "measured" in run for run in found):
        raise InputError(f"--runs {path} holds something else than runs, JSON objects one a line; name another file")
    return found


def case_line(name: str, hardware: str, solutions: Solutions, layout: Strategy, measured: dict[str, Any]) -> dict[str, Any]:
    """Return a measured run as a case (docs/cases.md), which reads back as the same model, cluster and layout."""
    problem = solutions.problem
    return {
        "id": name,
        "hardware": hardware,
        "cluster": cluster_keys(problem.cluster),
        "model": _stated(problem.model),
        "measured": measured,
        "run": {name: value for name, value in vars(layout).items() if value is not None},
    }


def _stated(model: ModelSpec) -> dict[str, Any]:
    """Return the keys of a model that differ from their defaults."""
    return {
        field.name: value
        for field in fields(model)
        if (value := getattr(model, field.name)) != field.default and value not in (None, (), [])
    }


def learn_runs(args: argparse.Namespace, console: Console) -> None:
    """Learn from measured runs; print the factors, what they are worth on runs left out, and write ``--output``."""
    if args.output.suffix != ".json":
        raise InputError(f"--output {args.output}: the file must end in .json")
    cases, twins = distinct_runs([case for path in args.runs for case in read_cases(path)])
    with progress_bar("learning") as report:
        lesson = learn(cases, CostModels(known_profiles()), args.output.name, report)
    console.print(_factors(lesson))
    found = lesson.held_out
    console.print(
        f"runs left out in turn: median error {found.median_before:.1%} before, {found.median_after:.1%} after; inside the 90% "
        f"interval {found.inside_before:.0%} before, {found.inside_after:.0%} after; its half width {found.spread_before:.0%} "
        f"before, {found.spread_after:.0%} after",
        markup=False,
    )
    skipped = {**twins, **{prediction.case.id: str(prediction.skipped) for prediction in lesson.skipped}}
    console.print(
        "\n".join(f"skipped {name}: {why}" for name, why in skipped.items()), markup=False, end="\n" if skipped else ""
    )
    if found.median_after >= found.median_before:
        console.print(
            f"Nothing was learned that holds for other runs, so {args.output} is not written: predict without it.",
            style="bold red",
            markup=False,
        )
        return
    write_learned(args.output, lesson.learned, vars(found))
    console.print(f"wrote {args.output}; use it with --learned {args.output}", markup=False)


def _factors(lesson: Lesson) -> Table:
    learned = lesson.learned
    table = Table(
        title=f"Learned from {learned.runs} runs; every kind of time also has the factor of the step", title_justify="left"
    )
    for name in ("time of", "takes", "uncertainty"):
        table.add_column(name, justify="left" if name == "time of" else "right")
    for i, name in enumerate(FACTORS):
        std = float(np.sqrt(learned.covariance[i][i]))
        table.add_row(name.replace("_", "-"), f"x {np.exp(learned.log_factors[i]):.3f}", f"{std:.1%}")
    table.caption = f"what stays from run to run: {learned.noise:.1%}"
    return table
