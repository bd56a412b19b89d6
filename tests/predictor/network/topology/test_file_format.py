"""Topology files: read and written unchanged, and what is wrong with a file is said with the line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.network.topology.file_format import parse_topology, read_topology, topology_text, write_topology
from profiler.errors import InputError

DATA = Path(__file__).parents[3] / "data" / "simai" / "topology"
#: Two servers of two GPUs, an NVSwitch each, one switch.
SMALL = """7 2 2 1 8 H100
4 5 6
0 4 900Gbps 0.000025ms 0
0 6 100Gbps 0.0005ms 0
1 4 900Gbps 0.000025ms 0
1 6 100Gbps 0.0005ms 0
2 5 900Gbps 0.000025ms 0
2 6 100Gbps 0.0005ms 0
3 5 900Gbps 0.000025ms 0
3 6 100Gbps 0.0005ms 0
"""


def test_files_come_back_unchanged(tmp_path: Path) -> None:
    for path in (path for path in DATA.iterdir() if path.suffix != ".json"):
        topology = read_topology(path)
        write_topology(topology, tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_values_of_a_small_file() -> None:
    topology = parse_topology(SMALL, "small")
    assert (topology.gpus, topology.servers, topology.links) == (4, 2, 8)
    assert topology.nvswitches.tolist() == [4, 5] and topology.switches.tolist() == [6]
    assert np.allclose(topology.rates(), [112.5e9, 12.5e9] * 4)
    assert np.allclose(topology.delays(), [25e-9, 0.5e-6] * 4)
    assert topology_text(topology).split("\n")[1] == "4 5 6 "
    assert topology.summary() == "small: 2 x (2 H100 and 1 NVSwitch), 1 other switches, 8 links"


def test_blank_lines_at_the_end_and_tabs_are_accepted() -> None:
    assert topology_text(parse_topology(SMALL.replace(" ", "\t") + "\n\n", "small")) == topology_text(
        parse_topology(SMALL, "small")
    )


def changed(old: str, new: str) -> str:
    assert old in SMALL
    return SMALL.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: the file ends"),
        ("7 2 2 1 8 H100\n", "line 2: the file ends"),
        (changed("7 2 2 1 8 H100", "7 2 2 1 8"), "line 1: 5 words"),
        (changed("7 2 2 1 8 H100", "7 two 2 1 8 H100"), "line 1: 'two' is not a whole number"),
        (changed("7 2 2 1 8 H100", "7 0 2 1 8 H100"), "line 1: '0' is not a whole number from 1 up"),
        (changed("7 2 2 1 8 H100", "99999999 2 2 1 8 H100"), "line 1: 99999999 nodes; at most 5000000"),
        (changed("7 2 2 1 8 H100", "9 2 2 1 8 H100"), "line 2: '4' is not the number of a switch; with the 9 nodes"),
        (changed("7 2 2 1 8 H100", "7 3 2 1 8 H100"), "line 1: 7 nodes less the switches are 4 GPUs"),
        (changed("7 2 2 1 8 H100", "3 2 2 1 8 H100"), "line 2: '4' is not the number of a switch"),
        (changed("7 2 2 1 8 H100", "7 2 2 1 9 H100"), "line 10: the file has 8 links; line 1 states 9"),
        (changed("4 5 6", "4 5"), "line 2: 2 switches; line 1 states 2 NVSwitches and 1 other switches"),
        (changed("4 5 6", "4 5 5"), "line 2: switch 5 is named twice"),
        (changed("4 5 6", "4 5 x"), "line 2: 'x' is not the number of a switch"),
        (changed("0 6 100Gbps", "0 9 100Gbps"), "line 4: no node is called '9'; nodes are 0 to 6"),
        (changed("0 6 100Gbps", "a 6 100Gbps"), "line 4: no node is called 'a'"),
        (changed("0 6 100Gbps", "0 -6 100Gbps"), "line 4: no node is called '-6'"),
        (changed("0 6 100Gbps 0.0005ms 0", "0 6 100Gbps 0.0005ms"), "line 4: 4 words"),
        (changed("0 6 100Gbps", "0 6 100Gbit"), "line 4: '100Gbit' is not a bandwidth"),
        (changed("0.0005ms", "soon"), "line 4: 'soon' is not a latency"),
        (changed("0.0005ms 0", "0.0005ms -1"), "line 4: '-1' is not an error rate"),
        (changed("0 6 100Gbps", "0 0 100Gbps"), "line 4: node 0 is linked to itself"),
        (changed("1 4 900Gbps", "4 0 900Gbps"), "line 5: nodes 0 and 4 are already linked"),
        (changed("3 5 900Gbps", "4 5 900Gbps").replace("3 6 ", "5 6 "), "line 10: GPU 3 has no link"),
    ],
)
def test_what_is_wrong_is_said_with_the_line(text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_topology(text, "small")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; it should be a topology"):
        read_topology(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8 text"):
        read_topology(tmp_path / "binary")
    (tmp_path / "short").write_text("1 2\n3\n")
    with pytest.raises(InputError, match="short: line 1: 2 words"):
        read_topology(tmp_path / "short")


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write there"):
        write_topology(parse_topology(SMALL, "small"), tmp_path / "file" / "small")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_is_an_input_error_or_another_topology(data: st.DataObject) -> None:
    words = SMALL.replace("\n", " \n ").split(" ")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at] = data.draw(
            st.sampled_from(["", "0", "-1", "7", "99", "1e9", "x", "\n", "٣", "900Gbps", "0.5", "inf", words[at - 1]])
        )
    try:
        topology = parse_topology(" ".join(words), "damaged")
    except InputError as error:
        assert str(error).startswith("line ") and "\n" not in str(error)
        return
    assert topology_text(parse_topology(topology_text(topology), "again")) == topology_text(topology)
