"""Ops of one program are asked of the cost model once per distinct shape, whatever their kind."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from references import op_flops
from toy import toy_cost

from predictor.estimate import Estimate
from predictor.kernels.derating import Deratings
from predictor.kernels.dtypes import FAMILIES
from predictor.kernels.grouped_linear import GroupedLinearModel
from solver.layers.program import BEFORE_ANOTHER, FORWARD, GROUPED_LINEAR, WEIGHT_GRAD, Op
from solver.step.op_estimates import estimate_ops, layer_times, ring_delays


class _Dense:
    """1 ps for each multiply-add of a batched GEMM, on a machine whose memory costs nothing."""

    parts = dict.fromkeys(FAMILIES.values(), SimpleNamespace(machine=SimpleNamespace(bandwidth=math.inf)))

    def predict(self, m, n, k, batch, *, layout, accumulate, dtype, buffer=True):  # type: ignore[no-untyped-def]
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
    found = estimate_ops(ops, 3, toy_cost(grouped=overhead, deratings=Deratings(1.1)))
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


def host_ops() -> list[Op]:
    """A GEMM of 2 us, an all-gather of 1 us that it hides, and in backward two kernels of 1 us each, one of them deferrable."""
    gemm = {"m": 1000, "n": 1000, "k": 1000, "batch": 1, "layout": 0, "accumulate": False}
    sent = {"bytes": 1e5, "intra": 8, "inter": 1, "strided": 0}
    kernel = {"bytes": 1e6}
    return [
        Op("a", "x", "linear", FORWARD, gemm),
        Op("b", "x", "all_gather", FORWARD, sent, "tp", overlaps_with=("a.forward",)),
        Op("c", "x", "memory_bound", "input_grad", kernel, variant="norm"),
        Op("d", "x", "memory_bound", WEIGHT_GRAD, kernel),
    ]


@pytest.mark.parametrize(
    ("host", "blocking", "forward", "backward", "deferrable"),
    [
        (0.0, False, 2.1, 2.0, 1.0),  # a tenth of the hidden microsecond delays the GEMM
        (0.5, False, 2.1, 2.0, 1.0),  # the host launches two kernels in one microsecond, beside them
        (3.0, False, 6.0, 6.0, 3.0),  # the host is slower than the device
        (1.1, False, 2.2, 2.2, 1.1),  # barely, and half of the delay is the deferrable kernel's
        (0.5, True, 3.0 + 2 * 0.5, 2.0 + 2 * 0.5, 1.5),  # nothing overlaps, and each launch waits for the kernel before it
    ],
)
def test_the_host_beside_the_device(host: float, blocking: bool, forward: float, backward: float, deferrable: float) -> None:
    estimates = estimate_ops(host_ops(), 1, toy_cost())
    found = layer_times(estimates, estimates.exposed(blocking), host * 1e-6, blocking)
    assert found.forward.sum() == pytest.approx(forward * 1e-6, rel=1e-9)
    assert found.backward.sum() == pytest.approx(backward * 1e-6, rel=1e-9)
    assert found.weight_grad[0] == pytest.approx(deferrable * 1e-6, rel=1e-9)
    assert found.host[:, 0] == pytest.approx([2 * host * 1e-6] * 2)


def test_a_collective_hides_behind_all_kernels_of_a_label() -> None:
    """Two kernels of one norm, 1 us and 2 us, hide 3 of the 4 us of an all-gather, and are a tenth of that late."""
    kernels = [Op("n", "x", "memory_bound", FORWARD, {"bytes": size}, variant="norm") for size in (1e6, 2e6)]
    sent = {"bytes": 4e5, "intra": 8, "inter": 1, "strided": 0}
    gather = Op("g", "x", "all_gather", FORWARD, sent, "wp", overlaps_with=("n.forward",))
    exposed = estimate_ops([*kernels, gather], 1, toy_cost()).exposed()
    assert exposed[2, 0] == pytest.approx((4 - 3 + 0.1 * 3) * 1e-6, rel=1e-9)


def test_steps_of_a_ring_between_nodes() -> None:
    """Over 2 nodes of 8: 15 steps of an all-gather, 30 of an all-reduce, none of what stays in a node or precedes another."""
    dims = {"bytes": 1e5, "intra": 8, "inter": np.array([2, 1]), "strided": 0}
    kinds = [Op("a", "x", kind, FORWARD, dims, "tp") for kind in ("all_gather", "all_reduce")]
    before = Op("b", "x", "all_reduce", FORWARD, dims, "tp", variant=BEFORE_ANOTHER)
    found = ring_delays(estimate_ops([*kinds, before], 2, toy_cost()), 1e-6)
    np.testing.assert_allclose(found, [[15e-6, 0.0], [30e-6, 0.0], [0.0, 0.0]])
