"""How the budget for timing attention is spent, and how times are cached: interruptions, and files that are not a cache."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timing_toy import calls_of, counted_timings, counts, cpu_device, cpu_profile, prepare, problem_on

from predictor.estimate import Basis, Estimate
from predictor.kernels.measured_attention import LEAST_UNCERTAINTY, SHAPE, MeasuredAttention
from profiler.measure import attention_timing, try_kernel
from profiler.measure.attention_timing import time_calls, timing_alone
from profiler.measure.timing import Measurement
from profiler.profile import local_device
from profiler.profile.attention_times import TIMING_SECONDS, Call, attention_item, cache_path, open_cache
from profiler.profile.item import Item
from profiler.profile.local_device import LocalDevice, find_local_device
from profiler.profile.profile import Profile, Table
from profiler.profile.store import read_profile, write_profile


@pytest.fixture
def profile() -> Profile:
    return cpu_profile(cpu_device())


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counted_timings(monkeypatch)


# the budget


def call(seq: int, expected: float, uses: float = 1.0) -> Call:
    target = LocalDevice(cpu_device(), "fp32", "torch_flash", str(torch.__version__), 1)
    item = attention_item(target, dict(zip(SHAPE, (1, seq, seq, 2, 2, 16, 16, 1, 0), strict=True)))
    assert item is not None
    return Call(item, expected, uses)


def run_calls(profile: Profile, folder: Path, calls: list[Call], seconds: float) -> list[int]:
    """Time the calls; return the sequence lengths that were timed, in order."""
    from rich.console import Console

    target = find_local_device(profile)[0]
    assert target is not None
    recorder, _ = open_cache(target, folder / "x.pt", replaces=True)
    time_calls(recorder, target, calls, Console(stderr=True), seconds)
    return [item.number("seq_q") for item in recorder.rows]


def test_the_most_used_are_timed_first_and_long_ones_skipped(profile: Profile, tmp_path: Path, timed: list[str]) -> None:
    calls = [call(16, 1e-3), call(32, 1e-3, uses=50), call(48, 1e-2), call(64, 100.0), call(80, 1e-2, uses=9)]
    assert run_calls(profile, tmp_path, calls, 60.0) == [80, 32, 48, 16]


def test_a_fit_that_is_too_fast_does_not_exceed_the_budget(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call a hundred times slower than estimated raises the estimate of a long call, which is then skipped.

    The first call, a very short one, is twenty-five times slower, but that only shows the launch time.
    """
    calls = [call(16, 2e-5, uses=1e9), call(32, 1e-2, uses=1e6), call(48, 1.0), call(64, 1e-5)]
    for slowness, timed in ((1.0, [16, 32, 48, 64]), (100.0, [16, 32, 64])):
        times = iter([5e-4, 1e-2 * slowness, 1.0, 1.0])
        monkeypatch.setattr(try_kernel, "measure", lambda *_, times=times: Measurement((next(times),) * 2))
        assert run_calls(profile, tmp_path / str(slowness), calls, 10.0) == timed


def test_shapes_beyond_the_budget_use_the_fit_until_timed(profile: Profile, tmp_path: Path, timed: list[str]) -> None:
    problem = problem_on(profile.device)
    columns = calls_of(problem)
    n = len(columns["batch"])
    known, report = prepare(problem, profile, tmp_path, seconds=0.0)
    assert counts(report) == (0, 0, n) and f"{n} not timed yet" in report and not timed
    fit = problem.cost.kernels.flash_attn(**columns)
    for estimated, fitted in zip(known.cost.kernels.flash_attn(**columns), fit, strict=True):
        np.testing.assert_array_equal(estimated, fitted)
    _, report = prepare(problem, profile, tmp_path)
    assert counts(report) == (n, n, 0)
    assert TIMING_SECONDS == 60.0


