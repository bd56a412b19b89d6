"""Cases in SimAI's terms: what they mean, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.network.flows.cases import parse_case, read_flow_cases, run_case
from profiler.errors import InputError

CASE: dict[str, Any] = {
    "name": "one",
    "topo_args": {"ro": 1, "g": 32, "psn": 4, "nvbw": "1440Gbps"},
    "tp": 8,
    "ep": 1,
    "gpus": 32,
    "op": "ALLREDUCE",
    "slot": "fwd",
    "bytes": 2**20,
    "send_lat_us": 2,
    "env": {},
}


def time_of(**changes: object) -> float:
    return run_case(parse_case({**CASE, **changes})[0]).comm_us


def test_slots_and_suffixes_choose_the_groups() -> None:
    kinds = {
        ("ALLREDUCE", "fwd"): "tensor",
        ("ALLREDUCE", "ig"): "tensor",
        ("ALLGATHER", "wg"): "data",
        ("ALLTOALL_EP", "fwd"): "expert",
        ("REDUCESCATTER_DP_EP", "wg"): "expert_data",
    }
    for (op, slot), kind in kinds.items():
        assert parse_case({**CASE, "op": op, "slot": slot})[0].kind == kind


def test_switches_of_simai() -> None:
    plain = time_of()
    assert time_of(env={"AS_NVLS_ENABLE": "1"}) < plain
    assert time_of(env={"AS_NVLS_ENABLE": "0"}) == plain
    assert time_of(env={"AS_NVLS_ENABLE": "1"}, tp=4) == time_of(tp=4)  # fewer than eight ranks
    assert time_of(env={"AS_NVLS_ENABLE": "1"}, topo_args={**CASE["topo_args"], "gt": "A100"}) == plain
    assert time_of(env={"AS_PXN_ENABLE": 1}, tp=16) != time_of(tp=16)
    assert time_of(env={"AS_PXN_ENABLE": 1}, tp=16, op="ALLGATHER") == time_of(tp=16, op="ALLGATHER")
    assert time_of(env={"AS_SEND_LAT": "6"}) == time_of(send_lat_us=6) > plain


def test_long_names_of_options_and_numbers_as_texts() -> None:
    long = {"ro": True, "gpu": "32", "psw_switch_num": 4.0, "nvlink_bw": "1440Gbps", "dp": 0}
    assert time_of(topo_args=long) == time_of()


def test_a_group_of_one_sends_nothing() -> None:
    assert time_of(tp=1) == 0.0


def test_another_name_of_the_topology_is_said() -> None:
    case, warnings = parse_case({**CASE, "topo": "Spectrum-X_8g"})
    assert case.options.gpus == 32
    assert warnings == ["topo is 'Spectrum-X_8g', and topo_args give Rail_Opti_SingleToR_32g_8gps_400Gbps_H100, which is used"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bites": 1}, "a case has no key 'bites' (did you mean 'bytes'?)"),
        ({"env": {"AS_PXN": "1"}}, "env has no key 'AS_PXN'"),
        ({"env": []}, "env is a list"),
        ({"env": {"AS_PXN_ENABLE": "yes"}}, "AS_PXN_ENABLE is 'yes'; it must be 0 or 1"),
        ({"topo_args": {"gpus": 8}}, "topo_args has no key 'gpus'"),
        ({"topo_args": 3}, "topo_args is 3"),
        ({"topo_args": {"g": "many"}}, "g is 'many'"),
        ({"topo_args": {"name": "DCN"}}, "no topology is called 'DCN'"),
        ({"op": "ALLREDUCE_TP"}, "op is 'ALLREDUCE_TP'"),
        ({"op": "BROADCAST"}, "op is 'BROADCAST'"),
        ({"slot": "bwd"}, "slot is 'bwd'"),
        ({"name": 3}, "name is 3"),
        ({"bytes": -1}, "bytes is -1"),
        ({"bytes": None}, "bytes is None"),
        ({"tp": True}, "tp is True"),
        ({"gpus": 64}, "gpus is 64; the topology has 32"),
        ({"send_lat_us": "soon"}, "send_lat_us is 'soon'"),
        ({"send_lat_us": 2e6}, "send_lat_us is 2000000.0"),
    ],
)
def test_what_is_not_understood_is_named(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(CASE) + "\n\n" + json.dumps({**CASE, **changes}) + "\n")
    with pytest.raises(InputError) as caught:
        read_flow_cases(path)
    assert f"cases.jsonl, line 3: {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "line 1: not a JSON object"), ("[1]", "line 1: a list is not a case"), ("\n", "no cases"), ("[" * 100000, "line 1")],
)
def test_files_without_cases(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_flow_cases(path)
    assert words in str(caught.value)
    with pytest.raises(InputError, match="no such file; it should be cases"):
        read_flow_cases(tmp_path / "none.jsonl")


def test_parallelism_that_does_not_fit() -> None:
    with pytest.raises(InputError, match="tensor groups of 5"):
        time_of(tp=5)
    with pytest.raises(InputError, match="size must be positive"):
        time_of(bytes=0)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(CASE)),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 10**20),
        st.just(10**400),
        st.floats(),
        st.text(max_size=5),
        st.just([]),
        st.just({"a": {}}),
    ),
)
def test_any_value_is_understood_or_refused(key: str, value: object) -> None:
    try:
        case, _ = parse_case({**CASE, key: value})
    except InputError as error:
        assert "\n" not in str(error)
        return
    assert case.gpus >= 0 and 0 <= case.latency < 1
