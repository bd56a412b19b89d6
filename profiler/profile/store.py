"""Read and write ``data.pt`` profiles: ``torch.save`` files of plain values, read here without torch.

A profile may come from an untrusted source, so the reader accepts only what a profile needs: dicts, lists, strings, numbers and
CPU tensors. Any other pickled object is refused before any part of it is built.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import InputError, require_torch
from profiler.files import replacing
from profiler.profile.profile import SCHEMA_VERSION, TEXT_COLUMNS, Device, Profile, Table

FORMAT = "foretrain-profile"

_STORAGE_DTYPES = {
    "FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "LongStorage": "<i8", "IntStorage": "<i4",
    "ShortStorage": "<i2", "CharStorage": "<i1", "ByteStorage": "<u1", "BoolStorage": "?",
}  # fmt: skip


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for plain containers and CPU tensors (as numpy arrays) of a ``torch.save`` archive, and nothing else."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{root}/data.pkl")))
        self._archive, self._root = archive, root

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_array
        if module == "torch" and name in _STORAGE_DTYPES:
            return np.dtype(_STORAGE_DTYPES[name])
        raise pickle.UnpicklingError(f"it holds a pickled object of {module}.{name}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _device, _numel = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError("it holds an unknown kind of storage")
        return np.frombuffer(self._archive.read(f"{self._root}/data/{key}"), dtype)


def _rebuild_array(storage: np.ndarray, offset: int, size: Any, stride: Any, *_: Any) -> np.ndarray:
    if len(size) != len(stride) or min((*size, *stride, offset), default=0) < 0:
        raise pickle.UnpicklingError("a tensor has an impossible shape")
    span = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else offset
    if span > len(storage) or math.prod(size) > len(storage):
        raise pickle.UnpicklingError("a tensor reaches outside its storage")
    bytes_per = storage.dtype.itemsize
    strides = tuple(s * bytes_per for s in stride)
    array: np.ndarray = np.lib.stride_tricks.as_strided(storage[offset:], tuple(size), strides).copy()
    return array


def load_plain(path: Path) -> Any:
    """Return the content of a ``torch.save`` file whose values are all plain (tensors become numpy arrays).

    Raises InputError for a file that is missing, truncated, not a torch archive, or holds any other object.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            root = archive.namelist()[0].split("/")[0]
            return _PlainUnpickler(archive, root).load()
    except FileNotFoundError:
        raise InputError(f"{path}: no such profile file") from None
    except pickle.UnpicklingError as error:
        raise InputError(f"{path}: not a profile that can be trusted: {error}; only plain values are read") from None
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"{path}: truncated or not written by torch.save ({error}); measure or copy it again") from None
    except Exception as error:  # a damaged archive can fail anywhere in zipfile, zlib or pickle, with any kind of error
        raise InputError(f"{path}: damaged ({type(error).__name__}); measure or copy it again") from None


def read_profile(path: str | Path) -> Profile:
    """Read a profile file. Raises InputError with one sentence if it cannot be used."""
    path = Path(path)
    plain = load_plain(path)
    if not isinstance(plain, Mapping) or plain.get("format") != FORMAT:
        raise InputError(f"{path}: a torch file, but not a profile of this program (gen_profiler_data.py writes those)")
    schema = plain.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA_VERSION:
        raise InputError(f"{path}: schema {schema} is newer than {SCHEMA_VERSION}, the newest this version reads; update")
    try:
        meta = dict(plain["meta"])
        device = Device(**meta["device"])
        tables = {op: Table.from_columns(op, _decode(columns)) for op, columns in plain["tables"].items()}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: incomplete profile, cannot read {error}") from None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:20]
    return Profile(str(meta.get("name", path.stem)), device, tables, meta, digest)


def write_profile(path: str | Path, profile: Profile) -> None:
    """Write a profile atomically: the file at ``path`` is either the old one or the complete new one."""
    require_torch("writing a profile")
    import torch  # readers stay torch-free

    path = Path(path)
    plain = {
        "format": FORMAT,
        "schema": SCHEMA_VERSION,
        "meta": {**profile.meta, "name": profile.name, "device": asdict(profile.device)},
        "tables": {op: _encode(table, torch.from_numpy) for op, table in profile.tables.items() if len(table)},
    }
    with replacing(path) as file:
        torch.save(plain, file)


def _encode(table: Table, to_tensor: Any) -> dict[str, Any]:
    """Encode words as codes into a list of distinct words, integers in the smallest type that fits, times as float32."""
    encoded: dict[str, Any] = {}
    for name, column in table.columns.items():
        if name in TEXT_COLUMNS:
            words, codes = np.unique(column, return_inverse=True)
            encoded[name] = {"codes": to_tensor(codes.astype(np.int16)), "words": [str(w) for w in words]}
        elif column.dtype == np.float64:
            encoded[name] = to_tensor(column.astype(np.float32))
        else:
            fits = (t for t in (np.int16, np.int32) if len(column) and np.abs(column).max() <= np.iinfo(t).max)
            encoded[name] = to_tensor(column.astype(next(fits, np.int64)))
    return encoded


def _decode(columns: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {
        name: np.array(column["words"], dtype=np.str_)[column["codes"]] if isinstance(column, Mapping) else column
        for name, column in columns.items()
    }
