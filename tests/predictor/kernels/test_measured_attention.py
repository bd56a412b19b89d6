"""Attention that was timed on the device replaces the fit, call by call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from toy import toy_cost

from predictor.estimate import Basis
from predictor.kernels.derating import Deratings
from predictor.kernels.flash_generations import AttentionKernel
from predictor.kernels.measured_attention import MeasuredAttention


def row(seq: int, seconds: float, spread: float, name: str = "forward") -> dict[str, Any]:
    return {
        "batch": 1,
        "seq_q": seq,
        "seq_kv": seq,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "causal": 1,
        "pass": name,
        "seconds": seconds,
        "spread": spread,
    }


def test_measured_calls_replace_the_fit() -> None:
    measured = MeasuredAttention.of_rows([row(64, 3.0, 0.2), row(32, 2.0, 0.01), row(32, 7.0, float("nan"), "backward")])
    loaded = {"deratings": Deratings(attention=1.5), "attention_kernel": AttentionKernel(behind=(3,))}
    cost = toy_cost(measured_attention=measured, **loaded)
    fit = toy_cost(**loaded)
    seq, backward = np.array([32, 64, 128, 32]), np.array([False, False, False, True])
    found = cost.kernels.flash_attn(1, seq, seq, 4, 2, 64, 64, True, backward)
    by_fit = fit.kernels.flash_attn(1, seq, seq, 4, 2, 64, 64, True, backward)
    # timed under load, so without the derating; an older generation is slower still
    np.testing.assert_allclose(found.seconds, [4.1, 6.15, by_fit.seconds[2], 14.35], rtol=1e-12)
    # a spread is about two standard deviations; 2% at least
    np.testing.assert_allclose(found.relative_std, [0.02, 0.1, by_fit.relative_std[2], 0.02])
    assert found.basis[[0, 1, 3]].tolist() == [Basis.MEASURED] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 2},
        {"seq_q": 31},
        {"seq_kv": 33},
        {"heads": 8},
        {"kv_heads": 4},
        {"head_dim": 32},
        {"v_head_dim": 32},
        {"causal": False},
        {"backward": True},
    ],
)
def test_another_call_is_not_this_one(change: dict[str, Any]) -> None:
    call = {
        "batch": 1,
        "seq_q": 32,
        "seq_kv": 32,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "causal": True,
        "backward": False,
    }
    cost = toy_cost(measured_attention=MeasuredAttention.of_rows([row(32, 2.0, 0.0)]))
    asked = {name: np.array([value, {**call, **change}[name]]) for name, value in call.items()}
    same, other = cost.kernels.flash_attn(**asked).seconds
    assert same == 2 and other < 1e-3
    assert (toy_cost(measured_attention=MeasuredAttention.of_rows([])).kernels.flash_attn(**asked).seconds < 1e-3).all()
