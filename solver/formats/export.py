"""A layout as the files with which its framework runs it: which kind of file is chosen here, by name and framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from profiler.files import write_text
from solver.formats.accelerate.export import accelerate_files
from solver.formats.bridge.export import bridge_files
from solver.formats.config_file import read_source
from solver.formats.deepspeed import export as deepspeed_export
from solver.formats.deepspeed.export import deepspeed_files
from solver.formats.file_run import Source
from solver.formats.hugging_face import export as hugging_face_export
from solver.formats.hugging_face.untimed import left_out, unstated, with_note
from solver.formats.internevo.export import internevo_files
from solver.formats.megatron import layer_kinds as megatron_layer_kinds
from solver.formats.megatron import untimed as megatron_untimed
from solver.formats.megatron.export import megatron_files
from solver.formats.nanotron import export as nanotron_export
from solver.formats.nanotron.export import nanotron_files
from solver.formats.nemo.export import nemo_files
from solver.formats.primus.export import primus_files
from solver.formats.same_layout import refuse_other, refuse_other_model, stated_strategy
from solver.formats.simumax.files import simumax_files
from solver.formats.torchtitan.export import torchtitan_files
from solver.spec.feasibility import check_framework
from solver.spec.frameworks import known_framework
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

#: Writes (model, layout, GPUs of a node, name of the file without its ending): file name -> text, the file itself first.
Writer = Callable[[ModelSpec, Strategy, int, str], dict[str, str]]


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    what: as messages name it. frameworks: the releases that it is written for. carried: the keys of a model's config.json that
    it holds though no time depends on them. windows: it states windows of attention.
    """

    ending: str
    what: str
    write: Writer
    frameworks: tuple[str, ...]
    carried: Callable[[ModelSpec], frozenset[str]] = lambda _: frozenset()
    windows: bool = False


def _of_hugging_face(_: ModelSpec) -> frozenset[str]:
    return hugging_face_export.CARRIED


KINDS = (
    Kind(".sh", "a script of Megatron-LM", megatron_files, ("megatron-core-0.12",), megatron_untimed.carried, windows=True),
    Kind(".json", "SimuMax's strategy", simumax_files, ("megatron-core-0.12",)),
    Kind(".py", "InternEvo's configuration", internevo_files, ("internevo-2024",)),
    Kind(
        ".toml",
        "torchtitan's TOML",
        torchtitan_files,
        ("torchtitan-2026-02", "torchtitan-2025-06", "torchtitan-2024-12"),
        _of_hugging_face,
    ),
    Kind(
        ".yaml",
        "Megatron-Bridge's YAML",
        bridge_files,
        ("megatron-bridge-26.06", "megatron-bridge-26", "megatron-bridge-25"),
        lambda model: frozenset() if megatron_layer_kinds.plain(model) else hugging_face_export.CARRIED,
        windows=True,
    ),
    Kind(".yaml", "Primus's YAML", primus_files, ("primus-2026",), megatron_untimed.carried, windows=True),
    Kind(".yaml", "NeMo 1's YAML", nemo_files, ("nemo-24",)),
    Kind(
        ".yaml",
        "accelerate's YAML",
        accelerate_files,
        ("fsdp", "fsdp2", "pytorch-ddp"),
        _of_hugging_face,
        windows=True,
    ),
    Kind(".json", "DeepSpeed's JSON", deepspeed_files, ("megatron-deepspeed",), deepspeed_export.carried),
    Kind(".yaml", "nanotron's YAML", nanotron_files, ("nanotron",), lambda _: nanotron_export.CARRIED),
)


#: What belongs to the data or to the environment of a run.
_NO_SETTINGS: Mapping[str, Any] = {
    "moe_imbalance": 1.0,
    "moe_routing": "random",
    "document_lengths": "",
    "launch_blocking": False,
    "collective_checks": None,
}


