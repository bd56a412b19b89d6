"""The law of Mamba-2's kernels: its counts by hand, one published time that it is built on, and what holds for all shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.kernels.state_space import (
    KERNELS,
    LAUNCH,
    MATRIX_SHARE,
    MEMORY_SHARE,
    STD,
    state_space,
    state_space_bytes,
    state_space_flops,
)
from profiler.profile.devices import device

#: Nemotron-H 8B: 128 heads of 64, a state of 128, 8 groups, chunks of 128.
SIZES = (128, 64, 128, 8, 128)


def test_counts_by_hand() -> None:
    state, inside, between = 128 * 64 * 128, 128 * 64 * 128 / 2, 8 * 128 * 128
    assert state_space_flops(*SIZES, False) == 2 * (2 * state + inside + between) == 5_505_024
    assert state_space_flops(*SIZES, True) == 2 * (5 * state + 3 * inside + 3 * between) == 14_417_920
    # 8,192 values and 1,024 keys a token; 8,192 values of a chunk's state a token; 1,024 products; 128 decays
    assert state_space_bytes(*SIZES, False) == 2 * (5 * 8192 + 4 * 1024) + 12 * 8192 + 4 * (2 * 1024 + 3 * 128) == 198_144
    back = 2 * (16 * 8192 + 8 * 1024) + 4 * (4 * 1024 + 11 * 8192 + 6 * 1024 + 6 * 128)
    assert state_space_bytes(*SIZES, True) == back == 683_008


def test_the_share_of_the_peak_is_what_one_kernel_reaches() -> None:
    """chunk_scan of tile-ai/tilelang's benchmark/mamba2 on H800: 8 sequences, 80 heads of 64, a state of 128, chunks of 256."""
    published = {1024: 0.169, 2048: 0.329, 4096: 0.645, 8192: 1.278, 16384: 2.531, 32768: 5.076}
    for seq, ms in published.items():
        flops = 2 * 8 * seq * 80 * 64 * (256 / 2 + 128)
        assert flops / (ms * 1e-3) / device("h800_sxm").half_peak == pytest.approx(MATRIX_SHARE, rel=0.1)


def test_a_time_by_hand() -> None:
    h100 = device("h100_sxm")
    flops, size = 5_505_024 / (MATRIX_SHARE * h100.half_peak), 198_144 / (MEMORY_SHARE * h100.memory_bandwidth)
    found = state_space(h100, 1, 8192, *SIZES, False)
    assert float(found.seconds) == pytest.approx(KERNELS[0] * LAUNCH + 8192 * (flops + size), rel=1e-12)
    assert float(found.relative_std) == STD


@given(
    batch=st.integers(1, 16),
    chunks=st.integers(1, 512),
    heads=st.integers(1, 16),
    groups=st.sampled_from([1, 2, 8]),
    chunk=st.sampled_from([64, 128, 256]),
    backward=st.booleans(),
)
def test_more_work_takes_longer_and_never_beats_peak_or_memory(
    batch: int, chunks: int, heads: int, groups: int, chunk: int, backward: bool
) -> None:
    h100, seq, sizes = device("h100_sxm"), chunks * chunk, (heads * groups, 64, 128, groups, chunk, backward)
    alone = float(state_space(h100, batch, seq, *sizes).seconds)
    for more in ((2 * batch, seq, *sizes), (batch, 2 * seq, *sizes), (batch, seq, 2 * heads * groups, *sizes[1:])):
        assert alone < float(state_space(h100, *more).seconds) < 2 * alone
    assert alone > batch * seq * float(state_space_flops(*sizes)) / h100.half_peak
    assert alone > batch * seq * float(state_space_bytes(*sizes)) / h100.memory_bandwidth


def test_a_part_of_a_chunk_is_a_whole_one() -> None:
    h100 = device("h100_sxm")
    part, whole, more = (float(state_space(h100, 1, seq, *SIZES, False).seconds) for seq in (129, 256, 257))
    assert part == whole < more
