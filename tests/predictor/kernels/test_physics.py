"""The physical models of GEMMs and attention, and the priors of what was not measured, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from references import bare_gemm

from predictor.cost_model import CostModel
from predictor.estimate import Basis
from predictor.kernels.attn_physics import AttnMachine, AttnPhysics, AttnShape, attn_times
from predictor.kernels.attn_rows import main_rows, shape_of
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.gemm_layout import GemmLayout
from predictor.kernels.gemm_physics import GemmMachine, GemmPhysics, gemm_times
from predictor.kernels.grouped_linear import GroupedLinearModel
from predictor.kernels.linear import LinearModel
from profiler.profile.profile import Device, Table

DEVICE = Device("test", {"bf16": 1e15}, 80e9, 3e12, 132, 8, 4.5e11, 5e10)
#: No launch, no prologue, no power limit, no compute beside a tile; all at the peak.
IDEAL = GemmPhysics(
    launch=0.0,
    efficiency=1.0,
    intensity_half=128.0,
    bandwidth=1.0,
    prologue=0.0,
    sharpness=2.0,
    wave=1.0,
    throttle=0.0,
    throttle_seconds=1e-3,
)
#: One multiprocessor of 2^38 FLOP/s, half of it with tiles of 256 x 256 (256 * 256 / 512 = 128 = intensity_half).
ONE = GemmMachine(peak=2.0**38, bandwidth=1e30, sms=1, element=2.0, out=4.0)


def gemm(physics: GemmPhysics, machine: GemmMachine, m: float, n: float, k: float, batch: float = 1) -> float:
    return float(gemm_times(physics, machine, *(np.array([float(x)]) for x in (m, n, k, batch))).seconds[0])


def test_tiles_of_a_gemm() -> None:
    # 256 x 256 outputs over 1024: 2^27 FLOPs at 2^37 per second; smaller tiles reach less of the peak
    assert gemm(IDEAL, ONE, 256, 256, 1024) == pytest.approx(2**-10, rel=1e-12)
    assert gemm(IDEAL, ONE, 256, 256, 1024, batch=3) == pytest.approx(3 * 2**-10, rel=1e-12)
    # one row more: three tiles of 128 x 256 (128 * 256 / 384: 2 / 5 of the peak) are faster than two of 256 x 256
    assert gemm(IDEAL, ONE, 257, 256, 1024) == pytest.approx(3 * 2 * 128 * 256 * 1024 / (2**38 * 0.4), rel=1e-12)
    # efficiency 1/2 and three multiprocessors for two tiles: each has a third of the rate, and one is idle
    three = replace(IDEAL, efficiency=0.5, prologue=1e6), ONE._replace(sms=3)
    assert gemm(*three, 512, 256, 1024) == pytest.approx(2 * 256 * 256 * (1024 + 1e6) / (2**37 / 3 / 2), rel=1e-12)
    # the fifth tile of four multiprocessors starts a second wave, a quarter of whose empty part costs time: 1.25 + 0.1875
    quarter = replace(IDEAL, wave=0.25, prologue=1e6), ONE._replace(sms=4)
    whole = 2 * 256 * 256 * (1024 + 1e6) / (2**37 / 4)
    assert gemm(*quarter, 5 * 256, 256, 1024) == pytest.approx(1.4375 * whole, rel=1e-12)


def test_reductions_are_split_where_tiles_are_few() -> None:
    # eight multiprocessors, one tile, 1024 columns in eight parts, each with one and a half prologues of 32
    split = 2 * 256 * 256 * (1024 / 8 + 32 * 1.5) / (2**37 / 8)
    fast_small = replace(IDEAL, prologue=32.0, intensity_half=128.0)
    smaller = [
        2 * tm * tn * (1024 / s + 32 * (1.5 if s > 1 else 1)) / (2**38 / 8 * (i := tm * tn / (tm + tn)) / (i + 128))
        for tm, tn, s in ((128, 256, 4), (128, 128, 2), (64, 128, 1), (64, 256, 2))
    ]
    assert gemm(fast_small, ONE._replace(sms=8), 256, 256, 1024) == pytest.approx(min(split, *smaller), rel=1e-12)


def test_memory_launch_and_power_of_a_gemm() -> None:
    # (256 + 256) * 1024 operands of 2 bytes and 256 * 256 outputs of 4: 1,310,720 bytes in 4/3 of the compute's 2^-10 s
    slow = ONE._replace(bandwidth=1_310_720 / (2**-10 * 4 / 3))
    assert gemm(IDEAL, slow, 256, 256, 1024) == pytest.approx(2**-10 * 5 / 3, rel=1e-12)  # sides 3 and 4, sharpness 2
    assert gemm(replace(IDEAL, bandwidth=0.5), slow, 256, 256, 1024) == pytest.approx(2**-10 * math.hypot(1, 8 / 3), rel=1e-12)
    # a kernel as long as throttle_seconds is slower by half of the throttle; the launch is not
    limited = replace(IDEAL, throttle=0.1, throttle_seconds=2**-10, launch=1.0)
    assert gemm(limited, ONE, 256, 256, 1024) == pytest.approx(1 + 2**-10 * 1.05, rel=1e-12)
    # a kernel three times as long by three quarters of it
    assert gemm(limited, ONE, 256, 256, 1024, batch=3) == pytest.approx(1 + 3 * 2**-10 * 1.075, rel=1e-12)


SHAPE = AttnShape._make(np.array([float(x)]) for x in (2, 256, 512, 8, 2, 64, 32, 1))


def test_sizes_of_an_attention_call() -> None:
    # 256 queries are the last of 512 positions: 512 - 255 / 2 keys each; two GEMMs of 64 and 32 dimensions
    assert SHAPE.keys_per_query[0] == 384.5
    assert SHAPE.flops[0] == 2 * (2 * 8 * 256 * 384.5) * (64 + 32)
    # q and output have 8 heads of 256 rows, k and v 2 heads of 512
    assert SHAPE.elements[0] == 2 * (64 + 32) * (256 * 8 + 512 * 2)
    assert SHAPE.blocks[0] == 2 * 8 * 2 and SHAPE._replace(seq_q=SHAPE.seq_q + 1).blocks[0] == 2 * 8 * 3
    assert SHAPE._replace(causal=np.zeros(1)).keys_per_query[0] == 512


def test_seconds_of_an_attention_call() -> None:
    physics = AttnPhysics(
        launch=1.0,
        efficiency=0.5,
        softmax=32.0,
        bandwidth=0.25,
        prologue=100.0,
        sharpness=1.0,
        balance=0.5,
        throttle=0.0,
        throttle_seconds=1.0,
        cache=3.0,
    )
    # a block of 128 queries takes 2 * 128 * (96 + 32) FLOPs per key at half of 2^20 / 10 per second: 0.625 s
    machine, per_key = AttnMachine(peak=2.0**20, bandwidth=1e6, sms=10), 0.625
    times = attn_times(physics, machine, SHAPE)
    # 32 blocks on 10 multiprocessors: 3.2 waves, and half of the 0.8 that the last one lacks
    spread, longest = 3.6 * (384.5 + 100) * per_key, (512 + 100) * per_key
    memory = 2 * 2 * 96 * 3072 / (0.25 * 1e6)
    assert (times.spread[0], times.longest[0], times.memory[0]) == pytest.approx((spread, longest, memory), rel=1e-12)
    assert times.seconds[0] == pytest.approx(1 + spread + longest + memory, rel=1e-12)
    # serving kernels copy k and v (2 heads of 512 rows, 96 dimensions, two bytes, read and written), three times as slowly
    assert times.cache[0] == pytest.approx(3 * 2 * 2 * 2 * 512 * 2 * 96 / 1e6, rel=1e-12)
    # twice the exponentials per clock: the softmax is as 16 columns and not 32, so a block takes 2 * 128 * (96 + 16) FLOPs
    faster = attn_times(physics, machine._replace(exponentials=32.0), SHAPE)
    assert faster.seconds[0] == pytest.approx(1 + (spread + longest) * 112 / 128 + memory, rel=1e-12)
    # sharper: the root of the sum of squares; the power limit: busy / (busy + throttle_seconds) of the throttle
    busy = math.hypot(spread, longest, memory)
    limited = attn_times(replace(physics, sharpness=2.0, throttle=0.1, throttle_seconds=3 * busy), machine, SHAPE)
    assert limited.seconds[0] == pytest.approx(1 + busy * 1.025, rel=1e-12)


def test_priors_of_gemms_that_were_not_measured() -> None:
    # SimuMax's Transformer-Engine kernels on A100 and B200, relative to forward; 25% for the physical model itself
    linear = LinearModel.fit(Table.from_columns("linear", {}), DEVICE)
    forward = float(bare_gemm(linear, 4096, 4096, 4096))
    layouts, adds = (
        np.array([GemmLayout.TN, GemmLayout.NN, GemmLayout.NT, GemmLayout.TN, GemmLayout.NN, GemmLayout.NT]),
        np.arange(6) > 2,
    )
    found = linear.predict(4096, 4096, 4096, layout=layouts, accumulate=adds)
    buffer = 0.77 * 8 * 4096**2 / DEVICE.memory_bandwidth  # a share of reading and writing the fp32 gradients
    np.testing.assert_allclose(
        (found.seconds - [0, 0, 0, 0, 0, buffer]) / forward, [1, 1.005, 1.03, 1.02, 1.02, 0.98], rtol=1e-12
    )
    np.testing.assert_allclose(found.relative_std, np.hypot(0.25, [0, 0.04, 0.05, 0.05, 0.05, 0.05]), rtol=1e-12)
    assert (found.basis == Basis.ROOFLINE).all()
    # experts: between Transformer Engine's grouped kernels of A100 and B200, and 20% more uncertain
    grouped = GroupedLinearModel.fit(Table.from_columns("grouped_linear", {}), linear).predict(
        8, 2048, 2048, 2048, passes=[0, 1, 2]
    )
    dense = linear.predict(2048, 2048, 2048, 8, layout=[0, 1, 2])
    output = 0.5 * 8 * 2048 * 2048 * 4 / DEVICE.memory_bandwidth  # half of reading and writing the gradients in bf16
    np.testing.assert_allclose((grouped.seconds - [0, 0, output]) / dense.seconds, [1.02, 1.05, 1.05], rtol=1e-12)
    np.testing.assert_allclose(grouped.relative_std, np.hypot(dense.relative_std, 0.2), rtol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "read", "written"),
    # nvfp4 shares an 8-bit scale among 16 numbers of 4 bits; results have 16 bits at least
    [("bf16", 2, 2), ("fp8", 1, 2), ("fp32", 4, 4), ("tf32", 4, 4), ("nvfp4", 9 / 16, 2)],
)
def test_bytes_of_numbers(dtype: str, read: float, written: float) -> None:
    device = replace(DEVICE, peak_flops={"bf16": 1e15, dtype: 1e15})
    machine = LinearModel.fit(Table.from_columns("linear", {}), device).parts[dtype].machine
    assert (machine.element, machine.out) == (read, written)


def test_grouped_gemms_are_those_of_each_expert() -> None:
    # 8 experts of 64 tokens, 128 to 256: [64, 128] x [128, 256], input gradient over 256, weight gradient over the tokens
    linear = LinearModel.fit(Table.from_columns("linear", {}), DEVICE)
    fit = replace(GroupedLinearModel.fit(Table.from_columns("grouped_linear", {}), linear), launch=0.0, output_share=0.0)
    grouped = fit.predict(8, 64, 256, 128, passes=[0, 1, 2])
    dense = [float(bare_gemm(linear, *shape, 8)) for shape in ((64, 256, 128), (64, 128, 256), (256, 128, 64))]
    np.testing.assert_allclose(grouped.seconds, np.array(dense) * [1.02, 1.005 * 1.05, 1.03 * 1.05], rtol=1e-12)


def test_priors_of_attention_that_was_not_measured() -> None:
    fit = FlashAttnModel.fit(Table.from_columns("flash_attn", {}), DEVICE)
    forward = fit.predict(1, [512, 2048, 4096, 8192], [512, 2048, 4096, 8192], 32, 8, 128, 128)
    assert (forward.relative_std == 0.30).all() and (forward.basis == Basis.ROOFLINE).all()
    backward = fit.predict(1, [512, 2048, 4096, 8192], [512, 2048, 4096, 8192], 32, 8, 128, 128, True, True)
    # measured: 3.2 times the forward time at 1k and below, 2.9 from 4k on; 2k is half way between in octaves
    np.testing.assert_allclose(backward.seconds / forward.seconds, [3.2, 3.05, 2.9, 2.9], rtol=1e-12)
    # the head dimensions of MLA: 3.5; the same dimensions, or a narrower key, are not
    dims = [[192, 128], [128, 128], [64, 128]]
    ratios = [
        float(fit.predict(1, 4096, 4096, 32, 8, *d, True, True).seconds / fit.predict(1, 4096, 4096, 32, 8, *d).seconds)
        for d in dims
    ]
    assert ratios == pytest.approx([3.5, 2.9, 2.9], rel=1e-12)


def test_training_kernels_inferred_from_short_serving_ones_are_uncertain() -> None:
    # rows of serving with few kv heads, made with the copy into a cache: 6% for each octave below 2k tokens, of six at most
    physics = AttnPhysics(cache=1.2)
    seq = np.repeat(2.0 ** np.arange(3, 15), 4)
    heads, kv_heads = np.full(48, 32.0), np.tile([1.0, 4, 8, 32], 12)
    shape = AttnShape(np.ones(48), seq, seq, heads, kv_heads, *[np.full(48, 128.0)] * 2, np.ones(48))
    times = attn_times(physics, AttnMachine(1e15, 3e12, 132), shape)
    columns = {name: column.astype(np.int64) for name, column in shape._asdict().items()}
    words = {"pass": "forward", "dtype": "bf16", "source": "ai-dynamo/serving", "kernel": "fa"}
    fit = FlashAttnModel.fit(
        Table.from_columns("flash_attn", {**columns, **words, "seconds": times.seconds + times.cache}), DEVICE
    )
    asked = np.array([8192, 2048, 1024, 256, 16])
    training, serving = (fit.predict(1, asked, asked, 32, 8, 128, 128, serving=how) for how in (False, True))
    added = np.sqrt(training.relative_std**2 - serving.relative_std**2)
    np.testing.assert_allclose(added, [0, 0, 0.06, 0.18, 0.36], atol=1e-6)


def _attention_rows(own: int) -> Table:
    """Return ``own`` rows of this laboratory, and 40 of another one."""
    rows = own + 40
    source = ["measured here"] * own + ["microsoft/vidur:x"] * 40
    return Table.from_columns(
        "flash_attn",
        {
            "batch": 1,
            "seq_q": 64 + np.arange(rows),
            "seq_kv": 64 + np.arange(rows),
            "heads": 8,
            "kv_heads": 8,
            "head_dim": 64,
            "v_head_dim": 64,
            "causal": 1,
            "pass": "forward",
            "kernel": "fa",
            "dtype": "bf16",
            "seconds": 1e-4,
            "source": source,
        },
    )


def test_rows_of_other_laboratories_are_used_only_where_there_are_fewer_than_30_others() -> None:
    assert [len(main_rows(_attention_rows(own))) for own in (29, 30, 31)] == [69, 30, 31]


def test_a_table_may_leave_out_what_equals_something_else() -> None:
    # no v_head_dim: that of q and k; no kv_heads: as many as query heads
    columns = {
        "batch": 1,
        "seq_q": 8,
        "seq_kv": 8,
        "heads": 6,
        "kv_heads": [0, 2],
        "head_dim": 64,
        "v_head_dim": [0, 32],
        "causal": 1,
        "seconds": 1.0,
    }
    shape = shape_of(Table.from_columns("flash_attn", columns))
    assert (shape.v_head_dim.tolist(), shape.kv_heads.tolist()) == ([64, 32], [6, 2])


def test_products_added_to_an_fp32_buffer_take_no_less_than_its_bytes(h100_model: CostModel) -> None:
    linears = h100_model.kernels.linears
    physics = linears.parts["bf16"].physics
    weights, tokens = 8192.0, np.array([128.0, 512.0, 8192.0])
    plain, added = (
        linears.predict(weights, weights, tokens, layout=GemmLayout.NT, accumulate=add).seconds for add in (False, True)
    )
    # 512 tokens: 8 bytes a weight, and two operands of 8192 x 512 in bf16, over what GEMMs reach of 3.35 TB/s
    moved = 8 * weights**2 + 2 * 2 * weights * tokens
    least = physics.launch + moved / (physics.bandwidth * 3.35e12)
    assert (added >= least * (1 - 1e-12)).all() and added[0] < 1.2 * least[0] and (added[:2] > 1.5 * plain[:2]).all()
    assert plain[2] < added[2] < 1.1 * plain[2]  # of many tokens the arithmetic is most of it
