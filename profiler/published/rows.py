"""Rows of published measurement files as plain columns: reading, merging repeats, thinning by rule."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import InputError

#: Arrays of equal length by column name; words are str arrays, numbers int64 or float64.
Columns = dict[str, np.ndarray]

_GOLDEN = (5**0.5 - 1) / 2


class Collection:
    """Folder of collected files. ``missing``: names of files that were requested but not found."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.missing: set[str] = set()
        if not self.folder.is_dir():
            raise InputError(f"{self.folder}: no such folder; give the one with the collected parquet and csv files")

    def rows(self, name: str, words: Sequence[str], numbers: Sequence[str], member: str = "") -> Columns:
        """Return the named columns of file ``name``, or of a csv ``member`` of that archive; no rows if the file is missing."""
        path = self.folder / name
        if not path.exists():
            self.missing.add(name)
            return {w: np.empty(0, np.str_) for w in words} | {n: np.empty(0) for n in numbers}
        frame = _read_frame(path, member)
        absent = [c for c in (*words, *numbers) if c not in frame.columns]
        if absent:
            raise InputError(f"{path}: has no column {absent[0]!r}")
        try:
            text = {w: frame[w].fillna("").to_numpy().astype(np.str_) for w in words}
            values = {n: frame[n].to_numpy(dtype=np.float64) for n in numbers}
        except (TypeError, ValueError) as error:
            raise InputError(f"{path}: a column does not hold what it should ({error})") from None
        for column, cells in values.items():
            if not np.isfinite(cells).all():
                raise InputError(f"{path}: column {column!r} has cells that are empty or not finite")
        return text | values


def _read_frame(path: Path, member: str) -> Any:
    import pandas as pd  # only this importer needs it

    try:
        if member:
            with tarfile.open(path) as archive:
                return pd.read_csv(archive.extractfile(member))
        return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except KeyError:
        raise InputError(f"{path}: holds no file {member}") from None
    except (ValueError, OSError, tarfile.TarError) as error:  # pandas and pyarrow derive their parsing errors from these
        raise InputError(f"{path}: cannot be read ({error})") from None


class Ledger:
    """Number of rows left out, by table and reason."""

    def __init__(self) -> None:
        self.left_out: Counter[tuple[str, str]] = Counter()

    def keep(self, table: str, reason: str, rows: Columns, mask: np.ndarray) -> Columns:
        """Return the rows where ``mask`` is true; count the rest under ``reason``."""
        dropped = int(len(mask) - mask.sum())
        if dropped:
            self.left_out[table, reason] += dropped
        return where(rows, mask)


def where(rows: Columns, mask: np.ndarray) -> Columns:
    return {name: column[mask] for name, column in rows.items()}


def count(rows: Columns) -> int:
    return len(next(iter(rows.values()), ()))


def join(parts: Sequence[Columns]) -> Columns:
    """Return all rows of the parts, one after another."""
    full = [p for p in parts if p and count(p)]
    return {name: np.concatenate([p[name] for p in full]) for name in full[0]} if full else {}


def constant(rows: Columns, **values: Any) -> Columns:
    """Return ``rows`` with further columns that each hold one value."""
    return rows | {name: np.full(count(rows), value) for name, value in values.items()}


def renamed(words: np.ndarray, names: dict[str, str]) -> np.ndarray:
    """Return ``words`` with those in ``names`` replaced."""
    distinct, codes = np.unique(words, return_inverse=True)
    return np.array([names.get(str(w), str(w)) for w in distinct], dtype=np.str_)[codes]


def groups(rows: Columns, keys: Sequence[str]) -> np.ndarray:
    """Return one integer per row, equal for rows that agree in all ``keys`` and ascending in the order of ``keys``."""
    ids = np.zeros(count(rows), dtype=np.int64)
    for key in keys:
        distinct, codes = np.unique(rows[key], return_inverse=True)
        ids = np.unique(ids * len(distinct) + codes, return_inverse=True)[1]
    return ids


def merge_repeats(rows: Columns, keys: Sequence[str]) -> Columns:
    """Merge rows of equal ``keys``: median ``seconds``, relative half range ``spread``, number of rows ``repeats``."""
    if not count(rows):
        return constant({k: rows[k] for k in (*keys, "seconds")}, spread=np.nan, repeats=0)
    ids = groups(rows, keys)
    order = np.lexsort((rows["seconds"], ids))
    seconds = rows["seconds"][order]
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    number = np.diff(starts, append=len(ids))
    median = (seconds[starts + (number - 1) // 2] + seconds[starts + number // 2]) / 2
    half_range = (seconds[starts + number - 1] - seconds[starts]) / 2
    merged = {k: rows[k][order[starts]] for k in keys}
    return merged | {
        "seconds": median,
        "spread": np.where(number > 1, half_range / median, np.nan),
        "repeats": number,
    }


def thinned(rows: Columns, keep: np.ndarray, share: float, order: Sequence[str]) -> np.ndarray:
    """Return a mask: all rows of ``keep``, and an evenly spread ``share`` (0..1) of the remaining rows.

    The remaining rows are sorted by the ``order`` columns, and row i stays where frac(i * golden ratio) < share, the additive
    low-discrepancy sequence. The choice never depends on the times.
    """
    mask: np.ndarray = keep.copy()
    others = np.flatnonzero(~keep)
    others = others[np.lexsort([rows[name][others] for name in reversed(order)])]
    mask[others[(np.arange(len(others)) * _GOLDEN) % 1 < share]] = True
    return mask


def spaced(rows: Columns, within: Sequence[str], by: str, number: int) -> np.ndarray:
    """Return a mask: in each group of equal ``within``, the rows whose ``by`` is nearest to ``number`` log-spaced values."""
    ids, sizes = groups(rows, within), rows[by].astype(np.float64)
    mask = np.zeros(len(ids), dtype=bool)
    for group in range(int(ids.max()) + 1 if len(ids) else 0):
        members = np.flatnonzero(ids == group)
        distinct = np.unique(sizes[members])
        if len(distinct) > number:
            wanted = np.linspace(np.log(distinct[0]), np.log(distinct[-1]), number)
            nearest = np.abs(np.log(distinct)[None, :] - wanted[:, None]).argmin(axis=1)
            distinct = distinct[np.unique(nearest)]
        mask[members[np.isin(sizes[members], distinct)]] = True
    return mask
