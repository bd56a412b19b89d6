"""Ops of one program are asked of the cost model once per distinct shape, whatever their kind."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from toy import toy_cost

from predictor.estimate import Estimate
from predictor.kernels.grouped_linear import GroupedLinearModel
from predictor.kernels.linear import FAMILIES
from solver.layers.program import FORWARD, GROUPED_LINEAR, WEIGHT_GRAD, Op, op_flops
from solver.step.op_estimates import estimate_ops


class _Dense:
    """1 ps for each multiply-add of a batched GEMM, on a machine whose memory costs nothing."""

    parts = dict.fromkeys(FAMILIES.values(), SimpleNamespace(machine=SimpleNamespace(bandwidth=math.inf)))

    def predict(self, m, n, k, batch, layout, dtype, accumulate):  # type: ignore[no-untyped-def]
        self.asked = len(np.ravel(m))
        seconds = 1e-12 * np.asarray(m) * n * k * batch
        return Estimate(seconds, np.full_like(seconds, 0.1), np.ones(len(seconds), dtype=np.int8))


def test_grouped_gemms_by_hand() -> None:
    # 8 experts of 100 tokens, [100, 64] x [64, 32]: 8 * 100 * 64 * 32 multiply-adds; the second key has twice the tokens
    dense = _Dense()
    overhead = GroupedLinearModel(
        dense, np.array([1.5, 2.0, 3.0]), np.full(3, 0.2), np.ones(3, dtype=bool), ("bf16",), 0.0, 0.0
    )  # type: ignore[arg-type]
    dims = {"groups": 8, "tokens_per_group": np.array([100, 200, 100]), "n": 32, "k": 64, "accumulate": 0}
    ops = [
        Op("experts", "moe", GROUPED_LINEAR, FORWARD, {**dims, "passes": 0}),
        Op("experts", "moe", GROUPED_LINEAR, WEIGHT_GRAD, {**dims, "passes": 2}),
    ]
    found = estimate_ops(ops, 3, toy_cost(grouped=overhead, derating=1.1))
    one = 8 * 100 * 64 * 32 * 1e-12 * 1.1
    np.testing.assert_allclose(found.seconds, [[1.5 * one, 3 * one, 1.5 * one], [3 * one, 6 * one, 3 * one]], rtol=1e-12)
    np.testing.assert_allclose(found.relative_std, np.hypot(0.1, 0.2))
    assert dense.asked == 4  # two sizes of two passes; the third key repeats the first
    assert op_flops(ops[0]).tolist() == [2 * 8 * 100 * 64 * 32 * times for times in (1, 2, 1)]


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_one_group_is_a_dense_gemm_times_its_overhead(passes: int) -> None:
    overhead = GroupedLinearModel(_Dense(), np.array([1.0, 1.0, 1.0]), np.zeros(3), np.ones(3, dtype=bool), ("bf16",), 0.0, 0.0)  # type: ignore[arg-type]
    dims = {"groups": 1, "tokens_per_group": np.array([128]), "n": 32, "k": 64, "accumulate": 0, "passes": passes}
    found = estimate_ops([Op("experts", "moe", GROUPED_LINEAR, FORWARD, dims)], 1, toy_cost(grouped=overhead))
    assert found.seconds[0, 0] == pytest.approx(128 * 32 * 64 * 1e-12)
