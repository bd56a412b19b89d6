"""The console command ``foretrain``: one program for searching, predicting, validating and measuring."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError, require_torch
from solver.commands.compare import add_compare_arguments, compare
from solver.commands.explain import add_explain_arguments, explain_layout
from solver.commands.fit import add_fit_arguments, fit
from solver.commands.import_files import add_health_arguments, add_import_arguments, add_learn_arguments, import_log, learn_runs
from solver.commands.plan import add_plan_arguments, plan
from solver.commands.predict import predict
from solver.commands.sweep import add_sweep_arguments, sweep_all
from solver.commands.validate import validate
from solver.options.arguments import (
    add_approximate_argument,
    add_json_argument,
    add_machine_arguments,
    add_prediction_arguments,
    add_search_arguments,
    add_world_size_argument,
    check_arguments,
    check_machine_arguments,
)
from solver.options.examples import epilog, overview
from solver.options.terminal_run import run
from solver.search.fixed import LIMITED

#: The measuring script; it is started in processes of its own, one per rank.
MEASURE = Path(__file__).resolve().parents[2] / "gen_profiler_data.py"

_MEASURE_HELP = "measure this machine: torchrun --nproc-per-node N gen_profiler_data.py, with its options"


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands but ``measure``, whose options are those of gen_profiler_data.py."""
    p = ArgumentParser(
        prog="foretrain",
        description="Predict which parallel layout trains a language model fastest, how fast, whether it fits, how sure, why.",
        epilog=overview(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, about: str) -> argparse.ArgumentParser:
        shape = argparse.RawDescriptionHelpFormatter
        return commands.add_parser(name, allow_abbrev=False, help=about, epilog=epilog(name), formatter_class=shape)

    search = command("search", "estimate every layout of a model on a number of GPUs")
    search.set_defaults(run_all_solu=True, validate=None, health=None)
    add_prediction_arguments(search, of_one=False)
    add_search_arguments(search)
    single = command("predict", "estimate the layout that a config states")
    single.set_defaults(run_all_solu=False, validate=None, top=1, jobs=1, plot=None, plot_scaling=None, fix=None, search=None)
    single.set_defaults(report=None, also=None, **{f"max_{name}": None for name in LIMITED})
    add_prediction_arguments(single)
    for name, (about, add_arguments) in _COMMANDS.items():
        add_arguments(command(name, about))
    commands.add_parser("measure", help=_MEASURE_HELP, add_help=False)
    return p


def add_export_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of an export: of a prediction, or with ``--best`` of a search, that writes nothing else."""
    p.add_argument("export", type=Path, metavar="OUT", help="the file; ending and framework say what kind (docs/formats.md)")
    add_machine_arguments(p)
    add_world_size_argument(p)
    p.add_argument("--best", dest="run_all_solu", action="store_true", help="the best layout instead of the config's own")
    p.add_argument("--fix", metavar="AXIS=VALUE,...", help="with --best: only layouts with these values")
    p.add_argument("--balance", action="store_true", help="assign the layers to the stages one by one")
    p.set_defaults(
        validate=None,
        top=1,
        jobs=1,
        no_timing=False,
        health=None,
        trace=None,
        memory_trace=None,
        plot=None,
        plot_scaling=None,
        report=None,
        plot_stages=None,
        json=None,
        csv=None,
        search=None,
        also=None,
        **{f"max_{name}": None for name in LIMITED},
    )


def add_validate_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of a validation."""
    p.add_argument("file", type=Path, metavar="FILE.jsonl", help="measured runs, one JSON object per line (docs/cases.md)")
    add_approximate_argument(p)
    add_json_argument(p)


_QUESTIONS: dict[str, Callable[[argparse.Namespace, Console], None]] = {
    "compare": compare,
    "explain": explain_layout,
    "fit": fit,
    "plan": plan,
    "sweep": sweep_all,
    "import": import_log,
    "health": import_log,
    "learn": learn_runs,
}
#: Commands with arguments of their own: what they do, and what adds their arguments.
_COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "plan": ("how many GPUs, days, GPU-hours, how much money and energy a number of tokens takes", add_plan_arguments),
    "compare": ("layouts, devices, clusters or configs side by side, part by part", add_compare_arguments),
    "fit": (
        "largest micro batch and sequence of the config's layout, fewest GPUs, what breaks next",
        add_fit_arguments,
    ),
    "explain": ("why this layout: rivals, neighbours, uncertainty, which measurement would decide", add_explain_arguments),
    "sweep": (
        "models x sequences x machines x GPUs: the best layout of each, on all cores or a cluster",
        add_sweep_arguments,
    ),
    "import": ("compare a job's log with its prediction, say what its settings cost, keep it as a run", add_import_arguments),
    "health": ("compare a job's log with its prediction: what differs", add_health_arguments),
    "export": ("the files that launch a layout: Megatron, InternEvo, torchtitan, DeepSpeed, ...", add_export_arguments),
    "learn": ("calibrate predictions to measured runs of your machine: a file for --learned", add_learn_arguments),
    "validate": ("predict measured runs and print the errors", add_validate_arguments),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status (2 for input that cannot be used)."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["measure"]:
        return _measure(given[1:])
    args = parser().parse_args(given)

    def command(console: Console) -> None:
        if args.command == "validate":
            check_machine_arguments(args)
            validate(args.file, args.json, args.approximate, console)
        elif args.command in _QUESTIONS:
            check_machine_arguments(args)
            _QUESTIONS[args.command](args, console)
        else:
            check_arguments(args)
            predict(args, console)

    return run(command)


def _measure(options: Sequence[str]) -> int:
    """Become gen_profiler_data.py with ``options`` (so that signals reach it), under torchrun for more than one process.

    Return 2 if the options cannot be used.
    """
    p = ArgumentParser(prog="foretrain measure", description=_MEASURE_HELP, add_help=False)
    p.add_argument("--nproc-per-node", type=int, default=1)
    args, rest = p.parse_known_args(options)
    launcher: list[str] = []
    try:
        if args.nproc_per_node < 1:
            raise InputError(f"--nproc-per-node is {args.nproc_per_node}; it must be at least 1")
        if args.nproc_per_node > 1:
            require_torch("measuring with several processes")
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.nproc_per_node}"]
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if {"-h", "--help"} & set(rest):
        print(f"foretrain measure --nproc-per-node N (default 1) starts N processes of what follows\n\n{epilog('measure')}\n")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, str(MEASURE), *rest])


if __name__ == "__main__":
    sys.exit(main())
