"""Whatever is read, a file of SimAI or AICB is understood or refused in one sentence, never with a traceback."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simai_files import DATA, HEADER, MACHINE, table_of, text_of

from profiler.errors import InputError
from solver.simai.aiob import compute_cache, parse_kernel_times
from solver.simai.aiob_fill import fill_csv, fill_csv_as_aicb, fill_text, fill_text_as_aicb
from solver.simai.analytical import Overlaps, analytical_step
from solver.simai.analytical_csv import analytical_csv
from solver.simai.workload_csv import parse_workload_csv, workload_csv
from solver.simai.workload_text import parse_workload_text, workload_text

TIMES = parse_kernel_times((DATA / "aiob_Example.txt").read_text(), "aiob")
TEXT = "\n".join([*text_of("mixtral8x7b_tp2_ep8_ws128_gbs128_seq2048_sp_aiobExample").splitlines()[:14], ""]).replace(
    "\n465\n", "\n12\n"
)
TABLE = "\n".join(table_of("gpt13b_tp4_pp1_ws4_gbs2_seq4096_comp").splitlines()[:16])
RAW = 'train_iter:2\n{"Emb": [{"time_gpu": 3}, {"time_gpu": 40}], "param_time": [{"time_gpu": 7.5}]}'


def read_text(text: str) -> None:
    workload = parse_workload_text(text, "x")
    assert parse_workload_text(workload_text(workload), "x").rows == workload.rows
    fill_text(workload, TIMES), fill_text_as_aicb(workload, TIMES)
    analytical_csv(analytical_step(workload, MACHINE, 64, Overlaps(tp=0.5, pp=0.5)), "x-")


def read_table(text: str) -> None:
    workload = parse_workload_csv(text, "x")
    assert parse_workload_csv(workload_csv(workload), "x") == workload
    fill_csv(workload, TIMES), fill_csv_as_aicb(workload, TIMES)


def read_times(text: str) -> None:
    compute_cache(parse_kernel_times(text, "x"))


NUMBERS = ["None", "-1", "--1", "1e400", "nan", "0", "0.5", "9" * 30, "9" * 5000, "((1 2) (3))", "\u0663"]
WORDS = [
    "pp_comm",
    "ep:",
    "checkpoints: 2",
    "ALLREDUCE_EP",
    "ALLTOALL",
    "[",
    "{",
    "}",
    "(",
    ":",
    '"',
    "\0",
    "\t",
    "\n",
    "\u2028",
]
PIECES = st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.text(max_size=6)


@pytest.mark.parametrize(
    ("start", "read"), [(TEXT, read_text), (TABLE, read_table), (RAW, read_times)], ids=["text", "csv", "aiob"]
)
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_changed_files_are_read_or_refused_in_a_sentence(start: str, read: Callable[[str], None], data: st.DataObject) -> None:
    text = start
    for _ in range(data.draw(st.integers(1, 3))):
        at, length = data.draw(st.integers(0, len(text))), data.draw(st.sampled_from([0, 1, 1, 4]))
        text = text[:at] + data.draw(PIECES) + text[at + length :]
    try:
        read(text)
    except InputError as error:  # any other error fails the test
        assert "\n" not in str(error) and len(str(error)) > 10


def test_a_shape_of_thousands_of_digits_is_refused() -> None:
    table = re.sub(r"\(\((\d+)", "((" + "9" * 5000, TABLE, count=1)
    assert table != TABLE
    with pytest.raises(InputError, match="a size of a GEMM has at most 18 digits"):
        read_table(table)


def test_the_starts_are_understood() -> None:
    read_text(TEXT), read_table(TABLE), read_times(RAW)
    assert len(parse_workload_text(TEXT, "x").rows) == 12 and len(parse_workload_csv(TABLE, "x").items) == 15
    assert compute_cache(parse_kernel_times(RAW, "x"))


@pytest.mark.parametrize(
    ("text", "rows", "chunks"),
    [
        (f"{HEADER} 2 ga: None vpp: None all_gpus: 8\n1\na -1 1 NONE 0 1 NONE 0 1 NONE 0 1", 1, 0),
        (f"{HEADER} 2 all_gpus: 8 mode: None x: ?\n0", 0, None),
    ],
)
def test_none_counts_as_nothing(text: str, rows: int, chunks: int | None) -> None:
    read_text(text)
    found = parse_workload_text(text, "x")
    assert (len(found.rows), found.header.value("vpp:"), found.header.size("vpp:")) == (rows, chunks, 1)
    assert found.header.value("all_gpus:") == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEADER} 2 ga: 2147483648\n0", "ga: is '2147483648'; it must be a whole number, 0 or more, below 2^31"),
        (f"{HEADER} 2\n1\na --1 1 NONE 0 1 NONE 0 1 NONE 0 1", "column 2 is '--1'; it must be a whole number, -1 by custom"),
        (f"{HEADER} 2 checkpoints: 1 {'9' * 30}\n0", "checkpoints: announces 1 rows; as many numbers of rows must follow it"),
    ],
)
def test_numbers_that_no_program_holds(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_workload_text(text, "x")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "shapes", ["((" + "9" * 40 + "x 3) (4 5))", "((1 2) (" + "3 " * 5000 + "x))", "(" + "(1 2) " * 5000 + "x)"]
)
def test_sizes_of_many_digits_are_refused_at_once(shapes: str) -> None:
    lines = TABLE.splitlines()
    at = lines[0].split(",").index("msg_size")
    cells = lines[1].split(",")
    started = time.process_time()
    with pytest.raises(InputError, match="msg_size"):
        parse_workload_csv("\n".join([lines[0], ",".join([*cells[:at], shapes, *cells[at + 1 :]])]), "x")
    assert time.process_time() - started < 1.0
