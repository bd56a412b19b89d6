"""The launch of transformers' causal language model example, which accelerate and DeepSpeed start: batch and recomputation.

Source: huggingface/transformers examples/pytorch/language-modeling/run_clm.py and TrainingArguments. Neither accelerate's YAML
nor an FSDP plugin holds the sequence, and only arguments of the program say it.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from profiler.errors import InputError, shown
from profiler.text_file import json_object
from solver.formats.file_run import Source, model_path
from solver.formats.script_words import whole_argument
from solver.spec.strategy import Strategy

PROGRAM = "run_clm.py"
#: Argument -> layout field.
BATCH = {
    "--per_device_train_batch_size": "micro_batch_size",
    "--gradient_accumulation_steps": "num_micro_batches",
    "--block_size": "seq_len",
}
#: Of TrainingArguments; the default block is the tokenizer's longest, or 1,024 tokens.
_DEFAULTS = {"micro_batch_size": 8, "num_micro_batches": 1}

#: Optimizers that are Adam with decoupled decay, whose step the framework's description has.
_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_OFF = ("false", "no", "none")
_PRECISIONS = {"--bf16": "bf16", "--fp16": "fp16"}
_AGAIN = "--gradient_checkpointing"
_ACCELERATOR = "--accelerator_config"
#: Every micro batch's gradients are reduced. The trainer of transformers 4.46 to 5.1 does not heed it (pull request 43919).
_SYNC_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
SYNC_RELEASES = "transformers 4.46 to 5.1 ignore sync_each_batch and keep whole gradients (--set defer_grad_sync=true)"
#: Data, evaluation, logs, checkpoints and numbers of the optimizer: neither time nor memory of a step.
_NEUTRAL = re.compile(
    r"--(?:eval|evaluation|per_device_eval|save|load_best|logging|log|report|hub|push_to|dataset|data|train|validation|output|"
    r"overwrite|max|do|learning|lr|weight|warmup|num_train|adam|seed|dataloader|remove|run|ddp|include|metric|greater|"
    r"preprocessing|streaming|model_name|model_type|model_revision|config_name|tokenizer|use_fast|use_auth|cache|trust|token|"
    r"low_cpu|torch_dtype|skip|disable_tqdm|ignore|resume|length|group_by|label_names|past|prediction|local|deepspeed|"
    r"accelerator|bf16_full|fp16_full|fp16_opt|keep|restore|project|gradient_checkpointing_kwargs)(?:_\w+)?"
)


def trainer_precision(given: dict[str, Any], path: Path) -> str:
    """Return the precision that a trainer's arguments state, which is fp32 where they state none."""
    stated = [asked for name, asked in _PRECISIONS.items() if name in given and _on(given, name, path)]
    if len(stated) > 1:
        raise InputError(f"{path}: {' and '.join(_PRECISIONS)} exclude each other; write one")
    return stated[0] if stated else "fp32"


def trainer_fields(given: dict[str, Any], precision: str, path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (layout fields, arguments that are not read) of a trainer's arguments.

    precision: what the settings beside them say. Raises InputError where they contradict it, and for another optimizer than
    Adam.
    """
    found: dict[str, Any] = dict(_DEFAULTS)
    found |= {field: whole_argument(given, name, path) for name, field in BATCH.items() if name in given}
    for name, asked in _PRECISIONS.items():
        if name in given and _on(given, name, path) and asked != precision:
            raise InputError(f"{path}: {name} contradicts the settings, whose precision is {precision}; write the same in both")
    if _AGAIN in given:
        found |= {"recompute": "full" if _on(given, _AGAIN, path) else "none", "recompute_layers": -1}
    if (optimizer := given.get("--optim", _ADAM[0])) not in _ADAM:
        raise InputError(f"{path}: --optim {shown(optimizer)} is not described; {', '.join(_ADAM)} are")
    read = {*BATCH, *_PRECISIONS, _AGAIN, "--optim"}
    idle = {"--tf32"} if precision != "fp32" else set()
    for name in given:
        if name not in read | idle and not _NEUTRAL.fullmatch(name) and str(given[name]).lower() not in _OFF:
            raise InputError(f"{path}: {name} of {PROGRAM} is not described here: without it the run is estimated")
    return found, tuple(name for name in given if name not in read)


def syncs_each_batch(given: dict[str, Any], source: Source) -> bool:
    """Return whether a trainer's arguments have it reduce every micro batch's gradients. Raises InputError if unreadable."""
    if _ACCELERATOR not in given:
        return False
    text, where = str(given[_ACCELERATOR]), source.path
    if not text.lstrip().startswith("{"):
        where = source.path.parent / text
        beside = source.beside(text)
        if beside is None:
            raise InputError(f"{source.path}: {_ACCELERATOR} {text} is not there; put the file beside the script")
        text = beside
    stated = json_object(text, where).get("gradient_accumulation_kwargs") or {}
    value = stated.get("sync_each_batch", False) if isinstance(stated, dict) else stated
    if not isinstance(value, bool):
        raise InputError(
            f"{where}: sync_each_batch of gradient_accumulation_kwargs is {shown(value)}; it must be true or false"
        )
    return value


def _on(given: dict[str, Any], name: str, path: Path) -> bool:
    """Return a switch, which may stand alone or with a value."""
    value = str(given[name]).lower()
    if value not in ("true", "false"):
        raise InputError(f"{path}: {name} is {shown(given[name])}; it must be True or False")
    return value == "true"


def trainer_lines(run: Strategy, name: str, settings: str, *, syncs: bool = False) -> list[str]:
    """Return the lines of a script from the program on. settings: further arguments. syncs: every micro batch's gradients."""
    numbers = [f"  {argument} {getattr(run, field)} \\" for argument, field in BATCH.items()]
    data = "  --dataset_name DATASET --tokenizer_name TOKENIZER --do_train --output_dir output"
    settings += f" {_ACCELERATOR} {shlex.quote(json.dumps(_SYNC_EACH_BATCH))}" if syncs else ""
    model = shlex.quote(model_path(name).rsplit("/", 1)[0])
    return [f"  {PROGRAM} --config_name {model} {settings}".rstrip() + " \\", *numbers, data, ""]
