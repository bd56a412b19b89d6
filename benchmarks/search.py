"""How fast the search is: layouts per second, wall time of the main job from process start, peak memory, scaling.

    python benchmarks/search.py [--config FILE] [--world_sizes 8 64 128 ...] [--json OUT]

Each world size runs in its own process, on one core, with cached fits (the first start creates them). Peers' figures are for
comparison: measured on one core of a 2-core machine, candidates that they estimate completely per second.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from profiler.files import write_text

ROOT = Path(__file__).resolve().parent.parent
WORLD_SIZES = (8, 64, 128, 1024, 16384, 131072)
DENSE = ROOT / "configs" / "7B_internlm2.py"
#: A model whose layouts have all axes, and the worlds and the batch that it is searched on.
EXPERTS, EXPERT_WORLDS, EXPERT_TOKENS = ROOT / "configs" / "models" / "deepseek_v3.json", (2048, 16384), 16384 * 4096
PEERS = {"InternLM Simulator": 2025.0, "Calculon": 500.0, "SimuMax": 25.0}


def measure(config: Path, world_size: int, tokens: int) -> dict[str, float | str]:
    """One search in this process: its own figures and the peak memory of this process."""
    sys.path.insert(0, str(ROOT))
    from solver import load_problem, search
    from solver.report.describe import describe

    problem = load_problem(config, world_size, profile="h100_sxm")
    result = search(problem, tokens // problem.run.seq_len)
    return {
        "world_size": world_size,
        "layouts_priced": result.layouts_estimated,
        "feasible": result.feasible,
        "seconds": result.seconds,
        "layouts_per_second": result.layouts_per_second,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "best_tgs": float(result.best.tgs[0]),
        "best": describe(result.best, 0),
    }


def one_core() -> None:
    """Keep this process and its children on one core, with one thread each."""
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


_REPEATS = 3


def main_job_seconds() -> list[float]:
    """Wall seconds of the main job, from process start to end, with cached fits."""
    command = [
        sys.executable,
        "simulation_train_formulaic.py",
        "--run_all_solu",
        "--world_size",
        "128",
        "--profile",
        "h100_sxm",
    ]
    times = []
    for _ in range(1 + _REPEATS):
        start = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help="one config, instead of the shipped dense model and the one with experts")
    parser.add_argument("--world_sizes", type=int, nargs="+", default=list(WORLD_SIZES))
    parser.add_argument("--tokens", type=int, default=4_194_304, help="global batch in tokens (default 4194304)")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.config or DENSE, args.one, args.tokens)))
        return
    one_core()
    wall = main_job_seconds()
    jobs = [(args.config or DENSE, world, args.tokens) for world in args.world_sizes]
    if not args.config:
        jobs += [(EXPERTS, world, EXPERT_TOKENS) for world in EXPERT_WORLDS]
    rows = []
    for config, world, tokens in jobs:
        command = [sys.executable, __file__, "--config", str(config), "--one", str(world), "--tokens", str(tokens)]
        output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        rows.append({"config": config.stem, **json.loads(output.splitlines()[-1])})
    show(rows, wall)
    if args.json:
        write_text(args.json, json.dumps({"main_job_seconds": wall, "worlds": rows}, indent=1) + "\n")


def show(rows: list[dict[str, float]], wall: list[float]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 170)
    table = Table(title="Search on H100, one core", title_justify="left")
    for name in (
        "config",
        "GPUs",
        "layouts estimated",
        "feasible",
        "seconds",
        "layouts/s",
        "peak MiB",
        *(f"x {p}" for p in PEERS),
        "best TGS",
    ):
        table.add_column(name, justify="right")
    table.add_column("best layout")
    for r in rows:
        ratios = [f"{r['layouts_per_second'] / rate:,.0f}" for rate in PEERS.values()]
        table.add_row(
            str(r["config"]),
            f"{r['world_size']:,}",
            f"{r['layouts_priced']:,}",
            f"{r['feasible']:,}",
            f"{r['seconds']:.2f}",
            f"{r['layouts_per_second']:,.0f}",
            f"{r['peak_memory_mib']:.0f}",
            *ratios,
            f"{r['best_tgs']:,.0f}",
            str(r["best"]),
        )
    console.print(table)
    console.print(f"main job (128 GPUs), process start to end: median {wall[len(wall) // 2]:.2f} s, worst {wall[-1]:.2f} s")


if __name__ == "__main__":
    main()
