"""The result of a held-out test of one fit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictor.estimate import Z90


@dataclass(frozen=True)
class Score:
    """Errors |predicted / measured - 1| on rows that were not fitted.

    naive_mape: error of interpolating the achieved FLOP/s (or bytes/s) by total FLOPs (bytes) only, on the same split.
    coverage: fraction of rows inside the stated 90% prediction interval.
    """

    op: str  #: linear, flash_attn, all_reduce, ...
    regime: str  #: which rows: "training-like", "all shapes", "1 node", ...
    split: str  #: how rows were held out: "random fifth", "unseen n and k", "largest fifth by FLOPs", ...
    rows: int
    mape: float
    p90: float
    bias: float
    coverage: float
    naive_mape: float


def score(
    op: str, regime: str, split: str, measured: np.ndarray, predicted: np.ndarray, std: np.ndarray, naive: np.ndarray
) -> Score:
    """A Score from held-out seconds: measured, predicted with its relative_std (``std``), and the naive prediction."""
    error = predicted / measured - 1
    inside = np.abs(np.log(predicted / measured)) <= Z90 * std
    return Score(
        op,
        regime,
        split,
        len(measured),
        float(np.abs(error).mean()),
        float(np.quantile(np.abs(error), 0.9)),
        float(error.mean()),
        float(inside.mean()),
        float(np.abs(naive / measured - 1).mean()),
    )
