"""DeepSpeed's JSON with its script: what each key means, what is refused, and that layouts come back from what is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from round_trip import assert_same_estimate, layouts_of, model_of, round_trips, same_model

from profiler.errors import InputError
from solver import estimate, load_problem
from solver.commands.command_line import main
from solver.formats.config_file import RunConfig, load_run_config
from solver.formats.export import exported, write_export
from solver.spec.frameworks import known_framework
from solver.spec.strategy import Strategy
from solver.step.memory import MEMORY_PARTS

#: As Megatron-DeepSpeed's example of a Llama 2 writes it, with the numbers in their places.
EXAMPLE: dict[str, Any] = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
    "steps_per_print": 1,
    "zero_optimization": {"stage": 1},
    "bf16": {"enabled": True},
}
SCRIPT = """
torchrun --nproc_per_node 8 --nnodes 1 --node_rank $NODE_RANK pretrain_gpt.py \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 \\
  --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32 --seq-length 2048 --max-position-embeddings 2048 \\
  --train-iters 250000 --save ./tmp --load ./tmp --data-impl mmap \\
  --tokenizer-type GPTSentencePieceTokenizer --vocab-size 32000 --split 949,50,1 \\
  --distributed-backend nccl --lr 3e-4 --lr-decay-style cosine --optimizer adam --bf16 \\
  --no-query-key-layer-scaling --attention-dropout 0 --hidden-dropout 0 --use-rotary-position-embeddings \\
  --untie-embeddings-and-output-weights --swiglu --normalization rmsnorm --disable-bias-linear --num-key-value-heads 4 \\
  --deepspeed-activation-checkpointing --recompute-granularity full --recompute-method uniform \\
  --deepspeed --deepspeed_config=run.json --zero-stage=1
"""
TRAINER = (
    "deepspeed --num_nodes 2 --num_gpus 8 run_clm.py --deepspeed run.json --block_size 1024 --per_device_train_batch_size 3"
)
RUN = Strategy(
    world_size=16,
    seq_len=4096,
    dp=16,
    zero=1,
    zero_shard_size=16,
    grad_dtype="fp16",
    overlap_grad_reduce=False,
    attention="unfused",
    framework="megatron-deepspeed",
)


def load(folder: Path, settings: dict[str, Any], script: str = SCRIPT, name: str = "run.json") -> RunConfig:
    (folder / "run.json").write_text(json.dumps(settings))
    if script:
        (folder / "run.sh").write_text(script)
    return load_run_config(folder / name)


def beside(folder: Path) -> None:
    (folder / "config.json").write_text(Path("configs/models/llama3_8b.json").read_text())


@pytest.mark.parametrize("name", ["llama3_8b", "internlm2_7b"])
@pytest.mark.parametrize(
    "constants",
    [{}, {"attention": "flash", "precision": "fp16", "overlap_grad_reduce": True}, {"grad_dtype": "fp32", "precision": "fp32"}],
)
def test_hundreds_of_layouts_come_back(name: str, constants: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(name)
    runs = [
        run.replace(
            recompute_layers=-1,
            zero_shard_size=run.dp if run.zero else 1,  # DeepSpeed has no other
        )
        for run in layouts_of(model, "megatron-deepspeed", 25, **constants)
    ]
    came, refused = round_trips(model, runs, ".json", tmp_path)
    assert came == 25 and not refused
    if not constants:
        assert_same_estimate(model, runs[:4])


def test_a_pipeline_in_bf16_shards_its_states_without_zero_too(tmp_path: Path) -> None:
    """BLOOM's settings: stage 0, "it implements its own zero stage 1 equivalent"."""
    settings = {**EXAMPLE, "zero_optimization": {"stage": 0}}
    config = load(tmp_path, settings, SCRIPT.replace("--zero-stage=1", "--zero-stage=0"))
    assert (config.layout["zero"], config.layout["zero_shard_size"], config.layout["grad_dtype"]) == (1, 2, "fp32")
    assert any(
        "estimated as ZeRO-1, as DeepSpeed's BF16_Optimizer shards, with gradients added in fp32" in n for n in config.notes
    )
    narrow = load(tmp_path, {**settings, "data_types": {"grad_accum_dtype": "bf16"}}, SCRIPT.replace("=1\n", "=0\n"))
    assert (narrow.layout["zero"], narrow.layout["grad_dtype"]) == (1, "bf16")
    flat = SCRIPT.replace("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 1").replace("=1\n", "=0\n")
    assert load(tmp_path, settings, flat).layout["zero"] == 0


