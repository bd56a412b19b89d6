"""Megatron-LM's functional tests as configurations: every set of arguments that is shipped means what it means as a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler.errors import InputError
from solver.formats.cases.reading import case_of
from solver.formats.config_file import load_run_config
from solver.formats.syntax.yaml_text import write_yaml
from solver.spec.strategy import Strategy

PUBLISHED = [
    json.loads(line) for line in Path("configs/cases/published.jsonl").read_text().splitlines() if "megatron_args" in line
]
#: As the repository states its test of two tensor ranks and two stages.
EXAMPLE = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  CUBLAS_WORKSPACE_CONFIG: :4096:8
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --log-params-norm: true
  --tensorboard-dir: ${TENSORBOARD_PATH}
  --micro-batch-size: 4
  --global-batch-size: 32
  --seq-length: 1024
  --max-position-embeddings: 1024
  --train-iters: 50
  --data-path: ${DATA_PATH}/text/my-gpt3_00_text_document
  --split: 949,50,1
  --lr: 0.00015
  --min-lr: 1.0e-5
  --weight-decay: 1e-2
  --lr-warmup-fraction: .01
  --transformer-impl: transformer_engine
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 2
  --deterministic-mode: true
  --no-gradient-accumulation-fusion: true
  --dist-ckpt-strictness: log_all # backward compatibility
  --bf16: true
  --attention-backend: unfused
TEST_TYPE: regular
"""


def load(folder: Path, text: str) -> Any:
    path = folder / "model_config.yaml"
    path.write_text(text)
    return load_run_config(path)


def test_the_example_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    expected = {
        "world_size": 8,
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "cp": 1,
        "micro_batch_size": 4,
        "num_micro_batches": 4,
        "zero": 0,
        "precision": "bf16",
        "grad_dtype": "fp32",
        "attention": "unfused",
        "dropout": True,
        "deterministic": True,
        "gradient_accumulation_fusion": False,
        "seq_len": 1024,
        "tp_mode": "mtp",
        "recompute": "none",
    }
    assert expected.items() <= config.layout.items() and config.assumed == ("world_size",)
    assert (config.model.vocab_size, config.model.padded_vocab_size, config.model.gated_mlp) == (50257, 50432, False)
    assert {"--log-params-norm", "--data-path", "--lr", "--tensorboard-dir"} <= set(config.ignored)


def test_every_shipped_set_of_arguments_is_read(tmp_path: Path) -> None:
    assert len(PUBLISHED) > 80
    read = 0
    for plain in PUBLISHED:
        if plain["run"]["world_size"] != 8:
            continue
        flags = {flag: value for flag, value in plain["megatron_args"].items() if flag.startswith("--")}
        case = case_of({**plain, "megatron_args": {**flags, "world-size-assumed": True}, "hardware": ""})
        text = write_yaml({"MODEL_ARGS": flags}, [])
        if case.skipped:
            with pytest.raises(InputError) as refused:
                load(tmp_path, text)
            assert case.skipped in str(refused.value)
            continue
        config = load(tmp_path, text)
        if "--use-megatron-fsdp" in flags:  # nor how it shards
            continue
        collected = "swiglu" in "".join(flags)  # the collector kept no dropout; such a file would mean Megatron's default
        dropout = {"dropout": False} if collected else {}
        assert Strategy(**{**config.layout, **dropout}) == case.strategy, plain["id"]
        assert case.model is not None and config.model.replace(name="") == case.model.replace(name="")
        read += 1
    assert read >= 60


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("--num-layers: 12", "--num-layers: twelve", "Megatron's --num-layers is 'twelve'; it must be a whole number"),
        ("--num-layers: 12", "num-layers: 12", "line 6: MODEL_ARGS has 'num-layers', which begins with no --"),
        ("--split: 949,50,1", "--brand-new: 1", "Megatron's --brand-new is not known here"),
        (
            "--split: 949,50,1",
            "--use-torch-fsdp2: true",
            "FSDP2 under Megatron-LM",
        ),
        ("MODEL_ARGS:\n", "MODEL_ARGS: 3\nOTHER:\n", "MODEL_ARGS must be a mapping of arguments"),
    ],
)
def test_what_is_refused(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in EXAMPLE
    with pytest.raises(InputError) as refused:
        load(tmp_path, EXAMPLE.replace(old, new))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(("world", "shard"), [(8, 1), (64, 8), (256, 32)])
def test_instances_of_the_optimizer_divide_the_gpus_that_are_stated(world: int, shard: int, tmp_path: Path) -> None:
    # tp 2 and pp 2 leave a quarter of the GPUs to two instances; of the file alone 8 are taken
    path = tmp_path / "model_config.yaml"
    more = "  --num-distributed-optimizer-instances: 2\n  --use-distributed-optimizer: true\n  --bf16"
    path.write_text(EXAMPLE.replace("  --bf16", more).replace("--global-batch-size: 32", "--global-batch-size: 512"))
    config = load_run_config(path, world)
    assert (config.layout["world_size"], config.layout["zero_shard_size"], config.assumed) == (world, shard, ())
    assert load_run_config(path).layout["zero_shard_size"] == 1 and "world_size" in load_run_config(path).assumed
