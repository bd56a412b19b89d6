"""The command that reports held-out errors: scores where enough measurements can be held out, else a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from predictor.accuracy.command import main, measure
from predictor.accuracy.crossval import (
    LEAST_ROWS,
    Trial,
    caveat,
    five_folds,
    flash_attn_scores,
    held_out,
    linear_family,
    linear_rows,
    linear_scores,
    memory_bound_scores,
    random_fifth,
    run_trials,
)
from predictor.estimate import Estimate
from profiler.profile.profile import Device, Profile, Table
from profiler.profile.store import write_profile

pytest.importorskip("torch")  # needed to write the profiles of these tests

DEVICE = Device("some GPU", {"bf16": 1e15}, 8e10, 3e12, 132, 8, 4e11, 5e10)
NUMBERS = ("mape", "p90", "bias", "coverage", "naive_mape")


def all_reduce(ranks: int) -> Table:
    """Return times of a latency and a rate: interpolation predicts them well, bytes / bandwidth does not at small sizes."""
    size = 2.0 ** np.arange(12, 30)
    seconds = 1e-5 * np.log2(ranks) + 1.75 * size / 3e11
    columns = {"intra": ranks, "inter": 1, "bytes": size.astype(np.int64), "seconds": seconds, "dtype": "half"}
    return Table.from_columns("all_reduce", columns)


def linear(rows: int) -> Table:
    m = 1024 * (1 + np.arange(rows))
    seconds = 5e-6 + 2.0 * m * 4096 * 4096 / 6e14
    columns = {"m": m, "n": 4096, "k": 4096, "batch": 1, "layout": "TN", "dtype": "bf16", "seconds": seconds}
    return Table.from_columns("linear", columns)


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profiles") / "small.pt"
    write_profile(path, Profile("a name with / in it", DEVICE, {"all_reduce": all_reduce(8), "linear": linear(12)}))
    return path


@pytest.fixture(scope="module")
def run(profile_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the command with pictures (of one predicted number of nodes) and JSON; return the output folder."""
    folder = tmp_path_factory.mktemp("run")
    arguments = ["--profile", str(profile_file), "--pics", str(folder / "pics"), "--json", str(folder / "out.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("predictor.accuracy.pictures_comm.PREDICTED_NODES", (2,))
        assert main(arguments) == 0
    return folder


def test_json_holds_finite_scores_where_enough_can_be_held_out(run: Path) -> None:
    found = json.loads((run / "out.json").read_text(encoding="utf-8"))["profiles"]["small"]
    splits = {(s["op"], s["split"]): s for s in found["scores"]}
    every_second = splits["all_reduce", "every second size"]
    assert all(np.isfinite(every_second[name]) for name in NUMBERS)
    assert every_second["rows"] == 16  # all sizes except the smallest and the largest, in two halves
    assert every_second["mape"] < 0.01 < every_second["naive_mape"]
    assert not any(op == "linear" for op, _ in splits)


def test_too_few_measurements_are_reported(run: Path, profile_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = json.loads((run / "out.json").read_text(encoding="utf-8"))["profiles"]["small"]["not_scored"]
    assert set(missing) == {"linear", "flash_attn", "memory_bound"}
    assert missing["linear"].startswith("12 bf16 forward measurements are too few")
    assert main(["--profile", str(profile_file), "--no-pictures"]) == 0
    printed = capsys.readouterr().out
    assert missing["linear"] in printed
    assert "every second size" in printed
    assert "%" in printed


def test_pictures_are_written_where_the_json_says(run: Path) -> None:
    named = json.loads((run / "out.json").read_text(encoding="utf-8"))["profiles"]["small"]["pictures"]
    written = sorted(str(path) for path in (run / "pics").rglob("*.jpg"))
    assert sorted(named) == written
    assert str(run / "pics/cal/linear.jpg") in written
    assert str(run / "pics/comm/all_reduce_intra_8_inter_1.jpg") in written
    assert all(Path(path).read_bytes()[:3] == b"\xff\xd8\xff" for path in written)


def test_several_profiles_have_a_table_each(profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.pt"
    write_profile(other, Profile("other", DEVICE, {}))
    assert main(["--profile", str(profile_file), str(other), "--no-pictures"]) == 0
    printed = capsys.readouterr().out
    assert "small: some GPU" in printed
    assert "other: some GPU" in printed
    assert "among 0 measurements no curve in one node has 8 sizes" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "no_such_gpu"], "no profile is called 'no_such_gpu'"),
        (["--profile", "{tmp}/absent.pt"], "no such profile file"),
        (["--profile", "{tmp}/text.pt"], "truncated or not written by torch.save"),
        (["--profile", "{small}", "{tmp}/small.pt"], "two profiles are called small"),
        (["--profile", "{small}", "--pics", "{tmp}/text.pt"], "cannot write pictures there"),
        (["--profile", "{small}", "--no-pictures", "--json", "{tmp}/text.pt/out.json"], "cannot write there"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(
    arguments: list[str], message: str, profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.pt").write_text("not a profile")
    (tmp_path / "small.pt").write_bytes(profile_file.read_bytes())
    assert main([a.format(tmp=tmp_path, small=profile_file) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


CPU = Device("some CPU", {"bf16": 4e11, "fp32": 1e11}, 1e10, 3e10, 1, 2, 4e9, 4e9)


def gemms(dtypes: dict[str, int], layout: str = "TN") -> Table:
    """Return ``dtypes[d]`` GEMMs of each type d, all of different shapes: 20 microseconds, then 0.9 * 1e11 FLOP/s."""
    rows = sum(dtypes.values())
    m, n, k = (64 * (1 + np.arange(rows) % period) for period in (37, 31, 29))
    seconds = 2e-5 + 2.0 * m * n * k / 9e10
    columns = {"m": m, "n": n, "k": k, "batch": 1, "layout": layout, "seconds": seconds}
    return Table.from_columns("linear", {**columns, "dtype": np.repeat(list(dtypes), list(dtypes.values()))})


def streams(kinds: dict[str, int]) -> Table:
    """Return ``kinds[k]`` sizes of each kind k; every kind has its own launch time and bandwidth."""
    parts = [
        (kind, np.geomspace(2**14, 2**28, rows), 2e-6 * (1 + i), 1e10 * (1 + 0.1 * i))
        for i, (kind, rows) in enumerate(kinds.items())
    ]
    columns = {
        "kind": np.concatenate([[kind] * len(size) for kind, size, _, _ in parts]),
        "bytes": np.concatenate([size for _, size, _, _ in parts]).astype(np.int64),
        "seconds": np.concatenate([launch + size / rate for _, size, launch, rate in parts]),
    }
    return Table.from_columns("memory_bound", columns)


@pytest.mark.parametrize(
    ("dtypes", "expected", "rows"),
    [
        ({"fp32": 60, "bf16": 40}, "fp32", 60),
        ({"fp32": 60, "bf16": 60}, "bf16", 60),
        ({"fp32": 60, "bf16": 40, "fp16": 30}, "bf16", 70),  # bf16 and fp16 count as one type
        ({"tf32": 90, "bf16": 40}, "bf16", 40),  # the device states no tf32 peak, so tf32 has no fit
        ({}, "bf16", 0),
    ],
)
def test_the_type_with_most_measurements_is_scored(dtypes: dict[str, int], expected: str, rows: int) -> None:
    profile = Profile("p", CPU, {"linear": gemms(dtypes)} if dtypes else {})
    assert linear_family(profile) == expected
    assert len(linear_rows(profile)) == rows


def test_gradients_do_not_choose_the_type() -> None:
    forward, gradients = gemms({"bf16": 5}), gemms({"fp32": 90}, layout="NN")
    joined = {name: np.concatenate([forward[name], gradients[name]]) for name in forward.columns}
    assert linear_family(Profile("p", CPU, {"linear": Table(joined)})) == "bf16"


def test_fp32_gemms_are_predicted_as_fp32() -> None:
    """With the bf16 peak, or without fp32 measurements, the fit would be wrong by half or more."""
    (score,) = linear_scores(Profile("p", CPU, {"linear": gemms({"fp32": 60, "bf16": 20})}))
    assert (score.regime, score.split, score.rows) == ("all shapes", "five folds", 60)
    assert score.mape < 0.08 and score.coverage > 0.8


def test_five_folds_predict_each_measurement_once_by_a_fit_without_it() -> None:
    rows = gemms({"fp32": 83})
    strata = np.arange(83) % 3 == 0
    split = five_folds(strata)
    assert (np.sum(split.folds, axis=0) == 1).all()
    assert all(abs(int(fold[strata].sum()) - strata.sum() / 5) < 1 for fold in split.folds)
    predicted: list[float] = []

    def predict(fitted: Table, queries: Table) -> Estimate:
        assert not set(fitted["seconds"]) & set(queries["seconds"])
        assert len(fitted) + len(queries) == 83
        predicted.extend(queries["seconds"])
        mean = np.full(len(queries), fitted["seconds"].mean())
        return Estimate(mean, np.full(len(queries), 0.1), np.zeros(len(queries), dtype=np.int8))

    found = held_out(rows, split, predict)
    assert sorted(predicted) == sorted(rows["seconds"])
    assert len(np.unique(found.seconds)) == 5
    for fold in split.folds:
        assert found.seconds[fold] == pytest.approx(rows["seconds"][~fold].mean(), rel=1e-12)


def test_scores_of_folds_are_pooled_and_a_shared_split_is_fitted_once() -> None:
    rows = gemms({"fp32": 100})
    everything, large = np.ones(100, dtype=bool), rows["m"] >= 1024
    split, fits = five_folds(large), []

    def predict(fitted: Table, queries: Table) -> Estimate:
        fits.append(len(fitted))
        return Estimate(1.25 * queries["seconds"], np.full(len(queries), 0.1), np.zeros(len(queries), dtype=np.int8))

    trials = [Trial("large", large, split), Trial("all", everything, split), Trial("few", rows["m"] >= 2048, split)]
    flops = 2.0 * rows["m"] * rows["n"] * rows["k"]
    scores = run_trials("toy", rows, flops, trials, predict)
    assert [(s.regime, s.rows) for s in scores] == [("large", int(large.sum())), ("all", 100)]  # no score for "few"
    assert sum(rows["m"] >= 2048) < LEAST_ROWS <= large.sum()
    assert len(fits) == 5 and sum(100 - n for n in fits) == 100
    for s in scores:
        assert (s.mape, s.bias, s.p90, s.coverage) == pytest.approx((0.25, 0.25, 0.25, 0.0))
        assert 0 < s.naive_mape < 1


def test_a_fifth_is_held_out_where_that_is_enough() -> None:
    """A random fifth of 400 measurements (about 80) is held out once; a fifth of 100 is fewer than 50: five folds."""
    (score, *_) = memory_bound_scores(Profile("p", CPU, {"memory_bound": repeated(400)}))
    assert (score.split, score.rows) == ("random fifth", int(random_fifth(400).held.sum()))
    (score, *_) = memory_bound_scores(Profile("p", CPU, {"memory_bound": repeated(100)}))
    assert (score.split, score.rows) == ("five folds", 100)


def repeated(rows: int) -> Table:
    size = np.geomspace(2**14, 2**30, rows)
    columns = {"kind": "copy", "bytes": size.astype(np.int64), "seconds": 3e-6 + size / 2e10}
    return Table.from_columns("memory_bound", columns)


def test_every_kind_stays_in_the_fit() -> None:
    """A fifth of 11 measurements of a kind can be held out (a fit needs 8); with 9 it cannot, and the kind is not scored."""
    exact = memory_bound_scores(Profile("p", CPU, {"memory_bound": streams({f"kind {i}": 11 for i in range(15)})}))
    assert [(s.regime, s.split, s.rows) for s in exact] == [("all kinds", "five folds", 165)]
    assert exact[0].mape < 0.01  # each measurement is predicted by the fit of its kind, and has exactly that form
    some = memory_bound_scores(Profile("p", CPU, {"memory_bound": streams({f"kind {i}": 9 if i else 60 for i in range(3)})}))
    assert [(s.regime, s.rows) for s in some] == [("kinds with measurements to spare", 60)]
    none = Profile("p", CPU, {"memory_bound": streams({f"kind {i}": 9 for i in range(9)})})
    assert memory_bound_scores(none) == []
    assert measure("p", none).missing["memory_bound"].startswith("of its 81 measurements fewer than 50 can be held out")


def attention(lengths: list[int], rows: int) -> Table:
    seq = np.resize(lengths, rows)
    heads = 2 ** (np.arange(rows) % 5)
    seconds = 5e-5 + 2.0 * heads * seq * (seq + 1) * 128 / 5e10
    columns = {
        "batch": 1 + np.arange(rows) % 3,
        "seq_q": seq,
        "seq_kv": seq,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": 128,
        "causal": 1,
        "pass": "forward",
        "kernel": "some",
        "dtype": "fp32",
    }
    return Table.from_columns("flash_attn", {**columns, "seconds": seconds * columns["batch"]})


def test_all_attention_lengths_are_scored_where_long_ones_are_rare() -> None:
    (score,) = flash_attn_scores(Profile("p", CPU, {"flash_attn": attention([64, 128, 256, 512], 60)}))
    assert (score.regime, score.split, score.rows) == ("forward, all lengths", "five folds", 60)
    assert score.mape < 0.25
    (score,) = flash_attn_scores(Profile("p", CPU, {"flash_attn": attention([512, 1024], 60)}))
    assert (score.regime, score.rows) == ("forward", 60)


def test_folds_that_leave_too_few_measurements_for_learning_are_reported() -> None:
    score = memory_bound_scores(Profile("p", CPU, {"memory_bound": repeated(100)}))[0]
    assert "in five folds 132 measurements are left" in caveat(165, [score])
    assert caveat(149, [score]) == ""  # too few for residual learning even with all measurements
    assert caveat(188, [score]) == ""  # 150 measurements are left
    assert caveat(165, []) == ""
