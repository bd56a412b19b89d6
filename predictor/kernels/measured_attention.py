"""Attention calls that were timed on the device itself; they replace the estimates of the fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from predictor.estimate import Estimate
from predictor.kernels.measured_times import LEAST_UNCERTAINTY, MeasuredTimes, uncertainty_of, where_known
from predictor.kernels.shape_keys import find, shape_keys

#: What distinguishes one call from another, in the order of KernelCosts.flash_attn's arguments.
SHAPE = ("batch", "seq_q", "seq_kv", "heads", "kv_heads", "head_dim", "v_head_dim", "causal", "backward")


@dataclass(frozen=True)
class MeasuredAttention(MeasuredTimes):
    """Times of calls, in place of the fit's."""

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> MeasuredAttention:
        """Build from flash_attn rows of one device, number format and kernel; a row's spread is about twice its deviation."""
        rows = list(rows)
        columns = [[row["pass"] == "backward" if name == "backward" else row[name] for row in rows] for name in SHAPE]
        keys = shape_keys(*(np.array(column, dtype=np.int64) for column in columns))
        std = uncertainty_of(np.array([row["spread"] for row in rows], dtype=np.float64), LEAST_UNCERTAINTY)
        order = np.argsort(keys)
        seconds = np.array([row["seconds"] for row in rows], dtype=np.float64)
        return cls(keys[order], seconds[order], std[order])

    def instead_of(self, fit: Estimate, *shape: Any) -> Estimate:
        """``fit`` with the measured time, uncertainty and basis wherever the call was measured.

        shape: columns in the order of SHAPE; they broadcast.
        """
        arrays = np.broadcast_arrays(*(np.asarray(column, dtype=np.int64) for column in shape))
        if not len(self.keys):
            return fit
        at, known = find(self.keys, shape_keys(*arrays))
        return where_known(known, self.seconds[at], self.relative_std[at], fit)
