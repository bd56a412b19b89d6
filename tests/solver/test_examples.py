"""What the documents tell a user to type runs as it stands: the first hour, and the examples of --help."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from solver.commands.command_line import _EXAMPLES
from solver.commands.command_line import main as script
from solver.commands.console import main, parser
from solver.options.examples import EXAMPLES, epilog

ROOT = Path(__file__).resolve().parents[2]
LOG = "".join(f" iteration {i}/ 50 | elapsed time per iteration (ms): {7400 + i}.5 | loss 2.1\n" for i in range(1, 30))


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
    assert shown.count("tokens/GPU/s") > 5 and "meet 30 days" in shown and "learned from 2 runs (mine.json)" in shown
    for name in ("qwen.html", "run.sh", "runs.jsonl", "mine.json", "sweep.csv", "sweep.png", "step.json", "memory.pickle"):
        assert (folder / name).stat().st_size > 100, name
    assert len(json.loads((folder / "step.json").read_text())["traceEvents"]) > 100


@pytest.mark.parametrize("command", EXAMPLES)
def test_examples_of_a_command(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("""echo '{"step_s": 7.4, "peak_memory_gib": 61}' > job.json""")
    (folder / "job.log").write_text(LOG)
    if command in ("learn", "validate"):
        rows = (ROOT / "configs/cases/published.jsonl").read_text().splitlines()
        of_one_machine = [row for row in rows if '"id": "IE-' in row or '"id":"IE-' in row][:4]
        (folder / "runs.jsonl").write_text("\n".join(of_one_machine))
    if command == "learn":
        (folder / "runs.jsonl").unlink()
        for world, seconds in ((64, 7.4), (128, 3.6)):
            run(f"""echo '{{"step_s": {seconds}}}' > own.json""")
            run(f"foretrain import own.json --config configs/7B_internlm2.py --world_size {world} --runs runs.jsonl")
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, words: started.append(words))
    for line, _ in EXAMPLES[command]:
        if command == "measure":  # which other tests do
            main(shlex.split(line)[1:])
        else:
            run(line)
    assert len(started) == (len(EXAMPLES[command]) if command == "measure" else 0)


def test_every_help_shows_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = (action.choices for action in parser()._subparsers._group_actions)  # type: ignore[union-attr]
    assert set(commands or ()) == set(EXAMPLES)
    for name, own in (commands or {}).items():
        shown = own.format_help() if name != "measure" else epilog(name)
        assert all(line in shown and answer in shown for line, answer in EXAMPLES[name]), name
        assert EXAMPLES[name][0][0] in parser().format_help()


def test_the_script_s_own_examples(folder: Path) -> None:
    lines = [line.strip() for line in _EXAMPLES.splitlines() if line.startswith("  python")]
    assert len(lines) == 4
    for line in lines:
        words = shlex.split(line)
        if "--validate" not in words:
            assert words[:2] == ["python", "simulation_train_formulaic.py"] and script(words[2:]) == 0, line


def test_every_page_is_linked_and_its_commands_have_known_options() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert all(f"({page.name})" in index for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")
    text = (ROOT / "docs" / "commands.md").read_text() + (ROOT / "README.md").read_text().split("## Use it")[1]
    lines = [line.strip().split(" #")[0] for line in text.splitlines() if line.strip().startswith("foretrain ")]
    assert len(lines) >= 30
    for line in lines:
        if not line.startswith("foretrain measure"):
            parser().parse_args(shlex.split(line)[1:])


def test_the_example_of_the_readme_is_what_the_command_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## An example") : text.index("## Use it")]
    command, *shown = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    run(command)
    printed = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    figures = [line for line in shown if line != "..." and not line.startswith("TGS")]
    assert len(figures) == 7
    for line in figures:
        assert re.sub(r"\s+", " ", line) in printed, line
    found = re.fullmatch(r"([\d,]+)\s+([\d.]+) s\s+([\d.]+) s - ([\d.]+) s .*", figures[4])
    assert found is not None
    tgs, step, low, high = (float(figure.replace(",", "")) for figure in found.groups())
    days = 1e12 / (tgs * 512) / 86400
    answer = f"{days:.1f} days, {days * low / step:.0f} to {days * high / step:.0f} days with 90% probability"
    assert answer in section.replace("\n", " ")
