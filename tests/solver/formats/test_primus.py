"""AMD's Primus: layouts come back from what is exported, its own examples are read, and what is not modelled is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from round_trip import layouts_of, load, model_of, round_trips, same_model

from profiler.errors import InputError
from profiler.profile.profiles import find_profile
from solver.api import configured_strategy, estimate, load_problem
from solver.formats.config_file import RunConfig, load_run_config
from solver.formats.export import exported
from solver.formats.syntax.yaml_text import read_yaml
from solver.spec.strategy import Strategy
from solver.step.per_stage import time_of_stages
from solver.step.time import TIME_PARTS

PRIMUS = "primus-2026"
CONSTANTS: dict[str, dict[str, Any]] = {
    "llama3_8b": {"overlap_grad_reduce": False, "overlap_param_gather": False, "precision": "fp8"},
    "deepseek_v3": {"moe_dispatcher": "deepep", "recompute_modules": "mla_up_proj", "overlap_grad_reduce": True},
    "qwen3_30b_a3b": {"moe_permute_fusion": False, "grad_dtype": "fp32"},
}
#: As the examples of Primus state DeepSeek-V3 for eight MI300X.
EXAMPLE = """
work_group: ${PRIMUS_TEAM:amd}
user_name: ${PRIMUS_USER:root}
exp_name: ${PRIMUS_EXP_NAME:deepseek_v3-pretrain}
workspace: ./output
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:deepseek_v2_lite}.yaml
    overrides:
      wandb_project: "Primus_DeepSeek_Pretrain"
      stderr_sink_level: DEBUG
      moe_router_force_load_balancing: true
      moe_router_dtype: fp32
      train_iters: 50
      micro_batch_size: 4
      global_batch_size: 256
      seq_length: ${PRIMUS_SEQ_LENGTH:4096}
      max_position_embeddings: 4096
      lr: 1.0e-5
      tensor_model_parallel_size: ${PRIMUS_TP:1}
      pipeline_model_parallel_size: ${PRIMUS_PP:1}
      expert_model_parallel_size: ${PRIMUS_EP:8}
      overlap_grad_reduce: true
      overlap_param_gather: true
      use_distributed_optimizer: true
      mock_data: true
      moe_permute_fusion: false
      gradient_accumulation_fusion: false
      moe_use_legacy_grouped_gemm: true
      mtp_num_layers: null
      moe_shared_expert_overlap: false
"""
#: As they state Llama 3.1 8B, leaving to pre_trainer.yaml that the optimizer is distributed.
LLAMA = """
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: llama3.1_8B.yaml
    overrides:
      micro_batch_size: 2
      global_batch_size: 128
      seq_length: 8192
      max_position_embeddings: 8192
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      expert_model_parallel_size: 1
      overlap_grad_reduce: true
      overlap_param_gather: true
      gradient_accumulation_fusion: false
