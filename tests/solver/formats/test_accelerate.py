"""Accelerate's YAML with its launch script: what each key means, what is refused, and that layouts come back."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from round_trip import assert_same_estimate, model_of, round_trips, same_model
from toy import toy_cost

from profiler.errors import InputError
from solver.commands.command_line import main
from solver.formats.config_file import RunConfig, load_run_config
from solver.formats.export import exported, write_export
from solver.formats.hugging_face.export import config_of
from solver.spec.cluster import cluster_of
from solver.spec.feasibility import check_layout
from solver.spec.frameworks import framework_of
from solver.spec.strategy import Strategy

#: As accelerate's own template of FSDP1 states it, on two nodes.
TEMPLATE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
use_cpu: false
"""
NEWER = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_activation_checkpointing: true
mixed_precision: bf16
num_processes: 16
"""
SCRIPT = """
accelerate launch --config_file run.yaml run_clm.py --config_name run_model \\
  --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --block_size 2048 --bf16
"""
RUN = Strategy(world_size=16, seq_len=4096, dp=16, zero=3, zero_shard_size=16, fused_norm=False, framework="fsdp")
FRAMEWORKS: dict[str, dict[str, Any]] = {"fsdp": {}, "fsdp2": {"grad_dtype": "bf16"}, "pytorch-ddp": {}}


def load(folder: Path, text: str, script: str = SCRIPT, name: str = "run.yaml") -> RunConfig:
    (folder / "run.yaml").write_text(text)
    (folder / "config.json").write_text(Path("configs/models/llama3_8b.json").read_text())
    if script:
        (folder / "run.sh").write_text(script)
    return load_run_config(folder / name)


def layouts(framework: str) -> list[Strategy]:
    """Return the layouts of data parallelism alone that accelerate's settings have."""
    base = {**framework_of(framework).flags, **FRAMEWORKS[framework], "framework": framework, "seq_len": 4096}
    stages = {"fsdp": (0, 2, 3), "fsdp2": (2, 3), "pytorch-ddp": (0,)}[framework]
    found = []
    for world, size, count, zero, again, of_node, dtype in product(
        (8, 16, 512), (1, 4), (1, 16), stages, ("none", "full"), (False, True), ("bf16", "fp16")
    ):
        if (again == "full" and framework == "pytorch-ddp") or (of_node and not zero):
            continue
        found.append(
            Strategy(
                **{
                    **base,
                    "world_size": world,
                    "dp": world,
                    "micro_batch_size": size,
                    "num_micro_batches": count,
                    "zero": zero,
                    "zero_shard_size": 8 if of_node else world if zero else 1,
                    "recompute": again,
                    "precision": dtype,
                    "grad_dtype": dtype if framework != "pytorch-ddp" else "fp32",
                    "compile": of_node,
                }
            )
        )
    return found


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
@pytest.mark.parametrize("name", ["llama3_8b", "qwen2_7b"])
def test_hundreds_of_layouts_come_back(framework: str, name: str, tmp_path: Path) -> None:
    model, runs = model_of(name), layouts(framework)
    for run in runs[::7]:  # the framework runs them
        check_layout(model, cluster_of(toy_cost().device), run)
    came, refused = round_trips(model, runs, ".yaml", tmp_path)
    assert came == len(runs) >= 24 and not refused
    assert_same_estimate(model, [run for run in runs if run.precision == "bf16"][-2:])


def test_the_template_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, TEMPLATE)
    assert config.layout == {
        "framework": "fsdp",
        "world_size": 16,
        "dp": 16,
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "zero": 3,
        "zero_shard_size": 16,
        "precision": "bf16",
        "grad_dtype": "bf16",
        "recompute": "none",
        "recompute_layers": -1,
        "compile": False,
        "fused_norm": False,
        "micro_batch_size": 2,
        "num_micro_batches": 4,
        "seq_len": 2048,
        "defer_grad_sync": True,
    }
    assert config.assumed == () and {"debug", "rdzv_backend", "fsdp_config.fsdp_use_orig_params"} <= set(config.ignored)
    assert same_model(config.model, model_of("llama3_8b")) and config.seq_len == 2048
    assert load(tmp_path, TEMPLATE, name="run.sh").layout == config.layout


