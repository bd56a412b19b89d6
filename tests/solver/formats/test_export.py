"""Which kind of file a layout is written as, what is kept, and that no file means another layout than it was written for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from round_trip import layouts_of, model_of

from profiler.errors import InputError
from solver.formats import export
from solver.formats.config_file import load_run_config
from solver.formats.export import KINDS, Kind, exported, not_held, write_export
from solver.formats.hugging_face.model import model_of_config
from solver.formats.same_layout import effective, refuse_other, refuse_other_model, stated_strategy
from solver.spec.frameworks import FRAMEWORKS, framework_of
from solver.spec.strategy import Strategy

RUN = Strategy(
    world_size=16,
    seq_len=4096,
    dp=16,
    zero=3,
    zero_shard_size=16,
    fused_norm=False,
    grad_dtype="fp32",
    framework="torchtitan-2025-06",
)


def test_every_kind_is_of_a_framework_that_is_known() -> None:
    named = {name for kind in KINDS for name in kind.frameworks}
    assert named <= {framework.name for framework in FRAMEWORKS} and len(named) == 15


def test_the_kind_is_chosen_by_ending_and_framework() -> None:
    assert exported(Path("x.toml"), model_of("llama3_8b"), RUN, 8).keys() == {"x.toml"}
    yaml = exported(Path("x.yaml"), model_of("llama3_8b"), RUN.replace(grad_dtype="bf16", framework="fsdp2"), 8)
    assert yaml.keys() == {"x.yaml", "x.sh", "x_model/config.json"}
    with pytest.raises(InputError, match=r"a layout of megatron-core-0\.12 is written as \.sh or \.json"):
        exported(Path("x.ini"), model_of("llama3_8b"), RUN.replace(framework="megatron-core-0.12"), 8)


def test_the_file_that_the_layout_is_from_is_kept(tmp_path: Path) -> None:
    run = RUN.replace(grad_dtype="bf16", framework="fsdp")
    write_export(tmp_path / "a.yaml", model_of("llama3_8b"), run, 8)
    with pytest.raises(InputError, match=r"would overwrite .*a\.sh, which the layout is from; give another name"):
        write_export(tmp_path / "a.yaml", model_of("llama3_8b"), run, 8, keep=tmp_path / "a.sh")


def test_a_file_beside_the_named_one_is_replaced_by_the_next_export_only(tmp_path: Path) -> None:
    run, script = RUN.replace(grad_dtype="bf16", framework="fsdp"), tmp_path / "a.sh"
    script.write_text("my own")
    with pytest.raises(InputError, match=r"a\.yaml comes with .*a\.sh, which is there already and would be overwritten"):
        write_export(tmp_path / "a.yaml", model_of("llama3_8b"), run, 8)
    assert script.read_text() == "my own" and not (tmp_path / "a.yaml").exists()
    script.unlink()
    written = [write_export(tmp_path / "a.yaml", model_of("llama3_8b"), run, 8) for _ in range(2)]
    assert written[0] == written[1] and script in written[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.what)
def test_a_name_may_have_a_space(kind: Kind, tmp_path: Path) -> None:
    flags = {key: value for key, value in framework_of(kind.frameworks[0]).flags_of("bf16").items() if key != "tp_comm_overlap"}
    sharded = {"zero": 3, "zero_shard_size": 16} if kind.frameworks[0] == "fsdp" else {"zero": 0}
    run = Strategy(**{**flags, "world_size": 16, "dp": 16, "seq_len": 4096, **sharded, "framework": kind.frameworks[0]})
    for written in write_export(tmp_path / f"my run{kind.ending}", model_of("llama3_8b"), run, 8):
        if written.suffix in (kind.ending, ".sh") and written.name != "config.json":
            back = stated_strategy(load_run_config(written).layout, 16)
            same = run.replace(framework=back.framework)  # which may be called by another of its names
            assert effective(model_of("llama3_8b"), back) == effective(model_of("llama3_8b"), same)


def test_a_file_that_means_another_layout_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kind,) = (kind for kind in KINDS if kind.ending == ".toml")
    wrong = replace(kind, write=lambda model, run, node, name: kind.write(model, run.replace(seq_len=2048), node, name))
    monkeypatch.setattr(export, "KINDS", (wrong,))
    with pytest.raises(InputError, match=r"seq_len 4096: torchtitan's TOML has no place for it \(it would mean 2048\)"):
        write_export(tmp_path / "a.toml", model_of("llama3_8b"), RUN, 8)
    assert not list(tmp_path.iterdir())


def test_what_the_framework_does_not_run_is_not_written() -> None:
    run = RUN.replace(pp=2, dp=8, zero_shard_size=8, num_micro_batches=2)
    with pytest.raises(InputError, match="torchtitan-2025-06 does not offer ZeRO-3 with a pipeline of 2 stages"):
        exported(Path("x.toml"), model_of("llama3_8b"), run, 8)


def test_another_release_is_another_layout() -> None:
    model = model_of("llama3_8b")
    with pytest.raises(InputError, match="the layout is torchtitan-2025-06's, and a file is for nanotron"):
        refuse_other(model, RUN, RUN.replace(framework="nanotron"), "a file")
    with pytest.raises(InputError, match=r"llama3_8b: a file has no place for hidden_size 4096 \(it would mean 64\)"):
        refuse_other_model(model, model.replace(hidden_size=64), 1, "a file")


def test_fields_that_change_nothing_are_left_out() -> None:
    model = model_of("llama3_8b")
    one = RUN.replace(world_size=1, dp=1, zero_shard_size=1, cp_comm="a2a", fp8_recipe="blockwise", moe_dispatcher="deepep")
    assert effective(model, one) == effective(model, RUN.replace(world_size=1, dp=1, zero=0, zero_shard_size=1))
    assert effective(model, RUN) != effective(model, RUN.replace(zero=2))


def test_all_ranks_are_filled_in() -> None:
    stated = {
        "framework": "internevo-2024",
        "seq_len": 4096,
        "tp": 4,
        "tp_mode": "isp",
        "wp": 2,
        "zero": 1,
        "zero_shard_size": -1,
    }
    run = stated_strategy(stated, 16)
    assert (run.dp, run.zero_shard_size) == (4, 8)  # of 16 ranks in weight groups of 2


LLAMA_3_1 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


@pytest.mark.parametrize(
    ("framework", "name", "held", "left"),
    [
        ("megatron-core", "run.sh", ("--rotary-base 500000", "--use-rope-scaling", "--norm-epsilon 1e-05"), ""),
        ("megatron-deepspeed", "run.json", (), "rope_scaling"),
        ("nanotron", "run.yaml", ("rope_theta: 500000.0",), "rope_scaling"),
        ("fsdp", "run.yaml", (), ""),
        ("nemo", "run.yaml", (), "rope_theta"),
    ],
)
def test_what_no_time_depends_on_is_written_or_named(
    framework: str, name: str, held: tuple[str, ...], left: str, tmp_path: Path
) -> None:
    model = model_of_config(LLAMA_3_1, "llama")
    run = next(iter(layouts_of(model, framework, 1))).replace(recompute="none", recompute_layers=-1)
    if run.zero:
        run = run.replace(zero_shard_size=run.dp * run.cp)
    texts = exported(tmp_path / name, model, run, 8)
    assert all(words in texts[name] for words in held)
    note = not_held(tmp_path / name, model, run)
    assert (left in note and "add it before you train" in note) if left else note == ""
    if framework == "fsdp":
        written = json.loads(texts["run_model/config.json"])
        assert written["rope_scaling"] == LLAMA_3_1["rope_scaling"] and written["rope_theta"] == 500000.0
    if framework == "megatron-deepspeed":
        script = texts["run.sh"]
        assert "--rotary-position-embeddings-theta 500000" in script and "--deepspeed_config run.json" in script
        assert script.startswith("#!/bin/sh\n# llama's config.json also says rope_scaling")
    plain = model.replace(untimed=())
    assert plain == model and hash(plain) == hash(model), "no prediction depends on it"


def test_a_window_that_no_sequence_fills_is_left_out_by_files_without_windows(tmp_path: Path) -> None:
    model = model_of("mistral_7b")
    run = next(iter(layouts_of(model, "nanotron", 1))).replace(seq_len=4096)
    text = exported(tmp_path / "run.yaml", model, run, 8)["run.yaml"]
    assert "; the window of 4096 tokens is left out: no sequence of 4096 is longer\n" in text
    with pytest.raises(InputError, match="nanotron's YAML has no place for sliding_window 4096"):
        exported(tmp_path / "run.yaml", model, run.replace(seq_len=8192), 8)
    script = exported(tmp_path / "run.sh", model, next(iter(layouts_of(model, "megatron-core", 1))), 8)["run.sh"]
    assert "--window-size" in script and "left out" not in script


def test_a_value_that_is_no_number_is_said_in_a_sentence(tmp_path: Path) -> None:
    model = model_of_config({**LLAMA_3_1, "rope_theta": "large"}, "llama")
    run = next(iter(layouts_of(model, "megatron-core", 1)))
    with pytest.raises(InputError, match="its config.json states 'large' for rope_theta; it must be a number"):
        exported(tmp_path / "run.sh", model, run, 8)
