"""A network that gives less than its links: what a stated all-reduce makes of the law, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import LINK, NETWORK, TINY, toy_cost, toy_layout

from predictor.cost_model import CostModel
from predictor.network.stated_busbw import PROBE_BYTES, STATED_STD, StatedNetwork, bus_bandwidth, fit_stated_network
from solver.spec.cluster import cluster_of
from solver.step.problem import problem_of

GB = 1e9


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 8 ranks, 1 GB in 10 ms: 2 * 7 / 8 * 100 GB/s
    assert bus_bandwidth(0.01, GB, 8) == pytest.approx(175 * GB)


@given(st.floats(1e-4, 1.0))
def test_the_law_gives_the_stated_all_reduce(share: float) -> None:
    # a machine whose all-reduce takes size / bandwidth: on 16 ranks the bus carries 2 * 15 / 16 of the bandwidth
    busbw = share * 50 * GB * 30 / 16
    cost = toy_cost()

    def all_reduce(size: float, intra: int, inter: int, bandwidth: float):  # type: ignore[no-untyped-def]
        return cost.network.collectives.predict("all_reduce", size, intra, inter, bandwidth)

    found = fit_stated_network(all_reduce, 8, 2, busbw, 50 * GB)
    assert (found.nodes, found.share) == (2, pytest.approx(share, rel=1e-6))
    assert found.reached == pytest.approx(busbw, rel=1e-6)
    assert found.text().startswith(
        f"the stated all-reduce of {busbw / GB:,.3g} GB/s over all ranks: groups of nodes get {found.share:.0%} of"
    )


def test_links_never_carry_more_than_nominal(h100_model: CostModel) -> None:
    """In-network reduction makes an all-reduce faster than its links: other collectives keep the links' bandwidth."""
    plain = float(h100_model.network.collective("p2p", PROBE_BYTES, 1, 64).seconds)
    found = h100_model.network.with_stated_busbw(512, 8, 480 * GB, None)
    assert float(found.collective("p2p", PROBE_BYTES, 1, 64).seconds) == plain
    assert found.stated.network is not None and found.stated.network.share == 1.0
    assert found.stated.network.text().startswith("the stated all-reduce of 480 GB/s is faster than the 31")


def test_exchanges_of_experts_use_the_network_and_the_links_that_were_found(h100_model: CostModel) -> None:
    """A tenth of the network between four nodes, and a fifth of the links in one, as a cluster of that bandwidth has."""
    shape = ("dispatch", 4096, 14336, 8, 256)
    cost = h100_model.network.with_stated_busbw(32, 8, 30 * GB, 60 * GB)
    assert cost.stated.network is not None and cost.stated.network.share < 0.1 and cost.stated.link_slowdown > 4
    slow = h100_model.with_network(cost.stated.network.share * h100_model.network.bandwidth)
    assert float(cost.expert_exchange(*shape, 8, 4).seconds) == pytest.approx(
        float(slow.network.expert_exchange(*shape, 8, 4).seconds)
    )
    narrow = h100_model.network.exchanges.with_slower_links(cost.stated.link_slowdown).predict(*shape, 8, 1, 1e9).seconds
    assert float(cost.expert_exchange(*shape, 8, 1).seconds) == pytest.approx(float(narrow))
    assert narrow > 2 * h100_model.network.expert_exchange(*shape, 8, 1).seconds


def test_pairs_of_nodes_find_twice_what_larger_groups_do() -> None:
    """As jobs of 2 and of 4 to 64 nodes of one cluster did (0.96 and 0.48); a network that is slow for all is so for pairs."""
    found = StatedNetwork(nodes=16, share=0.16)
    assert [found.over(n, 100.0) for n in (1, 2, 3, 4, 16)] == pytest.approx([32, 32, 16, 16, 16])
    assert [StatedNetwork(nodes=4, share=0.48).over(n, 100.0) for n in (2, 4)] == pytest.approx([96, 48])
    assert StatedNetwork(nodes=4, share=0.7).over(2, 100.0) == 100, "no more than nominal"
    assert StatedNetwork(nodes=2, share=0.9).over(2, 100.0) == pytest.approx(90)


def test_collectives_between_nodes_reach_the_stated_bandwidth_and_those_inside_are_scaled() -> None:
    # 2e-11 s a byte between nodes, 1e-11 inside: the buses carry 30 / 16 * 50 and 14 / 8 * 100 GB/s
    found = toy_cost().network.with_stated_busbw(16, 8, 30 / 16 * 12.5 * GB, 14 / 8 * 80 * GB)
    for op in ("all_gather", "reduce_scatter", "p2p"):
        assert found.collective(op, GB, 8, 2).seconds == pytest.approx(4 * GB * NETWORK, rel=1e-6)
        assert found.collective(op, GB, 8, 1).seconds == pytest.approx(GB * LINK / 0.8, rel=1e-6)
    both = found.collective("all_gather", np.array([GB, GB]), np.array([8, 8]), np.array([2, 1]))
    assert both.seconds == pytest.approx([4 * GB * NETWORK, GB * LINK / 0.8], rel=1e-6)


