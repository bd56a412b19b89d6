"""NeMo 1's YAML files: what each key means, what is refused, and that layouts come back from what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from round_trip import assert_same_estimate, layouts_of, load, model_of, round_trips, same_model

from profiler.errors import InputError
from solver.commands.command_line import main
from solver.formats.export import exported
from solver.spec.strategy import Strategy

#: As the launcher's configuration of Llama 2 7B on 16 nodes states it, with a vocabulary.
EXAMPLE = """
defaults:
  - _self_
run:
  name: llama2_7b
  results_dir: ${base_results_dir}/${.name}
trainer:
  num_nodes: 16
  devices: 8
  accelerator: gpu
  precision: bf16
  max_steps: 300000
model:
  mcore_gpt: true
  micro_batch_size: 1
  global_batch_size: 2048
  rampup_batch_size: null
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  virtual_pipeline_model_parallel_size: null
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 11008
  num_attention_heads: 32
  hidden_dropout: 0.0
  attention_dropout: 0.0
  kv_channels: null
  normalization: rmsnorm
  layernorm_epsilon: 1.0e-05
  make_vocab_size_divisible_by: 128
  bias: false
  activation: fast-swiglu
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  override_vocab_size: 32000
  seed: 1234
  tokenizer:
    library: 'sentencepiece'
    type: null
    model: ${data_dir}/llama/llama_tokenizer.model
  megatron_amp_O2: true
  gradient_accumulation_fusion: true
  activations_checkpoint_granularity: null
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 0
  sequence_parallel: true
  cross_entropy_loss_fusion: true
  transformer_engine: true
  fp8: False
  fp8_hybrid: False
  ub_tp_comm_overlap: False
  use_flash_attention: true
  optim:
    name: distributed_fused_adam
    lr: 1e-4
    overlap_grad_sync: true
    overlap_param_sync: true
  data:
    seq_length: 4096
