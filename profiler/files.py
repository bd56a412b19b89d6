"""Atomic file writing: a path holds either its old content or the complete new content, never a part; whole lines that are
appended; digests of sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from profiler.errors import InputError, printable


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that replaces ``path`` if the block succeeds and is deleted if the block fails.

    A link stays, and the file that it leads to is replaced; a file keeps its mode. What is no regular file (a device, a pipe)
    is written to as it is. Raises InputError if the folder cannot be written to.
    """
    target = Path(os.path.realpath(path))
    try:
        if path.is_dir():
            raise InputError(f"{path}: cannot write there: it is a folder")
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    except OSError as error:
        raise InputError(f"{path}: cannot write there: {error.strerror}") from None
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(_mode(target))
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot write there: {error.strerror}") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _mode(target: Path) -> int:
    """Return the permissions of the file that is replaced, or those that a new file would have."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8, atomically."""
    with replacing(path) as file:
        file.write(text.encode())


def check_name(path: Path) -> None:
    """Raise InputError for a name that no file of the system can have."""
    try:
        path.exists()
    except (OSError, ValueError) as error:  # too long; a null character
        raise InputError(
            f"{printable(str(path))}: no file has such a name: {getattr(error, 'strerror', None) or error}"
        ) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file, which is made and, if still empty, removed again. Raises InputError while another process holds it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise InputError(f"{path}: cannot write there: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{path}: another process is writing it; wait for it or name another output") from None
        try:
            yield
        finally:
            if path.is_file() and not path.stat().st_size:
                path.unlink()


def append_line(path: Path, line: str) -> None:
    """Append a complete line or nothing, after a last line that is one; do not repeat a line that the file already ends with.

    Jobs that write at once wait for each other. Raises InputError if the file cannot be written.
    """
    data = (line + "\n").encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - len(data), 0))
            if file.read() == data:
                return
            file.seek(max(size - 1, 0))
            begun = b"\n" if file.read(1) not in (b"", b"\n") else b""
            try:
                file.write(begun + data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise
    except OSError as error:
        raise InputError(f"{path}: cannot write there: {error.strerror}") from None


def source_digest(folders: Iterable[Path]) -> str:
    """Return a hash of the sources and tables under ``folders``: of what decides what the program computes."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".csv", ".json")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
