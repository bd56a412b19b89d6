"""Megatron-Bridge's YAML files: what each key means, what is refused, and that layouts come back from what is exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from round_trip import assert_same_estimate, layouts_of, model_of, round_trips, same_model

from profiler.errors import InputError
from solver.commands.command_line import main
from solver.commands.console import main as foretrain
from solver.formats.config_file import RunConfig, load_run_config
from solver.formats.export import exported, write_export
from solver.formats.same_layout import effective, stated_strategy
from solver.formats.syntax.yaml_text import read_yaml
from solver.spec.layer_kinds import layer_kinds
from solver.spec.model_size import parameters
from solver.spec.strategy import Strategy

CONSTANTS: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "precision": "fp8",
        "fp8_recipe": "blockwise",
        "cp_comm": "a2a",
        "optimizer_states": "bf16",
        "num_layers_at_end_in_bf16": 1,
        "tp_comm_overlap": False,
    },
    "mixtral_8x7b": {
        "recompute_modules": "layernorm+moe_act",
        "grad_dtype": "fp32",
        "moe_shared_expert_overlap": True,
        "moe_dispatcher": "alltoall",
    },
    "deepseek_v3": {
        "precision": "mxfp8",
        "moe_dispatcher": "deepep",
        "recompute_modules": "mla_up_proj",
        "moe_fused_experts": True,
        "fp8_attention": True,
    },
    "qwen3_30b_a3b": {"cp_comm": "a2a+ring", "cp_a2a_size": 2, "moe_permute_fusion": False},
    "llama2_13b": {
        "precision": "fp16",
        "overlap_param_gather": False,
        "attention": "unfused",
        "p2p_overlap": False,
        "tp_comm_overlap": False,
        "grad_dtype": "fp32",
    },
}
#: As the override file of Kimi K2 with eight layers states it, over a recipe that the config.json beside it describes.
OVERRIDES = """
model:
  seq_length: 4096
  tensor_model_parallel_size: 2
  pipeline_model_parallel_size: 1
  expert_model_parallel_size: 8
  sequence_parallel: true
  apply_rope_fusion: false
  pipeline_model_parallel_layout: null
  attention_dropout: 0.0
  hidden_dropout: 0.0
  moe_grouped_gemm: true
train:
  train_iters: 100
  global_batch_size: 16
  micro_batch_size: 1
optimizer:
  lr: 0.0003
scheduler:
  lr_warmup_iters: 2000
ddp:
  use_distributed_optimizer: true
  grad_reduce_in_fp32: false
dist:
  use_megatron_fsdp: false
