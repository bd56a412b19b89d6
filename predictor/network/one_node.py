"""Seconds of a collective inside a node: measured curves, interpolated in bytes and in ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.network.collective_points import (
    OPS,
    Points,
    borrowed_points,
    completed,
    inside_bound,
    link_share,
    measured_points,
    ring_links,
    roofline_cost,
    roofline_points,
    sent_share,
    stated_points,
)
from predictor.network.curves import Curves
from predictor.network.physics import Groups
from profiler.errors import InputError
from profiler.profile.profile import Device, Profile

_BETWEEN_RANKS = 0.07  # error of a group size between two measured ones (log-log in ranks, leave-one-out)
_BEYOND_RANKS = 0.15  # error of a group size beyond the measured ones, per doubling
_BORROWED = 0.15  # error of an op that borrows the curve of another
_ROOFLINE = 0.35
_LARGE = 2.0**32  # bytes of a message whose latency is negligible
#: Share of the links' rate above which the switch must have reduced: on A100, H100, H200 and B200 no collective that sends all
#: of its bytes over the links reaches more than 0.8; all-reduces among eight H100 or H200, by NVLS, reach 1.02 and 1.06.
_REDUCED_ABOVE = 0.9


class _Switched(NamedTuple):
    """Times behind a switch, measured or extrapolated: flat arrays. latency: seconds that do not depend on the bytes."""

    seconds: np.ndarray
    relative_std: np.ndarray
    basis: np.ndarray
    latency: np.ndarray


@dataclass(frozen=True)
class OneNodeCollectives:
    """Collectives among the GPUs of a node; built by ``fit``.

    curves: one per (op, ranks). op, ranks, basis: op (index into OPS), group size and Basis of each curve, sorted by op, then
    ranks. link_bandwidth: bytes/s per GPU. link_peers: GPUs among which the links of one are split where no switch connects
    them (a full mesh); 0: a switch, as measured.
    """

    curves: Curves
    op: np.ndarray
    ranks: np.ndarray
    basis: np.ndarray
    link_bandwidth: float
    link_peers: float = 0.0

    @classmethod
    def fit(cls, profile: Profile) -> OneNodeCollectives:
        """Return the curves of ``profile``."""
        measured = measured_points(profile)
        stated = stated_points(profile.laws.get("intra_node", {}))
        entries = []
        for index, op in enumerate(OPS):
            for ranks, points, basis in _op_points(op, profile, measured, stated):
                entries.append((index, ranks, basis, points))
        return cls(
            curves=Curves.fit([entry[3] for entry in entries]),
            op=np.array([entry[0] for entry in entries], dtype=np.int64),
            ranks=np.array([entry[1] for entry in entries], dtype=np.float64),
            basis=np.array([entry[2] for entry in entries], dtype=np.int8),
            link_bandwidth=positive_rate("link bandwidth", profile.device.link_bandwidth),
        )

    def on(self, device: Device) -> OneNodeCollectives:
        """Return the model on another device: the time beyond the latency scales with the rate of the links."""
        ratio = self.link_bandwidth / device.link_bandwidth
        curves = self.curves if ratio == 1.0 else Curves.fit([_slower(*points, ratio) for points in self.curves.points()])
        return replace(self, curves=curves, link_bandwidth=device.link_bandwidth, link_peers=float(device.link_peers))

    def with_link_peers(self, peers: int) -> OneNodeCollectives:
        """Return the same links, split among ``peers`` other GPUs (0: behind a switch)."""
        return replace(self, link_peers=float(peers))

    def predict(self, op: str, size: np.ndarray, k: np.ndarray) -> Estimate:
        """Estimate ``op`` on buffers of ``size`` bytes among ``k`` ranks: flat float64 arrays.

        For k < 2, which send nothing, values are meaningless. Without a switch a message takes as much longer as fewer links
        lead to the group, and an all_reduce that a switch sped up is a reduce_scatter and an all_gather.
        """
        found = self._behind_switch(op, size, k)
        if not self.link_peers:
            return Estimate(*found[:3])
        moved = found.seconds - found.latency
        if op == "all_reduce":
            gather = self._behind_switch("all_gather", size, k)
            moved = np.where(self._reduced_in_switch(k), np.maximum(moved, 2.0 * (gather.seconds - gather.latency)), moved)
        share = link_share(np.full_like(k, 2.0) if op == "p2p" else k, self.link_peers)
        return Estimate(found.latency + moved / share, found.relative_std, found.basis)

    def groups(
        self, op: str, size: np.ndarray, k: np.ndarray, nodes: np.ndarray, rate: np.ndarray, one_node: np.ndarray
    ) -> Groups:
        """Return the inputs of the network model for groups of ``nodes`` nodes x ``k`` ranks: flat arrays.

        rate: bytes/s per GPU between nodes. one_node: seconds of the same message among the ranks of one node.
        """
        inside = self._inside_bound(op, size, k, nodes, one_node)
        ring = inside
        if op == "all_reduce":
            gather = self._inside_bound("all_gather", size, k, nodes, self.predict("all_gather", size, k).seconds)
            ring = np.maximum(inside, 2.0 * gather)
        return Groups(size, k, nodes, rate, self.link_bandwidth * ring_links(k, self.link_peers), inside, ring)

    def _inside_bound(self, op: str, size: np.ndarray, k: np.ndarray, nodes: np.ndarray, one_node: np.ndarray) -> np.ndarray:
        """Least seconds of the part in a node, whose links between pairs carry no more than among the ranks of one node."""
        if not self.link_peers or op == "p2p":
            return inside_bound(op, one_node, k, nodes)
        switched = inside_bound(op, self._behind_switch(op, size, k).seconds, k, nodes)
        return np.where(k > 1, np.maximum(switched, one_node), 0.0)

    def _reduced_in_switch(self, k: np.ndarray) -> np.ndarray:
        """Whether all-reduces among ``k`` ranks are so fast that the switch must have reduced them."""
        seconds = self._behind_switch("all_reduce", np.full(k.shape, _LARGE), k).seconds
        busbw: np.ndarray = sent_share("all_reduce", k) * _LARGE / seconds
        return busbw > _REDUCED_ABOVE * self.link_bandwidth

    def _behind_switch(self, op: str, size: np.ndarray, k: np.ndarray) -> _Switched:
        """Return times as measured behind a switch; between two measured group sizes log time is linear in log ranks."""
        curves_of_op = np.flatnonzero(self.op == OPS.index(op))
        measured = self.ranks[curves_of_op]
        k = np.full_like(k, measured[0]) if op == "p2p" else k
        log_bytes = np.log(np.maximum(size, 1.0))
        above = np.minimum(np.searchsorted(measured, k), len(curves_of_op) - 1)
        below = np.where(measured[above] > k, np.maximum(above - 1, 0), above)
        low, high = curves_of_op[below], curves_of_op[above]
        span = np.log(measured[above] / measured[below])
        weight = np.clip(np.log(np.maximum(k, 1.0) / measured[below]) / np.where(span > 0, span, 1.0), 0.0, 1.0)
        seconds = self.curves.seconds(low, log_bytes)
        between = np.flatnonzero(low != high)
        if len(between):
            upper = self.curves.seconds(high[between], log_bytes[between])
            seconds[between] *= (upper / seconds[between]) ** weight[between]
        std, exact, outside = self.curves.uncertainty(high, log_bytes)
        seconds, beyond = self._other_ranks(op, seconds, k, high, measured)
        std = np.sqrt(std**2 + np.where(low != high, _BETWEEN_RANKS, _BEYOND_RANKS * beyond) ** 2)
        basis = np.where(exact & (low == high), Basis.MEASURED, Basis.INTERPOLATED)
        basis = np.where(outside | (beyond > 0), Basis.EXTRAPOLATED, basis)
        floor = self.basis[high]
        std = np.sqrt(
            std**2 + np.select([floor == Basis.ROOFLINE, floor == Basis.EXTRAPOLATED], [_ROOFLINE, _BORROWED], 0.0) ** 2
        )
        latency = np.minimum(self.curves.latency(high), seconds)
        return _Switched(seconds, std, np.maximum(basis, floor).astype(np.int8), latency)

    def _other_ranks(
        self, op: str, seconds: np.ndarray, k: np.ndarray, curve: np.ndarray, measured: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Extrapolate to groups smaller or larger than any measured; returns seconds and doublings away.

        Start-up and transfer scale separately. The transfer scales with the share of the buffer that a rank sends. The
        start-up of all2all is constant, since its messages leave together; that of the other ops grows with log2 of the ranks,
        and shrinks with the share (as leaving out the largest and the smallest measured group shows).
        """
        at = np.clip(k, measured[0], measured[-1])
        k = np.maximum(k, 2.0)
        doublings = np.abs(np.log2(k / at))
        latency = np.minimum(self.curves.latency(curve), seconds)
        share = sent_share(op, k) / sent_share(op, at)
        growth = 1.0 if op == "all2all" else np.where(k > at, np.log2(k) / np.log2(at), share)
        other = latency * growth + (seconds - latency) * share
        return np.where(doublings > 0, other, seconds), doublings

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything as numeric arrays, for an npz file."""
        return {**self.curves.to_arrays("curve_"), **{name: np.asarray(getattr(self, name)) for name in _PLAIN}}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> OneNodeCollectives:
        """The inverse of ``to_arrays``."""
        plain: dict[str, Any] = {name: np.asarray(arrays[name]) for name in _PLAIN}
        plain |= {name: float(plain[name]) for name in ("link_bandwidth", "link_peers")}
        return cls(curves=Curves.from_arrays(arrays, "curve_"), **plain)


_PLAIN = ("op", "ranks", "basis", "link_bandwidth", "link_peers")


def _slower(size: np.ndarray, seconds: np.ndarray, ratio: float) -> Points:
    """Return the points of a curve whose bytes take ``ratio`` times as long, and whose latency stays."""
    return size, seconds[0] + ratio * (seconds - seconds[0])


PointsByGroup = Mapping[tuple[str, int], Points]


def _op_points(op: str, profile: Profile, measured: PointsByGroup, stated: PointsByGroup) -> list[tuple[int, Points, Basis]]:
    """(ranks, points, basis) of every one-node curve of ``op``, ascending in ranks, from the best source available.

    First measured points, completed where they are few. Else extrapolated ones: borrowed from another measured op, or as the
    profile states, or borrowed from what it states of another op. Else the datasheet (roofline).
    """
    own, given = ({ranks: p for (name, ranks), p in group.items() if name == op} for group in (measured, stated))
    lent = borrowed_points(op, measured) or given or borrowed_points(op, stated)
    if own:
        return [(ranks, *completed(own[ranks], roofline_cost(op, ranks, profile.device))) for ranks in sorted(own)]
    if lent:
        points, basis = lent, Basis.EXTRAPOLATED
    else:
        points, basis = roofline_points(op, profile.device), Basis.ROOFLINE
    return [(ranks, points[ranks], basis) for ranks in sorted(points)]


def positive_rate(what: str, value: float) -> float:
    """Return ``value``. Raises InputError unless it is a positive, finite rate."""
    if not (np.isfinite(value) and value > 0):
        raise InputError(f"the {what} is {value}; it must be positive and finite")
    return float(value)
