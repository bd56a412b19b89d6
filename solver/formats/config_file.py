"""Configuration files of the user: a model with a layout, and a cluster. Files are parsed, never executed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from profiler.errors import InputError, closest, shown
from profiler.text_file import json_object, read_text
from solver.formats.deepspeed.config import is_deepspeed, read_deepspeed
from solver.formats.file_run import FileRun, Source
from solver.formats.hugging_face.model import MARKS, unread_keys
from solver.formats.internevo.config import internevo_run
from solver.formats.model_file import CONFIGS, MAX_BYTES, WHAT, json_model
from solver.formats.not_read import python_not_read
from solver.formats.script_files import read_script_file
from solver.formats.simumax.files import is_strategy, read_strategy
from solver.formats.simumax.model import is_model
from solver.formats.topology_cluster import is_topology, topology_cluster
from solver.formats.torchtitan.config import read_torchtitan
from solver.formats.yaml_files import read_yaml_file
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

_KINDS = {"int": "a whole number", "bool": "true or false", "str": "a text"}  #: field types, as error messages name them
_CASE_KEYS = ("name", "model", "layout", "notes")


@dataclass(frozen=True)
class RunConfig:
    """A model, and the part of its layout that the file states.

    layout: Strategy field names -> values; zero_shard_size -1 means every rank that holds the same parameters. ignored: keys
    that are known but do not affect the prediction. assumed: layout fields that the file leaves to its framework's default.
    notes: what was taken for what it leaves open. gpus_per_node: as in FileRun.
    """

    name: str
    model: ModelSpec
    layout: Mapping[str, Any]
    seq_len: int | None
    source: Path
    ignored: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    gpus_per_node: int = 0


def load_run_config(
    path: str | Path, world: int = 0, vocab_size: int = 0, variables: Mapping[str, str] | None = None
) -> RunConfig:
    """Read the configuration of a framework, by its ending and content (docs/formats.md), or a model.

    world: the GPUs on which a file is run that does not state their number; 0: a usual number is taken then, and said.
    vocab_size: tokens of the tokenizer that a file only names; 0: the file states them. variables: of the environment in which
    a script runs (or of Primus's experiment), name -> value.
    Raises InputError with one sentence for a file that cannot be read or understood.
    """
    config = _read(Path(path), world, vocab_size, variables or {})
    if vocab_size and config.model.vocab_size != vocab_size:
        raise InputError(f"--vocab_size {vocab_size}: {path} has a vocabulary of {config.model.vocab_size:,}; leave it out")
    return config


def _read(path: Path, world: int, vocab_size: int, variables: Mapping[str, str]) -> RunConfig:
    """Read a file as load_run_config does.

    Raises InputError with one sentence for a file that cannot be read or understood.
    """
    if path.suffix not in _READERS:
        if os.path.isdir(path):  # pathlib's raises for a name that is too long
            raise InputError(f"{path} is a folder; a configuration is one file, as {path}/config.json")
        endings = ", ".join(_READERS)
        log = "; foretrain import and foretrain health read logs" if path.suffix in (".log", ".txt", ".out") else ""
        raise InputError(f"{path}: a configuration is a framework's file, or a model's: {endings} (docs/formats.md){log}")
    text = read_text(path, WHAT, MAX_BYTES)
    source = Source(path, text, _neighbours(path), world, vocab_size, variables)
    source.check_variables()
    if path.suffix != ".json":
        if not text.strip():
            raise InputError(f"{path} is empty")
        return run_config_of(source, read_source(source))
    plain = json_object(text, path)
    if {"log_factors", "covariance"} <= plain.keys():
        raise InputError(f"{path}: factors that foretrain learn wrote, and no configuration; give them to --learned")
    if "model" in plain:
        return _case_like(plain, path)
    if is_deepspeed(plain) or is_strategy(plain):
        return run_config_of(source, read_source(source))
    model = json_model(plain, path)
    of_hugging_face = bool(MARKS & set(plain)) and not is_model(plain)
    return RunConfig(model.name, model, {}, None, path, tuple(unread_keys(plain)) if of_hugging_face else ())


def read_source(source: Source) -> FileRun:
    """Return the run of a framework's file, whose kind its ending and content say. Raises InputError."""
    return _READERS[source.path.suffix](source)


def run_config_of(source: Source, run: FileRun) -> RunConfig:
    """Return the run of a framework's file as a configuration, with what its framework would refuse among the notes."""
    seq_len = run.layout.get("seq_len")
    refused = tuple(f"its framework would refuse this run: {rule}" for rule in run.refusals)
    notes, per_node = (*refused, *run.notes), run.gpus_per_node
    return RunConfig(source.path.stem, run.model, run.layout, seq_len, source.path, run.ignored, run.assumed, notes, per_node)


def _neighbours(path: Path) -> Callable[[str], str | None]:
    """Return a function of a path from the file's folder: the text there, or None where no such file is."""

    def beside(relative: str) -> str | None:
        other = path.parent / relative
        return read_text(other, WHAT, MAX_BYTES) if other.exists() else None

    return beside


def _json_run(source: Source) -> FileRun:
    return read_strategy(source) if is_strategy(json_object(source.text, source.path)) else read_deepspeed(source)


def _internevo(source: Source) -> FileRun:
    if program := python_not_read(source.text):
        raise InputError(f"{source.path}: {program}")
    return internevo_run(source.text, str(source.path), source.path.stem)


_READERS: Mapping[str, Callable[[Source], FileRun]] = {
    ".py": _internevo,
    ".sh": read_script_file,
    ".toml": read_torchtitan,
    ".yaml": read_yaml_file,
    ".yml": read_yaml_file,
    ".json": _json_run,
    **dict.fromkeys((".sbatch", ".slurm", ".bash"), read_script_file),
}
CONFIG_ENDINGS = tuple(_READERS)  #: of the files that load_run_config reads


def _case_like(plain: Mapping[str, Any], path: Path) -> RunConfig:
    """Read ``{"name", "model", "layout", "notes"}``; the model may be the name of a shipped model."""
    unknown = [key for key in plain if key not in _CASE_KEYS]
    if unknown:
        raise InputError(
            f"{path}: unknown key {unknown[0]!r}{closest(unknown[0], _CASE_KEYS)}; besides a model there may be "
            f"{', '.join(_CASE_KEYS)}"
        )
    described, layout = plain["model"], plain.get("layout", {})
    if isinstance(described, str):
        model = load_run_config(find_model(described)).model
    elif isinstance(described, dict):
        model = json_model(described, path)
    else:
        raise InputError(f"{path}: model must be an object of model keys or a shipped model's name")
    if not isinstance(layout, dict):
        raise InputError(f"{path}: layout must be an object of layout keys")
    values = _json_layout(layout, path)
    name = str(plain.get("name") or model.name)
    return RunConfig(name, model, values, values.get("seq_len"), path)


def _json_layout(layout: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return checked Strategy fields; null means not given, and ``sequence_parallel`` true means tp_mode msp."""
    values = {key: value for key, value in layout.items() if value is not None}
    if values.pop("sequence_parallel", False):
        values.setdefault("tp_mode", "msp")
    if "global_batch_size" in values:
        raise InputError(f"{path}: layout key global_batch_size has no unit; give global_batch_sequences")
    batch = values.pop("global_batch_sequences", None)
    known = {field.name: str(field.type) for field in fields(Strategy)}
    for key, value in values.items():
        if key not in known:
            raise InputError(
                f"{path}: unknown layout key {key!r}{closest(key, known)}; known keys are {', '.join(sorted(known))}"
            )
        # compare names of types: a bool is an int in Python, but "tp": true is a mistake
        if known[key] in _KINDS and type(value).__name__ != known[key]:
            raise InputError(f"{path}: layout key {key} is {value!r}; it must be {_KINDS[known[key]]}")
    tp, cp, pp, ep, etp = (max(values.get(key, 1), 1) for key in ("tp", "cp", "pp", "ep", "etp"))
    dp = ep * etp // math.gcd(ep * etp, tp * cp)
    shard = max(values.get("zero_shard_size", 1), 1)  # -1 means all ranks
    try:  # check with the smallest world_size that this layout can have
        Strategy(**{"seq_len": 1, **values, "world_size": tp * cp * pp * dp, "dp": dp, "zero_shard_size": shard})
    except InputError as error:
        raise InputError(f"{path}: layout key {error}") from None
    if batch is not None:
        values["num_micro_batches"] = _micro_batches(batch, values, path)
    return values


def _micro_batches(batch: Any, layout: Mapping[str, Any], path: Path) -> int:
    """Return the micro batches of a global batch in sequences, which the rest of the layout must agree with."""
    if "dp" not in layout:
        raise InputError(f"{path}: layout key global_batch_sequences needs dp beside it; or give num_micro_batches")
    count, rest = divmod(batch, layout["dp"] * layout.get("micro_batch_size", 1)) if type(batch) is int else (0, 1)
    if rest or count < 1 or layout.get("num_micro_batches", count) != count:
        raise InputError(
            f"{path}: layout key global_batch_sequences is {batch!r:.40}; it must be dp * micro_batch_size * num_micro_batches"
        )
    return count


def load_cluster(path_or_name: str | Path) -> dict[str, Any]:
    """Return a cluster description: a JSON file, the name of one under ``configs/clusters``, or a topology
    (solver.formats.topology_cluster).

    Keys as in ``solver.spec.cluster.cluster_of``: name, hardware (a profile), the figures, notes. Raises
    InputError for a name or file that does not exist, and for a file that does not hold an object.
    """
    if is_topology(str(path_or_name)):
        return topology_cluster(str(path_or_name))
    path = Path(path_or_name)
    if path.suffix != ".json":
        known = _stems(CONFIGS / "clusters")
        if str(path_or_name) not in known:
            raise InputError(
                f"no cluster is called {str(path_or_name)!r}{closest(str(path_or_name), known)}; "
                f"give a .json or .topo file, a template such as 'Spectrum-X -g 512', or one of {', '.join(known)}"
            )
        path = CONFIGS / "clusters" / f"{path_or_name}.json"
    described = {"name": path.stem, **json_object(read_text(path, WHAT, MAX_BYTES), path)}
    if not isinstance(described.get("hardware", ""), str):
        raise InputError(f"{path}: hardware is {shown(described['hardware'])}; it must be the name of a profile")
    return described


def find_model(model_size: str | int) -> Path:
    """Return the shipped file of a model.

    7 or "7B" finds configs/7B_*.py, a name finds that config or configs/models/<name>.json. Raises InputError listing the
    choices for anything else.
    """
    asked = str(model_size)
    runs, models = {p.stem: p for p in sorted(CONFIGS.glob("*.py"))}, {p.stem: p for p in CONFIGS.glob("models/*.json")}
    if asked in runs or asked in models:
        return runs.get(asked) or models[asked]
    size = re.fullmatch(r"([0-9]{1,6})[Bb]?", asked)
    found = [path for stem, path in runs.items() if size and stem.startswith(f"{int(size[1])}B_")]
    if found:
        return min(found, key=lambda path: "internlm" not in path.stem)
    sizes = sorted({int(stem.split("B_")[0]) for stem in runs if re.match(r"\d+B_", stem)})
    names = [*runs, *sorted(models)]
    raise InputError(
        f"no model is called {asked!r}{closest(asked, names)}; choose a size of {', '.join(map(str, sizes))} or one of "
        f"{', '.join(names)}, or give a file with --config"
    )


def _stems(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.json"))
