"""The gap of a job: twenty logs of Megatron-LM with one switch off name that switch, and the parts are what they cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiler.errors import InputError
from solver import load_problem
from solver.api import configured_strategy, estimate
from solver.commands.console import main
from solver.commands.import_files import case_line
from solver.formats.cases.reading import case_of
from solver.formats.config_file import load_run_config
from solver.formats.megatron.export import megatron_arguments
from solver.formats.megatron.log import config_in_log, has_arguments
from solver.report.gap import gap, gap_lines
from solver.report.words import seconds
from solver.spec.strategy import Strategy
from solver.step.problem import Problem

GOOD = {
    "framework": "megatron-core",
    "precision": "bf16",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "cross_entropy_fusion": True,
    "gradient_accumulation_fusion": True,
}
SWITCHES = {
    "overlap_grad_reduce": {"overlap_grad_reduce": False, "overlap_param_gather": False},  # the one needs the other
    "overlap_param_gather": {"overlap_param_gather": False},
    "zero": {"zero": 0, "zero_shard_size": 1, "overlap_param_gather": False},
    "gradient_accumulation_fusion": {"gradient_accumulation_fusion": False},
    "cross_entropy_fusion": {"cross_entropy_fusion": False},
}
JOBS = [("llama3_8b", 64, 2, 2), ("qwen3_14b", 128, 4, 2), ("llama3_70b", 512, 8, 4), ("mistral_nemo_12b", 32, 2, 4)]
INVERTED = {"disable-bias-linear": "add_bias_linear", "no-gradient-accumulation-fusion": "gradient_accumulation_fusion"}


def job(model: str, world: int, tp: int, pp: int, **changed: Any) -> tuple[Problem, Strategy]:
    constants = {name: value for name, value in {**GOOD, **changed}.items() if name in GOOD}
    problem = load_problem(f"configs/models/{model}.json", world, profile="h100_sxm", **constants)
    dp = world // tp // pp
    axes = {"tp": tp, "tp_mode": "msp", "pp": pp, "dp": dp, "zero": 1, "zero_shard_size": dp, "num_micro_batches": 8}
    return problem, problem.layout(**axes | {name: value for name, value in changed.items() if name not in GOOD})


def printed(problem: Problem, layout: Strategy, steps: list[float]) -> str:
    """Return a log as Megatron-LM prints it: arguments with dots, then steps."""
    flags = {flag.lstrip("-"): value for flag, value in megatron_arguments(problem.model, layout).items()}
    plain: dict[str, Any] = {flag.replace("-", "_"): value for flag, value in flags.items() if flag not in INVERTED}
    plain |= {python: flag not in flags for flag, python in INVERTED.items()}
    plain |= {
        "world_size": layout.world_size,
        "lr": 0.0003,
        "fp8": None,
        "num_experts": None,
        "moe_router_topk": 2,
        "attention_backend": "AttnBackend.auto",
        "cp_comm_type": ["p2p"],
        "recompute_granularity": None,
    }
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * max(48 - len(name), 2)} {value}" for name, value in sorted(plain.items())]
    lines.append("-------------------- end of arguments ---------------------")
    lines += [
        f" [2026-01-01 00:00:{i:02d}] iteration {i:8d}/ 500 | consumed samples: 1 | elapsed time per iteration (ms): "
        f"{1e3 * step:.1f} | learning rate: 1.0E-04 |"
        for i, step in enumerate(steps)
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(("model", "world", "tp", "pp"), JOBS)
def test_a_log_with_one_switch_off_names_it(switch: str, model: str, world: int, tp: int, pp: int) -> None:
    problem, layout = job(model, world, tp, pp, **SWITCHES[switch])
    taken = float(estimate(problem, [layout]).times.seconds[0])
    noise = np.random.default_rng(7).normal(1.0, 0.01, 30)
    config = config_in_log(printed(problem, layout, [float(step) for step in taken * noise]), Path("job.log"))
    logged = load_problem(config, world, profile="h100_sxm")
    found = gap(logged, configured_strategy(logged, config), float(np.median(taken * noise)))
    assert found.predicted == pytest.approx(taken, rel=1e-6)
    shown = "\n".join(gap_lines(found))
    settings = [row.field for row in found.switches]
    assert switch in settings, (settings, shown)
    caused = {switch} | SWITCHES[switch].keys()
    always = {"tp_comm_overlap"}  # never on in these jobs
    assert set(settings) - always <= caused
    assert ("the distributed optimizer is off" if switch == "zero" else f"{switch} is off") in shown


def test_the_command_reads_a_log_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem, layout = job("llama3_8b", 64, 2, 2, overlap_param_gather=False)
    taken = float(estimate(problem, [layout]).times.seconds[0])
    log, out = tmp_path / "job.log", tmp_path / "out.json"
    log.write_text(printed(problem, layout, [taken] * 30))
    assert main(["import", str(log), "--json", str(out)]) == main(["health", str(log)]) == 0
    found = json.loads(out.read_text())
    assert found["predicted_step_s"] == pytest.approx(taken, rel=1e-6)
    assert "overlap_param_gather" in {row["setting"] for row in found["switches"]}
    assert "overlap_param_gather is off" in capsys.readouterr().out


def test_a_switch_costs_what_it_costs() -> None:
    problem, layout = job("llama3_8b", 64, 2, 2, overlap_param_gather=False)
    good, better = job("llama3_8b", 64, 2, 2)
    before, after = (float(estimate(p, [one]).times.seconds[0]) for p, one in ((problem, layout), (good, better)))
    found = gap(problem, layout, 1.1 * before)
    (switch,) = [row for row in found.switches if row.field == "overlap_param_gather"]
    assert (found.predicted, switch.seconds) == (pytest.approx(before), pytest.approx(before - after))
    assert found.share(switch.seconds) == pytest.approx((before - after) / (1.1 * before - found.best))
    assert found.best <= after
    lines = gap_lines(found)
    rest = 0.1 * before / (1.1 * before - found.best)
    assert lines[0].endswith(f"({seconds(found.best)}): a gap of {seconds(1.1 * before - found.best)}")
    said = f", {rest:.0%} of the gap: not explained by any setting"
    assert lines[-1].endswith(f"{said}, and it is within the prediction's uncertainty")
    assert gap_lines(gap(problem, layout, 3 * before))[-1].endswith("of the gap: not explained by any setting")
    assert rest + sum(found.share(row.seconds) for row in found.switches) == pytest.approx(1.0, abs=0.01)


def test_a_good_job_has_no_switches() -> None:
    problem, layout = job("llama3_8b", 64, 1, 1)
    found = gap(problem, layout, 1.0)
    assert found.switches == () and found.best == found.predicted


def test_the_arguments_of_a_log_are_its_layout(tmp_path: Path) -> None:
    for model, world, tp, pp in JOBS:
        problem, layout = job(model, world, tp, pp)
        text = printed(problem, layout, [1.0])
        assert has_arguments(text) and not has_arguments("elapsed time per iteration (ms): 1.0")
        config = config_in_log(text, tmp_path / "x.log")
        assert dict(config.layout) == vars(layout) | {"framework": config.layout["framework"], "dropout": False}
        assert config.model.replace(name="", padded_vocab_size=0) == problem.model.replace(name="")


def test_defaults_of_other_models_and_devices_say_nothing(tmp_path: Path) -> None:
    problem, layout = job("llama3_8b", 64, 2, 2)
    text = printed(problem, layout, [1.0])
    defaults = {
        "window_size": None,
        "window_attn_skip_freq": None,
        "softmax_type": "vanilla",
        "no_rope_freq": None,
        "rope_type": None,
        "main_params_dtype": "torch.float32",
        "main_grads_dtype": "torch.float32",
        "hybrid_attention_ratio": 0.0,
        "hybrid_mlp_ratio": 0.0,
        "is_hybrid_model": False,
        "mamba_state_dim": 128,
        "cpu_offloading": False,
        "cpu_offloading_num_layers": 0,
        "dataloader_type": "single",
        "glu_linear_offset": 0.0,
        "use_legacy_models": False,
        "distribute_saved_activations": False,
        "moe_layer_freq": 1,
        "moe_layer_recompute": False,
        "sgd_momentum": 0.9,
        "pipeline_model_parallel_comm_backend": None,
        "fp32_residual_connection": False,
        "mup_base_hidden_size": None,
        "error_injection_type": "transient_error",
        "train_sync_interval": None,
        "heterogeneous_layers_config_path": None,
    }
    printed_too = "".join(f"  {name} ........ {value}\n" for name, value in defaults.items())
    plain, full = (config_in_log(one, tmp_path / "x.log") for one in (text, text.replace("  lr ", f"{printed_too}  lr ")))
    assert (full.layout, full.model, full.notes) == (plain.layout, plain.model, plain.notes)


def test_layers_whose_activations_leave_are_read_from_a_log(tmp_path: Path) -> None:
    problem, layout = job("llama3_8b", 64, 2, 1)
    text = printed(problem, layout, [1.0])
    leaves = text.replace("  lr ", "  cpu_offloading ... True\n  cpu_offloading_num_layers ... 4\n  lr ")
    assert config_in_log(leaves, tmp_path / "x.log").layout["offload_layers"] == 4


def test_a_fusion_that_a_log_switches_off_is_read(tmp_path: Path) -> None:
    problem, layout = job("llama3_8b", 64, 2, 2)
    text = printed(problem, layout, [1.0]).replace("  lr ", "  apply_rope_fusion ... False\n  lr ")
    assert config_in_log(text, tmp_path / "x.log").layout["rope_fusion"] is False


def test_a_run_is_appended_and_read_back(tmp_path: Path) -> None:
    problem, layout = job("qwen3_14b", 128, 4, 2)
    solutions = estimate(problem, [layout])
    case = case_of(json.loads(json.dumps(case_line("mine", "h100_sxm", solutions, layout, {"step_s": 1.0}))))
    assert case.skipped is None and case.model == problem.model and case.strategy == layout
    runs, log = tmp_path / "runs.jsonl", tmp_path / "a.json"
    log.write_text('{"step_s": 3.3, "peak_memory_gib": 50.0}')
    words = ["--config", "configs/7B_internlm2.py", "--world_size", "64", "--runs", str(runs)]
    assert main(["import", str(log), *words]) == main(["import", str(log), *words, "--id", "second"]) == 0
    cases = [json.loads(line) for line in runs.read_text().splitlines()]
    assert [case["id"] for case in cases] == ["a", "second"]
    assert cases[0]["measured"] == {"step_s": 3.3, "peak_memory_gib": 50.0, "memory_kind": "allocated"}
    again = case_of(cases[0])
    assert again.model == load_run_config("configs/7B_internlm2.py").model and again.strategy is not None
    assert again.strategy.tp == 2 and again.strategy.world_size == 64


def test_what_cannot_be_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log"
    log.write_text("elapsed time per iteration (ms): 512.3\n")
    assert main(["import", str(log)]) == 2
    assert "does not say what was run: give --config (or --model_size) and --world_size" in capsys.readouterr().err
    problem, layout = job("llama3_8b", 64, 2, 2)
    text = printed(problem, layout, [1.0]).replace("  lr ", "  use_torch_fsdp2 ... True\n  lr ")
    with pytest.raises(InputError, match="FSDP2 under Megatron-LM"):
        config_in_log(text, log)
    without = "\n".join(line for line in text.splitlines() if "world_size" not in line)
    with pytest.raises(InputError, match="no arguments as Megatron-LM prints them"):
        config_in_log(without, log)
