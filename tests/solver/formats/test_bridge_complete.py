"""Megatron-Bridge's complete configuration, as it is printed and saved: the same run as the file that states its part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from round_trip import layouts_of, model_of, same_model

from profiler.errors import InputError
from solver.commands.console import main as foretrain
from solver.formats.bridge.complete import printed
from solver.formats.config_file import RunConfig, load_run_config
from solver.formats.export import exported
from solver.formats.same_layout import effective, stated_strategy
from solver.spec.layer_kinds import layer_kinds
from solver.spec.model_size import parameters
from solver.spec.strategy import Strategy

CONTAINER = "_target_: megatron.bridge.training.config.ConfigContainer\n"
#: What a complete configuration states beside: defaults, functions, what is off, and a key of a newer release.
OF_THE_MODEL = """model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider
  is_hybrid_model: false
  fp32_residual_connection: false
  distribute_saved_activations: null
  init_method:
    _partial_: true
    _target_: torch.nn.init.normal_
    std: 0.02
  timers:
    _call_: true
    _target_: megatron.core.timers.Timers
  transformer_layer_spec:
    _call_: false
    _target_: megatron.bridge.models.gpt_provider.default_layer_spec
  batch_p2p_comm: true
  off_in_a_newer_release: false
  on_in_a_newer_release: 3
"""
BESIDE = "peft: null\nft: null\nrerun_state_machine:\n  rerun_mode: disabled\n"
#: Of a dense model, without experts, in a layout whose overlaps were resolved into its sections.
SMALL = """comm_overlap: null
dataset:
  sequence_length: 1024
mixed_precision: null
ddp:
  use_distributed_optimizer: true
  overlap_grad_reduce: true
  overlap_param_gather: true
  grad_reduce_in_fp32: true
train:
  micro_batch_size: 1
  global_batch_size: 64
"""
MODEL = """  num_layers: 16
  hidden_size: 2048
  ffn_hidden_size: 8192
  num_attention_heads: 32
  num_query_groups: 8
  kv_channels: 64
  vocab_size: 128256
  should_pad_vocab: false
  normalization: RMSNorm
  position_embedding_type: rope
  gated_linear_unit: true
  add_bias_linear: false
  share_embeddings_and_output_weights: true
  seq_length: 1024
  attention_dropout: 0.0
  hidden_dropout: 0.0
  tensor_model_parallel_size: 1
  moe_router_topk: 2
  moe_layer_freq: 1
  moe_token_dispatcher_type: allgather
  recompute_modules:
  - core_attn
  overlap_p2p_comm: false
  bf16: true
"""


def load(folder: Path, text: str) -> RunConfig:
    path = folder / "run_config.yaml"
    path.write_text(text)
    return load_run_config(path)


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_30b_a3b", "deepseek_v3"])
def test_what_is_written_comes_back_from_a_complete_configuration(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    for run in layouts_of(model, "megatron-bridge-26.06", 20, world=64):
        text = exported(tmp_path / "run.yaml", model, run, 8)["run.yaml"]
        config = load(tmp_path, CONTAINER + text.replace("model:\n", OF_THE_MODEL) + BESIDE)
        back = stated_strategy(config.layout, run.world_size)
        assert effective(model, back) == effective(model, run.replace(framework=back.framework)), text
        assert same_model(config.model, model, run.tp)
        assert config.ignored == ("model.on_in_a_newer_release",)


def test_defaults_of_other_models_say_nothing(tmp_path: Path) -> None:
    config = load(tmp_path, CONTAINER + SMALL + OF_THE_MODEL + MODEL)
    assert parameters(config.model) == 1_235_814_400 and not config.model.num_experts
    run = stated_strategy(config.layout, 8)
    assert (run.precision, run.grad_dtype, run.zero, run.recompute, run.num_micro_batches) == ("bf16", "fp32", 1, "none", 8)
    assert run.overlap_grad_reduce and run.overlap_param_gather and not run.p2p_overlap and run.cross_entropy_fusion
    assert config.assumed == ("world_size",)


def test_hybrid_models_say_which_layer_is_which(tmp_path: Path) -> None:
    text = CONTAINER + SMALL + OF_THE_MODEL.replace("is_hybrid_model: false", "is_hybrid_model: true") + MODEL
    with pytest.raises(InputError, match=r"hybrid_override_pattern is missing; it must be stated, one letter a layer"):
        load(tmp_path, text)


def test_samples_are_as_long_as_the_data_says(tmp_path: Path) -> None:
    longer = load(tmp_path, CONTAINER + SMALL + OF_THE_MODEL + MODEL.replace("seq_length: 1024", "seq_length: 131072"))
    assert longer.seq_len == 1024
    refused = "its framework would refuse this run: model.seq_length equals dataset.seq_length, or dataset.sequence_length"
    assert any(note.startswith(refused) for note in longer.notes)


def test_windows_sinks_and_activation_are_those_of_gpt_oss(tmp_path: Path) -> None:
    oss = """  num_layers: 24
  num_moe_experts: 32
  hidden_size: 2880
  ffn_hidden_size: 2880
  moe_ffn_hidden_size: 2880
  moe_router_topk: 4
  num_attention_heads: 64
  num_query_groups: 8
  kv_channels: 64
  vocab_size: 201088
  should_pad_vocab: false
  normalization: RMSNorm
  position_embedding_type: yarn
  yarn_rotary_scaling_factor: 32.0
  gated_linear_unit: true
  activation_func:
    _call_: false
    _target_: megatron.core.fusions.fused_bias_geglu.quick_gelu
  activation_func_clamp_value: 7.0
  glu_linear_offset: 1.0
  add_bias_linear: true
  share_embeddings_and_output_weights: false
  seq_length: 1024
  softmax_type: learnable
  window_size:
  - 127
  - 0
  window_attn_skip_freq: 2
  attention_dropout: 0.0
  hidden_dropout: 0.0
  moe_grouped_gemm: true