def test_only_arguments_of_the_fork_are_written(tmp_path: Path) -> None:
    """Selective recomputation has no modules there, and states on the host need its own Adam and no more flags."""
    model = model_of("llama3_8b")
    selective = exported(tmp_path / "run.json", model, RUN.replace(recompute="selective"), 8)["run.sh"]
    assert "--recompute-granularity selective" in selective and "--recompute-modules" not in selective
    assert "--train-iters 1000" in selective and "--lr 0.0001" in selective
    host = exported(
        tmp_path / "run.json", model, RUN.replace(zero=2, optimizer_offload_fraction=1.0, offload_gradients=True), 8
    )
    assert "--cpu-optimizer" in host["run.sh"] and "offload" not in host["run.sh"] and "precision-aware" not in host["run.sh"]
    with pytest.raises(InputError, match="Megatron-DeepSpeed has no argument --deterministic-mode"):
        exported(tmp_path / "run.json", model, RUN.replace(deterministic=True), 8)


@pytest.mark.parametrize(("zero", "share"), [(2, 1.0), (3, 1.0), (3, 0.4)])
def test_an_optimizer_on_the_host_comes_back(zero: int, share: float, tmp_path: Path) -> None:
    run = RUN.replace(zero=zero, optimizer_offload_fraction=share, offload_gradients=True)
    came, refused = round_trips(model_of("llama3_8b"), [run], ".json", tmp_path)
    assert came == 1 and not refused
    written = json.loads((tmp_path / "run.json").read_text())["zero_optimization"]["offload_optimizer"]
    assert written == {"device": "cpu", "pin_memory": True} | ({"ratio": share} if share < 1 else {})
    with pytest.raises(InputError, match="a part under ZeRO-3 only"):
        exported(tmp_path / "other.json", model_of("llama3_8b"), run.replace(zero=2, optimizer_offload_fraction=0.4), 8)


