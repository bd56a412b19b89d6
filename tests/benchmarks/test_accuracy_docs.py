"""The shipped cases and the page about them: file contents, constant-MFU baseline by hand, tables of made-up predictions."""

from __future__ import annotations

import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import accuracy
import accuracy_pictures
import accuracy_tables
import numpy as np
import pytest
from toy import layer_linear_parameters

from profiler.profile.profiles import derived_profiles, shipped_profiles
from profiler.units import GIB
from solver.formats.cases.reading import Case, read_cases
from solver.report.explain import Explanation
from solver.report.scores import constant_mfu_scores, flops_per_gpu
from solver.report.validate import Prediction, timed
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy
from solver.step.solutions import Solutions

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "configs" / "cases"
KEYS = {"id", "hardware", "cluster", "model", "run", "measured", "source"}
#: 100 * (2 * 100 + 2 * 100) + 3 * 100 * 200 = 100,000 weights in the linears of its one layer, 50 * 100 in the head.
SMALL = ModelSpec(
    name="small",
    hidden_size=100,
    intermediate_size=200,
    num_hidden_layers=1,
    num_attention_heads=10,
    num_key_value_heads=10,
    head_dim=10,
    vocab_size=50,
)
RUN = Strategy(world_size=2, dp=2, seq_len=10, num_micro_batches=3)


@pytest.fixture(scope="module")
def plain() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / "published.jsonl").read_text().splitlines()]


def made(
    name: str,
    measured: float,
    predicted: float = 1.0,
    run: Strategy = RUN,
    width: float = 1.5,
    hardware: str = "a",
    **also: Any,
) -> Prediction:
    """Return a prediction whose 90% interval goes from predicted / width to predicted * width."""
    why = SimpleNamespace(seconds=predicted, interval=(predicted / width, predicted * width))
    case = Case(name, hardware, {}, SMALL, run, {"step_s": measured, **also}, ())
    return Prediction(case, None, None, 0, cast(Explanation, why))


def memory_prediction(name: str, device: float, limit: float = 10.0, **measured: Any) -> Prediction:
    """Return a prediction of peak memory: all kinds of memory are ``device`` bytes."""
    bytes_ = np.array([device])
    memory = SimpleNamespace(device=bytes_, allocated=bytes_, reserved=bytes_)
    problem = SimpleNamespace(cluster=SimpleNamespace(memory_bytes=limit))
    solutions = cast(Solutions, SimpleNamespace(memory=memory, problem=problem, fits=bytes_ <= limit))
    return Prediction(Case(name, "a", {}, SMALL, RUN, measured, ()), None, solutions)


