"""Attention calls that were timed on the device itself; they replace the estimates of the fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.estimate import Basis, Estimate

#: What distinguishes one call from another, in the order of CostModel.flash_attn's arguments.
SHAPE = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "v_head_dim", "causal", "backward")
#: Standard deviation of log(time) that remains in the best median: clocks and memory layout of another process.
LEAST_UNCERTAINTY = 0.02


@dataclass(frozen=True)
class MeasuredAttention:
    """Seconds and standard deviations of log(time) by call; arrays of shape [calls], ``keys`` sorted."""

    keys: np.ndarray
    seconds: np.ndarray
    relative_std: np.ndarray

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> MeasuredAttention:
        """Build from flash_attn rows of one device, number format and kernel; a row's spread is about twice its deviation."""
        rows = list(rows)
        columns = [[row["pass"] == "backward" if name == "backward" else row[name] for row in rows] for name in SHAPE]
        keys = call_keys(*(np.array(column, dtype=np.int64) for column in columns))
        spread = np.nan_to_num(np.array([row["spread"] for row in rows], dtype=np.float64))
        order = np.argsort(keys)
        seconds = np.array([row["seconds"] for row in rows], dtype=np.float64)
        return cls(keys[order], seconds[order], np.maximum(spread / 2, LEAST_UNCERTAINTY)[order])

    def instead_of(self, fit: Estimate, *shape: Any) -> Estimate:
        """``fit`` with the measured time, uncertainty and basis wherever the call was measured.

        shape: columns in the order of SHAPE; they broadcast.
        """
        arrays = np.broadcast_arrays(*(np.asarray(column, dtype=np.int64) for column in shape))
        asked = call_keys(*arrays)
        if not len(self.keys):
            return fit
        at = np.minimum(np.searchsorted(self.keys, asked), len(self.keys) - 1)
        known = self.keys[at] == asked
        return Estimate(
            np.where(known, self.seconds[at], fit.seconds),
            np.where(known, self.relative_std[at], fit.relative_std),
            np.where(known, np.int8(Basis.MEASURED), fit.basis).astype(np.int8),
        )


def call_keys(*columns: np.ndarray) -> np.ndarray:
    """One 64-bit hash per call, of int64 arrays of equal shape in the order of SHAPE."""
    key = np.zeros(columns[0].shape, dtype=np.uint64)
    for column in columns:
        key = (key ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key
