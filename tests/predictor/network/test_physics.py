"""The network model's formulas, by hand: ring, tree, all-to-all and p2p with constants that are easy to multiply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predictor.network.collective_points import inside_bound, sent_share
from predictor.network.measured_groups import describe_links
from predictor.network.overlap import contention
from predictor.network.physics import Groups, NetworkParameters, join, network_seconds
from profiler.profile.profile import Device, Profile, Table

#: Latencies of one to five seconds; rates are 100 bytes/s per GPU, a half of it used; a quarter of that in the low-latency
#: protocol and four fifths in trees.
CONSTANTS = NetworkParameters(
    start=1.0,
    simple_start=2.0,
    tree_hop=5.0,
    tree_hop_low_latency=3.0,
    ring_step=4.0,
    ring_step_low_latency=2.0,
    ring_sharpness=1.0,
    link_efficiency=0.5,
    tree_efficiency=0.8,
    low_latency_efficiency=0.25,
    two_node_share=1.5,
    peer_latency=0.5,
    all2all_efficiency=0.8,
    p2p_latency=7.0,
    p2p_efficiency=0.4,
)


def groups(size: float, intra: int, inter: int, link: float = 1e9, inside: float = 0.0, ring: float = 0.0) -> Groups:
    one = (np.array([float(value)]) for value in (size, intra, inter, 100.0))
    return Groups(*one, link, np.array([inside]), np.array([ring]))


def seconds(op: str, *group: Any, ring_only: bool = False, **inside: float) -> float:
    return float(network_seconds(op, groups(*group, **inside), CONSTANTS, ring_only)[0])


def test_rings() -> None:
    # two ranks of one node each: 1 step, half of the buffer at 50 bytes/s. In low latency 1 + 1 * 2 + bytes / 2 / 12.5;
    # else latencies 1 + 2 + 1 * 4 plus bytes / 2 / 50 (sharpness 1: no overlap). The faster protocol wins
    assert seconds("all_gather", 25, 1, 2) == pytest.approx(1 + 2 + 1)
    assert seconds("reduce_scatter", 10_000, 1, 2) == pytest.approx(7 + 100)
    # a broadcast sends the whole buffer to the next one
    assert seconds("broadcast", 10_000, 1, 2) == pytest.approx(7 + 200)
    # over 3 nodes of 4 ranks: 2 + 9 / 4 steps of 4 s, a slice of 512 KiB through the first of two NICs (half of 25 GB/s), and
    # the buffer at 200 bytes/s
    chain = 3 + 4.25 * 4 + 512 * 1024 / 12.5e9 + 1e9 / 200
    assert seconds("broadcast", 1e9, 4, 3) == pytest.approx(chain, rel=1e-12)
    # 2 nodes of 4 ranks send at 4 * 50; one of 7 steps crosses the network, the others take a quarter of its time: 2.5 steps;
    # an all-reduce has twice as many, and twice the bytes
    assert seconds("all_gather", 160_000, 4, 2) == pytest.approx(3 + 2.5 * 4 + 7 / 8 * 160_000 / 200)
    assert seconds("all_reduce", 160_000, 4, 2, ring_only=True) == pytest.approx(3 + 5 * 4 + 14 / 8 * 160_000 / 200)
    # ... unless a GPU's link inside the node is slower: 120 bytes/s, half of it used
    assert seconds("all_gather", 160_000, 4, 2, 120.0) == pytest.approx(3 + 2.5 * 4 + 7 / 8 * 160_000 / 60)
    # the part inside the node is a lower bound of the transfer, in low latency (inside) or not (that of a ring)
    assert seconds("all_gather", 25, 1, 2, inside=9.0, ring=1000.0) == pytest.approx(1 + 2 + 9)
    assert seconds("all_gather", 1e4, 1, 2, inside=1000.0, ring=500.0) == pytest.approx(7 + 500)


def test_trees() -> None:
    slow_rings = replace(CONSTANTS, ring_step=1e3, ring_step_low_latency=1e3)

    def all_reduce(*group: Any, **inside: float) -> float:
        return float(network_seconds("all_reduce", groups(*group, **inside), slow_rings)[0])

    # four nodes of one rank: 2 * log2(4) = 4 hops, every byte twice at 50 bytes/s. Low latency: 1 + 4 * 3 + 2 bytes / 12.5,
    # else 1 + 2 + 4 * 5 + 2 bytes / 40
    assert all_reduce(25, 1, 4) == pytest.approx(1 + 12 + 4, rel=1e-12)
    assert all_reduce(100, 1, 4) == pytest.approx(1 + 2 + 20 + 5, rel=1e-12)
    # 16 ranks in 8 nodes: 6 hops, 2 * 50 bytes/s
    assert all_reduce(8000, 2, 8) == pytest.approx(1 + 2 + 30 + 2 * 8000 / 80, rel=1e-12)
    # two nodes exchange directly: 1.5 times the bytes, 2 hops
    assert all_reduce(8000, 8, 2) == pytest.approx(1 + 2 + 10 + 1.5 * 8000 / 320, rel=1e-12)
    # no faster than inside the node
    assert all_reduce(25, 1, 4, inside=6.0, ring=1e3) == pytest.approx(1 + 12 + 6, rel=1e-12)
    assert all_reduce(8000, 8, 2, inside=70.0, ring=1e3) == pytest.approx(1 + 2 + 10 + 70, rel=1e-12)
    # the faster of both: the ring's 6 low-latency steps of 2 seconds, and 1.5 times the bytes
    assert seconds("all_reduce", 25, 1, 4) == pytest.approx(1 + 12 + 3, rel=1e-12)
    # where users forbid the tree: the ring's 6 steps of 1000 seconds and 1.5 * 25 bytes at 50 bytes/s
    ring = network_seconds("all_reduce", groups(25, 1, 4), slow_rings, ring_only=True)
    assert ring[0] == pytest.approx(1 + 2 + 6000 + 0.75, rel=1e-12)


def test_all_to_all_and_p2p() -> None:
    # 8 ranks of which 6 are in other nodes: each gets an eighth over the rank's own NIC at 80 bytes/s, and a message
    assert seconds("all2all", 6400, 2, 4) == pytest.approx(1 + 6 * 0.5 + 6400 * 6 / 8 / 80)
    assert seconds("all2all", 6400, 2, 4, inside=500.0) == pytest.approx(1 + 3 + 500)
    assert seconds("p2p", 400, 2, 4) == pytest.approx(1 + 7 + 400 / 40)
    assert seconds("p2p", 400, 2, 4, inside=30.0) == 30.0  # which has a latency of its own
    assert seconds("p2p", 400, 2, 4, inside=12.0) == pytest.approx(1 + 7 + 400 / 40)


def test_latency_and_transfer_join() -> None:
    # a right triangle of 3 and 4; a sharp join is the larger one
    assert join(np.array([3.0]), np.array([4.0]), 2.0)[0] == pytest.approx(5)
    assert join(np.array([4.0]), np.array([0.0]), 2.0)[0] == 4
    assert join(np.array([3.0]), np.array([4.0]), 60.0)[0] == pytest.approx(4, rel=1e-6)


def test_shares_that_are_sent() -> None:
    # nccl-tests: the bus bandwidth is this share times bytes over seconds: (n - 1) / n, twice that for all_reduce, else 1
    assert [float(sent_share(op, 8)) for op in ("all_gather", "reduce_scatter", "all2all")] == [7 / 8] * 3
    assert [float(sent_share(op, 8)) for op in ("all_reduce", "broadcast", "p2p")] == [14 / 8, 1, 1]
    # 4 ranks sent 3/4 in 3 seconds; among 8 in two nodes each sends 7/8. A single rank of a node sends nothing inside it
    one, four, two = np.array([3.0]), np.array([4.0]), np.array([2.0])
    assert inside_bound("all_gather", one, four, two)[0] == pytest.approx(3.5)
    assert inside_bound("all_gather", one, one / 3, two)[0] == 0
    assert inside_bound("p2p", one, one / 3, two)[0] == 3


DEVICE = Device("some GPU", {"bf16": 1e15}, 8e10, 3e12, 96, 8, 4e11, 5e10)


def test_contention_is_the_median_of_at_least_three_rows_of_large_messages() -> None:
    def of(gemm: list[float], collective: list[float], size: int = 2**20) -> float:
        columns = {"bytes": [size] * len(gemm), "gemm_slowdown": gemm, "collective_slowdown": collective, "seconds": 1.0}
        return contention(DEVICE, Table.from_columns("overlap", columns)).inside

    # a GEMM slowed by 2 does half its work in the time of the collective: 1, 1.2 and 2 times 1/2 are lost, by median 0.6
    assert of([2.0, 2.0, 2.0], [1.0, 1.2, 2.0]) == pytest.approx(0.6)
    # one that seems to be faster with overlap loses nothing; rows without a number do not count
    assert of([0.9, 1.0, 2.0], [1.0, 1.0, 1.0]) == 0
    assert of([2.0] * 3 + [np.nan], [1.0] * 3 + [1.0]) == pytest.approx(0.5)
    # too few rows, or of small messages: NCCL's 24 of this device's 96 multiprocessors; never more than all
    assert of([2.0, 2.0], [1.0, 1.0]) == of([2.0] * 3, [1.0] * 3, 2**20 - 1) == 0.25
    assert contention(replace(DEVICE, num_sms=12), Table.from_columns("overlap", {})) == (1.0, 0.0)
    # on Hopper what was measured there, unless the profile has rows
    hopper = replace(DEVICE, flash_version=3)
    assert contention(hopper, Table.from_columns("overlap", {})) == (0.15, 0.125)
    columns = {"bytes": [2**22] * 3, "gemm_slowdown": [2.0] * 3, "collective_slowdown": [1.0] * 3, "seconds": 1.0}
    assert contention(hopper, Table.from_columns("overlap", columns)) == (0.5, 0.0)


def test_a_gemm_that_is_faster_beside_a_collective_was_not_delayed() -> None:
    # GEMMs that take 0.8 of their time beside collectives that take as long as alone: noise, and no gain
    columns = {"bytes": 2**22, "seconds": 1.0, "gemm_slowdown": np.full(5, 0.8), "collective_slowdown": 1.0}
    assert contention(DEVICE, Table.from_columns("overlap", columns)) == (0.0, 0.0)


def test_links_that_nobody_measured_are_named() -> None:
    empty = Profile("own", DEVICE, {}, {"ranks": 1})
    assert describe_links(empty, 8) == "links inside a node: nominal bandwidth and usual efficiency, nothing was measured"
    assert "--cluster says how many yours have" in describe_links(empty, 1)
    columns = {"intra": [2], "inter": [1], "bytes": [1024], "seconds": [1e-5]}
    assert describe_links(Profile("own", DEVICE, {"all_reduce": Table.from_columns("all_reduce", columns)}), 8) == ""
