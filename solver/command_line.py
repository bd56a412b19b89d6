"""Command line of simulation_train_formulaic.py: reads the arguments, predicts, and prints a report."""

from __future__ import annotations

import argparse
import pickle
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from predictor.cost_model import CostModel
from predictor.fitted import cost_model
from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError, printable
from profiler.files import replacing
from profiler.profile.profiles import (
    OWN_NAME,
    OWN_PROFILE,
    PROF_DATA,
    find_profile,
    known_profiles,
)
from solver.api import CACHE, configured_strategy, estimate, time_attention
from solver.arguments import (
    add_prediction_arguments,
    add_search_arguments,
    check_arguments,
)
from solver.batch import batch_or_default, searched_batch
from solver.formats.cases import read_cases
from solver.formats.config_file import RunConfig
from solver.formats.export import check_export, not_expressed, not_held, write_export
from solver.formats.step_log import read_observation
from solver.inputs import Inputs, load_inputs
from solver.report.decision import decision_of_search
from solver.report.health import health
from solver.report.html import write_report
from solver.report.memory_timeline import memory_through_step, peak_words, snapshot
from solver.report.output import (
    balanced_dict,
    findings_list,
    problem_dict,
    search_dict,
    settings_list,
    solution_dict,
    variants_list,
    write_csv,
    write_json,
)
from solver.report.picture_timeline import timeline_figure
from solver.report.pictures import memory_figure, pareto_figure, save_figure, scaling_figure, stages_figure
from solver.report.scores import confusion, memory_scores, regret, time_scores, worst
from solver.report.terminal import balance_text, show_health, show_search, show_single, show_validation
from solver.report.timeline import chrome_trace, step_timeline
from solver.report.validate import as_json, predict_cases
from solver.search.balance import balanced
from solver.search.fixed import AXES, LIMITED, fixed_but, parse_fixed, parse_varied
from solver.search.search import SearchResult, search
from solver.search.variants import Variant, parse_demanded, search_variants
from solver.spec.strategy import Strategy
from solver.step.problem import Problem
from solver.step.solutions import Solutions

_MOST_MESSAGE = 1200  #: characters of an error message

_EXAMPLES = """examples:
  python simulation_train_formulaic.py --run_all_solu --world_size 128
      every layout of InternLM2-7B on 128 GPUs of the default profile
  python simulation_train_formulaic.py --config configs/7B_internlm2.py --world_size 64
      the layout in the config's parallel dict
  python simulation_train_formulaic.py --run_all_solu --model_size llama3_70b --profile h200_sxm --world_size 512 --csv best.csv
  python simulation_train_formulaic.py --validate configs/cases/mine.jsonl
      predict measured runs and compare
"""


def parser() -> argparse.ArgumentParser:
    """Return the argument parser: the arguments of the InternLM Simulator, and this program's own."""
    p = ArgumentParser(
        description=sys.modules["__main__"].__doc__ or __doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an option that is added later must not change what a shorter one meant
    )
    p.add_argument("--run_all_solu", action="store_true", help="estimate every layout instead of the config's own")
    add_prediction_arguments(p)
    add_search_arguments(p)
    p.add_argument("--validate", type=Path, metavar="FILE.jsonl", help="predict measured runs and print the errors")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return the exit status (2 for input that cannot be used)."""
    args = parser().parse_args(arguments)

    def command(console: Console) -> None:
        check_arguments(args)
        if args.validate:
            validate(args.validate, args.json, args.approximate, console)
        else:
            predict(args, console)

    return run(command)


def run(command: Callable[[Console], None]) -> int:
    """Run ``command`` on a console; return the exit status, and print one sentence for input that cannot be used."""
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        command(console)
    except InputError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"error: {printable(str(error), _MOST_MESSAGE)}", markup=False
        )
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def predict(args: argparse.Namespace, console: Console) -> None:
    """Predict the layout of the config, or every layout; print the report and write the files that were requested."""
    inputs = load_inputs(args)
    if args.export:
        check_export(args.export, inputs.problem.run)
    if args.run_all_solu:
        _search_all(args, inputs, console)
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
    show_single(console, solutions, inputs.said, inputs.notes(timed, rounded, stated=set(AXES) & config.layout.keys()))
    if chosen:
        console.print(balance_text(chosen))
    if args.health:
        show_health(console, findings)
    own = args.config is not None and args.config.suffix != ".json" and not chosen  # its framework's own file states it
    untold = {} if own else _tell_not_expressed(args, chosen.solutions if chosen else solutions, console)
    if args.json:
        whole = problem_dict(solutions, inputs.said) | inputs.plain | {"best": [solution_dict(solutions, 0)]}
        whole |= {"other_settings": settings_list(solutions)} | ({"health": findings_list(findings)} if args.health else {})
        whole |= untold
        write_json(args.json, whole | balanced_dict(chosen))
    if args.csv:
        write_csv(args.csv, solutions)
    if args.plot_stages:
        save_figure(stages_figure(solutions, 0), args.plot_stages)
    _write_layout(args, chosen.solutions if chosen else solutions, console)


def _tell_not_expressed(args: argparse.Namespace, solutions: Solutions, console: Console) -> dict[str, str]:
    """Say where no file of its framework states the first layout, unless one is asked for; return that for JSON."""
    problem = solutions.problem
    if args.export:
        return {}
    run = solutions.layouts.strategy(0, problem.run)
    why = not_expressed(problem.model, run, problem.cluster.gpus_per_node)
    if why:
        console.print(why, markup=False)
    return {"not_expressed": why} if why else {}


def _written(problem: Problem, config: RunConfig, fixed: Mapping[str, Any]) -> Strategy:
    """Return the config's layout, or with what is fixed otherwise where the constants of the run need that."""
    try:
        return configured_strategy(problem, config)
    except InputError:
        kept = {name: value for name, value in config.layout.items() if name != "dp" or not fixed.keys() & {"tp", "cp", "pp"}}
        return configured_strategy(problem, replace(config, layout=kept | dict(fixed)))


