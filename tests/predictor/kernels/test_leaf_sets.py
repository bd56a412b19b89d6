"""Trees evaluated by sets of leaves reach the leaf that a walk from the root reaches, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.kernels.leaf_sets import LeafSets
from predictor.kernels.trees import Trees

LIMIT = 2.0


def walked(trees: Trees, x: np.ndarray) -> np.ndarray:
    tree, row = np.arange(len(trees.feature)), np.arange(len(x))[:, None]
    node = np.zeros((len(x), len(tree)), dtype=np.int64)
    for _ in range(trees.depth):
        goes_left = x[row, trees.feature[tree, node]] <= trees.threshold[tree, node]
        node = np.where(goes_left, trees.left[tree, node], trees.right[tree, node])
    return np.asarray(trees.value[tree, node].sum(axis=1) + trees.baseline)


def test_two_trees_by_hand() -> None:
    # x0 <= 2 ? 1 : (x1 <= 0 ? 10 : 100), and a tree that is one leaf of 1000
    feature, left = np.array([[0, 0, 1, 0, 0], [0] * 5]), np.array([[1, 1, 3, 3, 4], [0, 1, 2, 3, 4]])
    right, value = np.array([[2, 1, 4, 3, 4], [0, 1, 2, 3, 4]]), np.array([[7, 1, 7, 10, 100], [1000, 7, 7, 7, 7.0]])
    threshold = np.array([[LIMIT, 0, 0, 0, 0], [0.0] * 5])
    trees = Trees(feature, threshold, left, right, value, depth=2, baseline=0.5).leaf_sets()
    above = np.nextafter(LIMIT, 3)  # at the threshold a row goes left, and the next number above it right; as no number does
    x = np.array([[LIMIT, 5], [above, 0], [above, 1e-300], [np.inf, -np.inf], [-np.inf, 9], [np.nan, np.nan]])
    assert trees.predict(x).tolist() == [1001.5, 1010.5, 1100.5, 1010.5, 1001.5, 1100.5]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 32), st.integers(1, 9))
def test_sets_of_leaves_and_walks_agree_to_the_bit(seed: int, leaves: int, depth: int) -> None:
    random = np.random.default_rng(seed)
    x = np.column_stack([random.integers(0, 9, 500), random.normal(size=(500, 3))])
    target = np.sin(x[:, 1]) * x[:, 0] + random.normal(size=500)
    shape = {"max_iter": 12, "max_leaf_nodes": leaves, "max_depth": depth, "min_samples_leaf": 2}
    trees = Trees.fit(x, target, shape)
    unseen = np.concatenate([x, 3 * random.normal(size=(300, 4)), trees.threshold[:, :1].repeat(4, axis=1)])
    sets, expected = trees.leaf_sets(), walked(trees, unseen)
    assert np.array_equal(sets.predict(unseen), expected)
    assert np.array_equal(sets.predict(unseen[:1]), expected[:1]) and len(sets.predict(x[:0])) == 0
    assert np.array_equal(LeafSets.from_arrays(sets.to_arrays("a/"), "a/").predict(unseen), expected)


def test_no_more_leaves_than_bits_of_a_word() -> None:
    x = np.random.default_rng(0).normal(size=(3000, 2))
    with pytest.raises(ValueError, match="max_leaf_nodes is at most 32"):
        Trees.fit(x, x[:, 0] ** 2 + x[:, 1], {"max_iter": 2, "max_leaf_nodes": 40, "min_samples_leaf": 2})
