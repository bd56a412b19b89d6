"""What a launch says beside its arguments: the ranks of a node, and variables of the environment."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from profiler.errors import InputError
from solver.api import load_problem
from solver.formats.config_file import RunConfig, load_run_config

ARGUMENTS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    "--micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --tensor-model-parallel-size 2"
)


def megatron(
    tmp_path: Path, launch: str = "--nnodes 8 --nproc-per-node 4", before: str = "", more: str = "--bf16"
) -> RunConfig:
    path = tmp_path / "train.sh"
    path.write_text(f"{before}\ntorchrun {launch} pretrain_gpt.py {ARGUMENTS} {more}\n")
    return load_run_config(path)


@pytest.mark.parametrize(
    ("launch", "stated", "per_node"),
    [("--nnodes 8 --nproc-per-node 4", 4, 4), ("--nnodes 4 --nproc-per-node 8", 8, 8), ("--nnodes 1 --nproc-per-node 4", 0, 8)],
)
def test_ranks_fill_the_nodes_as_they_are_launched(launch: str, stated: int, per_node: int, tmp_path: Path) -> None:
    config = megatron(tmp_path, launch)
    world = config.layout["world_size"]
    assert config.gpus_per_node == stated
    assert load_problem(config, world, profile="h100_sxm").cluster.gpus_per_node == per_node
    described = load_problem(config, world, profile="h100_sxm", cluster={"gpus_per_node": 2})
    assert described.cluster.gpus_per_node == 2, "what the user describes holds"


def test_more_ranks_than_a_node_has_gpus_are_refused(tmp_path: Path) -> None:
    config = megatron(tmp_path, "--nnodes 2 --nproc-per-node 2")
    config = replace(config, gpus_per_node=12)
    with pytest.raises(
        InputError, match="it launches 12 ranks on a node, and NVIDIA H100 SXM 80GB has 8 GPUs a node; state another"
    ):
        load_problem(config, 24, profile="h100_sxm")
    assert load_problem(config, 24, profile="h100_sxm", cluster={"gpus_per_node": 12}).cluster.gpus_per_node == 12


def test_a_node_s_ranks_fill_several_of_smaller_nodes(tmp_path: Path) -> None:
    config = megatron(tmp_path, "--nnodes 2 --nproc-per-node 8")
    found = load_problem(config, 16, profile="gb200").cluster
    assert (found.gpus_per_node, found.for_world(16).gpus_per_domain) == (4, 16)


def test_accelerate_s_machines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path("configs/models/llama3_8b.json").read_text())
    text = "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\nnum_machines: 4\n"
    (tmp_path / "run.yaml").write_text(text)
    assert load_run_config(tmp_path / "run.yaml").gpus_per_node == 4


def test_variables_of_a_script(tmp_path: Path) -> None:
    config = megatron(tmp_path, before="export CUDA_LAUNCH_BLOCKING=1\nexport NCCL_P2P_DISABLE=1 NCCL_DEBUG=WARN")
    assert config.layout["launch_blocking"] is True and config.layout["collective_checks"] is None
    assert config.notes[-1] == "left out, although it may change times: NCCL_P2P_DISABLE=1"
    tree = megatron(tmp_path, before="export NCCL_ALGO=Tree NVTE_ALLOW_NONDETERMINISTIC_ALGO=0")
    assert tree.notes[-1].endswith("may change times: NCCL_ALGO=Tree, NVTE_ALLOW_NONDETERMINISTIC_ALGO=0")
    assert megatron(tmp_path, before="export CUDA_LAUNCH_BLOCKING=0").layout["launch_blocking"] is False
    allocator = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:512"
    assert megatron(tmp_path, before=allocator).layout["expandable_segments"] is True
    assert config.layout["expandable_segments"] is False
    for word, checks in (("DETAIL", True), ("INFO", None)):
        assert megatron(tmp_path, before=f"export TORCH_DISTRIBUTED_DEBUG={word}").layout["collective_checks"] is checks


def test_deepspeed_s_script_says_them_too(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}))
    (tmp_path / "run.sh").write_text(
        f"export CUDA_LAUNCH_BLOCKING=1\ntorchrun --nnodes 4 --nproc-per-node 4 pretrain_gpt.py {ARGUMENTS} --bf16 "
        "--squared-relu --deepspeed --deepspeed_config run.json --zero-stage 1"
    )
    config = load_run_config(tmp_path / "run.json")
    assert config.layout["launch_blocking"] is True and config.gpus_per_node == 4
    assert any("squared ReLU" in note for note in config.notes), "what Megatron's reader leaves out is said"


@pytest.mark.parametrize(
    ("before", "more", "refused"),
    [
        ("export NVTE_FLASH_ATTN=0", "--bf16", True),
        ("export NVTE_FLASH_ATTN=1", "--bf16", False),
        ("export NVTE_FLASH_ATTN=0 NVTE_FUSED_ATTN=0", "--bf16 --attention-backend unfused", False),
    ],
)
def test_the_backend_of_attention_is_that_of_the_arguments(before: str, more: str, refused: bool, tmp_path: Path) -> None:
    notes = " ".join(megatron(tmp_path, before=before, more=more).notes)
    assert ("refuse this run: NVTE_FLASH_ATTN" in notes) == refused


def test_32_bits_have_no_fused_attention(tmp_path: Path) -> None:
    config = megatron(tmp_path, more="")
    assert (config.layout["precision"], config.layout["attention"]) == ("fp32", "unfused")
    notes = " ".join(megatron(tmp_path, more="--attention-backend flash").notes)
    assert "refuse this run: --attention-backend flash and fused, and --use-flash-attn, need --bf16 or --fp16" in notes


def test_a_local_implementation_has_no_flash_attention_whatever_is_asked(tmp_path: Path) -> None:
    config = megatron(tmp_path, more="--bf16 --transformer-impl local --use-flash-attn")
    assert config.layout["attention"] == "unfused"
    assert any(note.startswith("--use-flash-attn changes nothing") for note in config.notes)
    assert megatron(tmp_path, more="--bf16 --use-flash-attn").layout["attention"] == "flash"


@pytest.mark.parametrize("ending", [".sbatch", ".slurm", ".bash"])
def test_other_endings_of_a_shell_script(ending: str, tmp_path: Path) -> None:
    plain = megatron(tmp_path)
    path = tmp_path / f"train{ending}"
    path.write_text((tmp_path / "train.sh").read_text())
    assert load_run_config(path).layout == plain.layout


def test_ranks_of_a_node_as_cray_pals_has_them(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"mpiexec -n 16 --ppn 4 python pretrain_gpt.py {ARGUMENTS} --bf16\n")
    config = load_run_config(path)
    assert (config.layout["world_size"], config.gpus_per_node) == (16, 4)


def test_the_gpus_that_slurm_is_asked_for_are_said(tmp_path: Path) -> None:
    for request, said in (("--gres=gpu:a100:4", True), ("--gpus-per-node=h200:8", True), ("--gres=gpu:8", False)):
        config = megatron(tmp_path, before=f"#SBATCH {request}")
        assert any("GPUs of type" in note for note in config.notes) == said, request


@pytest.mark.parametrize(
    ("launch", "sentence"),
    [
        (
            'CONFIG=${CONFIG:-"a.toml"}\ntorchrun --nproc_per_node=8 -m torchtitan.train --job.config_file ${CONFIG} $@',
            "it starts torchtitan with a.toml: give that file to --config, with --world_size",
        ),
        ("srun torchrun --nproc_per_node 8 run_train.py --config-file tiny.yaml", "it starts nanotron with tiny.yaml"),
        (
            "srun -n 64 python train.py --config configs/7B_sft.py --launcher slurm",
            "InternEvo with configs/7B_sft.py",
        ),
        ("torchrun --nproc_per_node 8 train.py --lr 1", "it launches none of the programs that are read"),
    ],
)
def test_scripts_of_which_only_the_settings_are_read_name_them(launch: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{launch}\n")
    with pytest.raises(InputError) as refused:
        load_run_config(path)
    assert sentence in str(refused.value)
