"""Held-out tests of the kernel models: fitted without some measurements, tested on exactly those."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from predictor.accuracy.score import Score, score
from predictor.estimate import Estimate
from predictor.kernels.attn_rows import main_rows, shape_of
from predictor.kernels.dtypes import FAMILIES
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.gemm_fit import is_training_like, own_forward_rows
from predictor.kernels.linear import LinearModel
from predictor.kernels.memory_bound import MemoryBoundModel
from predictor.kernels.residual import ROWS_FOR_TREES
from predictor.kernels.sources import mostly_serving
from profiler.profile.profile import Profile, Table, gemm_flops

#: Sizes held out to test between and next to the measured model dims, and between measured lengths.
UNSEEN_DIMS = (2560, 3584, 5120, 10240)
UNSEEN_LENGTHS = (1536, 2048, 6144, 8192)
LEAST_ROWS = 50  #: fewer held-out rows are not meaningful
_FOLDS = 5
_LEAST_FITTED = LEAST_ROWS - LEAST_ROWS // _FOLDS  # left for a fit in five folds of LEAST_ROWS rows
_IN_FOLDS = "five folds"
_SEED = 0

#: (rows to fit, rows to predict) -> an Estimate of the latter
Predictor = Callable[[Table, Table], Estimate]


@dataclass(frozen=True, eq=False)
class Split:
    """A way to hold rows out. folds: bool masks, shape [rows]; each is left out of its own fit and then predicted."""

    name: str
    folds: tuple[np.ndarray, ...]

    @property
    def held(self) -> np.ndarray:
        """The rows that some fold holds out, shape [rows]."""
        return np.any(self.folds, axis=0)


@dataclass(frozen=True)
class Trial:
    """A planned score: ``split`` scored on the rows where ``scored`` (bool, shape [rows]) is true."""

    regime: str
    scored: np.ndarray
    split: Split

    @property
    def asked(self) -> np.ndarray:
        """Rows held out and scored, shape [rows]."""
        return self.split.held & self.scored

    @property
    def telling(self) -> bool:
        """Whether enough rows are held out and scored, and enough are left for every fit."""
        left = min(int((~fold & self.scored).sum()) for fold in self.split.folds)
        return int(self.asked.sum()) >= LEAST_ROWS and left >= _LEAST_FITTED


def linear_family(profile: Profile) -> str:
    """The arithmetic (predictor.kernels.linear.FAMILIES) with the most forward GEMMs.

    "bf16", all 16-bit floats, wins ties. Only arithmetics that the device has a peak for count; the rest have no fit.
    """
    table = profile.table("linear")
    estimated = dict.fromkeys(["bf16", *(FAMILIES.get(name, name) for name in profile.device.peak_flops)])
    return max(estimated, key=lambda family: len(_forward_of(table, family)))


def linear_rows(profile: Profile) -> Table:
    """Forward GEMMs of ``linear_family`` that this profile's model is fitted to and tested with."""
    return _forward_of(profile.table("linear"), linear_family(profile))


def formats(rows: Table) -> str:
    """The number formats of ``rows`` in words: "fp32", "bf16 and fp16"; "" without rows."""
    *others, last = [str(name) for name in np.unique(rows["dtype"])] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def linear_scores(profile: Profile) -> list[Score]:
    """Scores of LinearModel on this profile's own forward rows of one arithmetic; empty where there are too few.

    Training-like rows have m >= 1024 and n, k >= 512. The model is fitted to every row that is not held out; the naive
    prediction only to the rows of the regime, which favours it.
    """
    rows, family = linear_rows(profile), linear_family(profile)
    flops = gemm_flops(rows)
    training_like = is_training_like(rows["m"], rows["n"], rows["k"])

    def predict(fitted: Table, asked: Table) -> Estimate:
        return LinearModel.fit(fitted, profile.device).predict(asked["m"], asked["n"], asked["k"], dtype=family)

    return run_trials("linear", rows, flops, _linear_trials(rows, flops, training_like), predict)


def quantised_linear_rows(profile: Profile) -> Table:
    """Forward fp8 GEMMs beside those of the profile's own arithmetic; no row where fp8 is that arithmetic or not known."""
    rows = _forward_of(profile.table("linear"), "fp8")
    known = "fp8" in profile.device.peak_flops and linear_family(profile) != "fp8"
    return rows.where(np.full(len(rows), known))


