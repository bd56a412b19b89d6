"""Cost models of devices that were not measured: limits that must hold, and errors where measured devices are left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from references import bare_attention, bare_gemm

from predictor.accuracy.left_out_devices import device_scores
from predictor.cost_model import CostModel
from predictor.estimate import Basis, Estimate
from predictor.fitted import cost_model
from predictor.kernels.device_uncertainty import DEVICE_UNCERTAINTIES
from predictor.network.overlap import Contention, contention_on
from profiler.profile.derived import derived_profile
from profiler.profile.devices import DATASHEETS, KERNELS_FLASH, Datasheet
from profiler.profile.profiles import PROF_DATA, find_profile

ROOT = Path(__file__).resolve().parents[2]
SIDES = 2.0 ** np.arange(9, 14)


@pytest.fixture(scope="module")
def h100(fitted: Callable[[str], CostModel]) -> CostModel:
    return fitted("h100_sxm")


def on(sheet: Datasheet) -> CostModel:
    """Return the cost model of a device, derived from the H100's measurements."""
    return cost_model(derived_profile("chip", sheet, find_profile("h100_sxm")[0]), cache_dir=PROF_DATA / ".cache")


def estimates(model: CostModel) -> dict[str, Estimate]:
    """Return estimates of every kind of kernel, by its field of DeviceUncertainty."""
    return {
        "linear": model.kernels.linear(
            SIDES, 4100, 4100
        ),  # no measured shape: what was measured of the one is not of the other
        "quantised": model.kernels.linear(SIDES, 4100, 4100, dtype="fp8"),
        "attention": model.kernels.flash_attn(1, SIDES, SIDES, 32, 8, 128, 128),
        "memory_bound": model.kernels.memory_bound("norm", SIDES * 2**16),
        "collective": model.network.collective("all_gather", SIDES * 2**16, 8, 1),
    }


def test_a_device_derived_from_itself_is_itself_with_uncertainty(h100: CostModel) -> None:
    same, uncertainty = estimates(on(DATASHEETS["h100_sxm"])), DEVICE_UNCERTAINTIES["architecture"]
    for kind, before in estimates(h100).items():
        # the derating is that of the median of laboratories, which is the H100's to 0.2%
        np.testing.assert_allclose(same[kind].seconds, before.seconds, rtol=3e-3)
        np.testing.assert_allclose(same[kind].relative_std, np.hypot(before.relative_std, getattr(uncertainty, kind)))
        assert (same[kind].basis >= Basis.EXTRAPOLATED).all()


@pytest.mark.parametrize("stated", ["fp8", "mxfp8"])
def test_one_format_of_an_arithmetic_is_enough(stated: str) -> None:
    """A chip that states mxfp8 and no fp8 multiplies in 8 bits at that rate."""
    sheet = DATASHEETS["h100_sxm"]
    peaks = {"bf16": 1500e12, stated: 3000e12}
    model = on(replace(sheet, device=replace(sheet.device, peak_flops=peaks), architecture="own", power=1400))
    wide, narrow = (
        2 * 8192**3 / float(model.kernels.linear(8192, 8192, 8192, dtype=dtype).seconds) for dtype in ("bf16", stated)
    )
    assert 0.6 * 1500e12 < wide < 1500e12 and 0.5 * 3000e12 < narrow < 3000e12


def test_memory_bound_kernels_scale_with_the_memory_and_not_their_launch(h100: CostModel) -> None:
    sheet = DATASHEETS["h100_sxm"]
    twice = on(replace(sheet, device=replace(sheet.device, memory_bandwidth=2 * sheet.device.memory_bandwidth)))
    size = np.array([2.0**20, 2.0**30])
    before, after = h100.kernels.memory_bound("norm", size).seconds, twice.kernels.memory_bound("norm", size).seconds
    launch = h100.kernels.memory_bound("norm", 1.0).seconds
    # the multiprocessors, which are as many, reach 2^-0.16 of it
    np.testing.assert_allclose(after - launch, (before - launch) / 2 * 2**0.16, rtol=1e-5)


def test_links_scale_what_comes_on_top_of_the_latency(fitted: Callable[[str], CostModel]) -> None:
    # the A800's NVLink has two thirds of the A100's rate
    a100, a800 = fitted("a100_sxm_80gb"), fitted("a800_sxm")
    size, least = 2.0**28, float(np.exp(a100.network.collectives.node.curves.x.min()))

    def alone(model: CostModel, bytes_: float) -> float:
        return float(model.network.collectives.predict("all_gather", bytes_, 8, 1).seconds)

    latency = alone(a100, least)
    assert alone(a800, least) == pytest.approx(latency, rel=1e-6)
    assert alone(a800, size) - latency == pytest.approx(1.5 * (alone(a100, size) - latency), rel=0.02)


