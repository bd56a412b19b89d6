"""What a fit makes of few measurements: factors shrunk towards their priors and their uncertainty, worked out by hand.

The measurements are made with the physical model itself, so its own fit cancels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from references import bare_attention, bare_gemm
from toy import toy_cost

from predictor.cost_model import CostModel
from predictor.estimate import Basis
from predictor.kernels.attn_rows import waits_for_host
from predictor.kernels.derating import (
    OVER_LOOPS,
    Deratings,
    Laboratories,
    attention_derating_of,
    derating_of,
    quantised_derating_of,
)
from predictor.kernels.flash_attn import FlashAttnModel
from predictor.kernels.grouped_linear import GroupedLinearModel
from predictor.kernels.linear import LinearModel
from predictor.kernels.sources import other_lab
from profiler.profile.profile import Device, Profile, Table
from profiler.profile.profiles import find_profile

DEVICE = Device("test", {"bf16": 1e15}, 80e9, 3e12, 132, 8, 4.5e11, 5e10)
UNFITTED = LinearModel.fit(Table.from_columns("linear", {}), DEVICE)


def linear_rows(
    layout: str, count: int, factor: float, source: str = "measured here", accumulate: bool = False, size: int = 1024
) -> dict[str, Any]:
    """Return ``count`` GEMMs of different sizes that take ``factor`` times the physical model's prior."""
    m = size + 64 * np.arange(count)
    seconds = factor * bare_gemm(UNFITTED, m, 2048, 2048)
    return {
        "m": m,
        "n": np.full(count, 2048),
        "k": np.full(count, 2048),
        "batch": np.ones(count, dtype=int),
        "layout": np.full(count, layout),
        "accumulate": np.full(count, int(accumulate)),
        "dtype": np.full(count, "bf16"),
        "seconds": seconds,
        "source": np.full(count, source),
    }


