"""The cluster: nodes of accelerators, and how the ranks of a process group are placed on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from predictor.network.leaf_switches import LeafSwitches
from profiler.errors import InputError, printable
from profiler.profile.profile import Device
from profiler.units import GB, GBIT, GIB
from solver.spec.bounds import number, whole_number


@dataclass(frozen=True)
class Cluster:
    """Nodes of identical accelerators. Bandwidths in bytes/s per accelerator, memory in bytes per accelerator."""

    name: str
    gpus_per_node: int
    network_bandwidth: float
    memory_bytes: float
    all_reduce_busbw: float | None = None  #: that a large all-reduce over all ranks of the run reached [bytes/s]
    all_reduce_busbw_in_node: float | None = None
    nvlink_domain: int = 0  #: GPUs that share the fastest links, where that is more than a node
    host_link: float = 0.0  #: bytes/s between a GPU and its host, each way; 0: not stated
    host_memory: float = 0.0  #: bytes/s of the host's memory for each GPU; 0: not stated
    gpus_per_leaf: int = 0  #: GPUs below one leaf switch; 0: the network has no bottleneck
    oversubscription: float = 1.0  #: what they send over what the switch's uplinks carry
    link_peers: int = 0  #: GPUs among which the links of one are split (a full mesh); 0: a switch gives any of them all
    usual_network: bool = False  #: nobody stated the network: it is that of the usual node with these accelerators

    @property
    def gpus_per_domain(self) -> int:
        """GPUs whose messages do not leave the fastest links: an NVLink domain, else a node."""
        return max(self.nvlink_domain, self.gpus_per_node)

    def leaf_switches(self, world: int) -> LeafSwitches | None:
        """The leaf switches above a job of ``world`` GPUs, where they are several and their uplinks carry too little."""
        if self.oversubscription == 1 or not 0 < self.gpus_per_leaf < world:
            return None
        of = "nodes" if self.nvlink_domain <= self.gpus_per_node else "NVLink domains"
        return LeafSwitches(max(self.gpus_per_leaf // self.gpus_per_domain, 1), self.oversubscription, of)

    def for_world(self, world: int) -> Cluster:
        """Return the cluster as a job of ``world`` GPUs uses it: the largest part of each domain that its nodes fill evenly.

        Schedulers give a job as many nodes of each domain: 64 GPUs of each NVL72 to a job of 256. Where that would be half of a
        domain or less, they take the fewest domains, of which the last gives fewer: 40 and 36 of two NVL72 to a job of 76.
        """
        node, domain = self.gpus_per_node, self.nvlink_domain
        if domain <= node:
            return self
        # multiples of what divides the job, so that tensor groups stay inside: of two hosts where they are equal
        units = [unit for unit in (4 * node, 2 * node, node) if world % unit == 0 or unit == node]
        pair = min(units[0], 2 * node)
        parts = [n for n in range(pair, domain + 1, pair) if world % n == 0]
        part = max(parts, default=node)
        # groups are powers of two, which straddle parts that hold no whole ones: 64 GPUs of each NVL72, twice 64 of 144
        even = max((n for n in parts if not n & (n - 1)), default=node)
        fills = 2 * even > domain or (even >= _WIDE_GROUP and 9 * even * (domain // even) >= 8 * domain)
        if part < world and part % even and fills:
            part = max(n for n in parts if n % even == 0)
        elif 2 * part <= min(domain, world):
            least = -(-world // -(-world // domain))  # of as few domains
            part = next(whole for unit in units if (whole := -(-least // unit) * unit) <= domain)
        return replace(self, nvlink_domain=part)

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None and not value > 0 and field.name not in _MAY_BE_ZERO:
                raise InputError(f"cluster {self.name}: {field.name} is {value}; it must be positive")


#: Groups of fewer GPUs are worth no GPUs of a domain that is several times as large.
_WIDE_GROUP = 64
_MAY_BE_ZERO = ("nvlink_domain", "link_peers", "host_link", "host_memory", "usual_network", "gpus_per_leaf")
#: An all-reduce reaches less than this many times the rate of a GPU's links each way, whatever the switches add up.
_MOST_BUSBW = 2.0
_BUS_BANDWIDTHS = ("all_reduce_busbw_gb_s", "all_reduce_busbw_in_node_gb_s")
PCIE_4, PCIE_5 = 25e9, 50e9  #: bytes/s each way that a GPU reaches of its host over sixteen lanes
HOST_RATE = 40e9  #: bytes/s that a GPU reaches of its share of the hosts' memory, where all of a node do: assumed
_HOST = ("host_link_gb_s", "host_memory_gb_s")
_LEAF = ("gpus_per_leaf", "oversubscription")
_COUNTS = ("gpus_per_node", "nvlink_domain", "link_peers", "gpus_per_leaf")
_RATES = ("inter_node_gbit_per_gpu", "memory_gib", *_BUS_BANDWIDTHS, *_HOST, "oversubscription")
#: Keys of a cluster that change a prediction, and all keys.
FIGURES = (*_COUNTS, *_RATES)
_KEYS = ("name", "hardware", *FIGURES, "notes")


def cluster_of(
    device: Device, config: Mapping[str, Any] | None = None, where: str = "cluster", usual_network: bool = False
) -> Cluster:
    """Return the device's usual cluster; ``config`` may replace what FIGURES names.

    usual_network: the device's network is that of usual nodes, which nobody stated of this machine. Raises InputError for an
    unknown key or a value that is not a positive number; ``where`` names ``config`` in the message.
    """
    config = config or {}
    unknown = sorted(set(config) - set(_KEYS))
    if unknown:
        raise InputError(f"{where}: unknown cluster key {unknown[0]!r}; known keys are {', '.join(_KEYS)}")
    try:
        per_node = whole_number("gpus_per_node", config.get("gpus_per_node", device.gpus_per_node))
        domain = whole_number("nvlink_domain", config.get("nvlink_domain", device.nvlink_domain))
        peers = whole_number("link_peers", config.get("link_peers", device.link_peers))
        leaf = whole_number("gpus_per_leaf", config["gpus_per_leaf"]) if "gpus_per_leaf" in config else 0
        stated = {key: number(key, config[key]) for key in _RATES if key in config}
        _check_figures(config, device, per_node, domain, peers)
        _check_leaf(config, max(domain, per_node))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return Cluster(
        name=printable(str(config.get("name", device.name))),
        gpus_per_node=per_node,
        nvlink_domain=domain,
        link_peers=peers,
        network_bandwidth=stated["inter_node_gbit_per_gpu"] * GBIT
        if "inter_node_gbit_per_gpu" in stated
        else device.network_bandwidth,
        usual_network=usual_network and not stated.keys() & {"inter_node_gbit_per_gpu", "all_reduce_busbw_gb_s"},
        gpus_per_leaf=leaf,
        oversubscription=stated.get("oversubscription", 1.0),
        memory_bytes=stated["memory_gib"] * GIB if "memory_gib" in stated else device.memory_bytes,
        **{"host_link": device.host_link, "host_memory": device.host_memory}
        | {key.removesuffix("_gb_s"): stated[key] * GB for key in (*_BUS_BANDWIDTHS, *_HOST) if key in stated},
    )


def cluster_keys(cluster: Cluster) -> dict[str, float]:
    """Return what ``cluster_of`` reads as ``cluster``: the keys of a cluster file, in its units."""
    figures: dict[str, float | None] = {
        "gpus_per_node": cluster.gpus_per_node,
        "nvlink_domain": cluster.nvlink_domain or None,
        "link_peers": cluster.link_peers,
        "inter_node_gbit_per_gpu": cluster.network_bandwidth / GBIT,
        "memory_gib": cluster.memory_bytes / GIB,
    }
    for key in (*_BUS_BANDWIDTHS, *_HOST):
        rate = getattr(cluster, key.removesuffix("_gb_s"))
        figures[key] = rate / GB if rate else None
    if cluster.gpus_per_leaf:
        figures |= {"gpus_per_leaf": cluster.gpus_per_leaf, "oversubscription": cluster.oversubscription}
    return {key: value for key, value in figures.items() if value is not None}


def _check_figures(config: Mapping[str, Any], device: Device, per_node: int, domain: int, peers: int) -> None:
    """Raise InputError for figures of a cluster, those of its device among them, that cannot be together."""
    if domain % per_node and (domain > per_node or "nvlink_domain" in config):
        raise InputError(f"nvlink_domain {domain} is no multiple of gpus_per_node {per_node}")
    if peers and domain > per_node:
        raise InputError(f"link_peers {peers} is a full mesh in a node, nvlink_domain {domain} a switch beyond it: state one")
    if peers and peers != per_node - 1:
        raise InputError(f"link_peers is {peers}; in a full mesh it is one less than gpus_per_node, {per_node - 1}")
    check_bus_bandwidths(config, device)


def _check_leaf(config: Mapping[str, Any], inside: int) -> None:
    """Raise InputError where leaf switches are not modelled in whole; inside: GPUs of a node or NVLink domain."""
    stated = [key for key in _LEAF if key in config]
    if not stated:
        return
    if len(stated) == 1:
        other = next(key for key in _LEAF if key not in config)
        raise InputError(f"{stated[0]} needs {other}: state both, or neither")
    leaf = config["gpus_per_leaf"]
    if leaf % inside:
        raise InputError(f"gpus_per_leaf {leaf} is no multiple of the {inside} GPUs of a node or NVLink domain")
    if "all_reduce_busbw_gb_s" in config:
        raise InputError("all_reduce_busbw_gb_s was reached through the leaf switches: state it, or oversubscription")


def check_bus_bandwidths(config: Mapping[str, Any], device: Device) -> None:
    """Raise InputError for all-reduces that the links of a device do not carry."""
    for key in _BUS_BANDWIDTHS:
        if config.get(key, 0) * GB > _MOST_BUSBW * device.link_bandwidth:
            links = f"{device.link_bandwidth / GB:g} GB/s each way"
            raise InputError(f"{key} is {config[key]:g}, more than the links of {device.name} carry, {links}")


class Placement(NamedTuple):
    """Where the ranks of a group are; int64 arrays.

    intra: ranks of the group in one node (or NVLink domain). inter: nodes that the group touches. strided: 0 where its ranks
    are adjacent; else other groups communicate between them, and it is how many nodes lie from one of its nodes to the next
    (1: neighbours). This matters where the links of a node, or the uplinks of a switch, are shared.
    """

    intra: np.ndarray
    inter: np.ndarray
    strided: np.ndarray


def placement(size: Any, stride: Any, gpus_per_node: int) -> Placement:
    """Return the placement of a group of ``size`` ranks that are ``stride`` apart; arrays of the broadcast shape.

    Ranks fill nodes in order. Groups that neither fill nodes nor divide one begin anywhere in a node: the placement is that of
    the group that touches most nodes, as all others wait for it.
    """
    size, stride = np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
    span, strided = size * stride, np.where(stride > 1, -(-stride // gpus_per_node), 0)
    if not gpus_per_node & (gpus_per_node - 1) and not np.any(span & (span - 1)):  # powers of two divide each other
        intra = np.minimum(np.maximum(gpus_per_node // np.maximum(stride, 1), 1), size)
        inter = size // intra
    else:  # groups of one span begin at neighbouring ranks, spans at multiples of the divisor that they share with the node
        shared = np.gcd(span, gpus_per_node)
        last_place = gpus_per_node - shared + np.minimum(stride, shared) - 1
        touched = (last_place + (size - 1) * stride) // gpus_per_node + 1
        inter = np.minimum(np.where(stride > gpus_per_node, size, touched), size)
        intra = -(-size // np.maximum(inter, 1))
    return Placement(intra, inter, np.broadcast_to(strided, intra.shape))
