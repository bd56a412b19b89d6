"""Link efficiencies and latency of the flow simulation, from nccl-tests between nodes of H100 on InfiniBand.

    python -m predictor.network.flows.calibrate

writes prof_data/simulated_network.json. Three numbers are fitted, by least squares on log(time), to the measured rows of the
h100_sxm profile on ten nodes: which share of a NIC's rate and of an NVLink's rate messages get, and the seconds before each
flow. Nothing else of the simulation is; rows on two nodes are held out. p2p is left out: nccl-tests' sendrecv counts it
otherwise. A measured group runs alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from predictor.network.flows.collective import collective
from predictor.network.flows.groups import strided_group
from predictor.network.flows.simulate import simulate
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import make_options
from predictor.network.topology.types import LinkKind, Topology
from profiler.errors import InputError
from profiler.files import write_text
from profiler.profile.profiles import PROF_DATA, find_profile

OUTPUT = PROF_DATA / "simulated_network.json"
PROFILE = "h100_sxm"
#: Names of a profile's tables -> of simulated operations.
OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all2all": "all_to_all",
}
_NODE = 8
_FITTED_NODES = 10


@dataclass(frozen=True)
class Calibration:
    """network, nvlink: shares of the links' rates that messages get. latency: seconds before each flow.

    relative_std: of log(simulated / measured) on the rows that were fitted.
    """

    network: float
    nvlink: float
    latency: float
    relative_std: float


@dataclass(frozen=True)
class Row:
    """A measured collective over ``intra`` GPUs of each of ``nodes`` nodes: bytes and seconds."""

    op: str
    intra: int
    nodes: int
    bytes: float
    seconds: float


@lru_cache(maxsize=1)
def read_calibration() -> Calibration:
    """Return what is shipped."""
    plain = json.loads(OUTPUT.read_text(encoding="utf-8"))
    return Calibration(**{name: float(plain[name]) for name in ("network", "nvlink", "latency", "relative_std")})


def as_reached(topology: Topology, calibration: Calibration) -> Topology:
    """Return a topology whose links have the rates that messages reach."""
    near = topology.is_nvswitch()
    inside = near[topology.source] | near[topology.target]
    kinds: list[LinkKind] = []
    kind = np.empty_like(topology.kind)
    for share, chosen in ((calibration.nvlink, inside), (calibration.network, ~inside)):
        for old in np.unique(topology.kind[chosen]):
            kind[chosen & (topology.kind == old)] = len(kinds)
            rate = topology.kinds[old].bits_per_second * share
            kinds.append(replace(topology.kinds[old], bandwidth=f"{rate:.0f}bps"))
    return replace(topology, kind=kind, kinds=tuple(kinds))


def measured_rows(per_group: int = 5) -> Iterator[Row]:
    """Yield rows of the profile between nodes: of each op and group about ``per_group`` sizes, the median of each."""
    profile, _ = find_profile(PROFILE)
    for op in OPERATIONS:
        table = profile.table(op)
        far = table["inter"] > 1
        for intra, nodes in sorted(set(zip(table["intra"][far].tolist(), table["inter"][far].tolist(), strict=True))):
            chosen = far & (table["intra"] == intra) & (table["inter"] == nodes)
            sizes = np.unique(table["bytes"][chosen])
            for size in sizes[:: max(len(sizes) // per_group, 1)]:
                seconds = float(np.median(table["seconds"][chosen & (table["bytes"] == size)]))
                yield Row(op, int(intra), int(nodes), float(size), seconds)


def network(nodes: int) -> Topology:
    """Return the rail-optimised InfiniBand network of ``nodes`` DGX H100: 400 Gbit/s and 450 GB/s of NVLink per GPU."""
    stated = {"rail_optimized": True, "gpus": nodes * _NODE, "bandwidth": "400Gbps", "nvlink_bandwidth": "3600Gbps"}
    return generate(make_options(stated)[0])


def simulated(row: Row, topology: Topology, latency: float) -> float:
    """Return the simulated seconds of a measured collective; rings between nodes keep to their rails, as NCCL's do.

    Of an all-reduce the faster of ring and tree counts.
    """
    group = strided_group(row.nodes, row.intra, topology.gpus_per_server, topology.gpus_per_server)
    ring = OPERATIONS[row.op] != "all_to_all" and row.intra > 1
    seconds = simulate(topology, collective(OPERATIONS[row.op], [group], row.bytes, pxn=ring), latency).seconds
    if row.op == "all_reduce":
        with suppress(InputError):  # a group that is too large for the simulation of a tree
            tree = collective("all_reduce", [group], row.bytes, algorithm="tree")
            seconds = min(seconds, simulate(topology, tree, latency).seconds)
    return seconds


def errors(rows: Sequence[Row], found: Calibration, network: Callable[[int], Topology] = network) -> np.ndarray:
    """Return log(simulated / measured) of every row. network: the topology of a number of nodes."""
    reached = {nodes: as_reached(network(nodes), found) for nodes in {row.nodes for row in rows}}
    return np.array([np.log(simulated(row, reached[row.nodes], found.latency) / row.seconds) for row in rows])


def calibrate(rows: Sequence[Row], network: Callable[[int], Topology] = network) -> Calibration:
    """Return the shares of links and the latency that fit measured rows best."""

    def calibration(values: np.ndarray) -> Calibration:
        shares = 1 / (1 + np.exp(-values[:2]))
        return Calibration(float(shares[0]), float(shares[1]), 1e-6 * float(np.exp(values[2])), 0.0)

    def residual(values: np.ndarray) -> np.ndarray:
        return errors(rows, calibration(values), network)

    from scipy.optimize import least_squares  # predictions read the result, and need no scipy

    start = np.array([2.0, 1.5, np.log(6.0)])
    best = least_squares(residual, start, diff_step=0.02, loss="soft_l1", f_scale=0.1, max_nfev=12)
    found = calibration(best.x)
    return replace(found, relative_std=root_mean_square(errors(rows, found, network)))


def root_mean_square(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values**2)))


def main() -> None:
    rows = list(measured_rows())
    found = calibrate([row for row in rows if row.nodes == _FITTED_NODES])
    groups = sorted({(row.op, row.nodes) for row in rows})
    spread = {
        f"{op}, {nodes} nodes": f"{root_mean_square(errors([r for r in rows if (r.op, r.nodes) == (op, nodes)], found)):.1%}"
        for op, nodes in groups
    }
    plain = {
        "about": "fitted by python -m predictor.network.flows.calibrate to nccl-tests of H100 on InfiniBand, 10 nodes",
        "network": round(found.network, 4),
        "nvlink": round(found.nvlink, 4),
        "latency": float(f"{found.latency:.4g}"),
        "relative_std": round(found.relative_std, 4),
        "root_mean_square_error": spread,
    }
    write_text(OUTPUT, json.dumps(plain, indent=1) + "\n")
    print(json.dumps(plain, indent=1))


if __name__ == "__main__":
    main()