"""
    model, shipped = load(tmp_path, CONTAINER + SMALL + OF_THE_MODEL + oss).model, model_of("gpt_oss_20b")
    kinds = [layer_kinds(one, 1024) for one in (model, shipped)]
    assert kinds[0].kinds == kinds[1].kinds and list(kinds[0].of_layer) == list(kinds[1].of_layer)
    assert (model.attention_sinks, model.clamped_gate, model.scaled_rope, model.gated_mlp) == (True,) * 4
    assert parameters(model) == parameters(shipped)


def test_layers_whose_activations_leave_are_read(tmp_path: Path) -> None:
    stays = load(
        tmp_path, CONTAINER + SMALL + OF_THE_MODEL + MODEL + "  cpu_offloading: false\n  cpu_offloading_num_layers: 4\n"
    )
    leaves = load(
        tmp_path, CONTAINER + SMALL + OF_THE_MODEL + MODEL + "  cpu_offloading: true\n  cpu_offloading_num_layers: 4\n"
    )
    assert (stays.layout["offload_layers"], leaves.layout["offload_layers"]) == (0, 4)


def test_as_many_gpus_are_taken_as_its_experts_need(tmp_path: Path) -> None:
    experts = "  num_moe_experts: 64\n  moe_ffn_hidden_size: 1024\n  expert_model_parallel_size: 64\n  moe_grouped_gemm: true\n"
    config = load(tmp_path, CONTAINER + SMALL + OF_THE_MODEL + MODEL.replace("  moe_router_topk: 2\n", experts))
    assert config.layout["world_size"] == 64 and config.assumed == ("world_size",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            CONTAINER + SMALL + OF_THE_MODEL + MODEL + "peft:\n  dim: 16\n",
            "peft: adapters under Megatron-Bridge are not modelled",
        ),
        (
            CONTAINER
            + SMALL
            + OF_THE_MODEL.replace("fp32_residual_connection: false", "fp32_residual_connection: true")
            + MODEL,
            "--fp32-residual-connection: residuals in fp32 is not modelled",
        ),
        (
            SMALL + OF_THE_MODEL + MODEL,
            "on_in_a_newer_release|off_in_a_newer_release|init_method",
        ),  # a part states nothing else
    ],
)
def test_what_is_not_described_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load(tmp_path, text)


def test_defaults_say_nothing_and_other_values_are_named(tmp_path: Path) -> None:
    states = """optimizer:
  optimizer: adam
  main_params_dtype:
    _call_: false
    _target_: torch.float32
"""
    usual = "  tp_comm_bulk_dgrad: true\n  cpu_offloading_weights: false\n  fp4_param: false\n"
    text = CONTAINER + SMALL + states + OF_THE_MODEL.replace("  on_in_a_newer_release: 3\n", "") + MODEL
    assert load(tmp_path, text + usual).ignored == ()
    other = usual.replace("dgrad: true", "dgrad: false").replace("weights: false", "weights: true")
    assert set(load(tmp_path, text + other).ignored) == {"model.tp_comm_bulk_dgrad (False)", "model.cpu_offloading_weights"}
    with pytest.raises(InputError, match="--main-params-dtype 'fp16': an optimizer without weights in fp32 is not modelled"):
        load(tmp_path, text.replace("float32", "float16") + usual)


def test_layers_of_ones_own_are_named(tmp_path: Path) -> None:
    own = OF_THE_MODEL.replace("gpt_provider.default_layer_spec", "mine.my_spec")
    config = load(tmp_path, CONTAINER + SMALL + own + MODEL)
    assert "model.transformer_layer_spec (megatron.bridge.models.mine.my_spec)" in config.ignored


def test_a_log_that_prints_it_is_compared_with_what_it_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configuration = CONTAINER + SMALL + OF_THE_MODEL + MODEL
    steps = "".join(
        f" [2026-01-01] iteration {n}/ 10 | elapsed time per iteration (ms): 250.0 | lm loss: 9.7 |\n" for n in range(10)
    )
    log = tmp_path / "job.log"
    log.write_text(f"setup\n\n------- Task Configuration -------\n{configuration}\n{'-' * 34}\nTraining ...\n{steps}")
    found = printed(log.read_text())
    assert found is not None and found.lstrip("\n").startswith(CONTAINER)
    assert found.splitlines().index("comm_overlap: null") == log.read_text().splitlines().index("comm_overlap: null")
    assert printed("nothing of it\n") is None
    assert foretrain(["import", str(log), "--profile", "h100_sxm"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "bf16, megatron-bridge-26.06, 8 x NVIDIA H100" in shown and "a step takes 250 ms" in shown
    assert "the config states no number of GPUs: 8 are taken; --world_size says how many" in shown
    assert foretrain(["import", str(log), "--profile", "h100_sxm", "--world_size", "16"]) == 0
    shown = capsys.readouterr().out
    assert "16 x NVIDIA H100" in shown and "states no number of GPUs" not in shown


def test_the_number_of_gpus_is_not_said_to_be_taken_where_it_is_stated(tmp_path: Path) -> None:
    run = Strategy(world_size=8, dp=8, seq_len=4096, zero=1, zero_shard_size=8, framework="megatron-bridge-26.06")
    text = exported(tmp_path / "run.yaml", model_of("llama3_8b"), run, 8)["run.yaml"]
    assert not load(tmp_path, text).assumed
