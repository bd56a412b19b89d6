"""Generated topologies: the files of SimAI's generator, what every network must be like, and options that are refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.network.__main__ import parser
from predictor.network.topology.file_format import parse_topology, topology_text
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import NAMES, Options, make_options
from predictor.network.topology.types import Topology
from profiler.errors import InputError

DATA = Path(__file__).parents[3] / "data" / "simai" / "topology"
FILES = json.loads((DATA / "files.json").read_text(encoding="utf-8"))
FIELDS = Options.__dataclass_fields__


def made(arguments: str) -> tuple[Topology, list[str]]:
    args = parser().parse_args(arguments.split())
    options, warnings = make_options({name: getattr(args, name) for name in FIELDS})
    return generate(options), warnings


@pytest.mark.parametrize("name", FILES)
def test_files_are_those_of_simai(name: str) -> None:
    topology, warnings = made(FILES[name]["arguments"])
    text = topology_text(topology).encode()
    assert topology.name == name
    assert not warnings
    assert len(text) == FILES[name]["bytes"]
    assert hashlib.sha256(text).hexdigest() == FILES[name]["sha256"]


@pytest.mark.parametrize("path", [path for path in DATA.iterdir() if path.suffix != ".json"], ids=lambda path: path.name)
def test_kept_files_byte_for_byte(path: Path) -> None:
    topology, _ = made(FILES[path.name]["arguments"])
    assert topology_text(topology).encode() == path.read_bytes()


def test_the_worked_example() -> None:
    topology, _ = made("-topo Spectrum-X -g 128 -gt A100 -bw 100Gbps -nvbw 2400Gbps")
    lines = topology_text(topology).splitlines()
    assert lines[0] == "216 8 16 72 768 A100"
    assert lines[2:4] == ["0 128 2400Gbps 0.000025ms 0", "0 144 100Gbps 0.0005ms 0"]
    assert topology.gpus == 128 and topology.servers == 16 and topology.nodes == 216


def test_long_flags_and_every_option_of_a_link() -> None:
    topology, _ = made(
        "--topology DCN+ --dt --gpu 16 --gpu_per_server 4 --gpu_type H20 --nv_switch_per_server 2 --nvlink_bw 1Tbps "
        "--nv_latency 1us --latency 2us --bandwidth 50Gbps --nics_per_aswitch 8 --psw_switch_num 3 --ap_bandwidth 100Gbps "
        "--asw_per_psw 9 --error_rate 0.01"
    )
    lines = topology_text(topology).splitlines()
    assert lines[0] == "31 4 8 7 76 H20"
    assert lines[2:6] == ["0 16 1Tbps 1us 0.01", "0 17 1Tbps 1us 0.01", "0 24 50Gbps 2us 0.01", "0 26 50Gbps 2us 0.01"]
    assert lines[-1] == "27 30 100Gbps 2us 0.01"
    assert topology.name == "DCN+DualToR_16g_4gps_50Gbps_H20"


def test_odd_psws_of_two_planes() -> None:
    topology, _ = made("--ro --dt --dp -g 8 -psn 3")
    spines = topology.switches[-3:]
    links = [int((topology.target == spine).sum()) for spine in spines]
    assert links == [8, 8, 8]  # the first two carry plane 1, the third plane 2
    assert topology.links == 8 + 16 + 24


SHAPES = st.fixed_dictionaries(
    {
        "topology": st.sampled_from([None, "Spectrum-X", "AlibabaHPN", "DCN+"]),
        "rail_optimized": st.booleans(),
        "dual_tor": st.booleans(),
        "dual_plane": st.booleans(),
        "gpus_per_server": st.integers(1, 9),
        "nvswitches_per_server": st.integers(0, 3),
        "gpus_per_asw": st.integers(1, 20),
        "psws": st.integers(0, 7),
        "asws_per_pod": st.integers(1, 300),
    }
)


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(1, 12))
def test_networks_of_any_options(stated: dict[str, Any], servers: int) -> None:
    gpus = servers * stated["gpus_per_server"]
    try:
        options, _ = make_options({**stated, "gpus": gpus})
    except InputError as error:
        assert "--dp needs" in str(error) or "segments" in str(error)
        return
    topology = generate(options)
    planes, nvswitches = options.planes, stated["nvswitches_per_server"]
    asws = options.total_asws
    spine_links = sum(a * p for a, p in ([(asws, options.psws)] if not options.dual_plane else plane_sizes(options)))
    assert topology.links == gpus * (planes + nvswitches) + spine_links
    degree = np.bincount(np.concatenate([topology.source, topology.target]), minlength=topology.nodes)
    assert (degree[:gpus] == planes + nvswitches).all()
    assert (degree[topology.nvswitches] == stated["gpus_per_server"]).all()
    downlinks = degree[topology.switches[:asws]] - (0 if not asws else spine_links // asws if not options.dual_plane else 0)
    assert options.dual_plane or (downlinks <= options.gpus_per_asw).all()
    if options.psws > options.dual_plane:
        assert connected(topology)
    again = parse_topology(topology_text(topology), topology.name)
    assert topology_text(again) == topology_text(topology)


def plane_sizes(options: Options) -> list[tuple[int, int]]:
    half = options.total_asws // 2
    return [(half, options.psws - options.psws // 2), (half, options.psws // 2)]


def connected(topology: Topology) -> bool:
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(topology.links)
    graph = coo_array((ones, (topology.source, topology.target)), shape=(topology.nodes, topology.nodes))
    _, part = connected_components(graph, directed=False)
    return len(np.unique(part[: topology.gpus])) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.booleans())
def test_gpus_of_a_rail_share_switches(servers: int, per_asw: int, dual: bool) -> None:
    options, _ = make_options(
        {"rail_optimized": True, "dual_tor": dual, "gpus": servers * 4, "gpus_per_server": 4, "gpus_per_asw": per_asw}
    )
    topology = generate(options)
    asw = topology.target[(topology.kind == 1)].reshape(topology.gpus, -1)
    for gpu in range(topology.gpus):
        for other in range(topology.gpus):
            together = gpu % 4 == other % 4 and gpu // (4 * per_asw) == other // (4 * per_asw)
            assert (asw[gpu] == asw[other]).all() == together


def test_nvl_racks() -> None:
    for racks, size in ((8, 72), (16, 36)):
        topology, warnings = made(f"-topo NVL -gps {size}")
        assert not warnings
        assert (topology.gpus, topology.servers, len(topology.nvswitches)) == (576, racks, racks)
        assert topology.name == f"NVL{size}_576g_{size}gps_400Gbps_GB200"
        assert topology.kinds[0].bits_per_second == 7.2e12  # 1.8 TB/s in both directions together
        assert len(topology.switches) == 8 + 72
        assert connected(topology)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-topo nvl", "no topology is called 'nvl'"),
        ("-topo SpectrumX", "did you mean 'Spectrum-X'?"),
        ("-topo NVL -gps 64", "an NVL rack has 36 or 72 GPUs, not 64"),
        ("-topo NVL -g 100", "100 GPUs do not fill servers of 72"),
        ("-g 12", "12 GPUs do not fill servers of 8"),
        ("-gps 36", "32 GPUs do not fill servers of 36"),
        ("-g 0", "gpus is 0"),
        ("-g -8", "gpus is -8"),
        ("-npa 0", "gpus per asw is 0"),
        ("-psn -1", "psws is -1"),
        ("-g 1000000 -gps 1 -npa 1 -app 1000000 -psn 1000000", "at most 50000000 are made"),
        ("-topo Spectrum-X -g 8192", "8192 GPUs need 16 segments, and one pod of 64 ASWs holds 8"),
        ("-topo DCN+ -g 1024", "1024 GPUs need 16 segments, and one pod of 8 ASWs holds 8"),
        ("-topo DCN+ --dt -g 1024", "1024 GPUs need 8 segments, and one pod of 8 ASWs holds 4"),
        ("-topo AlibabaHPN --dp -g 16384", "16384 GPUs need 16 segments, and one pod of 120 ASWs holds 15"),
        ("--ro --dp", "--dp needs a rail-optimised network with two ToRs"),
        ("--dt --dp", "--dp needs a rail-optimised network with two ToRs"),
        ("-bw fast", "'fast' is not a bandwidth"),
        ("-bw 0Gbps", "the bandwidth '0Gbps' is out of range"),
        ("-l 5", "'5' is not a latency"),
        ("-l 5000s", "the latency '5000s' is out of range"),
        ("-er 2", "'2' is not an error rate"),
        ("-er many", "'many' is not an error rate"),
        ("-gt a/b", "the GPU type is 'a/b'"),
    ],
)
def test_options_that_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        made(arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_option_of_the_function() -> None:
    with pytest.raises(InputError, match="no option of a topology is called 'gpu'"):
        make_options({"gpu": 8})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-asn 9", "-asn 9 is overridden: 32 GPUs need 1 ASWs"),
        ("-topo DCN+ --ro -g 64", "--ro is ignored"),
        ("-topo DCN+ --dp -g 64", "--dp is ignored"),
        ("-topo Spectrum-X --dt -g 64", "--dt is ignored"),
        ("-topo NVL --dp", "--dp is ignored"),
    ],
)
def test_overridden_options_are_said(arguments: str, words: str) -> None:
    _, warnings = made(arguments)
    assert len(warnings) == 1 and words in warnings[0]


def test_stated_options_that_agree_are_not_warned_about() -> None:
    for arguments in ("-asn 1", "-topo AlibabaHPN --ro --dt -g 64", "-topo Spectrum-X --ro -g 64 -asn 8"):
        assert not made(arguments)[1]


def test_every_template_is_made() -> None:
    for name in NAMES:
        topology = generate(make_options({"topology": name})[0])
        assert topology.gpus == {"Spectrum-X": 4096, "AlibabaHPN": 15360, "DCN+": 512, "NVL": 576}[name]
