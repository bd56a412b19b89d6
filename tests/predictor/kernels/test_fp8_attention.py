"""Attention in 8 bits over attention in 16: the measured calls, between and beyond them, and other chips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.kernels.fp8_attention import KEYS, fp8_attention_ratio
from profiler.profile.devices import DEVICES

GB200, GB300, H200 = (DEVICES[name] for name in ("gb200", "gb300", "h200_sxm"))


def test_measured_calls() -> None:
    # 4,096 causal tokens, two sequences, 64 heads of 128: milliseconds as published
    assert fp8_attention_ratio(GB200, "mxfp8", 2048, 256, True, False) == pytest.approx(0.328 / 0.407)
    assert fp8_attention_ratio(GB200, "mxfp8", 2048, 256, True, True) == pytest.approx(1.331 / 1.205)
    assert fp8_attention_ratio(GB300, "fp8", 2048, 256, True, True) == pytest.approx(0.993 / 1.089)
    # 128 heads of 192 and 128, 32,768 tokens
    assert fp8_attention_ratio(GB300, "mxfp8", 16384, 320, True, True) == pytest.approx(115.889 / 176.050)
    # Hopper's backward pass: slower than in 16 bits where a mask hides half, faster where none does
    assert fp8_attention_ratio(H200, "fp8", 16384, 256, True, True) == pytest.approx(118.729 / 75.688)
    assert fp8_attention_ratio(H200, "fp8", 16384, 256, False, True) == 0.93
    assert fp8_attention_ratio(H200, "fp8", 512, 256, False, False) == pytest.approx(0.098 / 0.142)


def test_between_and_beyond_the_measured_sizes() -> None:
    def ratio(keys: float, dims: float, backward: bool = False) -> float:
        return float(fp8_attention_ratio(GB200, "fp8", keys, dims, True, backward))

    assert ratio(2048 * np.sqrt(2), 256) == pytest.approx((0.310 / 0.407 + 1.095 / 1.429) / 2)  # halfway in octaves
    assert ratio(2048, 288) == pytest.approx((0.310 / 0.407 + 0.641 / 0.982) / 2)
    assert ratio(64, 256) == ratio(KEYS[0], 256) and ratio(1e6, 256) == ratio(KEYS[-1], 256)
    assert ratio(2048, 512) == ratio(2048, 320) and ratio(2048, 64) == ratio(2048, 128) == pytest.approx(0.189 / 0.210)
    assert ratio(2048, 128, backward=True) == ratio(2048, 256, backward=True)  # no smaller heads were measured backward


@given(st.floats(16, 64), st.floats(64, 1e6), st.floats(64, 512), st.sampled_from(["fp8", "mxfp8"]), st.booleans())
def test_more_exponentials_lie_between_the_two_chips(
    exponentials: float, keys: float, dims: float, dtype: str, backward: bool
) -> None:
    def ratio(exponentials: float) -> float:
        device = replace(GB200, exponentials=exponentials)
        return float(fp8_attention_ratio(device, dtype, keys, dims, True, backward))

    low, high = sorted((ratio(16), ratio(32)))
    assert low * (1 - 1e-12) <= ratio(exponentials) <= high * (1 + 1e-12)
    assert ratio(32) == pytest.approx(ratio(64)), "chips with more than the fastest that was measured are like it"
