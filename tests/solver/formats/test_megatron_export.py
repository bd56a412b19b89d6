"""Layouts as arguments of Megatron-LM: read back they are the same layout of the same model, for a thousand of them."""

from __future__ import annotations

import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from round_trip import EVERY_FORMAT
from toy import make_problem, some_layouts

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.commands.command_line import main
from solver.formats.cases.reading import case_of
from solver.formats.config_file import load_run_config
from solver.formats.megatron.export import megatron_arguments, megatron_files, shell_command
from solver.spec.layer_kinds import layer_kinds
from solver.spec.model import ModelSpec
from solver.spec.model_size import parameters
from solver.spec.strategy import Strategy

#: What a run has that Megatron's arguments do not say, or say for another framework's name.
UNSAID = {
    "framework",
    "p2p_overlap",
    "dropout",
    "overlap_weight_gather",
    "fused_norm",
    "gradient_accumulation_fusion",
    "attention",
}
MODELS = ("llama3_8b", "mixtral_8x7b", "deepseek_v3", "qwen3_30b_a3b", "llama2_13b")
CONSTANTS: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "precision": "fp8",
        "fp8_recipe": "blockwise",
        "cp_comm": "a2a",
        "optimizer_states": "bf16",
        "cuda_graphs": True,
        "cuda_graph_modules": "attn+mlp",
        "num_layers_at_end_in_bf16": 2,
    },
    "mixtral_8x7b": {
        "precision": "bf16",
        "recompute_modules": "layernorm+moe_act",
        "grad_dtype": "fp32",
        "moe_capacity_factor": 1.25,
        "optimizer": "muon",
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
    },
    "deepseek_v3": {
        "precision": "mxfp8",
        "moe_dispatcher": "hybridep",
        "recompute_modules": "mla_up_proj",
        "cuda_graphs": True,
        "moe_exchange_overlap": True,
        "delay_wgrad_compute": True,
    },
    "qwen3_30b_a3b": {
        "precision": "bf16",
        "moe_dispatcher": "deepep",
        "cp_comm": "a2a+ring",
        "cp_a2a_size": 2,
        "defer_embedding_wgrad_compute": True,
        "wgrad_deferral_limit": 16,
        "optimizer_states": "remainder",
    },
    "llama2_13b": {
        "precision": "fp16",
        "overlap_param_gather": False,
        "attention": "unfused",
        "cross_entropy_fusion": True,
        "recompute_group": 2,
    },
}


def model_of(name: str) -> ModelSpec:
    return load_run_config(f"configs/models/{name}.json").model


def read_back(flags: dict[str, Any], world: int) -> Any:
    return case_of(
        {"id": "X-1", "hardware": "h100_sxm", "model": {}, "measured": {}, "run": {"world_size": world}, "megatron_args": flags}
    )


@pytest.mark.parametrize("name", MODELS)
def test_two_hundred_layouts_of_each_model_come_back(name: str) -> None:
    model = model_of(name)
    constants = {"grad_dtype": "fp32", "cross_entropy_fusion": True, **CONSTANTS[name]}
    problem = make_problem(model, 256, EVERY_FORMAT, 4096, framework="megatron-core", **constants)
    layouts = some_layouts(problem, 1024, 200, seed=5)
    assert len(layouts) == 200
    for index in range(len(layouts)):
        run = layouts.strategy(index, problem.run)
        case = read_back(megatron_arguments(model, run), 256)
        assert case.skipped is None, case.skipped
        for field in fields(Strategy):
            same = ("zero_shard_size",) if run.zero == 0 else ()
            same += ("zero",) if run.dp * run.cp == 1 else ()  # of one rank
            same += ("moe_dispatcher",) if run.ep * run.etp == 1 else ()
            unused = (*same, *(("cp_comm", "cp_a2a_size") if run.cp == 1 else ()))
            if field.name in UNSAID or field.name in unused or (field.name == "overlap_param_gather" and run.zero == 0):
                continue
            assert getattr(case.strategy, field.name) == getattr(run, field.name), field.name
        assert parameters(case.model) == parameters(model)
        if index == 0:  # what is computed from the model does not change either
            same_size = ("hidden_size", "num_key_value_heads", "num_experts", "kv_lora_rank", "vocab_size", "qk_norm")
            expected = {key: getattr(model, key) for key in same_size}
            if model.has_latent_attention:
                expected.pop("num_key_value_heads"), expected.pop("qk_norm")
            assert {key: getattr(case.model, key) for key in expected} == expected