@pytest.mark.parametrize(
    ("argument", "version", "expected"),
    [
        ('--accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\'', TEMPLATE, None),
        ("--accelerator_config each.json", TEMPLATE, None),
        ("--accelerator_config '{\"split_batches\": false}'", TEMPLATE, True),
        ("", TEMPLATE.replace("FULL_SHARD", "SHARD_GRAD_OP"), True),
        ("", TEMPLATE.replace("FULL_SHARD", "NO_SHARD"), None),
        ("", NEWER, True),
        ('--accelerator_config \'{"gradient_accumulation_kwargs": {"sync_each_batch": true}}\'', NEWER, None),
    ],
)
def test_fsdp_keeps_gradients_whole_unless_told_to_reduce_each(
    argument: str, version: str, expected: bool | None, tmp_path: Path
) -> None:
    (tmp_path / "each.json").write_text('{"gradient_accumulation_kwargs": {"sync_each_batch": true}}')
    config = load(tmp_path, version, SCRIPT.rstrip() + f" {argument}\n")
    assert config.layout.get("defer_grad_sync") is expected
    assert any("4.46 to 5.1" in note for note in config.notes) == bool(argument and expected is None)
    one = load(tmp_path, version, SCRIPT.replace("accumulation_steps 4", "accumulation_steps 1"))
    assert "defer_grad_sync" not in one.layout


def test_sixteen_bit_parameters_under_ddp_are_refused(tmp_path: Path) -> None:
    script = SCRIPT.rstrip() + " --torch_dtype bfloat16\n"
    assert "--torch_dtype" in load(tmp_path, TEMPLATE, script).ignored  # FSDP makes 32-bit ones of them
    with pytest.raises(InputError, match="--torch_dtype bfloat16 under DDP is not modelled"):
        load(tmp_path, TEMPLATE.replace("distributed_type: FSDP", "distributed_type: MULTI_GPU"), script)
    with pytest.raises(InputError, match="--torch_dtype bfloat16 under mixed_precision no is not modelled"):
        load(tmp_path, TEMPLATE.replace("mixed_precision: bf16", "mixed_precision: 'no'"), script)


def test_checkpointing_that_both_ask_for_is_refused_by_the_trainer(tmp_path: Path) -> None:
    script = SCRIPT.rstrip() + " --gradient_checkpointing\n"
    for on, refusals in (("true", 1), ("false", 0)):
        text = TEMPLATE.replace("fsdp_config:\n", f"fsdp_config:\n  fsdp_activation_checkpointing: {on}\n")
        config = load(tmp_path, text, script)
        said = [note for note in config.notes if note.startswith("its framework would refuse this run: fsdp_activation")]
        assert len(said) == refusals and config.layout["recompute"] == "full"
    text = TEMPLATE.replace("fsdp_config:\n", "fsdp_config:\n  fsdp_activation_checkpointing: true\n")
    config = load(tmp_path, text, script.replace("checkpointing\n", "checkpointing false\n"))  # leaves it to accelerate
    assert config.layout["recompute"] == "full" and not any("would refuse" in note for note in config.notes)


def test_a_script_may_have_another_name(tmp_path: Path) -> None:
    expected = load(tmp_path, TEMPLATE).layout
    (tmp_path / "run.sh").rename(tmp_path / "launch.sh")
    assert load_run_config(tmp_path / "launch.sh").layout == expected


def test_without_a_script_the_batch_is_open(tmp_path: Path) -> None:
    config = load(tmp_path, TEMPLATE, script="")
    assert config.assumed == ("micro_batch_size", "num_micro_batches", "seq_len") and config.seq_len is None


