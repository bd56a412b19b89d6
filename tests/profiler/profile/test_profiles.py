"""Which profile a prediction uses: the same before and after something was measured, unless the user's own is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from profiler.errors import InputError
from profiler.profile.profiles import PROF_DATA, find_profile, shipped_profiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("h100_sxm", "a100_pcie_80gb"):
        shutil.copy(PROF_DATA / f"{name}.pt", tmp_path)
    return tmp_path


def test_measuring_does_not_change_the_default(folder: Path) -> None:
    before, told = find_profile(folder=folder)
    assert (before.name, told) == ("h100_sxm", "profile: h100_sxm (shipped default)")
    shutil.copy(folder / "a100_pcie_80gb.pt", folder / "data.pt")
    after, told = find_profile(folder=folder)
    assert after.digest == before.digest and shipped_profiles(folder) == ["a100_pcie_80gb", "h100_sxm"]
    assert told == "profile: h100_sxm (shipped default); your own measurements exist: --profile data"
    own, told = find_profile("data", folder=folder)
    assert own.device.name == "NVIDIA A100 PCIe 80GB" and told == f"profile: {folder / 'data.pt'}, measured on this machine"
    assert find_profile("h100_sxm", folder=folder)[1] == "profile: h100_sxm (shipped)"


@pytest.mark.parametrize(
    ("name", "message"), [("data", "nothing was measured here yet"), ("h1000", "choose one of a100_pcie_80gb")]
)
def test_profiles_that_do_not_exist(folder: Path, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_profile(name, folder=folder)
