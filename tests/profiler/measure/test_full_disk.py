"""A measuring run on a full disk: the earlier profile stays intact, one sentence states why, no partial files are left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_job import ForkedJob

from profiler.profile.item import Item
from profiler.profile.profile import Device, Profile
from profiler.profile.recorder import table_of
from profiler.profile.store import read_profile, write_profile

ROOT = Path(__file__).resolve().parents[3]


def earlier(folder: Path) -> bytes:
    """Write a small earlier profile into ``folder``; return the content of the file."""
    device = Device("yesterday's", {"fp32": 1e9}, 2.0**30, 1e9, 1, 1, 1e9, 1e9)
    columns = {"m": 1, "n": 2, "k": 3, "batch": 1, "layout": "TN", "dtype": "fp32"}
    row = {**Item.of("linear", columns).columns, "seconds": 1.0, "spread": 0.0, "repeats": 1, "source": "here"}
    write_profile(folder / "data.pt", Profile("here", device, {"linear": table_of("linear", [row])}, {}))
    return (folder / "data.pt").read_bytes()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs rights that this user has not")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def fill(disk: Path) -> None:
    status = os.statvfs(disk)
    (disk / "filler").write_bytes(b"x" * (status.f_bavail * status.f_frsize))


def test_a_full_disk(small_disk: Path) -> None:
    before = earlier(small_disk)
    fill(small_disk)
    job = ForkedJob("--budget", "0.05", "--output", str(small_disk), ranks=2)
    _, errors = job.communicate(150)
    printed = [line for line in errors.splitlines() if line.startswith("gen_profiler_data.py: ")]
    assert job.returncode
    assert printed == [f"gen_profiler_data.py: {small_disk / 'data.pt'}: cannot write there: No space left on device"]
    assert (small_disk / "data.pt").read_bytes() == before
    assert len(read_profile(small_disk / "data.pt").table("linear")) == 1
    assert sorted(path.name for path in small_disk.iterdir()) == ["data.previous.pt", "data.pt", "filler"]


@pytest.mark.parametrize(("most_bytes", "some_fit"), [(2 * 2**10, False), (8 * 2**10, True)])
def test_a_file_that_may_not_grow(tmp_path: Path, most_bytes: int, some_fit: bool) -> None:
    """The last profile that could be written stays: yesterday's, or the first measurements of today."""
    before = earlier(tmp_path)
    # ends as soon as the file is full, which takes a loaded machine longer
    ended = ForkedJob("--budget", "2", "--output", str(tmp_path), most_bytes=most_bytes)
    _, errors = ended.communicate(timeout=150)
    expected = f"gen_profiler_data.py: {tmp_path / 'data.pt'}: cannot write there: File too large\n"
    assert ended.returncode == 2 and errors.endswith(expected) and "Traceback" not in errors
    assert (read_profile(tmp_path / "data.pt").device.name != "yesterday's") == some_fit
    assert (tmp_path / "data.previous.pt").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.previous.pt", "data.pt"]
