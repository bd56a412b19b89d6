"""Units of sizes and rates, in bytes."""

from __future__ import annotations

GIB = 2.0**30
MIB = 2.0**20
GB = 1e9
GBIT = 1e9 / 8  #: of network rates
