"""LLaMA-Factory's YAML: what each key means, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from profiler.errors import InputError
from solver.formats.config_file import RunConfig, load_run_config

#: As its example of a full tuning states it.
EXAMPLE = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 2048
max_samples: 1000
output_dir: saves/llama3-8b/full/sft
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
lr_scheduler_type: cosine
bf16: true
resume_from_checkpoint: null
"""
ZERO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": "auto"},
}


def load(folder: Path, text: str, world: int = 16) -> RunConfig:
    (folder / "run.yaml").write_text(text)
    (folder / "ds_z3_config.json").write_text(json.dumps(ZERO))
    (folder / "config.json").write_text(Path("configs/models/llama3_8b.json").read_text())
    return load_run_config(folder / "run.yaml", world)


def test_the_example_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    expected = {
        "framework": "transformers-deepspeed",
        "world_size": 16,
        "dp": 16,
        "zero": 3,
        "precision": "bf16",
        "micro_batch_size": 1,
        "num_micro_batches": 2,
        "seq_len": 2048,
        "recompute": "full",  # unless it is told not to
    }
    assert expected.items() <= config.layout.items() and "world_size" not in config.assumed
    assert load(tmp_path, EXAMPLE + "disable_gradient_checkpointing: true\n").layout.get("recompute", "none") == "none"


def test_without_deepspeed_replicas_are_ddp_s_on_a_node(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE.replace("deepspeed: examples/deepspeed/ds_z3_config.json\n", ""), 0)
    assert (config.layout["framework"], config.layout["world_size"], config.layout["zero"]) == ("pytorch-ddp", 8, 0)
    assert "world_size" in config.assumed


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("finetuning_type: full", "finetuning_type: lora", "--finetuning_type of llamafactory/launcher.py is not modelled"),
        ("stage: sft", "stage: dpo", "--stage of llamafactory/launcher.py is not modelled"),
        ("ds_z3_config", "ds_z9_config", "ds_z9_config.json, which it names, is not there"),
        ("bf16: true", "bf16: true\noptim: adamw_8bit", "--optim 'adamw_8bit' is not modelled"),
    ],
)
def test_what_is_refused_when_reading(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in EXAMPLE
    with pytest.raises(InputError) as refused:
        load(tmp_path, EXAMPLE.replace(old, new))
    assert sentence in str(refused.value)
