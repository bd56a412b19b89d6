"""Options of ``python -m predictor.network`` that simulate collectives on topologies."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from predictor.network.flows.cases import Case, CaseResult, read_flow_cases, run_case
from predictor.network.flows.simulate import DRAWS
from profiler.errors import InputError
from profiler.files import write_text


def add_flow_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a simulation."""
    group = parser.add_argument_group("simulation of collectives")
    group.add_argument("--flows", type=Path, metavar="CASES.jsonl", help="simulate these cases; each names its topology")
    group.add_argument(
        "--json", type=Path, metavar="OUT", help="write the times: JSON lines if OUT ends in .jsonl, else a list"
    )
    group.add_argument("--seed", type=int, default=0, help="first of the hashes that choose among equal paths (default 0)")
    group.add_argument("--draws", type=int, default=DRAWS, help=f"how many hashes are tried (default {DRAWS})")


def run_flows(args: argparse.Namespace) -> None:
    """Simulate the cases of a file, print a table in Markdown, and write the times."""
    if args.seed < 0 or args.draws < 1:
        raise InputError(f"--seed {args.seed} --draws {args.draws}; the seed must be 0 or more, the draws 1 or more")
    cases, warnings = read_flow_cases(args.flows)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    results = [_run(case, args.seed, args.draws) for case in cases]
    for result in results:
        if result.share < 1:
            how = (
                f"its first {result.share:.2%} are simulated, the rest is taken to go on like them"
                if result.share
                else ("the time is what the busiest link needs, a lower bound")
            )
            print(f"warning: {result.name}: too large to simulate all flows: {how}", file=sys.stderr)
    print(table(cases, results))
    if args.json:
        rows = [json.dumps(result.to_dict()) for result in results]
        lines = args.json.suffix == ".jsonl"
        write_text(args.json, "\n".join(rows) + "\n" if lines else "[" + ",\n ".join(rows) + "]\n")
        print(f"wrote {args.json}")


def _run(case: Case, seed: int, draws: int) -> CaseResult:
    try:
        return run_case(case, seed, draws)
    except InputError as error:
        raise InputError(f"{case.name}: {error}") from None


def table(cases: Sequence[Case], results: Sequence[CaseResult]) -> str:
    """Return a Markdown table of the times, beside those that the cases state."""
    rows = ["| case | time [us] | spread [us] | stated [us] | difference | wall [s] |", "|---|---:|---:|---:|---:|---:|"]
    for case, result in zip(cases, results, strict=True):
        stated = f"{case.reported:.1f}" if case.reported else ""
        difference = f"{result.comm_us / case.reported - 1:+.1%}" if case.reported else ""
        rows.append(
            f"| {result.name} | {result.comm_us:.1f} | {result.spread_us:.1f} | {stated} | {difference} | {result.wall_s:.3f} |"
        )
    return "\n".join(rows)
