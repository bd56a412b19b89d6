"""A shipped profile has the same fit on every CPU: nothing is searched, and last bits change no tree."""

from __future__ import annotations

import numpy as np
import pytest

from predictor.fitted import SHIPPED_CONSTANTS
from predictor.kernels import residual
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.gemm_physics import gemm_times
from predictor.kernels.known_constants import KnownConstants
from predictor.kernels.linear import LinearModel
from predictor.kernels.residual import fit_residual
from profiler.profile.profiles import find_profile, shipped_profiles

_TREES = {"max_iter": 40, "max_leaf_nodes": 31, "max_depth": 8, "learning_rate": 0.1, "min_samples_leaf": 10}


@pytest.mark.parametrize("name", shipped_profiles())
def test_constants_of_shipped_profiles_need_no_search(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: object, **__: object) -> None:
        raise AssertionError("python -m predictor.fit_shipped writes the constants of the shipped profiles again")

    monkeypatch.setattr("scipy.optimize.least_squares", searched)
    monkeypatch.setattr(residual, "ROWS_FOR_TREES", 10**9)
    profile, constants = find_profile(name)[0], KnownConstants.read(SHIPPED_CONSTANTS)
    before = len(constants.found)
    LinearModel.fit(profile.table("linear"), profile.device, constants)
    FlashAttnModel.fit(profile.table("flash_attn"), profile.device, constants)
    assert len(constants.found) == before


def test_shipped_constants_are_those_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "ROWS_FOR_TREES", 10**9)
    profile, _ = find_profile("a100_sxm_80gb")
    table = profile.table("linear")
    shipped, searched = (
        LinearModel.fit(table, profile.device, constants).parts["bf16"]
        for constants in (KnownConstants.read(SHIPPED_CONSTANTS), None)
    )
    sizes = [table[name].astype(np.float64) for name in ("m", "n", "k", "batch")]
    seconds = [gemm_times(part.physics, part.machine, *sizes).seconds for part in (shipped, searched)]
    assert np.abs(seconds[0] / seconds[1] - 1).max() < 2e-3
    assert shipped.physics.efficiency == 1.0 and shipped.physics.launch == pytest.approx(4.11e-6, rel=1e-3)


def test_last_bits_change_no_tree() -> None:
    chance = np.random.default_rng(3)
    sizes = 2.0 ** chance.integers(6, 14, (2000, 3)) + chance.integers(0, 7, (2000, 3))
    features, target = np.log2(sizes), np.log(sizes).sum(axis=1) + 0.1 * chance.normal(size=2000)
    asked = np.log2(sizes + 1)

    def predicted(noise: float) -> np.ndarray:
        noisy = [values * (1 + noise * chance.uniform(-1, 1, values.shape)) for values in (features, target)]
        fit = fit_residual(noisy[0], noisy[0], target, noisy[1], np.arange(2000), _TREES)
        return fit.correct(asked * (1 + noise), asked, asked.sum(axis=1))[0]

    assert np.array_equal(predicted(1e-14), predicted(-1e-14))
    assert np.abs(predicted(1e-4) - predicted(0.0)).max() > 1e-3  # what is no rounding does change trees