LINEAR = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"sliding_window": 4096}, {"--window-size": "4095,0"}),
        (
            {"sliding_window": 1024, "sliding_window_every": 6},
            {"--window-size": "1023,0", "--window-attn-skip-freq": "([1]*5+[0]*1+[1]*5+[0]*1)"},
        ),
        (
            {"sliding_window": 512, "layer_types": ("full_attention",) * 3 + ("sliding_attention",) * 9},
            {"--window-size": "511,0", "--window-attn-skip-freq": "([0]*3+[1]*9)"},
        ),
        ({"no_rope_layers": (1, 1, 1, 0) * 3}, {"--no-rope-freq": "([0]*3+[1]*1+[0]*3+[1]*1+[0]*3+[1]*1)"}),
        ({"attention_sinks": True}, {"--softmax-type": "learnable"}),
        ({"attention_gate": True}, {"--attention-output-gate": True}),
        (
            {"layer_types": (*("linear_attention",) * 3, "full_attention") * 3, **LINEAR},
            {"--experimental-attention-variant": "gated_delta_net", "--linear-attention-freq": 4, "--linear-num-key-heads": 8},
        ),
        (
            {"layer_types": (*("full_attention",) * 2, *("linear_attention",) * 10), **LINEAR},
            {"--linear-attention-freq": "([0]*2+[1]*10)", "--linear-value-head-dim": 64},
        ),
        ({"clamped_gate": True}, {"--quick-geglu": True, "--activation-func-clamp-value": 7.0, "--glu-linear-offset": 1.0}),
    ],
)
def test_kinds_of_layers_come_back(changes: dict[str, Any], flags: dict[str, Any]) -> None:
    run = Strategy(world_size=8, dp=8, seq_len=8192, framework="megatron-core")
    model = model_of("llama3_8b").replace(num_hidden_layers=12, **changes)
    written = megatron_arguments(model, run, kinds=True)
    assert flags.items() <= written.items() and ("--swiglu" in written) != ("--quick-geglu" in written)
    back = read_back(written, 8).model
    kinds = [layer_kinds(one, run.seq_len) for one in (model, back)]
    assert kinds[0].kinds == kinds[1].kinds and list(kinds[0].of_layer) == list(kinds[1].of_layer)
    assert (back.attention_sinks, back.clamped_gate) == (model.attention_sinks, model.clamped_gate)
    assert parameters(back) == parameters(model)
    script = shell_command(model, run, 8)  # whose release is the newest, unless it is an old flag alone
    assert ("for Megatron-Core 0.16" in script) == (flags.keys() != {"--window-size"})
    with pytest.raises(
        InputError, match="windows of attention, sinks, layers without rotary embedding, linear attention, Mamba-2, gates"
    ):
        megatron_arguments(model, run)


def test_yarn_needs_a_newer_megatron() -> None:
    run = Strategy(world_size=8, dp=8, seq_len=4096, framework="megatron-core")
    with pytest.raises(InputError, match="YaRN's factor: not among the arguments of Megatron-Core up to 0.16"):
        megatron_files(model_of("gpt_oss_20b"), run, 8, "run")


def test_fp4_comes_back() -> None:
    run = Strategy(world_size=8, dp=8, seq_len=4096, framework="megatron-core", precision="nvfp4", num_layers_at_end_in_bf16=4)
    written = megatron_arguments(model_of("llama3_8b"), run)
    assert written["--fp4-format"] == "e2m1" and "--fp8-format" not in written
    back = read_back(written, 8).strategy
    assert (back.precision, back.num_layers_at_end_in_bf16, back.grad_dtype) == ("nvfp4", 4, run.grad_dtype)


@pytest.mark.parametrize(("precision", "types"), [("fp16", ("fp16", "fp32")), ("bf16", ("bf16", "fp32"))])
def test_either_type_of_gradients_comes_back(precision: str, types: tuple[str, str]) -> None:
    model, flag = model_of("llama2_13b"), {"fp16": "--accumulate-allreduce-grads-in-fp32", "bf16": "--grad-reduce-in-bf16"}
    run = Strategy(world_size=8, dp=8, seq_len=4096, framework="megatron-core", precision=precision)
    for gradients in types:
        written = megatron_arguments(model, run.replace(grad_dtype=gradients))
        assert read_back(written, 8).strategy.grad_dtype == gradients
        assert (flag[precision] in written) == (gradients == {"fp16": "fp32", "bf16": "bf16"}[precision])


def test_norms_of_q_and_k_come_back() -> None:
    run = Strategy(world_size=8, dp=8, seq_len=4096, framework="megatron-core")
    normed = model_of("llama3_8b").replace(norm="layernorm", qk_norm="head", qk_norm_bias=True)
    assert read_back(megatron_arguments(normed, run), 8).model.qk_norm_bias
    with pytest.raises(InputError, match="norms of q and k of another class than the others"):
        megatron_arguments(normed.replace(qk_norm_bias=False), run)