def write_export(path: Path, model: ModelSpec, run: Strategy, gpus_per_node: int, keep: Path | None = None) -> list[Path]:
    """Write the files of a layout beside each other; return their paths.

    keep: a file that must not be one of them. Raises InputError where it is, where ``path`` is new and a file beside it is not,
    which would be replaced, and as ``exported`` does.
    """
    files = {path.parent / name: text for name, text in exported(path, model, run, gpus_per_node).items()}
    if keep and keep.resolve() in {file.resolve() for file in files}:
        raise InputError(f"--export {path} would overwrite {keep}, which the layout is from; give another name")
    if taken := next((file for file in files if file.exists() and not path.exists()), None):
        raise InputError(
            f"--export {path} comes with {taken}, which is there already and would be overwritten; give another name"
        )
    for file, text in files.items():
        write_text(file, text)
    return list(files)


def check_export(path: Path, framework: str) -> None:
    """Raise InputError where a layout of a framework is written as no such file."""
    _kind(path, framework)


def exported(path: Path, model: ModelSpec, run: Strategy, gpus_per_node: int) -> dict[str, str]:
    """Return the files of a layout, by their paths from the folder of ``path``, the file itself first.

    Raises InputError for a framework that has no such kind of file, for what the kind cannot express, where what it would mean
    to a reader is another layout, and for what the framework does not run.
    """
    kind = _kind(path, run.framework)
    note = not_held(path, model, run)
    model = model.replace(sliding_window=0) if _leaves_window_out(kind, model, run) else model
    texts = kind.write(model, run, gpus_per_node, path.stem)
    read = read_source(Source(path, texts[path.name], texts.get))
    refuse_other_model(model, read.model, run.tp, kind.what)
    refuse_other(model, run, stated_strategy(read.layout, run.world_size), kind.what)
    check_framework(model, run)
    for rule in read.refusals:
        raise InputError(f"{kind.what} for this layout would be refused by its framework: {rule}")
    return {name: with_note(name, text, note) for name, text in texts.items()}


def not_held(path: Path, model: ModelSpec, run: Strategy) -> str:
    """Return what of the model the files do not hold, since no time of this run depends on it, in a sentence each; or ""."""
    kind = _kind(path, run.framework)
    others = left_out(model, kind.carried(model))
    said = [f"{model.name}'s config.json also says {others}: add it before you train"] if others else []
    if what := unstated(model):
        said.append(f"{what} are the framework's defaults, as {model.name} is described without: set your model's")
    if _leaves_window_out(kind, model, run):
        said.append(f"the window of {model.sliding_window} tokens is left out: no sequence of {run.seq_len} is longer")
    return "; ".join(said)


def _leaves_window_out(kind: Kind, model: ModelSpec, run: Strategy) -> bool:
    """Whether a file that states no windows is right without the model's, as no sequence goes beyond it."""
    plain = not (model.layer_types or model.sliding_window_every)
    return plain and not kind.windows and model.sliding_window >= run.seq_len > 0


def not_expressed(model: ModelSpec, run: Strategy, gpus_per_node: int) -> str:
    """Return why no file of a layout's framework can be written, in one sentence: the framework itself may not run it; or "".

    "" also for a framework that no file is written for. What is no setting of the framework is left out.
    """
    framework = known_framework(run.framework).name
    if not any(framework in kind.frameworks for kind in KINDS):
        return ""
    try:
        launch_file(model, run.replace(**_NO_SETTINGS), gpus_per_node)
    except InputError as error:
        return f"{framework} may not run this as it is; --export cannot write it: {error}"
    return ""


def launch_file(model: ModelSpec, run: Strategy, gpus_per_node: int) -> tuple[str, str]:
    """Return (its name, its text) of the first kind of file that is written for the layout's framework.

    Raises InputError as ``exported`` does, and for a framework that no file is written for.
    """
    framework = known_framework(run.framework).name
    ending = next((kind.ending for kind in KINDS if framework in kind.frameworks), ".sh")
    files = exported(Path(f"run{ending}"), model, run, gpus_per_node)
    return next(iter(files.items()))


def _kind(path: Path, stated: str) -> Kind:
    framework = known_framework(stated).name
    own = [kind for kind in KINDS if framework in kind.frameworks]
    found = next((kind for kind in own if kind.ending == path.suffix), None)
    if found:
        return found
    if own:
        raise InputError(f"--export {path}: a layout of {framework} is written as {' or '.join(k.ending for k in own)}")
    others = "; ".join(f"{kind.ending} for {', '.join(kind.frameworks)}" for kind in KINDS)
    raise InputError(f"the layout is {stated}'s, for which no file is written; written are {others} (--framework)")
