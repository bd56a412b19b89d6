"""The time of one collective as SimAI-Analytical computes it: placement, bus bandwidth, ratio, and a table for small messages.

Source: SimAI's Layer.cc (compute_time, cal_ratio) and calbusbw.cc of release 1.6 (Apache-2.0), restated from reading them.
Their bandwidths are called GB/s and are GiB/s. Arithmetic is done in the precisions of the original, so that printed times
agree to the last digit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from profiler.errors import InputError, closest, shown
from profiler.units import GIB
from solver.simai.ratios import ALL_TO_ALL, MULTI, NIC, NVLINK, ratio_tables
from solver.simai.workload_text import Collective, Group

#: NVLink bus bandwidth of a GPU [GiB/s]: links times 20 (A) or 20.6 (H); SimAI's calbusbw.h, calibrated.
NVLINK_OF: Mapping[str, float] = {"A100": 20.0 * 12, "A800": 20.0 * 8, "H100": 20.6 * 18, "H800": 20.6 * 8, "H20": 20.6 * 18}
#: Bus bandwidth of a NIC [GiB/s]; SimAI's calbusbw.h, calibrated.
NIC_OF: Mapping[str, float] = {"cx6": 23.5, "cx7": 48.5, "bf3": 48.5}
#: Nanoseconds of a message of 2 B to 1 MiB by ranks of its group; any other number of ranks: none at all.
SMALL_NS: Mapping[int, int] = {2: 10_000, 4: 12_000, 8: 15_000, 16: 66_000, 32: 135_000, 64: 200_000, 128: 320_000}
SMALL = range(2, 1 << 20)
#: What x86 makes of a time that is not a number, where it converts it to an unsigned integer.
_NOT_A_NUMBER_NS = 1 << 63


@dataclass(frozen=True)
class Machine:
    """gpus, nics: of one server. nvlink, nic: bus bandwidth of a GPU and of a NIC [GiB/s]."""

    gpus: int
    nics: int
    nvlink: float
    nic: float


@dataclass(frozen=True)
class Sizes:
    """Sizes of the groups of a step: tensor, expert and pipeline parallelism, and all GPUs."""

    tp: int
    ep: int
    pp: int
    gpus: int

    @property
    def dp(self) -> int:
        return self.gpus // (self.tp * self.pp)


@dataclass(frozen=True)
class Place:
    """Where a group's ranks are: ``gpus`` in each of ``nodes`` servers, which have ``nics`` for them."""

    nodes: int
    gpus: int
    nics: int


def nvlink_of(gpu_type: str) -> float:
    """Return the NVLink bandwidth of ``-g_type`` [GiB/s]. Raises InputError for a type that SimAI does not know."""
    return _of_type(gpu_type, NVLINK_OF, "-g_type")


def nic_of(nic_type: str) -> float:
    """Return the bandwidth of ``-nic_t`` [GiB/s]. Raises InputError for a type that SimAI does not know."""
    return _of_type(nic_type, NIC_OF, "-nic_t")


def _of_type(name: str, known: Mapping[str, float], option: str) -> float:
    found = known.get(name.upper(), known.get(name.lower()))
    if found is None:
        raise InputError(f"{option} is {shown(name)}{closest(name, known)}; it must be one of {', '.join(known)}")
    return found