def test_power_slows_long_kernels_and_the_laboratory_stays_out(fitted: Callable[[str], CostModel]) -> None:
    # compute-bound GEMMs of the 500 W chip, with the same multiprocessors, take (395 / 595)^(-1/3) of the time; those bound by
    # memory, which is slower, do not feel the clock
    whole, capped = fitted("h100_sxm"), fitted("h100_96gb_500w")

    def ratio(m: int, n: int, k: int) -> float:
        return float(capped.kernels.linear(m, n, k).seconds / whole.kernels.linear(m, n, k).seconds)

    assert capped.kernels.deratings.linear == pytest.approx(whole.kernels.deratings.linear, rel=0.005)
    assert ratio(16384, 16384, 16384) == pytest.approx((395 / 595) ** (-1 / 3), rel=0.03)
    memory = whole.device.memory_bandwidth / capped.device.memory_bandwidth
    assert ratio(64, 8192, 8192) == pytest.approx(memory, rel=0.1)
    # what the B200's second laboratory adds is no property of the chip: not more than the median of laboratories
    assert fitted("b200_sxm").kernels.deratings.linear > 1.3 and fitted("gb200").kernels.deratings.linear == 1.154
    # a chip of a seventh of the rate at half the power is never at its limit: its large kernels reach 92% of its peak, without
    # what the H100's lose to power in training
    h20 = fitted("h20")
    large = float(h20.kernels.linear(16384, 16384, 16384).seconds / whole.kernels.linear(16384, 16384, 16384).seconds)
    held = 989.4 * whole.kernels.linears.parts["bf16"].physics.efficiency / whole.kernels.deratings.linear
    assert large == pytest.approx(held / (148 * 0.92), rel=0.03)


def test_what_a_laboratory_found_of_the_measured_device_is_kept_beside(
    fitted: Callable[[str], CostModel], h100: CostModel
) -> None:
    b200 = fitted("b200_sxm")
    same = cost_model(
        derived_profile("chip", DATASHEETS["b200_sxm"], find_profile("b200_sxm")[0]), cache_dir=PROF_DATA / ".cache"
    )
    assert same.kernels.deratings.measured_on == b200.kernels.deratings.linear > same.kernels.deratings.linear, (
        "a B200 derived from itself is faster than measured"
    )
    assert (
        on(DATASHEETS["h100_sxm"]).kernels.deratings.measured_on == h100.kernels.deratings.linear
        and h100.kernels.deratings.measured_on == 0.0
    )


def test_at_the_limit_of_power_the_peak_is_no_matter(h100: CostModel) -> None:
    """Chips with the H100's power and 1 / 1.12 to 4 times its peak sustain the same rate: kernels are as fast to the bit."""
    sheet = DATASHEETS["h100_sxm"]
    same = estimates(on(sheet))
    for times in (0.9, 0.94, 1.0, 1.07, 4.0):
        peaks = {name: times * peak for name, peak in sheet.device.peak_flops.items()}
        for kind, after in estimates(on(replace(sheet, device=replace(sheet.device, peak_flops=peaks)))).items():
            assert (after.seconds == same[kind].seconds).all(), (kind, times)


@settings(max_examples=10, deadline=None)
@given(
    figures=st.fixed_dictionaries({name: st.floats(0.4, 3) for name in ("peak", "power", "memory", "links")}),
    raised=st.sampled_from(["peak", "power", "memory", "links"]),
    by=st.floats(1, 4),
)
@example(figures={"peak": 0.78125, "power": 1.0, "memory": 1.0, "links": 1.0}, raised="peak", by=2.0)  # fp8 throttled by bf16's
def test_a_better_figure_makes_no_kernel_slower(figures: dict[str, float], raised: str, by: float) -> None:
    """Of the physical models, to rounding; the learnt corrections read the regime that results (see the test below)."""
    before, after = (_physical(on(_scaled(**found))) for found in (figures, {**figures, raised: figures[raised] * by}))
    for kind, seconds in before.items():
        assert (after[kind] <= seconds * (1 + 1e-12)).all(), kind


def _scaled(peak: float, power: float, memory: float, links: float) -> Datasheet:
    """Return an H100 with some of its figures scaled."""
    sheet = DATASHEETS["h100_sxm"]
    own = sheet.device
    device = replace(
        own,
        peak_flops={name: peak * rate for name, rate in own.peak_flops.items()},
        memory_bandwidth=memory * own.memory_bandwidth,
        link_bandwidth=links * own.link_bandwidth,
    )
    return replace(sheet, device=device, power=power * sheet.power)


