"""The command ``foretrain plan``: GPUs, days, GPU-hours, money and energy of training a number of tokens."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from profiler.errors import InputError
from profiler.profile.devices import DATASHEETS
from solver.arguments import DEFAULT_TOKENS, add_json_argument, add_machine_arguments
from solver.command_line import batch_sequences, progress_bar
from solver.formats.config_file import load_cluster
from solver.inputs import load_inputs
from solver.interruptions import add_interruption_arguments, check_interruptions, goodput_of, interrupted
from solver.report.goodput import Goodput
from solver.report.output import layout_dict, write_json
from solver.report.plan import Training, fewest, trainings, worlds_between
from solver.report.terminal import describe
from solver.report.words import seconds
from solver.search.fixed import parse_fixed

_LEAST, _MOST = 8, 16384


def add_plan_arguments(p: argparse.ArgumentParser) -> None:
    """Add the arguments of a plan."""
    add_machine_arguments(p)
    p.add_argument("--tokens", type=float, required=True, help="tokens to train on, as in 15e12")
    p.add_argument("--days", type=float, help="deadline: the fewest GPUs that meet it are named")
    p.add_argument("--least", type=int, default=_LEAST, metavar="GPUS", help=f"fewest GPUs to look at (default {_LEAST})")
    p.add_argument("--most", type=int, default=_MOST, metavar="GPUS", help=f"most GPUs to look at (default {_MOST})")
    p.add_argument("--price", type=float, metavar="MONEY", help="of a GPU for an hour")
    add_interruption_arguments(p)
    p.add_argument("--fix", metavar="AXIS=VALUE,...", help="search only layouts with these")
    p.add_argument("--jobs", type=int, default=1, help="processes that share each search (default 1)")
    add_json_argument(p)


def plan(args: argparse.Namespace, console: Console) -> None:
    """Print what training ``--tokens`` takes on each number of GPUs, and write it to ``--json``."""
    for name, value in (("tokens", args.tokens), ("days", args.days), ("price", args.price)):
        if value is not None and not 0 < value < 1e18:
            raise InputError(f"--{name} is {value}; it must be a positive number")
    check_interruptions(args)
    args.world_size = args.least
    inputs = load_inputs(args)
    problem = inputs.problem
    sequences, rounded = batch_sequences(args.global_batch_size or DEFAULT_TOKENS, problem.run.seq_len, args.round_batch, 1)
    stated = load_cluster(args.cluster) if args.cluster else {}
    domain = int(stated.get("nvlink_domain", problem.cost.device.nvlink_domain))
    worlds = worlds_between(args.least, args.most, problem.cluster.gpus_per_node)
    with progress_bar("searching") as report:
        fixed = parse_fixed(args.fix or "")
        found = trainings(problem, sequences, args.tokens, worlds, report, domain=domain, fixed=fixed, jobs=args.jobs)
    if interrupted(args):
        found = [one.interrupted(goodput_of(args, one.result.best)) for one in found]
    device = problem.cost.device
    watts = next((sheet.power for sheet in DATASHEETS.values() if sheet.device.name == device.name), None)
    run = problem.run
    console.print(
        f"{problem.model.name}, {args.tokens:.3g} tokens, sequences of {run.seq_len}, {sequences * run.seq_len:,} tokens a "
        f"step, {run.precision}, {run.framework}, {problem.cost.device.name}\n{inputs.notes(rounded)}", markup=False,
    )  # fmt: skip
    left_out = "" if interrupted(args) else "Days without failures, checkpoints and evaluation (--mtbf counts them). "
    console.print(_answer(found, args.days), style="bold", markup=False)
    console.print(_table(found, args.price, watts))
    console.print(
        f"{left_out}Energy: GPUs at their limit of power all the while, without hosts, network and cooling.", style="dim",
    )  # fmt: skip
    if args.json:
        write_json(args.json, {"tokens": args.tokens, "plan": [_row(one, args.price, watts) for one in found]})
        console.print(f"wrote {args.json}", markup=False)


def _answer(found: Sequence[Training], days: float | None) -> str:
    if days is None:
        cheapest = min(found, key=lambda one: one.gpu_hours)
        return f"Fewest GPU-hours: {cheapest.gpu_hours:,.0f} on {cheapest.world_size} GPUs, in {cheapest.days[1]:.3g} days."
    enough = fewest(found, days)
    if enough is None:
        best = min(found, key=lambda one: one.days[1])
        return f"{days:g} days are not met: {best.world_size} GPUs take {best.days[1]:.3g} days."
    sure = next((one for one in found if one.days[2] <= days), None)
    more = f"; {sure.world_size} to be 95% sure" if sure and sure is not enough else ", with 95% probability" if sure else ""
    low, middle, high = enough.days
    return (
        f"{enough.world_size} GPUs meet {days:g} days: {middle:.3g} days ({low:.3g} to {high:.3g} with 90% probability){more}."
    )


def _table(found: Sequence[Training], price: float | None, watts: float | None) -> Table:
    table = Table()
    for name in (
        "GPUs",
        "days",
        "90% interval",
        *(["trains", "interrupted every", "checkpoint every"] if found[0].goodput else []),
        "GPU-hours",
        *(["money"] if price else []),
        *(["MWh"] if watts else []),
        "TGS",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout")
    for one in found:
        low, middle, high = one.days
        table.add_row(
            f"{one.world_size:,}", f"{middle:.3g}", f"{low:.3g} - {high:.3g}", *_interruptions(one.goodput),
            f"{one.gpu_hours:,.0f}",
            *([f"{one.gpu_hours * price:,.0f}"] if price else []), *([f"{one.energy_mwh(watts):,.0f}"] if watts else []),
            f"{one.result.best.tgs[0]:,.0f}", describe(one.result.best, 0),
        )  # fmt: skip
    return table


def _interruptions(found: Goodput | None) -> list[str]:
    if found is None:
        return []
    return [
        f"{found.share:.1%} of it",
        *(seconds(time) if math.isfinite(time) else "never" for time in (found.mean, found.interval)),
    ]


def _row(one: Training, price: float | None, watts: float | None) -> dict[str, Any]:
    return {
        "world_size": one.world_size, "days": one.days[1], "days_interval": [one.days[0], one.days[2]],
        "gpu_hours": one.gpu_hours, "money": one.gpu_hours * price if price else None,
        "energy_mwh": one.energy_mwh(watts) if watts else None, "tgs": float(one.result.best.tgs[0]),
        "layout": layout_dict(one.result.best, 0),
        "goodput": None if one.goodput is None else {
            "share": one.goodput.share, "lost": one.goodput.parts,
            "seconds_between_failures": one.goodput.mean if math.isfinite(one.goodput.mean) else None,
            "checkpoint_interval_s": one.goodput.interval if math.isfinite(one.goodput.interval) else None,
        },
    }  # fmt: skip
