"""Read and write SimAI's topology files.

Line 1: nodes, GPUs per server, NVSwitches, other switches, links, GPU type. Line 2: the numbers of all switches, NVSwitches
first, each followed by a blank. Then one line per bidirectional link: source, target, bandwidth, latency, error rate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from predictor.network.topology.types import LinkKind, Topology
from profiler.errors import InputError, shown
from profiler.files import write_text
from profiler.text_file import read_text

_HEADER = "nodes, GPUs per server, NVSwitches, other switches, links, GPU type"
_MOST_BYTES = 4 << 30
_MOST_NODES = 5_000_000


def topology_text(topology: Topology) -> str:
    """Return the file of ``topology``."""
    t = topology
    header = f"{t.nodes} {t.gpus_per_server} {len(t.nvswitches)} {len(t.switches)} {t.links} {t.gpu_type}"
    switches = "".join(f"{node} " for node in [*t.nvswitches.tolist(), *t.switches.tolist()])
    ends = [f" {kind.bandwidth} {kind.latency} {kind.error_rate}" for kind in t.kinds]
    rows = zip(t.source.tolist(), t.target.tolist(), t.kind.tolist(), strict=True)
    return "\n".join([header, switches, *(f"{source} {target}{ends[kind]}" for source, target, kind in rows), ""])


def write_topology(topology: Topology, path: Path) -> None:
    """Write the file of ``topology``, atomically; raise InputError if ``path`` cannot be written."""
    write_text(path, topology_text(topology))


def read_topology(path: Path) -> Topology:
    """Return the network of a file; raise InputError, with the number of the line, where the file is wrong."""
    text = read_text(path, "a topology", _MOST_BYTES)
    try:
        return parse_topology(text, path.name)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def parse_topology(text: str, name: str) -> Topology:
    """Return the network that the text of a file describes; raise InputError with the number of the line."""
    lines = text.splitlines()
    if len(lines) < 2:
        raise InputError(f"line {len(lines) + 1}: the file ends; line 1 holds {_HEADER}, line 2 the switches")
    nodes, per_server, nvswitches, others, links, gpu_type = _header(lines[0])
    switches = _switches(lines[1], nodes, nvswitches, others)
    gpus = nodes - nvswitches - others
    if gpus < 1 or gpus % per_server:
        raise InputError(f"line 1: {nodes} nodes less the switches are {gpus} GPUs, which do not fill servers of {per_server}")
    while len(lines) > 2 and not lines[-1].strip():
        lines.pop()
    if len(lines) - 2 != links:
        raise InputError(f"line {len(lines)}: the file has {len(lines) - 2} links; line 1 states {links}")
    source, target, kind, kinds = _links(lines[2:], nodes)
    topology = Topology(
        name, gpus, per_server, gpu_type, switches[:nvswitches], switches[nvswitches:], source, target, kind, kinds
    )
    _check_graph(topology)
    return topology


def _header(line: str) -> tuple[int, int, int, int, int, str]:
    words = line.split()
    if len(words) != 6:
        raise InputError(f"line 1: {len(words)} words; it must hold {_HEADER}")
    numbers = []
    for word, least in zip(words, (1, 1, 0, 0, 0), strict=False):
        number = _whole(word)
        if number is None or not least <= number:
            raise InputError(f"line 1: {shown(word)} is not a whole number from {least} up; the line holds {_HEADER}")
        numbers.append(number)
    if numbers[0] > _MOST_NODES:
        raise InputError(f"line 1: {numbers[0]} nodes; at most {_MOST_NODES} are read")
    return numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], words[5]


def _whole(word: str) -> int | None:
    return int(word) if word.isascii() and word.isdigit() and len(word) < 19 else None


def _switches(line: str, nodes: int, nvswitches: int, others: int) -> np.ndarray:
    words = line.split()
    if len(words) != nvswitches + others:
        raise InputError(
            f"line 2: {len(words)} switches; line 1 states {nvswitches} NVSwitches and {others} other switches, "
            f"{nvswitches + others} together"
        )
    gpus = nodes - len(words)
    numbers = [_switch(word, gpus, nodes) for word in words]
    if len(set(numbers)) < len(numbers):
        twice = next(number for i, number in enumerate(numbers) if number in numbers[:i])
        raise InputError(f"line 2: switch {twice} is named twice")
    return np.array(numbers, dtype=np.int64)


def _switch(word: str, gpus: int, nodes: int) -> int:
    number = _whole(word)
    if number is None or not gpus <= number < nodes:
        raise InputError(
            f"line 2: {shown(word)} is not the number of a switch; with the {nodes} nodes of line 1, switches are "
            f"{gpus} to {nodes - 1}, after the GPUs"
        )
    return number


def _links(lines: list[str], nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[LinkKind, ...]]:
    kinds: dict[tuple[str, str, str], int] = {}
    found: list[LinkKind] = []
    rows = np.empty((len(lines), 3), dtype=np.int64)
    for number, line in enumerate(lines, start=3):
        words = line.split()
        if len(words) != 5:
            raise InputError(f"line {number}: {len(words)} words; a link is source, target, bandwidth, latency, error rate")
        ends = [_node(word, nodes, number) for word in words[:2]]
        if ends[0] == ends[1]:
            raise InputError(f"line {number}: node {ends[0]} is linked to itself; a link joins two nodes")
        key = (words[2], words[3], words[4])
        if key not in kinds:
            try:
                found.append(LinkKind(*key))
            except InputError as error:
                raise InputError(f"line {number}: {error}") from None
            kinds[key] = len(kinds)
        rows[number - 3] = ends[0], ends[1], kinds[key]
    return rows[:, 0].copy(), rows[:, 1].copy(), rows[:, 2].copy(), tuple(found)


def _node(word: str, nodes: int, line: int) -> int:
    node = _whole(word)
    if node is None or node >= nodes:
        raise InputError(f"line {line}: no node is called {shown(word)}; nodes are 0 to {nodes - 1}")
    return node


def _check_graph(topology: Topology) -> None:
    """Raise InputError for a second link between two nodes, a link between GPUs, and a GPU without a link."""
    low, high = np.minimum(topology.source, topology.target), np.maximum(topology.source, topology.target)
    pairs = low * topology.nodes + high
    order = np.argsort(pairs, kind="stable")
    again = np.flatnonzero(np.diff(pairs[order]) == 0)
    if len(again):
        line = int(order[again + 1].min())
        raise InputError(f"line {line + 3}: nodes {low[line]} and {high[line]} are already linked; state each link once")
    joined = np.zeros(topology.nodes, dtype=bool)
    joined[topology.source] = joined[topology.target] = True
    alone = np.flatnonzero(~joined[: topology.gpus])
    if len(alone):
        raise InputError(f"line {topology.links + 2}: GPU {alone[0]} has no link by the end of the file; link it to a switch")
