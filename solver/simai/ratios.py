"""SimAI's tables of measured bus bandwidth over line rate, and how SimAI-Analytical reads them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from profiler.errors import InputError

NIC, NVLINK, ALL_TO_ALL = "nic", "nvlink", "ata"
MULTI = 9  #: the number of nodes that stands for 16 groups at once
_NODES = (1, 2, 4, 8, 16, 32, 64, 128, MULTI)
_OTHERWISE = _NODES.index(16)  #: column of any other number of nodes
_FILE = Path(__file__).with_name("data") / "busbw_ratio.csv"


@dataclass(frozen=True)
class RatioTable:
    """sizes: bytes, ascending. ratios: a column for each number of nodes, a value for each size."""

    sizes: tuple[int, ...]
    ratios: tuple[tuple[float, ...], ...]

    def ratio(self, size: int, nodes: int) -> float:
        """Return the ratio of a buffer of ``size`` bytes over that of the largest buffer of the table.

        Between two sizes the ratio is interpolated linearly in bytes; below the first it is that of the first. Raises
        InputError above the last, where SimAI-Analytical stops with an exception.
        """
        column = self.ratios[_NODES.index(nodes) if nodes in _NODES else _OTHERWISE]
        if size == 0:
            return 1.0
        if size < self.sizes[0]:
            return column[0] / column[-1]
        if size > self.sizes[-1]:
            raise InputError(
                f"a buffer of {size} bytes is above the largest of SimAI's ratio tables ({self.sizes[-1]}), where "
                "SimAI-Analytical stops; split the row, or price the file with --price"
            )
        at = min(max(bisect_right(self.sizes, size) - 1, 0), len(self.sizes) - 2)
        if size == self.sizes[at] and at > 0:
            at -= 1  # SimAI takes the first interval that holds the size; the value is the same
        low, high = self.sizes[at], self.sizes[at + 1]
        value = column[at] + (column[at + 1] - column[at]) * (size - low) / (high - low)
        return value / column[-1]


@cache
def ratio_tables() -> Mapping[str, RatioTable]:
    """Return the three tables: of all-gather and reduce-scatter bound by NICs or by NVLink, and of all-to-all."""
    lines = [line for line in _FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")][1:]
    rows: dict[str, list[list[str]]] = {}
    for line in lines:
        name, *cells = line.split(",")
        rows.setdefault(name, []).append(cells)
    return {
        name: RatioTable(
            tuple(int(cells[0]) for cells in found),
            tuple(tuple(float(cells[column] or 1) for cells in found) for column in range(1, len(_NODES) + 1)),
        )
        for name, found in rows.items()
    }