def _physical(model: CostModel) -> dict[str, np.ndarray]:
    """Return the times of kernels without the learnt corrections of GEMMs and attention."""
    gemms = {dtype: bare_gemm(model.kernels.linears, SIDES, 4096, 4096, dtype=dtype) for dtype in ("bf16", "fp8", "tf32")}
    return gemms | {
        "attention": bare_attention(model.kernels.attention, 1, SIDES, SIDES, 32, 8, 128, 128, True),
        "memory_bound": model.kernels.memory_bound("norm", SIDES * 2**16).seconds,
        "collective": model.network.collective("all_gather", SIDES * 2**16, 8, 1).seconds,
        "derating": np.array([model.kernels.deratings.linear, model.kernels.deratings.quantised.factor]),
    }


@pytest.mark.parametrize("formats", [("bf16", "fp16"), ("fp8",), ("bf16", "fp16", "fp8", "tf32", "fp32")])
@pytest.mark.parametrize("times", [1.1, 2, 4])
def test_a_higher_peak_at_the_same_power_is_never_slower(h100: CostModel, times: float, formats: tuple[str, ...]) -> None:
    sheet = DATASHEETS["h100_sxm"]
    peaks = {name: (times if name in formats else 1) * peak for name, peak in sheet.device.peak_flops.items()}
    same = on(sheet)
    for kind, before in estimates(same).items():
        after = estimates(on(replace(sheet, device=replace(sheet.device, peak_flops=peaks))))[kind]
        assert (after.seconds <= before.seconds * 1.001).all(), kind


def test_kernels_of_another_architecture_are_rescaled_beside_one_device_of_the_chips_own() -> None:
    """From kernels of the B200 a Hopper's power counts beside the H100 whatever its peak: a higher one is never slower."""
    b200, sheet = find_profile("b200_sxm")[0], DATASHEETS["h100_sxm"]

    def derived(peak: float) -> tuple[str, float]:
        flops = {"bf16": peak, "fp8": 2 * peak}
        chip = replace(sheet, power=650, device=replace(sheet.device, peak_flops=flops))
        derivation = derived_profile("chip", chip, b200).derivation
        assert derivation is not None
        return derivation.power_beside, peak / max(derivation.power_slowdown["bf16"], 1.0)

    found = [derived(tera * 1e12) for tera in (700, 760, 790, 800, 840, 900, 990, 1100)]
    assert {beside for beside, _ in found} == {"h100_sxm"}
    assert all(slower <= faster * (1 + 1e-12) for (_, slower), (_, faster) in pairwise(found))


def test_a_machine_that_was_measured_here_is_its_device_whatever_its_profile_is_called() -> None:
    own = replace(find_profile("h100_sxm")[0], name="this machine")
    here, shipped = (
        derived_profile("chip", DATASHEETS["h100_96gb_500w"], kernels).derivation
        for kernels in (own, find_profile("h100_sxm")[0])
    )
    assert here is not None and shipped is not None and here.similarity == "architecture"
    assert (here.power_beside, here.power_slowdown) == (shipped.power_beside, shipped.power_slowdown)
    other = replace(own, name="h100_sxm", device=replace(own.device, name="NVIDIA GeForce RTX 4090"))
    stranger = derived_profile("chip", DATASHEETS["h100_96gb_500w"], other).derivation
    assert stranger is not None and stranger.similarity == "vendor"


def test_no_newer_attention_than_the_kernels_were_measured_with() -> None:
    sheet, h100 = DATASHEETS["h100_sxm"], find_profile("h100_sxm")[0]
    stated = {KERNELS_FLASH: 3, 2: 2, 3: 3, 4: 3}  # none, or what is stated; and what it is then
    for version, found in stated.items():
        named = replace(sheet, device=replace(sheet.device, flash_version=version))
        assert derived_profile("chip", named, h100).device.flash_version == found


def test_an_older_attention_takes_longer_on_a_chip_of_the_same_architecture() -> None:
    sheet, call = DATASHEETS["h100_sxm"], (1, 4096, 4096, 32, 8, 128, 128)

    def attention(version: int, architecture: str = "hopper") -> float:
        chip = replace(sheet, architecture=architecture, device=replace(sheet.device, flash_version=version))
        return float(on(chip).with_flash_version(0).kernels.flash_attn(*call).seconds)

    assert attention(2) == pytest.approx(1.82 * attention(3), rel=1e-9)  # the kernels were measured with the third
    assert attention(KERNELS_FLASH) == attention(4) == attention(3)
    assert attention(2, "another") == attention(3, "another"), "its newest is taken to suit it as well"