def place_of(machine: Machine, sizes: Sizes, group: Group, ranks: int) -> Place | None:
    """Return where a group is; None for a group that takes no time: one rank (of any but TP), or no group at all.

    A data-parallel rank counts as a node of its own, with its share of the server's NICs; divisions are of integers.
    """
    gpus, nics, tp = machine.gpus, machine.nics, sizes.tp
    if group is Group.TP:
        return Place(1, tp, nics) if tp <= gpus else Place(tp // gpus, gpus, nics)
    if group is Group.NONE or ranks <= 1:
        return None
    if group is Group.EP:
        if tp * ranks <= gpus:
            return Place(1, gpus // tp, nics)
        return Place(tp * ranks // gpus, max(gpus // tp, 1), nics // gpus if tp > gpus else nics // tp)
    shared = tp * (sizes.ep if group is Group.DP_EP else 1)
    return Place(ranks, gpus // shared, nics // shared) if shared <= gpus else Place(ranks, 1, nics // gpus)


def bus_bandwidth(machine: Machine, place: Place, collective: Collective) -> tuple[np.float32, bool]:
    """Return (bus bandwidth of a ring [GiB/s], whether SimAI says that NVLink bounds it).

    Raises InputError where integer division leaves a group no NIC: SimAI then divides by a bandwidth of -1.
    """
    nvlink, nic = np.float32(machine.nvlink), np.float32(machine.nic)
    if place.gpus * place.nodes == 1:
        return np.float32(0), False
    if place.nics < 1:
        raise InputError(
            f"{machine.nics} NICs a server leave none to a group that shares it with others, so SimAI-Analytical has no "
            f"bandwidth; give -n_p_s the GPUs of a server, {machine.gpus}"
        )
    network = nic * np.float32(place.nics)
    if collective is Collective.ALL_TO_ALL:
        if place.nodes == 1:
            return nvlink, True
        ranks = place.nodes * place.gpus
        share = network / np.float32(place.gpus) * np.float32(ranks - 1)
        return share / np.float32((place.nodes - 1) * place.gpus), False
    if place.nodes == 1:
        return nvlink, False
    if place.gpus == 1:
        return network, False
    if network > nvlink:  # rings of several NICs enter and leave a server by different GPUs
        nvlink = nvlink * np.float32(place.gpus) / np.float32(place.gpus - 1)
    return (nvlink, True) if nvlink < network else (network, False)


def bandwidth_ratio(
    machine: Machine, sizes: Sizes, collective: Collective, group: Group, ranks: int, size: int, bound_by_nvlink: bool
) -> float:
    """Return the share of the bus bandwidth that a buffer of ``size`` bytes reaches by SimAI's tables.

    They are of all-gather and reduce-scatter over TP and of all-to-all over TP or EP; everything else reaches all of it.
    """
    gpus, tp, tables = machine.gpus, sizes.tp, ratio_tables()
    if collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER) and group is Group.TP:
        return tables[NVLINK if bound_by_nvlink else NIC].ratio(size, 1 if tp < gpus else tp // gpus)
    if collective is Collective.ALL_TO_ALL and group is Group.EP:
        nodes = 1 if tp * ranks <= gpus else MULTI if tp >= gpus else tp * ranks // gpus
        return tables[ALL_TO_ALL].ratio(size, nodes)
    if collective is Collective.ALL_TO_ALL and group is Group.TP:
        return tables[ALL_TO_ALL].ratio(size, 1 if tp <= gpus else tp // gpus)
    return 1.0


@lru_cache(maxsize=4096)
def collective_ns(machine: Machine, sizes: Sizes, collective: Collective, group: Group, ranks: int, size: int) -> int:
    """Return the nanoseconds of a collective on a whole buffer of ``size`` bytes over a group of ``ranks``.

    bytes / 2^30 / (ratio * bus bandwidth) * (n - 1) / n seconds, twice that for an all-reduce. Raises InputError as
    bus_bandwidth and the ratio tables do.
    """
    if collective is Collective.NONE:
        return 0
    if size in SMALL:
        return SMALL_NS.get(ranks, 0)
    place = place_of(machine, sizes, group, ranks)
    if place is None:
        return 0
    bandwidth, bound = bus_bandwidth(machine, place, collective)
    ratio = np.float32(bandwidth_ratio(machine, sizes, collective, group, ranks, size, bound))
    rate = float(ratio * bandwidth)
    if rate == 0:  # one GPU: infinity times (n - 1), which is zero
        return _NOT_A_NUMBER_NS
    factor = 2 if collective is Collective.ALL_REDUCE else 1
    ns = size / GIB / rate * 1e9 * factor * (ranks - 1) / ranks
    if ns >= _NOT_A_NUMBER_NS:
        raise InputError(f"{size} bytes at {rate:g} GB/s take longer than SimAI's integers hold; are -nv and -nic in GB/s?")
    return int(ns)