@pytest.mark.parametrize(
    ("text", "old", "new", "fields"),
    [
        (TEMPLATE, "FULL_SHARD", "SHARD_GRAD_OP", {"zero": 2, "zero_shard_size": 16}),
        (TEMPLATE, "FULL_SHARD", "4", {"zero": 3, "zero_shard_size": 8}),
        (TEMPLATE, "FULL_SHARD", "_HYBRID_SHARD_ZERO2", {"zero": 2, "zero_shard_size": 8}),
        (TEMPLATE, "FULL_SHARD", "NO_SHARD", {"zero": 0, "zero_shard_size": 1}),
        (TEMPLATE, "distributed_type: FSDP", "distributed_type: MULTI_GPU", {"framework": "pytorch-ddp", "grad_dtype": "fp32"}),
        (TEMPLATE, "debug: false", "dynamo_config: {dynamo_backend: INDUCTOR}", {"compile": True}),
        (NEWER, "", "", {"framework": "fsdp2", "zero": 3, "recompute": "full", "grad_dtype": "bf16"}),
        (NEWER, "forward: true", "forward: false", {"zero": 2}),
        (
            NEWER,
            "num_processes: 16",
            "num_processes: 16\nparallelism_config: {parallelism_config_dp_replicate_size: 4}",
            {"zero_shard_size": 4},
        ),
    ],
)
def test_what_a_key_means(text: str, old: str, new: str, fields: dict[str, Any], tmp_path: Path) -> None:
    assert old in text and fields.items() <= load(tmp_path, text.replace(old, new)).layout.items()


def test_no_mixed_precision_is_fp32(tmp_path: Path) -> None:
    text = TEMPLATE.replace("mixed_precision: bf16", "mixed_precision: 'no'")
    fields = {"precision": "fp32", "grad_dtype": "fp32"}
    assert fields.items() <= load(tmp_path, text, SCRIPT.replace("--bf16", "")).layout.items()


def test_what_accelerate_launch_would_override_is_refused(tmp_path: Path) -> None:
    same = SCRIPT.replace("--config_file", "--num_machines 2 --main_process_port 29500 --config_file")
    assert load(tmp_path, TEMPLATE, same).layout["world_size"] == 16
    for argument in ("--mixed_precision fp16", "--dynamo_backend inductor"):
        name = argument.split()[0]
        with pytest.raises(InputError, match=f"run.sh: {name} is .*, but run.yaml says .*; write the same there"):
            load(tmp_path, TEMPLATE, SCRIPT.replace("--config_file", f"{argument} --config_file"))


def test_ranks_on_the_command_line_come_before_the_file_s(tmp_path: Path) -> None:
    launch = "--num_processes 64 --num_machines 8 --main_process_port $(shuf -i 2000-3000 -n 1) --config_file"
    for text in (TEMPLATE, ZERO):
        config = load(tmp_path, text, SCRIPT.replace("--config_file", launch))
        assert (config.layout["world_size"], config.layout["zero_shard_size"], config.gpus_per_node) == (64, 64, 8)
        assert "--num_processes 64 of the script is taken, as accelerate does, not 16 of run.yaml" in config.notes


