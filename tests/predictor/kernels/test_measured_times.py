"""Shapes that were measured take the measured time, as far as it is more certain than the fit; by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy import DEVICE

from predictor.estimate import Basis, Estimate
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.linear import LinearModel
from predictor.kernels.measured_times import UNSTATED_UNCERTAINTY, MeasuredTimes
from predictor.kernels.shape_keys import shape_keys
from profiler.profile.profile import Table

GRID = np.array([(m, n, k) for m in (512, 2048, 8192) for n in (1024, 4096, 8192) for k in (1024, 4096, 8192, 16384)])
ODD = (2048, 4096, 4096)  #: takes 1.4 times as long as its neighbours say


def gemms(spread: float, source: str = "measured here", **other: Any) -> Table:
    m, n, k = GRID.T
    seconds = 5e-6 + 2.0 * m * n * k / (0.6 * DEVICE.peak_flops["bf16"])
    seconds = np.where((GRID == ODD).all(axis=1), 1.4 * seconds, seconds)
    rows = {"m": m, "n": n, "k": k, "batch": np.ones_like(m), "layout": "TN", "dtype": "bf16", "seconds": seconds}
    return Table.from_columns("linear", {**rows, "spread": spread, "source": source, **other})


def odd_seconds(table: Table) -> float:
    return float(table["seconds"][(GRID == ODD).all(axis=1)][0])


def of(seconds: list[float], spread: list[float], keys: list[int]) -> MeasuredTimes:
    rows = Table.from_columns("linear", {"m": 1, "n": 1, "k": 1, "seconds": np.array(seconds), "spread": np.array(spread)})
    return MeasuredTimes.of(shape_keys(np.array(keys)), rows)


def test_rows_of_one_shape_are_averaged_by_their_certainty() -> None:
    found = of([1.0, 4.0, 9.0], [0.08, 0.08, np.nan], [1, 1, 2])
    by_key = dict(zip(found.keys.tolist(), zip(found.seconds, found.relative_std, strict=True), strict=True))
    first, second = (by_key[int(shape_keys(np.array([key]))[0])] for key in (1, 2))
    assert first == (pytest.approx(2.0), pytest.approx(0.04 / np.sqrt(2)))  # geometric mean of 1 and 4; half ranges of 8%
    assert second == (pytest.approx(9.0), UNSTATED_UNCERTAINTY)
    assert of([1.0] * 99, [0.04] * 99, [1] * 99).relative_std[0] == 0.02  # never more certain than the best median


def test_fit_and_measurement_are_weighed_by_their_certainty() -> None:
    measured = of([2.0], [0.06], [1])
    fit = Estimate(np.array([1.0, 1.0]), np.array([0.04, 0.04]), np.array([1, 1], dtype=np.int8))
    found = measured.combined_with(fit, shape_keys(np.array([1, 7])))
    weight = (1 / 0.03**2) / (1 / 0.03**2 + 1 / 0.04**2)  # 0.64
    assert found.seconds.tolist() == [pytest.approx(2.0**weight), 1.0]
    assert found.relative_std.tolist() == [pytest.approx(0.024), 0.04] and found.basis.tolist() == [Basis.MEASURED, 1]
    assert MeasuredTimes.none().combined_with(fit, shape_keys(np.array([1, 7]))) is fit


def test_a_gemm_that_was_measured_here_takes_what_it_took() -> None:
    table = gemms(0.01)
    fit = LinearModel.fit(table, DEVICE)
    alone = LinearModel({name: replace(part, known=MeasuredTimes.none()) for name, part in fit.parts.items()})
    truth, (ours, theirs) = odd_seconds(table), (float(one.predict(*ODD).seconds) for one in (fit, alone))
    assert abs(ours / truth - 1) < 0.1 < abs(theirs / truth - 1)
    assert fit.predict(*ODD).basis == Basis.MEASURED < alone.predict(*ODD).basis
    for other in ({"layout": GemmLayout.NN}, {"accumulate": True}, {"batch": 2}):  # another GEMM
        np.testing.assert_array_equal(fit.predict(*ODD, **other).seconds, alone.predict(*ODD, **other).seconds)


def test_what_others_measured_and_other_devices_do_not_count() -> None:
    borrowed = LinearModel.fit(gemms(0.01, "simumax:a"), DEVICE)
    assert not any(len(part.known) for part in borrowed.parts.values())
    elsewhere = LinearModel.fit(gemms(0.01), DEVICE).on(DEVICE, {})
    assert not any(len(part.known) for part in elsewhere.parts.values())


def test_measured_shapes_come_back_from_arrays() -> None:
    fit = LinearModel.fit(gemms(0.03), DEVICE)
    again = LinearModel.from_arrays(fit.to_arrays())
    for got, wanted in zip(again.predict(*ODD), fit.predict(*ODD), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_attention_that_was_measured_here_takes_what_it_took() -> None:
    seq = np.repeat(np.array([512, 1024, 2048, 4096, 8192]), 8)
    heads = np.tile(np.array([4, 8, 16, 32, 64, 96, 12, 24]), 5)
    seconds = 1e-5 + 2.0 * seq**2 * heads * 128 / (0.5 * DEVICE.peak_flops["bf16"])
    odd = (seq == 2048) & (heads == 16)
    columns = {
        "batch": 1,
        "seq_q": seq,
        "seq_kv": seq,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": 128,
        "v_head_dim": 128,
        "causal": 1,
        "pass": "forward",
        "dtype": "bf16",
        "kernel": "fa",
        "source": "here",
        "spread": 0.01,
    }
    fit = FlashAttnModel.fit(
        Table.from_columns("flash_attn", {**columns, "seconds": np.where(odd, 1.4, 1.0) * seconds}), DEVICE
    )
    call = (1, 2048, 2048, 16, 16, 128, 128)
    assert float(fit.predict(*call).seconds) == pytest.approx(1.4 * seconds[odd][0], rel=0.1)
    assert fit.predict(*call).basis == Basis.MEASURED < fit.predict(*call, backward=True).basis
    assert FlashAttnModel.from_arrays(fit.to_arrays()).predict(*call).seconds == fit.predict(*call).seconds
    assert fit.on(DEVICE).predict(*call).basis > Basis.MEASURED
