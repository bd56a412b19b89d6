"""Command line of simulation_train_formulaic.py: reads the arguments, predicts, and prints a report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from predictor.cost_model import CostModel, cost_model
from predictor.kernels.derating import step_factors
from predictor.network.measured_groups import describe_network
from profiler.errors import InputError, printable
from profiler.files import write_text
from profiler.profile.attention_times import FOLDER
from profiler.profile.profiles import (
    OWN_NAME,
    OWN_PROFILE,
    PROF_DATA,
    as_device,
    derived_profiles,
    find_profile,
    shipped_profiles,
)
from solver.api import CACHE, configured_strategy, estimate, load_problem, time_attention
from solver.arguments import (
    DEFAULT_MODEL,
    DEFAULT_TOKENS,
    DEFAULT_WORLD_SIZE,
    add_prediction_arguments,
    add_search_arguments,
    check_arguments,
)
from solver.formats.cases import read_cases
from solver.formats.config_file import RunConfig, find_model, load_cluster, load_run_config
from solver.formats.megatron_export import shell_command
from solver.formats.step_log import read_observation
from solver.report.health import Finding, health
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
from solver.report.terminal import balance_text, show_health, show_search, show_single, show_validation
from solver.report.timeline import chrome_trace, step_timeline
from solver.report.validate import as_json, confusion, memory_scores, predict_cases, regret, time_scores, worst
from solver.search.balance import balanced
from solver.search.fixed import AXES, LIMITED, fixed_but, parse_constants, parse_fixed, parse_varied
from solver.search.search import SearchResult, search
from solver.search.variants import Variant, parse_demanded, search_variants
from solver.step.problem import Problem
from solver.step.solutions import Solutions

_MOST_MESSAGE = 1200  #: characters of an error message
_SHOWN_KEYS = 6  #: names of keys in a note

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
    p = argparse.ArgumentParser(
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
    config = load_run_config(args.config or find_model(args.model_size or DEFAULT_MODEL))
    cluster = load_cluster(args.cluster) if args.cluster else {}
    if args.profile and cluster.get("hardware") not in (None, args.profile):
        raise InputError(
            f"--profile is {args.profile}, but --cluster {args.cluster} is of {cluster['hardware']}; leave one out"
        )
    name = args.profile or (None if args.pre_profiling_data_path else cluster.get("hardware"))
    own = args.as_device if args.as_device in derived_profiles() and not (name or args.pre_profiling_data_path) else None
    profile, said = find_profile(own or name, args.pre_profiling_data_path)
    if args.as_device is not None and own is None:
        profile, said = as_device(profile, args.as_device)
    constants = parse_constants(args.set or "") | ({"framework": args.framework} if args.framework is not None else {})
    with Console(stderr=True).status(f"fitting {profile.name} (kept for later starts)"):
        problem = load_problem(
            config, _world_size(args.world_size, config), profile=profile, cluster=cluster, seq_len=args.seq_len,
            memory_limit_gib=args.memory_limit_gib, approximate=args.approximate, **constants,
        )  # fmt: skip
    network = describe_network(profile) if problem.run.world_size > problem.cluster.gpus_per_domain else ""
    length = problem.run.seq_len
    times = (args.pre_profiling_data_path.parent if args.pre_profiling_data_path else PROF_DATA) / FOLDER
    if not args.run_all_solu:
        batch, rounded = None, ""
        if args.global_batch_size is not None:
            group = _sequences_per_micro_step(problem, config) if args.round_batch else 1
            batch, rounded = batch_sequences(args.global_batch_size, length, args.round_batch, group)
        strategies = [configured_strategy(problem, config, batch)]
        problem, timed = time_attention(problem, profile, strategies, timing=not args.no_timing, folder=times)
        solutions = estimate(problem, strategies)
        notes = _notes(problem, config, "\n".join(filter(None, (network, timed, rounded))), set(AXES) & config.layout.keys())
        findings = _health(args.health, solutions) if args.health else []
        deal = balanced(solutions, 0) if args.balance else None
        show_single(console, solutions, said, notes)
        if deal:
            console.print(balance_text(deal))
        if args.health:
            show_health(console, findings)
        if args.json:
            whole = problem_dict(solutions, said) | {"network": network, "best": [solution_dict(solutions, 0)]}
            whole |= {"other_settings": settings_list(solutions)} | ({"health": findings_list(findings)} if args.health else {})
            whole |= balanced_dict(deal)
            write_json(args.json, whole)
        if args.csv:
            write_csv(args.csv, solutions)
        if args.plot_stages:
            _draw_stages(args.plot_stages, solutions)
        _write_layout(args, deal.solutions if deal else solutions, console)
        return
    tokens = args.global_batch_size or DEFAULT_TOKENS
    sequences, rounded = batch_sequences(tokens, length, args.round_batch, problem.run.world_size)
    fixed, most = parse_fixed(args.fix or ""), {n: size for n in LIMITED if (size := getattr(args, f"max_{n}")) is not None}
    if args.search is not None:
        stated = [name for name, value in config.layout.items() if value != -1]  # InternEvo's -1: as many as there are
        fixed = fixed_but(parse_varied(args.search), fixed, configured_strategy(problem, config), stated)
    problem, timed = time_attention(problem, profile, sequences, timing=not args.no_timing, folder=times)
    others: list[Variant] = []
    with _progress("estimating layouts") as report:
        if args.also:
            names = parse_demanded(args.also)
            others = search_variants(problem, sequences, names, args.top, report, fixed=fixed, most=most, jobs=args.jobs)
            result = next(variant.result for variant in others if variant.result)
        else:
            result = search(problem, sequences, args.top, report, fixed=fixed, most=most, jobs=args.jobs)
    notes = _notes(result.problem, config, "\n".join(filter(None, (network, timed, rounded))))
    deal = balanced(result.best, 0) if args.balance else None
    show_search(console, result, said, notes, others)
    if deal:
        console.print(balance_text(deal))
    found = {"network": network} | ({"also": variants_list(others)} if others else {}) | balanced_dict(deal)
    _write_search(args, result, said, found, console)
    _write_layout(args, deal.solutions if deal else result.best, console)


def _health(path: Path, solutions: Solutions) -> list[Finding]:
    """Return what was measured beside the prediction."""
    return health(solutions, 0, read_observation(path, float(solutions.tokens[0]) / solutions.problem.run.world_size))


def _notes(problem: Problem, config: RunConfig, timed: str, stated: set[str] | None = None) -> str:
    """Return what else a reader must know, a line each: what is left out, what of the config was not read, what was timed.

    stated: axes of a layout that the config states, where its own layout is predicted.
    """
    left_out = problem.model.unmodelled
    lines = [f"left out of the estimate: {'; '.join(left_out)}" if left_out else "", timed]
    if stated is not None and not stated:
        lines.append(
            "the config states no layout: each size is 1, its framework's ZeRO stage, and data parallelism fills the world"
        )
    if config.ignored:
        more = f" and {len(config.ignored) - _SHOWN_KEYS} more" if len(config.ignored) > _SHOWN_KEYS else ""
        lines.append(f"not read from the config: {printable(', '.join(config.ignored[:_SHOWN_KEYS]), 400)}{more}")
    return "\n".join(filter(None, lines))


def _world_size(given: int | None, config: RunConfig) -> int:
    """Return the number of GPUs; a config that states one must agree with the option."""
    stated = config.layout.get("world_size")
    if given is not None and stated not in (None, given):
        raise InputError(f"--world_size is {given}, but {config.source} states a layout of {stated}; leave one out")
    return int(given or stated or DEFAULT_WORLD_SIZE)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
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
    if args.plot:
        from solver.report.pictures import draw_pareto  # importing matplotlib takes a second

        draw_pareto(result, args.plot)
    if args.plot_stages:
        _draw_stages(args.plot_stages, result.best)
    if args.plot_scaling:
        from solver.report.pictures import draw_scaling

        draw_scaling(_scaling(result), args.plot_scaling)
    for path in filter(None, (args.json, args.csv, args.plot, args.plot_stages, args.plot_scaling)):
        console.print(f"wrote {path}", markup=False)


def _write_layout(args: argparse.Namespace, solutions: Solutions, console: Console) -> None:
    """Write the first layout as a launch script, and one step of it as a trace or a picture, where that is asked for."""
    problem = solutions.problem
    if args.export:
        run = solutions.layouts.strategy(0, problem.run)
        write_text(args.export, shell_command(problem.model, run, problem.cluster.gpus_per_node))
        console.print(f"wrote {args.export}", markup=False)
    if args.trace:
        step = step_timeline(solutions, 0)
        if args.trace.suffix.lower() == ".json":
            write_json(args.trace, chrome_trace(step))
        else:
            from solver.report.pictures import draw_timeline

            draw_timeline(step, args.trace)
        console.print(f"wrote {args.trace}", markup=False)


def _draw_stages(path: Path, solutions: Solutions) -> None:
    from solver.report.pictures import draw_stages

    draw_stages(solutions, 0, path)


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
            problem = replace(result.problem, run=run.replace(world_size=world, dp=world))
            with suppress(InputError):
                found.append(search(problem, sequences, 1, fixed=result.fixed, most=result.most))
    return found


def batch_sequences(tokens: int, seq_len: int, rounds: bool, group: int) -> tuple[int, str]:
    """Return (sequences of a global batch of ``tokens``, a note if it was rounded).

    rounds: round to whole sequences, and to the nearest multiple of ``group`` sequences where it holds that many. Raises
    InputError for a batch that is not a whole number of sequences and may not be rounded.
    """
    if not rounds:
        if tokens % seq_len:
            raise InputError(
                f"--global_batch_size {tokens} tokens is not a whole number of sequences of {seq_len} tokens; "
                f"try {max(tokens // seq_len, 1) * seq_len}, or --round_batch"
            )
        return tokens // seq_len, ""
    unit = seq_len * group if tokens >= seq_len * group else seq_len
    sequences = max(round(tokens / unit), 1) * unit // seq_len
    if sequences * seq_len == tokens:
        return sequences, ""
    return sequences, f"global batch rounded from {tokens:,} to {sequences * seq_len:,} tokens, {sequences:,} sequences"


def _sequences_per_micro_step(problem: Problem, config: RunConfig) -> int:
    """Return the sequences that all data-parallel ranks of the config's layout take at once."""
    layout = configured_strategy(problem, config)
    return layout.dp * layout.micro_batch_size


def validate(path: Path, json_path: Path | None, approximate: bool, console: Console) -> None:
    """Predict the measured runs of a JSON-lines file; print the errors, and write every prediction to ``json_path``."""
    cases = read_cases(path)
    with _progress("predicting cases") as report:
        predictions = predict_cases(cases, CostModels([*shipped_profiles(), *derived_profiles()]), report, approximate)
    show_validation(
        console, predictions, time_scores(predictions), memory_scores(predictions), confusion(predictions),
        regret(predictions), worst(predictions),
    )  # fmt: skip
    fitted = sorted({case.hardware for case in cases} & {name for name, factor in step_factors().items() if factor != 1.0})
    if fitted:
        console.print(f"{', '.join(fitted)}: one factor is fitted to published training runs; errors on those are not held out "
                      "(make accuracy holds them out)", markup=False)  # fmt: skip
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
