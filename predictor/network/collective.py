"""Seconds of a collective: measured curves inside a node, a physical model of the network between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from predictor.estimate import Basis, Estimate
from predictor.network.collective_points import OPS
from predictor.network.fit import fit_network, fit_scale, held_out_std, leave_one_scale_out, profile_rows, residuals
from predictor.network.measured_groups import MeasuredGroups, own_network
from predictor.network.one_node import OneNodeCollectives, positive_rate
from predictor.network.physics import NetworkParameters, network_seconds
from profiler.errors import InputError
from profiler.profile.profile import NETWORK_ROWS, Device, Profile

UNSEEN_NETWORK_STD = 0.4  # uncertainty of the network model with default constants
_PER_DOUBLING = 0.03  # for more nodes than the model was fitted on


@dataclass(frozen=True)
class CollectiveModel:
    """Estimates collectives on a profile's device; built by ``fit``.

    node: collectives inside a node. network: constants of the model between nodes. network_std: its held-out standard deviation
    of log time, by index of OPS. network_nodes: most nodes that it was fitted on (0: default constants). network_bandwidth:
    nominal bytes/s per GPU between nodes. groups_between_nodes: curves of groups that were measured on the network itself.
    """

    node: OneNodeCollectives
    network: NetworkParameters
    network_std: np.ndarray
    network_nodes: float
    network_bandwidth: float
    groups_between_nodes: MeasuredGroups

    @classmethod
    def fit(cls, profile: Profile) -> CollectiveModel:
        """Fit the model of ``profile``."""
        fit = cls(
            node=OneNodeCollectives.fit(profile),
            network=NetworkParameters(),
            network_std=np.full(len(OPS), UNSEEN_NETWORK_STD),
            network_nodes=0.0,
            network_bandwidth=positive_rate("network bandwidth", profile.device.network_bandwidth),
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
        rows = profile_rows(self.node, profile) if own_network(profile) else None
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
        """Return the model on another device: the links inside a node are its own, the network keeps its constants."""
        return replace(
            self,
            node=self.node.on(device),
            network_bandwidth=device.network_bandwidth,
            groups_between_nodes=MeasuredGroups.none(),
        )

    def with_link_peers(self, peers: int) -> CollectiveModel:
        """Return the same links, split among ``peers`` other GPUs (0: behind a switch)."""
        return replace(self, node=self.node.with_link_peers(peers))

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
        given = self.network_bandwidth if network_bandwidth is None else network_bandwidth
        shape = np.broadcast_shapes(*(np.shape(a) for a in (bytes, intra, inter, given)))
        size, k, nodes, rate = (
            np.ravel(np.broadcast_to(np.asarray(a, dtype=np.float64), shape)) for a in (bytes, intra, inter, given)
        )
        _check(size, k, nodes, rate)
        seconds, std, basis = self.node.predict(op, size, k)
        far = np.flatnonzero(nodes > 1)
        if len(far):
            groups = self.node.groups(op, size[far], k[far], nodes[far], rate[far], seconds[far])
            seconds[far] = network_seconds(op, groups, self.network)
            std[far], basis[far] = self._network_uncertainty(op, nodes[far])
            known = seconds[far], std[far], basis[far]
            self.groups_between_nodes.correct(OPS.index(op), size[far], k[far], nodes[far], *known)
            seconds[far], std[far], basis[far] = known
        nothing = (k * nodes <= 1) | (size <= 0)
        seconds[nothing], std[nothing], basis[nothing] = 0.0, 0.0, Basis.MEASURED
        return Estimate(seconds.reshape(shape), std.reshape(shape), basis.reshape(shape))

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
        return {**self.node.to_arrays(), **self.groups_between_nodes.to_arrays("group_"), **plain, "network": network}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> CollectiveModel:
        """The inverse of ``to_arrays``."""
        names = [f.name for f in fields(NetworkParameters)]
        network = NetworkParameters(**dict(zip(names, map(float, arrays["network"]), strict=True)))
        plain: dict[str, Any] = {name: np.asarray(arrays[name]) for name in _PLAIN}
        plain |= {name: float(plain[name]) for name in ("network_nodes", "network_bandwidth")}
        groups = MeasuredGroups.from_arrays(arrays, "group_")
        return cls(node=OneNodeCollectives.from_arrays(arrays), network=network, groups_between_nodes=groups, **plain)


_PLAIN = ("network_std", "network_nodes", "network_bandwidth")


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


def _check(size: np.ndarray, intra: np.ndarray, inter: np.ndarray, rate: np.ndarray) -> None:
    if not (np.isfinite(size) & (size >= 0)).all():
        raise InputError("message sizes must be finite bytes, not negative")
    if not ((intra >= 1) & (inter >= 1) & np.isfinite(intra * inter)).all():
        raise InputError("a group needs at least one rank in at least one node")
    if not ((rate > 0) & np.isfinite(rate)).all():
        raise InputError("the network bandwidth must be positive bytes/s per GPU")