"""
RUN = Strategy(world_size=16, seq_len=4096, dp=16, zero_shard_size=16, grad_dtype="bf16", p2p_overlap=True, framework="nemo-24")


@pytest.mark.parametrize("name", ["llama3_8b", "llama2_13b", "mistral_nemo_12b"])
@pytest.mark.parametrize(
    "constants",
    [
        {},
        {"precision": "fp8", "grad_dtype": "fp32", "tp_comm_overlap": False},
        {"attention": "unfused", "dropout": True, "overlap_param_gather": False},
    ],
)
def test_hundreds_of_layouts_come_back(name: str, constants: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(name)
    runs = [
        run.replace(zero_shard_size=run.dp * run.cp if run.zero else 1)  # NeMo's optimizer has no other
        for run in layouts_of(model, "nemo-24", 25, **constants)
    ]
    came, refused = round_trips(model, runs, ".yaml", tmp_path)
    assert came == 25 and not refused
    if not constants:
        assert_same_estimate(model, runs[:3])


def test_the_example_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    expected = {
        "framework": "nemo-24",
        "world_size": 128,
        "tp": 2,
        "tp_mode": "msp",
        "pp": 1,
        "dp": 64,
        "zero": 1,
        "zero_shard_size": 64,
        "micro_batch_size": 1,
        "num_micro_batches": 32,
        "precision": "bf16",
        "grad_dtype": "bf16",
        "recompute": "none",
        "cross_entropy_fusion": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "tp_comm_overlap": False,
        "dropout": False,
        "attention": "flash",
        "seq_len": 4096,
    }
    assert expected.items() <= config.layout.items() and config.assumed == ("grad_dtype",)
    assert same_model(config.model, model_of("llama2_7b"), 2)
    assert {"defaults", "run", "trainer.max_steps", "model.data", "model.tokenizer"} <= set(config.ignored)


def test_the_vocabulary_may_stand_beside_it(tmp_path: Path) -> None:
    text = EXAMPLE.replace("override_vocab_size: 32000", "seed: 1").replace("  seed: 1234\n", "")
    (tmp_path / "config.json").write_text(Path("configs/models/llama3_8b.json").read_text())
    assert (load(tmp_path, text).model.vocab_size, load(tmp_path, text).model.padded_vocab_size) == (128256, 128256)
    with pytest.raises(InputError, match="model.hidden_size is 2048; it must be 4096, as the config.json beside it has it"):
        load(tmp_path, text.replace("hidden_size: 4096\n  ffn", "hidden_size: 2048\n  ffn"))


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("lr: 1e-4", "grad_sync_dtype: fp32", "grad_dtype", "fp32"),
        ("name: distributed_fused_adam", "name: fused_adam", "zero", 0),
        ("granularity: null", "granularity: full", "recompute", "full"),
        ("fp8: False\n  fp8_hybrid: False", "fp8: True\n  fp8_hybrid: True", "precision", "fp8"),
        ("ub_tp_comm_overlap: False", "ub_tp_comm_overlap: True", "tp_comm_overlap", True),
        ("precision: bf16", "precision: 16", "precision", "fp16"),
        ("use_flash_attention: true", "use_flash_attention: false", "attention", "unfused"),
    ],
)
def test_what_a_key_means(old: str, new: str, field: str, value: Any, tmp_path: Path) -> None:
    text = EXAMPLE.replace("checkpoint_num_layers: 0", "checkpoint_num_layers: 1")
    assert old in text and load(tmp_path, text.replace(old, new)).layout[field] == value


def test_megatron_cores_own_optimizer_sums_in_fp32_after_the_backward_pass(tmp_path: Path) -> None:
    apex = EXAMPLE.replace("    overlap_grad_sync: true\n", "")
    mcore = apex.replace("distributed_fused_adam", "mcore_distributed_optim")
    keys = ("grad_dtype", "overlap_grad_reduce", "zero")
    assert [load(tmp_path, apex).layout[key] for key in keys] == ["bf16", True, 1]
    assert [load(tmp_path, mcore).layout[key] for key in keys] == ["fp32", False, 1]
    assert load(tmp_path, apex).assumed and not load(tmp_path, mcore).assumed


def test_numbers_that_refer_to_others_are_filled_in(tmp_path: Path) -> None:
    text = EXAMPLE.replace("ffn_hidden_size: 11008", "ffn_hidden_size: ${multiply:4, ${.hidden_size}}")
    text = text.replace("${.encoder_seq_length}", "${model.encoder_seq_length}")
    model = load(tmp_path, text.replace("rope", "learned_absolute")).model
    assert (model.intermediate_size, model.max_position_embeddings) == (16384, 4096)
    with pytest.raises(InputError, match=r"ffn-hidden-size is '\$\{oc.env:WIDTH\}'; it must be a whole number"):
        load(tmp_path, EXAMPLE.replace("ffn_hidden_size: 11008", "ffn_hidden_size: ${oc.env:WIDTH}"))


def test_selective_recomputation_of_nemo_s_own_layers_counts_none(tmp_path: Path) -> None:
    text = EXAMPLE.replace("granularity: null", "granularity: selective")
    refused = "selective excludes the latter"  # as Megatron-Core does
    assert any(refused in line for line in load(tmp_path, text).notes)
    own = load(tmp_path, text.replace("mcore_gpt: true", "mcore_gpt: false"))
    assert own.layout["recompute"] == "selective" and not any(refused in line for line in own.notes)


def test_the_width_of_an_mlp_is_four_times_that_of_the_model(tmp_path: Path) -> None:
    assert load(tmp_path, EXAMPLE.replace("  ffn_hidden_size: 11008\n", "")).model.intermediate_size == 4 * 4096


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("num_layers: 32\n", "num_layer: 32\n", "model has no key 'num_layer' (did you mean 'num_layers'?)"),
        ("devices: 8", "devices: some", "line 9: trainer.devices is 'some'; it must be a whole number"),
        ("precision: bf16", "precision: 8", "trainer.precision is 8; it must be one of bf16, bf16-mixed"),
        (
            "  override_vocab_size: 32000\n",
            "",
            "the vocabulary is open (model.override_vocab_size there, --vocab_size here); put its",
        ),
        ("megatron_amp_O2: true", "megatron_amp_O2: false", "because autocast is not modelled"),
        ("fp8: False", "fp8: True", "model.fp8_hybrid is False; it must be true beside fp8"),
        ("seed: 1234", "fp32_residual_connection: true", "because residuals in fp32 is not modelled"),
        ("seed: 1234", "transformer_block_type: post_ln", "because norms after the blocks is not modelled"),
        ("lr: 1e-4", "grad_sync_dtype: fp64", "model.optim.grad_sync_dtype is 'fp64'; it must be one of bf16, fp32"),
        ("name: distributed_fused_adam", "name: lion", "model.optim.name is 'lion'; it must be one of distributed_fused_adam"),
        ("global_batch_size: 2048", "global_batch_size: 2047", "global_batch_size 2047 is not a multiple of dp 64"),
    ],
)
def test_what_is_refused_when_reading(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in EXAMPLE
    with pytest.raises(InputError) as refused:
        load(tmp_path, EXAMPLE.replace(old, new))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("mixtral_8x7b", {}, "mixtures of experts are not written for NeMo 1"),
        ("qwen3_8b", {}, "NeMo 1's settings have no norms of q and k"),
        ("qwen2_7b", {}, "NeMo 1 has biases in all linears or in none"),
        ("llama3_8b", {"zero_shard_size": 8}, "zero_shard_size 8: NeMo 1's optimizer shards over all 16 replicas"),
        ("llama3_8b", {"cp": 2, "dp": 8, "cp_comm": "a2a"}, "cp_comm a2a: NeMo 1's context parallelism is a ring"),
        ("llama3_8b", {"precision": "mxfp8"}, "precision mxfp8: NeMo 1 trains in bf16, fp8, fp16, fp32"),
        ("llama3_8b", {"framework": "nemo-25"}, "the layout is nemo-25's, for which no file is written"),
        ("llama3_8b", {"cross_entropy_fusion": True}, "cross_entropy_fusion_impl te: NeMo 1's YAML has no place for it"),
    ],
)
def test_what_is_refused_when_writing(name: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        exported(Path("run.yaml"), model_of(name), RUN.replace(**changes), 8)
    assert sentence in str(refused.value)


def test_the_command_writes_and_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "best.yaml")
    searched = "--run_all_solu --model_size llama2_7b --world_size 16 --framework nemo-24 --top 1 --fix zero=0 --export"
    assert main([*searched.split(), path]) == 0 and f"wrote {path}" in capsys.readouterr().out
    assert main(["--config", path]) == 0 and "tokens/GPU/s" in capsys.readouterr().out