def test_a_program_of_which_nothing_is_read_is_named_with_deepspeed_too(tmp_path: Path) -> None:
    config = load(tmp_path, ZERO, "accelerate launch --config_file run.yaml scripts/run_sft.py recipes/full.yaml\n")
    assert (config.layout["zero"], config.layout["world_size"]) == (3, 16) and "micro_batch_size" in config.assumed
    assert any(line.startswith("not read: scripts/run_sft.py recipes/full.yaml") for line in config.notes)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("num_machines", "num_machine", "line 19: there is no section or setting 'num_machine' (did you mean 'num_machines'?)"),
        ("num_processes: 16", "num_processes: 15", "num_processes is 15; it must be a multiple of num_machines 2"),
        ("FULL_SHARD", "SOME_SHARD", "fsdp_config.fsdp_sharding_strategy is 'SOME_SHARD'; it must be one of FULL_SHARD"),
        ("offload_params: false", "offload_params: true", "it must be False, because parameters on the host is not modelled"),
        ("BACKWARD_PRE", "NO_PREFETCH", "because another order of all-gathers is not modelled"),
        ("mixed_precision: bf16", "mixed_precision: fp8", "mixed_precision is 'fp8'; it must be one of bf16, fp16, no"),
        ("distributed_type: FSDP", "distributed_type: XLA", "it must be one of FSDP, MULTI_GPU, DEEPSPEED, NO"),
        (
            "debug: false",
            "parallelism_config: {parallelism_config_tp_size: 2}",
            "tensor parallelism of accelerate is not modelled",
        ),
        ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "another unit of FSDP than a layer is not modelled"),
    ],
)
def test_what_is_refused_when_reading(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in TEMPLATE
    with pytest.raises(InputError) as refused:
        load(tmp_path, TEMPLATE.replace(old, new))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        (
            SCRIPT.replace("batch_size 2", "batch_size two"),
            "--per_device_train_batch_size is 'two'; it must be a positive whole",
        ),
        (SCRIPT.replace("size 2048", "size $LENGTH"), "$LENGTH is not known from the script alone; write its value"),
        (SCRIPT.replace("--block", "--block_size 1 --block"), "--block_size is given twice"),
        ("accelerate launch train.py", "it must name accelerate's settings, --config_file NAME.yaml, beside the script"),
    ],
)
def test_scripts_that_are_refused(script: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        load(tmp_path, TEMPLATE, script, "run.sh")
    assert sentence in str(refused.value)


def test_a_model_must_stand_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "alone.yaml"
    path.write_text(TEMPLATE)
    with pytest.raises(InputError, match="hold no model; put its Hugging Face config.json beside it, as alone_model"):
        load_run_config(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tp": 2, "dp": 8}, "tp 2, cp 1, pp 1: accelerate's files are for data parallelism"),
        ({"precision": "fp8"}, "precision fp8: accelerate's mixed_precision is bf16, fp16, no"),
        ({"grad_dtype": "fp32"}, "grad_dtype fp32: accelerate's FSDP reduces in the type of mixed precision (bf16)"),
        ({"recompute": "selective"}, "recompute selective: accelerate's fsdp_activation_checkpointing is of whole layers"),
        ({"recompute": "full", "recompute_layers": 4}, "recompute_layers 4: accelerate recomputes all layers or none"),
        ({"zero_shard_size": 4}, "zero_shard_size 4: FSDP1 shards over all 16 ranks or the 8 of a node"),
        ({"zero": 1}, "zero 1: FSDP1 has stages 0, 2 and 3"),
        ({"framework": "torchtitan", "zero": 0, "zero_shard_size": 1}, "the layout is torchtitan's"),
        ({"framework": "fsdp2", "zero": 0, "zero_shard_size": 1}, "zero 0: FSDP2 shards parameters; DDP is"),
        ({"framework": "pytorch-ddp"}, "zero 3: accelerate's DDP keeps whole copies"),
        (
            {"framework": "pytorch-ddp", "zero": 0, "recompute": "full"},
            "recompute full: accelerate's DDP leaves it to the program",
        ),
        ({"attention": "unfused"}, "attention unfused: accelerate's YAML has no place for it"),
    ],
)
def test_what_is_refused_when_writing(changes: dict[str, Any], sentence: str) -> None:
    if changes.get("framework") == "torchtitan":  # the release of 2024, which has no FSDP2 of accelerate
        sentence = "a layout of torchtitan-2024-12 is written as .toml"
    with pytest.raises(InputError) as refused:
        exported(Path("run.yaml"), model_of("llama3_8b"), RUN.replace(**changes), 8)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("llama3_8b", "llama"),
        ("mistral_7b", "mistral"),
        ("qwen2_7b", "qwen2"),
        ("qwen3_8b", "qwen3"),
        ("gpt3_175b", "gpt2"),
        ("internlm2_20b", "llama"),
        ("mistral_nemo_12b", "llama"),
        ("qwen3_0_6b", "qwen3"),
    ],
)
def test_models_as_config_json(name: str, model_type: str) -> None:
    assert config_of(model_of(name))["model_type"] == model_type


@pytest.mark.parametrize("padded", [128256, 128512])
def test_padded_tables_are_of_the_framework_that_pads(padded: int) -> None:
    assert config_of(model_of("llama3_8b").replace(padded_vocab_size=padded)) == config_of(model_of("llama3_8b"))


@pytest.mark.parametrize("name", ["mixtral_8x7b", "deepseek_v3", "gemma2_9b"])
def test_models_of_other_architectures_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="no Hugging Face architecture of llama, mistral, qwen2"):
        config_of(model_of(name))


def test_three_files_are_written(tmp_path: Path) -> None:
    written = write_export(tmp_path / "a.yaml", model_of("llama3_8b"), RUN, 8)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == ["a.yaml", "a.sh", "a_model/config.json"]
    assert json.loads(written[2].read_text())["model_type"] == "llama"
    assert "--config_name a_model --bf16" in written[1].read_text()
    assert load_run_config(written[1]).layout == load_run_config(written[0]).layout


