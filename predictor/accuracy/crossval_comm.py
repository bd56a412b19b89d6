"""Held-out tests of the communication models: points that were not fitted, inside a node and between nodes.

The naive prediction is that of the InternLM Simulator: bandwidth (bytes/s) interpolated linearly over the bytes of the message
only, constant beyond the measured sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from predictor.accuracy.score import Score, score
from predictor.network.collective_points import Points, measured_points
from predictor.network.curves import Curves
from predictor.network.fit import NetworkRows, fit_network, held_out_std, leave_one_scale_out
from predictor.network.physics import NetworkParameters
from profiler.profile.profile import Profile
from profiler.units import MIB

_LARGE = 64 * 2.0**20  # bytes: the split "sizes from 64 MiB" fits below this, tests from here on
LEAST_POINTS = 8  #: a curve of fewer sizes has none to hold out
_SMALL_GAP = 1.1  # sizes closer than 10% count as one: a neighbour would reveal a held-out one

HeldOut = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def collective_scores(profile: Profile) -> list[Score]:
    """Scores of the one-node curves, per op and over all: every second size held out, then the largest sizes."""
    points = {key: _apart(p) for key, p in measured_points(profile).items()}
    points = {key: p for key, p in points.items() if len(p[0]) >= LEAST_POINTS}
    scores = []
    for split, masks in (("every second size", _every_second), ("sizes from 64 MiB", _largest)):
        parts = [(op, _held_out(p, seen)) for (op, _), p in points.items() for seen in masks(p[0])]
        ops = dict.fromkeys(op for op, _ in parts)
        scores += [_pooled(op, split, [part for name, part in parts if name == op]) for op in ops]
        if parts:
            scores.append(_pooled("collectives", split, [part for _, part in parts]))
    return scores


def network_scores(folder: str | Path) -> list[Score]:
    """Scores of all_reduce between nodes from 1 MiB, each number of nodes predicted from the others of its network.

    folder: holds the collected files that predictor.network.fit_published reads. A network of one scale is predicted with the
    parameters of its prior network, without its own rows; then there is no naive prediction (NaN).
    """
    from predictor.network.fit_published import NETWORKS, fixed_parameters, read_rows

    fits: dict[str, NetworkParameters] = {"": NetworkParameters()}
    scores = []
    for network in NETWORKS:
        rows, _ = read_rows(Path(folder), network)
        prior, fixed = fits[network.prior], fixed_parameters(network)
        fits[network.name] = fit_network(rows, prior, fixed)
        held_out = leave_one_scale_out(rows, prior, fixed)
        scores += _network_scores(network.name, rows, held_out)
    return scores


def _network_scores(name: str, rows: NetworkRows, held_out: np.ndarray) -> list[Score]:
    large = (rows.op == "all_reduce") & (rows.at.size >= MIB)
    nodes, naive, std = rows.at.inter, _naive_scale(rows), _std_of_other_scales(rows, held_out)
    groups = [("all left-out scales", large)]
    groups += [(f"{int(n)} nodes left out", large & (nodes == n)) for n in np.unique(nodes[large])]
    return [score("all_reduce", name, split, rows.seconds[m], held_out[m], std[m], naive[m]) for split, m in groups if m.any()]


def _std_of_other_scales(rows: NetworkRows, held_out: np.ndarray) -> np.ndarray:
    """The uncertainty that the other scales give for each scale: its own errors must not widen its own interval."""
    std = np.empty(len(rows))
    for nodes in np.unique(rows.at.inter):
        out = rows.at.inter == nodes
        seen = ~out & (rows.op == "all_reduce")
        seen = seen if seen.any() else out
        std[out] = max(held_out_std(rows.where(seen), held_out[seen]).values())
    return std


def _naive_scale(rows: NetworkRows) -> np.ndarray:
    """Seconds from bytes/s over bytes of all_reduce at the other scales, for any number of nodes.

    NaN where there is no other scale.
    """
    naive = np.full(len(rows), np.nan)
    reduce = rows.op == "all_reduce"
    for nodes in np.unique(rows.at.inter):
        out, seen = reduce & (rows.at.inter == nodes), reduce & (rows.at.inter != nodes)
        if seen.any():
            size, which = np.unique(rows.at.size[seen], return_inverse=True)
            rate = np.bincount(which, rows.at.size[seen] / rows.seconds[seen]) / np.bincount(which)
            naive[out] = rows.at.size[out] / np.interp(rows.at.size[out], size, rate)
    return naive


def _apart(points: Points) -> Points:
    size, seconds = points
    keep = np.concatenate([[True], size[1:] > size[:-1] * _SMALL_GAP])
    return size[keep], seconds[keep]


def _every_second(size: np.ndarray) -> Iterator[np.ndarray]:
    """Masks of the fitted sizes; the first and the last are always fitted, so that nothing is extrapolated."""
    for first in (0, 1):
        seen = np.arange(len(size)) % 2 == first
        seen[[0, -1]] = True
        yield seen


def _largest(size: np.ndarray) -> Iterator[np.ndarray]:
    seen = size < _LARGE
    if seen.sum() >= LEAST_POINTS and not seen.all():
        yield seen


def _held_out(points: Points, seen: np.ndarray) -> HeldOut:
    """(measured, predicted, standard deviation, naive) of the sizes that are not ``seen``."""
    size, seconds = points
    curve = Curves.fit([(size[seen], seconds[seen])])
    asked = np.log(size[~seen])
    only = np.zeros(len(asked), dtype=np.int64)
    naive = size[~seen] / np.interp(size[~seen], size[seen], size[seen] / seconds[seen])
    return seconds[~seen], curve.seconds(only, asked), curve.uncertainty(only, asked)[0], naive


def _pooled(op: str, split: str, parts: list[HeldOut]) -> Score:
    measured, predicted, std, naive = (np.concatenate([part[i] for part in parts]) for i in range(4))
    return score(op, "1 node", split, measured, predicted, std, naive)