def quantised_linear_scores(profile: Profile) -> list[Score]:
    """Scores of LinearModel on the fp8 rows, with the cast that their source timed; empty where there are too few."""
    rows, others = quantised_linear_rows(profile), linear_rows(profile)
    if not len(rows):
        return []
    flops = gemm_flops(rows)
    training_like = is_training_like(rows["m"], rows["n"], rows["k"])

    def predict(fitted: Table, asked: Table) -> Estimate:
        columns = {name: np.concatenate([others[name], fitted[name]]) for name in others.columns}
        model = LinearModel.fit(Table(columns), profile.device)
        found = model.predict(asked["m"], asked["n"], asked["k"], dtype="fp8")
        return found._replace(seconds=found.seconds + model.cast_seconds(asked["m"], asked["k"]))

    return run_trials("linear fp8, with its cast", rows, flops, _linear_trials(rows, flops, training_like), predict)


def flash_attn_scores(profile: Profile) -> list[Score]:
    """Scores of FlashAttnModel on the forward rows of this profile's main kernel.

    The predictions are of serving calls where most rows are. Calls of seq >= 512 are scored; calls of all lengths where those
    are too few.
    """
    rows = main_rows(profile.table("flash_attn"))
    if not len(rows):
        return []
    flops = shape_of(rows).flops
    serving = mostly_serving(rows)

    def predict(fitted: Table, asked: Table) -> Estimate:
        return FlashAttnModel.fit(fitted, profile.device).predict(*shape_of(asked), serving=serving)

    return run_trials("flash_attn", rows, flops, _attn_trials(rows, flops), predict)


def memory_bound_scores(profile: Profile) -> list[Score]:
    """Scores of MemoryBoundModel over the rows of all kinds; empty where there are too few.

    In five folds only kinds count that still have a fit of their own when a fold is held out.
    """
    rows = profile.table("memory_bound")
    rows = rows.where(rows["bytes"] > 0)
    if not len(rows):
        return []

    def fit(fitted: Table) -> MemoryBoundModel:
        return MemoryBoundModel.fit(fitted, profile.device)

    def predict(fitted: Table, asked: Table) -> Estimate:
        return by_kind(fit(fitted), asked)

    trials = _memory_trials(rows, lambda fold: fit(rows.where(~fold)).kinds)
    return run_trials("memory_bound", rows, rows["bytes"].astype(np.float64), trials, predict)


def caveat(rows: int, scores: Sequence[Score]) -> str:
    """A warning where a fit to all ``rows`` learns a correction but its folds are too small to learn one; else ""."""
    left = rows - math.ceil(rows / _FOLDS)
    if not left < ROWS_FOR_TREES <= rows or all(s.split != _IN_FOLDS for s in scores):
        return ""
    return (
        f"in {_IN_FOLDS} {left} measurements are left to fit, too few for the correction learnt from all {rows}: "
        "these errors are of the physical model without it"
    )


def by_kind(fit: MemoryBoundModel, rows: Table) -> Estimate:
    """Estimates of ``fit`` for memory_bound rows of any kinds, shape [rows]."""
    seconds, std, basis = np.empty(len(rows)), np.empty(len(rows)), np.empty(len(rows), dtype=np.int8)
    for kind in np.unique(rows["kind"]):
        of_kind = rows["kind"] == kind
        seconds[of_kind], std[of_kind], basis[of_kind] = fit.predict(str(kind), rows["bytes"][of_kind])
    return Estimate(seconds, std, basis)