def linear_table(*parts: dict[str, Any]) -> Table:
    return Table.from_columns("linear", {name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def test_layouts_are_shrunk_towards_their_priors() -> None:
    # 10 input gradients take 1.2 times the forward: half of the way from the prior, 1.005, in logarithms; 30 weight gradients
    # 1.3 times: three quarters of the way from 1.03. The prior's uncertainty shrinks alike
    fit = LinearModel.fit(
        linear_table(linear_rows("TN", 20, 1.0), linear_rows("NN", 10, 1.2), linear_rows("NT", 30, 1.3)), DEVICE
    )
    part = fit.parts["bf16"]
    assert part.layout_factor[1, 0] == pytest.approx(math.sqrt(1.005 * 1.2), rel=1e-6)
    assert part.layout_factor[2, 0] == pytest.approx(1.03**0.25 * 1.3**0.75, rel=1e-6)
    np.testing.assert_allclose(part.layout_factor[[0, 0, 1, 2], [0, 1, 1, 1]], [1, 1.02, 1.02, 0.98])
    assert part.layout_uncertainty[[1, 2], [0, 0]] == pytest.approx([0.04 / 2, 0.05 / 4]) and part.adding == 0.77


def test_gradients_added_in_fp32_show_a_share_of_the_buffers_traffic() -> None:
    # 0.9 times the forward and half of 8 bytes an output; a tenth of the kernels take twice as long, which counts for little;
    # those with buffers of 16 bits are of another kind
    rows = linear_rows("NT", 300, 0.9, accumulate=True, size=256)
    rows["k"] = 256 * (1 + np.arange(300) % 16)
    buffer = 8 * rows["m"] * rows["n"] / DEVICE.memory_bandwidth
    rows["seconds"] = 0.9 * bare_gemm(UNFITTED, rows["m"], rows["n"], rows["k"]) + 0.5 * buffer
    rows["seconds"][::10] *= 2
    halves = {**linear_rows("NT", 300, 3.0, accumulate=True), "out_dtype": np.full(300, "bf16")}
    forward = {**linear_rows("TN", 20, 1.0), "out_dtype": np.full(20, "bf16")}
    fit = LinearModel.fit(linear_table(forward, {**rows, "out_dtype": np.full(300, "fp32")}, halves), DEVICE)
    part = fit.parts["bf16"]
    assert part.layout_factor[2, 1] == pytest.approx(0.9, rel=0.02) and part.adding == pytest.approx(0.5, rel=0.1)
    few, many = (fit.predict(4096, 4096, k, layout=2, accumulate=[False, True]).seconds for k in (512, 65_536))
    assert few[1] > 1.2 * few[0] and many[1] < many[0], "of many tokens the products cover it"


def test_the_scale_of_a_laboratory_cancels() -> None:
    # another laboratory's kernels all take 1.5 times as long: its input gradients say nothing else than ours
    fit = LinearModel.fit(
        linear_table(
            linear_rows("TN", 40, 1.0), linear_rows("TN", 9, 1.5, "simumax:x"), linear_rows("NN", 10, 1.8, "simumax:x")
        ),
        DEVICE,
    )
    assert fit.parts["bf16"].layout_factor[1, 0] == pytest.approx(math.sqrt(1.005 * 1.2), rel=1e-2)


def test_kernels_of_other_laboratories_state_the_derating() -> None:
    # two laboratories, of 30 and 10 kernels of 1.2 and 1.6 times our times: the geometric mean by rows
    table = linear_table(
        linear_rows("TN", 40, 1.0, size=8192),
        linear_rows("TN", 30, 1.2, "simumax:x", size=8192),
        linear_rows("TN", 10, 1.6, "microsoft/vidur:y", size=8192),
    )
    fit, profile = LinearModel.fit(table, DEVICE), Profile("test", DEVICE, {"linear": table})
    assert fit.lab_scale(profile) == {
        "microsoft/vidur:y": (pytest.approx(1.6, rel=0.01), 10),
        "simumax:x": (pytest.approx(1.2, rel=0.01), 30),
    }
    labs = Laboratories(fit.lab_scale(profile))
    assert Laboratories.from_arrays(labs.to_arrays()) == labs
    assert derating_of(profile, labs) == pytest.approx(1.2**0.75 * 1.6**0.25, rel=0.01)
    # a profile may state it; one laboratory alone has none
    assert derating_of(Profile("test", DEVICE, {"linear": table}, {"sustained_scale": 1.7}), labs) == 1.7
    # what was measured stands over what an older measurement of the same machine stated
    both = {"sustained_scale": 1.0, "power_slowdown": 1.15}
    assert derating_of(Profile("test", DEVICE, {"linear": table}, both), labs) == 1.15
    assert derating_of(Profile("test", DEVICE, {"linear": linear_table(linear_rows("TN", 40, 1.0))}), Laboratories({})) == 1


def test_short_kernels_do_not_count_where_there_are_30_long_ones() -> None:
    # below 0.1 ms a time includes the timing loop: here 64 x 2048 x 2048, 3 times ours
    short, long = (linear_rows("TN", 30, f, "simumax:x", size=s) for f, s in ((3.0, 64), (1.2, 16384)))
    own = linear_table(linear_rows("TN", 40, 1.0, size=16384), linear_rows("TN", 40, 1.0, size=64))
    assert (long["seconds"] > 1e-4).all() and (short["seconds"] < 1e-4).all()
    fit = LinearModel.fit(own, DEVICE)
    few = {name: column[:29] for name, column in long.items()}
    for rows, scale, count in ((long, 1.2, 30), (few, 3.0, 59)):
        found = fit.lab_scale(Profile("test", DEVICE, {"linear": linear_table(short, rows)}))["simumax:x"]
        assert found == (pytest.approx(scale, rel=0.03), count)


def grouped_rows(count: int, factor: float, name: str = "forward", source: str = "here") -> dict[str, Any]:
    tokens = 256 * (1 + np.arange(count))
    seconds = factor * bare_gemm(UNFITTED, tokens, 2048, 1024, 8)
    return {
        "groups": 8,
        "tokens_per_group": tokens,
        "n": 2048,
        "k": 1024,
        "pass": name,
        "dtype": "bf16",
        "seconds": seconds,
        "source": source,
    }


def test_grouped_gemms_are_shrunk_towards_their_prior() -> None:
    # nine forward passes at twice the dense time: three quarters of the way from 1.02; the others keep their priors
    fit = GroupedLinearModel.fit(Table.from_columns("grouped_linear", grouped_rows(9, 2.0)), UNFITTED)
    assert fit.overhead == pytest.approx([1.02**0.25 * 2**0.75, 1.05, 1.05], rel=1e-9)
    assert fit.measured.tolist() == [True, False, False]
    # no spread: 5% at least; the quarter of the prior's 20% is as much
    assert fit.uncertainty == pytest.approx([0.05, 0.2, 0.2])
    # one measurement in four of the weight of its prior
    one = GroupedLinearModel.fit(Table.from_columns("grouped_linear", grouped_rows(1, 2.0)), UNFITTED)
    assert one.overhead[0] == pytest.approx(1.02**0.75 * 2**0.25, rel=1e-9) and one.uncertainty[0] == pytest.approx(0.15)
    # dense GEMMs of the same source that take 1.25 times ours explain that much
    slow = Table.from_columns("grouped_linear", grouped_rows(9, 2.0, source="simumax:x"))
    fit = GroupedLinearModel.fit(slow, UNFITTED, {"simumax": (1.25, 40)})
    assert fit.overhead[0] == pytest.approx(1.02**0.25 * 1.6**0.75, rel=1e-9)


def test_the_spread_of_grouped_gemms() -> None:
    # eleven ratios whose logarithms are -0.5 to 0.5 in tenths: 90% are within 0.5, 0.45 by the quantile of absolute values
    rows = grouped_rows(11, 1.0)
    rows["seconds"] = rows["seconds"] * np.exp(np.linspace(-0.5, 0.5, 11))
    fit = GroupedLinearModel.fit(Table.from_columns("grouped_linear", rows), UNFITTED)
    assert fit.uncertainty[0] == pytest.approx(math.hypot(11 / 14 * 0.5 / 1.645, 3 / 14 * 0.2))
    assert fit.overhead[0] == pytest.approx(1.02 ** (3 / 14))


def test_a_weight_gradient_of_few_tokens_waits_for_the_memory() -> None:
    # twice the dense time, and 0.3 of reading and writing 8 x 2048 x 1024 weights in fp32 at 3 TB/s
    rows = grouped_rows(12, 1.0, "weight_grad", "accumulating in fp32")
    tokens, output = rows["tokens_per_group"], 8.0 * 8 * 2048 * 1024 / 3e12
    dense = UNFITTED.predict(2048, 1024, tokens, 8, layout=2, accumulate=True, buffer=False).seconds
    rows["seconds"] = 2.0 * dense + 0.3 * output
    fit = GroupedLinearModel.fit(Table.from_columns("grouped_linear", rows), UNFITTED)
    assert fit.output_share == pytest.approx(0.3) and fit.overhead[2] == pytest.approx(1.05**0.2 * 2**0.8, rel=1e-6)
    found = fit.predict(8, tokens, 2048, 1024, passes=2, accumulate=True)
    assert found.seconds == pytest.approx(fit.overhead[2] * dense + 0.3 * output, rel=1e-9)
    in_bf16 = fit.predict(8, 2048, 2048, 1024, passes=2).seconds
    dense_bf16 = UNFITTED.predict(2048, 1024, 2048, 8, layout=2).seconds
    assert in_bf16 == pytest.approx(fit.overhead[2] * dense_bf16 + 0.15 * output, rel=1e-9)


def test_the_host_starts_the_gemm_of_each_expert() -> None:
    unknown = GroupedLinearModel.fit(Table.from_columns("grouped_linear", {}), UNFITTED)
    assert unknown.launch_seconds(64) == pytest.approx(64 * 6.6e-6)
    cost = toy_cost(grouped=unknown, deratings=Deratings(1.5))  # the device's clocks do not slow the host
    few = [float(cost.kernels.grouped_linear(64, 16, 1024, 1024, launched=launched).seconds) for launched in (True, False)]
    assert few[0] == pytest.approx(64 * 6.6e-6) and few[1] == pytest.approx(1.5 * float(unknown.predict(64, 16, 1024, 1024)[0]))
    assert few[1] < few[0]
    rows = grouped_rows(4, 1.0) | {"seconds": np.full(4, 8 * 3e-6)}  # a machine that takes 3 us for each
    fit = GroupedLinearModel.fit(Table.from_columns("grouped_linear", rows), UNFITTED)
    assert fit.launch == pytest.approx(3e-6)
    again = GroupedLinearModel.from_arrays(fit.to_arrays())
    assert (again.launch, again.output_share, again.families) == (fit.launch, fit.output_share, ("bf16",))


def test_grouped_gemms_in_another_format_are_extrapolated() -> None:
    device = Device("test", {"bf16": 1e15, "fp8": 2e15}, 80e9, 3e12, 132, 8, 4.5e11, 5e10)
    dense = LinearModel.fit(linear_table(linear_rows("TN", 40, 1.0)), device)
    fit = GroupedLinearModel.fit(Table.from_columns("grouped_linear", grouped_rows(9, 2.0)), dense)
    found = fit.predict(8, 4096, 2048, 1024, dtype="fp8")
    assert found.seconds == pytest.approx(fit.overhead[0] * dense.predict(4096, 2048, 1024, 8, dtype="fp8").seconds, rel=1e-9)
    assert found.basis >= Basis.EXTRAPOLATED and found.relative_std >= 0.2
    assert fit.predict(8, 4096, 2048, 1024).basis < found.basis


def attention_table(backward: int, factor: float, name: str, kernel: str = "fa", forward: int = 40) -> Table:
    """Return forward rows, and ``backward`` rows of ``name`` that take ``factor`` times the forward time."""
    unfitted = FlashAttnModel.fit(Table.from_columns("flash_attn", {}), DEVICE)
    seq = 4096 + 128 * np.concatenate([np.arange(forward), np.arange(backward)])
    seconds = bare_attention(unfitted, 1, seq, seq, 32, 8, 128, 128, 1)
    is_forward = np.arange(len(seq)) < forward
    return Table.from_columns(
        "flash_attn",
        {
            "batch": 1,
            "seq_q": seq,
            "seq_kv": seq,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "v_head_dim": 128,
            "causal": 1,
            "pass": np.where(is_forward, "forward", name),
            "kernel": np.where(is_forward, "fa", kernel),
            "dtype": "bf16",
            "seconds": seconds * np.where(is_forward, 1.0, factor),
            "source": "measured here",
        },
    )


@pytest.mark.parametrize(("name", "factor"), [("backward", 2.0), ("forward_backward", 3.0)])
def test_backward_passes_are_shrunk_towards_the_default(name: str, factor: float) -> None:
    # ten of them at twice the forward time: half of the way from 2.9, and half of its 10%; none: 2.9. A joint measurement
    # includes the forward pass
    fit = FlashAttnModel.fit(attention_table(10, factor, name), DEVICE)
    forward, backward = (fit.predict(1, 4226, 4226, 32, 8, 128, 128, True, b) for b in (False, True))
    assert backward.seconds / forward.seconds == pytest.approx(math.sqrt(2.9 * 2.0), rel=1e-3)
    assert fit.backward is not None and fit.backward.size_uncertainty[0] == pytest.approx(math.hypot(0.005, 0.05), rel=0.02)
    assert FlashAttnModel.fit(attention_table(0, 1.0, name), DEVICE).backward is None


def test_backward_passes_need_the_forward_pass_of_their_kernel() -> None:
    # the forward time of another kernel says nothing about this one
    assert FlashAttnModel.fit(attention_table(10, 2.0, "backward", "other"), DEVICE).backward is None


def test_the_cast_that_a_source_times_with_its_fp8_gemms_is_left_out() -> None:
    # GEMMs of the physical model, and in front of each a kernel of 9 us that moves 8 bytes for each value of the first operand
    device = Device("test", {"bf16": 1e15, "fp8": 2e15}, 80e9, 3e12, 132, 8, 4.5e11, 5e10)
    bare = LinearModel.fit(Table.from_columns("linear", {}), device)
    grid = np.array([(m, n, k) for m in (256, 1024, 4096, 16384) for n in (256, 1024, 8192) for k in (1024, 4096, 8192)])
    m, n, k = grid.T
    alone = bare_gemm(bare, m, n, k, dtype="fp8")
    rows = {"m": m, "n": n, "k": k, "batch": np.ones_like(m), "layout": "TN", "dtype": "fp8"}
    for source, cast in (("ai-dynamo/aiconfigurator:x", 9e-6 + 8.0 * m * k / 3e12), ("measured here", 0.0)):
        fit = LinearModel.fit(Table.from_columns("linear", {**rows, "seconds": alone + cast, "source": source}), device)
        off = fit.predict(m, n, k, dtype="fp8").seconds / alone
        assert np.median(np.abs(off - 1)) < 0.03, source
        assert (fit.parts["fp8"].physics.cast > 0) == (source != "measured here")
    assert len(fit.parts["fp8"].known) == len(grid)


def test_fp8_gradients_sum_in_full_precision_until_hopper() -> None:
    peaks = {"bf16": 1e15, "fp8": 2e15}
    for more, factor in (({}, 1.15), ({"mxfp8": 2e15}, 1.0)):
        device = Device("test", {**peaks, **more}, 80e9, 3e12, 132, 8, 4.5e11, 5e10)
        fit = LinearModel.fit(Table.from_columns("linear", {}), device)
        for dtype, slower in (("bf16", 1.0), ("fp8", factor)):
            forward, *gradients = (float(fit.predict(4096, 4096, 4096, layout=code, dtype=dtype).seconds) for code in range(3))
            assert gradients == pytest.approx([1.005 * slower * forward, 1.03 * slower * forward], rel=1e-12)


def test_quantised_gemms_of_bursts_get_the_median_of_other_laboratories() -> None:
    burst, own = ({"sustained": "bursts"}, {"sustained_scale": 1.0})
    table = linear_table(linear_rows("TN", 40, 1.0, size=8192), linear_rows("TN", 30, 1.34, "simumax:x", size=8192))
    labs = Laboratories(LinearModel.fit(table, DEVICE).lab_scale(Profile("new", DEVICE, {"linear": table})))
    assert quantised_derating_of(Profile("new", DEVICE, {"linear": table}, burst), labs) == OVER_LOOPS == (1.12, 0.08)
    assert quantised_derating_of(Profile("new", DEVICE, {"linear": table}, {**burst, **own}), labs) == (1.0, 0.0)


def attention_calls(heads: list[int], forward: list[float], backward: list[float], source: str) -> Table:
    """Return causal calls of 4,096 tokens that take so many microseconds forward and backward."""
    both = heads * 2
    return Table.from_columns(
        "flash_attn",
        {
            "batch": 1,
            "seq_q": 4096,
            "seq_kv": 4096,
            "heads": np.array(both),
            "kv_heads": np.array(both),
            "head_dim": 128,
            "causal": 1,
            "dtype": "bf16",
            "kernel": "te",
            "source": source,
            "seconds": np.array([*forward, *backward]) * 1e-6,
            "pass": np.array(["forward"] * len(heads) + ["backward"] * len(heads)),
        },
    )


def test_calls_that_wait_for_the_host_are_seen_where_work_does_not_count() -> None:
    # 4 to 16 heads take 90 to 100 us whatever the work: of these, and of up to twice their time, the device's own is unknown
    heads = [4, 8, 16, 32, 64, 128]
    calls = attention_calls(heads, [92, 98, 100, 170, 290, 560], [110, 116, 205, 390, 840, 1650], "simumax:x")
    assert waits_for_host(calls).tolist() == [True] * 4 + [False] * 8
    falling = attention_calls(heads, [20, 38, 75, 150, 290, 560], [60, 110, 205, 390, 840, 1650], "simumax:x")
    assert not waits_for_host(falling).any()


def test_the_backward_ratio_and_the_derating_are_of_calls_that_the_device_bounds() -> None:
    heads = [4, 8, 16, *range(64, 264, 8)]
    ours = FlashAttnModel.fit(Table.from_columns("flash_attn", {}), DEVICE)
    bare = ours.predict(1, 4096, 4096, np.array(heads), np.array(heads), 128, 128).seconds * 1e6
    host = 1e-3 + float(bare[3]) / 2.1
    forward = [max(1.1 * float(us), host) for us in bare]
    calls = attention_calls(heads, forward, [3.2 * 1.1 * float(us) for us in bare], "simumax:x")
    scales = ours.lab_scale(calls)
    assert scales == {"simumax:x": (pytest.approx(1.1, rel=1e-6), 25)}
    profile = Profile("test", DEVICE, {"flash_attn": calls})
    assert attention_derating_of(profile, Laboratories({"a": (1.3, 10)}, scales)) == pytest.approx(1.1)
    assert (
        attention_derating_of(profile, Laboratories({"a": (1.3, 10)}))
        == pytest.approx(1.3)
        == derating_of(profile, Laboratories({"a": (1.3, 10)}))
    )
    labs = Laboratories({"a b": (1.3, 10)}, scales)
    assert Laboratories.from_arrays(labs.to_arrays()) == labs


def test_gradients_of_a_laboratory_that_timed_no_forward_pass_say_nothing() -> None:
    # how much slower its machine is is not known: the prior stays
    fit = LinearModel.fit(linear_table(linear_rows("TN", 40, 1.0), linear_rows("NN", 30, 1.8, "simumax:x")), DEVICE)
    assert fit.parts["bf16"].layout_factor[1, 0] == 1.005 and fit.parts["bf16"].layout_uncertainty[1, 0] == 0.04


def test_quantised_gemms_of_a_profile_that_says_nothing_of_its_clocks_are_as_slow_as_its_other_ones() -> None:
    table = linear_table(linear_rows("TN", 40, 1.0, size=8192), linear_rows("TN", 30, 1.34, "simumax:x", size=8192))
    profile = Profile("new", DEVICE, {"linear": table})
    labs = Laboratories(LinearModel.fit(table, DEVICE).lab_scale(profile))
    assert derating_of(profile, labs) > 1.3
    assert quantised_derating_of(profile, labs) == (derating_of(profile, labs), 0.0)


def test_another_laboratory_loses_alike_in_gemms_of_any_duration(h100_model: CostModel) -> None:
    """H100's second laboratory over the first: at full clocks the same from 0.2 to 10 ms; over loops of each, which lose the
    more the longer they take, it falls by a twelfth."""
    table = find_profile("h100_sxm")[0].table("linear")
    rows = table.where(other_lab(table["source"]))
    sizes = [rows[name].astype(float) for name in ("m", "n", "k")]

    def ratios(full_clocks: bool) -> list[float]:
        model = replace(h100_model.kernels.linears, full_clocks=frozenset({"bf16"} if full_clocks else ()))
        ratio = rows["seconds"] / model.predict(*sizes, np.maximum(rows["batch"], 1)).seconds
        bins = zip((2e-4, 4e-4, 8e-4, 1.6e-3), (4e-4, 8e-4, 1.6e-3, 1e-2), strict=True)
        return [float(np.median(ratio[(rows["seconds"] >= low) & (rows["seconds"] < high)])) for low, high in bins]

    assert h100_model.kernels.linears.full_clocks == {"bf16", "fp8"} and h100_model.kernels.deratings.linear == pytest.approx(
        1.154, abs=2e-3
    )
    assert ratios(True) == pytest.approx([1.15] * 4, abs=0.02)
    looped = ratios(False)
    assert looped[0] == pytest.approx(1.11, abs=0.02) and looped[-1] == pytest.approx(1.05, abs=0.02)
