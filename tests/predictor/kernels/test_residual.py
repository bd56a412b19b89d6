"""The learnt correction without trees: its constant, its distance from the measured shapes and its uncertainty, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from predictor.estimate import Basis
from predictor.kernels.residual import Residual, fit_residual


def fit(log_residual: np.ndarray, points: np.ndarray) -> Residual:
    rows = len(log_residual)
    return fit_residual(points, points, np.arange(rows) * 1.0, log_residual, np.arange(rows), {})


def corner(centres: list[list[float]], radius: float) -> Residual:
    """Return a correction of 0.5 of shapes in the unit square, 10% uncertain."""
    low, high = np.zeros(2), np.ones(2)
    return Residual(None, 0.5, np.array(centres), radius, low, high, np.array([0.0]), np.array([0.1]))


def test_distance_to_the_measured_shapes() -> None:
    # from the box: sides of 3 and 4 octaves; or from the nearest centre, less the radius within which centres cover the rest
    points = np.array([[4.0, 5.0], [0.5, 0.5], [-3.0, 0.5]])
    np.testing.assert_allclose(corner([[0.0, 0.0], [1.0, 1.0]], 10.0).distance(points), [5, 0, 3], atol=1e-5)
    np.testing.assert_allclose(corner([[1.0, 1.0]], 0.5).distance(np.array([[0.4, 0.2]])), [0.5], atol=1e-5)


def test_uncertainty_grows_by_six_percent_an_octave() -> None:
    correction, std, basis = corner([[0.5, 0.5]], 1.0).correct(
        np.zeros((3, 2)), np.array([[0.5, 0.5], [4, 5], [99, 0]]), np.zeros(3)
    )
    assert correction.tolist() == [0.5] * 3
    # 5 octaves; never more than a factor e
    np.testing.assert_allclose(std, [0.1, math.hypot(0.1, 0.3), 1.0], rtol=1e-5)
    assert basis.tolist() == [Basis.INTERPOLATED, Basis.EXTRAPOLATED, Basis.EXTRAPOLATED]


def test_the_constant_and_its_spread() -> None:
    # ten rows are off by 0.3 and one by 1.3: the median is 0.3, and the 90th percentile of the distance from it is 0
    rows = np.array([0.3] * 10 + [1.3])
    found = fit(rows, np.arange(22.0).reshape(11, 2))
    assert found.trees is None and found.shift == 0.3
    assert found.size_uncertainty.tolist() == [0.01]  # no kernel repeats better than 1%
    # a fifth of the rows off by 0.329: 90% of errors are below that, which is 1.645 standard deviations
    spread = fit(np.array([0.0] * 8 + [0.329] * 2), np.arange(20.0).reshape(10, 2))
    assert spread.size_uncertainty[0] == pytest.approx(0.2)


def test_centres_cover_the_measured_shapes() -> None:
    line = np.stack([np.arange(12.0), np.zeros(12)], axis=1)
    found = fit(np.zeros(12), np.concatenate([line, line])[:12])
    assert len(found.centres) == 12 and found.radius == 0
    assert (found.low.tolist(), found.high.tolist()) == ([0, 0], [11, 0])
    # 256 centres at most, the farthest first: 513 points in a line are covered within one step
    many = np.stack([np.arange(513.0), np.zeros(513)], axis=1)
    covered = fit_residual(np.zeros((513, 1)), many, np.zeros(513), np.zeros(513), np.zeros(513, dtype=int), {"max_iter": 1})
    assert len(covered.centres) == 256 and covered.radius <= 2
    assert {0.0, 512.0, 256.0, 128.0, 384.0} <= set(covered.centres[:5, 0].tolist())


def test_uncertainty_is_stated_for_each_hundred_rows_of_similar_size() -> None:
    # equal counts of rows in the order of their predicted time, twelve bins at most
    for rows, bins in ((99, 1), (199, 1), (200, 2), (1199, 11), (1300, 12)):
        one, groups, by_time = np.zeros((rows, 1)), np.zeros(rows, dtype=int), np.arange(rows) * 1.0
        made = fit_residual(one, one, by_time, np.zeros(rows), groups, {"max_iter": 1})
        assert len(made.size_edges) == len(made.size_uncertainty) == bins
    assert made.size_edges[0] == np.median(np.arange(109))  # 1300 rows: four bins of 109, eight of 108