def naive_seconds(flops: np.ndarray, seconds: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Time from total FLOPs only: the achieved FLOP/s interpolated over log FLOPs, as simple simulators do."""
    sizes, at = np.unique(flops, return_inverse=True)
    rate = np.bincount(at, weights=np.log(flops / seconds)) / np.bincount(at)
    return asked / np.exp(np.interp(np.log(asked), np.log(sizes), rate))


def random_fifth(rows: int) -> Split:
    """A split that holds out one random fifth of this number of rows."""
    return Split("random fifth", (np.random.default_rng(_SEED).random(rows) < 1 / _FOLDS,))


def five_folds(strata: np.ndarray) -> Split:
    """A split that holds out every row once, a fifth of each stratum at a time. strata: labels, shape [rows]."""
    random, fold = np.random.default_rng(_SEED), np.empty(len(strata), dtype=np.int64)
    for stratum in np.unique(strata):
        at = np.flatnonzero(strata == stratum)
        # strata start at different folds: otherwise the rows left over would all be in the first
        fold[random.permutation(at)] = (np.arange(len(at)) + random.integers(_FOLDS)) % _FOLDS
    return Split(_IN_FOLDS, tuple(fold == i for i in range(_FOLDS)))


def enough(fifth: Split, folds: Split, scored: np.ndarray) -> Split:
    """``fifth`` where it holds out enough rows of ``scored`` (bool, shape [rows]), else ``folds``."""
    return fifth if (fifth.held & scored).sum() >= LEAST_ROWS else folds


def run_trials(op: str, rows: Table, size: np.ndarray, trials: Iterable[Trial], predict: Predictor) -> list[Score]:
    """The scores of those ``trials`` that have enough rows.

    size: FLOPs or bytes, shape [rows], for the naive prediction.
    """
    found: dict[Split, Estimate] = {}  # one split may be scored on several regimes
    scores = []
    for trial in trials:
        if not trial.telling:
            continue
        split, asked = trial.split, trial.asked
        if split not in found:
            found[split] = held_out(rows, split, predict)
        naive = _held_out_naive(size, rows["seconds"], trial)
        seconds, std = found[split].seconds[asked], found[split].relative_std[asked]
        scores.append(score(op, trial.regime, split.name, rows["seconds"][asked], seconds, std, naive[asked]))
    return scores


def held_out(rows: Table, split: Split, predict: Predictor) -> Estimate:
    """Prediction of every held-out row by a fit that has not seen it, shape [rows]; NaN for rows that no fold holds out."""
    seconds, std = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    basis = np.zeros(len(rows), dtype=np.int8)
    for fold in split.folds:
        seconds[fold], std[fold], basis[fold] = predict(rows.where(~fold), rows.where(fold))
    return Estimate(seconds, std, basis)


def _held_out_naive(size: np.ndarray, seconds: np.ndarray, trial: Trial) -> np.ndarray:
    naive = np.full(len(size), np.nan)
    for fold in trial.split.folds:
        seen, asked = trial.scored & ~fold, trial.scored & fold
        naive[asked] = naive_seconds(size[seen], seconds[seen], size[asked])
    return naive


def _forward_of(table: Table, family: str) -> Table:
    of_family = np.array([FAMILIES.get(d) == family for d in table["dtype"]], dtype=bool)
    return own_forward_rows(table.where(of_family))


def _linear_trials(rows: Table, flops: np.ndarray, training_like: np.ndarray) -> Iterator[Trial]:
    everything, random = np.ones(len(rows), dtype=bool), (random_fifth(len(rows)), five_folds(training_like))
    yield Trial("training-like", training_like, enough(*random, training_like))
    unseen = np.isin(rows["n"], UNSEEN_DIMS) | np.isin(rows["k"], UNSEEN_DIMS)
    yield Trial("training-like", training_like, Split("unseen n and k", (unseen,)))
    yield Trial("training-like", training_like, Split("largest fifth by FLOPs", (_largest_fifth(flops, training_like),)))
    if not training_like.all():
        yield Trial("all shapes", everything, enough(*random, everything))


def _attn_trials(rows: Table, flops: np.ndarray) -> Iterator[Trial]:
    long = rows["seq_q"] >= 512
    regime, scored = ("forward", long) if long.sum() >= LEAST_ROWS else ("forward, all lengths", np.ones_like(long))
    yield Trial(regime, scored, enough(random_fifth(len(rows)), five_folds(long), scored))
    yield Trial(regime, scored, Split("largest fifth by FLOPs", (_largest_fifth(flops, scored),)))
    unseen = np.isin(rows["seq_q"], UNSEEN_LENGTHS)
    yield Trial(regime, scored, Split("unseen sequence lengths", (unseen,)))


def _memory_trials(rows: Table, kinds_without: Callable[[np.ndarray], Iterable[str]]) -> Iterator[Trial]:
    """kinds_without: returns the kinds that have a fit when a fold is held out."""
    everything, nothing = np.ones(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)

    def kept(split: Split) -> np.ndarray:
        return np.all([np.isin(rows["kind"], list(kinds_without(fold))) for fold in split.folds], axis=0)

    fitted = np.isin(rows["kind"], list(kinds_without(nothing)))
    fifth, folds = random_fifth(len(rows)), five_folds(rows["kind"])
    split = folds if (fitted & ~kept(fifth)).any() else enough(fifth, folds, everything)
    scored = kept(folds) if split is folds else everything
    yield Trial("all kinds" if scored.all() else "kinds with measurements to spare", scored, split)
    size = rows["bytes"].astype(np.float64)
    yield Trial("all kinds", everything, Split("largest fifth by bytes", (size >= np.quantile(size, 0.8),)))


def _largest_fifth(flops: np.ndarray, among: np.ndarray) -> np.ndarray:
    """The rows with at least as many FLOPs as the largest fifth of ``among`` has."""
    return flops >= np.quantile(flops[among], 0.8) if among.any() else among
