"""Groups that a profile measured between nodes: their own curves correct the network's law exactly where it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from predictor.estimate import Basis
from predictor.network.collective_points import OPS
from profiler.profile.profile import Profile, Table

#: Standard deviation of log time of a measured group: what two nodes or two runs of one cluster differ by (as inside a node).
MEASURED_STD = 0.05
_OWN_LOGS = "to use your own: foretrain measure --import-nccl-tests LOG..."
_OWN_RATES = "to use your own: state what its all-reduces reach in a cluster file (--cluster)"


@dataclass(frozen=True)
class MeasuredGroups:
    """Curves of log(measured seconds / law) over log bytes, one per (op, ranks in a node, nodes).

    op (index into OPS), intra, inter: shape [groups]. starts: first point of each group, shape [groups + 1]. log_bytes,
    log_ratio: points of all groups.
    """

    op: np.ndarray
    intra: np.ndarray
    inter: np.ndarray
    starts: np.ndarray
    log_bytes: np.ndarray
    log_ratio: np.ndarray

    @classmethod
    def none(cls) -> MeasuredGroups:
        empty = np.empty(0)
        return cls(empty, empty, empty, np.zeros(1, dtype=np.int64), empty, empty)

    @classmethod
    def of(cls, rows: Mapping[tuple[int, int, int], tuple[np.ndarray, np.ndarray]]) -> MeasuredGroups:
        """rows: (bytes ascending and distinct, log ratio) by (index of op, intra, inter)."""
        if not rows:
            return cls.none()
        op, intra, inter = np.array(sorted(rows), dtype=float).T
        parts = [rows[key] for key in sorted(rows)]
        starts = np.cumsum([0, *(len(size) for size, _ in parts)])
        sizes, ratios = (np.concatenate(points) for points in zip(*parts, strict=True))
        return cls(op, intra, inter, starts, np.log(sizes), ratios)

    def correct(
        self,
        op: int,
        size: np.ndarray,
        intra: np.ndarray,
        inter: np.ndarray,
        seconds: np.ndarray,
        std: np.ndarray,
        basis: np.ndarray,
    ) -> None:
        """Correct the law's ``seconds``, ``std`` and ``basis`` in place where the group was measured; flat arrays.

        Between measured sizes the ratio is interpolated; beyond them it stays, and the uncertainty is that of the law as well.
        """
        for group in np.flatnonzero(self.op == op):
            here = np.flatnonzero((intra == self.intra[group]) & (inter == self.inter[group]))
            if not len(here):
                continue
            points = slice(self.starts[group], self.starts[group + 1])
            x, asked = self.log_bytes[points], np.log(np.maximum(size[here], 1.0))
            outside = (asked < x[0] - 1e-9) | (asked > x[-1] + 1e-9)
            nearest = np.abs(asked[:, None] - x[None]).min(axis=1) if len(x) else np.inf
            seconds[here] *= np.exp(np.interp(asked, x, self.log_ratio[points]))
            std[here] = np.where(outside, np.sqrt(std[here] ** 2 / 4 + MEASURED_STD**2), MEASURED_STD)
            inside = np.where(nearest < 1e-6, Basis.MEASURED, Basis.INTERPOLATED)
            basis[here] = np.where(outside, Basis.EXTRAPOLATED, inside)

    def to_arrays(self, prefix: str) -> dict[str, np.ndarray]:
        return {f"{prefix}{name}": np.asarray(array) for name, array in vars(self).items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str) -> MeasuredGroups:
        return cls(**{name: np.asarray(arrays[f"{prefix}{name}"]) for name in cls.__dataclass_fields__})


def between_nodes(op: str, table: Table) -> Table:
    """Return the rows of groups that span nodes and of messages that are not empty; for p2p only those of one rank per node."""
    return table.where((table["inter"] > 1) & (table["bytes"] > 0) & ((table["intra"] == 1) | (op != "p2p")))


def own_network(profile: Profile) -> bool:
    """Whether the profile's measurements between nodes are of the network that it describes.

    Those of a shipped profile are of other clusters; its law was fitted to many networks and is stated.
    """
    laws = profile.laws
    measured = any(len(between_nodes(op, profile.table(op))) for op in OPS)
    return measured and (bool(laws.get("own_network")) or not laws.get("inter_node"))


def describe_links(profile: Profile, gpus_per_node: int) -> str:
    """Return in words what the estimates inside a node rest on where nothing was measured there; "" elsewhere."""
    if profile.derivation is not None or profile.laws.get("intra_node"):
        return ""
    if any((profile.table(op)["intra"] > 1).any() for op in OPS):
        return ""
    if gpus_per_node == 1:
        alone = profile.meta.get("ranks") == 1
        return "nodes have one GPU each, as the profile was measured with; --cluster says how many yours have" if alone else ""
    return "links inside a node: nominal bandwidth and usual efficiency, nothing was measured"


def describe_network(profile: Profile) -> str:
    """Return in words what the estimates between nodes rest on."""
    kinds = sorted(
        {
            (int(k), int(n))
            for op in OPS
            for k, n in zip(*(between_nodes(op, profile.table(op))[c] for c in ("intra", "inter")), strict=True)
        }
    )
    if own_network(profile):
        shapes = ", ".join(f"{nodes} x {ranks}" for ranks, nodes in kinds[:6]) + (" ..." if len(kinds) > 6 else "")
        how = "fitted to" if len(kinds) > 1 else "one efficiency and one latency fitted to"
        return f"network between nodes: {how} this profile's own measurements of {shapes} ranks; those are used as measured"
    own = _OWN_RATES if profile.derivation else _OWN_LOGS
    if profile.laws.get("inter_node"):
        return f"network between nodes: fitted to published logs of other clusters; {own}"
    return f"network between nodes: nominal bandwidth and usual efficiency, nothing was measured; {own}"
