"""Reading a text file that a user named: regular, of a bounded size, UTF-8; and the JSON in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from profiler.errors import InputError


def read_text(path: Path, what: str, most_bytes: int, *, replacing: bool = False) -> str:
    """Return the text of a regular UTF-8 file. what: what the file should be, as messages name it. Raises InputError.

    replacing: bytes that are not UTF-8 become replacement characters: a log has many writers, of which one may write others.
    """
    try:
        if path.is_dir():
            raise InputError(f"{path}: a folder, not {what}")
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: not a regular file")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise InputError(f"{path}: larger than {most_bytes >> 20} MiB, so hardly {what}")
        return content.decode("utf-8-sig", errors="replace" if replacing else "strict")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; it should be {what}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text (byte {error.start}); it should be {what}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{str(path)!r}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def json_value(text: str, path: Path) -> Any:
    """Return the value of a JSON text. Raises InputError with the line for what is not JSON, and for keys that stand twice."""
    try:
        return json.loads(text, object_pairs_hook=distinct_keys)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}") from None
    except (RecursionError, ValueError) as error:  # nested too deeply; a number of thousands of digits
        raise InputError(f"{path}: not valid JSON: {error}") from None


def distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``. Raises InputError for a key that stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise InputError(f"key {next(key for key in names if names.count(key) > 1)!r} stands twice in one object")
    return found


#: JSON's own words for what Python makes of it.
_JSON_TYPES = {str: "string", int: "number", float: "number", bool: "boolean"}


def json_object(text: str, path: Path) -> dict[str, Any]:
    """Return the object of a JSON text. Raises InputError for what is not JSON, or is another value."""
    plain = json_value(text, path)
    if not isinstance(plain, dict):
        what = "null" if plain is None else f"a {_JSON_TYPES.get(type(plain), type(plain).__name__)}"
        raise InputError(f"{path}: a JSON configuration is an object {{...}}, not {what}")
    return plain
