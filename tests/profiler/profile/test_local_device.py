"""Which GPU is the profile's device: checked by what the driver reports, then by what PyTorch sees."""

from __future__ import annotations

import os
import re
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from timing_toy import counted_timings, counts, prepare, problem_on

from profiler.errors import InputError
from profiler.measure import attention_timing
from profiler.profile.devices import DEVICES
from profiler.profile.local_device import Gpu, LocalDevice, datasheet_key, find_local_device, is_device
from profiler.profile.profile import Profile
from profiler.units import GIB


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counted_timings(monkeypatch)


SMI = {
    "h100_sxm": ("NVIDIA H100 80GB HBM3", 81559),
    "h200_sxm": ("NVIDIA H200", 143771),
    "b200_sxm": ("NVIDIA B200", 183359),
    "a100_sxm_80gb": ("NVIDIA A100-SXM4-80GB", 81920),
    "a100_sxm_40gb": ("NVIDIA A100-SXM4-40GB", 40960),
    "a100_pcie_80gb": ("NVIDIA A100 80GB PCIe", 81920),
}


@pytest.mark.parametrize("key", SMI)
def test_a_gpu_matches_its_own_datasheet_only(key: str) -> None:
    name, mebibytes = SMI[key]
    gpu = Gpu(name, mebibytes * GIB / 1024, 9, False)
    assert datasheet_key(name) == key
    assert [other for other in DEVICES if is_device(gpu, DEVICES[other])] == [key]
    assert not is_device(replace_memory(gpu, 0.8), DEVICES[key])


def replace_memory(gpu: Gpu, factor: float) -> Gpu:
    return gpu._replace(memory_bytes=gpu.memory_bytes * factor)


SOUND_ALIKE = (
    "NVIDIA GH200 480GB",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA H200 NVL",
    "NVIDIA GB200",
    "NVIDIA H100 NVL",
    "NVIDIA H100 PCIe",
    "NVIDIA A100-PCIE-40GB",
    "NVIDIA H200 MIG 3g.71gb",
    "NVIDIA H20",
)


@pytest.mark.parametrize("name", SOUND_ALIKE)
def test_builds_with_similar_names_do_not_match(name: str) -> None:
    for device in DEVICES.values():
        assert not is_device(Gpu(name, device.memory_bytes, 9, False), device)
    own = replace(DEVICES["h200_sxm"], name=name)  # a profile measured on such a GPU is matched by name
    assert is_device(Gpu(name, own.memory_bytes, 9, False), own)


def driver(folder: Path, *lines: str) -> None:
    """Write a stand-in for nvidia-smi into ``folder``, which prints ``lines``."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
    tool.chmod(0o755)


H100, OTHER = "NVIDIA H100 80GB HBM3, 81559, 9.0, Disabled", "NVIDIA T400, 4096, 7.5, [N/A]"


@pytest.mark.parametrize(
    ("lines", "visible", "why"),
    [
        ((H100,) * 8, None, None),
        ((H100, OTHER), None, "NVIDIA T400"),
        ((OTHER,), None, ""),
        (("No devices were found",), None, ""),
        ((), None, ""),
        ((H100.replace("Disabled", "Enabled"),), None, "sliced"),
        ((H100,), "", "hides"),
        (("NVIDIA H100 80GB HBM3, [N/A], 9.0, Disabled",), None, ""),
    ],
)
def test_which_gpus_are_those_of_the_profile(
    lines: tuple[str, ...], visible: str | None, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, *lines)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    h100 = Profile("h100_sxm", DEVICES["h100_sxm"], {})
    target, reason = find_local_device(h100)
    if why is None:
        assert target == LocalDevice(h100.device, "bf16", "torch_cudnn", str(torch.__version__), 0)
    else:
        assert target is None and (reason == "" if why == "" else why in reason)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's PyTorch does see a GPU")
def test_a_gpu_that_torch_does_not_see_is_not_replaced_by_the_cpu(
    tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, H100)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    problem = problem_on(DEVICES["h100_sxm"])
    _, report = prepare(problem, Profile("h100_sxm", DEVICES["h100_sxm"], {}), tmp_path / "times")
    assert counts(report.splitlines()[0])[:2] == (0, 0) and "does not see the GPU" in report and not timed
    assert not list((tmp_path / "times").glob("*.pt"))


Properties = namedtuple("Properties", "name total_memory multi_processor_count major")
SEEN = Properties("NVIDIA H100 80GB HBM3", int(79.1 * GIB), 132, 9)


@pytest.mark.parametrize(
    ("seen", "free", "release", "message"),
    [
        (SEEN, 0.98, "", ""),
        (SEEN._replace(name="NVIDIA H200"), 0.98, "", "NVIDIA H200"),
        (SEEN._replace(total_memory=int(9.8 * GIB)), 0.98, "", "H100"),
        (SEEN._replace(multi_processor_count=16), 0.98, "", "16"),
        (SEEN, 0.5, "", "in use"),
        (SEEN._replace(major=8), 0.98, "", "torch_flash"),
        (SEEN, 0.98, "+other", "by its files"),
    ],
    ids=["the profile's", "another name", "less memory", "a slice", "taken", "another kernel", "another release"],
)
def test_the_gpu_is_checked_before_timing(
    seen: Properties, free: float, release: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = {
        "is_available": lambda: True,
        "set_device": lambda _: None,
        "get_device_properties": lambda _: seen,
        "mem_get_info": lambda _: (free * seen.total_memory, seen.total_memory),
        "get_device_capability": lambda _: (seen.major, 0),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    target = LocalDevice(DEVICES["h100_sxm"], "bf16", "torch_cudnn", f"{torch.__version__}{release}")
    if message:
        with pytest.raises(InputError, match=re.escape(message)):
            attention_timing._open_device(target)
    else:
        assert attention_timing._open_device(target) == torch.device("cuda", 0)
