"""Attention timed during simulation, kept as small profiles: one file per device, dtype, kernel and PyTorch release."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from profiler.profile.item import Item
from profiler.profile.local_device import LocalDevice
from profiler.profile.profile import Profile
from profiler.profile.recorder import NOT_RUN, OUT_OF_MEMORY, Recorder, Row, rows_of
from profiler.profile.store import read_profile

FOLDER = "flash_attn"  #: next to the profile
OP = "flash_attn"
TIMING_SECONDS = 60.0  #: the longest time that one prediction spends on timing
_CALLS = 4  #: calls that timing a long call costs: one to warm up, the forward pass before a backward one, two timed
_OVERHEAD_SECONDS = 0.05  #: to make operands, and for the repeats of a short call
_TARGET = "attention_of"  #: key of the meta mapping that states what the times were measured with


@dataclass(frozen=True)
class Call:
    """One measurement to time. expected: its seconds by the fit. uses: number of times it occurs among the requested calls."""

    item: Item
    expected: float
    uses: float

    def cost(self, slower: float = 1.0) -> float:
        """Return the approximate seconds that timing it takes if it is ``slower`` times slower than expected."""
        return _CALLS * self.expected * slower + _OVERHEAD_SECONDS

    @property
    def worth(self) -> float:
        """Seconds of training that it represents per second of timing."""
        return self.uses * self.expected / self.cost()


def cache_path(target: LocalDevice, folder: Path) -> Path:
    """Return the file in ``folder`` with the times of ``target``."""
    return folder / f"{re.sub(r'[^a-z0-9.]+', '_', ' '.join(target.key.values()).lower())}.pt"


def source(target: LocalDevice) -> str:
    """Return the ``source`` of what is measured with this PyTorch release."""
    return f"measured, torch {target.torch}"


def open_cache(target: LocalDevice, path: Path, replaces: bool) -> tuple[Recorder, str]:
    """Return (the times kept at ``path``, a sentence if the file cannot be used).

    A file that is damaged, or that holds something else, counts as empty. replaces: also rename it to ``*.unused``, so that
    writing does not destroy it.
    """
    meta: dict[str, Any] = {_TARGET: target.key, OUT_OF_MEMORY: [], NOT_RUN: {}}
    recorder = Recorder(path, path.stem, target.device, meta)
    if not path.exists():
        return recorder, ""
    try:
        found = read_profile(path)
        _check(found, target, path)
    except InputError as error:
        if replaces:
            with contextlib.suppress(OSError):
                path.replace(path.with_suffix(".unused"))
        return recorder, f"{error}; it is not used"
    recorder.take_over(found)
    return recorder, ""


def _check(found: Profile, target: LocalDevice, path: Path) -> None:
    table, meta = found.table(OP), found.meta
    kept = meta.get(_TARGET)
    if kept != target.key or set(found.tables) - {OP}:
        raise InputError(f"{path}: not the attention times of {target.device.name} by {target.kernel} of torch {target.torch}")
    failed, refused = meta.get(OUT_OF_MEMORY, []), meta.get(NOT_RUN, {})
    notes = isinstance(failed, list) and all(isinstance(f, str) for f in failed) and isinstance(refused, dict)
    if not notes or not ((table["dtype"] == target.dtype) & (table["kernel"] == target.kernel)).all():
        raise InputError(f"{path}: its rows do not fit its heading; remove it")


def known_rows(recorder: Recorder, target: LocalDevice, profile: Profile) -> dict[Item, Row]:
    """Return the cached times, and what the profile itself measured (all ranks at once) with the same kernel and release."""
    table = profile.table(OP)
    same = (table["dtype"] == target.dtype) & (table["kernel"] == target.kernel) & (table["source"] == source(target))
    own = rows_of(Profile(profile.name, profile.device, {OP: table.where(same)}))
    return {**recorder.rows, **own}


def attention_item(target: LocalDevice, shape: dict[str, int]) -> Item | None:
    """Return the item of one call by ``target``; None for a call that its kernel would time wrongly.

    shape: batch, seq_q, seq_kv, heads, kv_heads, head_dim, v_head_dim, causal, backward. A causal call must have as many keys
    as queries (other masks are aligned differently), and any call must have values as wide as the keys.
    """
    if (shape["causal"] and shape["seq_q"] != shape["seq_kv"]) or shape["v_head_dim"] != shape["head_dim"]:
        return None
    sizes: dict[str, int | str] = {name: size for name, size in shape.items() if name != "backward"}
    which = "backward" if shape["backward"] else "forward"
    return Item.of(OP, {**sizes, "pass": which, "kernel": target.kernel, "dtype": target.dtype})
