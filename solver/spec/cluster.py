"""Where it is trained: nodes of accelerators, and how ranks of a process group lie in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from profiler.errors import InputError
from profiler.profile.profile import GIB, Device

#: What the CUDA context, cuBLAS workspaces and NCCL's channels take outside the framework's allocator (assumed).
RUNTIME_BYTES = 1.5 * GIB


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal accelerators. Bandwidths in bytes/s per accelerator, memory in bytes per accelerator."""

    name: str
    gpus_per_node: int
    network_bandwidth: float
    memory_bytes: float

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            if not getattr(self, field.name) > 0:
                raise InputError(f"cluster {self.name}: {field.name} is {getattr(self, field.name)}; it must be positive")


_KEYS = ("name", "hardware", "gpus_per_node", "inter_node_gbit_per_gpu", "memory_gib", "notes")


def cluster_of(device: Device, config: Mapping[str, Any] | None = None, where: str = "cluster") -> Cluster:
    """The device's usual cluster, changed by ``config``: gpus_per_node, inter_node_gbit_per_gpu, memory_gib.

    Raises InputError for an unknown key or a value that is no positive number.
    """
    config = config or {}
    unknown = sorted(set(config) - set(_KEYS))
    if unknown:
        raise InputError(f"{where}: unknown cluster key {unknown[0]!r}; known keys are {', '.join(_KEYS)}")
    for key in ("gpus_per_node", "inter_node_gbit_per_gpu", "memory_gib"):
        value = config.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InputError(f"{where}: {key} is {value!r}; it must be a positive number")
    gbit = config.get("inter_node_gbit_per_gpu")
    return Cluster(
        name=str(config.get("name", device.name)),
        gpus_per_node=int(config.get("gpus_per_node", device.gpus_per_node)),
        network_bandwidth=float(gbit) * 1e9 / 8 if gbit else device.network_bandwidth,
        memory_bytes=float(config["memory_gib"]) * GIB if "memory_gib" in config else device.memory_bytes,
    )


class Placement(NamedTuple):
    """Where a group of ranks lies; int64 arrays. intra: its ranks in one node. inter: nodes it touches. strided: 1 where its
    ranks are no neighbours, so that other groups work between them (it matters where a node's links are shared)."""

    intra: np.ndarray
    inter: np.ndarray
    strided: np.ndarray


def placement(size: Any, stride: Any, gpus_per_node: int) -> Placement:
    """Placement of a group of ``size`` ranks that lie ``stride`` apart; arrays of the broadcast shape.

    Ranks fill nodes in order, so ``intra = min(size, gpus_per_node // stride)`` of them share a node (at least 1), and
    the group touches ``ceil(size / intra)`` nodes.
    """
    size, stride = np.asarray(size, dtype=np.int64), np.asarray(stride, dtype=np.int64)
    intra = np.clip(gpus_per_node // np.maximum(stride, 1), 1, size)
    return Placement(intra, -(-size // intra), np.broadcast_to((stride > 1).astype(np.int64), intra.shape))
