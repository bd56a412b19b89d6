"""Leaf switches with few uplinks: the closed form beside the flows that cross each leaf, counted one by one; and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.network.leaf_switches import LeafSwitches
from profiler.errors import InputError
from profiler.profile.devices import DEVICES
from solver.spec.cluster import cluster_of
from tests.toy import DEVICE, toy_cost


def counted(op: str, nodes: int, oversubscription: float, inter: int, apart: int) -> float:
    """Return the least share of its bandwidth that a node keeps: all groups of ``inter`` nodes send at once, one unit each."""
    world = max(inter * apart, nodes) * 2  # so that a ring passes the end of a leaf
    world += -world % nodes
    sends = np.zeros((world, world))
    for first in range(0, world - inter * apart + 1, inter * apart):
        for offset in range(apart):
            group = [first + offset + apart * i for i in range(inter)]
            for i, node in enumerate(group):
                to = [other for other in group if other != node] if op == "all2all" else [group[(i + 1) % inter]]
                sends[node, to] += 1 / (inter - 1) if op == "all2all" else 1  # all that leaves a node is one unit
    leaf = np.arange(world) // nodes
    up = np.array([sends[np.ix_(leaf == one, leaf != one)].sum() for one in range(world // nodes)])
    return float(np.min(np.minimum(nodes / oversubscription / np.maximum(up, 1e-9), 1.0)))


@given(
    op=st.sampled_from(["all_reduce", "all2all"]),
    nodes=st.sampled_from([1, 2, 4, 8]),
    oversubscription=st.sampled_from([1.0, 1.5, 2.0, 4.0, 16.0]),
    inter=st.sampled_from([2, 4, 8, 16]),
    apart=st.sampled_from([1, 2, 4, 8]),
)
def test_the_closed_form_counts_the_flows(op: str, nodes: int, oversubscription: float, inter: int, apart: int) -> None:
    found = float(LeafSwitches(nodes, oversubscription).share(op, inter, apart))
    assert found == pytest.approx(counted(op, nodes, oversubscription, inter, apart))


def test_shares_by_hand() -> None:
    leaf = LeafSwitches(4, 2.0)  # four nodes below a leaf, uplinks for two
    assert leaf.share("all_reduce", [4, 8, 8, 8], [1, 1, 2, 4]).tolist() == [1.0, 1.0, 1.0, 0.5]
    assert LeafSwitches(4, 8.0).share("all_gather", [4, 8], 1).tolist() == [1.0, 0.5]  # one node in four, uplinks for a half
    # of what leaves a node four of seven parts cross, or twelve of fifteen, by half the bandwidth; and nothing of four nodes
    np.testing.assert_allclose(leaf.share("all2all", [4, 8, 16], 1), [1, 7 / 8, 15 / 24])
    assert LeafSwitches(1, 2.0).share("all2all", 2, 1) == 0.5, "where each node has a leaf, all that leaves it crosses"
    # stages of one node: one of four sends to another leaf; of four and more nodes: each
    assert leaf.share("p2p", 2, [1, 2, 4, 16]).tolist() == [1.0, 1.0, 0.5, 0.5]
    assert "leaf switches of 4 nodes with uplinks for 1/2" in leaf.text()


def test_what_crosses_takes_longer_and_nothing_else() -> None:
    plain = toy_cost().network
    behind = plain.with_leaf_switches(LeafSwitches(4, 2.0))
    size, intra, inter, strided = 2.0**30, 1, np.array([1, 4, 8, 8]), np.array([0, 1, 1, 4])
    before = plain.collective("all_reduce", size, intra, inter, strided).seconds
    after = behind.collective("all_reduce", size, intra, inter, strided).seconds
    slower = replace(plain, bandwidth=plain.bandwidth / 2).collective("all_reduce", size, intra, inter, strided)
    np.testing.assert_allclose(after[:3], before[:3], rtol=1e-12)
    assert after[3] == slower.seconds[3] > before[3]


def test_keys_of_a_cluster() -> None:
    keys = {"gpus_per_leaf": 32, "oversubscription": 2}
    cluster = cluster_of(DEVICE, keys)
    assert cluster.leaf_switches(64) == LeafSwitches(4.0, 2.0)
    assert cluster.leaf_switches(32) is None, "a job below one leaf has no uplinks to share"
    assert cluster_of(DEVICE, {"gpus_per_leaf": 32, "oversubscription": 1}).leaf_switches(64) is None
    assert cluster_of(DEVICE, keys | {"nvlink_domain": 16}).leaf_switches(64) == LeafSwitches(2, 2.0, "NVLink domains")


def test_a_leaf_holds_whole_nvlink_domains_of_the_device() -> None:
    rack = replace(DEVICE, nvlink_domain=72)
    assert cluster_of(rack, {"gpus_per_leaf": 144, "oversubscription": 2}).leaf_switches(288) == LeafSwitches(
        2, 2.0, "NVLink domains"
    )
    with pytest.raises(InputError, match="gpus_per_leaf 32 is no multiple of the 72 GPUs of a node or NVLink domain"):
        cluster_of(rack, {"gpus_per_leaf": 32, "oversubscription": 2})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gpus_per_leaf": 32}, "gpus_per_leaf needs oversubscription: state both, or neither"),
        ({"oversubscription": 2}, "oversubscription needs gpus_per_leaf"),
        (
            {"gpus_per_leaf": 12, "oversubscription": 2},
            "gpus_per_leaf 12 is no multiple of the 8 GPUs of a node or NVLink domain",
        ),
        ({"gpus_per_leaf": 4, "oversubscription": 2}, "gpus_per_leaf 4 is no multiple of the 8 GPUs"),
        ({"gpus_per_leaf": 32, "oversubscription": 0.5}, "oversubscription"),
        ({"gpus_per_leaf": 0, "oversubscription": 2}, "gpus_per_leaf"),
        (
            {"gpus_per_leaf": 32, "oversubscription": 2, "all_reduce_busbw_gb_s": 40},
            "all_reduce_busbw_gb_s was reached through the leaf switches: state it, or oversubscription",
        ),
    ],
)
def test_keys_that_say_nothing_are_refused(keys: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        cluster_of(DEVICE, keys)


def test_neighbours_of_a_pipeline_below_one_leaf_wait_for_those_that_are_not() -> None:
    # uplinks for one of four nodes: of stages of one, two and four nodes one, two and four nodes of a leaf send across it at
    # once
    assert LeafSwitches(4, 4.0).share("p2p", 2, [1, 2, 4]).tolist() == [1.0, 0.5, 0.25]


def test_a_leaf_is_counted_in_what_a_job_gets_of_a_domain() -> None:
    """Of 72 GPUs below a leaf a job of 256 has one domain's 64: one domain, not 1.125 of them."""
    cluster = cluster_of(DEVICES["gb200"], {"gpus_per_leaf": 72, "oversubscription": 4}).for_world(256)
    found = cluster.leaf_switches(256)
    assert found == LeafSwitches(1, 4.0, "NVLink domains") and "leaf switches of 1 NVLink domains" in found.text()