def test_a_shape_without_memory_or_kernel_is_remembered(
    profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_on(profile.device)
    n = len(calls_of(problem)["batch"])
    tries: list[int] = []

    def measure(*_: Any) -> Measurement:
        tries.append(1)
        if len(tries) == 1:
            raise MemoryError
        if len(tries) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        if len(tries) == 3:
            raise RuntimeError("No available kernel. Aborting execution.")
        return Measurement((1e-3, 1e-3))

    monkeypatch.setattr(try_kernel, "measure", measure)
    for now in (n - 3, 0):
        _, report = prepare(problem, profile, tmp_path)
        assert counts(report) == (n - 3, now, 3) and "3 too large or without a kernel" in report
    assert len(tries) == n
    monkeypatch.setattr(attention_timing, "_most_bytes", lambda *_: 1.0)
    _, report = prepare(problem, profile, tmp_path / "none fits")
    assert counts(report) == (0, 0, n) and len(tries) == n, "none is tried"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_times_are_kept_when_timing_is_interrupted(
    error: type[BaseException], profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_on(profile.device)
    n, tries = len(calls_of(problem)["batch"]), []

    def measure(*_: Any) -> Measurement:
        tries.append(1)
        if len(tries) == 8:
            raise error("the device fell off the bus\nand more")
        return Measurement((1e-3, 1e-3))

    monkeypatch.setattr(try_kernel, "measure", measure)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            prepare(problem, profile, tmp_path)
    else:
        _, report = prepare(problem, profile, tmp_path)
        assert counts(report) == (7, 7, n - 7) and "timing attention failed (the device fell off the bus)" in report
    assert len(read_profile(next(tmp_path.glob("*.pt"))).table("flash_attn")) == 7
    _, report = prepare(problem, profile, tmp_path)
    assert counts(report) == (n, n - 7, 0) and len(tries) == n + 1


# the cache


@pytest.mark.parametrize(
    "damage", ["truncated", "no archive", "another kernel", "a whole profile", "wild notes", "other measurements"]
)
def test_an_invalid_cache_is_set_aside(damage: str, profile: Profile, tmp_path: Path, timed: list[str]) -> None:
    problem = problem_on(profile.device)
    n = len(calls_of(problem)["batch"])
    prepare(problem, profile, tmp_path)
    (path,) = tmp_path.glob("*.pt")
    kept = read_profile(path)
    of = kept.meta["attention_of"]
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "no archive":
        path.write_text("hello")
    elif damage == "another kernel":
        write_profile(path, replace(kept, meta={**kept.meta, "attention_of": {**of, "kernel": "torch_cudnn"}}))
    elif damage == "a whole profile":
        write_profile(path, replace(profile, meta={}))
    elif damage == "wild notes":
        write_profile(path, replace(kept, meta={**kept.meta, "out_of_memory": 5}))
    else:
        table = kept.table("flash_attn")
        wrong = Table({**table.columns, "dtype": np.full(len(table), "bf16")})
        write_profile(path, replace(kept, tables={"flash_attn": wrong}))
    before = path.read_bytes()
    _, report = prepare(problem, profile, tmp_path, timing=False)
    assert counts(report.splitlines()[0]) == (0, 0, n) and "it is not used" in report and path.read_bytes() == before
    _, report = prepare(problem, profile, tmp_path)
    assert counts(report.splitlines()[0]) == (n, n, 0) and str(path) in report and "it is not used" in report
    assert path.with_suffix(".unused").read_bytes() == before, "nothing of it is lost"
    _, report = prepare(problem, profile, tmp_path)
    assert counts(report) == (n, 0, 0) and len(timed) == 2 * n


def test_the_cache_file_depends_on_what_a_time_depends_on() -> None:
    target = LocalDevice(cpu_device(), "fp32", "torch_flash", "2.13.0+cpu", 1)
    others = [
        replace(target, torch="2.14.0+cpu"),
        replace(target, dtype="bf16"),
        replace(target, kernel="torch_cudnn"),
        replace(target, device=cpu_device("AMD K6 (1 of 1 cores a rank)")),
    ]
    paths = {cache_path(t, Path("x")) for t in [target, *others]}
    assert len(paths) == 5 and all(re.fullmatch(r"[a-z0-9_.]+\.pt", path.name) for path in paths)


def test_another_release_of_torch_is_timed_separately(
    profile: Profile, tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = problem_on(profile.device)
    prepare(problem, profile, tmp_path)
    n = len(timed)
    monkeypatch.setattr(local_device, "torch_version", lambda: "9.9.9")
    known, report = prepare(problem, profile, tmp_path, timing=False)
    assert counts(report) == (0, 0, n), "times of another release do not count"
    known, report = prepare(problem, profile, tmp_path)  # the torch of this process is not the one that would be loaded
    assert counts(report) == (0, 0, n) and "9.9.9" in report and len(timed) == n
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    _, report = prepare(problem, profile, tmp_path)
    assert counts(report) == (n, n, 0) and len(list(tmp_path.glob("*.pt"))) == 2


def test_torch_states_the_same_release_in_its_files() -> None:
    assert local_device.torch_version() == torch.__version__


def test_a_folder_that_cannot_be_written(profile: Profile, tmp_path: Path, timed: list[str]) -> None:
    (tmp_path / "file").write_text("here before")
    problem = problem_on(profile.device)
    _, report = prepare(problem, profile, tmp_path / "file")
    assert counts(report.splitlines()[0])[:2] == (0, 0) and "cannot be kept there" in report and not timed
    assert (tmp_path / "file").read_text() == "here before"


def test_lookup_of_many_shapes() -> None:
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 5000, (400, len(SHAPE)))
    sizes[:, 7:] %= 2
    sizes = np.unique(sizes, axis=0)
    rows = [
        {
            **dict(zip(SHAPE, s.tolist(), strict=True)),
            "pass": "backward" if s[8] else "forward",
            "seconds": i + 1.0,
            "spread": np.nan if i % 2 else 0.3,
        }
        for i, s in enumerate(sizes)
    ]
    measured = MeasuredAttention.of_rows(rows[::2] + rows[1::4])
    queries = sizes[::-1].T.reshape(len(SHAPE), 5, -1) if len(sizes) % 5 == 0 else sizes[::-1].T[:, None]
    shape = queries.shape[1:]
    fit = Estimate(np.full(shape, 0.5), np.full(shape, 0.7), np.full(shape, Basis.EXTRAPOLATED, dtype=np.int8))
    found = measured.instead_of(fit, *queries)
    at = np.arange(len(sizes))[::-1]
    known = (at % 2 == 0) | (at % 4 == 1)
    np.testing.assert_array_equal(found.seconds.ravel(), np.where(known, at + 1.0, 0.5))
    np.testing.assert_array_equal(found.relative_std.ravel(), np.where(known, np.where(at % 2, LEAST_UNCERTAINTY, 0.15), 0.7))
    np.testing.assert_array_equal(found.basis.ravel(), np.where(known, Basis.MEASURED, Basis.EXTRAPOLATED))
    assert MeasuredAttention.of_rows([]).instead_of(fit, *queries) is fit


def test_items_name_every_column() -> None:
    """A shape from the solver and the same shape from a measuring plan are the same item."""
    target = LocalDevice(cpu_device(), "bf16", "torch_flash", "2.13", 1)
    item = attention_item(target, dict(zip(SHAPE, (2, 64, 64, 4, 2, 16, 16, 1, 1), strict=True)))
    columns: dict[str, int | str] = {
        "batch": 2,
        "seq_q": 64,
        "seq_kv": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "v_head_dim": 16,
        "causal": 1,
        "pass": "backward",
        "kernel": "torch_flash",
        "dtype": "bf16",
    }
    assert item == Item.of("flash_attn", columns)


def test_two_runs_do_not_time_at_the_same_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    order: list[str] = []

    def other() -> None:
        with timing_alone(tmp_path, Console(stderr=True)):
            order.append("other")

    waiting = threading.Thread(target=other)
    with timing_alone(tmp_path, Console(stderr=True)):
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not order
        order.append("first")
    waiting.join(5)
    assert order == ["first", "other"] and "waiting for it" in capsys.readouterr().err
