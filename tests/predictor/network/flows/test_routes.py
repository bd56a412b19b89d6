"""Routes: shortest, spread by the hash, and free of links that cannot limit anything."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.network.flows.bottlenecks import choices
from predictor.network.flows.collective import collective, pattern
from predictor.network.flows.groups import data_groups
from predictor.network.flows.hashing import flow_hash, murmur
from predictor.network.flows.routes import Router, router
from predictor.network.topology.file_format import parse_topology
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import make_options
from predictor.network.topology.types import Topology
from profiler.errors import InputError


def network(**stated: object) -> Topology:
    return generate(make_options(stated)[0])


def nodes_of(way: Router, source: int, target: int, count: int = 0, seed: int = 0) -> list[int]:
    row = way.routes(np.array([source]), np.array([target]), np.array([count]), seed)[0]
    links = [link for link in row.tolist() if link >= 0]
    assert [int(way.links.target[a]) for a in links[:-1]] == [int(way.links.source[b]) for b in links[1:]]
    return [source, *(int(way.links.target[link]) for link in links)]


def test_murmur_of_known_keys() -> None:
    """Values of the reference implementation for keys of no, one and two words of zeros and ones."""
    zero, one = np.array([0], np.uint32), np.array([1], np.uint32)
    assert murmur((), zero).tolist() == [0]
    assert murmur((), one).tolist() == [0x514E28B7]
    assert murmur((zero,), zero).tolist() == [0x2362F9DE]
    assert murmur((np.array([0xFFFFFFFF], np.uint32),), zero).tolist() == [0x76293B50]
    assert murmur((np.array([0x87654321], np.uint32),), zero).tolist() == [0xF55B516B]


def test_hashes_are_spread_evenly() -> None:
    count = np.arange(64000)
    picks = flow_hash(np.full_like(count, 3), np.full_like(count, 70), count, np.full_like(count, 300), 1) % np.uint32(64)
    each = np.bincount(picks, minlength=64)
    assert abs(each - 1000).max() < 150  # 4.7 standard deviations


def test_routes_in_a_rail_network() -> None:
    topology = network(rail_optimized=True, gpus=32, psws=4, gpus_per_asw=2)
    way = router(topology, np.arange(32))
    assert nodes_of(way, 0, 5) == [0, 32, 5]  # one server: its NVSwitch
    assert nodes_of(way, 0, 8) == [0, 36, 8]  # one rail and segment: the ASW
    rail_change = nodes_of(way, 0, 9)
    assert rail_change[1] == 36 and rail_change[2] >= 52 and rail_change[3] == 37
    assert len(nodes_of(way, 0, 24)) == 5  # the same rail of another segment
    assert {nodes_of(way, 0, 9, count)[2] for count in range(40)} == {52, 53, 54, 55}


def test_routes_with_two_planes_stay_in_theirs() -> None:
    topology = network(rail_optimized=True, dual_tor=True, dual_plane=True, gpus=32, psws=4, gpus_per_asw=2)
    way = router(topology, np.arange(32))
    asws, psws = topology.switches[:-4], topology.switches[-4:]
    planes = set()
    for count in range(60):
        path = nodes_of(way, 0, 25, count)
        plane = [path[1] in asws[len(asws) // 2 :], path[2] in psws[2:], path[3] in asws[len(asws) // 2 :]]
        assert len(set(plane)) == 1
        planes.add(plane[0])
    assert planes == {False, True}


def test_several_nvswitches_share_the_flows_of_a_server() -> None:
    topology = network(gpus=16, nvswitches_per_server=2)
    way = router(topology, np.arange(16))
    assert {nodes_of(way, 8, 9, count)[1] for count in range(20)} == {18, 19}


def test_gpus_that_nothing_joins() -> None:
    topology = network(rail_optimized=True, gpus=16, psws=0)
    way = router(topology, np.arange(16))
    assert nodes_of(way, 0, 8) == [0, 18, 8]
    with pytest.raises(InputError, match="no switches lead from GPU 0 to GPU 9"):
        nodes_of(way, 0, 9)
    alone = parse_topology(
        "4 1 0 1 1 H100\n3\n0 3 1Gbps 1us 0\n".replace(" 1 1 H100", " 1 3 H100") + "1 3 1Gbps 1us 0\n2 3 1Gbps 1us 0\n", "x"
    )
    assert nodes_of(router(alone, np.arange(3)), 0, 2) == [0, 3, 2]


def test_rings_on_one_rail_do_not_depend_on_hashes() -> None:
    topology = network(rail_optimized=True, gpus=64, psws=16, gpus_per_asw=2)
    flows = pattern(topology, collective("all_reduce", data_groups(64, 8), 1))
    free = choices(router(topology, flows.target), flows)
    assert not free.varies.any()
    assert free.harmless.sum() == 2 * 32 * 16  # every link between switches, both ways
    dual = network(topology="AlibabaHPN", gpus=64, psws=16, gpus_per_asw=2)
    free = choices(router(dual, flows.target), flows)
    assert free.varies.all() and free.alone.all()  # a choice of two ToRs, of which no other lane has one


def test_rings_without_rails_depend_on_hashes_where_switches_are_crossed() -> None:
    topology = network(gpus=64, psws=8, gpus_per_asw=32)
    flows = pattern(topology, collective("all_reduce", data_groups(64, 8), 1))
    free = choices(router(topology, flows.target), flows)
    crossing = flows.source // 32 != flows.target // 32
    assert (free.varies == crossing).all() and not free.alone.any()
    wide = network(gpus=64, psws=8, gpus_per_asw=32, asw_psw_bandwidth="3200Gbps")  # one uplink takes all eight rings
    free = choices(router(wide, flows.target), flows)
    assert not free.varies.any()