def test_the_command_writes_and_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    path = str(tmp_path / "best.yaml")
    searched = (
        "--run_all_solu --model_size llama3_8b --world_size 16 --framework fsdp --top 1 --fix recompute=none,zero_shard_size=16"
    )
    out = command(*searched.split(), "--global_batch_size", "1048576", "--export", path)
    assert all(f"wrote {tmp_path}/{name}" in out for name in ("best.yaml", "best.sh", "best_model/config.json"))
    assert "tokens/GPU/s" in command("--config", str(tmp_path / "best.sh"))


def test_a_version_of_fsdp_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 3\n")
    with pytest.raises(InputError, match=r"fsdp_version .*1 or 2"):
        load_run_config(tmp_path / "accelerate.yaml")


def test_one_process_without_distribution(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="num_processes is 16; it must be 1 beside distributed_type NO, which starts one process"
    ):
        load(tmp_path, TEMPLATE.replace("distributed_type: FSDP", "distributed_type: 'NO'"))


def test_a_program_that_is_not_the_trainer_s_is_named(tmp_path: Path) -> None:
    found = load(tmp_path, TEMPLATE, "accelerate launch --config_file run.yaml src/train.py lora_sft.yaml\n")
    assert [note for note in found.notes if note.startswith("not read")] == [
        "not read: src/train.py lora_sft.yaml, whose batch, sequence, adapters and quantisation are not known here"
    ]
    known = load(tmp_path, TEMPLATE, "accelerate launch --config_file run.yaml src/train.py --cutoff_len 2048\n")
    assert known.layout["seq_len"] == 2048


BY_TORCHRUN = (
    "torchrun --nnodes 2 --nproc-per-node 8 train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 4 "
    "--max_seq_length 2048 --bf16 "
)


def started(folder: Path, arguments: str) -> RunConfig:
    (folder / "config.json").write_text(Path("configs/models/llama3_8b.json").read_text())
    (folder / "launch.sh").write_text(BY_TORCHRUN + arguments)
    return load_run_config(folder / "launch.sh")


@pytest.mark.parametrize(
    ("arguments", "strategy", "more"),
    [
        ("--fsdp 'full_shard auto_wrap' --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer", "FULL_SHARD", ""),
        (
            "--fsdp 'shard_grad_op auto_wrap' --fsdp_config fsdp.json",
            "SHARD_GRAD_OP",
            "  fsdp_activation_checkpointing: true\n",
        ),
        ("--fsdp 'hybrid_shard auto_wrap'", "HYBRID_SHARD", ""),
    ],
)
def test_a_trainer_that_torchrun_starts_shards_as_accelerates_settings_say(
    arguments: str, strategy: str, more: str, tmp_path: Path
) -> None:
    """The trainer makes accelerate's settings of its own arguments: the same run as with the YAML that states them."""
    there = {
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "backward_prefetch": "backward_pre",
        "limit_all_gathers": True,
        "activation_checkpointing": True,
    }
    (tmp_path / "fsdp.json").write_text(json.dumps(there))
    settings = TEMPLATE.replace("fsdp_sharding_strategy: FULL_SHARD\n", f"fsdp_sharding_strategy: {strategy}\n{more}")
    expected = load(tmp_path, settings).layout
    found = started(tmp_path, arguments)
    assert {**found.layout, "seq_len": 2048} == expected and found.gpus_per_node == 8
    assert found.layout["framework"] == "fsdp" and found.layout["zero_shard_size"] == (8 if "hybrid" in arguments else 16)


