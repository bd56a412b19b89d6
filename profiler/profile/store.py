"""Read and write ``data.pt`` profiles: ``torch.save`` files of plain values, read here without torch.

A profile may come from an untrusted source, so the reader accepts only what a profile needs: dicts, lists, strings, numbers and
CPU tensors. Any other pickled object is refused before any part of it is built.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from profiler.errors import InputError, printable, require_torch, shown
from profiler.files import replacing
from profiler.profile.profile import POWER_SLOWDOWN, SCHEMA_VERSION, TEXT_COLUMNS, UNITS, Device, Profile, Table

FORMAT = "foretrain-profile"

_STORAGE_DTYPES = {
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
    "HalfStorage": "<f2",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}


MOST_BYTES = 512 << 20  #: of a file, and of all its tensors; the shipped profiles have less than 2 MB
_MOST_SLOWDOWN = 10.0  #: that a power limit could make of a GEMM's time
_MOST_PICKLE = 8 << 20  #: of the pickled containers
_MOST_DEPTH = 20  #: of containers in one another


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for plain containers and CPU tensors (as numpy arrays) of a ``torch.save`` archive, and nothing else."""

    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        content = archive.read(f"{root}/data.pkl")
        _check_memo(content)
        super().__init__(io.BytesIO(content))
        self._archive, self._root, self._left = archive, root, MOST_BYTES

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return self._rebuild
        if module == "torch" and name in _STORAGE_DTYPES:
            return np.dtype(_STORAGE_DTYPES[name])
        raise pickle.UnpicklingError(f"it holds a pickled object of {module}.{name}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, dtype, key, _device, _numel = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError("it holds an unknown kind of storage")
        return np.frombuffer(self._archive.read(f"{self._root}/data/{key}"), dtype)

    def _rebuild(self, storage: np.ndarray, offset: int, size: Any, stride: Any, *_: Any) -> np.ndarray:
        array = _rebuild_array(storage, offset, size, stride)
        self._left -= array.nbytes
        if self._left < 0:  # one storage may be the content of many tensors
            raise pickle.UnpicklingError("its tensors are too large")
        return array


def _check_memo(content: bytes) -> None:
    """Raise UnpicklingError for a memo index beyond the content's length: unpickling allocates memory up to the index."""
    for code, argument, _ in pickletools.genops(content):
        if code.name in ("LONG_BINPUT", "PUT") and argument is not None and int(argument) > len(content):
            raise pickle.UnpicklingError("its pickle is malformed")


def _check_archive(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise InputError for an archive whose content would be larger than the file says: torch.save compresses nothing."""
    entries = archive.infolist()
    total = sum(entry.file_size for entry in entries)
    pickled = max((entry.file_size for entry in entries if entry.filename.endswith("data.pkl")), default=0)
    packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
    if packed or total > MOST_BYTES or pickled > _MOST_PICKLE:
        raise InputError(f"{path}: not a profile that can be trusted: it is compressed or too large; torch.save writes neither")


def _depth(value: Any, left: int = _MOST_DEPTH) -> bool:
    """Whether containers are nested no deeper than a profile's are, and hold no more than a million values in all."""
    waiting, seen = [(value, left)], 0
    while waiting:
        item, left = waiting.pop()
        seen += 1
        if left < 0 or seen > 1_000_000:
            return False
        inner = item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()
        waiting += [(part, left - 1) for part in inner]
    return True


def _rebuild_array(storage: np.ndarray, offset: int, size: Any, stride: Any, *_: Any) -> np.ndarray:
    if len(size) != len(stride) or min((*size, *stride, offset), default=0) < 0:
        raise pickle.UnpicklingError("a tensor has an impossible shape")
    span = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1 if all(size) else offset
    if span > len(storage) or math.prod(size) > len(storage):
        raise pickle.UnpicklingError("a tensor reaches outside its storage")
    bytes_per = storage.dtype.itemsize
    strides = tuple(s * bytes_per for s in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], tuple(size), strides).copy()


def load_plain(path: Path) -> Any:
    """Return the content of a ``torch.save`` file whose values are all plain (tensors become numpy arrays).

    Raises InputError for a file that is missing, truncated, not a torch archive, or holds any other object.
    """
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a regular file; a profile is a file that gen_profiler_data.py writes")
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: larger than {MOST_BYTES >> 20} MiB, so no profile of this program")
        with zipfile.ZipFile(path) as archive:
            _check_archive(archive, path)
            root = archive.namelist()[0].split("/")[0]
            plain = _PlainUnpickler(archive, root).load()
        if not _depth(plain):
            raise InputError(f"{path}: not a profile that can be trusted: its values are nested too deeply or too many")
        return plain
    except InputError:
        raise
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
    if isinstance(schema, bool) or not isinstance(schema, int) or schema < 1:
        raise InputError(f"{path}: schema {shown(schema)} is no version of a profile's format; measure again")
    if schema > SCHEMA_VERSION:
        raise InputError(f"{path}: schema {shown(schema)} is newer than {SCHEMA_VERSION}, the newest that is read; update")
    try:
        meta = dict(plain["meta"])
        device = Device(**meta["device"])
        tables = {op: Table.from_columns(op, _decode(columns)) for op, columns in plain["tables"].items()}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{path}: incomplete profile, cannot read {printable(str(error))}") from None
    if not isinstance(meta.get("laws") or {}, Mapping):
        raise InputError(f"{path}: incomplete profile, its laws are {shown(meta['laws'])}")
    _check_units(path, meta.get("units") or {})
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:20]
    slowdown = meta.get(POWER_SLOWDOWN, 1.0)
    if isinstance(slowdown, bool) or not isinstance(slowdown, int | float) or not 1.0 <= slowdown < _MOST_SLOWDOWN:
        raise InputError(f"{path}: {POWER_SLOWDOWN} is {shown(slowdown)}; it must be a number from 1 to {_MOST_SLOWDOWN:g}")
    return Profile(str(meta.get("name", path.stem)), device, tables, meta, digest)


def _check_units(path: Path, units: Any) -> None:
    """Raise InputError where a file states other units than a profile's."""
    if not isinstance(units, Mapping):
        raise InputError(f"{path}: incomplete profile, its units are {shown(units)}")
    for what, unit in UNITS.items():
        if units.get(what, unit) != unit:
            raise InputError(f"{path}: it gives {what} in {shown(units[what])}; a profile's is {unit}: convert it first")


def write_profile(path: str | Path, profile: Profile) -> None:
    """Write a profile atomically: the file at ``path`` is either the old one or the complete new one."""
    require_torch("writing a profile")
    import torch  # readers stay torch-free

    plain = plain_profile(profile, torch.from_numpy)
    with replacing(Path(path)) as file:
        torch.save(plain, file)


def plain_profile(profile: Profile, to_tensor: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """Return the plain values of which the file of a profile consists."""
    return {
        "format": FORMAT,
        "schema": SCHEMA_VERSION,
        "meta": {**profile.meta, "name": profile.name, "device": asdict(profile.device)},
        "tables": {op: _encode(table, to_tensor) for op, table in profile.tables.items() if len(table)},
    }


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
