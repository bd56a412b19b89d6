"""Device files: figures that contradict each other are refused; what power leaves of a chip's peak, by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predictor.kernels.dtypes import FAMILIES
from profiler.errors import InputError
from profiler.profile import devices
from profiler.profile.derived import derived_profile, power_reference, power_slowdown
from profiler.profile.devices import DATASHEETS, DEVICES, FOLDER, datasheet_of, read_datasheet
from profiler.profile.profiles import _grown_alone, as_device, derived_profiles, find_profile, profile_of, shipped_profiles
from solver.spec.bounds import NUMBERS

H100: dict[str, Any] = {**json.loads((FOLDER / "h100_sxm.json").read_text()), "source": "a datasheet"}


def test_every_device_is_measured_or_derived_from_a_measured_one() -> None:
    measured = set(shipped_profiles())
    assert measured == {name for name, sheet in DATASHEETS.items() if not sheet.derived_from}
    assert set(derived_profiles()) == set(DATASHEETS) - measured and len(derived_profiles()) == 19
    assert {sheet.derived_from for sheet in DATASHEETS.values()} - {""} <= measured
    assert {sheet.links_from for sheet in DATASHEETS.values()} - {""} <= measured


def test_every_figure_has_a_source() -> None:
    for name, sheet in DATASHEETS.items():
        stated = json.loads((FOLDER / f"{name}.json").read_text())
        words = {"name", "architecture", "source", "aliases", "link_kind", "derived_from", "links_from", "kernel_scale_of"}
        assert set(sheet.sources) == set(stated) - words and all(sheet.sources.values())
    # one text stands for all figures
    plain = datasheet_of({**H100, "source": "my datasheet"})
    assert set(plain.sources.values()) == {"my datasheet"} and plain.sources.keys() == DATASHEETS["h100_sxm"].sources.keys()


def test_exponentials_per_clock() -> None:
    assert datasheet_of({**H100, "exponentials_per_clock": 24}).device.exponentials == 24.0
    assert {name for name, device in DEVICES.items() if device.exponentials == 32} == {"b300", "gb300"}
    assert {device.exponentials for device in DEVICES.values()} == {16.0, 32.0}


@pytest.mark.parametrize("name", shipped_profiles())
def test_a_profile_holds_its_datasheet(name: str) -> None:
    assert find_profile(name)[0].device == DEVICES[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sms": None}, "num_sms is missing"),
        ({"source": ""}, "source is ''; it must be a text that is not empty"),
        ({"source": {"a datasheet": "num_sms"}}, "source 'a datasheet' is 'num_sms'; it must be a list of the keys"),
        (
            {"source": {"a datasheet": ["num_sm"]}},
            r"source names 'num_sm', which is no figure of this file \(did you mean 'num_sms'",
        ),
        ({"source": {"a": ["num_sms"], "b": ["num_sms"]}}, "source names 'num_sms', which has two; each figure has one source"),
        ({"source": {"a": ["num_sms"]}}, "source leaves out memory_gib; each figure has one source"),
        ({"sms": 132}, "unknown key 'sms'"),
        ({"peak_tflops": {"bf16": 989, "fp8": 500}}, "peak_tflops of fp8 is below that of bf16"),
        ({"power_watts": 5}, "at power_watts 5 are 198 TFLOP a joule, where chips do 0.037 to 22"),
        ({"peak_tflops": {"bf16": 989, "tf32": 1200}}, "peak_tflops of bf16 is below that of tf32"),
        ({"peak_tflops": {"fp16": 50, "fp32": 67}}, "peak_tflops of fp16 is below that of fp32"),
        ({"peak_tflops": {"fp8": 500}}, "neither bf16 nor fp16"),
        ({"peak_tflops": 989}, "it must be an object"),
        ({"peak_tflops": {"bf16": 989e12}}, "peak_tflops of bf16 is 989000000000000.0; it must be"),
        ({"memory_bandwidth_gb_s": 3.35}, "one of them is in another unit"),
        ({"link_gb_s": 4500}, "link_gb_s is above memory_bandwidth_gb_s"),
        ({"nvlink_domain": 20}, "nvlink_domain 20 is no multiple of gpus_per_node 8"),
        ({"num_sms": 1.5}, "num_sms is 1.5; it must be a whole number from 1"),
        ({"power_watts": -700}, "power_watts is -700; it must be a positive number between 1 and 100000"),
        ({"power_watts": 1e9}, r"power_watts is 1000000000.0; it must be a positive number between 1 and 100000"),
        ({"memory_gib": 1e30}, r"memory_gib is 1e\+30; it must be a positive number between 0.001 and 8192"),
        ({"link_gb_s": 1e-5}, "link_gb_s is 1e-05; it must be a positive number between 0.001 and 100000"),
        ({"network_gbit": 1e7}, r"network_gbit is 10000000.0; it must be a positive number between 0.001 and 1e\+06"),
        ({"num_sms": 1 << 17}, "num_sms is 131072; it must be a whole number from 1 to 65536"),
        ({"kernel_scale": {"fp4": 1.0}}, "kernel_scale is"),
        ({"kernel_scale": {"bf16": 0.1}}, "kernel_scale of bf16 is 0.1; it must be a positive number between 0.5 and 5"),
        ({"kernel_scale": {"fp8": 50}}, "kernel_scale of fp8 is 50; it must be a positive number between 0.5 and 5"),
        (
            {"num_sms": 2},
            "peak_tflops of 989.4 in 16 bits on num_sms 2 are 495 TFLOP/s a multiprocessor, where chips do 0.156",
        ),
        ({"num_sms": 13200}, "on num_sms 13200 are 0.075 TFLOP/s a multiprocessor"),
        ({"peak_tflops": {"bf16": 989.4, "fp16": 1200}}, "peak_tflops of bf16 is 989.4 and of fp16 1200; rates in 16 bits are"),
        (
            {"peak_tflops": {"bf16": 989.4, "fp7": 1200}},
            r"peak_tflops states 'fp7' \(did you mean 'fp.*'\?\); formats are fp8",
        ),
        (
            {"derived_from": "h100"},
            r"derived_from is 'h100' \(did you mean 'h100_sxm'\?\); it must name a measured device: a100_",
        ),
        ({"derived_from": "gb200"}, "derived_from is 'gb200'.*it must name a measured device: a100_"),
        ({"links_from": "nowhere"}, "links_from is 'nowhere'; it must name a measured device: a100_"),
        ({"links_from": 7}, "links_from is 7; it must be a text that is not empty"),
        ({"name": ""}, "name is ''; it must be a text that is not empty"),
        ({"name": "  "}, "name is '  '; it must be a text"),
        ({"architecture": 9}, "architecture is 9; it must be a text"),
        ({"exponentials_per_clock": 0}, "exponentials_per_clock is 0; it must be a positive number between 1 and 1024"),
        ({"flash_version": 99}, "flash_version is 99; it must be a whole number from 0 to 4"),
        ({"network_gbit": 900000}, "network_gbit is more than link_gb_s; it is what one GPU sends to other nodes, in Gbit/s"),
    ],
)
def test_impossible_devices(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    content = {key: value for key, value in {**H100, **changes}.items() if value is not None}
    path = tmp_path / "chip.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message) as caught:
        read_datasheet(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_files_that_are_no_device(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "half.json").write_text('{"name":')
    for name, message in (
        ("list", "a JSON configuration is an object"),
        ("half", "line 1: not valid JSON"),
        ("none", "no such file; it should be a device file, JSON with name, architecture"),
    ):
        with pytest.raises(InputError, match=message):
            read_datasheet(tmp_path / f"{name}.json")


def test_clocks_under_a_limit_of_power_by_hand() -> None:
    # 15% of 700 W whatever the clock: 395 of 595 W are left at 500 W, and the clock goes with the cube root
    base = DATASHEETS["h100_sxm"]
    assert set(power_slowdown(base, base).values()) == {1.0}
    capped = power_slowdown(base, DATASHEETS["h100_96gb_500w"])
    assert capped == pytest.approx(dict.fromkeys(capped, (395 / 595) ** (-1 / 3)))
    # bf16 of twice the peak runs no faster, and the others as before; one that is new as bf16 does; one that grows alone gains
    peaks = {**H100["peak_tflops"], "bf16": 2 * 989.4, "nvfp4": 1e4}
    peaks["fp16"] = peaks["bf16"]
    doubled = power_slowdown(base, datasheet_of({**H100, "peak_tflops": peaks}))
    assert doubled == pytest.approx({**dict.fromkeys(peaks, 1.0), "bf16": 2.0, "fp16": 2.0, "nvfp4": 2.0})
    assert set(power_slowdown(base, datasheet_of({**H100, "peak_tflops": {**H100["peak_tflops"], "fp8": 4000}})).values()) == {
        1.0
    }
    # half the peak of 16 bits alone makes these slower, and no other format faster
    halved = power_slowdown(base, datasheet_of({**H100, "peak_tflops": {**H100["peak_tflops"], "bf16": 494.7, "fp16": 494.7}}))
    assert halved == pytest.approx({**dict.fromkeys(H100["peak_tflops"], 1.0), "bf16": 0.5, "fp16": 0.5})
    # twice the units at twice the power and peak run at the same clock
    twice = datasheet_of(
        {**H100, "num_sms": 264, "power_watts": 1400, "peak_tflops": {"bf16": 2 * 989.4}, "memory_bandwidth_gb_s": 6700}
    )
    assert power_slowdown(base, twice) == pytest.approx({"bf16": 1.0})
    with pytest.raises(InputError, match="power_watts 100 is less than the 105 W that num_sms 132 multiprocessors"):
        power_slowdown(base, replace(base, power=100.0))


def device_file(path: Path, **changes: Any) -> str:
    path.write_text(json.dumps({**H100, **changes}))
    return str(path)


def test_power_counts_beside_the_nearest_device_of_the_architecture(tmp_path: Path) -> None:
    """An MI300X at 375 W from kernels of H100: 637.5 W beside 262.5 W are left above an idle of 112.5 W."""
    base, mi300x = find_profile("h100_sxm")[0], json.loads((FOLDER / "mi300x.json").read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**mi300x, "power_watts": 375}))
    profile, said = as_device(base, str(path))
    assert profile.derivation is not None and profile.derivation.power_slowdown["bf16"] == pytest.approx(
        (637.5 / 262.5) ** (1 / 3)
    )
    assert "16-bit compute time at its power limit over that of its peak, beside mi300x x 1.34)" in said
    other, said = as_device(base, device_file(path, architecture="zeta", power_watts=70))
    assert other.derivation is not None and set(other.derivation.power_slowdown.values()) == {1.0}
    assert said.endswith("; its power limit is not used: no other device of its architecture is known")
    assert "power" not in as_device(base, "mi300x")[1]
    # GEMMs of the same chip were timed at 750 W: 887.5 W instead of 637.5 are left above its idle power
    profile, said = as_device(base, "mi325x")
    assert profile.derivation is not None and "beside mi300x x 0.90" in said
    assert profile.derivation.power_slowdown["bf16"] == pytest.approx((637.5 / 887.5) ** (1 / 3))
    for changes, message in (
        ({"kernel_scale_of": "mi300x"}, "kernel_scale_of changes nothing without kernel_scale"),
        ({"kernel_scale": {"bf16": 1.2}, "kernel_scale_of": "mi30x"}, "kernel_scale_of is 'mi30x' (did you mean 'mi300x'?)"),
    ):
        with pytest.raises(InputError, match=re.escape(message)):
            read_datasheet(Path(device_file(path, **changes)))


def test_links_that_are_stated_both_ways_are_named(tmp_path: Path) -> None:
    beside = find_profile("h100_sxm")[0]
    for gb_s, asked in ((900, True), (450, False), (1800, False)):
        _, said = as_device(beside, device_file(tmp_path / "mine.json", link_gb_s=gb_s))
        assert ("its link_gb_s is twice that of NVIDIA" in said and said.endswith(": is it one direction's?")) is asked


@pytest.mark.parametrize(("narrow", "times"), [("fp8", 16), ("fp8", 4.6), ("mxfp8", 5), ("nvfp4", 16)])
def test_narrow_formats_are_not_many_times_as_fast(narrow: str, times: float, tmp_path: Path) -> None:
    peaks = {"bf16": 989.0, "fp8": 1978.0, narrow: times * 989.0}
    with pytest.raises(
        InputError, match=rf"peak_tflops of {narrow} is {times:g} times that in 16 bits, where chips do at most"
    ):
        read_datasheet(Path(device_file(tmp_path / "mine.json", peak_tflops=peaks)))


def test_a_peak_that_is_stated_with_sparsity_is_named(tmp_path: Path) -> None:
    peaks = {dtype: 2 * peak for dtype, peak in H100["peak_tflops"].items()}
    _, said = as_device(find_profile("h100_sxm")[0], device_file(tmp_path / "mine.json", peak_tflops=peaks))
    assert said.endswith("; its 16-bit peak is 2.0 times the highest of its architecture: is it without sparsity?")
    b200 = json.loads((FOLDER / "b200_sxm.json").read_text())  # whose highest is GB200's, a ninth higher
    b200 = {**{key: value for key, value in b200.items() if key != "aliases"}, "source": "a datasheet"}
    b200["peak_tflops"] = {dtype: 2 * peak for dtype, peak in b200["peak_tflops"].items() if dtype != "fp32"}
    (tmp_path / "b200.json").write_text(json.dumps(b200))
    assert "is 1.8 times the highest of its architecture: is it" in as_device(None, str(tmp_path / "b200.json"))[1]


def test_a_chip_takes_the_kernels_of_its_architecture(tmp_path: Path) -> None:
    """B200's figures under another name; kernels of an own Hopper are the H100's, of an Ampere those of its kind of link."""
    b200 = json.loads((FOLDER / "b200_sxm.json").read_text())
    (tmp_path / "mine.json").write_text(json.dumps({key: value for key, value in b200.items() if key != "aliases"}))
    for path, measured in (
        (str(tmp_path / "mine.json"), "b200_sxm"),
        (device_file(tmp_path / "hopper.json", memory_bandwidth_gb_s=4500), "h100_sxm"),
        (device_file(tmp_path / "ampere.json", architecture="ampere", memory_bandwidth_gb_s=1800), "a100_sxm_80gb"),
        (device_file(tmp_path / "slot.json", architecture="ampere", link_kind="PCIe 4.0"), "a100_pcie_80gb"),
        (device_file(tmp_path / "zeta.json", architecture="zeta"), "h100_sxm"),
    ):
        derivation = as_device(None, path)[0].derivation
        assert derivation is not None and derivation.kernels.name == measured


def test_more_power_never_makes_a_chip_slower() -> None:
    # MI300X and MI325X state one peak, at 750 and at 1,000 W: between these more power is no gain
    sheet = DATASHEETS["mi300x"]
    beside = {watts: power_reference(replace(sheet, power=watts)) for watts in (500, 750, 870, 1000, 1500)}
    assert beside == {
        500: ("mi300x", 500),
        750: ("mi300x", 750),
        870: ("mi300x", 750),
        1000: ("mi325x", 1000),
        1500: ("mi325x", 1500),
    }
    seconds = [power_slowdown(DATASHEETS[name], replace(sheet, power=power))["bf16"] for name, power in beside.values()]
    assert seconds == sorted(seconds, reverse=True) and seconds[1:4] == [1, 1, 1]


def test_derived_profiles_say_so_and_keep_what_was_not_measured_on_them_out() -> None:
    profile, said = find_profile("gb200")
    # 2,500 over 2,250 TFLOP/s; (1,200 - 150) / (1,000 - 150) W to the third root is 1.073, of which the peak has 1.11
    assert said == (
        "profile: gb200, derived: nothing was measured on it; kernels of b200_sxm, of the same generation, rescaled by the "
        "datasheets (16-bit peak x 1.11, memory x 1.00, links x 1.00, 16-bit compute time at its power limit "
        "over that of its peak x 1.02); "
        "long kernels in 16 bits run at its power limit, where a higher peak makes none faster"
    )
    assert "power limit, where" not in find_profile("gb300")[1] + find_profile("mi300x")[1]  # at their peaks; not known
    assert profile.derivation is not None and profile.derivation.similarity == "architecture" and not profile.tables
    assert profile.device.nvlink_domain == 72 and profile.device.gpus_per_node == 4
    similarities = {name: find_profile(name)[0].derivation for name in ("h100_pcie", "mi300x")}
    assert [d.similarity for d in similarities.values() if d] == ["architecture", ""]
    pcie = similarities["h100_pcie"]
    assert pcie is not None and (pcie.kernels.name, pcie.links.name) == ("h100_sxm", "a100_pcie_80gb")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_sms": 264}, "2.00 times the multiprocessors at 1.00 times the peak clock lower, which draws less power"),
        ({"fp8": 2}, "units of narrower formats whose peak grew alone draw as much less power: fp8 2.00 times"),
        ({}, ""),
    ],
)
def test_what_has_grown_alone_is_said(changes: dict[str, int], words: str) -> None:
    base = DATASHEETS["h100_sxm"].device
    peaks = {dtype: peak * changes.get(dtype, 1) for dtype, peak in base.peak_flops.items()}
    said = _grown_alone(replace(base, peak_flops=peaks, num_sms=changes.get("num_sms", base.num_sms)), base)
    assert said == (f"; {words}" if words else "")


def test_rubins_announced_figures_are_a_chips() -> None:
    """1,260 PFLOP/s of fp8 in 72 chips beside 4 PFLOP/s in 16 bits: 4.4 times."""
    sheet = {
        "name": "Rubin",
        "architecture": "rubin",
        "peak_tflops": {"bf16": 4000, "fp8": 17500},
        "memory_gib": 268,
        "memory_bandwidth_gb_s": 22000,
        "num_sms": 224,
        "gpus_per_node": 4,
        "nvlink_domain": 72,
        "link_gb_s": 1800,
        "network_gbit": 800,
        "power_watts": 1800,
        "source": "announced",
    }
    assert datasheet_of(sheet).device.peak_flops["fp8"] == 17.5e15
    with pytest.raises(InputError, match="peak_tflops of fp8 is 5 times that in 16 bits"):
        datasheet_of({**sheet, "peak_tflops": {"bf16": 4000, "fp8": 20000}})


def test_shipped_devices_bound_what_a_multiprocessor_does() -> None:
    each = [sheet.device.half_peak / 1e12 / sheet.device.num_sms for sheet in DATASHEETS.values()]
    assert pytest.approx((min(each) / 10, max(each) * 10), rel=0.01) == devices._PER_UNIT
    for stated in (devices._NARROWER.keys() | {"fp32"}, *(sheet.device.peak_flops.keys() for sheet in DATASHEETS.values())):
        assert stated <= FAMILIES.keys()  # predicted in
    assert {key: bounds for key, bounds in NUMBERS.items() if key in devices._BOUNDS} == {
        key: bounds for key, bounds in devices._BOUNDS.items() if key in NUMBERS
    }


def test_what_contradicts_the_kernels_names_the_file(tmp_path: Path) -> None:
    """The H100's best GEMM of bf16 reaches 84.6% of its peak, and 132 multiprocessors take 105 W."""
    h100, path = find_profile("h100_sxm")[0], tmp_path / "chip.json"
    for changes, message in (
        (
            {"kernel_scale": {"bf16": 0.8}},
            "kernel_scale of bf16 is 0.8: GEMMs of h100_sxm reach 85% of its peak, so that with "
            "less than 0.85 they would exceed this one's",
        ),
        ({"power_watts": 100}, "power_watts 100 is less than the 105 W that num_sms 132 multiprocessors take when idle"),
    ):
        path.write_text(json.dumps({**H100, "name": "My chip", **changes}))
        with pytest.raises(InputError) as caught:
            as_device(h100, str(path))
        assert str(caught.value) == f"{path}: {message}"
    path.write_text(json.dumps({**H100, "kernel_scale": {"bf16": 0.85}}))
    assert as_device(h100, str(path))[0].derivation


