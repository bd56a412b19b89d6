"""Collectives between nodes from a simulation of their flows on a topology, where no such network was measured.

What stays inside a server, or an NVLink domain, is the profile's. For everything else the groups of a training run are
simulated together (predictor.network.flows): every group of so many GPUs in each of so many consecutive servers, up to
MOST_GPUS of them, with link rates and latency as calibrated on a measured network (predictor.network.flows.calibrate). Five
sizes are simulated for each operation, group and algorithm; between them and beyond the time is linear in the size, as a sum of
latencies and of bytes over rates is. An all_reduce is the faster of the ring and the tree, as NCCL's tuning would choose; a
reduce_scatter takes as long as an all_gather.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate
from predictor.network.collective import UNSEEN_NETWORK_STD, CollectiveModel
from predictor.network.flows.calibrate import Calibration, as_reached
from predictor.network.flows.collective import collective
from predictor.network.flows.groups import strided_group
from predictor.network.flows.simulate import FlowResult, simulate
from predictor.network.topology.types import Topology
from profiler.errors import InputError
from profiler.files import source_digest, write_text

#: GPUs whose groups are simulated at once: groups on other servers of a rail-optimised network do not meet them.
MOST_GPUS = 256
#: Flows of all-to-alls that are simulated at once.
_MOST_FLOWS = 40_000
#: Sizes that are simulated, from bound by latency to bound by rates; of the last one several draws of hashes, if they matter.
SIZES = (float(1 << 16), float(1 << 22), float(1 << 26), float(1 << 30), float(1 << 33))
_DRAWS = 3
#: Flows of one step of a ring: a channel for each GPU of a server, through all GPUs of the group. More are not simulated.
_MOST_OF_A_STEP = 10_000
_OPERATIONS = {
    "all_gather": "all_gather",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "broadcast": "broadcast",
    "all2all": "all_to_all",
    "p2p": "p2p",
}

#: Seconds at SIZES of each algorithm, none where it is too large to simulate, and the relative standard deviation.
Curve = tuple[tuple[tuple[float, ...], ...], float]


@dataclass(frozen=True)
class SimulatedNetwork:
    """The collectives of a job on a topology.

    inside: the profile's, for groups in a server or NVLink domain. world: GPUs of the job, ``per_domain`` a server. cache:
    file of what was simulated before, None to keep nothing.
    """

    topology: Topology
    inside: CollectiveModel
    world: int
    per_domain: int
    calibration: Calibration
    cache: Path | None = None
    notice: Callable[[str], None] | None = None  #: is told what is being simulated
    _curves: dict[str, Curve] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if -(-self.world // self.per_domain) > self.topology.servers:
            raise InputError(
                f"{self.world} GPUs do not fit on {self.topology.name}, of which a job like this uses "
                f"{self.topology.servers} x {self.per_domain}"
            )

    @property
    def measured(self) -> CollectiveModel:
        """What of it is from a profile."""
        return self.inside

    def with_link_peers(self, peers: int) -> SimulatedNetwork:
        """The same with links in a server that are split among ``peers`` other GPUs (0: behind a switch)."""
        return replace(self, inside=self.inside.with_link_peers(peers))

    def for_world(self, world: int, per_domain: int) -> SimulatedNetwork:
        """The same for a job of another size. Raises InputError where it does not fit on the topology."""
        return replace(self, world=world, per_domain=per_domain)

    def predict(self, op: str, bytes: Any, intra: Any, inter: Any, network_bandwidth: Any = None) -> Estimate:
        """Estimate as CollectiveModel.predict does.

        network_bandwidth: of the topology, for groups that are too large to simulate: these have the law of measured networks.
        """
        size, k, nodes = (np.asarray(a, dtype=np.float64) for a in np.broadcast_arrays(bytes, intra, inter))
        flat = [np.ravel(a) for a in (size, k, nodes)]
        near = flat[2] <= 1
        inside = self.inside.predict(op, flat[0], np.where(near, flat[1], 1), 1)
        seconds, std, basis = inside.seconds.copy(), inside.relative_std.copy(), inside.basis.copy()
        for ranks, servers in sorted(set(zip(flat[1][~near].tolist(), flat[2][~near].tolist(), strict=True))):
            at = ~near & (flat[1] == ranks) & (flat[2] == servers) & (flat[0] > 0)
            times, uncertainty = self._curve(_OPERATIONS[op], int(ranks), int(servers))
            if not times:  # too large for the simulation
                law = self.inside.predict(op, flat[0][at], ranks, servers, network_bandwidth)
                seconds[at], std[at] = law.seconds, np.maximum(law.relative_std, UNSEEN_NETWORK_STD)
                basis[at] = np.int8(Basis.EXTRAPOLATED)
                continue
            seconds[at] = np.min([_linear(flat[0][at], each) for each in times], axis=0)
            std[at], basis[at] = uncertainty, np.int8(Basis.SIMULATED)
        return Estimate(seconds.reshape(size.shape), std.reshape(size.shape), basis.reshape(size.shape))

    def text(self) -> str:
        """Return where the times between nodes are from, in words."""
        c = self.calibration
        return (
            f"network: simulated flow by flow on {self.topology.name}; messages get {c.network:.0%} of a NIC's rate, "
            f"{c.nvlink:.0%} of NVLink's, {1e6 * c.latency:.1f} us before each flow, as fitted to nccl-tests on H100"
        )

    def _curve(self, operation: str, intra: int, servers: int) -> Curve:
        key = f"{operation} {intra} x {servers} of {self.world}/{self.per_domain}"
        if not self._curves and self.cache is not None:
            self._curves.update(_read(self.cache))
        if key not in self._curves:
            if self.notice:
                self.notice(f"simulating {operation} of {intra} GPUs in each of {servers} servers")
            self._curves[key] = self._simulated(operation, intra, servers)
            if self.cache is not None:
                _write(self.cache, self._curves)
        return self._curves[key]

    def _simulated(self, operation: str, intra: int, servers: int) -> Curve:
        groups = self.groups(operation, intra, servers)
        if intra * intra * servers > _MOST_OF_A_STEP:
            return (), 0.0
        try:
            first = self._results(operation, groups, intra)
        except InputError:  # GPUs and links are there (solver.api checks): there are too many flows that differ
            return (), 0.0
        times = [tuple(result.seconds for result in first)]
        if operation == "all_reduce":
            with suppress(InputError):  # a group that is too large for the simulation of a tree
                times.append(tuple(result.seconds for result in self._results(operation, groups, intra, "tree")))
        luck = first[-1].spread / first[-1].seconds
        return tuple(times), float(np.hypot(self.calibration.relative_std, luck))

    def _results(self, operation: str, groups: list[list[int]], intra: int, algorithm: str | None = None) -> list[FlowResult]:
        rings = operation in ("all_gather", "all_reduce") and algorithm is None
        pxn = intra > 1 and rings  # between servers NCCL's rings keep to their rails
        found = []
        for size in SIZES:
            draws = _DRAWS if size == SIZES[-1] and algorithm is None else 1
            what = collective(operation, groups, size, algorithm, pxn)
            found.append(simulate(self._reached, what, self.calibration.latency, draws=draws))
        return found

    @property
    def _reached(self) -> Topology:
        return as_reached(self.topology, self.calibration)

    def groups(self, operation: str, intra: int, servers: int) -> list[list[int]]:
        """Return the groups that communicate at once: of ``intra`` GPUs, as far apart as they can be, in each of ``servers``
        consecutive servers; messages of a pipeline go from one half of the servers to the other.
        """
        per, used = self.topology.gpus_per_server, -(-self.world // self.per_domain)
        if intra > self.per_domain or servers > used:
            raise InputError(f"a group of {intra} GPUs in {servers} servers does not fit on {used} of {self.per_domain}")
        apart = max(self.per_domain // intra, 1)
        most = max(MOST_GPUS // self.per_domain, servers)
        if operation == "p2p":
            half = max(used // 2, 1) if servers > 1 else 0
            pairs = [(node, node + half) for node in range(min(half, most))] if half else [(0, 0)]
            return [
                [a * per + place, b * per + (place if half else place + 1)]
                for a, b in pairs
                for place in range(self.per_domain if half else 1)
            ]
        sets = max(min(used, most) // servers, 1)
        one = np.array(strided_group(servers, intra, per, self.per_domain))
        found = [(first * servers * per + place + one).tolist() for first in range(sets) for place in range(apart)]
        ranks = intra * servers
        return found[: max(_MOST_FLOWS // (ranks * (ranks - 1)), 1)] if operation == "all_to_all" else found


def _linear(size: np.ndarray, times: tuple[float, ...]) -> np.ndarray:
    """Return times of sizes, linear between SIZES and above them; below them that of the smallest."""
    at, known = np.array(SIZES), np.maximum.accumulate(times)
    slope = (known[-1] - known[-2]) / (at[-1] - at[-2])
    return np.interp(size, at, known) + slope * np.maximum(size - at[-1], 0.0)


def cache_file(folder: Path, topology: Topology, calibration: Calibration) -> Path:
    """Return the file in ``folder`` where simulations of this topology by the present code are kept."""
    arrays = (topology.source, topology.target, topology.kind, topology.nvswitches, topology.switches)
    stated = (SIZES, MOST_GPUS, topology.gpus, topology.gpus_per_server, topology.kinds, calibration)
    digest = hashlib.sha256(repr((source_digest([Path(__file__).parent]), stated)).encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return folder / f"simulated-{digest.hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, Curve]:
    """Return what was kept; nothing where the file is not there or damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        plain = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, Curve] = {}
        for key, (times, std) in plain.items():
            found[key] = tuple(tuple(float(t) for t in each) for each in times), float(std)
        return found
    return {}


def _write(path: Path, curves: dict[str, Curve]) -> None:
    with suppress(OSError, InputError):  # a folder that cannot be written to fails no job: the next one simulates again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(curves) + "\n")
