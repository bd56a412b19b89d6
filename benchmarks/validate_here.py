"""Test the predictions on this machine: profile it, train small layouts for real, predict them, compare.

    make validate-here          or    python benchmarks/validate_here.py --budget 5 --output prof_data

Nothing is fitted to the training steps. Writes OUTPUT/data.pt (the profile), OUTPUT/validate_here.jsonl (the measured steps,
as ``--validate`` reads them) and OUTPUT/pics/validate_here.png.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from profiler.errors import InputError
from profiler.files import replacing
from profiler.profile.profiles import OWN_PROFILE, PROF_DATA
from solver.commands.validate import CostModels
from solver.formats.cases.reading import read_cases
from solver.report.validate import Prediction, predict_cases
from solver.spec.strategy import Strategy

ROOT = Path(__file__).resolve().parent.parent
LAYOUTS = ROOT / "configs" / "validate_here"
#: A CPU rank computes on one core, and its large tensors use huge pages: touching small pages costs more than the work.
_CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}


def launcher(ranks: int) -> tuple[str, ...]:
    """Command that starts a Python program on so many ranks; one rank needs no torchrun."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    return (sys.executable, *(torchrun if ranks > 1 else ()))


@dataclass(frozen=True)
class Run:
    """One layout to train: the number of ranks, and the options of profiler.train."""

    ranks: int
    options: Mapping[str, Any]

    @property
    def arguments(self) -> list[str]:
        return [f"--{name}" if value is True else f"--{name}={value}" for name, value in self.options.items()]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--output", type=Path, default=PROF_DATA, metavar="DIR", help="where everything goes (%(default)s)")
    p.add_argument("--ranks", type=int, help="ranks to profile with (default: the GPUs of this machine, or two CPU ranks)")
    p.add_argument("--budget", type=float, default=5.0, metavar="MINUTES", help="time for the profile (%(default)g)")
    p.add_argument("--layouts", type=Path, metavar="FILE", help=f"what to train (default: {LAYOUTS.name}/gpu.json or cpu.json)")
    p.add_argument("--keep-profile", action="store_true", help="do not measure again: use OUTPUT/data.pt")
    p.add_argument("--keep-cases", action="store_true", help="do not train again: compare with OUTPUT/validate_here.jsonl")
    return p


def gpus() -> int:
    """Number of GPUs that PyTorch sees; queried in another process so that this one takes no memory on them."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def read_runs(path: Path, most_ranks: int) -> list[Run]:
    """The layouts of a file that ``most_ranks`` ranks can run. Raises InputError that names the fault."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        runs = [_run(layout, plain["models"], plain["defaults"]) for layout in plain["layouts"]]
    except OSError as error:
        raise InputError(f"{path}: cannot read the layouts: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: needs defaults, models and layouts of known models ({error!r})") from None
    return [run for run in runs if run.ranks <= most_ranks]


def _run(layout: Mapping[str, Any], models: Mapping[str, Any], defaults: Mapping[str, Any]) -> Run:
    options = {**defaults, **models[layout["model"]], **layout}
    ranks = options.pop("world_size")
    del options["model"]
    return Run(ranks, options)


def measure_profile(ranks: int, minutes: float, output: Path, environment: Mapping[str, str]) -> None:
    """Run the profiler; its progress bars go to the terminal."""
    command = (*launcher(ranks), str(ROOT / "gen_profiler_data.py"))
    job = subprocess.run([*command, f"--budget={minutes:g}", f"--output={output}"], env=environment, cwd=ROOT, check=False)
    if job.returncode:
        raise InputError(f"the profile was not measured: gen_profiler_data.py ended with status {job.returncode}")


