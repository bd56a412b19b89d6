"""Draw a topology: spine switches above leaf switches above servers; nodes of one kind with the same neighbours share a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from predictor.network.topology.types import Topology
from profiler.errors import InputError
from profiler.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_SINGLE = 8  # nodes of a tier that are drawn one by one
_MOST_BOXES = 16  # of a tier; more are put together with their neighbours
_MOST_LABELS = 24
_COLORS = ("tab:green", "tab:blue", "tab:orange", "tab:red", "tab:purple", "tab:brown")


@dataclass(frozen=True)
class Box:
    """Nodes drawn as one: their numbers, what they are, and how many of the tier come before them."""

    nodes: np.ndarray
    name: str


@dataclass(frozen=True)
class Tier:
    """Boxes side by side at one height; box: index of the box of each of the topology's nodes, -1 elsewhere."""

    boxes: tuple[Box, ...]
    box: np.ndarray


def draw_topology(topology: Topology, path: Path) -> None:
    """Draw ``topology`` to a picture file; raise InputError for a format or a path that cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kind = path.suffix[1:].lower()
    if kind not in ("png", "pdf", "svg"):
        raise InputError(f"{path}: cannot draw a picture of this kind; the name must end in .png, .pdf or .svg")
    figure, axes = plt.subplots(figsize=(12, 6.5), layout="constrained")
    _draw(axes, topology)
    with replacing(path) as file:
        figure.savefig(file, format=kind, dpi=130)
    plt.close(figure)


def tiers(topology: Topology) -> tuple[Tier, ...]:
    """Return the tiers from the bottom: servers with their NVSwitches, leaf switches, then others by distance from the GPUs."""
    server = _server_of(topology)
    level = _levels(topology)
    found = [_servers(topology, server)]
    for height in range(1, int(level[topology.switches].max(initial=0)) + 1):
        nodes = topology.switches[level[topology.switches] == height]
        found.append(_switches(topology, nodes, server, "ASW" if height == 1 else "PSW"))
    return tuple(found)


def _server_of(topology: Topology) -> np.ndarray:
    """Return the server of every GPU and NVSwitch, -1 for other nodes."""
    server = np.full(topology.nodes, -1)
    server[: topology.gpus] = np.arange(topology.gpus) // topology.gpus_per_server
    nvswitch = topology.is_nvswitch()
    for one, other in ((topology.source, topology.target), (topology.target, topology.source)):
        at = nvswitch[one] & (other < topology.gpus)
        server[one[at]] = server[other[at]]
    return server


def _levels(topology: Topology) -> np.ndarray:
    """Return how many links each switch is away from the nearest GPU; unlinked ones are as far as the farthest."""
    level = np.full(topology.nodes, -1)
    level[: topology.gpus] = 0
    level[topology.nvswitches] = 0
    height = 0
    while True:
        near = (level[topology.source] == height, level[topology.target] == height)
        new = np.concatenate([topology.target[near[0]], topology.source[near[1]]])
        new = new[level[new] < 0]
        if not len(new):
            break
        height += 1
        level[new] = height
    level[level < 0] = max(height, 1)
    return level


def _servers(topology: Topology, server: np.ndarray) -> Tier:
    keys = _neighbours(topology, server, topology.servers)
    parts = _parts(keys)
    boxes = [Box(part, f"server {part[0]}" if len(part) == 1 else f"{len(part)} servers\n{_span(part)}") for part in parts]
    box_of_server = _place(parts, topology.servers)
    return Tier(tuple(boxes), np.where(server >= 0, box_of_server[np.maximum(server, 0)], -1))


def _switches(topology: Topology, nodes: np.ndarray, server: np.ndarray, word: str) -> Tier:
    index = np.full(topology.nodes, -1)
    index[nodes] = np.arange(len(nodes))
    parts = _parts(
        _neighbours(topology, index, len(nodes), np.where(server >= 0, server, np.arange(topology.nodes) + topology.nodes))
    )
    boxes = []
    for part in parts:
        name_of = f"{word} {nodes[part[0]]}" if len(part) == 1 else f"{len(part)} {word}s\n{_span(nodes[part])}"
        boxes.append(Box(nodes[part], name_of))
    place = _place(parts, len(nodes))
    return Tier(tuple(boxes), np.where(index >= 0, place[np.maximum(index, 0)], -1))


def _span(numbers: np.ndarray) -> str:
    """Return a range of numbers as a label, two ranges as two."""
    gaps = np.flatnonzero(np.diff(numbers) > 1)
    if len(gaps) > 1:
        return f"{numbers[0]} ... {numbers[-1]}"
    ranges = np.split(numbers, gaps + 1)
    return "\n".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in ranges)


def _neighbours(topology: Topology, index: np.ndarray, count: int, name: np.ndarray | None = None) -> list[bytes]:
    """Return for each of ``count`` things (``index`` of their nodes) a key of the switches or servers that they link to."""
    name = np.arange(topology.nodes) if name is None else name
    ends = np.concatenate([topology.source, topology.target]), np.concatenate([topology.target, topology.source])
    out = (index[ends[0]] >= 0) & (index[ends[1]] < 0)
    pairs = np.unique(np.stack([index[ends[0][out]], name[ends[1][out]]]), axis=1)
    return [part.tobytes() for part in np.split(pairs[1], np.searchsorted(pairs[0], np.arange(1, count)))]


def _parts(keys: Sequence[bytes]) -> list[np.ndarray]:
    """Return index groups: single ones if they are few, else those with one key, joined until they are few enough."""
    if len(keys) <= _MOST_SINGLE:
        return [np.array([i]) for i in range(len(keys))]
    same: dict[bytes, list[int]] = {}
    for i, key in enumerate(keys):
        same.setdefault(key, []).append(i)
    groups = list(same.values())
    if len(groups) > _MOST_BOXES:
        order = sorted(range(len(keys)))
        groups = [list(part) for part in np.array_split(order, _MOST_BOXES)]
    return [np.array(group) for group in groups]


def _place(parts: Sequence[np.ndarray], count: int) -> np.ndarray:
    place = np.full(count, -1)
    for box, part in enumerate(parts):
        place[part] = box
    return place


def _draw(axes: Axes, topology: Topology) -> None:
    levels = tiers(topology)
    color = _colors(topology)
    centers = [(np.arange(len(tier.boxes)) + 0.5) / max(len(tier.boxes), 1) for tier in levels]
    inside = topology.is_nvswitch()[topology.source] | topology.is_nvswitch()[topology.target]
    drawn = []
    for low in range(len(levels)):
        for high in range(low + 1, len(levels)):
            drawn += _links(topology, levels, low, high, inside)
    for label, (low, high, one, other, kind, count) in enumerate(drawn):
        start, end = (centers[low][one], low), (centers[high][other], high)
        rate = topology.kinds[kind].bandwidth
        axes.plot(*zip(start, end, strict=True), color=color[rate], lw=0.7 + 0.5 * np.log10(count), alpha=0.7, zorder=1)
        if count > 1 and len(drawn) <= _MOST_LABELS:
            at = 0.35 + 0.3 * (label % 5) / 4  # labels of neighbouring lines at different heights
            x, y = (start[i] + at * (end[i] - start[i]) for i in (0, 1))
            white = {"fc": "white", "ec": "none", "pad": 0.6, "alpha": 0.85}
            axes.text(x, y, f"{count} x", fontsize=7, ha="center", va="center", color=color[rate], bbox=white)
    nvlink = {topology.kinds[kind].bandwidth for kind in np.unique(topology.kind[inside]).tolist()}
    border = color[min(nvlink)] if nvlink else "black"
    for height, tier in enumerate(levels):
        for box, center in zip(tier.boxes, centers[height], strict=True):
            style = {
                "boxstyle": "round",
                "fc": "whitesmoke",
                "ec": border if height == 0 else "black",
                "lw": 2 if height == 0 else 1,
            }
            size = 8 if len(tier.boxes) <= 8 else 6
            axes.text(center, height, box.name, ha="center", va="center", fontsize=size, bbox=style, zorder=2)
    _legend(axes, topology, color, inside)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.35, len(levels) - 0.65)
    axes.axis("off")
    most = max((row[-1] for row in drawn), default=1)
    lines = "a line is one link" if most == 1 else f"a line stands for up to {most} links"
    servers = f"{topology.servers} x {topology.server_text()}"
    axes.set_title(f"{topology.name}\n{servers}, {topology.links} links; {lines}", fontsize=11)


def _links(
    topology: Topology, levels: Sequence[Tier], low: int, high: int, inside: np.ndarray
) -> list[tuple[int, int, int, int, int, int]]:
    """Return (low tier, high tier, box, box, kind, links) of the links between two tiers."""
    rows = []
    for one, other in ((topology.source, topology.target), (topology.target, topology.source)):
        at = (levels[low].box[one] >= 0) & (levels[high].box[other] >= 0) & ~inside
        rows.append(np.stack([levels[low].box[one[at]], levels[high].box[other[at]], topology.kind[at].astype(np.int64)]))
    pairs, count = np.unique(np.concatenate(rows, axis=1), axis=1, return_counts=True)
    return [(low, high, a, b, k, n) for (a, b, k), n in zip(pairs.T.tolist(), count.tolist(), strict=True)]


def _colors(topology: Topology) -> dict[str, str]:
    rates = sorted({kind.bandwidth for kind in topology.kinds}, key=lambda rate: rate)
    return {rate: _COLORS[i % len(_COLORS)] for i, rate in enumerate(rates)}


def _legend(axes: Axes, topology: Topology, color: dict[str, str], inside: np.ndarray) -> None:
    from matplotlib.lines import Line2D

    entries = []
    for nvlink in (True, False):
        for rate in color:
            kinds = [i for i, kind in enumerate(topology.kinds) if kind.bandwidth == rate]
            count = int((np.isin(topology.kind, kinds) & (inside == nvlink)).sum())
            if count:
                where = "NVLink, inside the boxes" if nvlink else "network"
                entries.append(Line2D([], [], color=color[rate], lw=2, label=f"{rate} ({where}): {count} links"))
    axes.legend(
        handles=entries,
        loc="lower center",
        bbox_to_anchor=(0.5, -0.06),
        ncols=3,
        fontsize=8,
        title="bandwidth per link and direction",
        title_fontsize=8,
        frameon=False,
    )
