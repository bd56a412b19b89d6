"""nanotron's YAML files: what each key means, what is refused, and that layouts come back from what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from round_trip import assert_same_estimate, layouts_of, load, model_of, round_trips

from profiler.errors import InputError
from solver.commands.command_line import main
from solver.formats.export import exported
from solver.formats.same_layout import stated_strategy
from solver.formats.syntax.yaml_text import read_yaml, write_yaml
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

#: As nanotron's example of a tiny Llama on eight GPUs states it.
EXAMPLE = """
checkpoints:
  checkpoint_interval: 10
  checkpoints_path: checkpoints
data_stages:
- data:
    dataset: null
    num_loading_workers: 1
    seed: 42
  name: Stable Training Stage
  start_training_step: 1
general:
  project: debug
  run: tiny_llama_%date_%jobid
  seed: 42
lighteval: null
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method:
    std: 0.025
  make_vocab_size_divisible_by: 1
  model_config:
    bos_token_id: 1
    hidden_act: silu
    hidden_size: 16
    intermediate_size: 64
    is_llama_config: true
    max_position_embeddings: 256
    num_attention_heads: 4
    num_hidden_layers: 2
    num_key_value_heads: 4
    rms_norm_eps: 1.0e-05
    tie_word_embeddings: true
    vocab_size: 257
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  optimizer_factory:
    adam_eps: 1.0e-08
    name: adamW
    torch_adam_is_fused: true
  zero_stage: 0
parallelism:
  dp: 2
  expert_parallel_size: 1
  pp: 2
  pp_engine: 1f1b
  tp: 2
  tp_linear_async_communication: true
  tp_mode: REDUCE_SCATTER
tokens:
  batch_accumulation_per_replica: 3
  micro_batch_size: 2
  sequence_length: 256
  train_steps: 15