def cells(table: str) -> dict[str, list[str]]:
    """Return the rows of a Markdown table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1, "all rows have the columns of the head"
    return {row[0]: row[1:] for row in rows}


# the shipped file


def test_every_case_reads_and_none_is_left_out(plain: list[dict[str, Any]]) -> None:
    cases = read_cases(CASES / "published.jsonl")
    experts = {c["id"] for c in plain if "num_experts" in c["model"] or "kv_lora_rank" in c["model"]}
    assert len(cases) == 1583 and len({case.id for case in cases}) == 1583
    assert len(experts) == 140 and sum(name.startswith("SM:deepseekv2") for name in experts) == 6
    assert not any(case.skipped for case in cases)


def test_cases_hold_numbers_and_no_texts(plain: list[dict[str, Any]]) -> None:
    assert (CASES / "published.jsonl").stat().st_size < 1_300_000
    assert all(set(case) - {"megatron_args"} == KEYS for case in plain)
    assert {case["hardware"] for case in plain} <= {*shipped_profiles(), *derived_profiles()}
    assert Counter("step_s" in case["measured"] for case in plain) == {True: 965, False: 618}
    assert sum(bool(case["measured"].get("out_of_memory")) for case in plain) == 483


def test_every_group_has_a_source_and_a_description() -> None:
    sizes = Counter(case.source for case in read_cases(CASES / "published.jsonl"))
    rows = cells((CASES / "SOURCES.md").read_text())
    assert {name: int(row[0]) for name, row in rows.items() if row[0].isdigit()} == sizes
    assert all("http" in row[1] or "the same" in row[1] for row in rows.values() if row[0].isdigit())
    assert set(json.loads((CASES / "groups.json").read_text())) == set(sizes)


def test_sources_of_cases_are_listed(plain: list[dict[str, Any]]) -> None:
    text = (CASES / "SOURCES.md").read_text()
    origins = {found[0] for case in plain if (found := re.match(r"arXiv \S+|[^ :@]+", case["source"]))}
    assert len(origins) == 20
    assert all(origin in text for origin in origins)


def test_notes_and_peers_refer_to_existing_cases(plain: list[dict[str, Any]]) -> None:
    names = [case["id"] for case in plain]
    notes = [accuracy_tables.Note(**note) for note in json.loads((CASES / "notes.json").read_text())]
    assert all(any(fnmatchcase(name, note.cases) for name in names) for note in notes)
    peers = [accuracy_tables.Peer(**peer) for peer in json.loads((CASES / "peers.json").read_text())]
    assert {peer.group for peer in peers} <= {name.split(":")[0].split("-")[0] for name in names}


# the constant-MFU baseline


def test_flops_by_hand() -> None:
    # 2 GPUs, 2 * 3 sequences of 10 tokens: 30 tokens per GPU; 6 * 105,000 for the weights, 6 * 1 * 100 * 10 for attention
    assert layer_linear_parameters(SMALL) == 100_000
    case = made("x-1", 1.0).case
    assert flops_per_gpu(case) == pytest.approx(30 * (630_000 + 6_000))
    recomputing = made("x-1", 1.0, run=RUN.replace(recompute="full")).case
    assert flops_per_gpu(recomputing) == pytest.approx(40 * 636_000)


def test_constant_mfu_by_hand() -> None:
    # work 1, 1 and 4/3 in 1, 2 and 4 s: rates 1, 1/2 and 1/3; the median, 1/2, predicts 2, 2 and 8/3 s
    full = RUN.replace(recompute="full")
    score = constant_mfu_scores([made("x-1", 1.0), made("x-2", 2.0), made("y-1", 4.0, run=full)])
    assert (score["x"].n, score["x"].median, score["x"].bias) == (2, pytest.approx(0.5), pytest.approx(0.5))
    assert (score["y"].median, score["y"].bias) == (pytest.approx(1 / 3), pytest.approx(-1 / 3))
    assert (score["all"].n, score["all"].median) == (3, pytest.approx(1 / 3))


def test_constant_mfu_is_per_hardware() -> None:
    score = constant_mfu_scores([made("x-1", 1.0), made("x-2", 7.0, hardware="b")])
    assert score["x"].p90 == pytest.approx(0), "a single case is its own median"


# the tables


def test_time_table() -> None:
    # the baseline predicts the median, 2 s, for all; predictions are 10% short, exact, and twice the time (not in its interval)
    found = [made("x-1", 1.0, 0.9), made("x-2", 2.0, 2.0), made("y-1", 4.0, 8.0)]
    rows = cells(accuracy_tables.time_table(found, {"x": "some runs"}))
    assert rows["x"][:9] == ["some runs", "2", "50.0%", "5.0%", "9.0%", "-5.0%", "100%", "50%", "0.90"]
    assert rows["y"][1:9] == ["1", "50.0%", "100.0%", "100.0%", "+100.0%", "0%", "50%", "-1.00"]
    assert rows["all"][1:9] == ["3", "50.0%", "10.0%", "82.0%", "+30.0%", "67%", "50%", "0.80"]


def test_regret_is_in_the_row_of_its_group() -> None:
    # the layout that is predicted fastest took 1.2 s; the best took 1.0 s
    runs = [RUN.replace(micro_batch_size=size, num_micro_batches=6 // size) for size in (1, 2, 3)]
    found = [
        made(f"x-{i}", time, predicted, run)
        for i, (time, predicted, run) in enumerate(zip((1.0, 1.2, 2), (3, 1, 2), runs, strict=True))
    ]
    assert cells(accuracy_tables.time_table(found, {}))["x"][9:] == ["20.0%", "20.0%", "1"]


def test_memory_table() -> None:
    found = [memory_prediction(f"x-{i}", ratio * 4 * GIB, peak_memory_gib=4.0) for i, ratio in enumerate((0.9, 1.0, 1.2))]
    rows = cells(accuracy_tables.memory_table([*found, memory_prediction("y-1", 5.0 * GIB, peak_memory_gib=4.0)], {}))
    assert rows["x"][1:] == ["3", "1", "10.0%", "18.0%", "+3.3%"]
    assert rows["all"][1:3] == ["4", "2"]


def test_fits_table() -> None:
    # of 4 runs that fitted one is predicted OOM; of 2 with OOM one is predicted to fit
    fitted = [memory_prediction(f"x-{i}", device, step_s=1.0) for i, device in enumerate((5.0, 6.0, 10.0, 11.0))]
    failed = [memory_prediction(f"xOOM-{i}", device, out_of_memory=True) for i, device in enumerate((9.0, 12.0))]
    text = accuracy_tables.fits_table(fitted + failed)
    assert cells(text)["fitted"] == ["3", "1"] and cells(text)["OOM"] == ["1", "1"]
    assert "Classified correctly: 66.7%" in text and "25.0% of 4 runs" in text and "50.0% of 2 runs" in text
    assert accuracy_tables.fits_table(fitted) == "", "no OOM was reported"


def test_factor_table_leaves_the_largest_group_out() -> None:
    long = RUN.replace(seq_len=9000)
    found = [made("x-1", 1.0, 0.9), made("x-2", 1.0, 0.8), made("y-1", 1.0, 1.3), made("x-3", 1.0, 0.7, run=long)]
    lines = [line for line in accuracy_tables.factor_table(found).splitlines() if line.startswith("| sequence")]
    assert lines == [
        "| sequence | up to 1,024 | 3 | -10.0% | 20.0% | 1 | +30.0% |",
        "| sequence | over 8,192 | 1 | -30.0% | 30.0% | 0 |  |",
    ]
    assert "n without x" in accuracy_tables.factor_table(found)


@pytest.mark.parametrize(
    ("size", "label"), [(1, "1"), (2, "2"), (3, "3 to 4"), (8, "5 to 8"), (16, "9 to 16"), (17, "over 16")]
)
def test_bins_of_the_micro_batch(size: int, label: str) -> None:
    assert f"| micro batch | {label} | 1 |" in accuracy_tables.factor_table(
        [made("x-1", 1.0, run=RUN.replace(micro_batch_size=size))]
    )


def test_peers_are_listed_with_the_mean_of_their_group() -> None:
    peer = accuracy_tables.Peer("other", "its runs", "5%", "1%", "x", "its page")
    found = [
        made("x-1", 1.0, 0.9),
        made("x-2", 1.0, 1.3),
        made("y-1", 1.0, 3.0),
        memory_prediction("x-3", 5 * GIB, peak_memory_gib=4.0),
    ]
    assert cells(accuracy_tables.peer_table(found, [peer]))["other"] == [
        "its runs",
        "5%",
        "1%",
        "x",
        "2",
        "20.0%",
        "25.0%",
        "its page",
    ]


def test_reasons_come_from_notes_then_from_similar_runs() -> None:
    notes = [accuracy_tables.Note("x-1?", "known")]
    other = RUN.replace(num_micro_batches=5)
    found = [made("x-11", 1.0, 2.0), made("x-2", 1.5, 2.0), made("x-3", 1.55, 2.0), made("x-4", 1.0, 4.0, run=other)]
    rows = cells(accuracy_tables.worst_table(found, notes, count=4))
    assert list(rows)[2:] == ["x-4", "x-11", "x-2", "x-3"]
    assert [rows[name][-1] for name in ("x-11", "x-4")] == ["known", accuracy_tables.NOT_EXPLAINED]
    assert rows["x-2"][-1] == "x-11, described alike, took 1 s"
    without = [p for p in found if p.case.id != "x-11"]
    assert cells(accuracy_tables.worst_table(without, notes))["x-2"][-1] == accuracy_tables.NOT_EXPLAINED, (
        "x-3 took only 3% more"
    )
    assert cells(accuracy_tables.twin_table(found))["x"] == ["1", "55.0%", "55.0%"]


def test_skipped_cases_are_listed() -> None:
    skipped = Prediction(made("x-1", 1.0).case, "no profile of it")
    assert accuracy_tables.skipped_list([skipped, made("x-2", 1.0)]) == "* 1: no profile of it: x-1\n"
    assert accuracy_tables.skipped_list([made("x-2", 1.0)]) == "* none\n"
    assert timed([skipped]) == []


def test_the_page_has_every_table() -> None:
    found = [made("x-1", 1.0, 0.9), made("x-2", 2.0, 2.0), memory_prediction("x-3", 5 * GIB, peak_memory_gib=4.0)]
    text = accuracy.document(found, {}, [], [], "here")
    assert (
        "pics/here_time.jpg" in text and "it reads 3 measured runs" in text and "compares the 2 that state a step time" in text
    )
    assert not set("{}") & set(text)


def test_pictures_have_a_colour_for_every_shipped_gpu(tmp_path: Path) -> None:
    assert set(shipped_profiles()) <= set(accuracy_pictures.COLOURS)
    accuracy.draw_pictures([made("x-1", 1.0, 0.9), made("y-1", 200.0, 150.0, hardware="h100_sxm")], tmp_path, "here")
    assert [path.name for path in tmp_path.iterdir()] == ["here_time.jpg"], "no memory was predicted"
    assert 10_000 < (tmp_path / "here_time.jpg").stat().st_size < 200_000


def test_the_readme_states_the_figures_of_the_page() -> None:
    lines = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").split("## Step time\n")[1].split("\n## ")[0]
    page, readme = cells(lines), (ROOT / "README.md").read_text(encoding="utf-8")
    stated = readme.split("| runs | n | median error |")[1].split("\n\n")[0].splitlines()[2:]
    assert len(stated) == 19
    for line in stated:
        name, runs, median, p90, constant = (cell.strip() for cell in line.strip("|").split("|"))
        _, n, baseline, of_page, ninety, *_ = page[name.split(":")[0]]
        assert (runs, median, p90, constant) == (n, of_page, ninety, baseline), name


def test_the_sentences_of_the_readme_state_the_figures_of_the_page() -> None:
    text = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    page = cells(text.split("## Step time\n")[1].split("\n## ")[0])
    memory = cells(text.split("## Peak memory\n\n")[1].split("\n\n")[0])
    _, n, constant, median, _, _, inside, *_ = page["all"]
    assert f"on {n} published step times" in readme and f"the median error is {median}" in readme
    assert f"one MFU per GPU type it is {constant}." in readme
    assert f"interval contains {inside} of them" in readme and f"interval holds {inside} of all runs" in readme
    assert f"memory is {memory['GV'][3]} on {memory['GV'][1]} of" in readme
    assert f"and {memory['SM'][3]} on {memory['SM'][1]} runs on B200" in readme
    classified = text.split("Classified correctly: ")[1].split("%")[0]
    assert f"classified correctly for {classified}%" in readme


def test_figures_of_the_readme_follow_the_predictions() -> None:
    readme = "before\n| x: runs of two | 9 | 9.9% | 9.9% | 9.9% |\n| all | 9 | 9.9% | 9.9% | 9.9% |\n| y | word |\n"
    found = [made("x-1", 1.0, 0.9), made("x-2", 2.0, 2.6)]
    null = accuracy_tables.constant_mfu_scores(found)["x"].median
    expected = (
        f"before\n| x: runs of two | 2 | 20.0% | 28.0% | {null:.1%} |\n| all | 2 | 20.0% | 28.0% | {null:.1%} |\n| y | word |\n"
    )
    assert accuracy.with_figures(readme, found) == expected


def test_the_page_of_other_runs_is_another_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (ROOT / "docs" / "accuracy.md").read_bytes()
    assert accuracy.main(["--cases", str(tmp_path / "mine.jsonl")]) == 2
    assert capsys.readouterr().err.endswith("give the page of " + str(tmp_path / "mine.jsonl") + " with --output\n")
    assert (ROOT / "docs" / "accuracy.md").read_bytes() == before
