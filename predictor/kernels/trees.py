"""Boosted trees as plain arrays: fitted by scikit-learn, stored without pickles, evaluated by numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


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

    def predict(self, x: np.ndarray, chunk: int = 512) -> np.ndarray:
        """Sum of the leaves that each row of ``x`` (float64, shape [rows, features]) reaches; shape [rows].

        All rows of a chunk go down all trees together; chunks stay in the processor's cache.
        """
        trees, nodes = self.feature.shape
        first = (np.arange(trees) * nodes).astype(np.int32)
        feature, threshold, value = self.feature.ravel().astype(np.int32), self.threshold.ravel(), self.value.ravel()
        children = np.stack([(self.right + first[:, None]).ravel(), (self.left + first[:, None]).ravel()], axis=1).ravel()
        out = np.empty(len(x))
        for start in range(0, len(x), chunk):
            part = np.ascontiguousarray(x[start : start + chunk])
            flat, row = part.ravel(), (np.arange(len(part)) * part.shape[1])[:, None]
            node = np.broadcast_to(first, (len(part), trees))
            for _ in range(self.depth):
                goes_left = flat.take(feature.take(node) + row) <= threshold.take(node)
                node = children.take(2 * node + goes_left)
            out[start : start + chunk] = value.take(node).sum(axis=1)
        return out + self.baseline

    def to_arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        return {
            f"{prefix}feature": self.feature, f"{prefix}threshold": self.threshold, f"{prefix}left": self.left,
            f"{prefix}right": self.right, f"{prefix}value": self.value,
            f"{prefix}scalars": np.array([self.depth, self.baseline]),
        }  # fmt: skip

    @classmethod
    def from_arrays(cls, arrays: Any, prefix: str = "") -> Trees:
        names = ("feature", "threshold", "left", "right", "value")
        tables = {name: np.asarray(arrays[f"{prefix}{name}"]) for name in names}
        depth, baseline = arrays[f"{prefix}scalars"]
        return cls(**tables, depth=int(depth), baseline=float(baseline))

    @classmethod
    def from_hist_gradient_boosting(cls, model: Any) -> Trees:
        """The trees of a fitted single-output HistGradientBoostingRegressor (numerical features, no missing values)."""
        tables = [iteration[0].nodes for iteration in model._predictors]
        shape = (len(tables), max(map(len, tables)))
        feature, left, right = (np.zeros(shape, dtype=np.int16) for _ in range(3))
        left[:], right[:] = np.arange(shape[1], dtype=np.int16), np.arange(shape[1], dtype=np.int16)
        threshold, value = np.zeros(shape), np.zeros(shape)
        for t, nodes in enumerate(tables):
            inner = np.flatnonzero(nodes["is_leaf"] == 0)
            feature[t, inner], threshold[t, inner] = nodes["feature_idx"][inner], nodes["num_threshold"][inner]
            left[t, inner], right[t, inner] = nodes["left"][inner], nodes["right"][inner]
            value[t, : len(nodes)] = nodes["value"]
        depth = max(int(nodes["depth"].max()) for nodes in tables)
        return cls(feature, threshold, left, right, value, depth, float(np.ravel(model._baseline_prediction)[0]))
