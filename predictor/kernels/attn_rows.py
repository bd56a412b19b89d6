"""Rows of attention tables: their shapes, the main kernel, and calls that wait for the host."""

from __future__ import annotations

import numpy as np

from predictor.kernels.attn_physics import AttnShape
from predictor.kernels.known_constants import ROWS_FOR_PHYSICS
from predictor.kernels.sources import other_lab
from profiler.profile.profile import HALF_DTYPES, Table

#: Calls take equally long within this factor, and have different work from this ratio of FLOPs on.
_EQUALLY_LONG, _OTHER_WORK = 1.2, 3.0


def shape_of(table: Table) -> AttnShape:
    """Return the shapes of a flash_attn table; a zero v_head_dim means head_dim, a zero kv_heads means heads."""
    column = {name: table[name].astype(np.float64) for name in AttnShape._fields}
    column["v_head_dim"] = np.where(column["v_head_dim"] > 0, column["v_head_dim"], column["head_dim"])
    column["kv_heads"] = np.where(column["kv_heads"] > 0, column["kv_heads"], column["heads"])
    return AttnShape(**column)


def main_rows(table: Table) -> Table:
    """Return the forward rows of the kernel timed most often.

    16-bit rows where there are any; without the rows of other laboratories if enough remain.
    """
    table = table.where(usable_dtypes(table))
    forward = table.where((table["pass"] == "forward") & (table["seconds"] > 0))
    own = forward.where(~other_lab(forward["source"]))
    rows = own if len(own) >= ROWS_FOR_PHYSICS else forward
    kernels, counts = np.unique(rows["kernel"], return_counts=True)
    return rows.where(rows["kernel"] == kernels[counts.argmax()]) if len(rows) else rows


def usable_dtypes(table: Table) -> np.ndarray:
    """True for rows in 16 bits, or in fp32 where a device (a CPU) was measured in nothing else; bool [rows]."""
    half = np.isin(table["dtype"], HALF_DTYPES)
    return half if half.any() else np.isin(table["dtype"], ("fp32", "float32"))


def waits_for_host(rows: Table) -> np.ndarray:
    """True for calls whose time may be the host's time to launch them; bool [rows].

    They are recognised where the shortest calls of a source and pass take equally long for different work: of these, and of
    calls of up to twice their time, the device's time is not known.
    """
    launch_bound = np.zeros(len(rows), dtype=bool)
    for source in np.unique(rows["source"]):
        for direction in np.unique(rows["pass"]):
            at = np.flatnonzero((rows["source"] == source) & (rows["pass"] == direction) & (rows["seconds"] > 0))
            if len(at):
                seconds, work = rows["seconds"][at], shape_of(rows.where(at)).flops
                shortest = seconds < _EQUALLY_LONG * seconds.min()
                if work[shortest].max() >= _OTHER_WORK * work[shortest].min():
                    launch_bound[at] = seconds < 2.0 * seconds.min()
    return launch_bound
