"""Attention timed while predicting: only where this machine has the device, and once per shape."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import toy
from timing_toy import BATCH, calls_of, counted_timings, counts, cpu_device, cpu_profile, prepare, problem_on

from predictor.estimate import Basis
from predictor.kernels.derating import Deratings
from predictor.kernels.flash_generations import AttentionKernel
from predictor.kernels.measured_attention import SHAPE
from profiler.measure.arena import Arena
from profiler.measure.kernels import workload
from profiler.profile import local_device
from profiler.profile.attention_times import attention_item
from profiler.profile.devices import DEVICES
from profiler.profile.local_device import LocalDevice, find_local_device
from profiler.profile.profile import Profile
from profiler.profile.recorder import rows_of
from profiler.profile.store import read_profile, write_profile
from solver import search
from solver.search.space import enumerate_splits
from solver.step.timed_attention import attention_calls, with_timed_attention

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def profile() -> Profile:
    return cpu_profile(cpu_device())


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counted_timings(monkeypatch)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before


# timed once, cached, used


def test_missing_shapes_are_timed_once_and_used_from_then_on(profile: Profile, tmp_path: Path, timed: list[str]) -> None:
    problem = problem_on(profile.device, deratings=Deratings(3.0, 3.0))
    columns = calls_of(problem)
    n = len(columns["batch"])
    assert n >= 20 and {0, 1} == set(columns["causal"]) and (columns["seq_q"] != columns["seq_kv"]).any()
    first, report = prepare(problem, profile, tmp_path)
    assert counts(report) == (n, n, 0) and timed == ["cpu"] * n
    repeated, report = prepare(problem, profile, tmp_path)
    assert counts(report) == (n, 0, 0) and len(timed) == n, "nothing is timed twice"
    kept = read_profile(next(tmp_path.glob("*.pt")))
    shapes = [dict(zip(columns, call, strict=True)) for call in zip(*(c.tolist() for c in columns.values()), strict=True)]
    target = find_local_device(profile)[0]
    assert target is not None and (target.dtype, target.kernel, target.threads) == ("fp32", "torch_flash", 1)
    rows = rows_of(kept)
    cached = np.array([rows[item]["seconds"] for s in shapes if (item := attention_item(target, s)) is not None])
    for known in (first, repeated):
        estimate = known.cost.kernels.flash_attn(**columns)
        np.testing.assert_array_equal(estimate.seconds, cached)
        assert (estimate.basis == Basis.MEASURED).all()
        np.testing.assert_allclose(estimate.relative_std, 0.2 / 2.2 / 2, rtol=1e-5)  # half of the measured spread
    kernels = repeated.cost.kernels
    slower = replace(kernels, attention_kernel=AttentionKernel(behind=(1,))).flash_attn(**columns).seconds
    # the scale of the FlashAttention generation applies; the sustained-clock derating is in the times
    np.testing.assert_allclose(slower, cached * 1.75)
    # what a power limit costs is not in them, no more than in a profile's
    limited = replace(kernels, deratings=replace(kernels.deratings, power_slowdown=1.2)).flash_attn(**columns).seconds
    np.testing.assert_allclose(limited, cached * 1.2)
    fit = problem.cost.kernels.flash_attn(**columns).seconds
    assert not np.isclose(fit, cached).any()


def test_a_search_uses_the_measured_times(profile: Profile, tmp_path: Path, timed: list[str]) -> None:
    problem = problem_on(profile.device)
    known, _ = prepare(problem, profile, tmp_path)
    by_fit, measured = search(problem, BATCH), search(known, BATCH)
    assert measured.best.times.seconds[0] > 2 * by_fit.best.times.seconds[0]  # milliseconds per call instead of nanoseconds
    row = measured.best.table.layer.estimates
    attention = [i for i, op in enumerate(row.ops) if op.label == "attention.forward"]
    slow = 1e-3 * len(timed) * 1.1
    assert attention and row.seconds[attention[0]].min() >= 1e-3 and row.seconds[attention[0]].max() <= slow


def test_real_timings_grow_with_the_flops(profile: Profile, tmp_path: Path) -> None:
    problem = problem_on(profile.device)
    known, report = prepare(problem, profile, tmp_path, seconds=20.0)
    assert counts(report)[2] == 0
    columns = calls_of(problem)
    flops = columns["batch"] * columns["seq_q"] * columns["seq_kv"] * columns["heads"] * (1 + 1.5 * columns["backward"])
    seconds = known.cost.kernels.flash_attn(**columns).seconds
    few, many = flops <= np.quantile(flops, 0.25), flops >= np.quantile(flops, 0.75)
    assert np.median(seconds[many]) > np.median(seconds[few]) and (seconds > 1e-7).all() and (seconds < 1).all()


def test_only_calls_that_are_made_are_timed(profile: Profile) -> None:
    """Without context parallelism a ring has one step; the shapes of further steps are not called."""
    problem = problem_on(profile.device)
    space = enumerate_splits(problem, BATCH).splits
    without_cp = attention_calls(problem, space.take(np.flatnonzero(space.cp == 1)))
    assert (
        (without_cp.columns["seq_q"] == 256).all()
        and (without_cp.columns["causal"] == 1).all()
        and (without_cp.uses >= 1).all()
    )
    unfused = toy.make_problem(toy.TINY, 8, problem.cost, seq_len=256, attention="unfused")
    assert len(attention_calls(unfused, space)) == 0
    assert with_timed_attention(unfused, profile, lambda: space, Path("/absent")) == (unfused, "")


def test_what_the_profile_measured_with_the_same_release_is_not_timed_again(
    profile: Profile, tmp_path: Path, timed: list[str]
) -> None:
    problem = problem_on(profile.device)
    prepare(problem, profile, tmp_path / "a")
    n = len(timed)
    kept = read_profile(next((tmp_path / "a").glob("*.pt")))
    own = replace(profile, tables={"flash_attn": kept.table("flash_attn")})
    _, report = prepare(problem, own, tmp_path / "b")
    assert counts(report) == (n, 0, 0) and len(timed) == n and not (tmp_path / "b").exists()


# not timed


def test_no_timing_writes_nothing_and_uses_cached_times(profile: Profile, tmp_path: Path, timed: list[str]) -> None:
    problem = problem_on(profile.device)
    columns = calls_of(problem)
    n = len(columns["batch"])
    known, report = prepare(problem, profile, tmp_path, timing=False)
    assert counts(report) == (0, 0, n) and f"{n} not timed yet" in report and not timed and not list(tmp_path.iterdir())
    np.testing.assert_array_equal(
        known.cost.kernels.flash_attn(**columns).seconds, problem.cost.kernels.flash_attn(**columns).seconds
    )
    prepare(problem, profile, tmp_path)
    known, report = prepare(problem, profile, tmp_path, timing=False)
    assert counts(report) == (n, 0, 0) and len(timed) == n


@pytest.mark.parametrize("which", ["an H100", "another CPU", "more cores", "the same name with other words"])
def test_another_device_is_never_timed(which: str, tmp_path: Path, timed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = cpu_device().name
    cores = os.cpu_count()
    monkeypatch.setattr(local_device, "gpus_here", lambda: [])
    device = {
        "an H100": DEVICES["h100_sxm"],
        "another CPU": cpu_device("AMD K6 (1 of 1 cores a rank)"),
        "more cores": cpu_device(here.replace(f"of {cores}", f"of {cores + 1}" if cores else "")),
        "the same name with other words": cpu_device(f"{here}!"),
    }[which]
    problem = problem_on(device)

    def never() -> Any:
        raise AssertionError("the space of layouts is not needed")

    assert with_timed_attention(problem, cpu_profile(device), never, tmp_path) == (problem, "")
    assert not timed and not list(tmp_path.iterdir())


def test_fewer_cores_than_the_profile_computes_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = os.cpu_count() or 1
    device = cpu_device(cpu_device().name.replace("(1 of", f"({cores} of"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores - 1)))
    target, why = find_local_device(cpu_profile(device))
    assert target is None and f"{cores - 1} of the {cores} cores" in why
    problem = problem_on(device)
    assert prepare(problem, cpu_profile(device), tmp_path) == (problem, f"attention: by the fit, as {why}")


def test_without_torch(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_device, "torch_version", lambda: "")
    known, report = prepare(problem_on(profile.device), profile, tmp_path)
    assert known.cost.kernels.measured_attention is None and "PyTorch" in report and "not installed" in report


def test_calls_that_would_be_timed_wrongly_use_the_fit() -> None:
    target = LocalDevice(cpu_device(), "fp32", "torch_flash", "2.13", 1)
    shape = dict(zip(SHAPE, (1, 64, 64, 4, 2, 16, 16, 1, 0), strict=True))
    assert attention_item(target, shape) is not None
    assert attention_item(target, {**shape, "seq_kv": 128}) is None, "the mask is aligned differently"
    assert attention_item(target, {**shape, "seq_kv": 128, "causal": 0}) is not None
    assert attention_item(target, {**shape, "v_head_dim": 8}) is None


@pytest.mark.parametrize(("causal", "keys"), [(1, 64), (0, 64), (0, 32), (0, 96)])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_the_kernel_runs_the_requested_shape(causal: int, keys: int, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    real = F.scaled_dot_product_attention

    def noted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, enable_gqa: bool) -> torch.Tensor:
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), is_causal, enable_gqa))
        return real(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    target = LocalDevice(cpu_device(), "fp32", "torch_flash", "2.13", 1)
    shape = dict(zip(SHAPE, (3, 64, keys, 4, 2, 16, 16, causal, which == "backward"), strict=True))
    item = attention_item(target, shape)
    assert item is not None
    workload(item, Arena(torch.device("cpu"), 1 << 16))(0)
    assert set(seen) == {((3, 4, 64, 16), (3, 2, keys, 16), (3, 2, keys, 16), bool(causal), True)}


# the command


MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def command(folder: Path, *arguments: Any) -> str:
    """Run a search over the tiny model with this machine's profile; return stdout. torch starts with another thread count.

    ``imports`` in ``folder`` then has a line for every imported module.
    """
    line = [
        sys.executable,
        "-X",
        "importtime",
        ROOT / "simulation_train_formulaic.py",
        "--run_all_solu",
        "--config",
        folder / "config.json",
        "--pre_profiling_data_path",
        folder / "data.pt",
        "--world_size",
        2,
        "--seq_len",
        128,
        "--global_batch_size",
        512,
        "--top",
        3,
        "--json",
        folder / "out.json",
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "COLUMNS": "160"}
    done = subprocess.run([*map(str, line)], cwd=folder, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    (folder / "imports").write_text(done.stderr)
    return done.stdout


def attention_line(report: str) -> str:
    return next((line for line in report.splitlines() if line.startswith("attention: ")), "")


def attention_bases(folder: Path) -> set[str]:
    best = json.loads((folder / "out.json").read_text())["best"][0]
    return {op["basis"] for op in best["ops"] if op["name"].startswith("attention.")}


def test_the_command_times_once(profile: Profile, tmp_path: Path) -> None:
    write_profile(tmp_path / "data.pt", profile)
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    folder = tmp_path / "flash_attn"
    report = command(tmp_path, "--no-timing")
    n = counts(attention_line(report))[2]
    assert (
        counts(attention_line(report)) == (0, 0, n)
        and n >= 8
        and not folder.exists()
        and "measured" not in attention_bases(tmp_path)
    )
    assert counts(attention_line(command(tmp_path))) == (n, n, 0) and attention_bases(tmp_path) == {"measured"}
    (path,) = folder.glob("*.pt")
    before, best = path.read_bytes(), json.loads((tmp_path / "out.json").read_text())["best"]
    assert counts(attention_line(command(tmp_path))) == (n, 0, 0) and path.read_bytes() == before
    imported = (tmp_path / "imports").read_text()
    assert "solver.step.timed_attention" in imported and " torch\n" not in imported, "cached times are read without torch"
    assert json.loads((tmp_path / "out.json").read_text())["best"] == best, "fresh and cached times are the same numbers"
    write_profile(tmp_path / "data.pt", cpu_profile(cpu_device("AMD K6 (1 of 1 cores a rank)")))
    assert (
        attention_line(command(tmp_path)) == "" and path.read_bytes() == before and "measured" not in attention_bases(tmp_path)
    )
    assert len(list(folder.glob("*.pt"))) == 1


def test_the_help_lists_the_option() -> None:
    from solver.commands.command_line import parser

    assert "--no-timing" in parser().format_help() and parser().parse_args(["--no-timing"]).no_timing is True
