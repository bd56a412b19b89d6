"""The launch of transformers' causal language model example, which accelerate and DeepSpeed start: what a batch is.

Source: huggingface/transformers examples/pytorch/language-modeling/run_clm.py and TrainingArguments. Neither accelerate's YAML
nor an FSDP plugin holds the sequence, and only arguments of the program say it.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from solver.formats.file_run import model_path
from solver.formats.script_words import whole_argument
from solver.spec.strategy import Strategy

PROGRAM = "run_clm.py"
#: Argument -> layout field.
BATCH = {
    "--per_device_train_batch_size": "micro_batch_size",
    "--gradient_accumulation_steps": "num_micro_batches",
    "--block_size": "seq_len",
}


def batch_of(given: dict[str, Any], path: Path) -> dict[str, int]:
    """Return the layout fields that the arguments of a trainer state."""
    return {field: whole_argument(given, name, path) for name, field in BATCH.items() if name in given}


def trainer_lines(run: Strategy, name: str, settings: str) -> list[str]:
    """Return the lines of a script from the program on. settings: further arguments."""
    numbers = [f"  {argument} {getattr(run, field)} \\" for argument, field in BATCH.items()]
    data = "  --dataset_name DATASET --tokenizer_name TOKENIZER --do_train --output_dir output"
    model = shlex.quote(model_path(name).rsplit("/", 1)[0])
    return [f"  {PROGRAM} --config_name {model} {settings}".rstrip() + " \\", *numbers, data, ""]
