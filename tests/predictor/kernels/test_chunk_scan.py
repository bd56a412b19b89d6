"""The law of linear attention's kernels against published times, and what holds for all shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.kernels.chunk_scan import BACKWARD_FLOPS, MEASURED_STD, OTHER_STD, chunk_flops, chunk_scan
from profiler.profile.devices import device

#: (device, backward, sequences, tokens of each, heads of values, milliseconds): a sample of flash-linear-attention's columns of
#: QwenLM/FlashQLA, benchmark/benchmark_results_H200.txt and _GB200.txt (MIT licence).
PUBLISHED = (
    ("h200_sxm", False, 1, 32768, 8, 0.902),
    ("h200_sxm", False, 1, 8192, 8, 0.234),
    ("h200_sxm", False, 1, 2048, 8, 0.081),
    ("h200_sxm", False, 1, 4096, 16, 0.166),
    ("h200_sxm", False, 4, 8192, 16, 0.935),
    ("h200_sxm", False, 1, 4096, 32, 0.244),
    ("h200_sxm", False, 4, 2048, 32, 0.478),
    ("h200_sxm", False, 1, 8192, 64, 0.814),
    ("h200_sxm", False, 8, 4096, 64, 3.390),
    ("h200_sxm", False, 1, 16384, 48, 1.311),
    ("h200_sxm", True, 1, 8192, 32, 1.444),
    ("h200_sxm", True, 1, 32768, 16, 3.701),
    ("h200_sxm", True, 1, 8192, 4, 0.606),
    ("gb200", False, 1, 32768, 8, 1.016),
    ("gb200", False, 1, 4096, 32, 0.242),
    ("gb200", False, 4, 8192, 32, 1.743),
    ("gb200", False, 1, 8192, 64, 0.755),
    ("gb200", False, 8, 1024, 64, 0.759),
    ("gb200", True, 1, 32768, 32, 5.714),
    ("gb200", True, 1, 8192, 8, 0.798),
)


def test_published_times_lie_within_a_quarter() -> None:
    errors = []
    for name, backward, batch, seq, heads, ms in PUBLISHED:
        found = chunk_scan(device(name), batch, seq, heads, 128, 128, backward)
        errors.append(float(np.log(found.seconds / (ms * 1e-3))))
        assert float(found.relative_std) == MEASURED_STD
    assert np.max(np.abs(errors)) < 0.25
    assert np.median(np.abs(errors)) < 0.1
    assert abs(np.mean(errors)) < 0.05


def test_flops_by_hand() -> None:
    # inside a chunk of 64: k k^T, the two factors over k and v, q k^T and its product with v; three products for the state
    in_chunk = 2 * 64 * (128 + 128 + 128 + 128 + 128)
    assert chunk_flops(128, 128) == in_chunk + 2 * 3 * 128 * 128 == 180224
    assert BACKWARD_FLOPS == 3.0


@given(
    batch=st.integers(1, 16),
    chunks=st.integers(1, 512),
    heads=st.integers(1, 128),
    dim=st.sampled_from([64, 128, 256]),
    backward=st.booleans(),
)
def test_more_work_takes_longer_and_never_beats_the_peak(batch: int, chunks: int, heads: int, dim: int, backward: bool) -> None:
    h100, seq = device("h100_sxm"), chunks * 64
    alone = float(chunk_scan(h100, batch, seq, heads, dim, dim, backward).seconds)
    for more in ((2 * batch, seq, heads), (batch, 2 * seq, heads), (batch, seq, 2 * heads)):
        longer = float(chunk_scan(h100, *more, dim, dim, backward).seconds)
        assert alone < longer < 2 * alone
    flops = batch * seq * heads * chunk_flops(dim, dim)
    assert alone > flops / h100.peak_flops["bf16"]


def test_another_generation_is_less_certain() -> None:
    ampere = chunk_scan(device("a100_sxm_80gb"), 1, 4096, 32, 128, 128, False)
    assert float(ampere.relative_std) == OTHER_STD > MEASURED_STD


def test_a_token_more_than_whole_chunks_is_a_chunk_more() -> None:
    # 65 tokens of one head of 128 and 128: two steps of 0.91 us from chunk to chunk, as many as of 128 tokens
    machine = device("h200_sxm")
    one, more, two = (float(chunk_scan(machine, 1, seq, 1, 128, 128, False).seconds) for seq in (64, 65, 128))
    each = (two - one - 0.91e-6) / 64
    assert more - one == pytest.approx(0.91e-6 + each, rel=1e-6)
