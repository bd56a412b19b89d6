"""Delay of the compute by an overlapped collective.

Taken from the profile's overlap measurements, else from the multiprocessors that the collective takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from profiler.profile.profile import Device, Table

#: Multiprocessors that NCCL's kernels take from overlapped GEMMs: its channels on nodes of eight A100 or H100 behind
#: NVSwitches, as its log counts them, with one thread block each.
NCCL_SMS = 24
_SMALLEST_MESSAGE = 2**20  # bytes; times of smaller ones are mostly launch
_FEWEST_ROWS = 3


class Contention(NamedTuple):
    """Seconds by which each second of a collective delays the compute that it overlaps with.

    inside: of one in a node or NVLink domain. between: of one between nodes; 0: as much as its bytes cost inside a node.
    """

    inside: float
    between: float = 0.0

    def over(self, nodes: Any) -> np.ndarray:
        """Return that of collectives over ``nodes`` nodes, of its shape."""
        return np.where(np.asarray(nodes) > 1, self.between or self.inside, self.inside)


#: What GEMMs lose on Hopper at the power limit while 24 multiprocessors are held, and 8 to 16 of them, as over a network:
#: measured on an H100 (docs/measured_gpus.md). They keep a block on every multiprocessor and lose whole waves of tiles, so that
#: a few cost almost as much as many, and for as long as they are held.
ON_HOPPER = Contention(0.15, 0.125)
_HOPPER_FLASH = 3  # the generation of FlashAttention that was written for Hopper and runs nowhere else


def contention(device: Device, overlap: Table) -> Contention:
    """Delay of the compute [s] per second of an overlapped collective (its time without overlap).

    Measured: with overlap the collective takes ``collective_slowdown`` times as long, in which the GEMM does 1 /
    ``gemm_slowdown`` of its work, so collective_slowdown * (1 - 1 / gemm_slowdown) seconds of GEMM work remain; the result is
    the median over rows of at least 1 MiB. More than 1 means that overlapping costs more than it saves, as on a CPU whose
    cores do both. With fewer than three such rows: what was measured on Hopper, else the share of the device's
    multiprocessors that NCCL takes.
    """
    rows = overlap.where((overlap["bytes"] >= _SMALLEST_MESSAGE) & np.isfinite(overlap["gemm_slowdown"]))
    rows = rows.where(np.isfinite(rows["collective_slowdown"]))
    if len(rows) >= _FEWEST_ROWS:
        lost = rows["collective_slowdown"] * (1 - 1 / np.maximum(rows["gemm_slowdown"], 1.0))
        return Contention(float(np.median(lost)))
    return ON_HOPPER if device.flash_version == _HOPPER_FLASH else Contention(_share(device))


def contention_on(device: Device, measured_on: Device, found: Contention, alike: bool) -> Contention:
    """Return what was found on one device on another: a collective takes as many multiprocessors there, at most all of them.

    alike: whether both are of one generation; what others lose to multiprocessors that are held is their share.
    """
    if found == ON_HOPPER and not alike:
        return Contention(_share(device))
    ratio = measured_on.num_sms / device.num_sms
    return Contention(*(min(delay * ratio, max(delay, 1.0)) for delay in found))


def _share(device: Device) -> float:
    return min(NCCL_SMS / device.num_sms, 1.0)
