"""What the documents tell a user to type runs as it stands: the first hour, and the examples of --help."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from solver.console import main, parser

ROOT = Path(__file__).resolve().parents[2]
#: Examples that measure, that predict a thousand cases, or that other tests run in the same words.
_ELSEWHERE = ("foretrain measure", "foretrain validate", "foretrain import job.log", "foretrain learn", "foretrain health")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line: str) -> None:
    if echo := re.fullmatch(r"echo '(.*)' > (\S+)", line):
        Path(echo[2]).write_text(echo[1])
        return
    words = shlex.split(line)
    assert words[0] == "foretrain" and main(words[1:]) == 0, line


def test_the_first_hour(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/first_hour.md").read_text()
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    assert len(lines) >= 14 and len(re.findall(r"^\*\*\d+\.", text, re.M)) == 10
    for line in lines:
        run(line)
    shown = capsys.readouterr().out
    assert shown.count("tokens/GPU/s") > 5 and "GPUs meet 30 days" in shown and "learned from 2 runs (mine.json)" in shown
    for name in ("qwen.html", "run.sh", "runs.jsonl", "mine.json", "sweep.csv", "sweep.png", "step.json", "memory.pickle"):
        assert (folder / name).stat().st_size > 100, name
    assert len(json.loads((folder / "step.json").read_text())["traceEvents"]) > 100


@pytest.mark.parametrize(
    "line", [line.strip() for line in (parser().epilog or "").splitlines() if line.startswith("  foretrain")]
)
def test_examples_of_help(line: str, folder: Path) -> None:
    if not line.startswith(_ELSEWHERE):
        run(line)


def test_every_command_has_an_example() -> None:
    (commands,) = (action.choices for action in parser()._subparsers._group_actions)  # type: ignore[union-attr]
    shown = set(re.findall(r"^  foretrain (\w+)", parser().epilog or "", re.M))
    assert set(commands or ()) <= shown
