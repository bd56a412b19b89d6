"""Sizes of linears: what quantised GEMMs refuse, and what is said of sizes that no vector divides."""

from __future__ import annotations

from typing import Any

import pytest
from toy import TINY, make_problem, toy_cost

from profiler.errors import InputError
from solver.search.search import search
from solver.spec.alignment import left_in_16_bits, quantised_broken, unaligned
from solver.spec.frameworks import framework_of
from solver.spec.frameworks.megatron import GENERIC


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
    found = quantised_broken(TINY.replace(**changes), GENERIC.can_run, precision, tp)
    assert broken in found and bool(found) == bool(broken)


def test_torchtitan_leaves_linears_that_its_gemms_refuse_in_16_bits() -> None:
    can_run, odd = framework_of("torchtitan").can_run, TINY.replace(intermediate_size=200)
    assert not quantised_broken(odd, can_run, "fp8") and not quantised_broken(odd, can_run, "fp8", 2)
    # what it converts, of multiples of 16, must be so on each rank too, and in blocks of 32
    assert "is 24 on each of tp 2" in quantised_broken(TINY.replace(intermediate_size=48), can_run, "fp8", 2)
    assert "multiples of 32" in quantised_broken(TINY.replace(intermediate_size=48), can_run, "mxfp8")
    said = "that linears whose sizes are no multiples of 16 (intermediate_size 200) stay in 16 bits"
    assert left_in_16_bits(odd, can_run, "fp8") == (said,)
    assert not left_in_16_bits(odd, can_run, "bf16") and not left_in_16_bits(odd, GENERIC.can_run, "fp8")
    assert said in make_problem(odd, 1, toy_cost(), 32, framework="torchtitan", precision="fp8").left_out


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
