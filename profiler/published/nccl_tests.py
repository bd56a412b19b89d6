"""Import collectives from logs of nccl-tests, which most clusters already have, into a profile.

The profile keeps its kernels, and the logs' collectives replace its measurements of the same groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from profiler.errors import InputError
from profiler.profile.merge import check_same_machine
from profiler.profile.profile import COLLECTIVES, NETWORK_ROWS, Device, Profile, Table
from profiler.profile.profiles import DEFAULT_PROFILE, OWN_PROFILE, find_profile
from profiler.profile.store import read_profile, write_profile
from profiler.published.nccl_rows import Log, joined, least_sent, read_log

_VENDORS = frozenset(("NVIDIA", "AMD", "TESLA", "INSTINCT", "GEFORCE"))
#: A ratio to the profile's times beyond which links in a node are others than its.
_UNLIKE = 1.15


def usable_tables(logs: Sequence[Log], profile: Profile | None) -> tuple[dict[str, Table], list[str]]:
    """Return (tables by op of all logs together, notes).

    profile: if given, logs of another device raise InputError, and curves faster than the profile's links (copies inside one
    GPU) are left out.
    """
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
    """Return a mask (bool, shape [rows]): rows of groups whose rate stays below the link's at every size."""
    outruns = least_sent(op, table["intra"] * table["inter"]) * table["bytes"] > device.link_bandwidth * table["seconds"]
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

    Logs of groups that span nodes show the network of this cluster: they replace all of the profile's measurements between
    nodes, and its stated constants become the prior of a fit to them. ``meta["nccl_tests"]`` states the origin: per log its
    measurements by op, what was left out, and what was replaced.

    Raises InputError for a profile without measurements of its own, whose kernels the file would not hold.
    """
    if profile.derivation:
        raise InputError(
            f"profile {profile.name} is derived from {profile.derivation.kernels.name}: a file holds measurements, and it has "
            "none of its own. State what these logs reached in a cluster file instead (all_reduce_busbw_gb_s, "
            "all_reduce_busbw_in_node_gb_s: configs/README.md)"
        )
    different, notes = _different(paths)
    logs = [read_log(path, test) for path in different]
    tables, left_out = usable_tables(logs, profile)
    notes += left_out
    stated = dict(profile.laws)
    kinds = _kinds(tables.values())
    if kinds:
        stated["own_network"] = True
        notes += _missing(tables, kinds)
    notes += _unlike(profile, tables)
    merged, replaced = dict(profile.tables), {}
    for op in (*COLLECTIVES, "p2p"):
        shipped, own = profile.table(op), tables.get(op, Table.from_columns(op, {}))
        before = bool(profile.laws.get("own_network"))  # earlier logs of this network stay
        gone = np.isin(_group_key(shipped), _group_key(own)) | (bool(kinds) and not before) & (shipped["inter"] > 1)
        if gone.any() or len(own):
            replaced[op] = int(gone.sum())
            merged[op] = joined(op, [shipped.where(~gone), own])
    earlier = (profile.meta.get("nccl_tests") or {}).get("logs", {})
    record = {
        "date": date.today().isoformat(),
        "logs": {**earlier, **{log.name: {op: len(table) for op, table in log.tables.items()} for log in logs}},
        "rows": {op: len(table) for op, table in tables.items()},
        "replaced": replaced,
        "kernels": f"of profile {profile.name}",
        "notes": notes,
    }
    return Profile(profile.name, profile.device, merged, {**profile.meta, "laws": stated, "nccl_tests": record})


def _different(paths: Sequence[str | Path]) -> tuple[list[Path], list[str]]:
    """Return the logs of different content, and a note for each that repeats another."""
    first: dict[bytes, Path] = {}
    notes = []
    for path in map(Path, paths):
        try:
            content = path.read_bytes() if path.is_file() else str(path).encode()
        except OSError:
            content = str(path).encode()  # reading it as a log says what is wrong
        if content in first:
            notes.append(f"{path} is the same log as {first[content]}; it counts once")
        first.setdefault(content, path)
    return list(first.values()), notes


def _missing(tables: Mapping[str, Table], kinds: Sequence[tuple[int, int]]) -> list[str]:
    """Return what the logs of groups that span nodes lack."""
    shapes = ", ".join(f"{nodes} nodes x {ranks}" for ranks, nodes in kinds)
    rows = sum(int((table["inter"] > 1).sum()) for table in tables.values())
    lacking = sorted(op for op in (*COLLECTIVES, "p2p") if op not in tables or not (tables[op]["inter"] > 1).any())
    lacks = []
    if len(kinds) < 2 or rows < NETWORK_ROWS:
        lacks.append(
            f"{rows} measurements of {shapes} ranks fit an efficiency and a latency of the network only; logs of other numbers "
            f"of nodes, {NETWORK_ROWS} sizes or more in all, would fit its law"
        )
    if lacking:
        lacks.append(f"no log of {', '.join(lacking)} between nodes: estimated from the network that the other logs show")
    return lacks


def _unlike(profile: Profile, tables: Mapping[str, Table]) -> list[str]:
    """Return which groups in a node keep the profile's times although the logs show that this machine's links are others."""
    found = []
    for op, own in tables.items():
        shipped, here = profile.table(op), own.where(own["inter"] == 1)
        inside, ratios = shipped.where(shipped["inter"] == 1), []
        for ranks in np.intersect1d(here["intra"], inside["intra"]):
            new, old = here.where(here["intra"] == ranks), inside.where(inside["intra"] == ranks)
            order = np.argsort(old["bytes"])
            shared = (new["bytes"] >= old["bytes"].min()) & (new["bytes"] <= old["bytes"].max())
            expected = np.interp(
                np.log(np.maximum(new["bytes"], 1)), np.log(np.maximum(old["bytes"][order], 1)), np.log(old["seconds"][order])
            )
            ratios += (np.log(new["seconds"]) - expected)[shared].tolist()
        kept = np.setdiff1d(inside["intra"], here["intra"])
        ratio = float(np.exp(np.median(ratios))) if ratios else 1.0
        if len(kept) and max(ratio, 1 / ratio) > _UNLIKE:
            groups = ", ".join(str(int(ranks)) for ranks in kept)
            found.append(
                f"{op} in a node took {ratio:.2g} times as long as on {profile.name}, but groups of {groups} GPUs keep its "
                "times; import logs of those too"
            )
    return found


def _kinds(tables: Iterable[Table]) -> list[tuple[int, int]]:
    """Return (ranks in a node, nodes) of the measured groups that span nodes."""
    pairs = {pair for table in tables for pair in zip(table["intra"].tolist(), table["inter"].tolist(), strict=True)}
    return sorted((int(k), int(n)) for k, n in pairs if n > 1)


def _group_key(table: Table) -> np.ndarray:
    return table["intra"] * (1 << 32) + table["inter"]


def import_into(
    output: Path,
    paths: Sequence[Path],
    named: str | None = None,
    test: str | None = None,
    gpus_per_node: int | None = None,
    network_bandwidth: float | None = None,
) -> tuple[list[str], list[str]]:
    """Put the logs' collectives into ``output``/data.pt; return (what was done, warnings), line by line.

    named: profile (a name or a file) whose kernels are used where there is no data.pt yet. An existing data.pt keeps its
    measurements and takes only the tables it lacks from the named profile. test: as for ``read_log``. gpus_per_node and
    network_bandwidth (bytes/s per GPU): of the cluster that the logs are of, where it differs from the profile's. Raises
    InputError if a file cannot be read, or if logs, data.pt and profile are not of one device.
    """
    path = output / OWN_PROFILE
    base = _base(path, named)
    device = replace(
        base.device,
        gpus_per_node=gpus_per_node or base.device.gpus_per_node,
        network_bandwidth=network_bandwidth or base.device.network_bandwidth,
    )
    base = replace(base, device=device)
    profile = with_logs(base, paths, test)
    write_profile(path, profile)
    record = profile.meta["nccl_tests"]
    gone = record["replaced"]
    done = [f"{op}: {n} measurements from logs, replacing {gone[op]} of {base.name}" for op, n in record["rows"].items()]
    return [*done, f"wrote {path}: kernels of {base.name}, collectives of {len(paths)} logs"], list(record["notes"])


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
