"""Collectives inside a node: curves, what an op borrows, group sizes that were not measured, and their uncertainty, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from predictor.estimate import Basis
from predictor.network.collective import CollectiveModel
from predictor.network.curves import Curves, marginal_cost
from predictor.network.overlap import Contention
from predictor.network_costs import NetworkCosts
from profiler.errors import InputError
from profiler.profile.profile import Device, Profile, Table

DEVICE = Device("some GPU", {"bf16": 1e15}, 8e10, 3e12, 132, 8, 4e11, 5e10)
SIZES = 2.0 ** np.arange(10, 31)
#: Repeats of one call differ by 2%, between the points as well where these are on a line.
REPEAT = 0.03


def fitted(*measured: str, ranks: tuple[int, ...] = (2, 8), start: float = 1e-5, rate: float = 1e11) -> CollectiveModel:
    """Return the fit to ops that were measured at ``start`` seconds (times the ranks) and ``rate`` bytes/s per sent byte."""
    tables = {}
    for op in measured:
        intra, size = (a.ravel() for a in np.meshgrid(ranks, SIZES, indexing="ij"))
        seconds = start * intra + size / rate
        tables[op] = Table.from_columns(op, {"intra": intra, "inter": 1, "bytes": size, "seconds": seconds})
    return CollectiveModel.fit(Profile("bare", DEVICE, tables))


def at(fit: CollectiveModel, op: str, size: float, ranks: int) -> tuple[float, float, int]:
    """Return seconds, standard deviation and basis."""
    found = fit.predict(op, size, ranks, 1)
    return float(found.seconds), float(found.relative_std), int(found.basis)


def test_groups_between_and_beyond_the_measured_ones() -> None:
    fit, size = fitted("all_gather"), 2.0**20
    seconds = {k: k * 1e-5 + size / 1e11 for k in (2, 8)}
    assert at(fit, "all_gather", size, 8) == pytest.approx((seconds[8], REPEAT, Basis.MEASURED))
    # 4 is half way between 2 and 8 in octaves: the geometric mean, and 7% more uncertain
    assert at(fit, "all_gather", size, 4) == pytest.approx(
        (math.sqrt(seconds[2] * seconds[8]), math.hypot(REPEAT, 0.07), Basis.INTERPOLATED)
    )
    # 32 is two octaves beyond 8: the start-up grows with log2 of the ranks (5 / 3), the transfer with the share that a rank
    # sends (31 / 32 of 7 / 8); 15% more uncertain for each octave. The start-up is the time of the smallest message
    start = 8e-5 + 1024 / 1e11
    beyond = start * 5 / 3 + (seconds[8] - start) * (31 / 32) / (7 / 8)
    assert at(fit, "all_gather", size, 32) == pytest.approx((beyond, math.hypot(REPEAT, 0.3), Basis.EXTRAPOLATED))


def test_start_up_of_all_to_all_is_that_of_the_measured_group() -> None:
    # its messages leave together; among fewer ranks than measured the start-up shrinks with the share that is sent
    assert at(fitted("all2all"), "all2all", 1024, 64)[0] == pytest.approx(8e-5 + 1024 / 1e11)
    fit = fitted("all_gather", ranks=(8, 16))
    assert at(fit, "all_gather", 1024, 4)[0] == pytest.approx((8e-5 + 1024 / 1e11) * (3 / 4) / (7 / 8))


@pytest.mark.parametrize(
    ("op", "donor", "moved", "factor"),
    [
        ("reduce_scatter", "all_gather", 1, 1),
        ("all_gather", "reduce_scatter", 1, 1),
        ("all2all", "all_gather", 1, 1),
        ("all_reduce", "reduce_scatter", 1, 2),
        ("all_reduce", "all_gather", 1, 2),  # one after the other
        ("reduce_scatter", "all_reduce", 1, 1 / 2),
        ("all_gather", "all_reduce", 1, 1 / 2),
        # a broadcast sends the whole buffer; an all-gather of 8 ranks 7/8 of it
        ("broadcast", "all_gather", 7 / 8, 1),
        ("broadcast", "all_reduce", 7 / 8, 1 / 2),
        # p2p is the smallest group's: two ranks exchange half of the buffer
        ("p2p", "all2all", 1 / 2, 1),
        ("p2p", "all_gather", 1 / 2, 1),
    ],
)
def test_an_op_that_was_not_measured_borrows(op: str, donor: str, moved: float, factor: float) -> None:
    ranks, size = (2 if op == "p2p" else 8), 2.0**20
    expected = factor * (ranks * 1e-5 + size / 1e11)
    assert at(fitted(donor), op, size * moved, ranks) == pytest.approx((expected, math.hypot(REPEAT, 0.15), Basis.EXTRAPOLATED))


@pytest.mark.parametrize(
    ("op", "ranks", "start", "share"),
    [("p2p", 2, 8e-6, 1), ("p2p", 8, 8e-6, 1), ("all_gather", 8, 17e-6, 7 / 8), ("all_reduce", 4, 11e-6, 6 / 4)],
)
def test_a_device_without_measurements_has_the_datasheet(op: str, ranks: int, start: float, share: float) -> None:
    # 8 us for two ranks and 1.5 us for each further one; three quarters of the link's 400 GB/s; 35% uncertain
    size = 2.0**20
    assert at(fitted(), op, size, ranks) == pytest.approx(
        (start + share * size / 3e11, math.hypot(REPEAT, 0.35), Basis.ROOFLINE)
    )


@pytest.mark.parametrize("bandwidth", [0.0, -5e10, float("inf"), float("nan")])
def test_bandwidths_are_positive_and_finite(bandwidth: float) -> None:
    with pytest.raises(InputError, match="network_bandwidth is"):
        CollectiveModel.fit(Profile("bare", replace(DEVICE, network_bandwidth=bandwidth), {}))


def test_curves_beyond_their_points() -> None:
    # constant below; beyond, a byte costs what the last two octaves cost: (5 - 2) seconds for 6 bytes
    size, seconds = np.array([1.0, 2.0, 4.0, 8.0]), np.array([1.0, 2.0, 3.0, 5.0])
    curve = Curves.fit([(size, seconds)])
    asked = np.log([0.25, 1, 4, 8, 20])
    np.testing.assert_allclose(curve.seconds(np.zeros(5, dtype=np.int64), asked), [1, 1, 3, 5, 5 + 12 * 0.5], rtol=1e-12)
    # at most the average cost of the largest message, at least half of it
    for last, cost in ((40.0, 40 / 8), (2.2, 2.2 / 16)):
        seconds = np.array([1.0, 2.0, 2.1, last])
        assert marginal_cost(np.log(size), np.log(seconds)) == pytest.approx(cost)


def test_uncertainty_between_and_beyond_points() -> None:
    def fit(points: int) -> Curves:
        size = 8192.0 * 2.0 ** np.arange(points)
        return Curves.fit([(size, size)])

    def std(curve: Curves, size: float) -> float:
        return float(curve.uncertainty(np.zeros(1, dtype=np.int64), np.log([size]))[0][0])

    # with four points an octave apart: 10% at an octave from the nearest, by the square root of the distance
    assert std(fit(4), 8192 * math.sqrt(2)) == pytest.approx(math.hypot(REPEAT, 0.1 * math.sqrt(1 / 2)))
    # five points on a line predict each other exactly
    assert std(fit(5), 8192 * math.sqrt(2)) == pytest.approx(REPEAT)
    # far beyond the last point: 25% where too few points show it, 10% at least
    assert std(fit(5), 1e15) == pytest.approx(math.hypot(REPEAT, 0.25), rel=1e-6)
    assert std(fit(9), 1e15) == pytest.approx(math.hypot(REPEAT, 0.1), rel=1e-6)
    # an octave below the first point, down to the 4 KiB that take the latency anyway
    assert std(fit(5), 4096) == std(fit(5), 1) == pytest.approx(math.hypot(REPEAT, 0.1))


def test_the_error_beyond_the_points_is_that_of_the_last_three_octaves() -> None:
    # five points in two octaves, of which the first and the last differ by 1 s for 3 bytes; that predicts the next three
    # octaves, whose last point takes exp(0.329) times as long: 0.2 standard deviations for 90% in 1.645
    near, far = 2.0 ** np.array([0, 0.5, 1, 1.5, 2]), np.array([8.0, 16.0, 32.0])
    seconds = np.concatenate([[1, 1.8, 1.85, 1.9, 2], (2 + (far - 4) / 3) * np.exp([0, 0, 0.329])])
    curve = Curves.fit([(np.concatenate([near, far]), seconds)])
    assert curve.tail_std[0] == pytest.approx(0.2, rel=1e-9)


def test_a_ring_between_nodes_cannot_reduce_in_the_switch() -> None:
    # inside the node an all-reduce takes as long as an all-gather (the switch reduces); the ring's is two of those. Over two
    # nodes each rank sends 15/16 of the buffer instead of 7/8
    fit, size = fitted("all_reduce", "all_gather"), 2.0**24
    one = [np.array([float(value)]) for value in (size, 8, 2, 5e10, 1.0)]
    at = fit.node.groups("all_reduce", *one)
    gather = 8e-5 + size / 1e11
    assert at.inside[0] == pytest.approx(15 / 14) and at.inside_ring[0] == pytest.approx(15 / 14)
    at = fit.node.groups("all_reduce", *one[:4], np.array([1e-9]))
    assert at.inside_ring[0] == pytest.approx(2 * gather * 15 / 14)
    assert fit.node.groups("all_gather", *one).inside_ring[0] == pytest.approx(15 / 14)


def between_nodes(rows: int, nodes: tuple[int, ...]) -> CollectiveModel:
    """Return the fit to ``rows`` all-gathers between nodes, and one-node and empty ones, which say nothing of the network."""
    inter = np.resize(nodes, rows)
    size = 2.0 ** (15 + np.arange(rows) // len(nodes))
    measured = {"intra": np.full(rows, 2), "inter": inter, "bytes": size, "seconds": 1e-4 + size / 1e10}
    others = {"intra": [2] * 9, "inter": [1] * 8 + [2], "bytes": [*(2.0 ** np.arange(10, 18)), 0], "seconds": [1e-4] * 9}
    columns = {name: np.concatenate([measured[name], others[name]]) for name in measured}
    table = Table.from_columns("all_gather", columns)
    return CollectiveModel.fit(Profile("bare", DEVICE, {"all_gather": table}))


def test_twenty_rows_of_two_groups_are_enough_to_fit_a_network() -> None:
    assert 0.4 not in between_nodes(20, (2, 4)).network_std  # as leaving out either number of nodes shows
    for few in (between_nodes(19, (2, 4)), between_nodes(30, (4,))):  # they only scale the default constants
        assert few.network_nodes == 4 and few.network_std.tolist() == [0.4] * len(few.network_std)
        assert few.network.ring_sharpness == 1.5 and few.network.tree_efficiency == 0.8


def test_rank_skew_counts_the_ranks_of_a_node() -> None:
    # 7 us for each further rank up to eight, which is the most that was measured
    plain = NetworkCosts(DEVICE, fitted("all_gather"), 5e10, Contention(0.1))
    skewed = replace(plain, rank_skew=7e-6)
    ranks = np.array([1, 2, 8, 16])
    for op, waits in (("all_gather", [0, 7e-6, 49e-6, 49e-6]), ("broadcast", [0] * 4)):
        added = skewed.collective(op, 1e6, ranks, 1).seconds - plain.collective(op, 1e6, ranks, 1).seconds
        np.testing.assert_allclose(added, waits, rtol=1e-9, atol=1e-15)
