"""Shortest routes on a topology: which links may carry a flow next, and the link that a hash chooses.

A link is directed here: 2 i is link i of the topology from source to target, 2 i + 1 the way back. GPUs of one server use their
NVSwitches. All others leave by a NIC and take a shortest path of switches; where several next hops are as short, a hash of the
flow chooses at every node (ECMP).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictor.network.flows.hashing import flow_hash
from predictor.network.topology.types import Topology
from profiler.errors import InputError

#: Bytes of a packet and of its headers on links between servers; on NVLink, headers are in the rate.
PACKET, HEADER = 9000.0, 66.0
_FAR = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Links:
    """Directed links, arrays of one length: from node, to node, rate for payload [bytes/s], delay [s], NVLink or not."""

    source: np.ndarray
    target: np.ndarray
    rate: np.ndarray
    delay: np.ndarray
    nvlink: np.ndarray


def directed(topology: Topology) -> Links:
    """Return the links of ``topology`` in both directions; headers take their share of the rate of those outside servers."""
    nvswitch = topology.is_nvswitch()
    source = np.stack([topology.source, topology.target], axis=1).ravel()
    target = np.stack([topology.target, topology.source], axis=1).ravel()
    nvlink = nvswitch[source] | nvswitch[target]
    payload = np.where(nvlink, 1.0, PACKET / (PACKET + HEADER))
    return Links(source, target, np.repeat(topology.rates(), 2) * payload, np.repeat(topology.delays(), 2), nvlink)


@dataclass(frozen=True)
class NextHops:
    """Next links towards destinations: those at ``first[way, node]``, ``count[way, node]`` of them, in ``links``.

    A way is a set of switches that the NICs of a destination are plugged into; ``way`` maps every GPU to its own (-1: none).
    """

    way: np.ndarray
    first: np.ndarray
    count: np.ndarray
    links: np.ndarray


def next_hops(topology: Topology, links: Links, targets: np.ndarray) -> NextHops:
    """Return the next hops to GPUs ``targets`` over packet switches."""
    outside = np.flatnonzero(~links.nvlink)
    order = outside[np.argsort(links.source[outside], kind="stable")]
    source, target = links.source[order], links.target[order]
    begin = np.searchsorted(source, np.arange(topology.nodes + 1))
    sets: dict[bytes, int] = {}
    way = np.full(topology.gpus, -1, dtype=np.int64)
    plugged: list[np.ndarray] = []
    for gpu in np.unique(targets).tolist():
        switches = np.sort(target[begin[gpu] : begin[gpu + 1]])
        if len(switches):
            way[gpu] = sets.setdefault(switches.tobytes(), len(sets))
            if way[gpu] == len(plugged):
                plugged.append(switches)
    first, count, chosen, total = [], [], [], 0
    among_switches = (source >= topology.gpus) & (target >= topology.gpus)
    for switches in plugged:
        away = _distances(topology, source[among_switches], target[among_switches], switches)
        closer = (target >= topology.gpus) & (away[target] < _FAR)
        own = np.where(closer, away[target], _FAR)
        gpu_links = source < topology.gpus
        np.minimum.at(away, source[gpu_links], np.where(own[gpu_links] < _FAR, own[gpu_links] + 1, _FAR))
        good = closer & (away[source] == away[target] + 1)
        chosen.append(order[good])
        edges = np.searchsorted(source[good], np.arange(topology.nodes + 1))
        first.append(total + edges[:-1])
        count.append(np.diff(edges))
        total += int(good.sum())
    empty = np.zeros((0, topology.nodes), dtype=np.int64)
    return NextHops(
        way,
        np.stack(first) if first else empty,
        np.stack(count) if count else empty,
        np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64),
    )


def _distances(topology: Topology, source: np.ndarray, target: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the hops from every switch to the nearest of ``start`` along links between switches."""
    far = np.full(topology.nodes, _FAR, dtype=np.int64)
    far[start] = 0
    reached, distance = start, 0
    while len(reached):
        at = np.zeros(topology.nodes, dtype=bool)
        at[reached] = True
        distance += 1
        before = np.unique(source[at[target]])
        reached = before[far[before] == _FAR]
        far[reached] = distance
    return far


