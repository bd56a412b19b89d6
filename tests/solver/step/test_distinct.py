"""Grouping of equal rows, and speeds derived from a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import DEVICE, TINY, estimated, make_problem, toy_cost

from solver.step.distinct import distinct

#: Values below and above 2^21, where the way to number them changes; three columns of 2^21 different values exceed 2^62.
VALUES = st.sampled_from([0, 1, 2, 7, 2**21 - 1, 2**21, 2**21 + 1, 2**40, 2**62])


@given(st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=1, max_size=40))
def test_every_row_is_found_by_its_representative(rows: list[tuple[int, int, int]]) -> None:
    columns = [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]
    first, inverse = distinct(columns)
    assert len(first) == len(set(rows)) == len({rows[i] for i in first})
    assert [rows[first[i]] for i in inverse] == rows


def test_many_different_values_do_not_overflow() -> None:
    # 5000^6 combinations exceed 2^62
    rng = np.random.default_rng(0)
    columns = [rng.permutation(5000) for _ in range(6)]
    first, inverse = distinct([np.concatenate([column, column]) for column in columns])
    assert len(first) == 5000 and (inverse[:5000] == inverse[5000:]).all()


@pytest.mark.parametrize(
    ("framework", "precision", "peaks", "peak"),
    [
        ("generic", "bf16", {"bf16": 1e15, "fp8": 2e15}, 1e15),
        ("generic", "fp16", {"bf16": 1e15}, 1e15),
        ("generic", "fp32", {"bf16": 1e15, "tf32": 5e14, "fp32": 1e14}, 1e14),
        ("sailor", "fp32", {"bf16": 1e15, "tf32": 5e14, "fp32": 1e14}, 5e14),
        ("sailor", "bf16", {"bf16": 1e15, "tf32": 5e14}, 1e15),
        ("generic", "fp8", {"bf16": 1e15, "fp8": 2e15}, 2e15),
        ("generic", "mxfp8", {"bf16": 1e15, "fp8": 2e15, "mxfp8": 2e15}, 2e15),
    ],
)
def test_speeds_of_a_step(framework: str, precision: str, peaks: dict[str, float], peak: float) -> None:
    # 2 ranks of 3 micro batches of 4 sequences of 32 tokens
    cost = toy_cost(device=replace(DEVICE, peak_flops=peaks))
    problem = make_problem(TINY, 2, cost, 32, precision=precision, framework=framework)
    found = estimated(problem, [problem.layout(micro_batch_size=4, num_micro_batches=3)])
    step = found.times.seconds[0]
    assert found.tokens[0] == 768 and found.tgs[0] == pytest.approx(768 / 2 / step, rel=1e-12)
    # 6 FLOPs for each of 2 * 36,864 + 256 * 64 weights and token, and 12 for each of 4 * 16 dimensions, two layers and 16 keys
    flops = 6 * (2 * 36_864 + 16_384) + 12 * 4 * 16 * 2 * 16
    assert found.mfu[0] == pytest.approx(found.tgs[0] * flops / peak, rel=1e-12)
    whole = flops + 12 * 4 * 16 * 2 * 16
    assert found.mfu_whole_square[0] == pytest.approx(found.tgs[0] * whole / peak, rel=1e-12)
