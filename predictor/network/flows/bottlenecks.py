"""Which links can limit flows, and for which lanes the hash matters.

A link between switches cannot be a bottleneck if the NICs of all flows that may take it are together no faster: then its limit
follows from the limits of the NICs, and leaving it out changes no max-min fair rate. Most links of a rail-optimised network
are of this kind, and which of them a hash picks is then irrelevant.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predictor.network.flows.pattern import Pattern
from predictor.network.flows.routes import Router

#: Above this number of (switch, destination) pairs, or lanes, a link's receivers are not counted: it may be a bottleneck then.
_MOST = 200_000


@dataclass(frozen=True)
class Choices:
    """harmless: links that never limit a flow. varies: lanes whose rate may depend on the hash. alone: those of them whose
    possible links no other lane may use, so that the hash matters only if two steps of a lane are under way together."""

    harmless: np.ndarray
    varies: np.ndarray
    alone: np.ndarray


def choices(router: Router, pattern: Pattern) -> Choices:
    """Return what the hash can change for the lanes of ``pattern``."""
    links = router.links
    source, target = pattern.source, pattern.target
    inside = router.inside(source, target)
    gpus, each = router.topology.gpus, len(router.nvswitch) // max(router.topology.servers, 1)
    varies = inside & (each > 1) & (source < gpus) & (target < gpus)
    harmless = np.zeros(len(links.rate), dtype=bool)
    outer = np.flatnonzero(~inside)
    alone = np.zeros(len(pattern), dtype=bool)
    if not len(outer):
        return Choices(harmless, varies, alone)
    way = router.hops.way[target[outer]]
    lane, first = _options(router, source[outer], way)
    inner = (links.source >= gpus) & (links.target >= gpus)
    load = _load(router, links.target[first], way[lane], first, links.rate)
    into = np.bincount(links.target[~links.nvlink], weights=links.rate[~links.nvlink], minlength=router.topology.nodes)
    pairs = distinct(links.target[first], way[lane], target[outer][lane])
    if len(pairs[0]) < _MOST:
        load = np.minimum(load, _load(router, pairs[0], pairs[1], pairs[2], into))
    harmless = inner & (load <= links.rate * (1 + 1e-9))
    varies[outer] = _varying(router, harmless, source[outer], way)
    planes = np.bincount(lane, minlength=len(outer)) > 1
    if len(outer) < _MOST // 10 and not (varies[outer] & ~planes).any() and planes.any():
        alone[outer] = _alone(router, harmless, source[outer], target[outer], way) & varies[outer]
    return Choices(harmless, varies, alone)


def distinct(*columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the different rows of columns of non-negative numbers, in order."""
    sizes = [int(column.max(initial=0)) + 1 for column in columns]
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column, size in zip(columns, sizes, strict=True):
        key = key * size + column
    key.sort()  # faster than np.unique, which hashes
    key = key[np.concatenate([[True], np.diff(key) != 0])] if len(key) else key
    found = []
    for size in reversed(sizes):
        found.append(key % size)
        key = key // size
    return tuple(reversed(found))


def _options(router: Router, node: np.ndarray, way: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, link) for every next link of the rows (node, way)."""
    count = router.hops.count[way, node]
    row = np.repeat(np.arange(len(node)), count)
    place = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    return row, router.hops.links[router.hops.first[way, node][row] + place]


def _spread(
    router: Router, node: np.ndarray, way: np.ndarray, tag: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Follow all choices from the rows; return (tag, link) of all links that may be taken, and (tag, last switch)."""
    tags, taken, end_tags, ends = [], [], [], []
    while len(node):
        stop = router.hops.count[way, node] == 0
        end_tags.append(tag[stop])
        ends.append(node[stop])
        node, way, tag = node[~stop], way[~stop], tag[~stop]
        row, link = _options(router, node, way)
        tags.append(tag[row])
        taken.append(link)
        node, way, tag = distinct(router.links.target[link], way[row], tag[row])
    return np.concatenate(tags), np.concatenate(taken), np.concatenate(end_tags), np.concatenate(ends)


def _load(router: Router, node: np.ndarray, way: np.ndarray, tag: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Return for every link the sum of ``limit`` over the different tags of the rows that may use it."""
    tags, taken, _, _ = _spread(router, *distinct(node, way, tag))
    pairs = distinct(tags, taken)
    return np.bincount(pairs[1], weights=limit[pairs[0]], minlength=len(router.links.rate))


def _varying(router: Router, harmless: np.ndarray, source: np.ndarray, way: np.ndarray) -> np.ndarray:
    """Return for rows (source GPU, way) whether different choices take different links that may be bottlenecks."""
    lane, first = _options(router, source, way)
    start = router.links.target[first]
    keys = distinct(start, way[lane])
    tag = np.arange(len(keys[0]))
    inverse = np.searchsorted(keys[0] * len(router.hops.count) + keys[1], start * len(router.hops.count) + way[lane])
    tags, taken, end_tags, ends = _spread(router, keys[0], keys[1], tag)
    pairs = distinct(tags, taken)
    several = np.bincount(tags, minlength=len(tag)) > _depth(router, keys)
    limits = np.bincount(pairs[0][~harmless[pairs[1]]], minlength=len(tag)) > 0
    last = distinct(end_tags, ends)
    key_varies = (several & limits) | (np.bincount(last[0], minlength=len(tag)) > 1)
    found = np.bincount(lane, minlength=len(source)) > 1
    found[lane[key_varies[inverse]]] = True
    return found


def _depth(router: Router, keys: tuple[np.ndarray, ...]) -> np.ndarray:
    """Return the hops that any one route from (switch, way) takes before its last switch."""
    node, depth = keys[0].copy(), np.zeros(len(keys[0]), dtype=np.int64)
    while (more := router.hops.count[keys[1], node] > 0).any():
        node[more] = router.links.target[router.hops.links[router.hops.first[keys[1][more], node[more]]]]
        depth += more
    return depth


def _alone(router: Router, harmless: np.ndarray, source: np.ndarray, target: np.ndarray, way: np.ndarray) -> np.ndarray:
    """Return for rows (source, target) whether all links that they may take, but harmless ones, are theirs alone and alike."""
    tags, taken, end_tags, ends = _spread(router, source, way, np.arange(len(source)))
    tags = np.concatenate([tags, end_tags])
    taken = np.concatenate([taken, router.link(ends, target[end_tags])])
    pairs = distinct(tags[~harmless[taken]], taken[~harmless[taken]])
    users = np.bincount(pairs[1], minlength=len(harmless))
    rate = router.links.rate[pairs[1]]
    low, high = np.full(len(source), np.inf), np.zeros(len(source))
    np.minimum.at(low, pairs[0], rate)
    np.maximum.at(high, pairs[0], rate)
    shared = np.bincount(pairs[0][users[pairs[1]] > 1], minlength=len(source)) > 0
    return ~shared & (low == high)
