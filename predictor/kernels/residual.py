"""Learnt correction of a physical model: boosted trees on log time, with an uncertainty.

The correction is learnt on features that the model chooses and fades to a constant away from the measured shapes. Its
uncertainty comes from measurements that were held out from learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.estimate import Basis, std_of_errors
from predictor.kernels.known_constants import without_noise
from predictor.kernels.leaf_sets import LeafSets
from predictor.kernels.trees import Trees

#: With fewer rows trees would learn noise (measured: with 100 rows they gain nothing over the physical model, with 300 rows a
#: third).
ROWS_FOR_TREES = 150
#: Octaves (factors of two in a shape) over which the correction fades, and what each adds to the standard deviation of log
#: time: fits without the largest fifth of a table erred there by 1-6% (4-12% in the worst tenth).
FADE_OCTAVES, UNCERTAINTY_PER_OCTAVE = 3.0, 0.06
#: No kernel time repeats better than this between machines of the same kind.
LEAST_UNCERTAINTY = 0.01
#: An interval wider than a factor e either way says no more than "unknown".
MOST_UNCERTAINTY = 1.0
_CENTRES = 256
_FOLDS = 3


@dataclass(frozen=True)
class Residual:
    """The learnt correction of a physical model's times, and how sure it is at a distance from what was measured.

    trees: correction of log time, None where measurements are too few.

    shift: constant correction without trees and far from the measured shapes. centres: [c, d] log2 coordinates that cover the
    measured shapes within ``radius``; low, high: their bounding box [d]. size_edges: [b] increasing log seconds;
    size_uncertainty: [b] held-out uncertainty at them, interpolated between.
    """

    trees: LeafSets | None
    shift: float
    centres: np.ndarray
    radius: float
    low: np.ndarray
    high: np.ndarray
    size_edges: np.ndarray
    size_uncertainty: np.ndarray

    def distance(self, coordinates: np.ndarray) -> np.ndarray:
        """Octaves from the measured shapes (0 inside them); ``coordinates`` is log2, shape [rows, d]."""
        outside = np.maximum(self.low - coordinates, 0) + np.maximum(coordinates - self.high, 0)
        box = np.sqrt((outside**2).sum(axis=1))
        square = (coordinates**2).sum(axis=1)[:, None] - 2 * coordinates @ self.centres.T
        nearest = np.sqrt(np.maximum((square + (self.centres**2).sum(axis=1)).min(axis=1), 0))
        return np.maximum(box, nearest - self.radius - 1e-6)

    def correct(
        self, features: np.ndarray, coordinates: np.ndarray, log_bare: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Correction of log time, its relative_std and its basis for every row (each of shape [rows])."""
        distance = self.distance(without_noise(coordinates))
        learnt = self.trees.predict(without_noise(features)) - self.shift if self.trees is not None else 0.0
        correction = self.shift + learnt * np.exp(-((distance / FADE_OCTAVES) ** 2))
        held_out = np.interp(log_bare, self.size_edges, self.size_uncertainty)
        std = np.minimum(np.hypot(held_out, UNCERTAINTY_PER_OCTAVE * distance), MOST_UNCERTAINTY)
        basis = np.where(distance > 0, np.int8(Basis.EXTRAPOLATED), np.int8(Basis.INTERPOLATED))
        return correction, std, basis

    def to_arrays(self, prefix: str) -> dict[str, np.ndarray]:
        trees = self.trees.to_arrays(f"{prefix}trees/") if self.trees is not None else {}
        return {
            **trees,
            f"{prefix}scalars": np.array([self.shift, self.radius]),
            f"{prefix}centres": self.centres,
            f"{prefix}low": self.low,
            f"{prefix}high": self.high,
            f"{prefix}size_edges": self.size_edges,
            f"{prefix}size_uncertainty": self.size_uncertainty,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str) -> Residual:
        trees = LeafSets.from_arrays(arrays, f"{prefix}trees/") if f"{prefix}trees/values" in arrays else None
        shift, radius = (float(v) for v in arrays[f"{prefix}scalars"])
        rest = (np.asarray(arrays[f"{prefix}{name}"]) for name in ("low", "high", "size_edges", "size_uncertainty"))
        return cls(trees, shift, np.asarray(arrays[f"{prefix}centres"]), radius, *rest)


def fit_residual(
    features: np.ndarray,
    coordinates: np.ndarray,
    log_bare: np.ndarray,
    log_residual: np.ndarray,
    groups: np.ndarray,
    trees: Mapping[str, Any],
    weights: np.ndarray | None = None,
) -> Residual:
    """Learn log(measured / physical model), shape [rows].

    groups: int codes; rows of one group are held out together when the uncertainty is measured, so that it applies to a shape
    family never seen. trees: settings of HistGradientBoostingRegressor. weights: weight of each row.
    """
    import sklearn.ensemble  # noqa: F401  (threads of a library can be limited only after it is loaded)
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    features, coordinates, log_bare, log_residual = map(without_noise, (features, coordinates, log_bare, log_residual))
    with threadpool_limits(1):  # small fits: on a busy machine, waiting threads make them 100 times slower
        return _fit(features, coordinates, log_bare, log_residual, groups, trees, weights)


def _fit(
    features: np.ndarray,
    coordinates: np.ndarray,
    log_bare: np.ndarray,
    log_residual: np.ndarray,
    groups: np.ndarray,
    trees: Mapping[str, Any],
    weights: np.ndarray | None,
) -> Residual:
    enough = len(log_residual) >= ROWS_FOR_TREES
    shift = float(np.median(log_residual))
    held_out = np.empty(len(log_residual))
    for fold in range(_FOLDS):
        test = groups % _FOLDS == fold
        if enough and test.any() and not test.all():
            fold_weights = None if weights is None else weights[~test]
            fitted = Trees.fit(features[~test], log_residual[~test], trees, fold_weights).leaf_sets()
            held_out[test] = log_residual[test] - fitted.predict(features[test])
        else:
            held_out[test] = log_residual[test] - shift
    centres, radius = _cover(coordinates)
    edges, uncertainty = _uncertainty_by_size(log_bare, held_out)
    learnt = Trees.fit(features, log_residual, trees, weights).leaf_sets() if enough else None
    return Residual(learnt, shift, centres, radius, coordinates.min(axis=0), coordinates.max(axis=0), edges, uncertainty)


def _cover(points: np.ndarray) -> tuple[np.ndarray, float]:
    """Choose up to 256 of the points, farthest first, and return them with the distance within which they cover the rest."""
    points = np.unique(points, axis=0)
    chosen = [0]
    distance = np.linalg.norm(points - points[0], axis=1)
    while len(chosen) < min(_CENTRES, len(points)) and distance.max() > 0:
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.linalg.norm(points - points[chosen[-1]], axis=1))
    return points[chosen], float(distance.max())


def _uncertainty_by_size(log_bare: np.ndarray, held_out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Uncertainty in bins of equal row counts over the log time of the physical model.

    It is the 90% quantile of |held-out error|, as standard deviations.
    """
    bins = int(np.clip(len(held_out) // 100, 1, 12))
    parts = np.array_split(np.argsort(log_bare, kind="stable"), bins)
    edges = np.array([np.median(log_bare[p]) for p in parts])
    uncertainty = np.array([std_of_errors(held_out[p]) for p in parts])
    return edges + np.arange(bins) * 1e-9, np.maximum(uncertainty, LEAST_UNCERTAINTY)
