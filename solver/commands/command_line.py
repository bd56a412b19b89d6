"""Command line of simulation_train_formulaic.py: reads the arguments, predicts, and prints a report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from profiler.argument_parser import ArgumentParser
from solver.commands.predict import predict
from solver.commands.validate import validate
from solver.options.arguments import (
    add_prediction_arguments,
    add_search_arguments,
    check_arguments,
)
from solver.options.terminal_run import run

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
