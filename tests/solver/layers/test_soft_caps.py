"""Soft caps: bytes of their kernels by hand, what they keep, and who runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toy import DEVICE, layer_keys, toy_layout

from profiler.errors import InputError
from solver import load_problem, search
from solver.commands.command_line import main
from solver.formats.config_file import find_model, load_run_config
from solver.layers.decoder import layer_program
from solver.layers.head import head_program
from solver.layers.program import LayerProgram, Op
from solver.spec.cluster import cluster_of
from solver.spec.model import ModelSpec

PLAIN = ModelSpec(
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=1024,
)
CAPPED = PLAIN.replace(capped_scores=True, capped_logits=True)
SEQ, SCORES, LOGITS = 512, 4 * 512 * 512, 512 * 1024  #: of one sequence on one rank


def program(build: object, model: ModelSpec, **constants: object) -> LayerProgram:
    run = toy_layout(1, SEQ, framework="nemo", attention="unfused", **constants)
    return build(layer_keys("mtp", 1), model, run, cluster_of(DEVICE))  # type: ignore[operator, no-any-return]


def caps(of: LayerProgram) -> dict[str, tuple[float, float]]:
    """Bytes and launches of the soft cap's ops, by pass."""
    found: list[Op] = [op for op in of.ops if op.name.endswith("soft_cap")]
    return {op.phase: (float(np.max(op.dims["bytes"])), float(np.max(op.launches))) for op in found}


@pytest.mark.parametrize(("build", "values"), [(layer_program, SCORES), (head_program, LOGITS)])
def test_a_cap_is_three_kernels_and_one_where_they_are_compiled(build: object, values: int) -> None:
    # divide, tangent, multiply: a read and a write each of 2 bytes; the tangent's gradient reads its output too
    assert caps(program(build, CAPPED)) == {"forward": (values * 12, 3), "input_grad": (values * 14, 3)}
    compiled = program(build, CAPPED, compile=True)
    assert caps(compiled) == {"forward": (values * 4, 1), "input_grad": (values * 6, 1)}
    assert caps(program(build, PLAIN)) == {}


@pytest.mark.parametrize(("build", "values"), [(layer_program, SCORES), (head_program, LOGITS)])
def test_the_tangent_s_output_is_kept(build: object, values: int) -> None:
    kept, without = (sum(float(np.max(s.bytes)) for s in program(build, model).saved) for model in (CAPPED, PLAIN))
    assert kept - without == 2 * values


def test_selective_recomputation_caps_again_and_keeps_no_tangents() -> None:
    of = program(layer_program, CAPPED)
    again = [op for op in of.ops if op.name == "scores.soft_cap" and op.phase == "forward"]
    core = [op for op in of.ops if op.name == "scores" and op.phase == "forward"]
    assert again[0].recomputed_by == core[0].recomputed_by != ()


def test_nemo_runs_gemma_2_unfused_and_caps_cost() -> None:
    problem = load_problem(find_model("gemma2_9b"), 16, profile="h100_sxm", framework="nemo", seq_len=4096)
    assert problem.run.attention == "unfused" and problem.left_out == ()
    without = load_problem(find_model("gemma2_9b"), 16, profile="h100_sxm", framework="nemo", seq_len=4096, approximate=True)
    assert without.run.attention == "flash"
    assert without.left_out == ("soft-capped attention scores", "soft-capped logits")
    slow, fast = (search(p, 64, top=1).best.times.seconds[0] for p in (problem, without))
    assert slow > 1.2 * fast


def test_fused_kernels_cap_without_a_known_cost() -> None:
    problem = load_problem(find_model("gemma2_9b"), 16, profile="h100_sxm", framework="fsdp", seq_len=4096)
    assert problem.run.attention == "flash"
    assert problem.left_out == ("what soft-capped scores cost inside a fused attention kernel",)


@pytest.mark.parametrize(
    ("framework", "attention", "message"),
    [
        ("megatron-core", "unfused", "megatron-core-0.12 has no soft caps, which gemma2_9b has; --approximate leaves"),
        ("nemo", "flash", "caps attention scores only with attention unfused; --approximate leaves the caps out"),
    ],
)
def test_who_cannot_cap_says_so(framework: str, attention: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_problem(find_model("gemma2_9b"), 16, profile="h100_sxm", framework=framework, attention=attention)


def test_presets_have_their_caps() -> None:
    def of(name: str) -> tuple[bool, bool]:
        model = load_run_config(find_model(name)).model
        return model.capped_scores, model.capped_logits

    assert [of(name) for name in ("gemma2_2b", "gemma2_9b", "gemma2_27b")] == [(True, True)] * 3
    assert (of("grok_1"), of("gemma3_27b"), of("llama3_8b")) == ((True, False), (False, False), (False, False))


def test_what_an_approximation_leaves_out_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model_size", "grok_1", "--world_size", "512", "--run_all_solu", "--framework", "megatron-core"]
    assert main(options) == 2 and "has no soft caps, which grok_1 has" in capsys.readouterr().err
    assert main([*options, "--approximate"]) == 0
    assert "left out of the estimate: soft-capped attention scores" in capsys.readouterr().out
