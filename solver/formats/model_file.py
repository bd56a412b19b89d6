"""Models in JSON: a Hugging Face config.json, a mapping of ModelSpec's keys, and those that are shipped."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from profiler.errors import InputError, closest, shown
from profiler.text_file import json_object, read_text
from solver.formats.file_run import Source, model_path
from solver.formats.hugging_face.model import MARKS, model_of_config
from solver.formats.hugging_face.unread_keys import is_harmless_name
from solver.formats.simumax.model import is_model, read_model
from solver.spec.model import ModelSpec
from solver.spec.model_from_keys import KNOWN_KEYS, model_from_keys

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MAX_BYTES = 1 << 20  #: limit of a configuration file; real ones have some kilobytes
WHAT = "a configuration file"
#: Vocabulary size where a source does not state it: GPT-2's, padded as Megatron does.
ASSUMED_VOCAB = 51200


def json_name(plain: Mapping[str, Any], path: Path) -> str:
    """Return the name in the file, else the file's own.

    For ``config.json`` it is the folder's name, as Hugging Face stores models.
    """
    folder = path.resolve().parent.name if path.stem == "config" else ""
    return str(plain.get("name") or folder or path.stem)


def json_model(plain: Mapping[str, Any], path: Path, name: str = "") -> ModelSpec:
    """Return the model of a JSON object: a Hugging Face config.json, or a mapping of ModelSpec's keys."""
    if is_model(plain):
        return read_model(plain, str(path), str(plain.get("model_name") or name or path.stem))
    called = str(plain.get("name") or name) or json_name(plain, path)
    keys = {key: value for key, value in plain.items() if key != "notes"}
    if MARKS & set(plain):
        return model_of_config(keys, str(path), called)
    if foreign := [key for key in keys if key not in KNOWN_KEYS and is_harmless_name(key)]:
        raise InputError(f"{path}: model_type is missing, which says of what class a config.json with {foreign[0]!r} is")
    return model_from_keys(keys, str(path), called)


def shipped_model(name: str) -> ModelSpec:
    """Return the model of ``configs/models``."""
    path = CONFIGS / "models" / f"{name}.json"
    return json_model(json_object(read_text(path, WHAT, MAX_BYTES), path), path)


def shipped_keys(name: str) -> dict[str, Any]:
    """Return the keys of a model of ``configs/models``. Raises InputError for a name that none there has."""
    if name not in shipped_models():
        known = ", ".join(shipped_models())
        raise InputError(f"no shipped model is called {shown(name)}{closest(name, shipped_models())}; there are {known}")
    path = CONFIGS / "models" / f"{name}.json"
    return {key: value for key, value in json_object(read_text(path, WHAT, MAX_BYTES), path).items() if key != "notes"}


@cache
def shipped_models() -> tuple[str, ...]:
    """Return the names of the models of ``configs/models``, in order."""
    return tuple(sorted(path.stem for path in (CONFIGS / "models").glob("*.json")))


def model_beside(source: Source, why: str) -> ModelSpec:
    """Return the model of the config.json beside a file. why: begins the message of the InputError where there is none."""
    named = model_path(source.path.stem)
    for relative in (named, "config.json"):
        text = source.beside(relative)
        if text is not None:
            path = source.path.parent / relative
            return json_model(json_object(text, path), path, source.path.stem)
    raise InputError(f"{source.path}: {why}; put its Hugging Face config.json beside it, as {named}")
