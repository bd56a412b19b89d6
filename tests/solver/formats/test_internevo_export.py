"""Layouts as InternEvo's configuration files: read back they are the same, and what InternEvo does not run is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from round_trip import assert_same_estimate, layouts_of, model_of, round_trips

from profiler.errors import InputError
from solver.commands.command_line import main
from solver.formats.config_file import load_run_config
from solver.formats.export import exported, write_export
from solver.formats.syntax.literal_python import read_assignments
from solver.spec.strategy import Strategy

RUN = Strategy(
    world_size=16,
    seq_len=4096,
    dp=16,
    zero_shard_size=16,
    cross_entropy_fusion=True,
    framework="internevo-2024",
    expandable_segments=True,  # which its train.py turns on
)


@pytest.mark.parametrize("name", ["llama3_8b", "llama2_13b", "mistral_nemo_12b"])
@pytest.mark.parametrize("constants", [{}, {"precision": "fp16", "grad_dtype": "fp16", "overlap_param_gather": False}])
def test_hundreds_of_layouts_come_back(name: str, constants: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(name)
    runs = layouts_of(model, "internevo-2024", 40, **constants)
    came, refused = round_trips(model, runs, ".py", tmp_path)
    assert came == 40 and not refused
    assert_same_estimate(model, runs[:6])


def test_the_file_states_everything_that_the_layout_decides(tmp_path: Path) -> None:
    run = RUN.replace(
        tp=4,
        cp=2,
        dp=1,
        pp=2,
        tp_mode="isp",
        wp=2,
        vpp=2,
        schedule="interleaved",
        zero_shard_size=2,
        recompute="full",
        recompute_layers=8,
        micro_batch_size=2,
        num_micro_batches=4,
        p2p_overlap=True,
        overlap_weight_gather=False,
    )
    (path,) = write_export(tmp_path / "run.py", model_of("llama3_8b"), run, 8)
    stated = read_assignments(path.read_text(), "run.py").values
    assert stated["parallel"] == {
        "zero1": {"size": 2, "fsdp": False},
        "tensor": {"size": 8, "mode": "isp"},
        "pipeline": {"size": 2, "interleaved_overlap": True, "mode": "1f1b"},
        "weight": {"size": 2, "overlap": False, "memory_pool": True},
        "sequence_2D": {
            "enable": True,
            "head_size": 4,
            "context_size": 2,
            "window_size": 1,
            "device_placement_strategy": {"head_first": True, "interleaved": False},
        },
    }
    model, data = stated["model"], stated["data"]
    assert (model["checkpoint"], model["num_chunks"], model["dtype"]) == ((4 + 0.5) / 8, 2, "torch.bfloat16")
    assert model["multiple_of"] * -(-int(4096 * model["mlp_ratio"]) // model["multiple_of"]) == 14336
    assert (data["seq_len"], data["micro_num"], data["micro_bsz"]) == (4096, 4, 2)
    assert "for InternEvo after 0.5.2" in path.read_text() and "--nnodes 2 --nproc-per-node 8" in path.read_text()
    assert load_run_config(path).assumed == ()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"recompute": "selective"}, "recompute selective: InternEvo recomputes whole layers"),
        ({"tp": 2, "cp": 2, "dp": 4, "tp_mode": "msp", "zero_shard_size": 8}, "cp 2 with tp_mode msp: InternEvo's sequence_2D"),
        ({"precision": "fp8"}, "precision fp8: InternEvo trains in bf16 or fp16"),
        ({"grad_dtype": "fp32"}, "grad_dtype fp32: InternEvo's gradients have the parameters' bf16"),
        ({"pp": 2, "dp": 8, "zero": 3, "zero_shard_size": 8}, "does not combine fsdp with isp or a pipeline"),
        ({"pp": 2, "dp": 8, "schedule": "gpipe"}, "schedule gpipe: InternEvo runs 1f1b, interleaved, zb-h1"),
        ({"zero": 2}, "zero 2: InternEvo's configuration has no place for it (it would mean 1)"),
        ({"tp_comm_overlap": True, "tp": 2, "dp": 8, "zero_shard_size": 8}, "tp_comm_overlap True: InternEvo's configuration"),
        ({"fused_norm": False}, "fused_norm False: InternEvo's configuration has no place for it"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        exported(Path("run.py"), model_of("llama3_8b"), RUN.replace(**changes), 8)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("mixtral_8x7b", "mixtures of experts under InternEvo are not modelled"),
        ("gpt3_175b", "InternEvo's configuration has no place for"),
    ],
)
def test_models_that_its_sections_do_not_describe(name: str, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        exported(Path("run.py"), model_of(name), RUN, 8)
    assert sentence in str(refused.value)


def test_biases_of_queries_keys_and_values_alone_are_qwen2_s(tmp_path: Path) -> None:
    """Its configs/7B_qwen2.py states qkv_bias and o_bias, and no no_bias."""
    model = model_of("qwen2_7b")
    (text,) = exported(Path("run.py"), model, RUN, 8).values()
    assert "model_type = 'QWEN2'" in text and "qkv_bias=True" in text and "o_bias=False" in text and "no_bias=" not in text
    path = tmp_path / "run.py"
    path.write_text(text)
    read = load_run_config(path).model
    assert (read.qkv_bias, read.output_bias, read.mlp_bias) == (True, False, False)


def test_the_command_writes_and_reads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*words: str) -> str:
        assert main(words) == 0
        return capsys.readouterr().out

    path = str(tmp_path / "best.py")
    searched = "--run_all_solu --model_size 7 --world_size 16 --top 1 --fix cp=1,recompute=none --global_batch_size 1048576"
    assert f"wrote {path}" in command(*searched.split(), "--export", path)
    assert "tokens/GPU/s" in command("--config", path, "--world_size", "16")
