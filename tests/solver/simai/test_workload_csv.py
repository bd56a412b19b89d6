"""AICB's Workload CSV: every file is read and written back, old headers too, and wrong rows are refused with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simai_files import TABLES, table_of

from profiler.errors import InputError
from solver.simai.workload_csv import (
    COLUMNS,
    GROUPS,
    KINDS,
    CsvWorkload,
    Gemm,
    Item,
    parse_workload_csv,
    read_workload_csv,
    workload_csv,
    write_workload_csv,
)

HEAD = ",".join(COLUMNS)
LINE = "CommType.all_reduce,CommGroup.dp_group,8,1024,step,None,None,,None,None,None,1"


@pytest.mark.parametrize("name", TABLES)
def test_files_of_aicb_are_written_back_as_they_were(name: str) -> None:
    text = table_of(name)
    workload = parse_workload_csv(text, name)
    assert workload_csv(workload) == text and len(workload.items) == text.count("\n") - 1 > 100


def test_what_a_line_says() -> None:
    lines = [
        "CommType.computation,None,None,((4096 1 5120) (5120 3840)),forward.x,None,None,,1820000,None,None,1",
        "CommType.all_to_all,CommGroup.ep_group,None,277364736.0,forward.MoE.dispatch,None,None,,0.5,12.5,11,1",
        "CommType.irecv,CommGroup.pp_group,1,6291456,forward_step,None,3,recv_next,None,None,None,1",
        "CommType.epoch_end,None,None,None,,None,None,,None,None,None,1",
    ]
    compute, exchange, receive, end = parse_workload_csv("\n".join([HEAD, *lines]), "x").items
    assert compute == Item("computation", None, Gemm(((4096, 1, 5120), (5120, 3840))), "forward.x", elapsed=1820000)
    assert (exchange.size, exchange.elapsed, exchange.algbw, exchange.group_size) == (277364736.0, 0.5, 12.5, None)
    assert (receive.src, receive.additional, end.size) == ("3", "recv_next", None)


def test_logs_of_physical_runs_and_old_columns() -> None:
    ranks = f"[rank0 ~ rank127]\n{HEAD}\n{LINE}\n"
    assert parse_workload_csv(ranks, "x").ranks == "[rank0 ~ rank127]" and workload_csv(parse_workload_csv(ranks, "x")) == ranks
    old = "comm_type,comm_group,msg_size,stage,dst,src,additional,_elapsed_time,algbw,busbw,count\n"
    old += "CommType.broadcast,CommGroup.tp_group,24,init,None,0,,0.01,2.5,2.5,1\n"
    workload = parse_workload_csv(old, "x")
    assert workload.items[0].group_size is None and workload_csv(workload) == old
    commas = f'{HEAD}\nCommType.computation,None,None,"((4, 1, 5), (5, 3))",x,None,None,,None,None,None,1\n'
    assert parse_workload_csv(commas, "x").items[0].size == Gemm(((4, 1, 5), (5, 3)))


def test_sections_of_other_ranks() -> None:
    whole = f"[rank0 ~ rank15]\n{HEAD}\n{LINE}\n[rank16 ~ rank31]\n{HEAD}\n{LINE}\n{LINE}\n"
    workload = parse_workload_csv(whole, "x")
    assert [(part.ranks, len(part.items)) for part in (workload, *workload.others)] == [
        ("[rank0 ~ rank15]", 1),
        ("[rank16 ~ rank31]", 2),
    ]
    assert workload_csv(workload) == whole
    bare = f"{HEAD}\n{LINE}\n[rank16 ~ rank31]\n{LINE}\n"
    assert workload_csv(parse_workload_csv(bare, "x")) == bare
    with pytest.raises(InputError, match="x, line 5: comm_type is 'CommType.sum'"):
        parse_workload_csv(bare + LINE.replace("all_reduce", "sum"), "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x, line 1: has no column comm_type; a Workload CSV starts with comm_type,comm_group"),
        (HEAD.replace("stage", "stages"), "x, line 1: has no column stage;"),
        (HEAD + ",extra", "x, line 1: has an unknown column 'extra'; known are"),
        (HEAD + ",stage", "x, line 1: has a column twice"),
        (f"[rank0]\n{HEAD}\n{LINE},1", "x, line 3: has 13 cells; the header line has 12"),
        (
            f"{HEAD}\n{LINE.replace('all_reduce', 'all_reduced')}",
            "x, line 2: comm_type is 'CommType.all_reduced' (did you mean 'all_reduce'?); it must be CommType. and one of",
        ),
        (f"{HEAD}\n{LINE}\n{LINE.replace('dp_group', 'world')}", "x, line 3: comm_group is 'CommGroup.world'; it must be"),
        (f"{HEAD}\n{LINE.replace('CommGroup.dp_group', 'None')}", "x, line 2: comm_group is None; all_reduce needs a group"),
        (
            f"{HEAD}\n{LINE.replace('1024', '-4')}",
            "x, line 2: msg_size is '-4'; it must be a number that is not negative, or None",
        ),
        (f"{HEAD}\n{LINE.replace('1024', '((4 4)')}", "x, line 2: msg_size is '((4 4)'; it must be"),
        (f"{HEAD}\n{LINE.replace('1024', 'nan')}", "x, line 2: msg_size is 'nan'; it must be"),
        (f"{HEAD}\n{LINE}\n{'x' * 200_000}", "x: is no CSV after line 1 (field larger than field limit (131072));"),
        ("Traceback (most recent call last):\n", "x: holds a Python traceback, not an AICB Workload CSV; the program that"),
    ],
)
def test_wrong_files_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_workload_csv(text, "x")
    assert message in str(error.value) and "\n" not in str(error.value)


NUMBERS = st.none() | st.integers(0, 1 << 60) | st.floats(0, 1e20, allow_nan=False)
SHAPES = st.builds(
    Gemm, st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple), min_size=1, max_size=2).map(tuple)
)
TEXT = st.text(st.characters(codec="ascii", exclude_categories=("C", "Z")), max_size=9)
ITEMS = st.builds(
    Item,
    st.sampled_from(KINDS),
    st.sampled_from(GROUPS),
    NUMBERS | SHAPES,
    TEXT,
    NUMBERS,
    TEXT,
    TEXT,
    TEXT,
    NUMBERS,
    NUMBERS,
    NUMBERS,
    NUMBERS,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(ITEMS, max_size=5), st.none() | st.just("[rank0 ~ rank7]"))
def test_any_workload_is_read_back(items: list[Item], ranks: str | None) -> None:
    workload = CsvWorkload(tuple(items), ranks=ranks)
    assert parse_workload_csv(workload_csv(workload), "x") == workload


def test_files_are_read_and_written(tmp_path: Path) -> None:
    workload = CsvWorkload((Item("barrier", "all", 0, "init"),))
    write_workload_csv(tmp_path / "w.csv", workload)
    assert read_workload_csv(tmp_path / "w.csv") == workload
