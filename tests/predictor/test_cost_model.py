"""What the cost model adds to the fits: attention of older generations, the derating, and shared links; by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from references import bare_gemm
from toy import BYTE, DEVICE, FLOP, LINK, NETWORK, toy_cost

from predictor.cost_model import CostModel
from predictor.fitted import cost_model
from predictor.kernels.derating import Derating, Deratings
from predictor.kernels.flash_generations import THIRD_OVER_SECOND, TOKENS
from predictor.kernels.linear import LinearModel
from profiler.profile.profile import Profile, Table
from profiler.profile.profiles import find_profile

#: Two GEMMs of 2 * 64 FLOPs for each of 32 * 33 / 2 pairs and each of 4 heads.
ATTENTION = 4 * 528 * 2 * 2 * 64 * FLOP
CALL = (1, 32, 32, 4, 4, 64, 64)


@pytest.mark.parametrize(
    ("best", "framework", "slower"),
    # a generation over the one before: 1.75 on A100 (arXiv 2307.08691), 1.6 on H100 (arXiv 2407.08608), 2.05 derived
    [(3, 0, 1), (3, 3, 1), (3, 2, 1.6), (3, 1, 1.75 * 1.6), (2, 1, 1.75), (2, 2, 1), (2, 3, 1), (4, 2, 1.6 * 2.05)],
)
def test_older_generations_of_flash_attention_take_longer(best: int, framework: int, slower: float) -> None:
    """Of another kernel that a generation stands for; that of 2 itself depends on the shape (below)."""
    cost = toy_cost(device=replace(DEVICE, flash_version=best))
    assert cost.kernels.flash_attn(*CALL).seconds == pytest.approx(ATTENTION, rel=1e-12)
    assert cost.with_flash_version(framework, own=False).kernels.flash_attn(*CALL).seconds == pytest.approx(
        slower * ATTENTION, rel=1e-12
    )


def test_how_much_slower_flash_attention_2_is_depends_on_heads_and_length() -> None:
    """The published bars by width, mask and tokens, as they ship with the H100 profile."""
    rows = find_profile("h100_sxm")[0].table("flash_attn")
    bars = rows.where(np.char.find(rows["source"], "flash3_fp16_fwd.png") >= 0)
    for (dims, causal), ratios in THIRD_OVER_SECOND.items():
        for tokens, ratio in zip(TOKENS, ratios, strict=True):
            alike = bars.where((bars["head_dim"] == dims) & (bars["causal"] == causal) & (bars["seq_q"] == tokens))
            second, third = (alike["seconds"][alike["kernel"] == kernel] for kernel in ("fa2", "fa3"))
            assert float(second[0] / third[0]) == pytest.approx(ratio, abs=0.006), (dims, causal, tokens)
    kernel = toy_cost(device=replace(DEVICE, flash_version=3)).with_flash_version(2).kernels.attention_kernel
    assert (
        kernel.scale(2048, 128, True) == 1.75
        and kernel.scale(100, 64, False) == 1.18
        and kernel.scale(2**20, 256, True) == 1.84
    )
    between = kernel.scale(np.array([4096 * 2**0.5]), 128, False)
    assert between == pytest.approx((1.73 + 1.75) / 2)


def test_only_the_backward_pass_of_attention_is_slower_where_it_is_deterministic() -> None:
    found = toy_cost(device=replace(DEVICE, flash_version=3)).with_flash_version(2, deterministic=True, own=False)
    both = found.kernels.flash_attn(*(np.array([value] * 2) for value in CALL), backward=np.array([False, True])).seconds
    assert both[0] == pytest.approx(1.6 * ATTENTION, rel=1e-12)
    # half of the published loss of 37.9%
    assert both[1] == pytest.approx(1.6 * ATTENTION * 5 / 2 / (1 - 0.1895), rel=1e-12)


def test_a_gemm_is_a_forward_one_unless_it_is_said_to_be_another() -> None:
    linears = LinearModel.fit(Table.from_columns("linear", {}), DEVICE)
    cost, forward = toy_cost(linears=linears), bare_gemm(linears, 4096, 4096, 16_384)
    assert cost.kernels.linear(4096, 4096, 16_384).seconds == pytest.approx(forward, rel=1e-12)
    added = 0.98 * forward + 0.77 * 8 * 4096**2 / DEVICE.memory_bandwidth
    assert cost.kernels.linear(4096, 4096, 16_384, layout=2, accumulate=True).seconds == pytest.approx(added, rel=1e-12)


def test_a_gemm_in_parts_is_not_faster_than_whole(h100_model: CostModel) -> None:
    for m, parts in ((512, 4), (8192, 4), (8192, 1)):
        whole, part = (float(h100_model.kernels.linear(rows, 4096, 4096).seconds) for rows in (m, m // parts))
        found = float(h100_model.kernels.linear(np.array([m]), 4096, 4096, parts=np.array([parts])).seconds[0])
        assert found == pytest.approx(max(whole, parts * part), rel=1e-12)
    assert found == whole


def test_only_chips_that_read_fp8_in_one_order_transpose() -> None:
    newer = toy_cost(device=replace(DEVICE, peak_flops={"bf16": 1e15, "nvfp4": 4e15}))
    assert toy_cost().kernels.memory_bound("transpose", 1000).seconds == pytest.approx(1000 * BYTE)
    assert newer.kernels.memory_bound("transpose", 1000).seconds == 0
    assert newer.kernels.memory_bound("quantize", 1000).seconds == pytest.approx(1000 * BYTE)


def test_quantised_gemms_have_a_derating_of_their_own() -> None:
    hot = toy_cost(deratings=Deratings(linear=1.25, attention=1.25, quantised=Derating(1.5, 0.12)))
    for dtype, factor, std in (("bf16", 1.25, 0.05), ("fp8", 1.5, 0.13), ("mxfp8", 1.5, 0.13), ("nvfp4", 1.5, 0.13)):
        found = hot.kernels.linear(32, 64, 128, dtype=dtype)
        assert found.seconds == pytest.approx(factor * 2 * 32 * 64 * 128 * FLOP, rel=1e-12)
        assert found.relative_std == pytest.approx(std, rel=1e-12)


def test_the_derating_is_that_of_gemms_and_attention() -> None:
    plain, hot = toy_cost(), toy_cost(deratings=Deratings(1.25, 1.25))
    assert hot.kernels.linear(32, 64, 128).seconds == pytest.approx(1.25 * 2 * 32 * 64 * 128 * FLOP, rel=1e-12)
    assert hot.kernels.flash_attn(*CALL).seconds == pytest.approx(1.25 * ATTENTION, rel=1e-12)
    assert hot.kernels.memory_bound("norm", 1000).seconds == plain.kernels.memory_bound("norm", 1000).seconds
    assert (
        hot.network.collective("all_gather", 1000, 8, 1).seconds == plain.network.collective("all_gather", 1000, 8, 1).seconds
    )


def test_strided_groups_share_the_links_of_a_node(tmp_path: Path) -> None:
    # a profile states the bytes/s that a rank sends while all groups of 2 strided ranks communicate: 3e9; an all-reduce of two
    # ranks sends every byte once (traffic 1), one of 4 ranks 1.5 times: 4.5e9 / 1.5 bytes of buffer per second
    by_ranks = {
        2: {"bandwidth_all_groups": 3e9, "traffic": 1.0},
        4: {"bandwidth_all_groups": 4.5e9, "traffic": 1.5},
        8: {"bandwidth": 1e10, "traffic": 1.75, "latency": 1e-5},
    }
    stated = {"laws": {"intra_node": {"all_reduce": by_ranks}}}
    made = cost_model(Profile("toy", DEVICE, {}, stated), cache_dir=tmp_path)
    assert made.network.shared_links == {("all_reduce", 2): 3e9, ("all_reduce", 4): 3e9}
    cost, size = toy_cost(shared_links=made.network.shared_links), 1e6
    alone, ranks = size * LINK, np.array([2, 4, 8])
    np.testing.assert_allclose(
        cost.network.collective("all_reduce", size, ranks, 1, strided=0).seconds, [alone] * 3, rtol=1e-12
    )
    np.testing.assert_allclose(
        cost.network.collective("all_reduce", size, ranks, 1, strided=1).seconds, [size / 3e9, size / 3e9, alone], rtol=1e-12
    )
    # another op, or a slower network between nodes, is not changed
    assert cost.network.collective("all_gather", size, 2, 1, strided=1).seconds == pytest.approx(alone, rel=1e-12)
    slow = cost.with_network(1e9)
    assert slow.network.collective("all_reduce", size, 2, 4, strided=1).seconds == pytest.approx(size / 1e9, rel=1e-12)


def test_the_network_is_the_device_s_own_unless_another_is_given() -> None:
    cost = toy_cost()
    assert cost.with_network(None).network.collective("p2p", 1e6, 1, 2).seconds == pytest.approx(1e6 * NETWORK, rel=1e-12)
    assert cost.with_network(1e9).network.collective("p2p", 1e6, 1, 2).seconds == pytest.approx(1e6 / 1e9, rel=1e-12)


def test_attention_in_8_bits_takes_less_time_and_is_less_certain(h100_model: CostModel) -> None:
    wide, narrow = (h100_model.kernels.flash_attn(*CALL, dtype=dtype) for dtype in ("", "fp8"))
    assert narrow.seconds == pytest.approx(0.098 / 0.142 * wide.seconds, rel=1e-12)  # as H200's shortest call
    assert narrow.relative_std**2 == pytest.approx(wide.relative_std**2 + 0.1**2, rel=1e-9)
