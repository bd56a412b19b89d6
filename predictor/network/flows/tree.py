"""all_reduce along NCCL's double binary tree: trees over servers, chains inside them, half of the data for each tree."""

from __future__ import annotations

import numpy as np

from predictor.network.flows.pattern import Pattern, lanes, together
from predictor.network.flows.ring import PIECE, by_server


def binary_tree(count: int) -> np.ndarray:
    """Return the parent of each of ``count`` nodes, -1 for the root, in NCCL's in-order binary tree.

    The root is 0. Another node, whose lowest set bit is b, is the child of the node with b cleared and 2 b set, or, where there
    is none, with b cleared. So odd nodes are leaves and nobody has more than two children, the root one.
    """
    parents = np.full(count, -1, dtype=np.int64)
    for node in range(1, count):
        bit = node & -node
        up = (node ^ bit) | (bit << 1)
        parents[node] = up if up < count else node ^ bit
    return parents


def second_tree(count: int) -> np.ndarray:
    """Return the other tree of the pair: mirrored for an even count, shifted by one for an odd one, so that leaves differ."""
    parents = binary_tree(count)
    nodes = np.arange(count)
    places = count - 1 - nodes if count % 2 == 0 else (nodes + 1) % count
    other = np.full(count, -1, dtype=np.int64)
    other[places] = np.where(parents < 0, -1, places[parents])
    return other


def tree_all_reduce(ranks: np.ndarray, per_server: int, size: float) -> Pattern:
    """Return the all_reduce of ``size`` bytes: every channel has both trees, pieces go up to the root and down again."""
    servers = by_server(ranks, per_server)
    channels = max(len(part) for part in servers)
    share = size / channels / 2
    patterns = [
        _up_and_down(_rank_tree(servers, parents, channel), share)
        for channel in range(channels)
        for parents in (binary_tree(len(servers)), second_tree(len(servers)))
    ]
    return together(patterns, [0] * len(patterns))


def _rank_tree(servers: list[np.ndarray], parents: np.ndarray, channel: int) -> list[tuple[int, int]]:
    """Return (rank, parent rank) of all ranks but the root; in a server, a chain ends at the rank that talks to others."""
    edges = []
    heads = [int(ranks[channel % len(ranks)]) for ranks in servers]
    for server, ranks in enumerate(servers):
        order = np.roll(ranks, -(channel % len(ranks))).tolist()
        edges += list(zip(order[1:], order[:-1], strict=True))
        if parents[server] >= 0:
            edges.append((heads[server], heads[parents[server]]))
    return edges


def _up_and_down(edges: list[tuple[int, int]], size: float) -> Pattern:
    pieces = max(-(-int(size) // PIECE), 1)
    count = len(edges)
    lane = {rank: index for index, (rank, _) in enumerate(edges)}
    rank, parent = (np.array(side, dtype=np.int64) for side in zip(*edges, strict=True))
    inner = [(index, lane[above]) for index, (_, above) in enumerate(edges) if above in lane]
    below, above = (np.array(side, dtype=np.int64) for side in zip(*inner, strict=True)) if inner else (np.zeros(0, int),) * 2
    top = np.array([index for index, (_, head) in enumerate(edges) if head not in lane], dtype=np.int64)
    every = np.arange(2 * count)
    root_up, root_down = (side.ravel() for side in np.meshgrid(top, count + top, indexing="ij"))
    waits = [
        (below, above, 0, False),  # up when all children have sent
        (root_up, root_down, 0, False),  # down when the root has everything
        (count + above, count + below, 0, False),
        (every, every, 1, True),
    ]
    return lanes(np.concatenate([rank, parent]), np.concatenate([parent, rank]), size / pieces, pieces, waits)
