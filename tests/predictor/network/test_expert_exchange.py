"""Dispatch and combine of experts: the law by hand, its monotonicity, its fit, and its held-out error."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from toy import DEVICE, toy_cost

from predictor.accuracy.crossval_exchange import exchange_scores
from predictor.accuracy.pictures_exchange import draw_exchange
from predictor.estimate import Basis
from predictor.fitted import cost_model
from predictor.network.exchange_law import FAR_SHARE, LINK_SHARE, PRIORS, Exchange, ExchangeLaw
from predictor.network.expert_exchange import DISPATCHERS, OPS, ExpertExchangeModel
from profiler.errors import InputError
from profiler.profile.profile import Profile, Table
from profiler.profile.profiles import find_profile
from profiler.profile.routing import expected_groups

#: 10 us to start, 1 ns per token, 2 ns per copy, 3 and 4 ps per byte read and sent.
LAW = ExchangeLaw(10e-6, 1e-9, 3e-12, 2e-9, 4e-12, node_start=5e-6, slowdown=2.0, efficiency=0.5)
LINK, NETWORK = 1e12, 1e10


def by_hand() -> ExpertExchangeModel:
    return ExpertExchangeModel(LINK, dict.fromkeys(PRIORS, LAW))


@pytest.fixture(scope="module")
def h100() -> Profile:
    return find_profile("h100_sxm")[0]


@pytest.fixture(scope="module")
def fitted(h100: Profile) -> ExpertExchangeModel:
    return ExpertExchangeModel.fit(h100.table("expert_exchange"), h100.device)


def test_distinct_groups_are_those_of_every_draw() -> None:
    draws = [set(pair) for pair in product(range(4), repeat=2) if pair[0] != pair[1]]  # 2 of 4 experts
    by_two = np.mean([len({expert // 2 for expert in draw}) for draw in draws])
    assert expected_groups(2, 4, 2) == pytest.approx(by_two)
    assert expected_groups([1, 4, 8], [4, 4, 4], [2, 2, 2]) == pytest.approx([1, 2, 2])  # ranks that share an expert
    assert expected_groups(2, 4, 4) == 2


def test_one_node_by_hand() -> None:
    # 2 of 4 experts, 2 on each of 2 ranks: a rank has none of them with probability 2/4 * 1/3, so a token goes to 5/3 ranks
    found = by_hand().predict("dispatch", 1000, 1024, 2, 4, 2, 1, NETWORK)
    copies = 5 / 3
    kernel = 1000 * (1e-9 + 1024 * 3e-12 + copies * (2e-9 + 1024 * 4e-12))
    assert found.seconds == pytest.approx(10e-6 + kernel, rel=1e-12)
    links = replace(by_hand(), link_bandwidth=1e10)
    slow = links.predict("combine", 1000, 1024, 2, 4, 2, 1, NETWORK)
    moving = 1000 * 1024 * copies / 2 / (LINK_SHARE * 1e10)  # half of the copies leave the rank
    assert slow.seconds == pytest.approx(10e-6 + moving, rel=1e-12)
    mesh = links.with_link_peers(7).predict("combine", 1000, 1024, 2, 4, 2, 1, NETWORK)  # one of seven links
    assert mesh.seconds == pytest.approx(10e-6 + 7 * moving, rel=1e-12)


def test_between_nodes_by_hand() -> None:
    # 2 of 4 experts, each on a rank of its own, in 2 nodes of 2: every token has 2 copies and goes to 5/3 nodes, 5/6 others
    kernel = 1000 * (1e-9 + 1024 * 3e-12 + (2 + 5 / 6) * (2e-9 + 1024 * 4e-12))
    shape = ("dispatch", 1000, 1024, 2, 4, 2, 2)
    fast = by_hand().predict(*shape, 1e12)
    assert fast.seconds == pytest.approx(20e-6 + 2 * kernel, rel=1e-12)
    network = 1000 * 1024 * 5 / 6 / 0.5
    assert by_hand().predict(*shape, 1e10).seconds == pytest.approx(20e-6 + network / 1e10, rel=1e-12)
    limited = by_hand().predict(*shape, 1e10, groups=2, chosen=1)  # one node, half of the time the other one
    assert limited.seconds == pytest.approx(20e-6 + 1000 * 1024 * 0.5 / 0.5 / 1e10, rel=1e-12)


def test_more_nodes_than_measured_lose_rate_and_certainty() -> None:
    near, far = (by_hand().predict("combine", 10**6, 14336, 8, 256, 8, nodes, 1e9) for nodes in (4, 8))
    others = [expected_groups(nodes, 256, 8) * (nodes - 1) / nodes for nodes in (4, 8)]
    assert far.seconds / near.seconds == pytest.approx(others[1] / others[0] / FAR_SHARE, rel=1e-3)
    assert far.relative_std > near.relative_std
    few, more = (by_hand().predict("combine", 10**6, 14336, 8, 256, 8, nodes, 1e9) for nodes in (5, 16))
    others = [expected_groups(nodes, 256, 8) * (nodes - 1) / nodes for nodes in (4, 5, 16)]
    assert few.seconds / near.seconds == pytest.approx(others[1] / others[0] / FAR_SHARE ** np.log2(5 / 4), rel=1e-3)
    assert more.seconds / near.seconds == pytest.approx(others[2] / others[0] / FAR_SHARE, rel=1e-3)


def test_one_rank_and_no_tokens_cost_nothing(fitted: ExpertExchangeModel) -> None:
    found = fitted.predict("dispatch", [4096, 0], 7392, 8, 256, [1, 8], 1, NETWORK)
    assert (found.seconds == 0).all() and (found.relative_std == 0).all() and (found.basis == Basis.MEASURED).all()


@pytest.mark.parametrize(("dispatcher", "op"), list(product(DISPATCHERS, OPS)))
def test_more_never_takes_less(fitted: ExpertExchangeModel, dispatcher: str, op: str) -> None:
    tokens = np.unique(np.geomspace(1, 2**20, 200).astype(int))
    for ranks, nodes in ((2, 1), (8, 1), (64, 1), (8, 2), (8, 4), (8, 32)):
        found = fitted.predict(op, tokens, 7392, 8, 256, ranks, nodes, 5e10, dispatcher)
        assert (np.diff(found.seconds) >= 0).all() and (found.seconds > 0).all()
        wider = fitted.predict(op, 4096, [2048, 4096, 8192, 16384], 8, 256, ranks, nodes, 5e10, dispatcher)
        assert (np.diff(wider.seconds) >= 0).all()
        slower = fitted.predict(op, 4096, 7392, 8, 256, ranks, nodes, [1e11, 5e10, 1e10], dispatcher)
        assert (np.diff(slower.seconds) >= 0).all()


def test_a_fit_recovers_its_law() -> None:
    tokens, hidden, nodes = (a.ravel() for a in np.meshgrid(2 ** np.arange(8, 16), [2048, 4096, 7168], [1, 2, 4]))
    device = replace(DEVICE, network_bandwidth=1e11, link_bandwidth=LINK)
    seconds = by_hand().predict("dispatch", tokens, hidden, 8, 256, 8, nodes, 1e11).seconds
    shape = {"tokens": tokens, "row_bytes": hidden, "top_k": 8, "experts": 256, "intra": 8, "inter": nodes}
    table = Table.from_columns("expert_exchange", {**shape, "op": "dispatch", "dispatcher": "deepep", "seconds": seconds})
    fit = ExpertExchangeModel.fit(table, device)
    found = fit.predict("dispatch", *(shape[name] for name in ("tokens", "row_bytes")), 8, 256, 8, nodes, 1e11)
    assert found.seconds == pytest.approx(seconds, rel=0.05)
    assert (found.basis == Basis.MEASURED).all()
    between = fit.predict("dispatch", [5000, 10**6], 4096, 8, 256, 8, 2, 1e11)
    assert between.basis.tolist() == [Basis.INTERPOLATED, Basis.EXTRAPOLATED]
    assert fit.predict("combine", 4096, 4096, 8, 256, 8, 2, 1e11).basis == Basis.ROOFLINE


def test_the_shipped_h100_is_near_its_measurements(h100: Profile, fitted: ExpertExchangeModel) -> None:
    # DeepEP, 4,096 tokens of 7,168 values, top 8 of 256: 492 and 983 us on 8 ranks, 1.86 and 3.63 ms on 4 nodes
    for op, row, near, far in (("dispatch", 7392, 492e-6, 1.86e-3), ("combine", 14336, 983e-6, 3.63e-3)):
        found = fitted.predict(op, 4096, row, 8, 256, 8, [1, 4], h100.device.network_bandwidth)
        assert found.seconds == pytest.approx([near, far], rel=0.08)


def test_held_out_errors(h100: Profile) -> None:
    scores = {(s.op, s.regime, s.split): s for s in exchange_scores(h100)}
    for op in OPS:
        rows = scores[f"deepep {op}", "1 node, 1,024 tokens and more", "each row size left out"]
        assert rows.mape < 0.07 and rows.coverage > 0.85 and rows.mape < rows.naive_mape / 3
        assert scores[f"deepep {op}", "nodes, 1,024 tokens and more", "every second number of tokens"].mape < 0.05


def test_arrays_and_the_cache_keep_everything(h100: Profile, fitted: ExpertExchangeModel, tmp_path: Path) -> None:
    again = ExpertExchangeModel.from_arrays(fitted.to_arrays())
    assert again.laws == fitted.laws and (again.measured == fitted.measured).all()
    assert again.link_bandwidth == fitted.link_bandwidth == h100.device.link_bandwidth
    tables = {"expert_exchange": h100.table("expert_exchange")}
    small = Profile("small", h100.device, tables, digest="x")
    first, second = (cost_model(small, cache_dir=tmp_path) for _ in range(2))
    assert list(tmp_path.glob("x-*.npz")) and first.network.exchanges.laws == second.network.exchanges.laws == fitted.laws


def test_the_cost_model_takes_its_network_and_a_device_without_rows_the_prior(h100: Profile) -> None:
    cost = toy_cost(exchanges=by_hand())
    shape = (4096, 14336, 8, 256, 8, 4)
    slow, fast = (cost.with_network(rate).network.expert_exchange("combine", *shape) for rate in (1e9, 2e9))
    assert slow.seconds - 30e-6 == pytest.approx(2 * (fast.seconds - 30e-6), rel=1e-9)
    unknown = ExpertExchangeModel.fit(Table.from_columns("expert_exchange", {}), DEVICE)
    found = unknown.predict("dispatch", 4096, 14336, 8, 256, 8, [1, 2], 5e10)
    assert (found.basis == Basis.ROOFLINE).all() and (found.relative_std >= 0.35).all()


def test_wrong_input_is_named() -> None:
    for op, shape, words in (
        ("gather", (1, 1, 1, 1, 1, 1, 1.0), "no 'gather'"),
        ("dispatch", (-1, 1, 1, 1, 1, 1, 1.0), "not negative"),
        ("dispatch", (1, 1, 8, 4, 1, 1, 1.0), "at most as many"),
        ("dispatch", (1, 1, 1, 1, 0, 1, 1.0), "at least one rank"),
        ("dispatch", (1, 1, 1, 1, 1, 1, 0.0), "bandwidth"),
    ):
        with pytest.raises(InputError, match=words):
            by_hand().predict(op, *shape)
    with pytest.raises(InputError, match="'mori'"):
        by_hand().predict("dispatch", 1, 1, 1, 1, 1, 1, 1.0, dispatcher="mori")


def test_the_picture(h100: Profile, fitted: ExpertExchangeModel, tmp_path: Path) -> None:
    from PIL import Image

    path = draw_exchange(h100, fitted, [], tmp_path / "expert_exchange.jpg")
    assert path is not None
    with Image.open(path) as picture:
        assert picture.format == "JPEG" and np.ptp(np.asarray(picture)) > 200
    assert draw_exchange(Profile("none", h100.device, {}), fitted, [], tmp_path / "none.jpg") is None


def test_chosen_groups_leave_as_few_experts() -> None:
    # four of 8 experts on 4 nodes of one rank, in two of four groups: all four of these, so 2 copies; a node is another one in
    # three of four cases
    limited = Exchange(*(np.array([float(x)]) for x in (64, 4096, 4, 8, 1, 4, 1e10, 4, 2)))
    assert limited.copies.tolist() == [2.0] and limited.other_nodes.tolist() == [1.5]
