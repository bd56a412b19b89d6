"""Boosted trees as plain arrays, fitted by scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.kernels.leaf_sets import MOST_LEAVES, LeafSets

_BINS = 255  #: of each feature; the default and most of scikit-learn


@dataclass(frozen=True)
class Trees:
    """A sum of regression trees; every array has shape [trees, nodes] (short trees are padded with leaves).

    feature, threshold: the test of an inner node (x[feature] <= threshold goes left). left, right: child indexes (a leaf
    points to itself). value: what the leaf adds to the sum. depth: steps from the root to the deepest leaf. baseline: constant
    added to the sum of all trees.
    """

    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray
    depth: int
    baseline: float

    def leaf_sets(self) -> LeafSets:
        """Return the same trees in the form in which they are evaluated and stored."""
        return LeafSets.of(self.feature, self.threshold, self.left, self.right, self.value, self.depth, self.baseline)

    @classmethod
    def fit(cls, x: np.ndarray, target: np.ndarray, settings: Mapping[str, Any], weights: np.ndarray | None = None) -> Trees:
        """Fit scikit-learn's HistGradientBoostingRegressor to ``x`` (float64, shape [rows, features], without NaN).

        It is given numbers of bins instead of values: the trees are the same, and with weights its own binning takes a third
        of the time of a fit.
        """
        from sklearn.ensemble import HistGradientBoostingRegressor

        bounds = [_bin_bounds(column, weights) for column in x.T]
        bins = np.stack([np.searchsorted(b, column) for b, column in zip(bounds, x.T, strict=True)], axis=1)
        model = HistGradientBoostingRegressor(early_stopping=False, random_state=0, **settings)
        return cls._of(model.fit(bins.astype(np.float64), target, sample_weight=weights), bounds)

    @classmethod
    def _of(cls, model: Any, bounds: Sequence[np.ndarray]) -> Trees:
        """The trees of a fitted single-output model of numbers of bins; bounds: largest value of each bin, by feature."""
        tables = [iteration[0].nodes for iteration in model._predictors]
        if max(int(nodes["is_leaf"].sum()) for nodes in tables) > MOST_LEAVES:
            raise ValueError(f"max_leaf_nodes is at most {MOST_LEAVES}")
        shape = (len(tables), max(map(len, tables)))
        feature, left, right = (np.zeros(shape, dtype=np.int16) for _ in range(3))
        left[:], right[:] = np.arange(shape[1], dtype=np.int16), np.arange(shape[1], dtype=np.int16)
        threshold, value = np.zeros(shape), np.zeros(shape)
        for t, nodes in enumerate(tables):
            inner = np.flatnonzero(nodes["is_leaf"] == 0)
            feature[t, inner] = nodes["feature_idx"][inner]
            between = nodes["num_threshold"][inner].astype(np.int64)  # half way from this bin to the next
            threshold[t, inner] = [bounds[f][b] for f, b in zip(feature[t, inner], between, strict=True)]
            left[t, inner], right[t, inner] = nodes["left"][inner], nodes["right"][inner]
            value[t, : len(nodes)] = nodes["value"]
        depth = max(int(nodes["depth"].max()) for nodes in tables)
        return cls(feature, threshold, left, right, value, depth, float(np.ravel(model._baseline_prediction)[0]))


def _bin_bounds(column: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    """Largest value of each bin but the last, as scikit-learn bins: half way between the values, or weighted quantiles of many.

    A quantile that falls between two rows is the mean of both (``averaged_inverted_cdf``).
    """
    values = np.unique(column)
    if len(values) <= _BINS:
        return (values[:-1] + values[1:]) / 2
    order = np.argsort(column, kind="stable")
    total = np.cumsum(np.ones(len(column)) if weights is None else weights[order])
    wanted = np.linspace(0, 100, _BINS + 1)[1:-1] / 100 * total[-1]
    at = np.searchsorted(total, wanted)
    after = np.minimum(at + (total[at] == wanted), len(column) - 1)
    return np.unique((column[order][at] + column[order][after]) / 2)
