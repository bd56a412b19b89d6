"""Max-min fair rates: the laws that define them, and the same rates from dictionaries and from arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.network.flows import max_min
from predictor.network.flows.max_min import fair_rates


@st.composite
def shared_links(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, float]]], list[float]]:
    capacity = draw(st.lists(st.integers(1, 20).map(float), min_size=1, max_size=6))
    link = st.integers(0, len(capacity) - 1)
    links = draw(st.lists(st.sets(link, min_size=1, max_size=3).map(lambda s: tuple(sorted(s))), min_size=1, max_size=12))
    flows = [draw(st.integers(1, 5)) for _ in links]
    uses = [[(one, float(draw(st.integers(1, 4)))) for one in row] for row in links]
    return flows, uses, capacity


@settings(max_examples=200, deadline=None)
@given(shared_links())
def test_no_link_is_too_full_and_every_flow_has_a_bottleneck(
    case: tuple[list[int], list[list[tuple[int, float]]], list[float]],
) -> None:
    flows, uses, capacity = case
    bundles = list(range(len(uses)))
    rates = fair_rates(bundles, flows, uses, capacity)
    used = [0.0] * len(capacity)
    fastest = [0.0] * len(capacity)
    for bundle in bundles:
        for link, weight in uses[bundle]:
            used[link] += flows[bundle] * weight * rates[bundle]
            fastest[link] = max(fastest[link], rates[bundle])
    assert all(u <= c * (1 + 1e-9) for u, c in zip(used, capacity, strict=True))
    for bundle in bundles:
        full = [link for link, _ in uses[bundle] if used[link] >= capacity[link] * (1 - 1e-9)]
        assert any(rates[bundle] >= fastest[link] * (1 - 1e-9) for link in full)
    assert np.allclose(rates, max_min._fill_arrays(bundles, flows, uses, capacity), rtol=1e-9)


def test_rates_worked_by_hand() -> None:
    """Links of 10 and 4; one flow over both, one over each: the short link halves, the long one gives the rest."""
    uses = [[(0, 1.0), (1, 1.0)], [(0, 1.0)], [(1, 1.0)]]
    assert fair_rates([0, 1, 2], [1, 1, 1], uses, [10.0, 4.0]) == [2.0, 8.0, 2.0]
    assert fair_rates([0, 1, 2], [2, 1, 1], uses, [10.0, 4.0]) == pytest.approx([4 / 3, 10 - 8 / 3, 4 / 3])
    assert fair_rates([1], [4, 5, 1], uses, [10.0, 4.0]) == [2.0]