def test_the_script_has_the_arguments_in_words_a_shell_reads(h100_model: CostModel) -> None:
    model = model_of("deepseek_v3")
    run = make_problem(model, 64, h100_model, 4096, framework="megatron-core", grad_dtype="fp32").layout(
        ep=64, zero=1, zero_shard_size=64, num_micro_batches=2
    )
    text = shell_command(model, run, 8)
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    after = words[words.index("pretrain_gpt.py") + 1 :]
    flags: dict[str, Any] = {}
    for i, word in enumerate(after):
        if word.startswith("--"):
            value = after[i + 1] if i + 1 < len(after) and not after[i + 1].startswith("--") else True
            flags[word] = value
    expected = megatron_arguments(model, run)
    assert {key: value if value is True else str(value) for key, value in expected.items()} == flags
    assert "--nnodes 8 --nproc-per-node 8" in text and "--expert-model-parallel-size 64" in text


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("gemma2_9b", {}, "other norms than two"),
        ("llama4_scout", {}, "chunks of attention"),
        ("llama3_8b", {"framework": "torchtitan"}, "is torchtitan's|torchtitan"),
        ("llama3_8b", {"zero": 3}, "ZeRO-3"),
        ("llama3_8b", {"document_lengths": "1024"}, "packed documents"),
        ("llama3_8b", {"tp": 2, "dp": 4, "tp_mode": "isp"}, "tp_mode isp"),
        ("llama3_8b", {"compile": True}, "torch.compile"),
        ("llama3_8b", {"precision": "fp16", "grad_dtype": "bf16"}, "grad_dtype bf16 of precision fp16: not among"),
        ("llama3_8b", {"precision": "bf16", "grad_dtype": "fp16"}, "grad_dtype fp16 of precision bf16: not among"),
    ],
)
def test_what_the_arguments_do_not_express_is_refused(name: str, changes: dict[str, Any], sentence: str) -> None:
    run = Strategy(world_size=8, dp=8, seq_len=4096, framework="megatron-core").replace(**changes)
    with pytest.raises(InputError, match=sentence):
        megatron_arguments(model_of(name), run)


UNFILLED = """NUM_NODES=1
torchrun --nproc_per_node 8 --nnodes $NUM_NODES pretrain_gpt.py --num-layers 16 --hidden-size 1024 --num-attention-heads 16 \\
  --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16 \\
  --tensor-model-parallel-size 4 --pipeline-model-parallel-size 8
"""


def test_a_script_whose_nodes_are_to_be_filled_in_takes_those_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(UNFILLED)
    config = load_run_config(path)
    assert config.layout["world_size"] == 32 and config.assumed == ("world_size",)
    notes = "\n".join(config.notes)
    assert "it launches 8 GPUs, fewer than its parallel sizes need" in notes
    assert "vocabulary of 50,257 (GPT-2's): neither --vocab-size nor --tokenizer-type is stated" in notes
    path.write_text(UNFILLED.replace("--nnodes $NUM_NODES ", "").replace("size 8\n", "size 2\n"))  # torchrun's own default: 1
    assert load_run_config(path).layout["dp"] == 1 and not load_run_config(path).assumed


def test_the_best_layout_of_a_search_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    words = "--run_all_solu --model_size llama3_8b --world_size 16 --framework megatron-core --top 1"
    assert main([*words.split(), "--export", str(script)]) == 0
    assert f"wrote {script}" in capsys.readouterr().out
    first = script.read_text()
    assert main(["--config", str(script), "--world_size", "16"]) == 0
    shown = capsys.readouterr().out
    assert "tokens/GPU/s" in shown and first.count("--") > 20
    assert main(["--model_size", "llama3_8b", "--world_size", "16", "--framework", "torchtitan", "--export", str(script)]) == 2
    assert "a layout of torchtitan-2026-02 is written as .toml" in capsys.readouterr().err


