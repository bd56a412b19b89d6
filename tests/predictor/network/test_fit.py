"""How the network's constants are fitted: weights, held-out errors and what is fixed, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.network.fit import (
    NetworkRows,
    _bounds,
    _weights,
    fit_network,
    held_out_std,
    leave_one_scale_out,
    predict_rows,
)
from predictor.network.physics import Groups, NetworkParameters

DEFAULT = NetworkParameters()


def rows(op: str, size: np.ndarray, inter: np.ndarray, made_with: NetworkParameters = DEFAULT) -> NetworkRows:
    """Return messages between nodes of one rank at 50 GB/s, timed as ``made_with`` has it."""
    nothing, one = np.zeros(len(size)), np.ones(len(size))
    at = Groups(size, one, inter, np.full(len(size), 5e10), 4e11, nothing, nothing)
    made = NetworkRows(np.full(len(size), op), one, at, np.zeros(len(size), dtype=bool))
    return replace(made, seconds=predict_rows(made, made_with))


def test_groups_weigh_the_same_and_small_messages_half() -> None:
    # four sizes between two nodes and one between four: a tenth is one prior standard deviation, shared by a group's rows
    size, nodes = 2.0 ** np.array([19, 20, 21, 22, 20]), np.array([2.0, 2, 2, 2, 4])
    assert _weights(rows("all_gather", size, nodes)).tolist() == [2.5, 5, 5, 5, 10]


def test_the_held_out_deviation_is_that_of_the_90th_percentile() -> None:
    made = rows("all_gather", np.full(11, 2.0**20), np.full(11, 2.0))
    # errors of the logarithm from 0 to 0.329 in tenths: 90% are up to 0.2961, which is 1.645 standard deviations; 5% at least
    off = np.exp(np.linspace(0, 0.329, 11) * np.where(np.arange(11) % 2, 1, -1))
    assert held_out_std(made, made.seconds * off) == {"all_gather": pytest.approx(0.18)}
    assert held_out_std(made, made.seconds) == {"all_gather": 0.05}


def test_constants_are_recovered_or_kept_or_fixed() -> None:
    size = 2.0 ** np.arange(10, 31, 2)
    sizes, nodes = np.concatenate([size, size]), np.repeat([2.0, 8.0], len(size))
    truth = replace(DEFAULT, p2p_latency=40e-6, p2p_efficiency=0.5)
    found = fit_network(rows("p2p", sizes, nodes, truth), DEFAULT)
    assert (found.p2p_latency, found.p2p_efficiency) == pytest.approx((40e-6, 0.5), rel=0.1)  # the prior pulls a little
    assert replace(found, p2p_latency=15e-6, p2p_efficiency=0.8) == DEFAULT  # no row says anything of the others
    fixed = fit_network(rows("p2p", sizes, nodes, truth), DEFAULT, {"p2p_efficiency": 0.25})
    assert fixed.p2p_efficiency == 0.25
    # a scale that was left out is predicted from the others, which follow the same constants
    made = rows("all2all", sizes, nodes, replace(DEFAULT, all2all_efficiency=0.4))
    assert np.abs(np.log(leave_one_scale_out(made, DEFAULT) / made.seconds)).max() < 0.05


def test_bounds() -> None:
    assert _bounds("link_efficiency") == (0.01, 1.0) and _bounds("start") == (1e-8, 1e-2)
    assert _bounds("ring_sharpness") == (0.7, 8.0) and _bounds("two_node_share") == (0.9, 2.1)
