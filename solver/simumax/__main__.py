"""Command line for SimuMax's files: python -m solver.simumax --model M.json --strategy S.json --system X.json."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from profiler.argument_parser import ArgumentParser
from profiler.errors import InputError, printable
from profiler.units import GIB
from solver.options.terminal_run import run
from solver.report.output import write_json
from solver.simumax.perf import PerfLLM
from solver.simumax.search import RECOMPUTE_TYPES

_SHOWN = ("duration_time_per_iter", "throughput_per_accelerator", "mfu_6nd_with_attn", "mfu_6nd", "mfu")


def parser() -> argparse.ArgumentParser:
    p = ArgumentParser(prog="python -m solver.simumax", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", type=Path, required=True, help="SimuMax's model file")
    p.add_argument("--strategy", type=Path, required=True, help="SimuMax's strategy file")
    p.add_argument("--system", required=True, help="SimuMax's system file, or a profile of this program (h100_sxm)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results under SimuMax's names, numbers in SI units")
    p.add_argument("--trace", type=Path, metavar="FOLDER", help="write tracing_logs.json, one step for Chrome's trace viewer")
    p.add_argument("--search", action="store_true", help="search the fastest strategy that fits; other fields stay as they are")
    search = p.add_argument_group("search")
    search.add_argument("--world_size", type=int, help="GPUs (default: the strategy's)")
    search.add_argument("--gmi_error", type=float, default=6.0, help="GiB of every accelerator that are kept free (default: 6)")
    search.add_argument("--micro_batch_size", type=int, help="sequences of a micro batch (default: the strategy's)")
    search.add_argument("--global_batch_size", type=int, help="sequences of a step (default: the strategy's)")
    for name in ("tp", "ep", "pp"):
        search.add_argument(f"--{name}_search_list", type=int, nargs="+", metavar="SIZE", help=f"sizes of {name}")
    search.add_argument("--use_etp", action="store_true", help="tensor parallelism splits experts as well")
    search.add_argument("--recompute_search_type", nargs="+", default=list(RECOMPUTE_TYPES[:3]), choices=RECOMPUTE_TYPES)
    search.add_argument("--allocated_memory", action="store_true", help="what is allocated must fit, not what is reserved")
    search.add_argument("--dump_path", type=Path, metavar="FOLDER", help="write the strategies as CSV")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status (2 for input that cannot be used)."""
    args = parser().parse_args(arguments)
    return run(lambda console: _search(args, console) if args.search else _estimate(args, console))


def _configured(args: argparse.Namespace) -> PerfLLM:
    perf = PerfLLM()
    perf.configure(strategy_config=args.strategy, model_config=args.model, system_config=args.system)
    return perf


def _estimate(args: argparse.Namespace, console: Console) -> None:
    perf = _configured(args)
    perf.run_estimate()
    cost, memory = perf.analysis_cost(), perf.analysis_mem()
    for note in perf.notes:
        console.print(printable(note, 1000), markup=False)
    for name in _SHOWN:
        console.print(f"{name}: {cost[name]:.6g}", markup=False)
    for name in ("peak_mem", "peak_mem_with_reserved"):
        for stage, value in perf.get_pp_stage_peak_mem(memory, name).items():
            console.print(f"{name} of {stage}: {value:.6g} bytes, {value / GIB:.2f} GiB", markup=False)
    if args.json:
        write_json(args.json, {"cost_result": cost.data, "mem_result": memory.data, "notes": list(perf.notes)})
        console.print(f"wrote {args.json}", markup=False)
    if args.trace:
        console.print(f"wrote {perf.simulate(args.trace)}", markup=False)


def _search(args: argparse.Namespace, console: Console) -> None:
    perf = _configured(args)
    every: dict[str, list[Any]] = {}
    own = perf.strategy
    best = perf.search_best_parallel_strategy(
        world_size=args.world_size or own.world_size,
        gmi_error=args.gmi_error,
        micro_batch_size=args.micro_batch_size or own.micro_batch_size,
        global_batch_size=args.global_batch_size or own.global_batch_size,
        all_search_result=every,
        tp_search_list=args.tp_search_list,
        ep_search_list=args.ep_search_list,
        pp_search_list=args.pp_search_list,
        use_etp=args.use_etp,
        recompute_search_type=args.recompute_search_type,
        use_reserved_memory=not args.allocated_memory,
        dump_path=args.dump_path,
    )
    if not best:
        raise InputError("no strategy of this search fits; keep less memory free, or give more GPUs or other sizes")
    for name, value in best.items():
        console.print(f"{name}: {printable(str(value), 300)}", markup=False)
    if args.json:
        write_json(args.json, {"best_strategy": best, "all_search_result": every})
        console.print(f"wrote {args.json}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
