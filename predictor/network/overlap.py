"""Delay of the compute by an overlapped collective.

Taken from the profile's overlap measurements, else from the multiprocessors that the collective takes.
"""

from __future__ import annotations

import numpy as np

from profiler.profile.profile import Device, Table

#: Multiprocessors that NCCL's kernels take from overlapped GEMMs: its channels on nodes of eight A100 or H100 behind
#: NVSwitches, as its log counts them, with one thread block each.
NCCL_SMS = 24
_SMALLEST_MESSAGE = 2**20  # bytes; times of smaller ones are mostly launch
_FEWEST_ROWS = 3


def contention(device: Device, overlap: Table) -> float:
    """Delay of the compute [s] per second of an overlapped collective (its time without overlap).

    Measured: with overlap the collective takes ``collective_slowdown`` times as long, in which the GEMM does 1 /
    ``gemm_slowdown`` of its work, so collective_slowdown * (1 - 1 / gemm_slowdown) seconds of GEMM work remain; the result is
    the median over rows of at least 1 MiB. More than 1 means that overlapping costs more than it saves, as on a CPU whose
    cores do both. With fewer than three such rows: the share of the device's multiprocessors that NCCL takes.
    """
    rows = overlap.where((overlap["bytes"] >= _SMALLEST_MESSAGE) & np.isfinite(overlap["gemm_slowdown"]))
    rows = rows.where(np.isfinite(rows["collective_slowdown"]))
    if len(rows) < _FEWEST_ROWS:
        return min(NCCL_SMS / device.num_sms, 1.0)
    lost = rows["collective_slowdown"] * (1 - 1 / np.maximum(rows["gemm_slowdown"], 1.0))
    return float(np.median(lost))


def contention_on(device: Device, measured_on: Device, delay: float) -> float:
    """Return the ``delay`` of one device on another: a collective takes as many multiprocessors there, at most all of them."""
    return min(delay * measured_on.num_sms / device.num_sms, max(delay, 1.0))
