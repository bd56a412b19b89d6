"""Fit of the network model: least squares on log time, with a prior from other networks.

The logs of one cluster hold few scales, so they do not determine every parameter. A weak prior (a factor of two either way)
around the parameters of a similar network keeps the undetermined ones physical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from predictor.estimate import std_of_errors
from predictor.network.collective_points import OPS
from predictor.network.measured_groups import between_nodes
from predictor.network.one_node import OneNodeCollectives
from predictor.network.physics import Groups, NetworkParameters, network_seconds
from profiler.profile.profile import Profile

_RING_TREE = (
    "start",
    "simple_start",
    "tree_hop",
    "tree_hop_low_latency",
    "ring_step",
    "ring_step_low_latency",
    "ring_sharpness",
    "link_efficiency",
    "tree_efficiency",
    "low_latency_efficiency",
    "two_node_share",
)
_FAMILIES = (
    (("all_reduce", "all_gather", "reduce_scatter"), _RING_TREE),
    (("all2all",), ("peer_latency", "all2all_efficiency")),
    (("p2p",), ("p2p_latency", "p2p_efficiency")),
)
_PRIOR_FACTOR = 0.7  # standard deviation of the log of a parameter between networks
_SMALL = 2.0**20  # training sends megabytes: smaller messages count half
_SMALL_WEIGHT = 0.5
_WEIGHT = 10.0  # a 10% error in every row of a group weighs as much as one prior standard deviation
_STARTS = (1.0, 0.3, 3.0)  # factors on the prior's latencies from which the search starts


@dataclass(frozen=True)
class NetworkRows:
    """Measured collectives between nodes: op (str), seconds, their Groups, ring_only (bool); all of shape [rows]."""

    op: np.ndarray
    seconds: np.ndarray
    at: Groups
    ring_only: np.ndarray

    def __len__(self) -> int:
        return len(self.op)

    def where(self, mask: np.ndarray) -> NetworkRows:
        at = replace(self.at, **{name: np.asarray(getattr(self.at, name))[mask] for name in _GROUP_ARRAYS})
        return NetworkRows(self.op[mask], self.seconds[mask], at, self.ring_only[mask])


_GROUP_ARRAYS = ("size", "intra", "inter", "bandwidth", "inside", "inside_ring")


def network_rows(node: OneNodeCollectives, columns: Mapping[str, Any], bandwidth: float) -> NetworkRows:
    """Rows from columns op, bytes, intra, inter, seconds and ring_only; ``node`` estimates the part inside a node.

    bandwidth: nominal bytes/s per GPU between the nodes that were measured.
    """
    op = np.asarray(columns["op"], dtype=np.str_)
    size, k, nodes = (np.asarray(columns[name], dtype=np.float64) for name in ("bytes", "intra", "inter"))
    inside, ring = np.zeros(len(op)), np.zeros(len(op))
    for name in np.unique(op):
        rows = op == name
        message = str(name), size[rows], k[rows]
        one_node = np.where(k[rows] > 1, node.predict(*message).seconds, 0.0)  # a lone rank sends nothing in its node
        at = node.groups(*message, nodes[rows], np.full(rows.sum(), bandwidth), one_node)
        inside[rows], ring[rows] = at.inside, at.inside_ring
    at = Groups(size, k, nodes, np.full(len(op), bandwidth), node.link_bandwidth, inside, ring)
    ring_only = np.broadcast_to(np.asarray(columns.get("ring_only", False), dtype=bool), (len(op),)).copy()
    return NetworkRows(op, np.asarray(columns["seconds"], dtype=np.float64), at, ring_only)


def profile_rows(node: OneNodeCollectives, profile: Profile) -> NetworkRows:
    """The profile's own multi-node rows; for p2p only those of one rank per node."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("op", "bytes", "intra", "inter", "seconds")}
    for op in OPS:
        table = between_nodes(op, profile.table(op))
        parts["op"].append(np.full(len(table), op))
        for name in ("bytes", "intra", "inter", "seconds"):
            parts[name].append(table[name])
    columns = {name: np.concatenate(part) for name, part in parts.items()}
    return network_rows(node, columns, profile.device.network_bandwidth)


def predict_rows(rows: NetworkRows, fit: NetworkParameters) -> np.ndarray:
    """Seconds of every row by the network model."""
    seconds = np.empty(len(rows))
    for op in np.unique(rows.op):
        for ring_only in (False, True):
            mask = (rows.op == op) & (rows.ring_only == ring_only)
            if mask.any():
                seconds[mask] = network_seconds(str(op), rows.where(mask).at, fit, ring_only)
    return seconds


def fit_network(rows: NetworkRows, prior: NetworkParameters, fixed: Mapping[str, float] | None = None) -> NetworkParameters:
    """The parameters that fit ``rows``; those that no row determines stay at ``prior``, ``fixed`` ones as given."""
    fit = replace(prior, **dict(fixed or {}))
    for ops, names in _FAMILIES:
        family = rows.where(np.isin(rows.op, ops))
        free = [name for name in names if name not in (fixed or {})]
        if len(family):
            fit = _fit_family(family, fit, free)
    return fit


