"""Import collectives from logs of nccl-tests, which most clusters already have, into a profile.

The profile keeps its kernels, and the logs' collectives replace its measurements of the same groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from profiler.errors import InputError
from profiler.profile.merge import check_same_machine
from profiler.profile.profile import COLLECTIVES, Device, Profile, Table
from profiler.profile.profiles import DEFAULT_PROFILE, OWN_PROFILE, find_profile
from profiler.profile.store import read_profile, write_profile
from profiler.published.nccl_rows import SPLIT_BUFFER, Log, joined, read_log

_VENDORS = frozenset(("NVIDIA", "AMD", "TESLA", "INSTINCT", "GEFORCE"))
#: Fewer measurements between nodes do not suffice to fit a network (predictor/network/collective.py then fits none).
NETWORK_ROWS = 20


def import_logs(paths: Iterable[str | Path], profile: Profile | None = None, test: str | None = None) -> dict[str, Table]:
    """Return the tables by op of all logs together.

    profile: if given, logs of another device raise InputError, and curves faster than the profile's links (copies inside one
    GPU) are left out. test: as for ``read_log``.
    """
    return _usable([read_log(path, test) for path in paths], profile)[0]


def _usable(logs: Sequence[Log], profile: Profile | None) -> tuple[dict[str, Table], list[str]]:
    """Return (tables, notes) of the logs for the profile's device."""
    notes = [note for log in logs for note in log.notes]
    parts: dict[str, list[Table]] = {}
    for log in logs:
        if profile:
            check_device(log, profile.device)
        for op, table in log.tables.items():
            possible = _possible(op, table, profile.device) if profile else np.ones(len(table), dtype=bool)
            if not possible.all():
                notes.append(
                    f"{log.name}: {(~possible).sum()} measurements of {op} left out: their curve is faster than the links, so "
                    "it shows copies inside one GPU"
                )
            if possible.any():
                parts.setdefault(op, []).append(table.where(possible))
    if not parts:
        raise InputError(f"the logs hold no measurement that can be used{': ' if notes else ''}{'; '.join(notes)}")
    return {op: joined(op, tables) for op, tables in parts.items()}, notes


def _possible(op: str, table: Table, device: Device) -> np.ndarray:
    """Return a mask (bool, shape [rows]): rows of groups whose rate stays below the link's at every size.

    A rank sends at least (n - 1) / n of the buffer; for all_reduce (where switches reduce), broadcast and p2p, all of it.
    """
    ranks = table["intra"] * table["inter"]
    share = (ranks - 1) / ranks if op in SPLIT_BUFFER else np.ones(len(table))
    outruns = share * table["bytes"] > device.link_bandwidth * table["seconds"]
    _, group = np.unique(np.stack([table["intra"], table["inter"]]), axis=1, return_inverse=True)
    group = group.ravel()
    return ~np.isin(group, group[outruns])


def check_device(log: Log, device: Device) -> None:
    """Raise InputError if a log's GPUs are another chip than the profile's, or another build (PCIe, SXM) of it."""
    for name in sorted(log.devices):
        if name and _build(name) != _build(device.name):
            raise InputError(f"{log.name}: measured on {name!r}, but the profile is of {device.name!r}; choose its own profile")


def _build(name: str) -> tuple[str, bool]:
    """Return (chip, whether it is the PCIe build) from a product's name: "NVIDIA A100-SXM4-40GB" is ("A100", False)."""
    words = [word for word in re.findall(r"[A-Z0-9]+", name.upper()) if word not in _VENDORS]
    last = next((i for i, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return " ".join(words[: last + 1]), "PCIE" in words


def with_logs(profile: Profile, paths: Sequence[str | Path], test: str | None = None) -> Profile:
    """Return the profile with its measurements of the logs' ops and groups replaced by the logs'; the rest stays.

    If the logs suffice to fit the network between nodes, they replace the profile's network as a whole: its stated constants
    and all its measurements between nodes. ``meta["nccl_tests"]`` states the origin: per log its measurements by op, what was
    left out, and what was replaced.
    """
    logs = [read_log(path, test) for path in paths]
    tables, notes = _usable(logs, profile)
    stated = dict(profile.meta.get("laws") or {})
    own_network = _tells_network(tables.values())
    if own_network and stated.pop("inter_node", None):
        notes.append(f"the network between nodes is fitted to the logs and replaces that of {profile.name}")
    elif any((table["inter"] > 1).any() for table in tables.values()):
        notes.append(
            f"measurements between nodes are fewer than {NETWORK_ROWS} or of one kind of group: the network between nodes "
            f"stays that of {profile.name}"
        )
    merged, replaced = dict(profile.tables), {}
    for op in (*COLLECTIVES, "p2p"):
        shipped, own = profile.table(op), tables.get(op, Table.from_columns(op, {}))
        gone = np.isin(_group_key(shipped), _group_key(own)) | (own_network & (shipped["inter"] > 1))
        if gone.any() or len(own):
            replaced[op] = int(gone.sum())
            merged[op] = joined(op, [shipped.where(~gone), own])
    before = (profile.meta.get("nccl_tests") or {}).get("logs", {})
    said = {
        "date": date.today().isoformat(),
        "logs": {**before, **{log.name: {op: len(table) for op, table in log.tables.items()} for log in logs}},
        "rows": {op: len(table) for op, table in tables.items()},
        "replaced": replaced,
        "kernels": f"of profile {profile.name}",
        "notes": notes,
    }
    return Profile(profile.name, profile.device, merged, {**profile.meta, "laws": stated, "nccl_tests": said})


def _tells_network(tables: Iterable[Table]) -> bool:
    """Return whether the measurements between nodes suffice to fit a network: their number and kinds of group."""
    keys = np.concatenate([_group_key(table)[table["inter"] > 1] for table in tables])
    return len(keys) >= NETWORK_ROWS and len(np.unique(keys)) > 1


def _group_key(table: Table) -> np.ndarray:
    key: np.ndarray = table["intra"] * (1 << 32) + table["inter"]
    return key


def import_into(output: Path, paths: Sequence[Path], named: str | None = None, test: str | None = None) -> list[str]:
    """Put the logs' collectives into ``output``/data.pt; return what was done, line by line.

    named: profile (a name or a file) whose kernels are used where there is no data.pt yet. An existing data.pt keeps its
    measurements and takes only the tables it lacks from the named profile. test: as for ``read_log``. Raises InputError if a
    file cannot be read, or if logs, data.pt and profile are not of one device.
    """
    path = output / OWN_PROFILE
    base = _base(path, named)
    profile = with_logs(base, paths, test)
    write_profile(path, profile)
    said = profile.meta["nccl_tests"]
    return [
        *(
            f"{op}: {rows} measurements from logs, replacing {said['replaced'][op]} of {base.name}"
            for op, rows in said["rows"].items()
        ),
        *(f"note: {note}" for note in said["notes"]),
        f"wrote {path}: kernels of {base.name}, collectives of {len(paths)} logs",
    ]


def _base(path: Path, named: str | None) -> Profile:
    """Return the profile to join logs to: the one at ``path`` if it exists, else ``named``, else the default."""
    given = None
    if named is not None:
        given, _ = find_profile(None, Path(named)) if named.endswith(".pt") else find_profile(named)
    if not path.exists():
        return given or find_profile(DEFAULT_PROFILE)[0]
    own = read_profile(path)
    if given is None:
        return own
    check_same_machine(own, given, (f"the existing {path}", f"the given {named}"))
    lacking = {op: table for op, table in given.tables.items() if len(table) and not len(own.table(op))}
    return replace(own, tables={**own.tables, **lacking})
