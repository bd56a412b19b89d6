"""Seconds of a collective: measured curves inside a node, a physical model of the network between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

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
from predictor.network.fit import fit_network, fit_scale, held_out_std, leave_one_scale_out, profile_rows, residuals
from predictor.network.measured_groups import MeasuredGroups, own_network
from predictor.network.physics import Groups, NetworkParameters, network_seconds
from profiler.errors import InputError
from profiler.profile.profile import NETWORK_ROWS, Device, Profile

_BETWEEN_RANKS = 0.07  # error of a group size between two measured ones (log-log in ranks, leave-one-out)
_BEYOND_RANKS = 0.15  # error of a group size beyond the measured ones, per doubling
_BORROWED = 0.15  # error of an op that borrows the curve of another
_ROOFLINE = 0.35
UNSEEN_NETWORK_STD = 0.4  # uncertainty of the network model with default constants
_LARGE = 2.0**32  # bytes of which latency is no part
#: Share of the links' rate that no collective reaches that sends all of its bytes over them: on A100, H100, H200 and B200 none
#: is above 0.8 but the all-reduces of H100 and H200 among eight, which NVLS reduces (1.02, 1.06).
_MOST_OF_LINKS = 0.9
_PER_DOUBLING = 0.03  # for more nodes than the model was fitted on


@dataclass(frozen=True)
class CollectiveModel:
    """Estimates collectives on a profile's device; built by ``fit``.

    curves: one per (op, ranks in one node). op, ranks, basis: op (index into OPS), group size and Basis of each curve, sorted
    by op, then ranks. network: constants of the model between nodes. network_std: its held-out standard deviation of log time,
    by index of OPS. network_nodes: most nodes that it was fitted on (0: default constants). bandwidths: bytes/s per GPU of
    [link in the node, network]. groups_between_nodes: curves of groups that were measured on the network itself. link_peers:
    GPUs among which the links of one are split where no switch connects them (a full mesh); 0: a switch, as measured.
    """

    curves: Curves
    op: np.ndarray
    ranks: np.ndarray
    basis: np.ndarray
    network: NetworkParameters
    network_std: np.ndarray
    network_nodes: float
    bandwidths: np.ndarray
    groups_between_nodes: MeasuredGroups
    link_peers: float = 0.0

    @classmethod
    def fit(cls, profile: Profile) -> CollectiveModel:
        """Fit the model of ``profile``."""
        measured = measured_points(profile)
        stated = stated_points(profile.laws.get("intra_node", {}))
        entries = []
        for index, op in enumerate(OPS):
            for ranks, points, basis in _op_points(op, profile, measured, stated):
                entries.append((index, ranks, basis, points))
        device = profile.device
        fit = cls(
            curves=Curves.fit([entry[3] for entry in entries]),
            op=np.array([entry[0] for entry in entries], dtype=np.int64),
            ranks=np.array([entry[1] for entry in entries], dtype=np.float64),
            basis=np.array([entry[2] for entry in entries], dtype=np.int8),
            network=NetworkParameters(),
            network_std=np.full(len(OPS), UNSEEN_NETWORK_STD),
            network_nodes=0.0,
            bandwidths=np.array(
                [_positive("link bandwidth", device.link_bandwidth), _positive("network bandwidth", device.network_bandwidth)]
            ),
            groups_between_nodes=MeasuredGroups.none(),
        )
        return fit.with_network(profile)

    def with_network(self, profile: Profile) -> CollectiveModel:
        """This model with network constants as stated by the profile, or fitted to its own rows between nodes.

        Stated constants (fitted to published logs) hold unless the rows are of the profile's own network. NETWORK_ROWS rows of
        two kinds of group or more determine the constants; fewer only scale them: one factor on all rates, one on all
        latencies. Groups that were measured are estimated as measured.
        """
        stated = profile.laws.get("inter_node")
        prior = self._with_stated(_stated_network(stated, profile.name)) if stated else self
        rows = profile_rows(self, profile) if own_network(profile) else None
        if rows is None or not len(rows):
            return prior
        nodes = max(float(rows.at.inter.max()), prior.network_nodes)
        if len(rows) >= NETWORK_ROWS and len(np.unique(np.stack([rows.at.intra, rows.at.inter]), axis=1).T) > 1:
            std = held_out_std(rows, leave_one_scale_out(rows, prior.network))
            fit = replace(prior, network=fit_network(rows, prior.network), network_nodes=float(rows.at.inter.max()))
            fit = replace(fit, network_std=_std_by_op(std))
        else:
            fit = replace(prior, network=fit_scale(rows, prior.network), network_nodes=nodes)
        return replace(fit, groups_between_nodes=MeasuredGroups.of(residuals(rows, fit.network)))

    def _with_stated(self, entry: Mapping[str, Any]) -> CollectiveModel:
        return replace(
            self,
            network=NetworkParameters.from_dict(entry["parameters"]),
            network_std=_std_by_op(entry["relative_std"]),
            network_nodes=float(entry["most_nodes"]),
        )

    def on(self, device: Device) -> CollectiveModel:
        """Return the model on another device: what comes on top of the latency scales with the rate of the links."""
        ratio = float(self.bandwidths[0] / device.link_bandwidth)
        curves = self.curves if ratio == 1.0 else Curves.fit([_slower(*points, ratio) for points in self.curves.points()])
        return replace(
            self,
            curves=curves,
            bandwidths=np.array([device.link_bandwidth, device.network_bandwidth]),
            groups_between_nodes=MeasuredGroups.none(),
            link_peers=float(device.link_peers),
        )

    def with_link_peers(self, peers: int) -> CollectiveModel:
        """The same links, split among ``peers`` other GPUs (0: behind a switch)."""
        return replace(self, link_peers=float(peers))

    @property
    def measured(self) -> CollectiveModel:
        """What of it is from a profile: all."""
        return self

    def for_world(self, world: int, per_domain: int) -> CollectiveModel:
        """The same for a job of any size."""
        return self

    def predict(
        self,
        op: str,
        bytes: ArrayLike,
        intra: ArrayLike,
        inter: ArrayLike,
        network_bandwidth: ArrayLike | None = None,
    ) -> Estimate:
        """Estimate ``op`` in groups of ``inter`` nodes x ``intra`` ranks; arguments broadcast.

        bytes: of the whole buffer (profiler.profile.profile). network_bandwidth: bytes/s per GPU between nodes. A group of one
        rank and a message of no bytes take no time. Raises InputError for an unknown op and for an impossible size, group or
        bandwidth.
        """
        if op not in OPS:
            raise InputError(f"no collective {op!r}; there are {', '.join(OPS)}")
        given = self.bandwidths[1] if network_bandwidth is None else network_bandwidth
        shape = np.broadcast_shapes(*(np.shape(a) for a in (bytes, intra, inter, given)))
        size, k, nodes, rate = (
            np.ravel(np.broadcast_to(np.asarray(a, dtype=np.float64), shape)) for a in (bytes, intra, inter, given)
        )
        _check(size, k, nodes, rate)
        seconds, std, basis = self._inside(op, size, k)
        far = np.flatnonzero(nodes > 1)
        if len(far):
            groups = self.groups(op, size[far], k[far], nodes[far], rate[far], seconds[far])
            seconds[far] = network_seconds(op, groups, self.network)
            std[far], basis[far] = self._network_uncertainty(op, nodes[far])
            known = seconds[far], std[far], basis[far]
            self.groups_between_nodes.correct(OPS.index(op), size[far], k[far], nodes[far], *known)
            seconds[far], std[far], basis[far] = known
        nothing = (k * nodes <= 1) | (size <= 0)
        seconds[nothing], std[nothing], basis[nothing] = 0.0, 0.0, Basis.MEASURED
        return Estimate(seconds.reshape(shape), std.reshape(shape), basis.reshape(shape))

    def groups(
        self, op: str, size: np.ndarray, k: np.ndarray, nodes: np.ndarray, rate: np.ndarray, one_node: np.ndarray
    ) -> Groups:
        """Inputs of the network model for groups that span nodes.

        one_node: seconds of the same message among the ranks of one node.
        """
        inside = self._inside_bound(op, size, k, nodes, one_node)
        ring = inside
        if op == "all_reduce":
            gather = self._inside_bound("all_gather", size, k, nodes, self._inside("all_gather", size, k)[0])
            ring = np.maximum(inside, 2.0 * gather)
        return Groups(size, k, nodes, rate, self.bandwidths[0] * ring_links(k, self.link_peers), inside, ring)

    def _inside_bound(self, op: str, size: np.ndarray, k: np.ndarray, nodes: np.ndarray, one_node: np.ndarray) -> np.ndarray:
        """Least seconds of the part in a node, whose links between pairs carry no more than among the ranks of one node."""
        if not self.link_peers or op == "p2p":
            return inside_bound(op, one_node, k, nodes)
        switched = inside_bound(op, self._behind_switch(op, size, k)[0], k, nodes)
        return np.where(k > 1, np.maximum(switched, one_node), 0.0)

    def _inside(self, op: str, size: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds, standard deviation and basis in one node, for flat arrays; values for k < 2 are meaningless.

        Without a switch a message takes as much longer as fewer links lead to the group, and an all_reduce that a switch
        sped up is a reduce_scatter and an all_gather.
        """
        seconds, std, basis, start = self._behind_switch(op, size, k)
        if self.link_peers:
            moved = seconds - start
            if op == "all_reduce":
                gather, _, _, gather_start = self._behind_switch("all_gather", size, k)
                moved = np.where(self._reduced_in_switch(k), np.maximum(moved, 2.0 * (gather - gather_start)), moved)
            seconds = start + moved / link_share(np.full_like(k, 2.0) if op == "p2p" else k, self.link_peers)
        return seconds, std, basis

    def _reduced_in_switch(self, k: np.ndarray) -> np.ndarray:
        """Whether all-reduces among ``k`` ranks are so fast that the switch must have reduced them."""
        seconds = self._behind_switch("all_reduce", np.full(k.shape, _LARGE), k)[0]
        busbw: np.ndarray = sent_share("all_reduce", k) * _LARGE / seconds
        return busbw > _MOST_OF_LINKS * self.bandwidths[0]

    def _behind_switch(self, op: str, size: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Seconds, standard deviation, basis and the latency among the seconds, as measured or extrapolated from it."""
        own = np.flatnonzero(self.op == OPS.index(op))
        measured = self.ranks[own]
        k = np.full_like(k, measured[0]) if op == "p2p" else k
        log_bytes = np.log(np.maximum(size, 1.0))
        above = np.minimum(np.searchsorted(measured, k), len(own) - 1)
        below = np.where(measured[above] > k, np.maximum(above - 1, 0), above)
        low, high = own[below], own[above]
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
        return seconds, std, np.maximum(basis, floor).astype(np.int8), np.minimum(self.curves.latency(high), seconds)

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
        start = np.minimum(self.curves.latency(curve), seconds)
        share = sent_share(op, k) / sent_share(op, at)
        growth = 1.0 if op == "all2all" else np.where(k > at, np.log2(k) / np.log2(at), share)
        other = start * growth + (seconds - start) * share
        return np.where(doublings > 0, other, seconds), doublings

    def _network_uncertainty(self, op: str, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if not self.network_nodes:
            return np.full(len(nodes), UNSEEN_NETWORK_STD), np.full(len(nodes), Basis.ROOFLINE, dtype=np.int8)
        beyond = np.maximum(np.log2(nodes / self.network_nodes), 0.0)
        std = self.network_std[OPS.index(op)] + _PER_DOUBLING * beyond
        return std, np.where(beyond > 0, Basis.EXTRAPOLATED, Basis.INTERPOLATED).astype(np.int8)

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Everything as numeric arrays, for an npz file."""
        plain = {name: np.asarray(getattr(self, name)) for name in _PLAIN}
        network = np.array(list(self.network.to_dict().values()))
        measured = self.groups_between_nodes.to_arrays("group_")
        return {**self.curves.to_arrays("curve_"), **measured, **plain, "network": network}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> CollectiveModel:
        names = [f.name for f in fields(NetworkParameters)]
        network = NetworkParameters(**dict(zip(names, map(float, arrays["network"]), strict=True)))
        plain: dict[str, Any] = {name: np.asarray(arrays[name]) for name in _PLAIN}
        plain |= {name: float(plain[name]) for name in ("network_nodes", "link_peers")}
        groups = MeasuredGroups.from_arrays(arrays, "group_")
        return cls(curves=Curves.from_arrays(arrays, "curve_"), network=network, groups_between_nodes=groups, **plain)


def _slower(size: np.ndarray, seconds: np.ndarray, ratio: float) -> Points:
    """Return the points of a curve whose bytes take ``ratio`` times as long, and whose latency stays."""
    return size, seconds[0] + ratio * (seconds - seconds[0])


PointsByGroup = Mapping[tuple[str, int], Points]
_PLAIN = ("op", "ranks", "basis", "network_std", "network_nodes", "bandwidths", "link_peers")


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


def _stated_network(stated: Any, name: str) -> Mapping[str, Any]:
    """The entry of prof_data/network_fits.json that represents the clusters of profile ``name``."""
    try:
        entry: Mapping[str, Any] = stated["networks"][stated.get("devices", {}).get(name, stated["default"])]
        for key in ("parameters", "relative_std", "most_nodes"):
            entry[key]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the inter_node constants of profile {name} are incomplete, they lack {error}") from None
    return entry


def _std_by_op(std: Mapping[str, float]) -> np.ndarray:
    """Standard deviations by index of OPS; an op without held-out rows gets the largest of the other ops."""
    usual = max(std.values(), default=UNSEEN_NETWORK_STD)
    return np.array([float(std.get(op, usual)) for op in OPS])


def _positive(what: str, value: float) -> float:
    if not (np.isfinite(value) and value > 0):
        raise InputError(f"the {what} is {value}; it must be positive and finite")
    return float(value)


def _check(size: np.ndarray, intra: np.ndarray, inter: np.ndarray, rate: np.ndarray) -> None:
    if not (np.isfinite(size) & (size >= 0)).all():
        raise InputError("message sizes must be finite bytes, not negative")
    if not ((intra >= 1) & (inter >= 1) & np.isfinite(intra * inter)).all():
        raise InputError("a group needs at least one rank in at least one node")
    if not ((rate > 0) & np.isfinite(rate)).all():
        raise InputError("the network bandwidth must be positive bytes/s per GPU")
