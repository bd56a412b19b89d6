"""Write docs/scaling.md: how published steps grow with the GPUs, what is predicted, and the fit of SPEED_STD.

A series is a set of runs that differ in their data-parallel replicas only. The standard deviation of the speed of ranks is the
median of what the series of three sizes or more give; each series is predicted with the median of the others.
"""

from __future__ import annotations

import sys
import textwrap
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from profiler.errors import InputError
from profiler.files import write_text
from profiler.profile.profiles import known_profiles
from solver.commands.validate import CostModels
from solver.formats.cases.reading import read_cases
from solver.options.terminal_run import progress_bar
from solver.report.validate import Prediction, predict_cases, timed
from solver.step.stragglers import SPEED_STD, expected_wait

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "configs/cases/published.jsonl"
OUTPUT = ROOT / "docs/scaling.md"
#: Series of fewer sizes are predicted, but not fitted: what two runs differ by is mostly noise.
LEAST_SIZES = 3
_ONLY_SIZES = ("world_size", "dp", "zero_shard_size")
_HEAD = """# Weak scaling: how a step grows with the GPUs

Written by `make scaling`. A series is a set of published runs of one model on one machine that differ in the number of their
data-parallel replicas only; growth is the step time over that on the fewest GPUs, less 1. Predicted is the growth of
communication, and of waiting for the slowest rank (`solver/step/stragglers.py`), whose one constant, the standard deviation of
the speed of ranks, is fitted to the series of {least} sizes or more: {fitted:.4f} is the median of what each of these {n} gives
alone (the program has {used}). A series that is fitted is predicted with the median of the others ({low:.4f} to {high:.4f}).

| runs | machine | model | ZeRO over | GPUs | measured growth | predicted | off by |
|---|---|---|---|---|---|---|--:|
"""
_GROWTH = "Growth is within 3 points at every size in {good} of {all} series. The others: {others}."
_TAIL = """
{growth}
Runs whose weights are sharded over all ranks and gathered in every micro batch (LF, one of DG's under MaxText) grow faster than
this law has them, and on 1,024 GPUs IE's do whatever they share; why is not known. That ranks which gather every layer also
wait for the slowest in every layer would give all twelve such series (by 0.05 of a layer's time for each unit, the median), and
LF the times that it lacks (its median error 2.0%), but makes FM's runs, MaxText's and half of TT's 4 to 6% too slow, so it is
left out.
"""


@dataclass(frozen=True)
class Series:
    """Step times of one run on several numbers of GPUs, medians of repeated ones; arrays of shape [sizes].

    alone: predicted seconds without waiting for the slowest rank. waits: of each size, in units of the constant.
    """

    group: str
    machine: str
    model: str
    shards: str
    gpus: np.ndarray
    measured: np.ndarray
    alone: np.ndarray
    waits: np.ndarray

    def growth(self, std: float) -> np.ndarray:
        """Return the predicted growth over the first size with a constant."""
        seconds = self.alone * (1 + std * self.waits)
        return seconds / seconds[0] - 1

    @property
    def measured_growth(self) -> np.ndarray:
        return self.measured / self.measured[0] - 1

    @property
    def std(self) -> float:
        """The constant with which the logarithms of this series' growth are closest, by least squares (to first order)."""
        left = np.log1p(self.measured_growth) - np.log(self.alone / self.alone[0])
        more = self.waits - self.waits[0]
        return float(left @ more / (more @ more)) if more.any() else float("nan")


def find_series(predictions: Sequence[Prediction]) -> list[Series]:
    """Return the series among predicted runs, in order of their first run."""
    members: dict[Hashable, list[Prediction]] = defaultdict(list)
    for p in timed(predictions):
        run, cluster = p.case.strategy, tuple(sorted((key, str(value)) for key, value in p.case.cluster.items()))
        assert run is not None
        same = tuple(value for name, value in vars(run).items() if name not in _ONLY_SIZES)
        members[p.case.source, p.case.hardware, cluster, p.case.model, same, _shards(p)].append(p)
    found = [_series(group) for group in members.values()]
    return [series for series in found if len(series.gpus) > 1]


def _shards(p: Prediction) -> str:
    run = p.case.strategy
    assert run is not None
    whole = run.zero_shard_size == run.dp * run.cp
    return "nothing" if not run.zero else "all" if whole else f"{run.zero_shard_size}"


def _series(runs: Sequence[Prediction]) -> Series:
    by_size: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for p in runs:
        assert p.case.strategy is not None and p.solutions is not None
        size = p.case.strategy.world_size
        waits = expected_wait(size, p.solutions.problem.cluster.gpus_per_node)
        by_size[size].append((p.case.measured["step_s"], p.seconds / (1 + SPEED_STD * waits), waits))
    sizes = sorted(by_size)
    measured, alone, waits_of = np.array([np.median(by_size[size], axis=0) for size in sizes]).T
    first = runs[0].case
    assert first.model is not None
    names = first.source, first.hardware, first.model.name, _shards(runs[0])
    return Series(*names, np.array(sizes), measured, alone, waits_of)


def left_out(series: Sequence[Series]) -> list[float]:
    """Return the constant for each series: the median of all others that have sizes enough."""
    fitted = [s for s in series if len(s.gpus) >= LEAST_SIZES]
    return [float(np.median([other.std for other in fitted if other is not s])) for s in series]


def document(series: Sequence[Series]) -> str:
    """Return the page."""
    fitted = [s.std for s in series if len(s.gpus) >= LEAST_SIZES]
    stds = left_out(series)
    rows, bad = [], []
    for s, std in zip(series, stds, strict=True):
        predicted, measured = s.growth(std)[1:], s.measured_growth[1:]
        off = float(np.max(np.abs(predicted - measured)))
        cells = [", ".join(f"{value:+.1%}" for value in values) for values in (measured, predicted)]
        sizes = ", ".join(f"{n:,}" for n in s.gpus)
        row = (s.group, s.machine, s.model, s.shards, sizes, *cells, f"{100 * off:.1f}")
        rows.append(f"| {' | '.join(row)} |\n")
        if off > 0.03:
            bad.append(f"{s.group} {s.model} ({s.gpus[0]:,} to {s.gpus[-1]:,} GPUs)")
    head = _HEAD.format(
        least=LEAST_SIZES, fitted=np.median(fitted), n=len(fitted), used=SPEED_STD, low=min(stds), high=max(stds)
    )
    growth = _GROWTH.format(good=len(series) - len(bad), all=len(series), others=", ".join(bad) or "none")
    return head + "".join(rows) + _TAIL.format(growth=textwrap.fill(growth, 150))


def main() -> int:
    try:
        with progress_bar("predicting published runs") as report:
            predictions = predict_cases(read_cases(PUBLISHED), CostModels(known_profiles()), progress=report)
        write_text(OUTPUT, document(find_series(predictions)))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