"""
RUN = Strategy(world_size=16, seq_len=4096, dp=16, zero=0, grad_dtype="fp32", overlap_param_gather=False, framework="nanotron")


@pytest.mark.parametrize("name", ["llama3_8b", "internlm2_7b"])
@pytest.mark.parametrize("constants", [{}, {"precision": "fp16", "grad_dtype": "fp16"}])
def test_hundreds_of_layouts_come_back(name: str, constants: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(name)
    runs = [
        run.replace(recompute_layers=-1, zero_shard_size=run.dp if run.zero else 1)  # nanotron has no other
        for run in layouts_of(model, "nanotron", 55, **constants)
    ]
    came, refused = round_trips(model, runs, ".yaml", tmp_path)
    assert came > 33 and set(refused) <= {"recompute", "zero"}
    assert_same_estimate(model, runs[:6])


def test_the_example_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    assert stated_strategy(config.layout, 8) == Strategy(
        world_size=8,
        seq_len=256,
        dp=2,
        tp=2,
        pp=2,
        tp_mode="msp",
        zero=0,
        zero_shard_size=1,
        micro_batch_size=2,
        num_micro_batches=3,
        grad_dtype="fp32",
        overlap_param_gather=False,
        framework="nanotron",
    )
    assert config.model == ModelSpec(
        name="run",
        hidden_size=16,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=4,
        vocab_size=257,
        padded_vocab_size=258,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    assert config.ignored == (
        "checkpoints",
        "data_stages",
        "general",
        "lighteval",
        "model.init_method",
        "model.model_config.bos_token_id",
        "model.model_config.rms_norm_eps",
        "optimizer.clip_grad",
        "optimizer.optimizer_factory.adam_eps",
        "tokens.train_steps",
    )


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("pp_engine: 1f1b", "pp_engine: afab", "schedule", "gpipe"),
        ("pp_engine: 1f1b", "recompute_layer: yes", "recompute", "full"),
        ("zero_stage: 0", "zero_stage: 1", "zero_shard_size", 2),
        ("dtype: bfloat16", "dtype: float16", "precision", "fp16"),
        ("accumulate_grad_in_fp32: true", "accumulate_grad_in_fp32: false", "grad_dtype", "bf16"),
        ("true\n  tp_mode: REDUCE_SCATTER", "false\n  tp_mode: all_reduce", "tp_mode", "mtp"),
    ],
)
def test_what_a_key_means(old: str, new: str, field: str, value: Any, tmp_path: Path) -> None:
    assert old in EXAMPLE and load(tmp_path, EXAMPLE.replace(old, new)).layout[field] == value


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("  tp: 2", "  tpp: 2", "line 49: parallelism has no key 'tpp' (did you mean 'tp'?)"),
        ("  dp: 2", "  dp: many", "line 45: parallelism.dp is 'many'; it must be a whole number of at least 1"),
        ("zero_stage: 0", "zero_stage: 3", "optimizer.zero_stage is 3; it must be 0 or 1, the stages that nanotron has"),
        ("communication: true", "communication: false", "true with REDUCE_SCATTER and false with ALL_REDUCE"),
        (
            "communication: true",
            "communication: true\n  tp_recompute_allgather: false",
            "keeping gathered inputs is not modelled",
        ),
        ("is_llama_config: true", "is_llama_config: false", "another model than nanotron's Llama is not modelled"),
        ("is_llama_config: true", "is_starcoder_config: true", "model.model_config has no key 'is_starcoder_config'"),
        (
            "is_llama_config: true",
            "is_qwen2_config: true\n    sliding_window_size: 20",
            "a window of attention under nanotron is not modelled",
        ),
        (
            "is_llama_config: true",
            "is_qwen2_config: true\n    moe_config: {num_experts: 4}",
            "a mixture of experts under nanotron is not modelled",
        ),
        ("is_llama_config: true", "_attn_implementation: flex_attention", "another kernel of attention is not modelled"),
        ("torch_adam_is_fused: true", "torch_adam_is_fused: false", "an Adam of several kernels is not modelled"),
        ("num_attention_heads: 4", "num_attention_heads: 3", "it must be a divisor of hidden_size 16"),
        (
            "num_key_value_heads: 4",
            "num_key_value_heads: 3",
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ("tokens:", "token:", "a YAML configuration is nanotron's"),
        ("pp: 2", "pp: 2\n  pp: 4", "line 48: the key 'pp' stands twice"),
        ("pp: 2", "pp: [2", "not valid YAML"),
        ("pp: 2", "pp: &two 2\n  dp: *two", "an alias, which is not read"),
    ],
)
def test_what_is_refused_when_reading(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in EXAMPLE
    with pytest.raises(InputError) as refused:
        load(tmp_path, EXAMPLE.replace(old, new))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cp": 2, "dp": 8}, "cp 2: context parallelism under nanotron is not modelled"),
        ({"zero": 1, "zero_shard_size": 4}, "zero_shard_size 4: nanotron's ZeRO shards over all 16 data-parallel ranks"),
        ({"zero": 3, "zero_shard_size": 16}, "zero 3: nanotron has ZeRO-0 and 1"),
        ({"recompute": "selective"}, "recompute selective: nanotron recomputes whole layers"),
        ({"recompute": "full", "recompute_layers": 3}, "recompute_layers 3: nanotron recomputes all layers or none"),
        ({"precision": "fp8"}, "precision fp8: nanotron trains in bf16, fp16, fp32"),
        ({"tp": 2, "dp": 8, "tp_mode": "fsp"}, "tp_mode fsp: nanotron has mtp and msp"),
        ({"pp": 2, "dp": 8, "schedule": "interleaved", "vpp": 2}, "schedule interleaved: nanotron runs 1f1b and gpipe"),
        ({"compile": True}, "compile True: nanotron's YAML has no place for it (it would mean False)"),
        ({"attention": "unfused"}, "attention unfused: nanotron's YAML has no place for it"),
    ],
)
def test_what_is_refused_when_writing(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        exported(Path("run.yaml"), model_of("llama3_8b"), RUN.replace(**changes), 8)
    assert sentence in str(refused.value)


def test_models_that_its_llama_is_not() -> None:
    for name, sentence in (
        ("mistral_nemo_12b", "no place for head_dim 128 (it would mean 160)"),
        ("qwen2_7b", "no place for qkv_bias True"),
        ("mixtral_8x7b", "mixtures of experts under nanotron are not modelled"),
    ):
        with pytest.raises(InputError) as refused:
            exported(Path("run.yaml"), model_of(name), RUN, 8)
        assert sentence in str(refused.value)


def test_yaml_comes_back_as_it_was_written() -> None:
    plain = {"a": {"b": 1, "c": [1.0e-08, "1e-5", None, True, "no", ""]}, "d": [{"e": "x: y", "f": "two\nlines"}], "g": {}}
    read = read_yaml(write_yaml(plain, ["why"]), Path("x.yaml"))
    assert read == plain and read.lines == {"a": 2, "d": 11, "g": 16}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("- 1\n", "a YAML configuration is a mapping of keys"),
        ("", "a YAML configuration is a mapping of keys"),
        ("a: !!python/object/apply:os.system [ls]\n", "line 1: the tag tag:yaml.org,2002:python/object/apply:os.system, which"),
        ("a: !!python/name:os.system x\n", "line 1: not valid YAML: could not determine a constructor"),
        ("[" * 500_000, "line 1: nested too deeply"),
        ("? [1]\n: 2\n", "line 1: a key that is no text"),
        ("a: 1\n---\nb: 2\n", "line 2: not valid YAML: but found another document"),
    ],
)
def test_yaml_that_is_not_read(text: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        read_yaml(text, Path("x.yaml"))
    assert sentence in str(refused.value)


def test_the_command_writes_and_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    path = str(tmp_path / "best.yaml")
    searched = "--run_all_solu --model_size llama3_8b --world_size 16 --framework nanotron --top 1 --fix recompute=none,zero=0"
    assert f"wrote {path}" in command(*searched.split(), "--global_batch_size", "1048576", "--export", path)
    assert "tokens/GPU/s" in command("--config", path)


def test_its_qwen2_is_estimated_as_its_llama_and_said(tmp_path: Path) -> None:
    own = "is_qwen2_config: true\n    _attn_implementation: flash_attention_2\n    _use_doc_masking: true\n    no_rope_layer: 2"
    config = load(tmp_path, EXAMPLE.replace("is_llama_config: true", own))
    llama = load(tmp_path, EXAMPLE)
    assert config.layout == llama.layout and config.model.no_rope_layers == (1, 0)
    assert config.model.replace(no_rope_layers=()) == llama.model
    assert [line.rpartition("(")[2] for line in config.notes] == ["is_qwen2_config)", "_use_doc_masking)"]
