"""Kernels that move bytes: constants of kinds that were not measured, chains of eager kernels, and the fit's range; by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from predictor.estimate import Basis
from predictor.kernels.memory_bound import MemoryBoundModel
from profiler.profile.profile import Device, Table

#: 10^12 bytes/s: a byte takes 1e-12 s at the peak.
DEVICE = Device("test", {"bf16": 1e15}, 80e9, 1e12, 132, 8, 4.5e11, 5e10)
NOTHING = Table.from_columns("memory_bound", {})
SIZE = 1e9


def seconds(fit: MemoryBoundModel, kind: str, size: float = SIZE) -> float:
    return float(fit.predict(kind, size).seconds)


@pytest.mark.parametrize(
    ("kind", "share"),
    # fractions of the memory bandwidth that kernels reach on A100 and Hopper, and what copy-like kernels reach; a backward pass
    # of a kind that has no figure of its own takes that of the forward pass
    [
        ("norm", 0.54),
        ("row", 0.40),
        ("gated_act", 0.55),
        ("gated_act_grad", 0.55),
        ("rope", 0.48),
        ("residual", 0.90),
        ("embedding", 0.17),
        ("quantize", 0.85),
        ("adam", 0.75),
        ("cross_entropy", 0.35),
        ("norm_grad", 0.52),
        ("norm_grad_torch", 0.25),
        ("norm_grad_apex", 0.33),
        ("softmax", 0.78),
        ("softmax_grad", 0.75),
        ("act_grad", 0.75),
    ],
)
def test_kinds_that_were_not_measured(kind: str, share: float) -> None:
    found = MemoryBoundModel.fit(NOTHING, DEVICE).predict(kind, SIZE)
    assert found.seconds == pytest.approx(3e-6 + SIZE * 1e-12 / share, rel=1e-12)  # a launch takes 3 us
    assert found.relative_std == 0.30 and found.basis == Basis.ROOFLINE


#: Bytes of each eager chain for each byte of the fused kernel: by plain streams, and by kernels that reduce a row or broadcast
#: along it. Per 16-bit element: gated activation 10 of 6, 18 of 10; norm 20 + 16 of 4,
#: 44 + 44 of 6; cross entropy 38 and 16 of 4; softmax 24 of 4 and 28 of 6.
CHAINS = {
    "gated_act_eager": (10 / 6, 0.0),
    "gated_act_eager_grad": (1.8, 0.0),
    "norm_eager": (5.0, 4.0),
    "norm_eager_grad": (44 / 6, 44 / 6),
    "cross_entropy_eager": (9.5, 0.0),
    "cross_entropy_eager_grad": (4.0, 0.0),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_chains_of_eager_kernels(kind: str) -> None:
    plain, along_rows = CHAINS[kind]
    expected = (3e-6 + plain * SIZE * 1e-12 / 0.90) + (along_rows > 0) * (3e-6 + along_rows * SIZE * 1e-12 / 0.40)
    found = MemoryBoundModel.fit(NOTHING, DEVICE).predict(kind, SIZE)
    assert found.seconds == pytest.approx(expected, rel=1e-12)
    assert found.relative_std == 0.30 and found.basis == Basis.ROOFLINE


def test_gates_of_two_halves_run_value_by_value() -> None:
    """Forward 4 bytes of the activation and 4 of 6 of the product; backward 8 of 18, beside plain kernels for the other."""
    fit = MemoryBoundModel.fit(NOTHING, replace(DEVICE, memory_bandwidth=8e12))
    split, eager = (fit.predict(f"gated_act_{how}", SIZE).seconds for how in ("split", "eager"))
    back, back_eager = (fit.predict(f"gated_act_{how}_grad", SIZE).seconds for how in ("split", "eager"))
    assert split > 1.3 * eager and back_eager < back < split * 10 / 6 * 18 / 10


def test_kernels_without_vectors_are_limited_by_the_multiprocessors() -> None:
    """Of 132 multiprocessors 2.4e9 values a second each: 4, 6 and 10 bytes; slower memory limits them as others."""
    fit = MemoryBoundModel.fit(NOTHING, replace(DEVICE, memory_bandwidth=8e12))
    for kind, value in (("strided", 4), ("cast", 6), ("mixed", 10)):
        assert seconds(fit, kind) == pytest.approx(3e-6 + SIZE / value / (132 * 2.4e9), rel=1e-12)
    slow = MemoryBoundModel.fit(NOTHING, replace(DEVICE, memory_bandwidth=1e12))
    assert seconds(slow, "strided") == pytest.approx(3e-6 + SIZE * 1e-12 / 0.90, rel=1e-12)
    assert seconds(slow, "mixed") == pytest.approx(3e-6 + SIZE * 1e-12 / 0.69, rel=1e-12)
    # rope: 10 contiguous bytes and 10 of views for each value of 4; backward one more sum
    for kind, contiguous in (("rope_eager", 10), ("rope_eager_grad", 14)):
        assert seconds(fit, kind) == pytest.approx(
            seconds(fit, "residual", SIZE * contiguous / 4) + seconds(fit, "strided", SIZE * 10 / 4), rel=1e-12
        )


def test_more_memory_bandwidth_is_no_help_where_multiprocessors_limit() -> None:
    table = Table.from_columns("memory_bound", rows("residual", share=6.4))
    fit = MemoryBoundModel.fit(table, replace(DEVICE, memory_bandwidth=8e12))
    wider = fit.on(replace(DEVICE, memory_bandwidth=16e12))
    assert seconds(wider, "strided") == pytest.approx(seconds(fit, "strided"), rel=1e-9)
    assert seconds(wider, "residual") < 0.6 * seconds(fit, "residual")


@pytest.mark.parametrize(("kind", "times"), [("softmax_eager", 6.0), ("softmax_eager_grad", 28 / 6)])
def test_eager_softmax_runs_at_the_rate_of_the_fused_one(kind: str, times: float) -> None:
    assert seconds(MemoryBoundModel.fit(NOTHING, DEVICE), kind) == pytest.approx(3e-6 + times * SIZE * 1e-12 / 0.78, rel=1e-12)


def rows(kind: str, count: int = 12, launch: float = 2e-6, share: float = 0.8) -> dict[str, object]:
    size = np.geomspace(1e6, 1e9, count).round()
    return {"kind": kind, "bytes": size, "seconds": launch + size * 1e-12 / share}


def test_measured_kinds_and_their_range() -> None:
    fit = MemoryBoundModel.fit(Table.from_columns("memory_bound", rows("residual")), DEVICE)
    size = np.array([1e6, 1e9, 4e9, 2.5e5, 1e15])
    found = fit.predict("residual", size)
    np.testing.assert_allclose(found.seconds, 2e-6 + size * 1e-12 / 0.8, rtol=1e-4)
    # 3% at least inside the range; 5% more for each octave beyond the largest or below the smallest size, up to 30%
    expected = [0.03, 0.03, math.hypot(0.03, 0.1), math.hypot(0.03, 0.1), math.hypot(0.03, 0.3)]
    np.testing.assert_allclose(found.relative_std, expected, rtol=1e-6)
    inside, beyond = Basis.INTERPOLATED, Basis.EXTRAPOLATED
    assert found.basis.tolist() == [inside, inside, beyond, beyond, beyond]
    # a plain stream of a kind that was not measured has the median of those that were; a norm its own fraction
    assert seconds(fit, "copy") == pytest.approx(2e-6 + SIZE * 1e-12 / 0.8, rel=1e-4)
    assert seconds(fit, "norm") == pytest.approx(3e-6 + SIZE * 1e-12 / 0.54, rel=1e-12)


def test_kinds_that_are_like_measured_ones() -> None:
    # reductions and broadcasts are as fast as measured norms, and so is a backward kernel without a figure of its own
    measured = Table.from_columns("memory_bound", rows("norm", share=0.6))
    fit = MemoryBoundModel.fit(measured, DEVICE)
    assert seconds(fit, "row") == seconds(fit, "norm") == pytest.approx(2e-6 + SIZE * 1e-12 / 0.6, rel=1e-4)
    assert seconds(fit, "norm_grad") == pytest.approx(3e-6 + SIZE * 1e-12 / 0.52, rel=1e-12)
    fit = MemoryBoundModel.fit(Table.from_columns("memory_bound", rows("gated_act", share=0.6)), DEVICE)
    assert seconds(fit, "gated_act_grad") == seconds(fit, "gated_act")


def test_large_sizes_do_not_show_a_launch() -> None:
    # twelve sizes from 250 MB, 40 us longer than the bytes take: at most the assumed 3 us are the launch
    size = np.geomspace(2.5e8, 4e9, 12).round()
    table = Table.from_columns("memory_bound", {"kind": "copy", "bytes": size, "seconds": 40e-6 + size * 1e-12 / 0.5})
    assert seconds(MemoryBoundModel.fit(table, DEVICE), "copy", 1.0) == pytest.approx(3e-6, rel=1e-3)


def test_the_longest_part_of_a_chain_says_how_certain_it_is() -> None:
    # 5 bytes at 80% of the bandwidth are measured, 4 at 40% are not, and take longer
    fit = MemoryBoundModel.fit(Table.from_columns("memory_bound", rows("residual")), DEVICE)
    found = fit.predict("norm_eager", 1e8)
    assert found.seconds == pytest.approx(5e-6 + 1e-4 * (5 / 0.8 + 4 / 0.4), rel=1e-4)
    assert found.relative_std == 0.30 and found.basis == Basis.ROOFLINE


def test_uncertainty_is_the_90th_percentile_of_the_errors() -> None:
    # all rows are off by 0.1645 in logarithms, half of them up: 1.645 standard deviations of 10%
    made = rows("residual", 200)
    made["seconds"] = np.asarray(made["seconds"]) * np.exp(0.1645 * np.where(np.arange(200) % 2, 1, -1))
    found = MemoryBoundModel.fit(Table.from_columns("memory_bound", made), DEVICE).predict("residual", 1e8)
    assert found.relative_std == pytest.approx(0.1, rel=0.1)


def test_eight_measurements_are_enough() -> None:
    for count, launch in ((7, 3e-6), (8, 2e-6)):
        fit = MemoryBoundModel.fit(Table.from_columns("memory_bound", rows("adam", count)), DEVICE)
        assert seconds(fit, "adam", 1.0) == pytest.approx(launch, rel=1e-3)


def test_no_stream_is_faster_than_93_percent_of_the_memory() -> None:
    # times that beat the memory hit the cache
    fit = MemoryBoundModel.fit(Table.from_columns("memory_bound", rows("copy", share=1.5)), DEVICE)
    assert seconds(fit, "copy", 1e12) == pytest.approx(1 / 0.93, rel=1e-3)


def test_stated_efficiencies() -> None:
    # 0.4e12 bytes/s after 5 us, 25% uncertain; not more than the peak; measurements take precedence
    stated = {
        "softmax": {"latency_s": 5e-6, "bandwidth": 0.4e12},
        "rope": {"latency_s": 1e-6, "bandwidth": 2e12},
        "norm": {"latency_s": 1e-6, "bandwidth": 1e11},
    }
    fit = MemoryBoundModel.fit(Table.from_columns("memory_bound", rows("norm")), DEVICE, stated)
    found = fit.predict("softmax", SIZE)
    assert found.seconds == pytest.approx(5e-6 + SIZE / 0.4e12, rel=1e-12)
    assert found.relative_std == 0.25 and found.basis == Basis.ROOFLINE
    assert seconds(fit, "rope") == pytest.approx(1e-6 + SIZE * 1e-12, rel=1e-12)
    assert seconds(fit, "norm") == pytest.approx(2e-6 + SIZE * 1e-12 / 0.8, rel=1e-4)
