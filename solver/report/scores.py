"""How far predictions of measured runs are off: errors by source, fits against out of memory, regret."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.units import GIB
from solver.formats.cases.reading import Case
from solver.report.validate import Prediction, timed
from solver.spec.model_size import flops_per_token


@dataclass(frozen=True)
class Score:
    """Errors of one group of cases: predicted / measured - 1."""

    n: int
    median: float
    p90: float
    bias: float
    coverage: float  #: share of the measured values that lie in the 90% prediction interval
    half_width: float  #: median of the interval's upper end over the prediction, less 1

    @classmethod
    def of(cls, ratio: np.ndarray, inside: np.ndarray | None = None, widths: np.ndarray | None = None) -> Score:
        error = ratio - 1
        covered = float(inside.mean()) if inside is not None else float("nan")
        half = float(np.median(widths)) if widths is not None else float("nan")
        quantile = float(np.quantile(abs(error), 0.9))
        return cls(len(ratio), float(np.median(abs(error))), quantile, float(error.mean()), covered, half)


def time_scores(predictions: Sequence[Prediction]) -> dict[str, Score]:
    """Return step-time errors per source, and over all cases."""

    def score(members: Sequence[Prediction]) -> Score:
        measured = np.array([p.case.measured["step_s"] for p in members])
        low, high = np.array([p.explanation.interval for p in members if p.explanation]).T
        predicted = np.array([p.seconds for p in members])
        return Score.of(predicted / measured, (measured >= low) & (measured <= high), high / predicted - 1)

    return _per_source(timed(predictions), score)


def flops_per_gpu(case: Case) -> float:
    """Return the model FLOPs per GPU per step; a third more where whole layers are recomputed. NaN where not expressible."""
    run = case.strategy
    if case.model is None or run is None:
        return float("nan")
    forward_share = 1 / 2 if run.lora_rank else 1 / 3
    again = 1.0 + forward_share * (run.recompute == "full")
    return run.tokens * flops_per_token(case.model, run.attended_tokens, frozen=run.lora_rank > 0) * again / run.world_size


def constant_mfu_scores(predictions: Sequence[Prediction]) -> dict[str, Score]:
    """Return the errors of the constant-MFU baseline.

    It assumes one FLOP rate per hardware: the median over these same cases, including the case being scored.
    """
    members = timed(predictions)
    rates: dict[str, list[float]] = defaultdict(list)
    for p in members:
        rates[p.case.hardware].append(flops_per_gpu(p.case) / p.case.measured["step_s"])
    rate = {hardware: float(np.median(found)) for hardware, found in rates.items()}

    def score(group: Sequence[Prediction]) -> Score:
        seconds = np.array([flops_per_gpu(p.case) / rate[p.case.hardware] for p in group])
        return Score.of(seconds / np.array([p.case.measured["step_s"] for p in group]))

    return _per_source(members, score)


def memory_scores(predictions: Sequence[Prediction]) -> dict[str, Score]:
    """Return peak-memory errors per source, and over all cases."""

    def score(members: Sequence[Prediction]) -> Score:
        measured = np.array([p.case.measured["peak_memory_gib"] * GIB for p in members])
        return Score.of(np.array([p.memory_bytes for p in members]) / measured)

    return _per_source([p for p in predictions if not p.skipped and "peak_memory_gib" in p.case.measured], score)


def _per_source(members: Sequence[Prediction], score: Callable[[Sequence[Prediction]], Score]) -> dict[str, Score]:
    sources: dict[str, list[Prediction]] = defaultdict(list)
    for p in members:
        sources[p.case.source].append(p)
    scores = {source: score(group) for source, group in sorted(sources.items())}
    return {**scores, "all": score(members)} if members else {}


def confusion(predictions: Sequence[Prediction]) -> dict[str, int]:
    """Return the counts of fit / OOM, measured against predicted; a run with a step time or a peak fitted."""
    table = {"fit, predicted fit": 0, "fit, predicted OOM": 0, "OOM, predicted fit": 0, "OOM, predicted OOM": 0}
    for p in predictions:
        if p.fits is None or not p.case.measured.keys() & {"step_s", "peak_memory_gib", "out_of_memory"}:
            continue
        real = "OOM" if p.case.measured.get("out_of_memory") else "fit"
        table[f"{real}, predicted {'fit' if p.fits else 'OOM'}"] += 1
    return table


@dataclass(frozen=True)
class Regret:
    """Extra cost of the first-ranked layout over the best, in families of cases that differ only in their layout."""

    families: int
    mean: float
    worst: float


#: Runs that a family needs for its best layout to say something.
_FAMILY = 3


def regret(predictions: Sequence[Prediction]) -> dict[str, Regret]:
    """Return per source the measured time of the layout ranked first over the measured best, minus one."""
    families: dict[Any, list[Prediction]] = defaultdict(list)
    for p in predictions:
        if p.case.strategy is None or p.skipped or "step_s" not in p.case.measured:
            continue
        s = p.case.strategy
        constants = (p.case.source, p.case.hardware, p.case.model, s.world_size, s.seq_len, s.tokens, s.precision, s.framework)
        families[constants].append(p)
    costs: dict[str, list[float]] = defaultdict(list)
    for (source, *_), members in families.items():
        if len(members) >= _FAMILY:
            measured = [float(p.case.measured["step_s"]) for p in members]
            chosen = min(range(len(members)), key=lambda i: members[i].seconds)
            costs[source].append(measured[chosen] / min(measured) - 1)
    return {source: Regret(len(c), float(np.mean(c)), float(np.max(c))) for source, c in sorted(costs.items())}


def worst(predictions: Sequence[Prediction], count: int = 10) -> list[Prediction]:
    """Return the cases with the largest factor between predicted and measured step time."""
    return sorted(timed(predictions), key=lambda p: -abs(np.log(p.seconds / p.case.measured["step_s"])))[:count]