def test_other_programs_around_the_trainer_are_read(tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    script = "deepspeed --num_nodes 2 --num_gpus 8 src/train.py --deepspeed run.json --bf16 True --data_path a.json "
    words = "--model_max_length 2048 --per_device_train_batch_size 3 --gradient_checkpointing True --output_dir out"
    found = load(tmp_path, settings, script + words)
    expected = {"world_size": 16, "micro_batch_size": 3, "seq_len": 2048, "recompute": "full", "zero": 3, "precision": "bf16"}
    assert expected.items() <= found.layout.items()
    assert any(note.startswith("src/train.py is taken to train all weights of a causal language model") for note in found.notes)
    assert "--data_path" in found.ignored and "--model_max_length" not in found.ignored
    for more, sentence in {
        "--use_liger_kernel True": "--use_liger_kernel of src/train.py is not modelled",
        "--finetuning_type lora": "--finetuning_type of src/train.py is not modelled",
        "--train_type lora": "--train_type of src/train.py is not modelled",
        "--bits 4": "--bits of src/train.py is not modelled",
        "--adapter_name_or_path y": "--adapter_name_or_path of src/train.py is not modelled",
        "--stage dpo": "--stage of src/train.py is not modelled",
        "--reward_model x": "--reward_model of src/train.py is not modelled",
        "--vision_tower clip": "--vision_tower of src/train.py is not modelled",
        "--attn_implementation eager": "--attn_implementation of src/train.py is not modelled",
        "--max_seq_length 1024": "--model_max_length 2048 and --max_seq_length 1024 are two lengths of a sequence",
    }.items():
        with pytest.raises(InputError, match=sentence):
            load(tmp_path, settings, f"{script}{words} {more}")
    without = "--finetuning_type full --train_type full --stage sft --bits 16 --use_flash_attn True --use_peft False"
    same = load(tmp_path, settings, f"{script}{words} {without} --max_seq_length 2048")
    assert same.layout == found.layout
    for program in ("dpo.py", "examples/run_glue.py", "train_grpo.py", "reward.py"):
        with pytest.raises(InputError, match=f"{program} does not train a causal language model alone"):
            load(tmp_path, settings, (script + words).replace("src/train.py", program))
    # what prepares data is not what trains, whatever its arguments; of two programs that a launcher starts none is chosen
    for first in ("python prepare.py --out data\n", "python prepare.py --output_dir data\n", "python -m tools.x a.py\n"):
        before = load(tmp_path, settings, first + script + words)
        assert before.layout == found.layout and "src/train.py is taken" in " ".join(before.notes)
    with pytest.raises(InputError, match="starts other.py and src/train.py with arguments of a trainer"):
        load(tmp_path, settings, f"deepspeed --num_gpus 8 other.py --output_dir x\n{script}{words}")


def test_what_a_trainer_s_model_and_data_are_called_need_not_be_known(tmp_path: Path) -> None:
    beside(tmp_path)
    asking = "MODEL=$(ls -t models | head -1)\n"
    script = asking + TRAINER.replace(
        "run_clm.py", "finetune.py --model_name_or_path $MODEL --data_path $DATA --bf16 --max_length 512"
    )
    settings = EXAMPLE | {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
    config = load(tmp_path, settings, script.replace("--block_size 1024 ", ""))
    assert (config.layout["world_size"], config.layout["micro_batch_size"], config.layout["seq_len"]) == (16, 3, 512)
    with pytest.raises(InputError, match=r"\$SIZE is not known from the script alone"):
        load(tmp_path, settings, script.replace("--per_device_train_batch_size 3", "--per_device_train_batch_size $SIZE"))


def test_the_stage_that_a_comparison_changes_to_has_its_own_default(tmp_path: Path) -> None:
    """overlap_comm, which the file leaves open, is on in ZeRO-3 alone: from a file of either stage both stages take as long."""
    beside(tmp_path)
    words = f"{TRAINER} --bf16"
    found: dict[int, list[float]] = {}
    for stage in (2, 3):
        config = load(tmp_path, {"zero_optimization": {"stage": stage}, "bf16": {"enabled": "auto"}}, words)
        problem = load_problem(config, 16, seq_len=1024)
        layouts = [problem.layout(zero=zero, zero_shard_size=16) for zero in (2, 3)]
        found[stage] = estimate(problem, layouts).times.seconds.tolist()
    assert found[2] == found[3]
    stated = {"zero_optimization": {"stage": 3, "overlap_comm": False}, "bf16": {"enabled": "auto"}}
    assert load(tmp_path, stated, words).layout["overlap_grad_reduce"] is False


def test_the_example_is_exactly_this_layout(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE)
    expected = {
        "framework": "megatron-deepspeed",
        "world_size": 8,
        "tp": 2,
        "pp": 2,
        "dp": 2,
        "tp_mode": "mtp",
        "zero": 1,
        "zero_shard_size": 2,
        "micro_batch_size": 4,
        "num_micro_batches": 4,
        "precision": "bf16",
        "grad_dtype": "bf16",
        "attention": "unfused",
        "dropout": False,
        "recompute": "full",
        "overlap_grad_reduce": None,
        "seq_len": 2048,
    }
    assert expected.items() <= config.layout.items() and config.assumed == ()
    model = config.model
    assert (model.num_key_value_heads, model.norm, model.position, model.vocab_size) == (4, "rmsnorm", "rope", 32000)
    assert "steps_per_print" in config.ignored and "--lr" in config.ignored
    assert load(tmp_path, EXAMPLE, name="run.sh").layout == config.layout


def test_a_trainer_s_script_states_sequence_and_ranks(tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 5,
        "zero_optimization": {"stage": 3},
        "fp16": {"enabled": True},
    }
    config = load(tmp_path, settings, f"{TRAINER} --gradient_accumulation_steps 5")
    expected = {
        "world_size": 16,
        "dp": 16,
        "tp": 1,
        "zero": 3,
        "zero_shard_size": 16,
        "micro_batch_size": 3,
        "num_micro_batches": 5,
        "seq_len": 1024,
        "precision": "fp16",
        "overlap_grad_reduce": None,
    }
    assert expected.items() <= config.layout.items() and config.assumed == ()
    assert same_model(config.model, model_of("llama3_8b"))


def test_a_trainer_runs_the_modules_of_transformers(tmp_path: Path) -> None:
    """The same layers as under FSDP: equal kernels and equal activations, and DeepSpeed's own states."""
    beside(tmp_path)
    config = load(tmp_path, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}, f"{TRAINER} --bf16")
    assert config.layout["framework"] == "transformers-deepspeed"
    deepspeed, fsdp = (known_framework(name) for name in ("transformers-deepspeed", "fsdp"))
    assert deepspeed.kernels == fsdp.kernels and deepspeed.can_run.tp_modes == ()
    found = []
    for name in (deepspeed.name, fsdp.name):
        problem = load_problem(config, 16, framework=name, precision="bf16", seq_len=1024)
        found.append(estimate(problem, [problem.layout(zero=3, zero_shard_size=16, micro_batch_size=3)]))
    activations = [float(one.memory.parts[MEMORY_PARTS.index("activations"), 0]) for one in found]
    assert activations[0] == activations[1] > 0


def test_what_a_trainer_s_script_leaves_out_has_transformers_defaults(tmp_path: Path) -> None:
    beside(tmp_path)
    auto = {"gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    layout = load(
        tmp_path, auto, "deepspeed --num_nodes 1 --num_gpus 8 run_clm.py --deepspeed run.json --logging_steps 5"
    ).layout
    assert (layout["micro_batch_size"], layout["num_micro_batches"]) == (8, 1)
    with pytest.raises(InputError, match="gradient_accumulation_steps is 4; it must be 1, as its script has it, or by default"):
        load(tmp_path, auto | {"gradient_accumulation_steps": 4}, TRAINER)


@pytest.mark.parametrize(
    "argument",
    ["--label_smoothing_factor 0.1", "--config_overrides n_embd=1", "--torch_compile", "--use_liger_kernel True"],
)
def test_arguments_of_a_trainer_that_change_a_step_are_refused(argument: str, tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    with pytest.raises(InputError, match=f"{argument.split()[0]} of run_clm.py is not modelled"):
        load(tmp_path, settings, f"{TRAINER} {argument}")
    off = (
        f"{TRAINER} --torch_compile False --learning_rate 1e-5 --dataset_name x --max_steps 10 --output_dir y --tf32 True "
        "--evaluation_strategy no --per_device_eval_batch_size 4"
    )
    assert load(tmp_path, settings, off).layout["num_micro_batches"] == 1


@pytest.mark.parametrize(
    ("argument", "meant"),
    [("--max_seq_length 8192", ""), ("--learning_rte 1e-5", " (did you mean '--learning_rate'?)"), ("--packing True", "")],
)
def test_arguments_that_a_trainer_s_program_does_not_have_are_refused(argument: str, meant: str, tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    with pytest.raises(InputError) as error:
        load(tmp_path, settings, f"{TRAINER} {argument}")
    assert str(error.value) == f"{tmp_path}/run.sh: run_clm.py has no argument {argument.split()[0]}{meant}"
    (tmp_path / "run.sh").rename(tmp_path / "train.sh")
    with pytest.raises(InputError, match="train.sh: run_clm.py has no argument"):
        load_run_config(tmp_path / "train.sh")


def test_a_sequence_that_the_script_leaves_out_is_said(tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    assert not any("--block_size" in note for note in load(tmp_path, settings, TRAINER).notes)
    config = load(tmp_path, settings, TRAINER.replace("--block_size 1024", ""))
    assert "seq_len" in config.assumed and any("no --block_size" in note for note in config.notes)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("stage3_param_persistence_threshold", 1e12, "at most 1e.06"),
        ("stage3_max_live_parameters", 0, "at least 1e.08"),
        ("stage3_prefetch_bucket_size", 0, "at least 1e.06"),
    ],
)
def test_thresholds_of_zero_3_that_change_what_is_gathered_are_refused(
    key: str, value: float, wanted: str, tmp_path: Path
) -> None:
    beside(tmp_path)
    for stated, refused in ((value, True), ("auto", False), (2e8 if "max" in key else 1e6, False)):
        settings = {"zero_optimization": {"stage": 3, key: stated}, "bf16": {"enabled": True}}
        if refused:
            with pytest.raises(InputError, match=f"{key} is .*; it must be {wanted}, because"):
                load(tmp_path, settings, TRAINER)
        else:
            assert load(tmp_path, settings, TRAINER).layout["zero"] == 3


def test_a_host_s_optimizer_without_states_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="offload_optimizer is missing; it must be .* beside --cpu-optimizer of its script"):
        load(tmp_path, EXAMPLE, SCRIPT.replace("--bf16", "--bf16 --cpu-optimizer"))


@pytest.mark.parametrize(
    ("switch", "precision"), [("--bf16 True", "bf16"), ("--fp16", "fp16"), ("--bf16 False", "fp32"), ("", "fp32")]
)
def test_a_trainer_fills_in_the_precision(switch: str, precision: str, tmp_path: Path) -> None:
    beside(tmp_path)
    auto = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    script = TRAINER.replace("run_clm.py", f"run_clm.py {switch}", 1)
    assert load(tmp_path, auto, script).layout["precision"] == precision
    with pytest.raises(InputError, match="--bf16 and --fp16 exclude each other"):
        load(tmp_path, auto, TRAINER.replace("run_clm.py", "run_clm.py --bf16 --fp16", 1))


def test_without_a_script_ranks_and_sequence_are_open(tmp_path: Path) -> None:
    beside(tmp_path)
    config = load(tmp_path, {key: value for key, value in EXAMPLE.items() if key != "train_batch_size"}, "")
    assert config.assumed == ("num_micro_batches", "seq_len", "world_size") and config.layout["zero_shard_size"] == -1
    # a whole batch of 32 in micro batches of 4 and 2 steps is that of 4 ranks; in one of 3 of none
    batch = EXAMPLE | {"gradient_accumulation_steps": 2}
    assert (load(tmp_path, batch, "").layout["world_size"], load(tmp_path, batch, "").layout["attention"]) == (4, "flash")
    with pytest.raises(InputError, match="train_batch_size is 32; it must be a multiple of .*, 12"):
        load(tmp_path, EXAMPLE | {"gradient_accumulation_steps": 3}, "")
    with pytest.raises(InputError, match="train_batch_size is 32; it must be beside .* the script that says the ranks"):
        load(tmp_path, EXAMPLE, "")


@pytest.mark.parametrize(
    ("argument", "fields"),
    [
        ("--gradient_checkpointing", {"recompute": "full"}),
        ("--gradient_checkpointing False", {"recompute": "none"}),
        ("--bf16", {}),
    ],
)
def test_what_a_trainer_s_arguments_mean(argument: str, fields: dict[str, Any], tmp_path: Path) -> None:
    beside(tmp_path)
    found = load(
        tmp_path, EXAMPLE | {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3}, f"{TRAINER} {argument} --seed 1"
    )
    assert fields.items() <= found.layout.items() and found.layout["attention"] == "flash" and "--seed" in found.ignored


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--fp16", "--fp16 contradicts the settings, whose precision is bf16"),
        ("--optim adafactor", "--optim 'adafactor' is not modelled"),
        ("--gradient_checkpointing maybe", "--gradient_checkpointing is 'maybe'; it must be True or False"),
    ],
)
def test_a_trainer_s_arguments_that_are_refused(argument: str, sentence: str, tmp_path: Path) -> None:
    beside(tmp_path)
    with pytest.raises(InputError, match=re.escape(sentence)):
        load(tmp_path, EXAMPLE | {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 3}, f"{TRAINER} {argument}")


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, {"overlap_grad_reduce": True}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"grad_dtype": "fp32"}),
        ({"bf16": {"enabled": False}}, {"precision": "fp32", "grad_dtype": "fp32"}),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, {"num_micro_batches": 4}),
    ],
)
def test_what_a_key_means(change: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    assert fields.items() <= load(tmp_path, EXAMPLE | change).layout.items()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"zero_optimisation": {}}, "there is no section or setting 'zero_optimisation' (did you mean 'zero_optimization'?)"),
        ({"zero_optimization": {"stages": 1}}, "zero_optimization has no key 'stages' (did you mean 'stage'?)"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 4; it must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2}}, "--zero-stage is 1; run.json has stage 2"),
        ({"zero_optimization": {"stage": 1, "reduce_bucket_size": 1000}}, "because what small buckets take is not modelled"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.stage is 1; it must be 2 or 3 beside offload_optimizer",
        ),
        ({"optimizer": {"type": "Lion"}}, "because another optimizer is not modelled"),
        ({"communication_data_type": "fp32"}, "because a reduction in other numbers than the passes' is not modelled"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "because checkpoints on the host is not modelled"),
        (
            {"zero_optimization": {"stage": 1, "reduce_scatter": False}},
            "because an all-reduce of all gradients is not modelled",
        ),
        ({"fp16": {"enabled": True}}, "fp16.enabled is True; it must be False beside bf16"),
        (
            {"bf16": {"enabled": "auto"}},
            "it must be true or false, because no script of run_clm.py beside it says what the trainer fills in",
        ),
        ({"train_micro_batch_size_per_gpu": 2}, "train_micro_batch_size_per_gpu is 2; it must be 4, as its script has it"),
        (
            {"train_batch_size": 40, "gradient_accumulation_steps": 4},
            "train_batch_size is 40; it must be the micro batch times",
        ),
    ],
)
def test_what_is_refused_when_reading(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refused:
        load(tmp_path, EXAMPLE | change)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("--nnodes 1", "--nnodes $N", "must say the number of GPUs, as numbers"),
        ("pretrain_gpt.py", "train.py", "neither pretrain_gpt.py of Megatron-DeepSpeed nor run_clm.py of transformers in it"),
        ("--optimizer adam", "--optimizer sgd", "sgd"),
        ("--num-layers 24", "--moe-layers 24", "Megatron's --moe-layers is not known here"),
        (
            "--global-batch-size 32",
            "--global-batch-size many",
            "global-batch-size is 'many'; it must be a positive whole number",
        ),
    ],
)
def test_scripts_that_are_refused(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in SCRIPT
    with pytest.raises(InputError) as refused:
        load(tmp_path, EXAMPLE, SCRIPT.replace(old, new))
    assert sentence in str(refused.value)


def test_a_script_may_have_another_name(tmp_path: Path) -> None:
    expected = load(tmp_path, EXAMPLE).layout
    (tmp_path / "run.sh").rename(tmp_path / "launch.sh")
    assert load_run_config(tmp_path / "launch.sh").layout == expected


def test_a_script_names_its_settings(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="run.sh: other.json, which it names, is not there: put it beside the script"):
        load(tmp_path, EXAMPLE, SCRIPT.replace("run.json", "other.json"), "run.sh")
    with pytest.raises(InputError, match="it must name DeepSpeed's settings, --deepspeed_config NAME.json, beside the script"):
        load(tmp_path, EXAMPLE, SCRIPT.replace("--deepspeed_config=run.json", ""), "run.sh")


def test_a_script_may_write_its_settings(tmp_path: Path) -> None:
    """As the examples of Megatron-DeepSpeed do: a here-document with the script's own variables."""
    expected = load(tmp_path, EXAMPLE).layout
    (tmp_path / "run.json").unlink()
    settings = json.dumps(EXAMPLE, indent=1).replace('"stage": 1', '"stage": $ZERO').replace(" 32,", " ${GLOBAL},")
    script = SCRIPT.replace("run.json", "$CONFIG")
    head = "ZERO=1\nGLOBAL=32\nCONFIG=./settings.$SLURM_JOB_ID.json\n"
    script = script.replace("--save ./tmp", "--save ${WHERE}/checkpoints --tensorboard-dir $LOGS")  # which decide nothing
    path = tmp_path / "launch.sh"
    for write in ("cat <<EOT > $CONFIG", "cat > $CONFIG << EOT", "tee $CONFIG <<EOT"):
        path.write_text(f"{head}{write}\n{settings}\nEOT\n{script}")
        config = load_run_config(path)
        assert config.layout == expected and config.model.name == "launch"
    path.write_text(f"{head}cat <<'EOT' > $CONFIG\n{settings}\nEOT\n{script}")
    with pytest.raises(InputError, match=r"launch.sh: \$\{GLOBAL\} in ./settings.\$SLURM_JOB_ID.json, which it writes, is not"):
        load_run_config(path)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"cp": 2, "dp": 8, "zero_shard_size": 8}, "cp 2: context parallelism under DeepSpeed is not modelled"),
        ({"zero_shard_size": 8}, "zero_shard_size 8: DeepSpeed's ZeRO shards over all 16 data-parallel ranks"),
        ({"pp": 2, "dp": 8, "zero": 2, "zero_shard_size": 8}, "zero 2: DeepSpeed's pipeline engine runs ZeRO-0 and 1"),
        ({"pp": 2, "dp": 8, "zero_shard_size": 8, "vpp": 2, "schedule": "interleaved"}, "schedule interleaved: DeepSpeed's"),
        ({"recompute": "full", "recompute_layers": 2}, "recompute_layers 2: Megatron-DeepSpeed recomputes all layers or none"),
        ({"precision": "fp8"}, "precision fp8: DeepSpeed trains in fp32, bf16 and fp16"),
        ({"compile": True}, "unfused norms, or torch.compile: not among the arguments"),
        ({"cuda_graphs": True}, "cuda_graphs: Megatron-DeepSpeed has none"),
        (
            {"zero": 3, "overlap_param_gather": False},
            "overlap_param_gather false: DeepSpeed gathers the weights of ZeRO-3 ahead",
        ),
        ({"gradient_accumulation_fusion": True}, "gradient_accumulation_fusion True: DeepSpeed's JSON has no place for it"),
    ],
)
def test_what_is_refused_when_writing(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        exported(Path("run.json"), model_of("llama3_8b"), RUN.replace(**changes), 8)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mixtral_8x7b", "mixtures of experts under DeepSpeed are not modelled"),
        ("qwen3_8b", "Megatron-DeepSpeed has no norms of q and k"),
        ("qwen2_7b", "Megatron-DeepSpeed has biases in all linears or in none"),
    ],
)
def test_models_that_megatron_deepspeed_has_not(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        exported(Path("run.json"), model_of(name), RUN, 8)


def test_two_files_are_written(tmp_path: Path) -> None:
    written = write_export(tmp_path / "a.json", model_of("llama3_8b"), RUN, 8)
    assert [path.name for path in written] == ["a.json", "a.sh"]
    settings = json.loads(written[0].read_text())
    assert settings["train_batch_size"] == 16 and settings["zero_optimization"]["stage"] == 1
    assert load_run_config(written[1]).layout == load_run_config(written[0]).layout


def test_the_command_writes_and_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    path = str(tmp_path / "best.json")
    searched = "--run_all_solu --model_size llama3_8b --world_size 16 --framework deepspeed --top 1 --fix recompute=none,zero=1"
    out = command(*searched.split(), "--global_batch_size", "1048576", "--export", path)
    assert f"wrote {path}" in out and f"wrote {tmp_path}/best.sh" in out
    assert "tokens/GPU/s" in command("--config", path)


def test_megatron_deepspeeds_own_arguments(tmp_path: Path) -> None:
    old = "--use-rotary-position-embeddings"
    bloom = "--position-embedding-type alibi --embed-layernorm --pad-vocab-size-to 32128 --lr-decay-tokens 1000 --num-experts 1"
    config = load(tmp_path, EXAMPLE, SCRIPT.replace(old, bloom))
    model = config.model
    assert (model.position, model.embedding_norm, model.padded_vocab_size, model.is_mixture_of_experts) == (
        "alibi",
        True,
        32128,
        False,
    )
    for argument, what in (
        ("--num-experts 128", "mixtures of experts of DeepSpeed"),
        ("--ds-sequence-parallel-size 2", "sequence parallelism of DeepSpeed"),
        ("--pp-partition-method parameters", "another assignment of layers to stages"),
        ("--partition-activations", "checkpoints that ranks share"),
    ):
        with pytest.raises(InputError, match=f"{argument.split()[0]} .*: not modelled, because it means {what}"):
            load(tmp_path, EXAMPLE, SCRIPT.replace(old, argument))


def test_embeddings_that_count_as_layers_as_bloom_s_do(tmp_path: Path) -> None:
    """22 layers and the two ends of one embedding are 24 in 4 stages: 5, 6, 6, 5."""
    flags = "--pp-partition-method 'type:transformer|embedding' --num-layers 22 --pipeline-model-parallel-size 4 "
    data = "--train-weighted-split-paths-path $HERE/train.txt --valid-num-workers 0 --pad-vocab-size-to 32256"
    script = SCRIPT.replace("--num-layers 24", flags + data).replace("--pipeline-model-parallel-size 2 ", "")
    script = script.replace("--untie-embeddings-and-output-weights", "").replace("--vocab-size 32000", "")
    config = load(tmp_path, EXAMPLE | {"zero_optimization": {"stage": 1}}, script)
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    assert [config.layout[key] for key in ("pp", *ends)] == [4, 5, 5]
    assert config.model.padded_vocab_size == 32256
    for change in (("--num-layers 22", "--num-layers 24"), ("--swiglu", "--swiglu --untie-embeddings-and-output-weights")):
        with pytest.raises(InputError, match="is modelled where the layers and the two ends of one embedding divide"):
            load(tmp_path, EXAMPLE, script.replace(*change))


def test_buckets_of_another_size_are_said(tmp_path: Path) -> None:
    def notes(size: float | str, script: str = SCRIPT) -> str:
        return "; ".join(
            load(tmp_path, EXAMPLE | {"zero_optimization": {"stage": 1, "reduce_bucket_size": size}}, script).notes
        )

    left = "left out of the estimate: buckets of 200,000,000 parameters, 0.37 GiB each; buckets of DeepSpeed's 500,000,000"
    assert left in notes(2e8) and "buckets" not in notes(5e8) and "buckets" not in notes("auto")
    beside(tmp_path)
    trainer = TRAINER.replace("--per_device_train_batch_size 3", "--per_device_train_batch_size 2 --bf16")
    settings = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2}
    for size, said in ((5e8, True), ("auto", False)):
        found = load(tmp_path, settings | {"zero_optimization": {"stage": 2, "reduce_bucket_size": size}}, trainer)
        taken = "buckets as transformers' trainer fills in for auto are taken"
        assert any(line.endswith(taken) for line in found.notes) is said


