"""The networks of a SimuMax system file as constants of a node and rows between nodes.

SimuMax's formula, for a buffer of S bytes over n ranks: seconds = S * scale * (n + offset) / n / (gbps * GiB/s * efficiency)
+ latency * scale * (n + offset) + fixed latency; of p2p, and where nodes do not have 8 accelerators, the latency counts once.
``scale`` and ``offset`` of an op apply to its first term as well as to its second. Source: MooreThreads/SimuMax, docs/system.md
and the network function of its system class, release 1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from profiler.errors import InputError, closest, shown
from profiler.profile.profile import COLLECTIVES
from profiler.units import GIB, MIB
from solver.formats.simumax.configs import SystemConfig, check_value
from solver.formats.simumax.fields import Field
from solver.simumax.shapes import Row

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all2all", "p2p")
_PCIE = {ranks: f"intra_node_pcie_{ranks}x" for ranks in (2, 4, 8)}
_LINKS, _BETWEEN, _UNUSED = "high_intra_node", "inter_node", "low_intra_node"
NETWORKS = (*_PCIE.values(), _LINKS, _UNUSED, _BETWEEN)
_SIZES = (MIB / 4, 8 * MIB, 64 * MIB, 512 * MIB)  #: of messages between two nodes, by which the network's law is scaled
_LEAST_LATENCY = 1e-9  # seconds; a law needs some
_PER_NODE = 8  #: accelerators of a node for which SimuMax counts the latency of every step of a ring

_NUMBER = Field("number")
_OBJECT = _BY_RANKS = Field("object")
_BANDWIDTH = {
    "efficient_factor": _NUMBER,
    "gbps": _NUMBER,
    "latency_us": _NUMBER,
    "fixed_latency": _NUMBER,
    "fixed_latency_us_by_comm_num": _BY_RANKS,
}
_OP = {
    "scale": _NUMBER,
    "offset": Field("any"),
    "efficient_factor": _NUMBER,
    "latency_us": _NUMBER,
    "fixed_latency_us": _NUMBER,
    "fixed_latency_us_by_comm_num": _BY_RANKS,
    "dp_fixed_bw": _BY_RANKS,
}


@dataclass(frozen=True)
class Link:
    """One op over one network. bandwidth: bytes/s. latency, fixed: seconds."""

    bandwidth: float
    scale: float
    offset: float
    latency: float
    fixed: float
    rings: bool  #: whether the latency counts for every step

    def traffic(self, ranks: int) -> float:
        """Bytes that pass the bandwidth for each byte of the buffer."""
        return self.scale * (ranks + self.offset) / ranks

    def start(self, ranks: int) -> float:
        """Seconds beside the bytes."""
        return self.latency * (self.scale * (ranks + self.offset) if self.rings else 1.0) + self.fixed

    def seconds(self, size: float, ranks: int) -> float:
        return size * self.traffic(ranks) / self.bandwidth + self.start(ranks)


def intra_node(config: SystemConfig) -> dict[str, dict[int, dict[str, float]]]:
    """Return the constants of a node, as a profile states them: op -> ranks -> bandwidth, traffic, latency."""
    found: dict[str, dict[int, dict[str, float]]] = {}
    for ranks in (n for n in (2, 4, 8, 16, 32, 64) if n <= config.num_per_node):
        name = _network_of(config, ranks)
        for op in OPS:
            link = _link(config, name, op, ranks)
            full = (ranks - 1) / 7 if config.FC8 and name == _LINKS else 1.0  # of a mesh, the links to the others
            found.setdefault(op, {})[ranks] = {
                "bandwidth": link.bandwidth * full,
                "traffic": link.traffic(ranks),
                "latency": max(link.start(ranks), _LEAST_LATENCY),
            }
            crowded = _crowded(config, op, ranks)
            if crowded is not None:
                found[op][ranks]["bandwidth_all_groups"] = crowded
    return found


def _crowded(config: SystemConfig, op: str, ranks: int) -> float | None:
    """Return bytes/s of a group whose ranks are spread over a node of PCIe, as other groups send too; None: as if alone.

    SimuMax takes the network that spans the node for them, and for data parallelism that network's dp_fixed_bw.
    """
    widest = max((n for n in _PCIE if n <= config.num_per_node), default=0)
    if not _by_pcie(config) or ranks >= widest:
        return None
    stated = _by_ranks(_op(config, _PCIE[widest], op).get("dp_fixed_bw"), ranks)
    return stated * GIB if stated else _link(config, _PCIE[widest], op, ranks).bandwidth


def between_nodes(config: SystemConfig) -> dict[str, list[Row]]:
    """Return rows by op of two whole nodes, and of p2p between two ranks, as the file's constants between nodes say.

    The bandwidth of the file is that of a whole node; a rank that sends for itself has its share of it.
    """
    per_node, rows = config.num_per_node, {}
    for op in OPS:
        link = _link(config, _BETWEEN, op, 2 * per_node)
        ranks = 2 if op == "p2p" else 2 * per_node
        share = {"p2p": per_node, "all2all": per_node / 2}.get(op, 1.0)  # half of an exchange stays in its node
        rows[op] = [
            {
                "intra": 1 if op == "p2p" else per_node,
                "inter": 2,
                "bytes": int(size),
                "dtype": "bf16",
                "source": f"stated by {config.sys_name}",
                "seconds": link.seconds(size * share, ranks),
            }
            for size in (_SIZES[1:] if op == "p2p" else _SIZES)
        ]
    return rows


def network_bandwidth(config: SystemConfig) -> float:
    """Return bytes/s between nodes of one accelerator."""
    return float(_network(config, _BETWEEN)["bandwidth"]["gbps"]) * GIB / float(config.num_per_node)


def link_bandwidth(config: SystemConfig) -> float:
    """Return bytes/s that one accelerator sends inside its node, nominal; without links, that between nodes."""
    if config.num_per_node < 2:
        return network_bandwidth(config)
    return float(_network(config, _network_of(config, min(config.num_per_node, 8)))["bandwidth"]["gbps"]) * GIB


def _network_of(config: SystemConfig, ranks: int) -> str:
    """Return the network that SimuMax takes for a group inside a node."""
    return _PCIE[max(n for n in _PCIE if n <= ranks)] if _by_pcie(config) else _LINKS


def _by_pcie(config: SystemConfig) -> bool:
    return bool(config.intra_with_pcie or (config.networks or {}).get("intra_with_pcie", False))


def _network(config: SystemConfig, name: str) -> Mapping[str, Any]:
    """Return a checked network. Raises InputError where it is missing, or has an unknown field or a wrong value."""
    networks = dict(config.networks or {})
    check_value("system field networks.intra_with_pcie", networks.pop("intra_with_pcie", None), Field("flag"))
    for known in networks:
        if known not in NETWORKS and not known.startswith("_"):
            raise InputError(
                f"system network {known!r} is not known{closest(known, NETWORKS)}; known are {', '.join(NETWORKS)}"
            )
    network = networks.get(name)
    if not isinstance(network, Mapping):
        raise InputError(f"the system file has no network {name}; with nodes of {config.num_per_node} it needs one")
    _check_keys(f"networks.{name}", network, ("processor_usage", "bandwidth", "op"))
    _check(f"networks.{name}.bandwidth", network.get("bandwidth"), _BANDWIDTH, ("gbps", "efficient_factor", "latency_us"))
    check_value(f"system field networks.{name}.op", network.get("op"), _OBJECT)
    for op, constants in (network.get("op") or {}).items():
        if op not in (*COLLECTIVES, "p2p"):
            raise InputError(f"system network {name}: op {op!r} is not known; known are {', '.join(OPS)}")
        _check(f"networks.{name}.op.{op}", constants, _OP, ("scale", "offset"))
    return network


def _check(where: str, values: Any, fields: Mapping[str, Field], needed: tuple[str, ...]) -> None:
    if not isinstance(values, Mapping):
        raise InputError(f"system field {where} is {shown(values)}; it must be an object with {', '.join(needed)}")
    _check_keys(where, values, tuple(fields))
    for name, field in fields.items():
        if name == "offset":
            if not isinstance(values.get(name), int | float) or not -1 <= values[name] <= 0:
                raise InputError(f"system field {where}.offset is {shown(values.get(name))}; it must be between -1 and 0")
        else:
            check_value(f"system field {where}.{name}", values.get(name), field)
    for name in needed:
        if values.get(name) is None or (name in ("gbps", "efficient_factor", "scale") and not values[name]):
            raise InputError(f"system field {where}.{name} is {shown(values.get(name))}; it must be a positive number")


def _check_keys(where: str, values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = [name for name in values if name not in known and not name.startswith("_")]
    if unknown:
        raise InputError(f"system field {where}.{unknown[0]} is not known{closest(unknown[0], known)}")


def _op(config: SystemConfig, network: str, op: str) -> Mapping[str, Any]:
    found = (_network(config, network).get("op") or {}).get(op)
    if found is None:
        raise InputError(f"system network {network} lacks op {op}; it needs {', '.join(OPS)}")
    constants: Mapping[str, Any] = found
    return constants


def _link(config: SystemConfig, network: str, op: str, ranks: int) -> Link:
    base, own = _network(config, network)["bandwidth"], _op(config, network, op)

    def either(name: str) -> float:
        return float(base[name] if own.get(name) is None else own[name])

    fixed = (
        _by_ranks(own.get("fixed_latency_us_by_comm_num"), ranks),
        own.get("fixed_latency_us"),
        _by_ranks(base.get("fixed_latency_us_by_comm_num"), ranks),
        base.get("fixed_latency"),
        0.0,
    )
    return Link(
        bandwidth=base["gbps"] * GIB * either("efficient_factor"),
        scale=float(own["scale"]),
        offset=float(own["offset"]),
        latency=either("latency_us") * 1e-6,
        fixed=next(float(value) for value in fixed if value is not None) * 1e-6,
        rings=config.num_per_node == _PER_NODE and op != "p2p",
    )


def _by_ranks(values: Mapping[str, Any] | None, ranks: int) -> float | None:
    value = (values or {}).get(str(ranks))
    check_value("a constant of a network by number of ranks", value, _NUMBER)
    return None if value is None else float(value)
