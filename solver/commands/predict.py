"""The layout that a config states, or every layout: what it takes, its memory, and why."""

from __future__ import annotations

import argparse

from rich.console import Console

from solver.api import configured_strategy, estimate, time_attention
from solver.commands.search import search_all
from solver.formats.export import check_export
from solver.formats.logs.step_log import read_observation
from solver.options.batch import batch_or_default
from solver.options.inputs import Inputs, load_inputs
from solver.options.writing import why_not_expressed, write_layout
from solver.report.health import health
from solver.report.output import (
    balanced_dict,
    findings_list,
    problem_dict,
    settings_list,
    solution_dict,
    write_csv,
    write_json,
)
from solver.report.pictures import save_figure, stages_figure
from solver.report.terminal import balance_text, show_health, show_single
from solver.search.balance import balanced
from solver.spec.strategy import AXES


def predict(args: argparse.Namespace, console: Console) -> None:
    """Predict the layout of the config, or every layout; print the report and write the files that were requested."""
    inputs = load_inputs(args)
    if args.export:
        check_export(args.export, inputs.problem.run.framework)
    if args.run_all_solu:
        search_all(args, inputs, console)
    else:
        _predict_one(args, inputs, console)


def _predict_one(args: argparse.Namespace, inputs: Inputs, console: Console) -> None:
    problem, config = inputs.problem, inputs.config
    batch, rounded = batch_or_default(args, problem, config)
    strategies = [configured_strategy(problem, config, batch)]
    problem, timed = time_attention(problem, inputs.profile, strategies, timing=not args.no_timing, folder=inputs.times)
    solutions = estimate(problem, strategies)
    measured = read_observation(args.health, strategies[0], inputs.profile.name) if args.health else None
    findings = health(solutions, 0, measured) if measured else []
    chosen = balanced(solutions, 0) if args.balance else None
    own = args.config is not None and args.config.suffix != ".json" and not chosen  # its framework's own file states it
    unstated = "" if own else why_not_expressed(args, chosen.solutions if chosen else solutions)
    notes = inputs.notes(timed, rounded, stated=set(AXES) & config.layout.keys())
    show_single(console, solutions, inputs.profile_text, notes, unstated)
    if chosen:
        console.print(balance_text(chosen))
    if args.health:
        show_health(console, findings)
    untold = {"not_expressed": unstated} if unstated else {}
    if args.json:
        whole = problem_dict(solutions, inputs.profile_text) | inputs.plain | {"best": [solution_dict(solutions, 0)]}
        whole |= {"other_settings": settings_list(solutions)} | ({"health": findings_list(findings)} if args.health else {})
        whole |= untold
        write_json(args.json, whole | balanced_dict(chosen))
    if args.csv:
        write_csv(args.csv, solutions)
    if args.plot_stages:
        save_figure(stages_figure(solutions), args.plot_stages)
    write_layout(args, chosen.solutions if chosen else solutions, inputs.config, console)