def test_a_measured_device_without_a_name_has_no_vendor() -> None:
    h100 = find_profile("h100_sxm")[0]
    nameless = replace(h100, name="data", device=replace(h100.device, name=" "))
    derivation = derived_profile("chip", DATASHEETS["h200_sxm"], nameless).derivation
    assert derivation is not None and derivation.similarity == ""


def test_a_profile_as_another_device(tmp_path: Path) -> None:
    h100 = find_profile("h100_sxm")[0]
    path = tmp_path / "chip.json"
    path.write_text(json.dumps({**H100, "name": "My chip", "architecture": "mine"}))
    for name, similarity in (("b200_sxm", "vendor"), (str(path), ""), ("h200_sxm", "architecture")):
        derivation = as_device(h100, name)[0].derivation
        assert derivation is not None and derivation.similarity == similarity
    with pytest.raises(InputError, match="no device is called 'h300'"):
        as_device(h100, "h300")
    with pytest.raises(InputError, match="itself derived"):
        as_device(find_profile("gb200")[0], "h100_sxm")


def test_a_device_file_names_its_kernels_and_its_links(tmp_path: Path) -> None:
    path = tmp_path / "chip.json"
    path.write_text(json.dumps({**H100, "derived_from": "h200_sxm", "links_from": "a100_pcie_80gb", "aliases": []}))
    for name, kernels in ((None, "h200_sxm"), ("b200_sxm", "b200_sxm")):
        profile, said = profile_of(name, None, str(path))
        assert profile.derivation is not None
        assert (profile.derivation.kernels.name, profile.derivation.links.name) == (kernels, "a100_pcie_80gb")
        assert f"kernels of {kernels}" in said and "collectives inside a node of a100_pcie_80gb" in said
    path.write_text(json.dumps({**H100, "aliases": []}))
    profile = profile_of(None, None, str(path))[0]
    assert profile.derivation is not None and profile.derivation.kernels.name == "h100_sxm"
    assert profile_of(None, None, "gb300")[0].digest == find_profile("gb300")[0].digest


def test_generations_are_spelt_as_people_spell_them(tmp_path: Path) -> None:
    for word in ("Hopper", " HOPPER "):
        assert read_datasheet(Path(device_file(tmp_path / "chip.json", architecture=word))).architecture == "hopper"


def test_two_datasheets_never_share_a_digest() -> None:
    h100, sheet = find_profile("h100_sxm")[0], DATASHEETS["h200_sxm"]
    faster = replace(sheet, device=replace(sheet.device, memory_bandwidth=5e12))
    assert derived_profile("x", sheet, h100).digest != derived_profile("x", faster, h100).digest


def test_a_file_of_a_measured_device_names_its_profile() -> None:
    said = {name: as_device(None, f"configs/devices/{name}.json")[1] for name in ("b200_sxm", "gb200")}
    assert said["b200_sxm"].endswith("what was measured on it is --profile b200_sxm, with its own sustained clocks")
    assert "--profile" not in said["gb200"]
