"""docs/simumax.md, snippet by snippet, against the same layouts priced by this program's own interface."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from solver.api import configured_strategy, estimate, load_problem
from solver.formats.config_file import RunConfig
from solver.formats.simumax.fields import MODEL, STRATEGY
from solver.simumax import Result, SystemConfig
from solver.simumax.listed import with_listed
from solver.simumax.system import profile_of
from solver.spec.model import ModelSpec
from solver.step.problem import Problem
from solver.step.solutions import Solutions

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "simumax.md").read_text(encoding="utf-8")
LLAMA = ModelSpec(
    name="llama3_8b",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128257,
)
LAYOUT = {
    "framework": "megatron-core-0.12, transformer-engine 2.2",
    "tp": 1,
    "pp": 2,
    "tp_mode": "mtp",
    "zero": 1,
    "grad_dtype": "fp32",
    "num_micro_batches": 8,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "cross_entropy_fusion": False,
    "dropout": False,
    "gradient_accumulation_fusion": True,
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Run the snippets one after the other in a folder that has this program's tests, and return their variables."""
    folder = tmp_path_factory.mktemp("tutorial")
    (folder / "tests").symlink_to(ROOT / "tests")
    names: dict[str, Any] = {"folder": folder}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for snippet in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(snippet, "docs/simumax.md", "exec"), names)
    yield names


def own(profile: Any, **changes: Any) -> tuple[Problem, RunConfig]:
    config = RunConfig("llama3_8b", LLAMA, {**LAYOUT, **changes}, 4096, Path("llama3_8b"))
    return load_problem(config, 8, profile=profile), config


def solved(problem: Problem, config: RunConfig) -> Solutions:
    return estimate(problem, [configured_strategy(problem, config)])


def on_the_file() -> Solutions:
    system = profile_of(SystemConfig.init_from_config_file(ROOT / "tests/data/simumax/a100_pcie.json"))
    problem, config = own(system)
    return solved(replace(problem, cost=with_listed(problem.cost, system)), config)


def test_estimate_equals_the_own_interface(page: dict[str, Any]) -> None:
    solutions = on_the_file()
    cost, memory = page["cost_result"], page["mem_result"]
    assert cost["duration_time_per_iter"] == float(solutions.times.seconds[0])
    assert cost["throughput_per_accelerator"] == float(solutions.tgs[0])
    assert cost["mfu_6nd_with_attn"] == pytest.approx(float(solutions.mfu_whole_square[0]), rel=1e-12)
    assert memory["first_stage"]["peak_mem"] == float(solutions.memory.allocated[0])
    assert cost["all_tokens_per_iter"] == solutions.tokens[0]


def test_a_profile_by_name_equals_the_own_interface(estimated: Any) -> None:
    perf = estimated(strategy="tp1_pp2_dp4_mbs1")
    solutions = solved(*own("a100_pcie_80gb"))
    cost = perf.analysis_cost()
    assert cost["duration_time_per_iter"] == float(solutions.times.seconds[0])
    assert perf.analysis_mem()["first_stage"]["peak_mem"] == float(solutions.memory.allocated[0])
    low, high = cost["duration_time_interval"]
    assert low < cost["duration_time_per_iter"] < high


def test_every_number_of_the_tables(page: dict[str, Any], estimated: Any) -> None:
    named = estimated(strategy="tp1_pp2_dp4_mbs1").analysis_cost()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|(?: ([\d.]+) \|)?$", PAGE, re.MULTILINE)
    assert len(rows) == 15
    for name, here, other in rows:
        found = page["cost_result"].data.get(name, page["mem_result"]["first_stage"].get(name))
        assert float(here) == pytest.approx(found, rel=5e-3), name
        assert not other or float(other) == pytest.approx(named[name], rel=5e-3), name


def test_what_analysis_and_simulate_write(page: dict[str, Any]) -> None:
    folder = page["folder"] / "results" / "llama3_8b"
    names = {"compute_result", "mem_result", "base_info", "model_config", "strategy_config", "system_config"}
    assert {path.stem for path in folder.glob("*.json")} == names
    assert json.loads((folder / "compute_result.json").read_text()) == page["cost_result"].data
    assert json.loads(str(page["mem_result"])) == page["mem_result"].data
    assert json.loads((folder / "strategy_config.json").read_text())["pp_size"] == 2
    events = json.loads((page["folder"] / "results" / "llama3_8b_trace" / "tracing_logs.json").read_text())["traceEvents"]
    passes = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in passes} == {0, 1}
    end = max(event["ts"] + event["dur"] for event in passes) * 1e-6
    assert end == pytest.approx(page["cost_result"]["duration_time_per_iter"], rel=0.01)  # without what comes once a step


def test_batch_search_of_the_tutorial(page: dict[str, Any]) -> None:
    assert (page["all_mbs"], page["all_mbn"]) == ([1], [8])
    assert isinstance(page["all_cost"][0], Result)
    seconds = page["all_cost"][0].data["duration_time_per_iter"]
    assert seconds == page["cost_result"]["duration_time_per_iter"]
    reserved = page["mem_result"]["first_stage"]["peak_mem_with_reserved"]
    assert page["all_peak_mem"][0]["first_stage"] == pytest.approx(reserved / 2**30, rel=1e-12)


def test_layout_search_of_the_tutorial(page: dict[str, Any]) -> None:
    best, every = page["best_strategy"], page["all_search_result"]
    assert " tp1." in best["parallelism"] and ".pp2." in best["parallelism"]
    assert best["iter_time"] == float(on_the_file().times.seconds[0])
    assert {len(column) for column in every.values()} == {2}
    assert every["iter_time"] == sorted(every["iter_time"])
    assert {name: column[0] for name, column in every.items()} == best


def test_the_page_names_every_field() -> None:
    fields = PAGE[PAGE.index("## Fields") :]
    assert not [name for name in {**MODEL, **STRATEGY} if f"`{name}" not in fields]
