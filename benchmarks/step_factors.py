"""Fit the part of the sustained-clock derating that only training steps show.

    python benchmarks/step_factors.py [--cases FILE.jsonl] [--output prof_data/step_factors.json]

One factor per device is fitted to measured runs, tested on runs that were left out, and kept where it helps there. A factor
multiplies the times of GEMMs and attention. It is the median over groups of runs (one publication or one collection each) of
the group's median; where a device has one group only, over its layouts. The test leaves each group (layout) out in turn. The
factor is kept if there are three or more, the mean |error| of what was left out falls by a fifth or more, and clocks and
frameworks can explain a factor of this size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from predictor.cost_model import CostModel
from predictor.kernels.derating import STEP_FACTORS
from predictor.kernels.derating import step_factors as kept_factors
from profiler.errors import InputError
from profiler.files import write_text
from profiler.profile.profiles import shipped_profiles
from solver.command_line import CostModels as ShippedModels
from solver.formats.cases import Case, read_cases
from solver.report.validate import CostModels, Prediction, predict_cases, timed
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

PUBLISHED = Path(__file__).resolve().parent.parent / "configs" / "cases" / "published.jsonl"
LEAST_GAIN = 0.2  #: of the mean |error| on runs left out
LEAST_FOLDS = 3
PLAUSIBLE = (0.7, 1.5)  #: outside, something other than the sustained speed is wrong
_STEP = 0.05  #: the step time is taken as linear in the factor between 1 and 1 plus this


@dataclass(frozen=True)
class DeviceFit:
    """The factor that the runs on one device give.

    by_fold: factor of each fold. error_without: mean |predicted / measured - 1| without a factor. error_left_out: the same for
    runs left out, each with the factor of the other folds.
    """

    hardware: str
    by_fold: Mapping[str, float]
    runs: int
    error_without: float
    error_left_out: float

    @property
    def fitted(self) -> float:
        return float(np.median(list(self.by_fold.values())))

    @property
    def kept(self) -> bool:
        helps = self.error_left_out <= (1 - LEAST_GAIN) * self.error_without
        return helps and len(self.by_fold) >= LEAST_FOLDS and PLAUSIBLE[0] <= self.fitted <= PLAUSIBLE[1]

    def leaving_out(self, fold: str) -> float:
        """The factor that the other folds give; 1 where there are none."""
        others = [factor for name, factor in self.by_fold.items() if name != fold]
        return float(np.median(others)) if others else 1.0


def scaled(models: CostModels, factors: Mapping[str, float]) -> CostModels:
    """``models`` with the times of GEMMs and attention multiplied by ``factors`` (by hardware)."""

    def model(hardware: str, network_bandwidth: float | None) -> CostModel | None:
        found = models(hardware, network_bandwidth)
        return found and replace(found, derating=found.derating * factors.get(hardware, 1.0))

    return model


def folds(cases: Sequence[Case]) -> dict[str, str]:
    """Case id -> fold that it is left out with; all ``cases`` ran on one device."""
    several = len({case.source for case in cases}) > 1
    return {case.id: case.source if several else _layout(case) for case in cases}


def _layout(case: Case) -> str:
    s = case.strategy
    if s is None:
        return "skipped"
    return f"{case.model.name} tp{s.tp} pp{s.pp} cp{s.cp} on {s.world_size}"


def fit_device(cases: Sequence[Case], models: CostModels) -> DeviceFit | None:
    """The factor of the device that all ``cases`` ran on; None where no run determines it.

    models: without factors.
    """
    hardware, fold = cases[0].hardware, folds(cases)
    base, more = (timed(predict_cases(cases, scaled(models, {hardware: f}))) for f in (1.0, 1.0 + _STEP))
    implied: dict[str, list[float]] = {}
    for one, other in zip(base, more, strict=True):
        slope = (other.seconds - one.seconds) / _STEP
        if slope > 0:  # else the step time does not depend on GEMMs
            implied.setdefault(fold[one.case.id], []).append(1 + (one.case.measured["step_s"] - one.seconds) / slope)
    if not implied:
        return None
    fit = DeviceFit(hardware, {name: float(np.median(v)) for name, v in implied.items()}, len(base), _error(base), 0.0)
    return replace(fit, error_left_out=_error(timed(predict_left_out(cases, models, fit))))


def predict_left_out(cases: Sequence[Case], models: CostModels, fit: DeviceFit) -> list[Prediction]:
    """Predictions in the order of ``cases``, each with the factor of the folds that it is not in.

    models: without factors.
    """
    fold = folds(cases)
    return _predict_each(cases, models, [fit.leaving_out(fold[case.id]) for case in cases])


def _predict_each(cases: Sequence[Case], models: CostModels, factors: Sequence[float]) -> list[Prediction]:
    """Predictions in the order of ``cases``, each by ``models`` times its factor.

    Cases of equal factors are predicted together.
    """
    found: dict[int, Prediction] = {}
    for factor in dict.fromkeys(factors):
        chosen = [i for i, own in enumerate(factors) if own == factor]
        together = [cases[i] for i in chosen]
        predictions = predict_cases(together, scaled(models, {case.hardware: factor for case in together}))
        found |= dict(zip(chosen, predictions, strict=True))
    return [found[i] for i in range(len(cases))]


def predict_held_out(cases: Sequence[Case], models: CostModels, fitted_on: Path = PUBLISHED) -> list[Prediction]:
    """Predictions in the order of ``cases``, by ``models`` with their kept factors.

    A case that a factor was fitted on gets what the other folds give. fitted_on: the runs that the kept factors come from.
    """
    kept = {hardware: factor for hardware, factor in kept_factors().items() if factor != 1.0}
    published, others = read_cases(fitted_on), {}
    for fit in fit_devices([case for case in published if case.hardware in kept], models):
        fold = folds(_timed_on(published, fit.hardware))
        others |= {case: fit.leaving_out(name) / kept[fit.hardware] for case, name in fold.items()}
    return _predict_each(cases, models, [others.get(case.id, 1.0) for case in cases])


def fit_devices(cases: Sequence[Case], models: CostModels) -> list[DeviceFit]:
    """Fit each device that has timed cases and a profile; ``models`` may include the factors that are kept today."""
    plain = scaled(models, {name: 1 / factor for name, factor in kept_factors().items()})
    fits = []
    for hardware in sorted({case.hardware for case in cases}):
        there = _timed_on(cases, hardware)
        if there and plain(hardware, None) is not None:
            fits.append(fit_device(there, plain))
    return [fit for fit in fits if fit]


def _timed_on(cases: Sequence[Case], hardware: str) -> list[Case]:
    return fitted_runs([case for case in cases if case.hardware == hardware and "step_s" in case.measured])


def fitted_runs(cases: Sequence[Case]) -> list[Case]:
    """Return the runs that a factor is fitted to: dense models in 16 bits.

    Their GEMMs and attention are what the profile measured; fp8 casts and the exchange of experts would bend the factor.
    """
    return [case for case in cases if case.model and case.strategy and _dense_16_bit(case.model, case.strategy)]


def _dense_16_bit(model: ModelSpec, run: Strategy) -> bool:
    return not model.is_mixture_of_experts and run.precision in ("bf16", "fp16")


def _error(predictions: Sequence[Prediction]) -> float:
    return float(np.mean([abs(p.seconds / p.case.measured["step_s"] - 1) for p in predictions]))


def as_json(fits: Sequence[DeviceFit]) -> str:
    entries = {
        fit.hardware: {
            "factor": round(fit.fitted, 4) if fit.kept else 1.0,
            "fitted": round(fit.fitted, 4),
            "runs": fit.runs,
            "mean_error_without": round(fit.error_without, 4),
            "mean_error_left_out": round(fit.error_left_out, 4),
            "by_fold": {name: round(factor, 4) for name, factor in sorted(fit.by_fold.items())},
        }
        for fit in fits
    }
    about = "Factors on the times of GEMMs and attention, fitted to training steps by benchmarks/step_factors.py"
    return json.dumps({"about": about, "profiles": entries}, indent=1) + "\n"


def show(fits: Sequence[DeviceFit], console: Console) -> None:
    table = Table(
        "device", "runs", "folds", "fitted", "error without", "error left out", "kept", title="Factors of training steps"
    )
    for f in fits:
        table.add_row(f.hardware, str(f.runs), str(len(f.by_fold)), f"{f.fitted:.3f}", f"{f.error_without:.1%}",
                      f"{f.error_left_out:.1%}", "yes" if f.kept else "no")  # fmt: skip
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=PUBLISHED, help="measured runs (default: the shipped ones)")
    parser.add_argument("--output", type=Path, default=STEP_FACTORS)
    args = parser.parse_args(arguments)
    try:
        cases = read_cases(args.cases)
        with Console(stderr=True).status(f"predicting {len(cases):,} runs with and without factors"):
            fits = fit_devices(cases, ShippedModels(shipped_profiles()))
        if not fits:
            raise InputError(f"{args.cases}: no case has a step time and hardware that a profile ships for")
        show(fits, Console())
        write_text(args.output, as_json(fits))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
