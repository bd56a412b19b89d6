"""Boosted trees evaluated by bit masks of leaves: by far faster in numpy than to walk down each tree.

The leaves of a tree are bits of a word. Each test of a feature keeps those on one side of it; the tests of one feature together
keep a set that depends only on which of the thresholds a value lies between. The sets of all features have one leaf in common:
the one that the row reaches. Source: QuickScorer (Lucchese et al., SIGIR 2015), with sets for both outcomes of
a test, so that leaves may be numbered in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

MOST_LEAVES = 32  #: of a tree, in a word
#: A de Bruijn sequence: of its products with the 32 powers of two, the upper 5 bits all differ.
_SEQUENCE, _SHIFT = np.uint32(0x077CB531), np.uint32(27)
_ALL = np.uint32(0xFFFFFFFF)
_CHUNK = 128  #: rows whose masks stay in the processor's cache


@dataclass(frozen=True)
class FeatureSets:
    """The leaves that the tests of one feature keep.

    feature: its column. thresholds: increasing, [t]. sets: [t + 1, trees], for values between them.
    """

    feature: int
    thresholds: np.ndarray
    sets: np.ndarray


@dataclass(frozen=True)
class LeafSets:
    """A sum of trees by their leaves.

    leaves: all of each tree, [trees]. values: [trees * 32], of each leaf, by the upper 5 bits. baseline: added to the sum.
    """

    features: tuple[FeatureSets, ...]
    leaves: np.ndarray
    values: np.ndarray
    baseline: float

    @classmethod
    def of(
        cls,
        feature: np.ndarray,
        threshold: np.ndarray,
        left: np.ndarray,
        right: np.ndarray,
        value: np.ndarray,
        depth: int,
        baseline: float,
    ) -> LeafSets:
        """Build from trees as predictor.kernels.trees.Trees describes them: arrays [trees, nodes]."""
        inner, leaf = _reached(left, right, depth)
        number = np.cumsum(leaf, axis=1) - 1
        below = np.zeros(left.shape, dtype=np.uint32)
        below[leaf] = np.uint32(1) << number[leaf].astype(np.uint32)
        tree, node = np.nonzero(inner)
        values = np.zeros((len(left), MOST_LEAVES))
        values[np.nonzero(leaf)[0], (below[leaf] * _SEQUENCE) >> _SHIFT] = value[leaf]
        for _ in range(depth):
            below[tree, node] = below[tree, left[tree, node]] | below[tree, right[tree, node]]
        tests = feature[tree, node], threshold[tree, node], below[tree, left[tree, node]], below[tree, right[tree, node]]
        sets = []
        for column in np.unique(tests[0]).tolist():
            at, limit, on_left, on_right = (part[tests[0] == column] for part in (tree, *tests[1:]))
            sets.append(_feature_sets(column, len(left), at, limit, on_left, on_right))
        return cls(tuple(sets), below[:, 0].copy(), values.ravel(), baseline)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Sum of the leaves that each row of ``x`` (float64, shape [rows, features]) reaches; shape [rows]."""
        first = np.arange(len(self.leaves)) * MOST_LEAVES
        between = [part.thresholds.searchsorted(x[:, part.feature]) for part in self.features]
        out = np.empty(len(x))
        for start in range(0, len(x), _CHUNK):
            rows = slice(start, start + _CHUNK)
            remaining = np.tile(self.leaves, (len(out[rows]), 1))
            chosen = np.empty_like(remaining)
            for part, at in zip(self.features, between, strict=True):
                part.sets.take(at[rows], axis=0, out=chosen, mode="clip")
                remaining &= chosen
            remaining *= _SEQUENCE
            remaining >>= _SHIFT
            out[rows] = self.values.take(remaining + first).sum(axis=1)
        return out + self.baseline

    def to_arrays(self, prefix: str = "") -> dict[str, np.ndarray]:
        """Return arrays that ``from_arrays`` reads; those of all features lie one after the other."""
        sizes = [(part.feature, len(part.thresholds)) for part in self.features]
        return {
            f"{prefix}features": np.array(sizes, dtype=np.int64).reshape(-1, 2),
            f"{prefix}thresholds": np.concatenate([np.zeros(0), *(part.thresholds for part in self.features)]),
            f"{prefix}sets": np.concatenate([self.leaves[None], *(part.sets for part in self.features)]),
            f"{prefix}values": self.values,
            f"{prefix}baseline": np.array(self.baseline),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str = "") -> LeafSets:
        thresholds, sets = arrays[f"{prefix}thresholds"], arrays[f"{prefix}sets"]
        features, at, row = [], 0, 1
        for feature, size in arrays[f"{prefix}features"].tolist():
            features.append(FeatureSets(feature, thresholds[at : at + size], sets[row : row + size + 1]))
            at, row = at + size, row + size + 1
        return cls(tuple(features), sets[0], arrays[f"{prefix}values"], float(arrays[f"{prefix}baseline"]))


def _reached(left: np.ndarray, right: np.ndarray, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the inner nodes and the leaves of each tree, without what fills up short ones: bool [trees, nodes]."""
    ends = left == np.arange(left.shape[1])
    reached = np.zeros(left.shape, dtype=bool)
    reached[:, 0] = True
    for _ in range(depth):
        tree, node = np.nonzero(reached & ~ends)
        reached[tree, left[tree, node]] = reached[tree, right[tree, node]] = True
    return reached & ~ends, reached & ends


def _feature_sets(
    column: int, trees: int, tree: np.ndarray, limit: np.ndarray, on_left: np.ndarray, on_right: np.ndarray
) -> FeatureSets:
    """Return the sets of one feature. Of each test [tests]: its tree, its threshold, and the leaves on both sides."""
    thresholds = np.unique(limit)
    at = np.searchsorted(thresholds, limit)
    above, upto = np.full((2, len(thresholds) + 1, trees), _ALL)
    np.bitwise_and.at(above, (at + 1, tree), ~on_left)
    np.bitwise_and.at(upto, (at, tree), ~on_right)
    sets = np.bitwise_and.accumulate(above) & np.bitwise_and.accumulate(upto[::-1])[::-1]
    return FeatureSets(column, thresholds, np.ascontiguousarray(sets))