def fit_scale(rows: NetworkRows, prior: NetworkParameters) -> NetworkParameters:
    """``prior`` with one factor on all rates and one on all latencies, fitted to rows that are too few to fit more.

    Least squares on log time with the same weights and prior width as ``fit_network``; no efficiency exceeds 1.
    """
    from scipy.optimize import least_squares

    measured, weight = np.log(rows.seconds), _weights(rows)

    def residual(v: np.ndarray) -> np.ndarray:
        error = np.log(predict_rows(rows, scaled(prior, *np.exp(v)))) - measured
        return np.concatenate([weight * error, v / (3 * _PRIOR_FACTOR)])  # networks differ by more than their constants' shape

    starts = [np.log([rate, latency]) for rate in (1.0, 0.3, 0.1) for latency in (1.0, 3.0)]
    fits = [least_squares(residual, start, bounds=(-7.0, 7.0), loss="soft_l1", max_nfev=60) for start in starts]
    return scaled(prior, *np.exp(min(fits, key=lambda fit: fit.cost).x))


def scaled(prior: NetworkParameters, rate: float, latency: float) -> NetworkParameters:
    """``prior`` with every rate times ``rate`` (efficiencies at most 1) and every latency times ``latency``."""
    efficiencies = ("link_efficiency", "all2all_efficiency", "p2p_efficiency")
    rates = {name: min(getattr(prior, name) * rate, 1.0) for name in efficiencies}
    latencies = {name: value * latency for name, value in prior.to_dict().items() if not _is_share(name)}
    return replace(prior, **rates, **latencies)


def residuals(rows: NetworkRows, fit: NetworkParameters) -> dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray]]:
    """(bytes, median log(measured / fit) of each size) by (index of op, ranks in a node, nodes)."""
    ratio = np.log(rows.seconds / predict_rows(rows, fit))
    op = np.array([OPS.index(str(name)) for name in rows.op])
    key = np.stack([op, rows.at.intra, rows.at.inter]).astype(np.int64)
    found = {}
    for group in np.unique(key, axis=1).T:
        here = (key == group[:, None]).all(axis=0)
        sizes = np.unique(rows.at.size[here])
        medians = np.array([np.median(ratio[here & (rows.at.size == size)]) for size in sizes])
        found[int(group[0]), int(group[1]), int(group[2])] = sizes, medians
    return found


def _fit_family(rows: NetworkRows, prior: NetworkParameters, names: Sequence[str]) -> NetworkParameters:
    from scipy.optimize import least_squares

    centre = np.log([getattr(prior, name) for name in names])
    bounds = np.log([_bounds(name) for name in names]).T
    latency = np.array([not _is_share(name) for name in names])
    measured, weight = np.log(rows.seconds), _weights(rows)

    def fit_of(v: np.ndarray) -> NetworkParameters:
        return replace(prior, **dict(zip(names, map(float, np.exp(v)), strict=True)))

    def residual(v: np.ndarray) -> np.ndarray:
        error = np.log(predict_rows(rows, fit_of(v))) - measured
        return np.concatenate([weight * error, (v - centre) / _PRIOR_FACTOR])

    starts = [np.clip(centre + np.log(factor) * latency, *bounds) for factor in _STARTS]
    fits = [least_squares(residual, start, bounds=bounds, loss="soft_l1", max_nfev=60) for start in starts]
    return fit_of(min(fits, key=lambda fit: fit.cost).x)


def _is_share(name: str) -> bool:
    """Whether a constant has no unit; the others are latencies."""
    return name.endswith(("efficiency", "sharpness", "share")) or name == "inside_step"


def _bounds(name: str) -> tuple[float, float]:
    if name.endswith("efficiency"):
        return 0.01, 1.0
    return {"ring_sharpness": (0.7, 8.0), "two_node_share": (0.9, 2.1)}.get(name, (1e-8, 1e-2))


def _weights(rows: NetworkRows) -> np.ndarray:
    """Give every group (op, nodes, ranks in a node) the same weight, however many sizes of it were measured."""
    ids = np.stack([np.unique(c, return_inverse=True)[1] for c in (rows.op, rows.at.inter, rows.at.intra)])
    _, inverse, count = np.unique(ids, axis=1, return_inverse=True, return_counts=True)
    return _WEIGHT / np.sqrt(count[np.ravel(inverse)]) * np.where(rows.at.size >= _SMALL, 1.0, _SMALL_WEIGHT)


def leave_one_scale_out(rows: NetworkRows, prior: NetworkParameters, fixed: Mapping[str, float] | None = None) -> np.ndarray:
    """Seconds of every row, predicted from the rows of all other numbers of nodes."""
    seconds = np.empty(len(rows))
    for nodes in np.unique(rows.at.inter):
        out = rows.at.inter == nodes
        seconds[out] = predict_rows(rows.where(out), fit_network(rows.where(~out), prior, fixed))
    return seconds


def held_out_std(rows: NetworkRows, predicted: np.ndarray) -> dict[str, float]:
    """Standard deviation of log time by op, from the 90th percentile of the held-out errors; at least 5%."""
    error = np.log(predicted / rows.seconds)
    return {op: max(std_of_errors(error[rows.op == op]), 0.05) for op in OPS if (rows.op == op).any()}