def test_links_of_another_kind_are_less_certain() -> None:
    sheet, certain = DATASHEETS["h100_sxm"], DEVICE_UNCERTAINTIES
    for kind, like in (("NVLink 5, NVSwitch", "architecture"), ("", "architecture"), ("PCIe 5.0 x16", "")):
        found = on(replace(sheet, device=replace(sheet.device, link_kind=kind))).corrections.uncertainty
        assert found is not None and found == replace(certain["architecture"], collective=certain[like].collective)


def test_exponentials_speed_up_forward_attention_alone(h100: CostModel) -> None:
    sheet = DATASHEETS["h100_sxm"]
    same, twice = on(sheet), on(replace(sheet, device=replace(sheet.device, exponentials=32.0)))
    short, long, wide = (
        (1, 16384, 16384, 32, 8, 64, 64),
        (1, 16384, 16384, 32, 8, 128, 128),
        (1, 16384, 16384, 32, 8, 256, 256),
    )
    ratios = [
        float(same.kernels.flash_attn(*shape).seconds / twice.kernels.flash_attn(*shape).seconds)
        for shape in (short, long, wide)
    ]
    # 81 columns of softmax become 41: (2 d + 81) / (2 d + 41), but for what the learnt correction reads in the new regime
    assert ratios == pytest.approx([209 / 169, 337 / 297, 593 / 553], rel=0.06)
    for shape in (short, long, wide):
        backward = [model.kernels.flash_attn(*shape, True, True).seconds for model in (same, twice)]
        assert backward[0] == backward[1]
    assert all((twice.kernels.linear(SIDES, 4100, 4100).seconds == same.kernels.linear(SIDES, 4100, 4100).seconds).tolist())


def test_better_datasheets_are_never_slower(h100: CostModel) -> None:
    sheet = DATASHEETS["h100_sxm"]
    device = sheet.device
    for better in (
        replace(device, memory_bandwidth=1.5 * device.memory_bandwidth),
        replace(device, peak_flops={name: 1.5 * peak for name, peak in device.peak_flops.items()}),
        replace(device, link_bandwidth=1.5 * device.link_bandwidth),
    ):
        derived = on(replace(sheet, device=better, power=sheet.power * 1.5**3))
        for kind, before in estimates(h100).items():
            # the learnt correction reads the regime that results, which may cost a little
            assert (estimates(derived)[kind].seconds <= before.seconds * 1.05).all(), kind


def test_measured_devices_that_are_left_out() -> None:
    """The table of docs/fits.md: MAPE, coverage, and the error after ten measurements of the device."""
    names = {"H100": "h100_sxm", "A100": "a100_sxm_80gb"}
    profiles = {name: find_profile(name)[0] for name in names.values()}
    scores = {(s.regime, s.op, s.split): s for s in device_scores(profiles, PROF_DATA / ".cache")}
    page = (ROOT / "docs" / "fits.md").read_text(encoding="utf-8").split("## Devices that were not measured")[1]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if " from H" in line or " from A" in line
    ]
    seen = 0
    for title, op, count, mape, _bias, coverage, _one_ratio, after in rows:
        target, base = (names.get(word) for word in title.split(" from "))
        if target and base:
            before = scores[f"{target} from {base}", op, "nothing of its own"]
            assert before.rows == int(count.replace(",", ""))
            assert before.mape == pytest.approx(float(mape.rstrip("%")) / 100, abs=0.003)
            assert before.coverage == pytest.approx(float(coverage.rstrip("%")) / 100, abs=0.02)
            later = scores[f"{target} from {base}", op, "10 points of its own"]
            assert later.mape == pytest.approx(float(after.rstrip("%")) / 100, abs=0.003)
            seen += 1
    assert seen == 8
    assert scores["a100_sxm_80gb from h100_sxm", "linear", "nothing of its own"].mape < 0.1


def test_a_collective_takes_as_many_multiprocessors_of_a_smaller_device(fitted: Callable[[str], CostModel]) -> None:
    h100 = fitted("h100_sxm").device
    for name in ("h20", "h100_pcie"):  # as much of each, as measured on H100
        scale = 132 / fitted(name).device.num_sms
        assert fitted(name).network.contention == pytest.approx((0.15 * scale, 0.125 * scale)), name
    for name in ("mi300x", "gb300"):  # NCCL's 24
        assert fitted(name).network.contention == pytest.approx((24 / fitted(name).device.num_sms, 0.0)), name
    assert contention_on(replace(h100, num_sms=10), h100, Contention(24 / 132), True).inside == 1.0  # all that there are