def test_a_script_s_layout_is_the_layout(tmp_path: Path, h100_model: CostModel) -> None:
    model = model_of("mixtral_8x7b")
    problem = make_problem(model, 64, h100_model, 4096, framework="megatron-core", grad_dtype="fp32", precision="bf16")
    layouts = some_layouts(problem, 512, 12, seed=2)
    for index in range(len(layouts)):
        run, path = layouts.strategy(index, problem.run), tmp_path / f"{index}.sh"
        path.write_text(shell_command(model, run, 8))
        config = load_run_config(path)
        named = {
            "tp",
            "pp",
            "cp",
            "ep",
            "etp",
            "vpp",
            "dp",
            "micro_batch_size",
            "num_micro_batches",
            "recompute",
            "recompute_layers",
            "tp_mode",
            "zero",
            "world_size",
        }
        assert {key: config.layout[key] for key in named} == {key: getattr(run, key) for key in named}
        assert parameters(config.model) == parameters(model) and config.seq_len == 4096


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("torchrun train.py --tp 8", "it launches none of the programs that are read: pretrain_gpt.py"),
        ("pretrain_gpt.py --num-layers $LAYERS", "LAYERS is not known from the script alone"),
        ("torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size two", "is missing|is 'two'"),
        ("python pretrain_gpt.py --num-layers 2", "must say the number of GPUs"),
        ("pretrain_gpt.py --hidden-size 'a", "cannot be read as a command"),
    ],
)
def test_scripts_that_cannot_be_read(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        load_run_config(path)


def test_numbers_are_numbers() -> None:
    flags = megatron_arguments(model_of("llama3_8b"), Strategy(world_size=8, dp=8, seq_len=4096, framework="megatron-core"))
    assert np.all([not isinstance(value, str) or not value.isdecimal() for value in flags.values()])


@pytest.mark.parametrize(("tp", "beside", "queues"), [(1, True, 32), (2, True, 1), (1, False, 1)])
def test_an_exchange_beside_compute_has_queues_of_its_own(tp: int, beside: bool, queues: int) -> None:
    model = load_run_config("configs/models/qwen3_30b_a3b.json").model
    run = Strategy(
        world_size=16,
        seq_len=4096,
        framework="megatron-core",
        tp=tp,
        tp_mode="msp",
        dp=16 // tp,
        ep=8,
        zero=1,
        zero_shard_size=16 // tp,
        moe_exchange_overlap=beside,
        attention="flash",
    )
    text = shell_command(model, run, 8)
    assert f"export CUDA_DEVICE_MAX_CONNECTIONS={queues}\n" in text and "--train-iters 1000" in text and "--lr 0.0001" in text


def test_of_a_flag_given_twice_the_last_counts(tmp_path: Path) -> None:
    run = Strategy(world_size=8, dp=8, seq_len=4096, framework="megatron-core", micro_batch_size=2)
    path = tmp_path / "run.sh"
    path.write_text(shell_command(model_of("llama3_8b"), run, 8).rstrip() + " --micro-batch-size 1 --swiglu --lr 1e-5\n")
    config = load_run_config(path)
    assert config.layout["micro_batch_size"] == 1
    assert config.notes == ("--micro-batch-size stands more than once; argparse takes the last, 1",)


def test_arguments_that_take_several_values_are_words_of_their_own() -> None:
    model = load_run_config(Path("configs/models/qwen3_30b_a3b.json")).model
    run = Strategy(
        world_size=64,
        seq_len=4096,
        dp=16,
        cp=4,
        cp_comm="a2a+ring",
        cp_a2a_size=2,
        recompute="selective",
        recompute_modules="core_attn+moe_act",
        framework="megatron-core-0.12",
        moe_grouped_gemm=True,
    )
    words = shlex.split(shell_command(model, run, 8), comments=True)
    several = {"--recompute-modules": ["core_attn", "moe_act"], "--hierarchical-context-parallel-sizes": ["2", "2"]}
    for flag, values in several.items():
        at = words.index(flag)
        assert words[at + 1 : at + 3] == values


def test_what_a_script_states_without_a_part_in_any_time_is_written_again(tmp_path: Path) -> None:
    model = load_run_config(Path("configs/models/qwen3_30b_a3b.json")).model
    run = Strategy(world_size=8, seq_len=4096, dp=8, framework="megatron-core-0.12")
    stated = (
        "--rotary-base 500000",
        "--norm-epsilon 1e-06",
        "--use-rope-scaling",
        "--rope-scaling-factor 4",
        "--moe-router-topk-scaling-factor 2.5",
    )
    first, again = tmp_path / "first.sh", tmp_path / "again.sh"
    without = shell_command(model.replace(untimed=()), run, 8)
    assert not any(part in without for part in stated)
    first.write_text(f"{without.rstrip()} \\\n  {' '.join(stated)}\n")
    read = load_run_config(first, 8)
    (text,) = megatron_files(read.model, run, 8, "again").values()
    again.write_text(text)
    assert all(part in text for part in stated)
    assert load_run_config(again, 8).model.untimed == read.model.untimed != ()