@dataclass(frozen=True)
class Router:
    """Finds the links of flows; made by ``router``. last: links from switches into GPUs, by (switch, GPU)."""

    topology: Topology
    links: Links
    hops: NextHops
    nvswitch: np.ndarray
    pair_links: np.ndarray
    pair_keys: np.ndarray

    def link(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the directed link between adjacent nodes, -1 where there is none; arrays of one shape."""
        keys = source * self.topology.nodes + target
        at = np.minimum(np.searchsorted(self.pair_keys, keys), len(self.pair_keys) - 1)
        return np.where(self.pair_keys[at] == keys, self.pair_links[at], -1)

    def inside(self, source: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return whether flows stay on NVLink: in one server with NVSwitches, or to or from an NVSwitch."""
        gpus, per = self.topology.gpus, self.topology.gpus_per_server
        both = (source < gpus) & (target < gpus)
        served = len(self.topology.nvswitches) > 0
        return ~both | (served & (source // per == target // per))

    def routes(self, source: np.ndarray, target: np.ndarray, count: np.ndarray, seed: int) -> np.ndarray:
        """Return the links of flows [flows, hops], padded with -1; raise InputError where no links lead there.

        count: how many flows each pair of nodes had before.
        """
        rows = np.full((len(source), 2), -1, dtype=np.int64)
        inside = self.inside(source, target)
        rows[inside] = self._inside_routes(source[inside], target[inside], count[inside], seed)
        if inside.all():
            return rows
        outer = self._outside_routes(source[~inside], target[~inside], count[~inside], seed)
        wide = np.full((len(source), outer.shape[1]), -1, dtype=np.int64)
        wide[:, :2] = rows
        wide[~inside] = outer
        return wide

    def _inside_routes(self, source: np.ndarray, target: np.ndarray, count: np.ndarray, seed: int) -> np.ndarray:
        direct = self.link(source, target)
        gpu = np.minimum(source, target)
        server = gpu // self.topology.gpus_per_server
        each = max(len(self.topology.nvswitches) // max(self.topology.servers, 1), 1)
        via = np.zeros(len(source), dtype=np.int64)
        if each > 1:
            via = (flow_hash(source, target, count, source, seed) % np.uint32(each)).astype(np.int64)
        place = np.minimum(server * each + via, max(len(self.nvswitch) - 1, 0))
        switch = self.nvswitch[place]
        rows = np.stack([self.link(source, switch), self.link(switch, target)], axis=1)
        rows[direct >= 0] = np.stack([direct[direct >= 0], np.full((direct >= 0).sum(), -1)], axis=1)
        broken = (rows[:, 0] < 0) | ((rows[:, 1] < 0) & (direct < 0))
        if broken.any():
            bad = int(np.flatnonzero(broken)[0])
            raise InputError(f"{self.topology.name}: nodes {source[bad]} and {target[bad]} are joined by no NVSwitch")
        return rows

    def _outside_routes(self, source: np.ndarray, target: np.ndarray, count: np.ndarray, seed: int) -> np.ndarray:
        way = self.hops.way[target]
        lost = (way < 0) | (self.hops.count[np.maximum(way, 0), source] == 0)
        if lost.any():
            at = int(np.flatnonzero(lost)[0])
            raise InputError(f"{self.topology.name}: no switches lead from GPU {source[at]} to GPU {target[at]}")
        node, columns = source.copy(), []
        walking = np.ones(len(source), dtype=bool)
        while walking.any():
            options = self.hops.count[way, node]
            walking &= options > 0  # a switch that the destination is plugged into has no next hop
            chosen = np.full(len(source), -1, dtype=np.int64)
            on = np.flatnonzero(walking)
            pick = flow_hash(source[on], target[on], count[on], node[on], seed) % options[on].astype(np.uint32)
            chosen[on] = self.hops.links[self.hops.first[way[on], node[on]] + pick.astype(np.int64)]
            node[on] = self.links.target[chosen[on]]
            columns.append(chosen)
        last = self.link(node, target)
        rows = np.stack([*columns[:-1], np.full(len(source), -1)], axis=1)
        rows[np.arange(len(rows)), (rows >= 0).sum(axis=1)] = last
        return rows


def router(topology: Topology, targets: np.ndarray) -> Router:
    """Return a router for flows to ``targets`` (nodes)."""
    links = directed(topology)
    keys = links.source * topology.nodes + links.target
    order = np.argsort(keys)
    gpus = targets[targets < topology.gpus]
    server = _server_of_nvswitches(topology)
    return Router(topology, links, next_hops(topology, links, gpus), server, order, keys[order])


def _server_of_nvswitches(topology: Topology) -> np.ndarray:
    """Return the NVSwitches ordered by the server of the GPUs that are linked to them."""
    nvswitch = topology.is_nvswitch()
    gpu = np.full(topology.nodes, _FAR, dtype=np.int64)
    for one, other in ((topology.source, topology.target), (topology.target, topology.source)):
        at = nvswitch[other]
        np.minimum.at(gpu, other[at], one[at])
    return topology.nvswitches[np.argsort(gpu[topology.nvswitches], kind="stable")]
