"""SIMAI_workload text: every file of AICB is read and written back, and what SimAI would misread is refused with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simai_files import HEADER, TEXTS, text_of

from profiler.errors import InputError
from solver.simai.workload_text import (
    CUSTOMIZED,
    EP,
    GA,
    PP_COMM,
    TP,
    Collective,
    Entry,
    Group,
    Header,
    Pass,
    Row,
    TextWorkload,
    parse_workload_text,
    read_workload_text,
    training_header,
    workload_text,
    write_workload_text,
)

ROW = "a -1 1 NONE 0 2 ALLREDUCE_EP 3 4 REDUCESCATTER_DP_EP 5 100"


@pytest.mark.parametrize("name", TEXTS)
def test_files_of_aicb_are_written_back_as_they_were(name: str) -> None:
    text = text_of(name)
    workload = parse_workload_text(text, name)
    assert workload_text(workload) == text
    assert len(workload.rows) == int(text.splitlines()[1]) > 100


def test_the_passes_of_a_row_and_their_groups() -> None:
    (row,) = parse_workload_text(f"{HEADER} 2\n1\n{ROW}\n\n", "x").rows
    assert row == Row("a", Pass(1, "NONE", 0), Pass(2, "ALLREDUCE_EP", 3), Pass(4, "REDUCESCATTER_DP_EP", 5), 100)
    assert row.compute == 7
    assert [row.input_grad.group(Group.TP), row.weight_grad.group(Group.DP), row.forward.group(Group.TP)] == [
        Group.EP,
        Group.DP_EP,
        Group.NONE,
    ]


@pytest.mark.parametrize(
    ("word", "collective", "group"),
    [
        ("NONE", Collective.NONE, Group.NONE),
        ("ALLGATHER", Collective.ALL_GATHER, Group.TP),
        ("ALLTOALL_EP", Collective.ALL_TO_ALL, Group.EP),
        ("ALLREDUCE_DP_EP", Collective.ALL_REDUCE, Group.DP_EP),
        ("ALLREDUCEALLTOALL", Collective.ALL_REDUCE, Group.NONE),  # the prefix that SimAI compares first
        ("REDUCESCATTER_PP", Collective.REDUCE_SCATTER, Group.NONE),
        ("BROADCAST", Collective.NONE, Group.NONE),
    ],
)
def test_words_by_prefix_and_suffix(word: str, collective: Collective, group: Group) -> None:
    assert (Pass(0, word, 1).collective, Pass(0, word, 1).group(Group.TP)) == (collective, group)


def test_first_lines_of_all_ages() -> None:
    new = parse_workload_text(f"{HEADER} 8 ep: 2 pp: 4 vpp: 3 ga: 5 all_gpus: 64 pp_comm: 6291456.0\n0\n", "x").header
    assert [new.value(key) for key in (TP, EP, "pp:", "vpp:", GA, "all_gpus:", PP_COMM)] == [8, 2, 4, 3, 5, 64, 6291456]
    bare = parse_workload_text("HYBRID_TRANSFORMER pp_comm 251658240 ga: 3 model_parallel_NPU_group: 8\n0", "x").header
    assert (bare.value(PP_COMM), bare.value(TP), bare.value(GA), bare.size(EP), bare.value(EP)) == (251658240, 8, 3, 1, None)
    assert bare.missing == ("ep:", "pp:", "vpp:", "all_gpus:")
    served = parse_workload_text(f"{HEADER} 8 ep: 8 pp: 1 vpp: 1 ga: 1 all_gpus: 8 mode: 1 phase: decode\n0", "x")
    assert served.header.value("mode:") == 1 and parse_workload_text(workload_text(served), "y") == served
    lists = parse_workload_text(f"{HEADER} 8 checkpoints: 2 0 4 checkpoint_initiates: 1 7\n0", "x").header
    assert (lists.rows_of("checkpoints:"), lists.rows_of("checkpoint_initiates:")) == ((0, 4), (7,))
    assert parse_workload_text("MICRO\n1\n" + ROW, "x").header == Header("MICRO")


def test_blanks_tabs_and_windows_line_ends() -> None:
    tabs = parse_workload_text(f"{HEADER} 2\n1\n{ROW}".replace(" ", "\t"), "x")
    assert parse_workload_text(f"{HEADER}  2\r\n 1 \r\n{ROW.replace(' ', '   ')}\r\n", "x") == tabs
    assert (
        parse_workload_text(f"{HEADER} 2\n1\n{ROW.replace(' 3 ', ' 3.0 ').replace(' 5 ', ' None ')}", "x")
        .rows[0]
        .weight_grad.size
        == 0
    )


def test_a_policy_for_each_row() -> None:
    text = f"{CUSTOMIZED}\n1\n" + ROW.replace(" ", "\t") + "\tDATA\n"
    assert parse_workload_text(text, "x").rows[0].policy == "DATA" and workload_text(parse_workload_text(text, "x")) == text
    with pytest.raises(InputError, match="x, line 3: has 12 columns; a row has 13"):
        parse_workload_text(f"{CUSTOMIZED}\n1\n{ROW}", "x")
    with pytest.raises(InputError, match=r"column 13 is 'DATE' \(did you mean 'DATA'\?\); it must be a policy"):
        parse_workload_text(f"{CUSTOMIZED}\n1\n{ROW} DATE", "x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "x, line 1: is empty; it must start with a policy such as HYBRID_TRANSFORMER_FWD_IN_BCKWD"),
        (
            "HYBRID_TRANSFORMR 1",
            "starts with 'HYBRID_TRANSFORMR' (did you mean 'HYBRID_TRANSFORMER'?); a SIMAI_workload starts",
        ),
        (f"{HEADER} 2 ep 4\n0", "x, line 1: 'ep' is no key (did you mean 'ep:'?); keys end in a colon, as in ep: 8"),
        (f"{HEADER} 2 ep:", "x, line 1: ep: has no value; a number must follow it"),
        (f"{HEADER} two\n0", "x, line 1: model_parallel_NPU_group: is 'two'; it must be a whole number, 1 or more"),
        (f"{HEADER} 0\n0", "model_parallel_NPU_group: is '0'; it must be a whole number, 1 or more"),
        (f"{HEADER} 2 ga: 1 ga: 2\n0", "x, line 1: ga is given twice; give it once"),
        (f"{HEADER} 2 pp_comm 1 pp_comm: 2\n0", "x, line 1: pp_comm is given twice; give it once"),
        (f"{HEADER} 2 checkpoints: 3 1 2\n0", "checkpoints: announces 3 rows; as many numbers of rows must follow it"),
        ("HYBRID_TRANSFORMER ep: 2\n0", "states no model_parallel_NPU_group:, the tensor-parallel size; add it"),
        (f"{HEADER} 2\n\n", "x, line 2: the number of rows is ''; it must be a whole number, 0 or more"),
        (f"{HEADER} 2\n2\n{ROW}", "x, line 2: states 2 rows, but 1 follow; they must agree"),
        (f"{HEADER} 2\n1\n{ROW} 1", "x, line 3: has 13 columns; a row has 12, from a name to a process time"),
        (f"{HEADER} 2\n1\n\n{ROW.replace('-1', 'x')}", "x, line 4: column 2 is 'x'; it must be a whole number, -1 by custom"),
        (f"{HEADER} 2\n1\n{ROW.replace(' 3 ', ' 3.5 ')}", "x, line 3: column 8 (bytes) is '3.5'; it must be a whole number"),
        (f"{HEADER} 2\n1\n{ROW.replace(' 1 ', ' -7 ')}", "x, line 3: column 3 (compute) is '-7'; it must be a whole"),
        (f"{HEADER} 2\n1\n{ROW.replace(' 1 ', ' 1e400 ')}", "column 3 (compute) is '1e400'; it must be a whole number"),
        (
            f"{HEADER} 2\n1\n{ROW.replace('NONE', 'none')}",
            "x, line 3: column 4 is 'none'; it must be a communication such as NONE",
        ),
        (
            f"{HEADER} 2\n1\n{ROW.replace('NONE', 'BROADCAST')}",
            "x, line 3: column 4 is 'BROADCAST'; it must be a communication",
        ),
        (f"{HEADER} 2\n1\n{ROW.replace('NONE', 'ALREDUCE')}", "x, line 3: column 4 is 'ALREDUCE' (did you mean 'ALLREDUCE'?)"),
        (f"{HEADER} 2\n1\n{ROW.replace(' 100', ' soon')}", "x, line 3: column 12 (process time) is 'soon'"),
        ("usage: x\nTraceback (most recent call last):\n  File", "x: holds a Python traceback, not a SIMAI_workload text;"),
    ],
)
def test_what_simai_would_misread_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        parse_workload_text(text, "x")
    assert message in str(error.value) and "\n" not in str(error.value)


NUMBERS = st.integers(0, (1 << 62) - 1)
WORDS = st.sampled_from(["NONE", "ALLREDUCE", "ALLGATHER_DP_EP", "REDUCESCATTER", "ALLTOALL_EP", "ALLREDUCEALLTOALL"])
PASSES = st.builds(Pass, NUMBERS, WORDS, NUMBERS)
NAMES = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=12)
ROWS = st.builds(Row, NAMES, PASSES, PASSES, PASSES, st.integers(0, 1000), st.integers(-1, 50))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, max_size=6), st.tuples(*[st.integers(1, 4096)] * 7))
def test_any_workload_is_read_back(rows: list[Row], sizes: tuple[int, ...]) -> None:
    workload = TextWorkload(training_header(*sizes), tuple(rows))
    assert parse_workload_text(workload_text(workload), "x") == workload


def test_files_are_read_and_written(tmp_path: Path) -> None:
    workload = TextWorkload(Header("MICRO", (Entry("ep:", ("2",)),)), ())
    write_workload_text(tmp_path / "w.txt", workload)
    assert read_workload_text(tmp_path / "w.txt") == workload
    with pytest.raises(InputError, match="no such file; it should be a SIMAI_workload text"):
        read_workload_text(tmp_path / "absent.txt")
