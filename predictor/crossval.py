"""Held-out tests of the kernel laws: fitted without some rows, asked for exactly those."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from predictor.estimate import Estimate
from predictor.flash_attn import FlashAttnLaw, is_serving, main_rows, shape_of
from predictor.linear import FAMILIES, LinearLaw, own_forward_rows
from predictor.memory_bound import MemoryBoundLaw
from predictor.score import Score, score
from profiler.profile import Profile, Table

#: Sizes held out to see what happens between and beside the measured model dims, and between measured lengths.
UNSEEN_DIMS = (2560, 3584, 5120, 10240)
UNSEEN_LENGTHS = (1536, 2048, 6144, 8192)
LEAST_ROWS = 50  #: fewer held-out rows tell nothing, and no law is fitted on fewer
_SEED = 0


def linear_rows(profile: Profile) -> Table:
    """The 16-bit forward products that the law of this profile is fitted on and tested with."""
    table = profile.table("linear")
    return own_forward_rows(table.where(np.array([FAMILIES.get(d) == "bf16" for d in table["dtype"]], dtype=bool)))


def linear_scores(profile: Profile) -> list[Score]:
    """Scores of LinearLaw on this profile's own 16-bit forward rows; empty where there are too few.

    Training-like rows have m >= 1024 and n, k >= 512. The law is fitted on every row that is not held out; the naive
    prediction on the rows of the regime alone, which favours it.
    """
    rows = linear_rows(profile)
    flops = 2.0 * rows["m"] * rows["n"] * rows["k"]
    training_like = (rows["m"] >= 1024) & (rows["n"] >= 512) & (rows["k"] >= 512)

    def predict(fitted: Table, asked: Table) -> Estimate:
        law = LinearLaw.fit(fitted, profile.device)
        return law.predict(asked["m"], asked["n"], asked["k"], dtype="bf16")

    return [
        _score("linear", regime, split, rows, flops, seen, held, asked, predict)
        for regime, split, seen, held, asked in _linear_splits(rows, flops, training_like)
        if asked.sum() >= LEAST_ROWS and seen.sum() >= LEAST_ROWS
    ]


def flash_attn_scores(profile: Profile) -> list[Score]:
    """Scores of FlashAttnLaw on the forward rows of this profile's main kernel (seq >= 512), timed as the rows are."""
    rows = main_rows(profile.table("flash_attn"))
    if not len(rows):
        return []
    flops = shape_of(rows).flops
    serving = bool(is_serving(rows["source"]).mean() > 0.5)

    def predict(fitted: Table, asked: Table) -> Estimate:
        law = FlashAttnLaw.fit(fitted, profile.device)
        return law.predict(*shape_of(asked), serving=serving)

    return [
        _score("flash_attn", "forward", split, rows, flops, long, held, asked, predict)
        for split, long, held, asked in _attn_splits(rows, flops)
        if asked.sum() >= LEAST_ROWS and long.sum() >= LEAST_ROWS
    ]


def memory_bound_scores(profile: Profile) -> list[Score]:
    """Scores of MemoryBoundLaw over the rows of all kinds; empty where there are too few."""
    rows = profile.table("memory_bound")
    rows = rows.where(rows["bytes"] > 0)
    size = rows["bytes"].astype(np.float64)

    def predict(fitted: Table, asked: Table) -> Estimate:
        law = MemoryBoundLaw.fit(fitted, profile.device)
        seconds, std = np.empty(len(asked)), np.empty(len(asked))
        for kind in np.unique(asked["kind"]):
            of_kind = asked["kind"] == kind
            found = law.predict(str(kind), asked["bytes"][of_kind])
            seconds[of_kind], std[of_kind] = found.seconds, found.relative_std
        return Estimate(seconds, std, np.zeros(len(asked), dtype=np.int8))

    fifth = np.random.default_rng(_SEED).random(len(rows)) < 0.2
    largest = size >= np.quantile(size, 0.8) if len(rows) else fifth
    everything = np.ones(len(rows), dtype=bool)
    return [
        _score("memory_bound", "all kinds", split, rows, size, everything, held, held, predict)
        for split, held in (("random fifth", fifth), ("largest fifth by bytes", largest))
        if held.sum() >= LEAST_ROWS and (~held).sum() >= LEAST_ROWS
    ]


def naive_seconds(flops: np.ndarray, seconds: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Time from total FLOPs alone: the achieved FLOP/s interpolated over log FLOPs, as simple simulators do."""
    sizes, at = np.unique(flops, return_inverse=True)
    rate = np.bincount(at, weights=np.log(flops / seconds)) / np.bincount(at)
    seconds_asked: np.ndarray = asked / np.exp(np.interp(np.log(asked), np.log(sizes), rate))
    return seconds_asked


def _linear_splits(
    rows: Table, flops: np.ndarray, training_like: np.ndarray
) -> Iterator[tuple[str, str, np.ndarray, np.ndarray, np.ndarray]]:
    """(regime, split, rows the naive law may see, rows held out of the fit, rows scored)."""
    everything = np.ones(len(rows), dtype=bool)
    fifth = np.random.default_rng(_SEED).random(len(rows)) < 0.2
    yield "training-like", "random fifth", training_like, fifth, fifth & training_like
    unseen = np.isin(rows["n"], UNSEEN_DIMS) | np.isin(rows["k"], UNSEEN_DIMS)
    yield "training-like", "unseen n and k", training_like, unseen, unseen & training_like
    largest = flops >= np.quantile(flops[training_like], 0.8) if training_like.any() else ~everything
    yield "training-like", "largest fifth by FLOPs", training_like, largest, largest & training_like
    yield "all shapes", "random fifth", everything, fifth, fifth


def _attn_splits(rows: Table, flops: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    long = rows["seq_q"] >= 512
    fifth = np.random.default_rng(_SEED).random(len(rows)) < 0.2
    yield "random fifth", long, fifth, fifth & long
    largest = flops >= np.quantile(flops[long], 0.8) if long.any() else ~long
    yield "largest fifth by FLOPs", long, largest, largest & long
    unseen = np.isin(rows["seq_q"], UNSEEN_LENGTHS)
    yield "unseen sequence lengths", long, unseen, unseen & long


def _score(
    op: str, regime: str, split: str, rows: Table, flops: np.ndarray, naive_sees: np.ndarray, held: np.ndarray,
    asked: np.ndarray, predict: Callable[[Table, Table], Estimate],
) -> Score:  # fmt: skip
    found = predict(rows.where(~held), rows.where(asked))
    seen = naive_sees & ~held
    naive = naive_seconds(flops[seen], rows["seconds"][seen], flops[asked])
    return score(op, regime, split, rows["seconds"][asked], found.seconds, found.relative_std, naive)
