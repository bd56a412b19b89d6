"""Profile, train, predict and compare: the comparison by hand, and the command on a small trained layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import validate_here
from timing_toy import cpu_device

from profiler.errors import InputError
from profiler.profile.profile import Profile, Table
from profiler.profile.store import read_profile, write_profile

ROOT = Path(__file__).resolve().parents[2]

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
}


def small_profile() -> Profile:
    """Return a profile of a CPU of 50 GFLOP/s and 10 GB/s whose measurements follow 2 us + FLOPs / 40 GFLOP/s."""
    side = np.repeat(2 ** np.arange(5, 11), 6)
    other = np.tile(2 ** np.arange(5, 11), 6)
    linear = {
        "m": side,
        "n": other,
        "k": 128,
        "batch": 1,
        "layout": "TN",
        "dtype": "fp32",
        "out_dtype": "fp32",
        "seconds": 2e-6 + 2.0 * side * other * 128 / 4e10,
        "spread": 0.01,
        "repeats": 9,
        "source": "made up",
    }
    return Profile("small", cpu_device(), {"linear": Table.from_columns("linear", linear)}, {"sustained_scale": 1.0})


def case(name: str, step_s: float, micro_batches: int) -> str:
    run = {
        "framework": "pytorch",
        "world_size": 1,
        "seq_len": 32,
        "micro_batch_size": 1,
        "num_micro_batches": micro_batches,
        "zero": 0,
        "precision": "fp32",
        "grad_dtype": "fp32",
        "attention": "flash",
    }
    measured = {"step_s": step_s, "spread": 0.02, "repeats": 4}
    model = {**TINY, "head_dim": 16, "gated_mlp": True}
    return json.dumps({"id": f"trained:{name}", "hardware": "HERE", "model": model, "run": run, "measured": measured})


def test_errors_ranks_and_coverage_by_hand() -> None:
    words = np.array(["one rank"] * 4)
    found = validate_here.Comparison(
        ("a", "b", "c", "d"),
        words,
        np.array([1.1, 1.8, 3.0, 5.0]),
        np.array([1.0, 2.0, 4.0, 3.0]),
        np.array([0.9, 1.5, 2.5, 4.0]),
        np.array([1.3, 2.2, 3.6, 6.0]),
        np.zeros(4),
    )
    assert found.error == pytest.approx([0.1, -0.1, -0.25, 2 / 3])
    assert found.inside.tolist() == [True, True, False, False]
    # ranks 1 2 3 4 against 1 2 4 3: 1 - 6 * 2 / (4 * 15)
    assert found.rank_correlation == pytest.approx(0.8)


def test_shipped_layouts_cover_the_options_of_a_step() -> None:
    runs = validate_here.read_runs(ROOT / "configs" / "validate_here" / "cpu.json", 2)
    assert len(runs) >= 12 and {run.ranks for run in runs} == {1, 2}
    options = [run.options for run in runs]
    for name, values in {"zero": {0, 1, 3}, "tp": {1, 2}, "pp": {1, 2}, "recompute": {"none", "full"}}.items():
        default = 0 if name == "zero" else "none" if name == "recompute" else 1
        assert {o.get(name, default) for o in options} == values
    assert {o.get("sequence_parallel", False) for o in options if o.get("tp", 1) == 2} == {True, False}
    assert {o["hidden_size"] for o in options} == {512, 1024}
    assert max(o.get("num_micro_batches", 1) for o in options) == 8
    assert len(validate_here.read_runs(ROOT / "configs" / "validate_here" / "gpu.json", 1)) >= 12


def test_layouts_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "layouts.json"
    with pytest.raises(InputError, match="cannot read the layouts"):
        validate_here.read_runs(path, 2)
    path.write_text(json.dumps({"defaults": {}, "models": {}, "layouts": [{"model": "big", "world_size": 1}]}))
    with pytest.raises(InputError, match="known models.*big"):
        validate_here.read_runs(path, 2)


def test_kept_cases_are_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_profile(tmp_path / "data.pt", small_profile())
    lines = [case("a", 0.004, 1), case("b", 0.008, 2), case("c", 0.016, 4)]
    text = "\n".join(lines).replace("HERE", str(tmp_path / "data.pt"))
    (tmp_path / "validate_here.jsonl").write_text(text)
    status = validate_here.main(["--output", str(tmp_path), "--keep-profile", "--keep-cases", "--ranks", "1"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "3 layouts: |error| median" in printed and "rank correlation 1.000" in printed
    assert (tmp_path / "pics" / "validate_here.png").stat().st_size > 10_000


def test_training_writes_a_case_with_the_given_profile(tmp_path: Path) -> None:
    options = {**TINY, "seq_len": 32, "dtype": "fp32", "steps": 4}
    cases = tmp_path / "cases.jsonl"
    environment = {**validate_here.os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    validate_here.train_all([validate_here.Run(1, options)], tmp_path / "data.pt", cases, environment)
    (written,) = [json.loads(line) for line in cases.read_text().splitlines()]
    assert written["hardware"] == str(tmp_path / "data.pt")
    assert written["run"]["framework"] == "profiler-train" and written["measured"]["repeats"] == 1
    assert 0 < written["measured"]["step_s"] < 5
    with pytest.raises(InputError, match="failed"):
        validate_here.train_all([validate_here.Run(1, {**options, "steps": 1})], tmp_path / "data.pt", cases, environment)


@pytest.mark.parametrize(("device", "host_bound"), [("h100", 1), ("h200", 0)])
def test_real_steps_are_predicted_from_the_profile_of_their_gpu(device: str, host_bound: int, tmp_path: Path) -> None:
    """Twelve steps on an H100 and twelve on an H200; the H100's host launched faster while it trained than in its profile."""
    folder = ROOT / "configs" / "validate_here" / device
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    cases = tmp_path / "steps.jsonl"
    assert 1.15 < read_profile(folder / "profile.pt").meta["power_slowdown"] < 1.18
    cases.write_text("".join(json.dumps({**step, "hardware": str(folder / "profile.pt")}) + "\n" for step in steps))
    predictions = validate_here.predict_cases(validate_here.read_cases(cases), validate_here.CostModels(()))
    found = validate_here.Comparison.of(predictions)
    assert len(found.error) == 12 and np.median(np.abs(found.error)) < 0.03
    assert (np.abs(found.error) > 0.09).sum() == host_bound and found.inside.mean() > 0.9
    peaks = np.array([p.memory_bytes / 2**30 / p.case.measured["peak_memory_gib"] - 1 for p in predictions])
    assert np.median(np.abs(peaks)) < 0.01 and peaks.min() > -0.03 and peaks.max() < 0.005
