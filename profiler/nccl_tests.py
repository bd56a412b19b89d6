"""Collectives from the logs of nccl-tests, which most clusters have already, as tables of a profile.

    python -m profiler.nccl_tests all_reduce.log alltoall.log --profile h100_sxm --output prof_data/data.pt

keeps the kernels of a profile and puts the cluster's own collectives in the place of its rows of the same groups.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import numpy as np

from profiler.errors import InputError
from profiler.nccl_rows import OPS, SPLIT_BUFFER, Log, joined, read_log
from profiler.profile import COLLECTIVES, Device, Profile, Table
from profiler.profiles import find_profile
from profiler.store import write_profile

_VENDORS = frozenset(("NVIDIA", "AMD", "TESLA", "INSTINCT", "GEFORCE"))
#: Fewer rows over nodes do not tell a network's law (predictor/collective.py fits none to them).
NETWORK_ROWS = 20


def import_logs(paths: Iterable[str | Path], profile: Profile | None = None, test: str | None = None) -> dict[str, Table]:
    """The tables by op of all logs together; with ``profile``, refused where they are of another device.

    Curves faster than the profile's links can be (copies inside one GPU) are then left out.
    """
    return _usable([read_log(path, test) for path in paths], profile)[0]


def _usable(logs: Sequence[Log], profile: Profile | None) -> tuple[dict[str, Table], list[str]]:
    """(tables, notes) of the logs for the profile's device."""
    notes = [note for log in logs for note in log.notes]
    parts: dict[str, list[Table]] = {}
    for log in logs:
        if profile:
            check_device(log, profile.device)
        for op, table in log.tables.items():
            possible = _possible(op, table, profile.device) if profile else np.ones(len(table), dtype=bool)
            if not possible.all():
                notes.append(
                    f"{log.name}: {(~possible).sum()} rows of {op} left out: their curve outruns the links, so it shows "
                    "copies inside one GPU"
                )
            if possible.any():
                parts.setdefault(op, []).append(table.where(possible))
    if not parts:
        raise InputError(f"the logs hold no row that can be used{': ' if notes else ''}{'; '.join(notes)}")
    return {op: joined(op, tables) for op, tables in parts.items()}, notes


def _possible(op: str, table: Table, device: Device) -> np.ndarray:
    """Mask: rows of groups whose rate stays below the link's at every size (bool, shape [rows]).

    A rank sends (n - 1) / n of the buffer at least; all_reduce where switches add up, broadcast and p2p all of it.
    """
    ranks = table["intra"] * table["inter"]
    share = (ranks - 1) / ranks if op in SPLIT_BUFFER else np.ones(len(table))
    outruns = share * table["bytes"] > device.link_bandwidth * table["seconds"]
    _, group = np.unique(np.stack([table["intra"], table["inter"]]), axis=1, return_inverse=True)
    group = group.ravel()
    return ~np.isin(group, group[outruns])


def check_device(log: Log, device: Device) -> None:
    """Raise InputError where a log's GPUs are another chip than the profile's, or another build (PCIe, SXM) of it."""
    for name in sorted(log.devices):
        if name and _build(name) != _build(device.name):
            raise InputError(f"{log.name}: measured on {name!r}, but the profile is of {device.name!r}; choose its own profile")


def _build(name: str) -> tuple[str, bool]:
    """(chip, whether it is the PCIe build) from a product's name: "NVIDIA A100-SXM4-40GB" is ("A100", False)."""
    words = [word for word in re.findall(r"[A-Z0-9]+", name.upper()) if word not in _VENDORS]
    last = next((i for i, word in enumerate(words) if re.search(r"\d", word)), len(words))
    return " ".join(words[: last + 1]), "PCIE" in words


def with_logs(profile: Profile, paths: Sequence[str | Path], test: str | None = None) -> Profile:
    """The profile with the logs' rows in the place of its own rows of the same op and group; the rest stays.

    Logs that tell enough of the network between nodes to fit its law take the place of the profile's network as a whole:
    of its stated law and of all its rows over nodes. ``meta["nccl_tests"]`` says what came from where: per log its rows
    by op, what was left out, and what was replaced.
    """
    logs = [read_log(path, test) for path in paths]
    tables, notes = _usable(logs, profile)
    laws = dict(profile.meta.get("laws") or {})
    own_network = _tells_network(tables.values())
    if own_network and laws.pop("inter_node", None):
        notes.append(f"the law between nodes is fitted to the logs, in the place of that of {profile.name}")
    elif any((table["inter"] > 1).any() for table in tables.values()):
        notes.append(
            f"rows over nodes are fewer than {NETWORK_ROWS} or of one kind of group: the law between nodes stays that of "
            f"{profile.name}"
        )
    merged, replaced = dict(profile.tables), {}
    for op in (*COLLECTIVES, "p2p"):
        shipped, own = profile.table(op), tables.get(op, Table.from_columns(op, {}))
        gone = np.isin(_group_key(shipped), _group_key(own)) | (own_network & (shipped["inter"] > 1))
        if gone.any() or len(own):
            replaced[op] = int(gone.sum())
            merged[op] = joined(op, [shipped.where(~gone), own])
    said = {
        "date": date.today().isoformat(),
        "logs": {log.name: {op: len(table) for op, table in log.tables.items()} for log in logs},
        "rows": {op: len(table) for op, table in tables.items()},
        "replaced": replaced,
        "kernels": f"of profile {profile.name}",
        "notes": notes,
    }
    return Profile(profile.name, profile.device, merged, {**profile.meta, "laws": laws, "nccl_tests": said})


def _tells_network(tables: Iterable[Table]) -> bool:
    """Whether rows over nodes suffice for the predictor to fit a network's law: their number and kinds of group."""
    keys = np.concatenate([_group_key(table)[table["inter"] > 1] for table in tables])
    return len(keys) >= NETWORK_ROWS and len(np.unique(keys)) > 1


def _group_key(table: Table) -> np.ndarray:
    key: np.ndarray = table["intra"] * (1 << 32) + table["inter"]
    return key


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m profiler.nccl_tests", description=__doc__.split("\n\n")[0])
    parser.add_argument("logs", nargs="+", metavar="LOG", type=Path, help="what a test of nccl-tests printed")
    parser.add_argument("--profile", default="h100_sxm", help="shipped profile by name, or a file (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, help="profile file to write, such as prof_data/data.pt")
    parser.add_argument("--test", choices=sorted(OPS), help="which test, where neither a log nor its name says")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0, or 2 with one sentence on stderr where the input cannot be used."""
    args = _arguments(argv)
    try:
        is_file = args.profile.endswith(".pt")
        profile, _ = find_profile(None, Path(args.profile)) if is_file else find_profile(args.profile)
        joined = with_logs(profile, args.logs, args.test)
        write_profile(args.output, joined)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    said = joined.meta["nccl_tests"]
    for op, rows in said["rows"].items():
        print(f"{op}: {rows} rows from logs, in the place of {said['replaced'][op]} of {profile.name}")
    for note in said["notes"]:
        print(f"note: {note}")
    print(f"wrote {args.output}: kernels of {profile.name}, collectives of {len(args.logs)} logs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
