"""Points (bytes, seconds) of the one-node curves, from the measurements of a profile.

Which measurements: half precision where there is any (gradients and activations are sent in it, and switches that reduce
support only half or float), then the three newest NCCL releases (measurements that name none only where no measurement names
one), then the median per size. An op that was not measured borrows the points of one that moves the same bytes over the same
links.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from predictor.estimate import Basis
from profiler.errors import InputError
from profiler.profile.profile import COLLECTIVES, HALF_DTYPES, Device, Profile, Table

OPS = (*COLLECTIVES, "p2p")
Points = tuple[np.ndarray, np.ndarray]

_MOST_POINTS = 96  # with more sizes, medians over eighths of an octave: a curve needs no more
_RELEASES = 3
_START = 8e-6  # seconds of a small collective of two ranks, where nothing was measured
_STEP = 1.5e-6  # seconds for every further rank: the order of magnitude on NVLink
_EFFICIENCY = 0.75  # fraction of the link's rate that large messages reach, where nothing was measured
_SIZES = 2.0 ** np.arange(9, 31)
_RATE_BOUND = 2.0**20  # bytes from which the rate counts, where a largest measured size is smaller (assumed)
_FAR = 16.0  # from one measured size to the next, beyond which what is between is not read off a curve

# op -> donors, most similar first: (op, factor on its bytes that gives the same message, factor on its time).
_SENT = "sent"  # the share (k - 1) / k that each of k ranks sends
_DONORS: dict[str, tuple[tuple[str, float | str, float], ...]] = {
    "all_reduce": (("reduce_scatter", 1.0, 2.0), ("all_gather", 1.0, 2.0)),  # ring: reduce-scatter, then all-gather
    "all_gather": (("reduce_scatter", 1.0, 1.0), ("all_reduce", 1.0, 0.5)),
    "reduce_scatter": (("all_gather", 1.0, 1.0), ("all_reduce", 1.0, 0.5)),
    "all2all": (("all_gather", 1.0, 1.0),),  # each rank sends and receives (k - 1) / k of the buffer in both
    "broadcast": (("all_gather", _SENT, 1.0), ("reduce_scatter", _SENT, 1.0), ("all_reduce", _SENT, 0.5)),
    "p2p": (("all2all", _SENT, 1.0), ("all_gather", _SENT, 1.0)),
}


def release(env: str) -> tuple[int, ...]:
    """The NCCL release that ``env`` names, as comparable numbers; () where it names none."""
    found = re.search(r"nccl\W*(\d+(?:\.\d+)*)", env.lower())
    return tuple(int(part) for part in found.group(1).split(".")) if found else ()


def preferred(table: Table) -> Table:
    """The rows of one group to use: half precision before others, then the newest releases.

    Three releases instead of one: a single run has outliers of a factor 2 below 100 KiB, and the median of three has none.
    """
    half = np.isin(table["dtype"], HALF_DTYPES)
    table = table.where(half) if half.any() else table
    releases = {str(env): release(str(env)) for env in np.unique(table["env"])}
    newest = sorted(set(releases.values()), reverse=True)[:_RELEASES]
    newest = [found for found in newest if found] or newest
    return table.where(np.isin(table["env"], [env for env, found in releases.items() if found in newest]))


def node_points(table: Table, ranks: int) -> Points:
    """Distinct ascending bytes, and the median seconds of the preferred rows of a group of ranks of one node.

    Empty where nothing was measured.
    """
    rows = preferred(table.where((table["intra"] == ranks) & (table["inter"] == 1) & (table["bytes"] > 0)))
    size = rows["bytes"].astype(np.float64)
    if len(np.unique(size)) > _MOST_POINTS:
        bins = np.round(np.log2(size) * 8)
        size = np.array([np.median(size[bins == b]) for b in bins])
    sizes = np.unique(size)
    return sizes, np.array([np.median(rows["seconds"][size == s]) for s in sizes])


def measured_points(profile: Profile) -> dict[tuple[str, int], Points]:
    """One-node points by (op, ranks) for every measured group; p2p is stored under two ranks."""
    found: dict[tuple[str, int], Points] = {}
    for op in OPS:
        table = profile.table(op)
        one_node = table.where(table["inter"] == 1)
        for ranks in np.unique(one_node["intra"]):
            points = node_points(one_node, int(ranks))
            if ranks >= 2 and len(points[0]):
                found[op, int(ranks)] = points
    return found


def borrowed_points(op: str, measured: Mapping[tuple[str, int], Points]) -> dict[int, Points]:
    """Points of an unmeasured ``op`` by ranks, from the measured op that moves the same bytes; {} if there is none."""
    for donor, share, factor in _DONORS[op]:
        ranks = sorted(k for name, k in measured if name == donor)
        if op == "p2p":
            ranks = ranks[:1]
        if ranks:
            moved = {k: (k - 1) / k if share == _SENT else float(share) for k in ranks}
            return {k: (measured[donor, k][0] * moved[k], measured[donor, k][1] * factor) for k in ranks}
    return {}


def stated_points(stated: Mapping[str, Any]) -> dict[tuple[str, int], Points]:
    """Points by (op, ranks) from constants that a profile states of its node; others fitted them to data it cannot include.

    stated: {op: {ranks: {"bandwidth": bytes/s, "traffic": bytes sent per byte of the buffer, "latency": seconds}}} for seconds
    = latency + traffic * bytes / bandwidth; entries without a latency mean something else and are left out.
    """
    points: dict[tuple[str, int], Points] = {}
    for op in OPS:
        for ranks, constants in dict(stated.get(op, {})).items():
            if "latency" not in constants:
                continue
            latency, rate = float(constants["latency"]), float(constants["bandwidth"]) / float(constants["traffic"])
            if not (latency > 0 and 0 < rate < np.inf):
                raise InputError(f"the profile's intra_node constants of {op} among {ranks} ranks must be positive and finite")
            points[op, int(ranks)] = (_SIZES, latency + _SIZES / rate)
    return points


def roofline_cost(op: str, ranks: float, device: Device) -> float:
    """Return the seconds per byte of an op without any data: bytes sent / (datasheet rate * usual efficiency)."""
    return float(sent_share(op, ranks)) / (device.link_bandwidth * _EFFICIENCY)


def roofline_points(op: str, device: Device) -> dict[int, Points]:
    """Points of an op without any data.

    seconds = usual start-up time + bytes * roofline_cost.
    """
    usual = (2, 4, 8, device.gpus_per_node)
    ranks = {2} if op == "p2p" else {k for k in usual if 2 <= k <= max(device.gpus_per_node, 2)}
    return {k: (_SIZES, _START + _STEP * (k - 2) + roofline_cost(op, k, device) * _SIZES) for k in sorted(ranks)}


def completed(points: Points, cost: float) -> tuple[Points, Basis]:
    """Return the measured points of a group, and what a few of them lack, with the basis of it all.

    Between sizes that are far apart that is a start-up time and a rate, which a curve through the logarithms of both would not
    have; beyond a largest size that latency bounds it is ``cost`` [seconds per byte], as such a size says nothing of the rate.
    """
    size, seconds = points
    rated = bool(size[-1] >= _RATE_BOUND)
    if not rated:
        size, seconds = np.append(size, _SIZES[-1]), np.append(seconds, seconds[-1] + cost * (_SIZES[-1] - size[-1]))
    far = np.flatnonzero(size[1:] > _FAR * size[:-1])
    if not len(far):
        return points, Basis.MEASURED
    between = [np.geomspace(size[i], size[i + 1], 2 + int(np.log2(size[i + 1] / size[i]) // 2))[1:-1] for i in far]
    at = np.sort(np.concatenate([size, *between]))
    return (at, np.interp(at, size, np.maximum.accumulate(seconds))), Basis.EXTRAPOLATED if rated else Basis.ROOFLINE


def link_share(ranks: ArrayLike, peers: float) -> np.ndarray:
    """Return the share of a GPU's links that lead to the other ranks of its group in a node.

    peers: GPUs among which the links are split; 0: a switch gives any of them all. A lone rank sends to none in its node.
    """
    ranks = np.asarray(ranks, dtype=np.float64)
    share: np.ndarray = np.minimum((ranks - 1.0) / peers, 1.0) if peers else np.ones_like(ranks)
    return np.where(ranks > 1, share, 1.0)


def ring_links(ranks: np.ndarray, peers: float) -> np.ndarray:
    """Return the share of a GPU's links that rings over several nodes use: a ring leaves the node at each of its ``ranks`` by
    that one's NIC, so that links between them carry (k - 1) / k of what each sends.
    """
    return np.minimum(link_share(ranks, peers) * ranks / np.maximum(ranks - 1.0, 1.0), 1.0)


def sent_share(op: str, ranks: ArrayLike) -> np.ndarray:
    """Bytes that each of ``ranks`` sends per byte of the buffer (nccl-tests: busbw = this * bytes / seconds)."""
    ranks = np.asarray(ranks, dtype=np.float64)
    if op in ("broadcast", "p2p"):
        return np.ones_like(ranks)
    return (2.0 if op == "all_reduce" else 1.0) * (ranks - 1.0) / ranks


def inside_bound(op: str, one_node: np.ndarray, intra: np.ndarray, inter: np.ndarray) -> np.ndarray:
    """Least seconds that the ranks of a node need for their part of a collective over ``inter`` nodes.

    one_node: seconds of the same message among ``intra`` ranks behind a switch; a larger group sends a larger share of the
    buffer. Zero where a node holds one rank. A message between two nodes is no faster than one between two ranks of a node.
    """
    if op == "p2p":
        return one_node
    grown = sent_share(op, intra * inter) / sent_share(op, np.maximum(intra, 2.0))
    return np.where(intra > 1, one_node * np.maximum(grown, 1.0), 0.0)
