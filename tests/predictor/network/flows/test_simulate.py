"""Times of collectives: worked by hand, compared with SimAI's packet simulation, and the same however they are computed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.network.flows import extent
from predictor.network.flows.bottlenecks import choices
from predictor.network.flows.cases import CaseResult, parse_case, run_case
from predictor.network.flows.collective import Collective, collective, pattern
from predictor.network.flows.events import run
from predictor.network.flows.groups import data_groups, expert_groups, tensor_groups
from predictor.network.flows.lanes import Bundles, Plan, make_bundles
from predictor.network.flows.merge import merged
from predictor.network.flows.pattern import lanes
from predictor.network.flows.routes import router
from predictor.network.flows.simulate import _hashed, simulate, tails
from predictor.network.topology.generate import generate
from predictor.network.topology.templates import make_options
from predictor.network.topology.types import Topology
from profiler.errors import InputError

ROWS = (Path(__file__).parents[3] / "data" / "simai" / "flows" / "ns3_results.jsonl").read_text(encoding="utf-8").splitlines()
NS3 = {row["name"]: row for row in map(json.loads, ROWS)}
#: Rings that mix NVLink and NICs, and cases where hashes decide, are predicted less exactly.
MIXED, HASHED = ("dp16_tp2_ar_16M",), ("dcn256_dp32_tp8_ar_16M", "dcn256_dp32_tp8_ar_64M")
PAYLOAD = 9000 / 9066  # of a packet outside servers
RAIL: dict[str, Any] = {"rail_optimized": True, "nvlink_bandwidth": "1440Gbps"}


def network(**stated: object) -> Topology:
    return generate(make_options(stated)[0])


@pytest.fixture(scope="module")
def predicted() -> dict[str, CaseResult]:
    return {name: run_case(parse_case(row)[0]) for name, row in NS3.items()}


@pytest.mark.parametrize("name", NS3)
def test_close_to_the_packet_simulation(name: str, predicted: dict[str, CaseResult]) -> None:
    tolerance = 0.1 if name in MIXED else 0.3 if name in HASHED else 0.02
    assert predicted[name].comm_us == pytest.approx(NS3[name]["comm_us"], rel=tolerance)
    assert (predicted[name].spread_us > 1) == (name in MIXED + HASHED)


def test_much_faster_than_the_packet_simulation(predicted: dict[str, CaseResult]) -> None:
    assert sum(result.wall_s for result in predicted.values()) < sum(row["wall_s"] for row in NS3.values()) / 10


@pytest.mark.parametrize("topology", [{"topology": "Spectrum-X", "gpus": 4096}, {"topology": "AlibabaHPN", "gpus": 4096}])
def test_four_thousand_gpus_take_seconds(topology: dict[str, object]) -> None:
    begin = time.process_time()
    result = simulate(network(**topology), collective("all_reduce", data_groups(4096, 8), 2**24))
    assert time.process_time() - begin < 5
    assert result.flows == 4096 * 1022 and result.share == 1.0
    assert result.times.shape == (1, 8)


def test_one_message_by_hand() -> None:
    topology = network(**RAIL, gpus=64, gpus_per_asw=4, psws=4)
    size, start = 1e6, 3e-6
    for target, hops, rate, share in (
        (1, (1440,) * 2, 180e9, 1.0),
        (8, (400,) * 2, 50e9, PAYLOAD),
        (40, (400,) * 4, 50e9, PAYLOAD),
    ):
        delay = 25e-9 if target == 1 else 0.5e-6
        expected = start + size / (rate * share) + 2 * len(hops) * delay + (len(hops) - 1) * 9000 / (rate * share)
        assert simulate(topology, collective("p2p", [[0, target]], size), start).seconds == pytest.approx(expected, rel=1e-9)


def test_a_small_packet_is_passed_on_sooner() -> None:
    topology = network(**RAIL, gpus=16)
    expected = 2e-6 + 90 / (50e9 * PAYLOAD) * 2 + 2e-6
    assert simulate(topology, collective("p2p", [[0, 8]], 90), 2e-6).seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("op", "rounds"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_rings_by_hand(op: str, rounds: int) -> None:
    """A ring of N ranks on one rail takes N - 1 steps a round, each a message of size / N."""
    topology = network(**RAIL, gpus=32)
    step = 2e-6 + 2**22 / (50e9 * PAYLOAD) + 2e-6 + 9000 / (50e9 * PAYLOAD)
    result = simulate(topology, collective(op, data_groups(32, 8), 2**24), 2e-6)
    assert result.seconds == pytest.approx(rounds * 3 * step, rel=1e-9)
    assert result.spread == 0 and np.allclose(result.times, result.seconds)


def test_nvls_by_hand() -> None:
    """Four pieces go up one after the other, and the last one comes down."""
    topology = network(**RAIL, gpus=32)
    piece = 2**22 / 180e9
    result = simulate(topology, collective("all_reduce", tensor_groups(32, 8), 2**24, "nvls"), 12e-6)
    assert result.seconds == pytest.approx(5 * (12e-6 + piece) + 2 * 2 * 25e-9, rel=1e-9)


def test_all_to_all_by_hand() -> None:
    topology = network(**RAIL, gpus=32)
    result = simulate(topology, collective("all_to_all", tensor_groups(32, 8), 2**24), 2e-6)
    assert result.seconds == pytest.approx(2e-6 + 7 * 2**21 / 180e9 + 4 * 25e-9 + 9000 / 180e9, rel=1e-9)


def test_broadcast_is_a_pipeline() -> None:
    topology = network(**RAIL, gpus=32)
    size = 2**24
    result = simulate(topology, collective("broadcast", [[0, 8, 16, 24]], size), 0.0)
    piece, tail = 2**19 / (50e9 * PAYLOAD), 2e-6 + 9000 / (50e9 * PAYLOAD)
    assert result.seconds == pytest.approx(32 * piece + 2 * piece + 3 * tail, rel=1e-9)


def test_two_messages_of_one_nic_take_twice_as_long() -> None:
    topology = network(**RAIL, gpus=32)
    one = collective("p2p", [[0, 8]], 1e7)
    both = simulate(topology, [one, collective("p2p", [[0, 16]], 1e7)], 0.0)
    alone = simulate(topology, one, 0.0).seconds
    transfer = 1e7 / (50e9 * PAYLOAD)
    assert both.seconds == pytest.approx(alone + transfer, rel=1e-9)
    half = simulate(topology, [one, collective("p2p", [[0, 16]], 5e6)], 0.0)
    assert half.times[0] == pytest.approx([alone + transfer / 2, alone], rel=1e-9)


def unmerged(topology: Topology, what: Collective, latency: float, without: bool) -> np.ndarray:
    """Return when each flow is received, with every lane simulated, and with or without links that are harmless."""
    flows = pattern(topology, what)
    way = router(topology, flows.target)
    rows = way.routes(flows.source, flows.target, np.zeros(len(flows), dtype=np.int64), 0)
    used = np.where((rows >= 0) & ~(without & choices(way, flows).harmless[rows]), rows, -1)
    bundles, bundle = make_bundles(used, way.links.rate)
    ends = run(Plan(flows, bundles, bundle, latency, tails(way, rows, flows.size)))
    assert ends
    return ends.received


SMALL = network(**RAIL, gpus=32, gpus_per_server=4, gpus_per_asw=4, psws=4)
ALIKE = [
    collective("all_reduce", [list(range(32))], 2**22, pxn=True),
    collective("all_reduce", data_groups(32, 4), 2**20),
    collective("all_reduce", tensor_groups(32, 4), 2**21, "nvls"),
    collective("all_to_all", expert_groups(32, 4, 4), 2**20),
    collective("all_to_all", [list(range(9))], 2**20),
    collective("broadcast", [list(range(16)), list(range(16, 24))], 2**22),
]
#: Hardly two lanes of these are alike.
UNALIKE = [
    collective("all_reduce", data_groups(32, 4), 2**23, "tree"),
    collective("all_reduce", [list(range(12)), list(range(12, 20))], 2**20, "ring"),
]


@pytest.mark.parametrize("what", ALIKE + UNALIKE, ids=lambda what: f"{what.op}-{what.algorithm}-{len(what.groups)}")
def test_merged_lanes_end_as_they_do_apart(what: Collective) -> None:
    flows = pattern(SMALL, what)
    way = router(SMALL, flows.target)
    rows = way.routes(flows.source, flows.target, np.zeros(len(flows), dtype=np.int64), 0)
    plan, color = merged(flows, rows, way.links.rate, 2e-6, tails(way, rows, flows.size))
    assert len(plan.pattern) < len(flows) or what in UNALIKE
    ends = run(plan)
    assert ends
    apart = unmerged(SMALL, what, 2e-6, without=False)
    first = np.cumsum(plan.pattern.steps) - plan.pattern.steps
    together = np.concatenate([ends.received[first[c] : first[c] + n] for c, n in zip(color, flows.steps, strict=True)])
    assert np.allclose(apart, together, rtol=1e-9)


@pytest.mark.parametrize("what", ALIKE + UNALIKE, ids=lambda what: f"{what.op}-{what.algorithm}-{len(what.groups)}")
def test_harmless_links_change_nothing(what: Collective) -> None:
    assert np.allclose(unmerged(SMALL, what, 2e-6, without=False), unmerged(SMALL, what, 2e-6, without=True), rtol=1e-9)


def test_two_tors_of_a_lane_alone_are_as_one() -> None:
    topology = network(topology="AlibabaHPN", gpus=64, psws=8, gpus_per_asw=4)
    what = collective("all_reduce", data_groups(64, 8), 2**22)
    flows = pattern(topology, what)
    way = router(topology, flows.target)
    rows = way.routes(flows.source, flows.target, np.zeros(len(flows), dtype=np.int64), 0)
    free = choices(way, flows)
    assert free.varies.any() and free.alone.all()
    drawn = run(_hashed(way, free.harmless, 2e-6, tails(way, rows, flows.size), 5)(flows))
    assert drawn
    assert simulate(topology, what, 2e-6).seconds == pytest.approx(drawn.received.max(), rel=1e-9)


def test_flows_of_a_lane_share_its_links() -> None:
    """Two flows of a slow lane become ready one after the other, by what a fast lane receives, and slow each other."""
    fast, slow = np.array([0]), np.array([1])
    flows = lanes(np.arange(2), np.arange(2), 1.0, 2, [(fast, fast, 1, False), (fast, slow, 0, False)])
    bundles = Bundles((((0, 1.0),), ((1, 1.0),)), np.array([1.0, 0.5]))
    ends = run(Plan(flows, bundles, np.arange(2), 0.0, np.zeros(2)))
    assert ends
    assert ends.received.tolist() == [1.0, 2.0, 4.0, 5.0]  # alone for a second, then both at a quarter, then alone
    assert ends.most.tolist() == [1, 2]


def test_hashes_are_drawn_from_the_seed() -> None:
    topology = network(gpus=64, psws=4, gpus_per_asw=16, bandwidth="400Gbps")
    what = collective("all_reduce", data_groups(64, 8), 2**22)
    one, same = (simulate(topology, what, seed=3, draws=4) for _ in range(2))
    other = simulate(topology, what, seed=40, draws=4)
    assert one.times.shape == (4, 8) and (one.times == same.times).all() and (one.times != other.times).any()
    assert one.spread > 0 and one.group_spread > 0
    assert one.times.max(axis=1).min() <= one.seconds <= one.times.max()
    assert one.group_seconds <= one.seconds
    best = simulate(network(gpus=64, psws=4, gpus_per_asw=64), what)  # one switch: no hash
    assert best.spread == 0 and best.seconds < one.times.min()


@pytest.mark.parametrize(
    ("stated", "pxn", "tolerance"),
    [
        ({"rail_optimized": True, "gpus_per_asw": 4}, False, 1e-3),  # hops within and between segments differ
        ({"rail_optimized": True, "gpus_per_asw": 4}, True, 0.1),  # NVLink and NICs
        ({"gpus_per_asw": 16}, False, 0.3),  # hashes
    ],
)
def test_a_large_simulation_is_continued_from_its_first_steps(
    monkeypatch: pytest.MonkeyPatch, stated: dict[str, object], pxn: bool, tolerance: float
) -> None:
    topology = network(gpus=64, psws=16, **stated)
    what = collective("all_reduce", [list(range(64))] if pxn else data_groups(64, 8), 2**26, pxn=pxn)
    whole = simulate(topology, what)
    few = 1200 if pxn else 40 if stated.get("rail_optimized") else 500
    monkeypatch.setattr(extent, "_MOST_FLOWS", few)
    monkeypatch.setattr(extent, "_PART_FLOWS", few)
    part = simulate(topology, what)
    assert whole.share == 1 and part.share < 0.75
    assert part.seconds == pytest.approx(whole.seconds, rel=tolerance)


def test_the_busiest_link_bounds_flows_that_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = network(gpus=64, psws=4, gpus_per_asw=16)
    what = collective("all_to_all", expert_groups(64, 2, 16), 2**26)
    whole = simulate(topology, what)
    monkeypatch.setattr(extent, "_MOST_FLOWS", 10)
    bound = simulate(topology, what)
    assert bound.share == 0
    assert (bound.times <= whole.times * (1 + 1e-9)).all()
    assert (bound.times.max(axis=1) > 0.95 * whole.times.max(axis=1)).all()
    with pytest.raises(InputError, match="share links in ways that differ too much"):
        simulate(topology, collective("all_reduce", data_groups(64, 8), 2**20))


GPUS = st.lists(st.integers(0, 31), min_size=2, max_size=8, unique=True)
DCN = network(gpus=32, gpus_per_server=4, gpus_per_asw=8, psws=2)


def drawn(what: Collective | Sequence[Collective]) -> np.ndarray:
    return simulate(DCN, what, draws=2).times


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["p2p", "all_to_all"]), GPUS, st.integers(1, 10**8), st.floats(1.01, 20))
def test_more_bytes_never_take_less_time(op: str, ranks: list[int], size: int, factor: float) -> None:
    ranks = ranks[:2] if op == "p2p" else ranks
    less, more = (drawn(collective(op, [ranks], bytes_)) for bytes_ in (size, size * factor))
    assert (more > less * (1 - 1e-9)).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31), st.integers(10**4, 10**7)), min_size=2, max_size=6))
def test_no_message_is_faster_among_others_than_alone(messages: list[tuple[int, int, int]]) -> None:
    whats = [collective("p2p", [[source, target]], size) for source, target, size in messages if source != target]
    if not whats:
        return
    topology = network(gpus=32, gpus_per_server=4, gpus_per_asw=32, psws=1)
    both = simulate(topology, whats, draws=1).times[0]
    alone = [simulate(topology, what, draws=1).seconds for what in whats]
    assert (both >= np.array(alone) * (1 - 1e-9)).all()


def test_groups_that_share_uplinks_are_slower_than_one() -> None:
    topology = network(gpus=64, psws=1, gpus_per_asw=32)
    alone = simulate(topology, collective("all_reduce", data_groups(64, 8)[:1], 2**24))
    eight = simulate(topology, collective("all_reduce", data_groups(64, 8), 2**24))
    assert eight.seconds > 2 * alone.seconds


@pytest.mark.parametrize(
    ("latency", "draws", "seed", "words"),
    [(-1.0, 1, 0, "latency"), (2.0, 1, 0, "latency"), (0.0, 0, 0, "draws"), (0.0, 1, -1, "seed")],
)
def test_numbers_that_are_refused(latency: float, draws: int, seed: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate(SMALL, ALIKE[0], latency, seed, draws)


def test_where_nothing_leads() -> None:
    with pytest.raises(InputError, match="no switches lead from GPU 0 to GPU 5"):
        simulate(network(rail_optimized=True, gpus=8, gpus_per_server=4, psws=0), collective("p2p", [[0, 5]], 1))


def test_two_collectives_on_the_same_links_wait_for_each_other() -> None:
    topology = network(**RAIL, gpus=32)
    one, two = (collective(op, data_groups(32, 8), 2**24) for op in ("all_gather", "reduce_scatter"))
    alone = simulate(topology, one, 0.0).seconds
    both = simulate(topology, [one, two], 0.0)
    assert 1.9 * alone < both.seconds < 2 * alone
    assert both.times.shape == (1, 16)


def test_nothing_to_simulate() -> None:
    with pytest.raises(InputError, match="no collective"):
        simulate(SMALL, [])