def test_a_trainer_that_torchrun_starts_without_fsdp_is_ddp(tmp_path: Path) -> None:
    found = started(tmp_path, "--gradient_checkpointing").layout
    assert (found["framework"], found["zero"], found["dp"], found["recompute"]) == ("pytorch-ddp", 0, 16, "full")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--fsdp full_shard", "--fsdp needs auto_wrap"),
        ("--fsdp 'full_shard auto_wrap' --fsdp_min_num_params 100000", "--fsdp needs auto_wrap, and no least number"),
        ("--fsdp 'full_shard auto_wrap offload'", "--fsdp with offload is not modelled"),
        ("--fsdp 'sharded auto_wrap'", "--fsdp is 'sharded auto_wrap'; it must be one of full_shard, shard_grad_op"),
        ("--fsdp 'full_shard auto_wrap' --fsdp_config none.json", "--fsdp_config none.json is not there"),
        ("--fsdp 'full_shard auto_wrap' --fsdp_config '{\"version\": 2}'", "--fsdp_config of FSDP2 or XLA is not read"),
        ("--fsdp_config '{}'", "--fsdp_config changes nothing without --fsdp"),
    ],
)
def test_sharding_of_a_trainer_that_is_refused(arguments: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        started(tmp_path, arguments)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_keys_of_fsdp_that_are_not_known_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fsdp_shards"):
        started(tmp_path, "--fsdp 'full_shard auto_wrap' --fsdp_config '{\"shards\": 2}'")


#: As TRL ships it.
ZERO = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""


def test_deepspeed_by_accelerate_s_own_settings(tmp_path: Path) -> None:
    config = load(tmp_path, ZERO)
    expected = {"framework": "transformers-deepspeed", "world_size": 16, "dp": 16, "zero": 3, "zero_shard_size": 16}
    batch = {"precision": "bf16", "grad_dtype": "bf16", "micro_batch_size": 2, "num_micro_batches": 4, "seq_len": 2048}
    assert (expected | batch).items() <= config.layout.items() and config.gpus_per_node == 8
    assert any(line.startswith("left out of the estimate: buckets of 500,000,000") for line in config.notes)
    host = load(tmp_path, ZERO.replace("offload_optimizer_device: none", "offload_optimizer_device: cpu"))
    assert host.layout["optimizer_offload_fraction"] == 1.0 and host.layout["offload_gradients"]
    text = ZERO.replace("zero_stage: 3", "zero_stage: 0").replace("bf16", "fp16")
    plain = load(tmp_path, text, SCRIPT.replace("--bf16", "--fp16"))
    assert (plain.layout["zero"], plain.layout["zero_shard_size"], plain.layout["precision"]) == (0, 1, "fp16")


def test_keys_of_earlier_releases_that_are_off(tmp_path: Path) -> None:
    older = "dynamo_backend: 'NO'\ncommand_file: null\ncommands: null\ntpu_name: null\ntpu_zone: null\nmegatron_lm_config: {}\n"
    assert load(tmp_path, ZERO + older).layout == load(tmp_path, ZERO).layout
    with pytest.raises(InputError, match="dynamo_backend is 'INDUCTOR'; it must be"):
        load(tmp_path, ZERO + "dynamo_backend: INDUCTOR\n")


def test_deepspeed_s_json_that_accelerate_s_settings_name(tmp_path: Path) -> None:
    own = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"}}
    (tmp_path / "zero2.json").write_text(json.dumps(own | {"train_micro_batch_size_per_gpu": "auto"}))
    text = "deepspeed_config: {deepspeed_config_file: zero2.json}\ndistributed_type: DEEPSPEED\nnum_processes: 16\n"
    assert load(tmp_path, text).layout["zero"] == 2
    with pytest.raises(InputError, match="deepspeed_config_file is 'none.json'; it must be a JSON beside it"):
        load(tmp_path, text.replace("zero2.json", "none.json"))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("offload_param_device: none", "offload_param_device: cpu", "because parameters on the host is not modelled"),
        ("zero_stage: 3", "zero_stages: 3", "deepspeed_config has no key 'zero_stages' (did you mean 'zero_stage'?)"),
        ("zero_stage: 3", "gradient_accumulation_steps: 8", "gradient_accumulation_steps is 8; it must be 4, as its script"),
        ("mixed_precision: bf16", "mixed_precision: fp8", "mixed_precision is 'fp8'; it must be one of bf16, fp16 or no"),
    ],
)
def test_what_is_refused_of_deepspeed_by_accelerate(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        load(tmp_path, ZERO.replace(old, new))
    assert sentence in str(refused.value)
    with pytest.raises(InputError, match="--zero_stage is 2, but run.yaml says 3; write the same there"):
        load(tmp_path, ZERO, SCRIPT.replace("--config_file run.yaml", "--config_file run.yaml --zero_stage 2"))
