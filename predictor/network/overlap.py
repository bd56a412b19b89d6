"""What a collective costs the compute beside it: from the profile's overlap rows, or by the multiprocessors it takes."""

from __future__ import annotations

import numpy as np

from profiler.profile.profile import Device, Table

#: Multiprocessors that NCCL's kernels take from the GEMMs beside them: its channels on nodes of eight A100 or H100 behind
#: NVSwitches, as its log counts them, one thread block each.
NCCL_SMS = 24
_SMALLEST_MESSAGE = 2**20  # bytes; smaller ones time their launch
_FEWEST_ROWS = 3


def contention(device: Device, overlap: Table) -> float:
    """Seconds by which a second of a hidden collective (as it takes alone) delays the compute beside it.

    Measured: side by side the collective takes ``collective_slowdown`` as long, in which the GEMM does 1 / ``gemm_slowdown`` of
    its work, so collective_slowdown * (1 - 1 / gemm_slowdown) seconds of it are left to do; the median of rows of at least
    1 MiB. More than 1 means that overlapping costs more than it hides, as on a CPU whose cores do both. Without three such
    rows: the share of the device's multiprocessors that NCCL takes.
    """
    rows = overlap.where((overlap["bytes"] >= _SMALLEST_MESSAGE) & np.isfinite(overlap["gemm_slowdown"]))
    rows = rows.where(np.isfinite(rows["collective_slowdown"]))
    if len(rows) < _FEWEST_ROWS:
        return min(NCCL_SMS / device.num_sms, 1.0)
    lost = rows["collective_slowdown"] * (1 - 1 / np.maximum(rows["gemm_slowdown"], 1.0))
    return float(np.median(lost))
