"""The factor of training steps: recovered from runs made with one, kept only where it improves held-out runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import step_factors

from predictor.cost_model import CostModel
from predictor.kernels.derating import STEP_FACTORS, step_factor
from profiler.errors import InputError
from profiler.profile.profiles import find_profile
from solver.formats.cases import Case, read_cases
from solver.report.validate import CostModels, predict_cases

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def models(fitted: Callable[[str], CostModel]) -> CostModels:
    return lambda hardware, network: fitted(hardware).with_network(network)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    found = [case for case in read_cases(ROOT / "configs" / "cases" / "published.jsonl") if case.hardware == "b200_sxm"]
    return step_factors.fitted_runs(found)


def made_with(factor: float, cases: list[Case], models: CostModels) -> list[Case]:
    """Return the same runs with the times that a machine with this factor would have measured."""
    found = predict_cases(cases, step_factors.scaled(models, {"b200_sxm": factor}))
    return [replace(p.case, measured={"step_s": p.seconds}) for p in found]


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_factor_is_recovered(factor: float, cases: list[Case], models: CostModels) -> None:
    fit = step_factors.fit_device(made_with(factor, cases, models), models)
    assert fit.fitted == pytest.approx(factor, abs=2e-3)
    assert fit.error_left_out < 2e-3
    assert fit.runs == len(cases) == 12 and len(fit.by_fold) == 4
    if factor != 1.0:
        assert fit.kept and fit.error_without > 0.1


def test_no_run_is_predicted_with_its_own_factor(cases: list[Case], models: CostModels) -> None:
    # one layout is half as fast as the rest: its own factor would make it exact, the factor of the rest does not
    odd = step_factors.folds(cases)[cases[0].id]
    run = made_with(1.0, cases, models)
    changed = [
        replace(c, measured={"step_s": 2 * c.measured["step_s"]}) if step_factors.folds(run)[c.id] == odd else c for c in run
    ]
    fit = step_factors.fit_device(changed, models)
    assert fit.leaving_out(odd) == pytest.approx(1.0, abs=1e-6) and not fit.kept
    predicted = {p.case.id: p for p in step_factors.predict_left_out(changed, models, fit)}
    assert predicted[cases[0].id].seconds == pytest.approx(changed[0].measured["step_s"] / 2, rel=1e-6)


def test_the_file_holds_what_its_command_writes() -> None:
    entries = json.loads(STEP_FACTORS.read_text())["profiles"]
    for entry in entries.values():
        helps = entry["mean_error_left_out"] <= 0.8 * entry["mean_error_without"]
        assert entry["factor"] == (entry["fitted"] if helps else 1.0)
    assert step_factors.kept_factors() == {name: entry["factor"] for name, entry in entries.items()}
    assert {entry["factor"] for entry in entries.values()} == {1.0}, "today's predictions need none"


def test_a_factor_that_no_clock_explains_is_not_kept() -> None:
    assert step_factors.DeviceFit("x", dict.fromkeys("abc", 1.4), 9, 0.4, 0.01).kept
    assert not step_factors.DeviceFit("x", dict.fromkeys("abc", 3.0), 9, 0.6, 0.01).kept
    assert not step_factors.DeviceFit("x", dict.fromkeys("ab", 1.4), 9, 0.4, 0.01).kept, "two folds are too few"
    assert not step_factors.DeviceFit("x", dict.fromkeys("abc", 1.1), 9, 0.10, 0.09).kept


def test_runs_without_times_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cases.jsonl").write_text('{"id": "A-1", "hardware": "h100_sxm", "model": {}, "run": {}, "measured": {}}\n')
    arguments = ["--cases", str(tmp_path / "cases.jsonl"), "--output", str(tmp_path / "out.json")]
    assert step_factors.main(arguments) == 2
    assert "no case has a step time" in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_only_runs_that_a_factor_was_fitted_on_lose_it(
    cases: list[Case], models: CostModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = 1.05
    monkeypatch.setattr(step_factors, "kept_factors", lambda: {"b200_sxm": kept})
    models = step_factors.scaled(models, {"b200_sxm": kept})
    single = step_factors.predict_held_out(cases[:1], models)[0].seconds
    among = step_factors.predict_held_out(cases, models)[0].seconds
    assert single == among != predict_cases(cases[:1], models)[0].seconds
    # a run of another source keeps the factor, even with the same layout; and two cases with one id are predicted separately
    others = [replace(cases[0], id="Y-1"), replace(cases[3], id="Y-1")]
    predicted = [p.seconds for p in step_factors.predict_held_out(others, models)]
    assert predicted == [p.seconds for p in predict_cases(others, models)] and predicted[0] != predicted[1]
    without = predict_cases(cases[:1], step_factors.scaled(models, {"b200_sxm": 1 / kept}))[0].seconds
    assert without < single


def test_factors_belong_to_shipped_profiles(tmp_path: Path) -> None:
    b200 = find_profile("b200_sxm")[0]
    assert step_factor(b200) == json.loads(STEP_FACTORS.read_text())["profiles"]["b200_sxm"]["factor"]
    assert step_factor(replace(b200, meta={})) == 1.0  # measured by the harness, not by loops of tests from other sources
    assert step_factor(replace(b200, name="another")) == 1.0
    assert step_factor(b200, tmp_path / "absent.json") == 1.0
    for bad in ('"fast"', "-1.0", "NaN"):
        (tmp_path / "bad.json").write_text('{"profiles": {"b200_sxm": {"factor": ' + bad + "}}}")
        with pytest.raises(InputError, match="bad.json: no table of factors"):
            step_factor(b200, tmp_path / "bad.json")