def _search_all(args: argparse.Namespace, inputs: Inputs, console: Console) -> None:
    inputs = inputs.for_search()
    problem, config = inputs.problem, inputs.config
    sequences, rounded = searched_batch(args, problem, config)
    fixed, most = parse_fixed(args.fix or ""), {n: size for n in LIMITED if (size := getattr(args, f"max_{n}")) is not None}
    if args.search is not None:
        stated = [name for name, value in config.layout.items() if value != -1]  # InternEvo's -1: as many as there are
        fixed = fixed_but(parse_varied(args.search), fixed, _written(problem, config, fixed), stated)
    problem, timed = time_attention(problem, inputs.profile, sequences, timing=not args.no_timing, folder=inputs.times)
    others: list[Variant] = []
    with progress_bar("estimating layouts") as report:
        if args.also:
            names = parse_demanded(args.also)
            others, result = search_variants(
                problem, sequences, names, args.top, report, fixed=fixed, most=most, jobs=args.jobs
            )
        else:
            result = search(problem, sequences, args.top, report, fixed=fixed, most=most, jobs=args.jobs)
    chosen = balanced(result.best, 0) if args.balance else None
    show_search(console, result, inputs.said, inputs.notes(timed, rounded, problem=result.problem), others)
    if chosen:
        console.print(balance_text(chosen))
    found = inputs.plain | ({"also": variants_list(others)} if others else {}) | balanced_dict(chosen)
    found |= _tell_not_expressed(args, chosen.solutions if chosen else result.best, console)
    _write_search(args, result, inputs.said, found, console)
    _write_layout(args, chosen.solutions if chosen else result.best, console)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, total) that updates a progress bar; no bar is shown where standard error is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _write_search(args: argparse.Namespace, result: SearchResult, said: str, found: dict[str, Any], console: Console) -> None:
    with Console(stderr=True).status("writing the results"):
        if args.json:
            write_json(args.json, search_dict(result, said) | found)
        if args.csv:
            write_csv(args.csv, result.best)
    if args.report:
        write_report(args.report, decision_of_search(result), said, str(found["network"]), shlex.join(sys.argv), result)
    if args.plot:
        save_figure(pareto_figure(result), args.plot)
    if args.plot_stages:
        save_figure(stages_figure(result.best, 0), args.plot_stages)
    if args.plot_scaling:
        save_figure(scaling_figure(_scaling(result)), args.plot_scaling)
    for path in filter(None, (args.json, args.csv, args.plot, args.plot_stages, args.plot_scaling, args.report)):
        console.print(f"wrote {path}", markup=False)


def _write_layout(args: argparse.Namespace, solutions: Solutions, console: Console) -> None:
    """Write the first layout as a launch script, and one step of it as a trace or a picture, where that is asked for."""
    problem = solutions.problem
    if args.export:
        run = solutions.layouts.strategy(0, problem.run)
        for path in write_export(args.export, problem.model, run, problem.cluster.gpus_per_node, args.config):
            console.print(f"wrote {path}", markup=False)
        if note := not_held(args.export, problem.model, run):
            console.print(note, markup=False)
    if args.memory_trace:
        passes, stages = memory_through_step(solutions, 0)
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
                found.append(search(result.problem.for_world(world), sequences, 1, fixed=result.fixed, most=result.most))
    return found


def validate(path: Path, json_path: Path | None, approximate: bool, console: Console) -> None:
    """Predict the measured runs of a JSON-lines file; print the errors, and write every prediction to ``json_path``."""
    cases = read_cases(path)
    with progress_bar("predicting cases") as report:
        predictions = predict_cases(cases, CostModels(known_profiles()), report, approximate)
    show_validation(
        console, predictions, time_scores(predictions), memory_scores(predictions), confusion(predictions),
        regret(predictions), worst(predictions),
    )  # fmt: skip
    if json_path:
        write_json(json_path, {"cases": as_json(predictions)})
        console.print(f"wrote {json_path}", markup=False)


class CostModels:
    """Cost models by hardware and network; each profile is read and fitted once.

    hardware: a shipped profile's name, ``data`` for this machine's own profile, or the path of a profile (ending in .pt).
    """

    def __init__(self, known: Sequence[str]) -> None:
        self._known = set(known)
        self._models: dict[str, CostModel] = {}

    def __call__(self, hardware: str, network_bandwidth: float | None) -> CostModel | None:
        path = PROF_DATA / OWN_PROFILE if hardware == OWN_NAME else Path(hardware)
        own = path.suffix == ".pt"
        if not own and hardware not in self._known:
            return None
        if hardware not in self._models:
            profile, _ = find_profile(path=path) if own else find_profile(hardware)
            self._models[hardware] = cost_model(profile, cache_dir=CACHE)
        return self._models[hardware].with_network(network_bandwidth)
