"""Sizes of linears: what quantised GEMMs refuse, and what is said of sizes that no vector divides."""

from __future__ import annotations

from typing import Any

import pytest
from toy import TINY, make_problem, toy_cost

from profiler.errors import InputError
from solver.search.search import search
from solver.spec.alignment import quantised_broken, unaligned


@pytest.mark.parametrize(
    ("changes", "precision", "tp", "broken"),
    [
        ({}, "fp8", 1, ""),
        ({"intermediate_size": 200}, "bf16", 1, ""),
        ({"intermediate_size": 200}, "fp8", 1, "needs linears of multiples of 16; the intermediate_size of tiny is 200"),
        ({"intermediate_size": 48}, "fp8", 1, ""),
        ({"intermediate_size": 48}, "mxfp8", 1, "multiples of 32; the intermediate_size of tiny is 48"),
        ({"intermediate_size": 48}, "fp8", 2, "the intermediate_size of tiny is 24 on each of tp 2 ranks"),
        ({"head_dim": 8}, "fp8", 2, "the width of the keys of tiny is 8 on each of tp 2 ranks"),
    ],
)
def test_quantised_linears_have_sizes_of_whole_vectors(changes: dict[str, Any], precision: str, tp: int, broken: str) -> None:
    found = quantised_broken(TINY.replace(**changes), precision, tp)
    assert broken in found and bool(found) == bool(broken)


def test_a_search_divides_quantised_linears_into_whole_vectors_only() -> None:
    model = TINY.replace(num_attention_heads=8, num_key_value_heads=8, intermediate_size=96)
    problem = make_problem(model, 8, toy_cost(), 4096, framework="generic", precision="fp8")
    found = search(problem, 64, 100).best
    assert set(found.layouts.splits.tp[found.layouts.row].tolist()) == {1, 2}, "96 / 4 is no multiple of 16"
    with pytest.raises(
        InputError, match="precision fp8 needs linears of multiples of 16; the intermediate_size of tiny is 100"
    ):
        make_problem(model.replace(intermediate_size=100), 8, toy_cost(), 4096, framework="generic", precision="fp8")


def test_sizes_that_no_vector_divides_are_named() -> None:
    assert unaligned(TINY) == ()
    odd = TINY.replace(hidden_size=60, intermediate_size=133)
    assert unaligned(odd) == ("what GEMMs lose whose sizes are no multiples of 8 (hidden_size 60, intermediate_size 133)",)
    assert make_problem(odd, 1, toy_cost(), 32).left_out == unaligned(odd)
