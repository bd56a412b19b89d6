"""python -m solver.simumax, and SimuMax's published runs through its own calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from solver.commands.validate import CostModels
from solver.formats.cases.reading import Case, case_of
from solver.report.validate import predict_cases
from solver.simumax import PerfLLM
from solver.simumax.__main__ import main

DATA = Path("tests/data/simumax")
FILES = ["--model", str(DATA / "llama3_8b.json"), "--strategy", str(DATA / "tp2_pp1_dp4_mbs1.json")]
_LINES = Path("configs/cases/published.jsonl").read_text(encoding="utf-8").splitlines()
CASES = {case.id: case for case in (case_of(json.loads(line)) for line in _LINES if '"SMA:' in line)}


def test_estimate(estimated: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    system = ["--system", "a100_pcie_80gb"]
    assert main([*FILES, *system, "--json", str(out), "--trace", str(tmp_path)]) == 0
    written, perf = json.loads(out.read_text()), estimated()
    assert written["cost_result"] == perf.analysis_cost().data
    assert written["mem_result"] == perf.analysis_mem().data
    said = capsys.readouterr().out
    assert f"duration_time_per_iter: {perf.analysis_cost()['duration_time_per_iter']:.6g}" in said
    assert "changes nothing here: model_type" in said
    assert (tmp_path / "tracing_logs.json").exists()


def test_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = [
        "--system",
        str(DATA / "a100_pcie.json"),
        "--search",
        "--json",
        str(out),
        "--tp_search_list",
        "1",
        "2",
        "--pp_search_list",
        "1",
        "2",
        "--recompute_search_type",
        "no_recompute",
        "--gmi_error",
        "20",
    ]
    assert main([*FILES, *arguments]) == 0
    found = json.loads(out.read_text())
    assert found["best_strategy"]["iter_time"] == min(found["all_search_result"]["iter_time"])
    assert "strategies fit" in capsys.readouterr().out
    assert main([*FILES, *arguments[:2], "--search", "--gmi_error", "79"]) == 2
    assert "no strategy of this search fits" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("a1000", "no profile is called 'a1000'"),
        ("none.json", "none.json: no such"),
        (str(DATA / "llama3_8b.json"), "system field 'model_type' is not known"),
    ],
)
def test_bad_input_is_one_sentence(system: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FILES, "--system", system]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def by_its_calls(case: Case) -> PerfLLM:
    assert case.model is not None and case.strategy is not None
    model, layout, perf = case.model, case.strategy, PerfLLM()
    perf.configure(
        strategy_config={
            "seq_len": layout.seq_len,
            "micro_batch_size": layout.micro_batch_size,
            "world_size": layout.world_size,
            "micro_batch_num": layout.num_micro_batches,
            "tp_size": layout.tp,
            "pp_size": layout.pp,
        },
        model_config={
            "hidden_size": model.hidden_size,
            "head_num": model.num_attention_heads,
            "kv_head_num": model.num_key_value_heads,
            "head_size": model.head_dim,
            "intermediate_size": model.intermediate_size,
            "layer_num": model.num_hidden_layers,
            "vocab_size": model.padded_vocab_size,
            "padded_vocab_size": False,
        },
        system_config=case.hardware,
    )
    perf.run_estimate()
    return perf


@pytest.mark.parametrize("name", sorted(CASES))
def test_published_runs_are_predicted_as_by_validate(name: str) -> None:
    case = CASES[name]
    (predicted,) = predict_cases([case], CostModels([case.hardware]))
    perf = by_its_calls(case)
    seconds = perf.analysis_cost()["duration_time_per_iter"]
    peak = max(perf.get_pp_stage_peak_mem(perf.analysis_mem()).values())
    assert seconds == pytest.approx(predicted.seconds, rel=1e-9)
    assert peak == pytest.approx(predicted.memory_bytes, rel=1e-9)
    assert seconds == pytest.approx(case.measured["step_s"], rel=0.05)
    assert peak / 2**30 == pytest.approx(case.measured["peak_memory_gib"], rel=0.03)