"""
RUN = Strategy(
    world_size=64,
    seq_len=4096,
    dp=64,
    zero=1,
    zero_shard_size=64,
    cross_entropy_fusion=True,
    p2p_overlap=True,
    fp8_recipe="tensorwise",
    fp8_param_gather=True,
    framework="megatron-bridge-26.06",
)


def load(folder: Path, text: str, model: str = "") -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(text)
    if model:
        (folder / "config.json").write_text(Path(f"configs/models/{model}.json").read_text())
    return load_run_config(path)


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_hundreds_of_layouts_of_each_model_come_back(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    runs = layouts_of(model, "megatron-bridge-26.06", 40, world=256, **CONSTANTS[name])
    offloads = {"optimizer_offload_fraction": 0.5} if name == "qwen3_30b_a3b" else {}
    came, refused = round_trips(model, [run.replace(**(offloads if run.zero else {})) for run in runs], ".yaml", tmp_path)
    assert came == 40 and not refused
    if not model.is_mixture_of_experts:  # of which the toy machine has no kernels
        assert_same_estimate(model, runs[:4])


@pytest.mark.parametrize("name", ["gpt_oss_20b", "mistral_7b", "qwen3_next_80b_a3b", "qwen3_5_27b"])
def test_a_layout_over_a_recipe_states_no_model(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    extra = {"moe_dispatcher": "hybridep", "moe_permute_fusion": False} if model.is_mixture_of_experts else {}
    for run in layouts_of(model, "megatron-bridge-26.06", 40, world=64, **extra):
        write_export(tmp_path / "run.yaml", model, run, 8)
        text = (tmp_path / "run.yaml").read_text()
        assert "hidden_size" not in text and "activation_func" not in text and "window" not in text
        assert "That recipe must be one of the model, as run_model/config.json describes it." in text
        config = load_run_config(tmp_path / "run.yaml")
        back = stated_strategy(config.layout, run.world_size)
        assert effective(model, back) == effective(model, run.replace(framework=back.framework)), text
        assert same_model(config.model, model, run.tp)
        kinds = [layer_kinds(one, 4096) for one in (config.model, model)]
        assert kinds[0].kinds == kinds[1].kinds and list(kinds[0].of_layer) == list(kinds[1].of_layer)
        facts = [
            (one.attention_sinks, one.clamped_gate, one.attention_gate, one.scaled_rope, parameters(one))
            for one in (config.model, model)
        ]
        assert facts[0] == facts[1]


@pytest.mark.parametrize("ends", [0, 4])
def test_fp4_comes_back(ends: int, tmp_path: Path) -> None:
    run = RUN.replace(precision="nvfp4", fp8_param_gather=False, num_layers_at_end_in_bf16=ends)
    assert round_trips(model_of("llama3_70b"), [run], ".yaml", tmp_path) == (1, {})


def test_modules_on_the_host_come_back(tmp_path: Path) -> None:
    run = RUN.replace(
        offload_modules="core_attn+expert_fc1", ep=8, recompute="selective", recompute_modules="moe_act+layernorm"
    )
    assert round_trips(model_of("qwen3_30b_a3b"), [run], ".yaml", tmp_path) == (1, {})


def test_overrides_of_a_recipe_are_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, OVERRIDES, "qwen3_30b_a3b")
    expected = {
        "framework": "megatron-bridge-26.06",
        "tp": 2,
        "tp_mode": "msp",
        "pp": 1,
        "ep": 8,
        "etp": 1,
        "zero": 1,
        "zero_shard_size": 4,
        "grad_dtype": "bf16",
        "precision": "bf16",
        "micro_batch_size": 1,
        "num_micro_batches": 4,
        "cross_entropy_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "moe_dispatcher": "hybridep",
        "moe_grouped_gemm": True,
        "tp_comm_overlap": False,
        "dropout": False,
        "world_size": 8,
        "dp": 4,
        "seq_len": 4096,
    }
    assert expected.items() <= config.layout.items()
    assert config.assumed == ("world_size",)
    assert "the file changes a recipe, which is taken to have overlap_grad_reduce True, overlap_param_gather True, " in "".join(
        config.notes
    )
    assert any(
        "ddp.grad_reduce_in_fp32 false holds if the recipe's mixed_precision has it too" in note for note in config.notes
    )
    assert same_model(config.model, model_of("qwen3_30b_a3b"), 2)
    assert config.ignored == ("model.pipeline_model_parallel_layout", "train.train_iters", "optimizer", "scheduler", "dist")


def test_switches_that_comm_overlap_sets_anew_are_named(tmp_path: Path) -> None:
    text = OVERRIDES.replace("ddp:\n", "ddp:\n  overlap_grad_reduce: false\n")
    for section, said in (("comm_overlap: {tp_comm_overlap: false}", 1), ("comm_overlap: {overlap_grad_reduce: false}", 0)):
        config = load(tmp_path, text + section, "qwen3_30b_a3b")
        assert sum("ddp.overlap_grad_reduce false has no effect" in note for note in config.notes) == said
        assert config.layout["overlap_grad_reduce"] == (said == 1)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("comm_overlap: {data_parallel_size: 16, tp_comm_overlap: true}", "world_size", 32),
        ("comm_overlap: {tp_comm_overlap: true}", "overlap_param_gather", True),
        ("mixed_precision: bf16-with-fp8-current-scaling-mixed", "num_layers_at_start_in_bf16", 1),
        ("mixed_precision: bf16_mixed", "grad_dtype", "fp32"),
        ("mixed_precision: {bf16: true, fp8: e4m3, fp8_recipe: mxfp8}", "precision", "mxfp8"),
        ("mixed_precision: {bf16: true, fp8: e4m3, fp8_recipe: mxfp8, fp8_dot_product_attention: true}", "fp8_attention", True),
        ("mixed_precision: bf16_with_mxfp8_mixed", "fp8_attention", False),
        ("mixed_precision: {fp16: true}", "precision", "fp16"),
        ("mixed_precision: bf16_with_nvfp4_mixed", "precision", "nvfp4"),
    ],
)
def test_what_a_section_means(text: str, field: str, value: Any, tmp_path: Path) -> None:
    assert load(tmp_path, OVERRIDES + text, "qwen3_30b_a3b").layout[field] == value


@pytest.mark.parametrize(
    ("old", "new", "field", "value"),
    [
        ("grad_reduce_in_fp32: false", "use_megatron_fsdp: true\n  data_parallel_sharding_strategy: optim_grads", "zero", 2),
        (
            "lr: 0.0003",
            "use_precision_aware_optimizer: true\n  exp_avg_dtype: {_target_: torch.bfloat16, _call_: false}\n"
            "  exp_avg_sq_dtype: torch.bfloat16",
            "optimizer_states",
            "bf16",
        ),
        ("lr: 0.0003", "optimizer_cpu_offload: true\n  optimizer_offload_fraction: 0.25", "optimizer_offload_fraction", 0.25),
        (
            "apply_rope_fusion: false",
            "recompute_granularity: selective\n  recompute_modules: [moe_act, layernorm]",
            "recompute_modules",
            "layernorm+moe_act",
        ),
        ("apply_rope_fusion: false", "moe_token_dispatcher_type: flex\n  moe_enable_deepep: true", "moe_dispatcher", "deepep"),
        ("apply_rope_fusion: false", "attention_backend: unfused", "attention", "unfused"),
        ("apply_rope_fusion: false", "attention_backend: {_target_: x.AttnBackend, _args_: [3]}", "attention", "unfused"),
        ("apply_rope_fusion: false", "moe_shared_expert_overlap: true", "moe_shared_expert_overlap", True),
        # recipes state 1; a file's null is Megatron-Core's own, tp
        ("apply_rope_fusion: false", "apply_rope_fusion: false", "etp", 1),
        ("apply_rope_fusion: false", "expert_tensor_parallel_size: null", "etp", 2),
        ("apply_rope_fusion: false", "moe_router_force_load_balancing: true", "moe_imbalance", 1.0),
        (
            "lr: 0.0003",
            "main_params_dtype: torch.float32\n  main_grads_dtype: {_target_: torch.float32, _call_: false}",
            "grad_dtype",
            "bf16",
        ),
        (
            "apply_rope_fusion: false",
            "cuda_graph_impl: transformer_engine\n  cuda_graph_scope: [attn, moe_router]",
            "cuda_graph_modules",
            "attn+moe_router",
        ),
    ],
)
def test_what_a_key_means(old: str, new: str, field: str, value: Any, tmp_path: Path) -> None:
    assert old in OVERRIDES and load(tmp_path, OVERRIDES.replace(old, new), "qwen3_30b_a3b").layout[field] == value


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("tensor_model_parallel_size", "tensor_parallel_size", "line 4: model has no key 'tensor_parallel_size' (did you mean"),
        ("model_parallel_size: 2", "model_parallel_size: two", "model.tensor_model_parallel_size is 'two'; it must be a whole"),
        ("apply_rope_fusion: false", "enable_cuda_graph: true", "because the older switch of CUDA graphs (cuda_graph_impl"),
        (
            "apply_rope_fusion: false",
            "attention_backend: {_args_: [9]}",
            "it must be one of flash, fused, unfused, local, auto",
        ),
        (
            "scheduler:",
            "mixed_precision: {bf16: true, fp8: hybrid, fp8_wgrad: false}\nscheduler:",
            "fp8_wgrad is False; it must be true: weight gradients of an fp8 run in 16 bits are not modelled",
        ),
        (
            "pipeline_model_parallel_layout: null",
            "pipeline_model_parallel_layout: [[embedding, decoder], [head]]",
            "pipeline_model_parallel_layout is a list; it must be a text, or lists of embedding, decoder, mtp, loss",
        ),
        ("apply_rope_fusion: false", "recompute_modules: 7", "model.recompute_modules is 7; it must be a list of texts"),
        ("apply_rope_fusion: false", "hidden_size: 64\n  num_layers: 2", "vocab_size is missing; it must be stated, because"),
        (
            "scheduler:",
            "mixed_precision: int4\nscheduler:",
            "mixed_precision is 'int4'; it must be a section, or one of bf16_mixed",
        ),
        ("lr: 0.0003", "exp_avg_dtype: torch.int3", "optimizer.exp_avg_dtype is 'torch.int3'; it must be one of torch.float32"),
        (
            "lr: 0.0003",
            "use_precision_aware_optimizer: true\n  main_params_dtype: torch.float16",
            "an optimizer without weights",
        ),
        (
            "global_batch_size: 16",
            "global_batch_size: 15",
            "global_batch_size 15 is not a multiple of dp 4 * micro_batch_size 1",
        ),
        ("global_batch_size: 16", "rampup_batch_size: [1, 2]\n  global_batch_size: 16", "a batch that grows is not modelled"),
    ],
)
def test_what_is_refused_when_reading(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in OVERRIDES
    with pytest.raises(InputError) as refused:
        load(tmp_path, OVERRIDES.replace(old, new), "qwen3_30b_a3b")
    assert sentence in str(refused.value)


def test_a_layout_may_be_a_list_of_chunks(tmp_path: Path) -> None:
    first, last = [["embedding", *["decoder"] * 24], [*["decoder"] * 24, "loss"]]
    text = OVERRIDES.replace("pipeline_model_parallel_size: 1", "pipeline_model_parallel_size: 2")
    chunks = f"pipeline_model_parallel_layout: [[{', '.join(first)}], [{', '.join(last)}]]"
    layout = load(tmp_path, text.replace("pipeline_model_parallel_layout: null", chunks), "qwen3_30b_a3b").layout
    assert layout["pipeline_layout"] == "E" + 24 * "t" + "|" + 24 * "t" + "L"


def test_the_mlp_of_a_stated_model_is_four_times_as_wide(tmp_path: Path) -> None:
    model = "num_layers: 2\n  hidden_size: 512\n  num_attention_heads: 8\n  vocab_size: 1000\n  gated_linear_unit: true"
    text = OVERRIDES.replace("apply_rope_fusion: false", model).replace("  expert_model_parallel_size: 8\n", "")
    assert load(tmp_path, text).model.intermediate_size == 4 * 512


def test_overrides_of_the_model_change_it(tmp_path: Path) -> None:
    text = OVERRIDES.replace("apply_rope_fusion: false", "num_layers: 4\n  num_moe_experts: 16\n  vocab_size: 1000")
    model = load(tmp_path, text, "qwen3_30b_a3b").model
    assert (model.num_hidden_layers, model.num_experts, model.vocab_size, model.padded_vocab_size) == (4, 16, 1000, 1024)


def test_a_file_without_a_model_needs_one_beside_it(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it states no model \(model.hidden_size\); put its Hugging Face config.json beside"):
        load(tmp_path, OVERRIDES)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"tp": 2, "dp": 32, "zero_shard_size": 32, "tp_comm_overlap": True},
            "tp_comm_overlap with tp_mode mtp: Megatron-Bridge",
        ),
        ({"document_lengths": "1024"}, "packed documents: not among the arguments"),
        ({"pp": 2, "dp": 32, "zero_shard_size": 32, "schedule": "zb-v", "vpp": 2, "num_micro_batches": 4}, "schedule zb-v"),
    ],
)
def test_what_is_refused_when_writing(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        exported(Path("run.yaml"), model_of("llama3_8b"), RUN.replace(**changes), 8)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(("zero", "strategy"), [(1, None), (2, "optim_grads"), (3, "optim_grads_params")])
def test_megatron_fsdp_shards_what_the_stage_says(zero: int, strategy: str | None) -> None:
    (text,) = exported(Path("run.yaml"), model_of("llama3_8b"), RUN.replace(zero=zero), 8).values()
    assert read_yaml(text, Path("run.yaml"))["ddp"].get("data_parallel_sharding_strategy") == strategy


def test_what_megatron_fsdp_writes_it_can_save(tmp_path: Path) -> None:
    """Its checkpoints have a format of their own, which training/config.py asserts and recipes do not have."""
    model = model_of("llama3_8b")
    run = RUN.replace(zero=3)
    text = exported(tmp_path / "run.yaml", model, run, 8)["run.yaml"]
    assert "ckpt_format: fsdp_dtensor" in text and "average_in_collective: false" in text
    said = "ddp.use_megatron_fsdp that saves or loads needs checkpoint.ckpt_format fsdp_dtensor"
    assert not any(said in note for note in load(tmp_path, text, "llama3_8b").notes)
    assert any(said in note for note in load(tmp_path, text.replace("fsdp_dtensor", "torch_dist"), "llama3_8b").notes)


@pytest.mark.parametrize("release", ["megatron-bridge-25", "megatron-bridge-26"])
def test_the_releases_before_are_written_too(release: str) -> None:
    assert exported(Path("a.yaml"), model_of("llama3_8b"), RUN.replace(framework=release), 8).keys() == {"a.yaml"}


def test_the_command_writes_and_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    path, found = str(tmp_path / "best.yaml"), tmp_path / "found.json"
    searched = "--run_all_solu --model_size qwen3_30b_a3b --world_size 16 --framework megatron-bridge --top 1 --fix zero=3"
    command(*searched.split(), "--set", "tp_comm_overlap=false", "--export", path, "--json", str(found))
    again = tmp_path / "again.json"
    assert "tokens/GPU/s" in command("--config", path, "--json", str(again))
    best = [json.loads(file.read_text())["best"][0] for file in (found, again)]
    assert best[0]["step_s"] == best[1]["step_s"]


def test_a_recipe_that_states_no_gpus_is_priced_on_those_of_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # a batch of 16 sequences: dp 4 on 8 GPUs and dp 8 on 16, with 4 and 2 micro batches; dp 12 does not divide it
    load(tmp_path, OVERRIDES, "qwen3_30b_a3b")
    path, found = str(tmp_path / "run.yaml"), tmp_path / "found.json"
    for gpus, dp, steps in ((8, 4, 4), (16, 8, 2)):
        assert (
            foretrain(["predict", "--config", path, "--world_size", str(gpus), "--profile", "b200_sxm", "--json", str(found)])
            == 0
        )
        layout = json.loads(found.read_text())["best"][0]["layout"]
        assert (layout["dp"], layout["num_micro_batches"], layout["zero_shard_size"]) == (dp, steps, dp)
    assert foretrain(["compare", "--config", path, "--world_size", "16", "--profile", "b200_sxm", ".", "tp=1"]) == 0
    assert foretrain(["predict", "--config", path, "--world_size", "24"]) == 2
    assert "run.yaml: global_batch_size 16 is not a multiple of dp 12 * micro_batch_size 1" in capsys.readouterr().err


def test_a_recipe_shards_the_optimizer_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    text = OVERRIDES.replace("  use_distributed_optimizer: true\n", "")
    taken = load(tmp_path, text, "qwen3_30b_a3b")
    assert taken.layout["zero"] == 1
    (note,) = (line for line in taken.notes if "changes a recipe" in line)
    assert "use_distributed_optimizer True" in note and "moe_permute_fusion True" in note and "moe_grouped_gemm" not in note
    stated = load(
        tmp_path, OVERRIDES.replace("use_distributed_optimizer: true", "use_distributed_optimizer: false"), "qwen3_30b_a3b"
    )
    assert (stated.layout["zero"], stated.layout["overlap_param_gather"]) == (0, False)
    assert load(tmp_path, OVERRIDES, "qwen3_30b_a3b").layout["zero"] == 1


@pytest.mark.parametrize(
    ("keys", "dispatcher"),
    [
        ("", "hybridep"),
        ("  moe_enable_deepep: true\n", "deepep"),
        ("  moe_flex_dispatcher_backend: deepep\n", "deepep"),
        ("  moe_token_dispatcher_type: alltoall\n", "alltoall"),
        ("  moe_token_dispatcher_type: flex\n  moe_flex_dispatcher_backend: hybridep\n", "hybridep"),
    ],
)
def test_the_dispatcher_that_a_file_states_over_a_recipe(keys: str, dispatcher: str, tmp_path: Path) -> None:
    overlap = "  recompute_granularity: selective\n  recompute_modules: [moe_act]\n"
    text = (
        OVERRIDES.replace("  moe_grouped_gemm: true\n", overlap + keys)
        + "comm_overlap: {overlap_moe_expert_parallel_comm: true}\n"
    )
    config = load(tmp_path, text, "qwen3_30b_a3b")
    assert config.layout["moe_dispatcher"] == dispatcher and config.layout["moe_grouped_gemm"]
    assert not any("refuse" in note for note in config.notes), "rules see what the recipe is taken to have"


def test_a_backend_that_does_not_exist_is_refused_over_a_recipe_too(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="deppep"):
        load(
            tmp_path,
            OVERRIDES.replace("  moe_grouped_gemm", "  moe_flex_dispatcher_backend: deppep\n  moe_grouped_gemm"),
            "qwen3_30b_a3b",
        )


def test_kernels_that_are_not_fused_are_read_or_left_out_and_said(tmp_path: Path) -> None:
    config = load(tmp_path, OVERRIDES, "qwen3_30b_a3b")
    assert config.layout["rope_fusion"] is False
    fused = load(tmp_path, OVERRIDES.replace("apply_rope_fusion: false", "apply_rope_fusion: true"), "qwen3_30b_a3b")
    assert fused.layout["rope_fusion"] is None
    unfused = load(tmp_path, OVERRIDES.replace("apply_rope_fusion: false", "bias_dropout_fusion: false"), "qwen3_30b_a3b")
    assert "left out of the estimate: the kernels of unfused dropout (model.bias_dropout_fusion False)" in unfused.notes


def test_weights_that_begin_on_the_meta_device_change_no_step(tmp_path: Path) -> None:
    text = OVERRIDES.replace("model:\n", "model:\n  init_model_with_meta_device: true\n")
    config = load(tmp_path, text, "qwen3_30b_a3b")
    assert config.layout == load(tmp_path, OVERRIDES, "qwen3_30b_a3b").layout
    assert "model.init_model_with_meta_device" in config.ignored


def test_what_dist_sets_counts_for_ddp(tmp_path: Path) -> None:
    sharding = "ddp:\n  data_parallel_sharding_strategy: optim_grads_params\n"
    for section, zero in (("use_megatron_fsdp: true", 3), ("use_megatron_fsdp: false", 1)):
        text = OVERRIDES.replace("use_megatron_fsdp: false", section).replace("ddp:\n", sharding)
        assert load(tmp_path, text, "qwen3_30b_a3b").layout["zero"] == zero
    with pytest.raises(InputError, match="dist.use_torch_fsdp2 is True; it must be False or None, because FSDP2 under"):
        load(tmp_path, OVERRIDES.replace("use_megatron_fsdp: false", "use_torch_fsdp2: true"), "qwen3_30b_a3b")
    mapped = load(tmp_path, OVERRIDES.replace("use_megatron_fsdp: false", "use_tp_pp_dp_mapping: true"), "qwen3_30b_a3b")
    assert any("the order of the ranks, with pipeline stages before replicas" in note for note in mapped.notes)


def test_sizes_that_only_the_recipe_knows_are_named(tmp_path: Path) -> None:
    config = load(tmp_path, OVERRIDES.replace("  tensor_model_parallel_size: 2\n", ""), "qwen3_30b_a3b")
    sizes = "model.tensor_model_parallel_size, model.context_parallel_size"
    assert f"not stated, and taken as 1 or off, though the recipe may set it: {sizes}" in config.notes


def test_a_recipe_that_is_a_program_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text("from megatron.bridge.recipes.llama import llama3_8b_pretrain_config\n")
    with pytest.raises(
        InputError, match="a recipe of Megatron-Bridge is a program, which is not run; give the run_config.yaml"
    ):
        load_run_config(path)
