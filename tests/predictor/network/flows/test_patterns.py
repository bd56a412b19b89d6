"""What collectives send: numbers of flows, orders of rings and trees, and what waits for what."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from predictor.network.flows.cases import parse_case
from predictor.network.flows.collective import Collective, collective, pattern
from predictor.network.flows.groups import data_groups, expert_data_groups, expert_groups, tensor_groups, training_groups
from predictor.network.flows.ring import by_server, ring, ring_order
from predictor.network.flows.tree import binary_tree, second_tree
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import make_options
from profiler.errors import InputError

ROWS = (Path(__file__).parents[3] / "data" / "simai" / "flows" / "ns3_results.jsonl").read_text(encoding="utf-8").splitlines()
RAIL = generate(make_options({"rail_optimized": True, "gpus": 32, "psws": 8})[0])


def test_groups_of_a_training_run() -> None:
    assert tensor_groups(8, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert data_groups(8, 4).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert expert_groups(16, 2, 4).tolist() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert expert_data_groups(16, 2, 4).tolist() == [[i, i + 8] for i in range(8)]
    for kind in ("tensor", "data", "expert", "expert_data"):
        groups = training_groups(kind, 48, 4, 3)
        assert sorted(groups.ravel().tolist()) == list(range(48))


@pytest.mark.parametrize(
    ("kind", "tensor", "expert", "words"),
    [
        ("tensor", 5, 1, "tensor groups of 5"),
        ("expert", 4, 5, "tensor x expert groups of 20"),
        ("tp", 4, 1, "no group is called 'tp'"),
    ],
)
def test_groups_that_do_not_exist(kind: str, tensor: int, expert: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        training_groups(kind, 32, tensor, expert)


@pytest.mark.parametrize("line", ROWS, ids=lambda line: json.loads(line)["name"])
def test_as_many_flows_as_simai(line: str) -> None:
    case, _ = parse_case(json.loads(line))
    groups = training_groups(case.kind, case.gpus, case.tensor, case.expert)
    algorithm = "nvls" if case.nvls else None
    what = collective(case.op, groups, case.bytes, algorithm, case.pxn and case.op != "all_to_all")
    assert pattern(generate(case.options), what).flows == json.loads(line)["flows"]


def test_channels_of_a_ring_enter_and_leave_servers_at_neighbouring_ranks() -> None:
    servers = by_server(np.array([0, 2, 4, 6, 8, 10, 12, 14]), 8)
    assert [part.tolist() for part in servers] == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert ring_order(servers, 1).tolist() == [2, 4, 6, 0, 10, 12, 14, 8]
    made = ring(np.array([0, 1, 8, 9]), 8, 800.0, 2)
    assert made.source.tolist() == [0, 1, 8, 9, 1, 0, 9, 8]
    assert made.target.tolist() == [1, 8, 9, 0, 0, 9, 8, 1]
    assert set(made.size.tolist()) == {100.0}  # 800 bytes in 4 parts and 2 channels
    assert set(made.steps.tolist()) == {6}
    assert sorted(zip(made.parent[:4].tolist(), made.child[:4].tolist(), strict=True)) == [(0, 1), (1, 2), (2, 3), (3, 0)]


def test_pxn_keeps_hops_between_servers_on_one_rail() -> None:
    made = ring(np.arange(16), 8, 1.0, 1, pxn=True)
    crossing = made.source // 8 != made.target // 8
    assert crossing.sum() == 16  # 8 channels, 2 servers
    assert (made.source[crossing] % 8 == made.target[crossing] % 8).all()
    plain = ring(np.arange(16), 8, 1.0, 1)
    crossing = plain.source // 8 != plain.target // 8
    assert (plain.source[crossing] % 8 != plain.target[crossing] % 8).all()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 16, 31, 64])
def test_double_binary_tree(count: int) -> None:
    for parents in (binary_tree(count), second_tree(count)):
        assert (parents == -1).sum() == 1
        assert np.bincount(parents[parents >= 0], minlength=count).max(initial=0) <= 2
        node, steps = np.arange(count), 0
        while (node >= 0).any():  # every node reaches the root
            node = np.where(node >= 0, parents[np.maximum(node, 0)], -1)
            steps += 1
        assert steps <= np.log2(count) + 2
    if count > 2:  # who sends in one tree to two others is a leaf of the other tree: nobody is busy twice
        inner = [np.unique(parents[parents >= 0]) for parents in (binary_tree(count), second_tree(count))]
        assert len(np.intersect1d(*inner)) <= 1 + (count % 2)


def test_a_tree_sends_every_byte_up_and_down_once() -> None:
    made = pattern(RAIL, collective("all_reduce", [list(range(16))], 2.0**24, "tree"))
    total = (made.size * made.steps).sum()
    assert np.isclose(total, 2 * 15 * 2.0**24)  # up and down 15 edges, in shares of channels and trees


def test_nvls_sends_to_the_switch_and_back() -> None:
    made = pattern(RAIL, collective("all_reduce", [list(range(8, 16))], 800.0, "nvls"))
    assert made.source[:8].tolist() == list(range(8, 16)) and set(made.target[:8].tolist()) == {33}
    assert made.source[8:].tolist() == [33] * 8
    assert set(made.size.tolist()) == {200.0} and made.flows == 64


def test_broadcast_starts_at_its_first_rank() -> None:
    made = pattern(RAIL, collective("broadcast", [[3, 0, 1, 2]], 2.0**22))
    firsts = set(range(len(made))) - set(made.child[made.lag == 0].tolist())
    assert {int(made.source[lane]) for lane in firsts} == {3}
    assert np.isclose((made.size * made.steps).sum(), 3 * 2.0**22)


@pytest.mark.parametrize(
    ("op", "groups", "size", "algorithm", "pxn", "words"),
    [
        ("allreduce", [[0, 1]], 1, None, False, "no collective is called 'allreduce' \\(did you mean 'all_reduce'"),
        ("all_gather", [[0, 1]], 1, "tree", False, "all_gather has no algorithm 'tree'"),
        ("all_gather", [[0, 1]], 0, None, False, "the size must be positive"),
        ("all_reduce", [[0, 1]], 1, "tree", True, "pxn is a way of rings"),
        ("all_reduce", [], 1, None, False, "without groups"),
        ("all_reduce", [[0]], 1, None, False, "two or more different GPUs"),
        ("all_reduce", [[0, 0]], 1, None, False, "two or more different GPUs"),
        ("p2p", [[0, 1, 2]], 1, None, False, "one sender and one receiver"),
    ],
)
def test_collectives_that_are_refused(
    op: str, groups: list[list[int]], size: float, algorithm: str | None, pxn: bool, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        collective(op, groups, size, algorithm, pxn)


def test_what_the_topology_cannot_run() -> None:
    with pytest.raises(InputError, match="GPU 32 is not on"):
        pattern(RAIL, collective("all_reduce", [[0, 32]], 1))
    with pytest.raises(InputError, match="nvls reduces in an NVSwitch"):
        pattern(RAIL, collective("all_reduce", [list(range(16))], 1, "nvls"))
    assert collective("p2p", np.array([[0, 9]]), 8) == Collective("p2p", ((0, 9),), 8.0, "direct")
