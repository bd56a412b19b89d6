"""The command that states held-out errors: numbers where rows can be spared, a sentence where they cannot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from predictor.accuracy import main
from profiler.profile import Device, Profile, Table
from profiler.store import write_profile

pytest.importorskip("torch")  # only to write the profiles of these tests

DEVICE = Device("some GPU", {"bf16": 1e15}, 8e10, 3e12, 132, 8, 4e11, 5e10)
NUMBERS = ("mape", "p90", "bias", "coverage", "naive_mape")


def all_reduce(ranks: int) -> Table:
    """A latency and a rate: a law that interpolates well, and bandwidth over bytes does not at small sizes."""
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
    """The folder of one run with pictures and JSON."""
    folder = tmp_path_factory.mktemp("run")
    arguments = ["--profile", str(profile_file), "--pics", str(folder / "pics"), "--json", str(folder / "out.json")]
    assert main(arguments) == 0
    return folder


def test_json_holds_finite_scores_of_what_can_be_held_out(run: Path) -> None:
    found = json.loads((run / "out.json").read_text(encoding="utf-8"))["profiles"]["small"]
    splits = {(s["op"], s["split"]): s for s in found["scores"]}
    every_second = splits["all_reduce", "every second size"]
    assert all(np.isfinite(every_second[name]) for name in NUMBERS)
    assert every_second["rows"] == 16  # all sizes but the two ends, in two halves
    assert every_second["mape"] < 0.01 < every_second["naive_mape"]
    assert not any(op == "linear" for op, _ in splits)


def test_too_few_rows_are_named_in_a_sentence(run: Path, profile_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = json.loads((run / "out.json").read_text(encoding="utf-8"))["profiles"]["small"]["not_scored"]
    assert set(missing) == {"linear", "flash_attn", "memory_bound"}
    assert missing["linear"].startswith("of 12 16-bit forward rows a fifth would be held out")
    assert main(["--profile", str(profile_file), "--no-pictures"]) == 0
    printed = capsys.readouterr().out
    assert missing["linear"] in printed
    assert "every second size" in printed
    assert "%" in printed


def test_pictures_lie_where_they_are_named(run: Path) -> None:
    named = json.loads((run / "out.json").read_text(encoding="utf-8"))["profiles"]["small"]["pictures"]
    written = sorted(str(path) for path in (run / "pics").rglob("*.jpg"))
    assert sorted(named) == written
    assert str(run / "pics/cal/linear.jpg") in written
    assert str(run / "pics/comm/all_reduce_intra_8_inter_1.jpg") in written
    assert all(Path(path).read_bytes()[:3] == b"\xff\xd8\xff" for path in written)


def test_several_profiles_share_one_table_each(profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.pt"
    write_profile(other, Profile("other", DEVICE, {}))
    assert main(["--profile", str(profile_file), str(other), "--no-pictures"]) == 0
    printed = capsys.readouterr().out
    assert "small: some GPU" in printed
    assert "other: some GPU" in printed
    assert "among 0 rows no curve in one node has 8 sizes" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
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
    arguments: list[str], said: str, profile_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.pt").write_text("not a profile")
    (tmp_path / "small.pt").write_bytes(profile_file.read_bytes())
    assert main([a.format(tmp=tmp_path, small=profile_file) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
