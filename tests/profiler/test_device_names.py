"""Devices are found by the names that people write, and no name means two."""

from __future__ import annotations

import pytest

from profiler.errors import InputError
from profiler.profile.devices import DATASHEETS, datasheet_of, device_named
from profiler.profile.profiles import find_profile


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("H100 PCIe", "h100_pcie"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("A100-SXM4-40GB", "a100_sxm_40gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("GB300 NVL72", "gb300"),
        ("b300_sxm", "b300"),
        ("h20_96gb", "h20"),
        ("NVIDIA GB200 (NVL72)", "gb200"),
        ("gh200", "gh200_96gb"),
        ("h100_sxm", "h100_sxm"),
        ("rtx4090", "rtx4090"),
        ("HGX B200", "b200_sxm"),
        ("DGX H100", "h100_sxm"),
        ("H100 SXM5", "h100_sxm"),
        ("A100-80G", "a100_sxm_80gb"),
        ("MI300X OAM", "mi300x"),
    ],
)
def test_spellings(written: str, meant: str) -> None:
    assert device_named(written) == meant


def test_no_name_means_two_devices() -> None:
    for name, sheet in DATASHEETS.items():
        assert {device_named(word) for word in (*sheet.aliases, sheet.device.name, name)} == {name}


def test_a_profile_is_found_by_such_a_name() -> None:
    assert find_profile("B300 SXM")[0].name == "b300"
    with pytest.raises(InputError, match="no profile is called 'H300'"):
        find_profile("H300")


def test_aliases_are_names() -> None:
    plain = {
        "name": "X",
        "architecture": "hopper",
        "source": "x",
        "peak_tflops": {"bf16": 900},
        "memory_gib": 80,
        "memory_bandwidth_gb_s": 3000,
        "num_sms": 100,
        "gpus_per_node": 8,
        "link_gb_s": 400,
        "network_gbit": 400,
        "power_watts": 700,
    }
    assert datasheet_of({**plain, "aliases": ["Y 1"]}).aliases == ("Y 1",)
    with pytest.raises(InputError, match="aliases is 'Y'; it must be a list of names"):
        datasheet_of({**plain, "aliases": "Y"})
