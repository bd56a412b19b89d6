"""A network of GPUs, NVSwitches and packet switches as a graph of bidirectional links.

The names are those of SimAI's topology files: an ASW is a switch that GPUs' NICs plug into (leaf, top of rack), a PSW one that
joins ASWs (spine). Both are packet switches; an NVSwitch joins the GPUs of one server or rack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from profiler.errors import InputError, shown

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "K": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "ps": 1e-12}
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_RATE = re.compile(_NUMBER + r"([kKMGT]i?)?(bps|b/s|Bps|B/s)", re.ASCII)
_TIME = re.compile(_NUMBER + r"(ms|us|ns|ps|s)", re.ASCII)


def bits_per_second(text: str) -> float:
    """Return the rate that a text like ``400Gbps`` states [bits/s]; raise InputError if it states none or zero."""
    match = _RATE.fullmatch(text)
    if not match:
        raise InputError(f"{shown(text)} is not a bandwidth; write a number and a unit, as in 400Gbps")
    rate = float(match[1]) * _PREFIXES[match[2] or ""] * (8.0 if match[3].startswith("B") else 1.0)
    if not 0 < rate < 1e18:
        raise InputError(f"the bandwidth {shown(text)} is out of range; it must be positive and below 1e18 bits per second")
    return rate


def seconds(text: str) -> float:
    """Return the time that a text like ``0.0005ms`` states [s]; raise InputError if it states none."""
    match = _TIME.fullmatch(text)
    if not match:
        raise InputError(f"{shown(text)} is not a latency; write a number and a unit, as in 0.0005ms")
    time = float(match[1]) * _SECONDS[match[2]]
    if not time < 1e3:
        raise InputError(f"the latency {shown(text)} is out of range; it must be below 1000 seconds")
    return time


def probability(text: str) -> float:
    """Return the error rate that a text states; raise InputError if it is no number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise InputError(f"{shown(text)} is not an error rate; write a number from 0 to 1")
    return value


@dataclass(frozen=True)
class LinkKind:
    """What links of one kind have in common, as a topology file writes it: ``2400Gbps``, ``0.000025ms``, ``0``."""

    bandwidth: str
    latency: str
    error_rate: str = "0"

    def __post_init__(self) -> None:
        bits_per_second(self.bandwidth)
        seconds(self.latency)
        probability(self.error_rate)

    @property
    def bits_per_second(self) -> float:
        return bits_per_second(self.bandwidth)

    @property
    def seconds(self) -> float:
        return seconds(self.latency)


@dataclass(frozen=True)
class Topology:
    """GPUs 0 to ``gpus`` - 1, consecutive ones in a server, NVSwitches, other switches and links.

    nvswitches, switches: node numbers. source, target: node numbers of the ends of each link, one entry per bidirectional link,
    in the order of the file. kind: index into ``kinds`` of each link.
    """

    name: str
    gpus: int
    gpus_per_server: int
    gpu_type: str
    nvswitches: np.ndarray
    switches: np.ndarray
    source: np.ndarray
    target: np.ndarray
    kind: np.ndarray
    kinds: tuple[LinkKind, ...]

    @property
    def nodes(self) -> int:
        return self.gpus + len(self.nvswitches) + len(self.switches)

    @property
    def servers(self) -> int:
        return self.gpus // self.gpus_per_server

    @property
    def links(self) -> int:
        return len(self.source)

    def is_nvswitch(self) -> np.ndarray:
        """Return for every node whether it is an NVSwitch."""
        found = np.zeros(self.nodes, dtype=bool)
        found[self.nvswitches] = True
        return found

    def rates(self) -> np.ndarray:
        """Return the rate of every link in each direction [bytes/s]."""
        return np.array([kind.bits_per_second / 8 for kind in self.kinds])[self.kind]

    def delays(self) -> np.ndarray:
        """Return the propagation delay of every link [s]."""
        return np.array([kind.seconds for kind in self.kinds])[self.kind]

    def summary(self) -> str:
        """Return one line that says how large the network is."""
        return f"{self.name}: {self.servers} x {self.server_text()}, {len(self.switches)} other switches, {self.links} links"

    def server_text(self) -> str:
        """Return what a server holds, in words."""
        each = len(self.nvswitches) / max(self.servers, 1)
        return f"({self.gpus_per_server} {self.gpu_type} and {each:g} NVSwitch{'' if each == 1 else 'es'})"
