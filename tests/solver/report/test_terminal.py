"""What a person reads: times in the unit that fits them."""

from __future__ import annotations

import pytest
from toy import TINY, estimated, make_problem, tiny, toy_cost

from predictor.kernels.derating import Deratings
from solver import explain, load_problem, search
from solver.report.terminal import heading
from solver.report.words import parameter_count, seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.5e-7, "0.25 us"),
        (3.2e-4, "320 us"),
        (0.0123, "12.3 ms"),
        (1.0, "1 s"),
        (119.0, "119 s"),
        (1020.0, "17 min"),
        (7199.0, "120 min"),
        (9000.0, "2.5 h"),
        (172_800.0, "2 days"),
        (1.876e6, "21.7 days"),
    ],
)
def test_times_have_the_unit_that_fits(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (30.532e9, "30.53 B parameters"),
        (1.24e8, "0.12 B parameters"),
        (1e7, "0.01 B parameters"),
        (3_200_000, "3.2 M parameters"),
        (106_880, "0.1 M parameters"),
        (20_480, "20,480 parameters"),
    ],
)
def test_small_models_have_parameters_too(count: int, text: str) -> None:
    assert parameter_count(count) == text


def test_mfu_by_both_conventions() -> None:
    # 6 FLOPs per weight: 2 layers x 36,864 + 256 x 64 in the head; attention 6 x 2 layers x 4 heads x 16 x 32 tokens, or twice
    found, linears, scores = tiny("internevo-2024"), 6 * (2 * 36_864 + 256 * 64), 6 * 2 * 4 * 16 * 32
    assert found.flops_per_second[0] == pytest.approx(found.tgs[0] * (linears + scores), rel=1e-12)
    assert found.mfu_whole_square[0] / found.mfu[0] == pytest.approx((linears + 2 * scores) / (linears + scores), rel=1e-12)


@pytest.mark.parametrize(
    ("deratings", "words"),
    [
        (Deratings(1.12, 1.12), "sustained-clock derating: GEMM and attention times x 1.12"),
        (Deratings(1.34, 1.05), "sustained-clock derating: GEMM times x 1.34, attention x 1.05"),
        (
            Deratings(1.2, 1.2, power_slowdown=1.2),
            "power limit: GEMM and attention times x 1.20 where nothing else runs, less beside other work",
        ),
    ],
)
def test_what_clocks_cost_is_said_as_it_is_priced(deratings: Deratings, words: str) -> None:
    problem = make_problem(TINY, 1, toy_cost(deratings=deratings))
    assert str(heading(estimated(problem, [problem.layout()]), "a profile", "")).splitlines()[2] == f"a profile; {words}"


def test_a_network_that_nobody_stated_is_said_to_be_assumed() -> None:
    """Such a network widens the interval, so two answers that differ in it alone must not look alike."""
    usual, stated = (load_problem("llama3_8b", 16, framework="megatron-core", cluster=name) for name in (None, "dgx_h100"))
    alone = load_problem("llama3_8b", 8, framework="megatron-core")
    found = [search(problem, 64, 1).best for problem in (usual, stated, alone)]
    second = [str(heading(best, "profile", "")).split("\n")[1] for best in found]
    assert "8 per node, 400 Gbit/s per GPU between nodes assumed (--cluster states yours), 79.1 GiB per GPU" in second[0]
    assert all("8 per node, 400 Gbit/s per GPU between nodes, 79.1 GiB per GPU" in line for line in second[1:])
    (low, high), (lower, higher) = (explain(best, 0).interval for best in found[1::-1])
    assert lower < low < high < higher and found[0].times.seconds[0] == found[1].times.seconds[0]
