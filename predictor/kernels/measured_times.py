"""Kernels whose exact shape was measured: the measurement and the fit, weighted by their certainty."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.kernels.shape_keys import find
from profiler.profile.profile import Table

#: Standard deviation of log(time) that remains in the best median: clocks and memory layout of another process.
LEAST_UNCERTAINTY = 0.02
#: The same of a row that states no spread: two runs of one published table differ by 3.7% in the median (H100, B200).
UNSTATED_UNCERTAINTY = 0.037


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds and standard deviations of log(time) by shape; arrays of shape [shapes], ``keys`` (of shape_keys) ascending."""

    keys: np.ndarray
    seconds: np.ndarray
    relative_std: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def none(cls) -> MeasuredTimes:
        return cls(np.zeros(0, dtype=np.uint64), np.zeros(0), np.zeros(0))

    @classmethod
    def of(cls, keys: np.ndarray, rows: Table) -> MeasuredTimes:
        """Build from the rows of one number format and kernel; the rows of one shape are averaged by inverse variance."""
        unique, shape = np.unique(keys, return_inverse=True)
        std = uncertainty_of(rows["spread"].astype(np.float64))
        weight = std**-2.0
        total = np.bincount(shape, weight, len(unique))
        mean = np.bincount(shape, weight * np.log(rows["seconds"]), len(unique)) / np.maximum(total, 1e-300)
        # another median of the same process and machine is no more certain than the best one
        return cls(unique, np.exp(mean), np.maximum(total**-0.5, LEAST_UNCERTAINTY))

    def combined_with(self, fit: Estimate, keys: np.ndarray) -> Estimate:
        """Return ``fit`` with the times of measured shapes: the mean of both logarithms, weighted by their inverse variances.

        A measurement is of this very shape, but noisy; the fit averages the noise of its neighbours.
        """
        if not len(self):
            return fit
        at, known = find(self.keys, keys)
        measured, fitted = self.relative_std[at] ** -2.0, np.maximum(fit.relative_std, 1e-9) ** -2.0
        mean = np.exp((measured * np.log(self.seconds[at]) + fitted * np.log(fit.seconds)) / (measured + fitted))
        return where_known(known, mean, (measured + fitted) ** -0.5, fit)

    def to_arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """Flat plain arrays, for an npz file."""
        return {f"{prefix}keys": self.keys, f"{prefix}seconds": self.seconds, f"{prefix}std": self.relative_std}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str) -> MeasuredTimes:
        return cls(*(np.asarray(arrays[f"{prefix}{name}"]) for name in ("keys", "seconds", "std")))


def uncertainty_of(spread: np.ndarray, unstated: float = UNSTATED_UNCERTAINTY) -> np.ndarray:
    """Return the standard deviation of log(time) of medians; ``unstated`` where a spread is nan.

    A row's spread, its half range, is about twice the deviation.
    """
    return np.where(np.isnan(spread), unstated, np.maximum(np.nan_to_num(spread) / 2, LEAST_UNCERTAINTY))


def where_known(known: np.ndarray, seconds: np.ndarray, relative_std: np.ndarray, fit: Estimate) -> Estimate:
    """Return measured times where a shape is ``known``, else those of ``fit``."""
    return Estimate(
        np.where(known, seconds, fit.seconds),
        np.where(known, relative_std, fit.relative_std),
        np.where(known, np.int8(Basis.MEASURED), fit.basis).astype(np.int8),
    )
