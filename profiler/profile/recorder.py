"""Finished measurements, written to disk as they come: a job that ends early loses at most the last seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from profiler.profile.devices import DEVICES
from profiler.profile.item import KEY_COLUMNS, Item
from profiler.profile.profile import QUICK, TABLE_COLUMNS, Device, Profile, Table, gemm_flops
from profiler.profile.store import write_profile

CHECKPOINT_SECONDS = 3.0
OUT_OF_MEMORY = "out_of_memory"  #: key of the meta list of measurements that did not fit in memory
NOT_RUN = "not_run"  #: key of the meta mapping from measurements that no kernel here can run to the reason

Row = Mapping[str, Any]


@dataclass
class Recorder:
    """Measurements by op and key, and the profile made of them. A repeated measurement replaces the old one."""

    path: Path
    name: str
    device: Device
    meta: dict[str, Any]  #: including the entries OUT_OF_MEMORY and NOT_RUN
    rows: dict[Item, Row] = field(default_factory=dict)
    _written: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take_over(self, profile: Profile) -> None:
        """Keep the measurements of an earlier profile, and its notes on those that did not fit or run."""
        self.rows.update(rows_of(profile))
        failed, refused = list(profile.meta.get(OUT_OF_MEMORY, [])), dict(profile.meta.get(NOT_RUN, {}))
        quick = bool(profile.meta.get(QUICK)) and bool(self.meta.get(QUICK))
        self.meta = {**profile.meta, **self.meta, OUT_OF_MEMORY: failed, NOT_RUN: refused, QUICK: quick}

    def settled(self) -> frozenset[str]:
        """Return the labels of the items that are measured or known not to run here."""
        return frozenset([*(item.label for item in self.rows), *self.meta[OUT_OF_MEMORY], *self.meta[NOT_RUN]])

    def add(self, item: Item, outcome: Row | None) -> None:
        """Add a measurement; write a checkpoint if the last one is some seconds old.

        outcome: None where the operands did not fit in memory; ``{NOT_RUN: reason}`` where no kernel takes the shape.
        """
        with self._lock:
            if outcome is None:
                self.meta[OUT_OF_MEMORY].append(item.label)
            elif NOT_RUN in outcome:
                self.meta[NOT_RUN][item.label] = outcome[NOT_RUN]
            else:
                self.rows[item] = {**item.columns, **outcome}
        if time.monotonic() - self._written > CHECKPOINT_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the profile atomically; safe from any thread."""
        with self._lock:
            write_profile(self.path, self.profile())
            self._written = time.monotonic()

    def profile(self) -> Profile:
        tables = {op: table_of(op, [row for item, row in self.rows.items() if item.op == op]) for op in TABLE_COLUMNS}
        device = _with_rates(_with_links(self.device, tables["p2p"]), tables["linear"])
        return Profile(self.name, device, tables, dict(self.meta))


def table_of(op: str, rows: list[Row]) -> Table:
    names = TABLE_COLUMNS[op]
    return Table.from_columns(op, {name: [row[name] for row in rows] for name in names if all(name in row for row in rows)})


def rows_of(profile: Profile) -> dict[Item, Row]:
    """Return every measurement of a profile by its key."""
    found: dict[Item, Row] = {}
    for op, table in profile.tables.items():
        columns = {name: column.tolist() for name, column in table.columns.items()}
        for i in range(len(table)):
            row = {name: column[i] for name, column in columns.items()}
            found[Item(op, tuple(row[name] for name in KEY_COLUMNS[op]))] = row
    return found


def _with_rates(device: Device, gemms: Table) -> Device:
    """Return the device with peaks that no measured GEMM exceeds; datasheets keep theirs.

    Peaks of other devices are a short measurement, which other work on the machine may have slowed.
    """
    if any(device.name == known.name for known in DEVICES.values()):
        return device
    rates = gemm_flops(gemms) / gemms["seconds"]
    best = {dtype: float(np.max(rates[gemms["dtype"] == dtype], initial=0.0)) for dtype in device.peak_flops}
    return replace(device, peak_flops={dtype: max(peak, best[dtype]) for dtype, peak in device.peak_flops.items()})


def _with_links(device: Device, p2p: Table) -> Device:
    """Return the device with the best measured p2p rates inside a node and between two nodes; datasheets keep theirs."""
    if any(device.name == known.name for known in DEVICES.values()):
        return device
    rates = p2p["bytes"] / p2p["seconds"]
    inside, between = (float(np.max(rates[p2p["inter"] == inter], initial=0.0)) for inter in (1, 2))
    link = inside or device.link_bandwidth
    return replace(device, link_bandwidth=link, network_bandwidth=between or link)
