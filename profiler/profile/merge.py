"""Join profiles of one device, such as a kernel profile of one GPU and a cluster's collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from profiler.errors import InputError
from profiler.profile.item import Item
from profiler.profile.profile import Profile
from profiler.profile.recorder import OUT_OF_MEMORY, rows_of, table_of


def check_same_machine(first: Profile, second: Profile, names: tuple[str, str] = ("the first", "the second")) -> None:
    """Raise InputError, in one sentence, if two profiles are of different devices.

    names: what the sentence calls the two profiles.
    """
    for what, a, b in (
        ("device", first.device.name, second.device.name),
        ("number of multiprocessors or cores a rank", first.device.num_sms, second.device.num_sms),
    ):
        if a != b:
            raise InputError(f"{names[0]} and {names[1]} profile differ in {what} ({a} and {b}) and cannot be joined")


def merged(first: Profile, second: Profile) -> Profile:
    """Return all measurements of both profiles; where both hold one, that of ``second``.

    The device is that of ``second``, with the links of the profile that has more GPUs per node.
    """
    check_same_machine(first, second)
    rows = {**rows_of(first), **rows_of(second)}
    by_op: dict[str, list[Item]] = {}
    for item in rows:
        by_op.setdefault(item.op, []).append(item)
    tables = {op: table_of(op, [rows[item] for item in items]) for op, items in by_op.items()}
    wider = max(second, first, key=lambda p: p.device.gpus_per_node)
    failed = dict.fromkeys([*first.meta.get(OUT_OF_MEMORY, ()), *second.meta.get(OUT_OF_MEMORY, ())])
    meta = {**first.meta, **second.meta, OUT_OF_MEMORY: [f for f in failed if f not in {item.label for item in rows}]}
    meta["merged"] = [f"{p.name}, {p.meta.get('date', 'no date')}, {p.digest}" for p in (first, second)]
    links = replace(
        second.device,
        gpus_per_node=wider.device.gpus_per_node,
        link_bandwidth=wider.device.link_bandwidth,
        network_bandwidth=wider.device.network_bandwidth,
        link_kind=wider.device.link_kind,
    )
    return Profile(second.name, links, tables, meta)


def kept_aside(path: Path) -> Path | None:
    """Move an existing profile out of the way of a new one; return its new path, or None if there was none."""
    if not path.exists():
        return None
    aside = path.with_name(f"{path.stem}.previous{path.suffix}")
    path.replace(aside)
    return aside