def test_a_faster_all_reduce_in_a_node_makes_nothing_else_faster() -> None:
    found, plain = toy_cost().network.with_stated_busbw(16, 8, None, 14 / 8 * 200 * GB), toy_cost().network
    fast, usual = (cost.collective("all_reduce", GB, 8, 1).seconds for cost in (found, plain))
    assert fast == pytest.approx(usual / 2)
    for op in ("all_gather", "all2all", "p2p"):
        assert found.collective(op, GB, 8, 1).seconds == plain.collective(op, GB, 8, 1).seconds
    assert found.stated.sentences()[0].startswith(
        "all-reduces, and no other collectives, inside a node or NVLink domain take 0.50 "
    )


@pytest.mark.parametrize(
    ("ranks", "node", "stated"),
    [
        (8, 8, (14 / 8 * 80 * GB, None)),
        (4, 8, (6 / 4 * 80 * GB, None)),
        (64, 64, (126 / 64 * 80 * GB, None)),
        (8, 8, (1 * GB, 14 / 8 * 80 * GB)),
    ],
)
def test_an_all_reduce_of_a_job_inside_one_domain_is_one_of_its_links(
    ranks: int, node: int, stated: tuple[float, float | None]
) -> None:
    """Of two that are stated the one inside a node, which is over all links of one, is taken."""
    found = toy_cost().network.with_stated_busbw(ranks, node, *stated)
    assert found.collective("all_gather", GB, 4, 1).seconds == pytest.approx(GB * LINK / 0.8, rel=1e-6)
    assert found.stated.network is None
    assert found.stated.sentences() == (
        "collectives inside a node or NVLink domain take 1.25 times the profile's time, as the stated all-reduce does",
    )


def test_what_is_not_stated_or_not_used_changes_nothing() -> None:
    plain = toy_cost().network
    for found in (plain.with_stated_busbw(16, 8, None, None), plain.with_stated_busbw(8, 8, 1 * GB, None)):
        assert found.collective("all_gather", GB, 8, 2).seconds == plain.collective("all_gather", GB, 8, 2).seconds


def test_a_stated_network_is_less_uncertain(h100_model: CostModel) -> None:
    found = h100_model.network.with_stated_busbw(512, 8, 50 * GB, None)
    one, other = (float(model.collective("p2p", GB, 1, 64).relative_std) for model in (h100_model.network, found))
    assert other == STATED_STD < one


def test_links_that_are_found_as_predicted_are_no_less_certain(h100_model: CostModel) -> None:
    """Other messages inside a node may be off by as much as the all-reduce was, at most by what is assumed of networks."""
    plain = h100_model.network
    seconds = float(plain.collectives.predict("all_reduce", PROBE_BYTES, 8, 1).seconds)
    nominal = bus_bandwidth(seconds, PROBE_BYTES, 8)
    size = 2.0**24
    before = plain.collective("all_gather", size, 8, 1)
    for share, added, changed in (
        (1.0, 0.0, False),
        (0.97, math.log(1 / 0.97), False),
        (0.9, math.log(1 / 0.9), True),
        (0.5, STATED_STD, True),
    ):
        after = plain.with_stated_busbw(16, 8, None, share * nominal).collective("all_gather", size, 8, 1)
        assert float(after.relative_std) == pytest.approx(math.hypot(float(before.relative_std), added), rel=1e-9)
        assert (after.basis != before.basis) == changed
        assert float(after.seconds) > float(before.seconds) * 0.999


def test_a_cluster_states_bus_bandwidths() -> None:
    cluster = cluster_of(toy_cost().device, {"all_reduce_busbw_gb_s": 60.5, "all_reduce_busbw_in_node_gb_s": 158})
    assert (cluster.all_reduce_busbw, cluster.all_reduce_busbw_in_node) == (60.5 * GB, 158 * GB)


@pytest.mark.parametrize("node", [4, 8, 16])
def test_nodes_of_any_size_reach_what_is_stated(h100_model: CostModel, node: int) -> None:
    """A cluster's nodes, not the profile's: what was stated is what an all-reduce over the job and in a node then takes."""
    cluster = cluster_of(
        h100_model.device,
        {"gpus_per_node": node, "all_reduce_busbw_gb_s": 30, "all_reduce_busbw_in_node_gb_s": 200},
    )
    cost = problem_of(TINY, toy_layout(64, 4096), cluster, h100_model).cost
    for inter, stated in ((64 // node, 30), (1, 200)):
        seconds = float(cost.network.collective("all_reduce", PROBE_BYTES, node, inter).seconds)
        assert bus_bandwidth(seconds, PROBE_BYTES, node * inter) == pytest.approx(stated * GB, rel=2e-3)