"""
LAYOUT = Strategy(
    world_size=16,
    seq_len=4096,
    dp=4,
    pp=4,
    num_micro_batches=8,
    zero=1,
    zero_shard_size=4,
    grad_dtype="fp32",
    cross_entropy_fusion=True,
    p2p_overlap=True,
    recompute="full",
    pipeline_layout="Et*9|t*8|t*8|t*7L",
    recompute_stage_layers="5+2+0+0",
    framework=PRIMUS,
)


def test_what_an_example_leaves_to_the_base_file(tmp_path: Path) -> None:
    config = load(tmp_path, LLAMA)
    assert config.layout["zero"] == 1
    problem = load_problem(config, 8, profile="mi300x")
    found = estimate(problem, [configured_strategy(problem, config, 128)])
    assert found.verdict(0) == "FITS"
    bare = load(tmp_path, "\n".join(line for line in LLAMA.splitlines() if "seq_length" not in line))
    assert bare.layout["seq_len"] == 1024
    padded = load(tmp_path, f"{LLAMA}      padded_vocab_size: 129024\n")
    assert (padded.model.vocab_size, padded.model.padded_vocab(4)) == (config.model.vocab_size, 129024)
    assert not any("num-experts" in note for note in config.notes), "the base file's dispatcher is no remark on a dense model"


@pytest.mark.parametrize("name", sorted(CONSTANTS))
def test_hundreds_of_layouts_come_back(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    runs = layouts_of(model, PRIMUS, 40, world=256, **CONSTANTS[name])
    assert len({run.schedule for run in runs}) >= (4 if name == "llama3_8b" else 2)
    came, refused = round_trips(model, runs, ".yaml", tmp_path)
    assert came == 40 and not refused


def test_layers_are_listed_by_their_numbers(tmp_path: Path) -> None:
    """The first 5 of 9 layers of the first stage and the first 2 of 8 of the second are 0 to 4, 9 and 10."""
    model = model_of("llama3_8b")
    texts = exported(tmp_path / "run.yaml", model, LAYOUT, 8)
    overrides = read_yaml(texts["run.yaml"], tmp_path)["modules"]["pre_trainer"]["overrides"]
    assert overrides["recompute_layer_ids"] == [0, 1, 2, 3, 4, 9, 10]
    assert overrides["recompute_granularity"] == "full" and overrides["recompute_method"] is None
    assert "export NNODES=2 GPUS_PER_NODE=8" in texts["run.sh"]
    (tmp_path / "run.sh").write_text(texts["run.sh"])
    assert load(tmp_path, texts["run.yaml"]).layout["recompute_stage_layers"] == "5+2+0+0"
    one = LAYOUT.replace(pp=1, dp=16, zero_shard_size=16, num_micro_batches=4, pipeline_layout="", recompute_stage_layers="")
    text = exported(tmp_path / "run.yaml", model, one, 8)["run.yaml"]
    listed = text.replace("recompute_method: uniform", "recompute_layer_ids: 3,4,5").replace("recompute_num_layers: 1", "lr: 1")
    assert load(tmp_path, listed).layout["recompute_layers"] == 3


def test_an_example_as_it_is_published(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    expected = {
        "framework": PRIMUS,
        "tp": 1,
        "pp": 1,
        "ep": 8,
        "dp": 8,
        "world_size": 8,
        "zero": 1,
        "micro_batch_size": 4,
        "num_micro_batches": 8,
        "moe_dispatcher": "alltoall",
        "moe_permute_fusion": False,
        "moe_grouped_gemm": True,
        "gradient_accumulation_fusion": False,
        "overlap_param_gather": True,
        "precision": "bf16",
        "dropout": False,
        "moe_shared_expert_overlap": False,
        "schedule": "1f1b",
        "recompute": "none",
    }
    assert expected.items() <= config.layout.items()
    assert same_model(config.model, model_of("deepseek_v2_lite"))
    assert config.assumed == ("world_size",)
    assert "${PRIMUS_TP} is taken as 1, its default" in config.notes
    assert any("another library" in note for note in config.notes)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("train_iters: 50", "train_itters: 50", "line 1[0-9]: Primus's train_itters is not known here"),
        ("train_iters: 50", "use_turbo_mega_moe: true", "a fused layer of experts is not modelled"),
        (
            "train_iters: 50",
            "use_torch_fsdp2: true",
            "FSDP2 under Megatron-LM",
        ),
        ("train_iters: 50", "recompute_layer_ids: [1, 99]", "a list of layers from 0 to 26, with recompute_granularity full"),
        (
            "train_iters: 50",
            "recompute_granularity: full\n      recompute_layer_ids: '1,,2'",
            "recompute_layer_ids is 1,,2; it must",
        ),
        (
            "train_iters: 50",
            "recompute_granularity: full\n      recompute_layer_ids: [1, true]",
            "a list of layers from 0 to 26",
        ),
        ("${PRIMUS_TP:1}", "${PRIMUS_TP}", "has no default; write its value"),
        ("framework: megatron", "framework: torchtitan", "those with modules.pre_trainer of framework megatron are read"),
        ("${PRIMUS_MODEL:deepseek_v2_lite}", "mamba_370M", "put its Hugging Face config.json beside it"),
    ],
)
def test_what_is_not_described_is_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load(tmp_path, EXAMPLE.replace(old, new))


def test_a_number_that_turns_a_feature_off_changes_nothing(tmp_path: Path) -> None:
    off = load(tmp_path, EXAMPLE.replace("train_iters: 50", "turbo_sync_free_moe_stage: 0"))
    assert off.layout == load(tmp_path, EXAMPLE).layout
    with pytest.raises(InputError, match="experts without synchronisation with the host is not modelled"):
        load(tmp_path, EXAMPLE.replace("train_iters: 50", "turbo_sync_free_moe_stage: 1"))


def test_what_the_stages_recompute_comes_back_as_the_priced_layout() -> None:
    layout = {
        "framework": PRIMUS,
        "pp": 2,
        "zero": 1,
        "recompute": "full",
        "recompute_stage_layers": "3+0",
        "num_micro_batches": 8,
        "pipeline_layout": "Et*16|t*16L",
    }
    config = RunConfig("llama3_8b", model_of("llama3_8b"), layout, 4096, Path("llama3_8b"))
    problem = load_problem(config, 16, profile=find_profile("h100_sxm")[0])
    read = configured_strategy(problem, config)
    assert (read.recompute, read.recompute_stage_layers) == ("full", "3+0")
    assert time_of_stages(estimate(problem, [read]), 0)[TIME_PARTS.index("recompute")].tolist()[1] == 0.0


def test_latent_attention_that_is_turned_off_has_heads_as_wide_as_values(tmp_path: Path) -> None:
    """deepseek_v2_lite.yaml states kv_channels 128, and not the 192 of rotary and other parts together."""
    path = tmp_path / "run.yaml"
    path.write_text(EXAMPLE.rstrip() + "\n      multi_latent_attention: false\n")
    model = load_run_config(path).model
    assert (model.has_latent_attention, model.head_dim) == (False, 128)