def train(runs: Sequence[Run], hardware: Path, cases: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """Train every run in its own job and append its case to ``cases``; yields after each."""
    for run in runs:
        command = [*launcher(run.ranks), "-m", "profiler.train", *run.arguments]
        own = [f"--hardware={hardware}", f"--output={cases}"]
        job = subprocess.run([*command, *own], env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        if job.returncode not in (0, 3):  # 3: out of memory, which is a case too
            raise InputError(f"training {' '.join(run.arguments)} failed: {job.stderr.strip().splitlines()[-1][:300]}")
        yield


def train_all(runs: Sequence[Run], hardware: Path, cases: Path, environment: Mapping[str, str]) -> None:
    cases.unlink(missing_ok=True)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("layouts"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=len(runs))
        for _ in train(runs, hardware, cases, environment):
            bar.advance(task)


@dataclass(frozen=True)
class Comparison:
    """Predicted and measured seconds of the layouts that could be predicted, float64 arrays of shape [layouts]."""

    names: tuple[str, ...]
    kinds: np.ndarray  #: how each is spread over ranks, in words
    predicted: np.ndarray
    measured: np.ndarray
    low: np.ndarray  #: of the 90% prediction interval
    high: np.ndarray
    spread: np.ndarray  #: relative half range of the measured steps

    @classmethod
    def of(cls, predictions: Sequence[Prediction]) -> Comparison:
        chosen = [p for p in predictions if p.explanation is not None and "step_s" in p.case.measured]
        low, high = np.array([p.explanation.interval for p in chosen if p.explanation is not None]).reshape(-1, 2).T
        measured, spread = (np.array([float(p.case.measured[key]) for p in chosen]) for key in ("step_s", "spread"))
        names = tuple(p.case.id.removeprefix("trained:") for p in chosen)
        kinds = np.array([kind_of(p.case.strategy) for p in chosen])
        return cls(names, kinds, np.array([p.seconds for p in chosen]), measured, low, high, spread)

    @property
    def error(self) -> np.ndarray:
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> np.ndarray:
        return (self.low <= self.measured) & (self.measured <= self.high)

    @property
    def rank_correlation(self) -> float:
        """Spearman's, of predicted and measured order."""
        from scipy.stats import spearmanr

        return float(spearmanr(self.predicted, self.measured).statistic)


def kind_of(run: Strategy | None) -> str:
    """What splits the work of a layout: its rarest form of parallelism, in words."""
    if run is None or run.world_size == 1:
        return "one rank"
    if run.tp > 1:
        return "tensor parallel"
    return "pipeline" if run.pp > 1 else "FSDP" if run.zero == 3 else "data parallel"


def show(console: Console, found: Comparison) -> None:
    table = Table(title="Step time on this machine", title_justify="left")
    for name in ("layout", "measured", "spread", "predicted", "90% interval", "error"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for i, name in enumerate(found.names):
        table.add_row(
            name,
            f"{found.measured[i]:.3f} s",
            f"{found.spread[i]:.1%}",
            f"{found.predicted[i]:.3f} s",
            f"{found.low[i]:.3f}-{found.high[i]:.3f} s",
            f"{found.error[i]:+.1%}",
        )
    console.print(table)
    off = np.abs(found.error)
    console.print(
        f"{len(off)} layouts: |error| median {np.median(off):.1%}, worst {off.max():.1%}; mean {found.error.mean():+.1%};\n"
        f"rank correlation {found.rank_correlation:.3f}; {found.inside.mean():.0%} inside the 90% interval"
    )


def draw(found: Comparison, device: str, path: Path) -> None:
    """Predicted over measured seconds, with the predicted interval and the measured range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(figsize=(7, 6.5), layout="constrained")
    reach = np.array([min(found.low.min(), found.measured.min()) / 1.2, max(found.high.max(), found.measured.max()) * 1.2])
    axes.fill_between(reach, reach * 0.85, reach * 1.15, color="0.9", label="within 15%")
    axes.plot(reach, reach, color="0.4", linewidth=1, label="predicted = measured")
    bars = {
        "xerr": found.measured * found.spread,
        "yerr": np.stack([found.predicted - found.low, found.high - found.predicted]),
    }
    axes.errorbar(found.measured, found.predicted, **bars, fmt="none", ecolor="0.5", elinewidth=0.7)
    for kind, mark in zip(np.unique(found.kinds), "osD^v", strict=False):
        chosen = found.kinds == kind
        axes.scatter(found.measured[chosen], found.predicted[chosen], s=26, marker=mark, label=kind, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=reach, ylim=reach, xlabel="measured step (s)", ylabel="predicted step (s)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    median = np.median(np.abs(found.error))
    axes.set_title(f"{device}: {len(found.names)} training layouts\nmedian error {median:.1%}, nothing fitted on these steps")
    axes.legend(loc="upper left", title="bars: 90% interval, range of steps")
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 2 after printing one sentence where something could not be measured."""
    args = parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    try:
        compare(args, console)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def compare(args: argparse.Namespace, console: Console) -> None:
    """Measure what is not kept, predict, and report."""
    found_gpus = gpus()
    ranks = args.ranks or found_gpus or 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **({} if found_gpus else _CPU_ENVIRONMENT)}
    profile, cases = (args.output / OWN_PROFILE).resolve(), args.output / "validate_here.jsonl"
    runs = read_runs(args.layouts or LAYOUTS / ("gpu.json" if found_gpus else "cpu.json"), ranks)
    if not args.keep_profile:
        measure_profile(ranks, args.budget, args.output, environment)
    if not args.keep_cases:
        train_all(runs, profile, cases, environment)
    models = CostModels(())
    predictions = predict_cases(read_cases(cases), models)
    for prediction in predictions:
        if prediction.skipped:
            console.print(f"{prediction.case.id}: not predicted, {prediction.skipped}", markup=False)
    found = Comparison.of(predictions)
    show(console, found)
    device = models(str(profile), None)
    picture = args.output / "pics" / "validate_here.png"
    draw(found, device.device.name if device else "this machine", picture)
    console.print(f"wrote {cases} and {picture}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