def test_fields_of_zero_3_by_either_name(tmp_path: Path) -> None:
    for prefix in ("", "stage3_"):
        zero = {
            "stage": 3,
            f"{prefix}max_live_parameters": 1e9,
            f"{prefix}prefetch_bucket_size": 5e7,
            "offload_optimizer": {"device": "none", "pipeline_read": False},
        }
        settings = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True}}
        beside(tmp_path)
        assert load(tmp_path, {**settings, "zero_optimization": zero}, "").layout["zero"] == 3
        zero[f"{prefix}max_live_parameters"] = 1e7
        with pytest.raises(InputError, match="stage3_max_live_parameters is 10000000.0; it must be at least 1e"):
            load(tmp_path, {**settings, "zero_optimization": zero}, "")
    with pytest.raises(InputError, match="curriculum_learning.enabled.*sequences that grow during training"):
        load(tmp_path, {**settings, "curriculum_learning": {"enabled": True}}, "")


def test_llama_factory_recomputes_unless_it_is_told_not_to(tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto"}
    script = "deepspeed --num_gpus 8 src/train.py --deepspeed run.json --stage sft --cutoff_len 1024 --output_dir out"
    for more, recompute in (
        ("", "full"),
        (" --disable_gradient_checkpointing True", "none"),
        (" --gradient_checkpointing False", "none"),
    ):
        assert load(tmp_path, settings, script + more).layout.get("recompute", "none") == recompute


@pytest.mark.parametrize(
    ("lines", "command", "ranks"),
    [
        ("--nodes=1 --ntasks-per-node=1 --gpus-per-node=8", "deepspeed", 8),
        ("--ntasks=16 --gres=gpu:a100:8", "deepspeed", 8),  # 16 tasks are cores: the launcher starts a rank on each GPU
        ("--nodes=2 --gpus-per-node=a100:4 --ntasks-per-node=1", "deepspeed --hostfile made_later", 8),
        ("--gres=gpu:8", "deepspeed --include localhost:0,1,2,3", 4),
        ("--gres=gpu:8", "CUDA_VISIBLE_DEVICES=0,1 deepspeed", 2),
        ("", "deepspeed --hostfile hosts", 16),
        ("", "deepspeed --hostfile hosts --num_gpus 4", 8),  # of each host
        ("", "deepspeed --hostfile hosts --num_nodes 1", 8),
        ("", "deepspeed --hostfile hosts --include b:0,2", 2),
    ],
)
def test_the_ranks_that_deepspeeds_launcher_starts(tmp_path: Path, lines: str, command: str, ranks: int) -> None:
    beside(tmp_path)
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto"}
    script = f"#!/bin/bash\n#SBATCH {lines}\n{command} run_clm.py --deepspeed run.json --block_size 1024 --bf16\n"
    found = load(tmp_path, settings, script)
    assert found.layout["world_size"] == ranks
    assert any("GPUs of type a100: --profile says" in note for note in found.notes) == ("a100" in lines)


def test_hosts_with_other_numbers_of_gpus_are_refused(tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto"}
    with pytest.raises(InputError, match="other numbers of GPUs on some hosts"):
        load(tmp_path, settings, "deepspeed --include a:0,1@b:0 run_clm.py --deepspeed run.json --block_size 1024 --bf16")


def test_settings_in_the_script_s_own_folder(tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto"}
    script = "deepspeed --num_gpus 8 run_clm.py --deepspeed ${PWD}/run.json --block_size 1024 --bf16"
    assert load(tmp_path, settings, script, "run.sh").layout["world_size"] == 8


def test_timers_of_deepspeed_are_left_out_and_said(tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": False},
    }
    assert "left out, although it may change times: comms_logger, wall_clock_breakdown" in load(tmp_path, settings, "").notes


def test_the_script_s_own_defaults_are_said(tmp_path: Path) -> None:
    beside(tmp_path)
    settings = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto"}
    script = "deepspeed --num_gpus ${NGPU:-8} run_clm.py --deepspeed run.json --block_size ${SEQ:-1024} --bf16"
    notes = load(tmp_path, settings, script).notes
    assert any("NGPU is 8; SEQ is 1024" in note for note in notes)
