"""The measuring run as users start it (torchrun, gloo, real kernels of tiny sizes), and what is kept when it is interrupted."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_job import ForkedJob

from profiler.errors import InputError
from profiler.measure import timing
from profiler.measure.collectives import groups_of
from profiler.measure.timing import Measurement, measure
from profiler.profile.item import Item, Limits
from profiler.profile.merge import merged
from profiler.profile.plan import (
    ModelDims,
    attention_items,
    collective_items,
    group_shapes,
    linear_items,
    low_discrepancy,
    spread_order,
)
from profiler.profile.profile import COLLECTIVES, TABLE_COLUMNS, Profile, Table
from profiler.profile.recorder import Recorder, rows_of
from profiler.profile.store import read_profile, write_profile

ROOT = Path(__file__).resolve().parents[3]
KERNELS = ("host", "linear", "flash_attn", "memory_bound", "grouped_linear")


def start(ranks: int, output: Path, *flags: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [*launcher, "gen_profiler_data.py", "--quick", "--no-pictures", "--output", str(output), *flags],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def alone(output: Path, *flags: str) -> ForkedJob:
    """Start a run of one process without torchrun."""
    return ForkedJob("--output", str(output), *flags)


def finish(process: subprocess.Popen[str] | ForkedJob, seconds: float = 60) -> str:
    try:
        printed, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return printed + (errors or "")


def rows(profile: Profile) -> int:
    return sum(len(table) for table in profile.tables.values())


#: A plan of `foretrain explain --measurements`, of shapes that no grid has; the last two cannot be measured here.
PLAN = """kernel,shape
linear fp32,"m 56, n 72, k 104, batch 1, layout 1"
memory_bound norm fp32,bytes 81920
flash_attn fp32,"batch 1, seq_q 48, seq_kv 24, heads 4, kv_heads 2, head_dim 64"
all_reduce fp32,"bytes 6000, intra 2, inter 1"
all_reduce fp32,"bytes 6000, intra 8, inter 1"
linear nvfp4,"m 64, n 64, k 64"
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measure a profile with four gloo ranks that stand for two nodes, a plan first; return its file.

    Beside it lies what was printed. Test workers share one run.
    """
    base = tmp_path_factory.getbasetemp()
    output = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "four"
    output.mkdir(exist_ok=True)
    with (output / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / "printed").exists():
            measure_all(output)
    return output / "data.pt"


def measure_all(output: Path) -> None:
    (output / "plan.csv").write_text(PLAN)
    plan = ("--measurements", str(output / "plan.csv"))
    for budget, *resumed in (("0.26",), ("0.4", "--resume"), ("0.8", "--resume")):  # an idle machine fills every table at once
        flags = ("--output", str(output), "--budget", budget, *plan, *resumed)
        process = ForkedJob(*flags, ranks=4, environment={"FORETRAIN_RANKS_PER_NODE": "2"})
        printed = finish(process, 120)
        assert process.returncode == 0, printed
        profile = read_profile(output / "data.pt")
        if all(len(profile.table(op)) for op in (*KERNELS, *COLLECTIVES, "p2p")):
            break
    (output / "printed").write_text(printed)


def test_a_run_of_four_ranks_fills_every_table(measured: Path) -> None:
    profile = read_profile(measured)
    for op in (*KERNELS, *COLLECTIVES, "p2p"):
        table = profile.table(op)
        assert len(table), op
        assert (table["seconds"] > 0).all() and (table["repeats"] >= 2).all() and (table["spread"] >= 0).all()
        assert set(table.columns) == set(TABLE_COLUMNS[op])
    assert set(profile.table("linear")["layout"]) == {"TN", "NN", "NT"}
    assert set(profile.table("grouped_linear")["pass"]) == {"forward", "input_grad", "weight_grad"}
    summed = profile.table("linear").where(profile.table("linear")["accumulate"] == 1)
    assert set(summed["layout"]) == {"NT"} and set(summed["out_dtype"]) == {"fp32"}
    overlap = profile.table("overlap")  # on a busy machine the two may not overlap in time, which is then reported
    assert len(overlap) + sum(label.startswith("overlap ") for label in profile.meta["not_run"]) > 0
    assert set(overlap["collective"]) <= {"all_reduce", "all_gather", "reduce_scatter"}
    assert (overlap["gemm_slowdown"] > 0).all() and (overlap["collective_slowdown"] > 0).all()
    assert set(profile.table("flash_attn")["pass"]) == set(profile.table("host")["pass"]) == {"forward", "backward"}
    assert profile.device.gpus_per_node == 2 and profile.device.peak_flops["bf16"] > 1e9
    assert profile.meta["power_slowdown"] == 1.0  # of a CPU
    shapes = set(zip(profile.table("all_reduce")["intra"], profile.table("all_reduce")["inter"], strict=True))
    assert shapes >= {(2, 2), (2, 1), (1, 2)}
    p2p = profile.table("p2p")
    assert set(zip(p2p["intra"], p2p["inter"], strict=True)) == {(2, 1), (1, 2)}


def columns(table: Table, *names: str) -> set[tuple[object, ...]]:
    return set(zip(*(table[name].tolist() for name in names), strict=True))


def test_a_plan_is_measured_before_the_grid(measured: Path) -> None:
    """In so little time that the grid is not finished."""
    profile, printed = read_profile(measured), (measured.parent / "printed").read_text()
    assert "linear nvfp4 (m 64, n 64, k 64): only bf16, fp16, fp32 are measured" in printed
    assert "no such group among 2 ranks on each of 2 nodes" in printed
    assert ("NN", 72, 104) in columns(profile.table("linear").where(profile.table("linear")["m"] == 56), "layout", "n", "k")
    assert (48, 24, "torch_flash") in columns(profile.table("flash_attn"), "seq_q", "seq_kv", "kernel")
    assert ("norm", 81920) in columns(profile.table("memory_bound"), "kind", "bytes")
    assert (2, 1, 6000) in columns(profile.table("all_reduce"), "intra", "inter", "bytes")


def test_the_file_holds_plain_values_and_states_how_it_was_made(measured: Path) -> None:
    plain = torch.load(measured, weights_only=True)
    assert plain["meta"]["backend"] == "gloo" and "--quick" in plain["meta"]["command"] and plain["meta"]["date"]


def test_a_killed_rank_is_reported_and_measurements_are_kept_and_resumed(tmp_path: Path) -> None:
    process = start(2, tmp_path, "--budget", "5")
    victim = wait_for_rank(process, 1)
    wait_for(tmp_path / "data.pt")
    os.kill(victim, signal.SIGKILL)
    printed = finish(process, 100)
    assert process.returncode != 0 and "rank 1 died" in printed and "--resume" in printed
    kept = read_profile(tmp_path / "data.pt")
    assert rows(kept) > 0

    process = start(2, tmp_path, "--budget", "0.04", "--resume")
    printed = finish(process)
    assert process.returncode == 0, printed
    resumed = read_profile(tmp_path / "data.pt")
    assert rows(resumed) > rows(kept)
    before, after = rows_of(kept), rows_of(resumed)
    assert all(after[item] == row for item, row in before.items())  # nothing was measured twice
    process = alone(tmp_path, "--budget", "0.02", "--resume")
    assert "was begun with 2 ranks; --resume goes on with as many, not with 1" in finish(process)
    assert process.returncode == 2 and read_profile(tmp_path / "data.pt").meta["ranks"] == 2


def test_ctrl_c_keeps_the_measurements(tmp_path: Path) -> None:
    process = alone(tmp_path, "--budget", "5")
    wait_for(tmp_path / "data.pt")
    process.send_signal(signal.SIGINT)
    printed = finish(process)
    assert process.returncode == 130 and "interrupted" in printed and "Traceback" not in printed
    assert rows(read_profile(tmp_path / "data.pt")) > 0


def wait_for(path: Path, seconds: float = 40) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} was not written"
        time.sleep(0.02)


def wait_for_rank(launcher: subprocess.Popen[str], rank: int) -> int:
    """Return the process id of a rank: the child of torchrun with that RANK in its environment."""
    end = time.monotonic() + 40
    while time.monotonic() < end:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        for child in children:
            if f"\0RANK={rank}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
                return int(child)
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} did not start")


def test_profiles_of_one_device_merge_and_others_are_refused(measured: Path, tmp_path: Path) -> None:
    profile = read_profile(measured)
    kernels = replace(profile, tables={op: profile.tables[op] for op in KERNELS})
    links = replace(profile, tables={op: profile.tables[op] for op in COLLECTIVES})
    joined = merged(kernels, links)
    assert rows(joined) == rows(kernels) + rows(links)
    with pytest.raises(InputError, match="differ in device"):
        merged(kernels, replace(links, device=replace(links.device, name="another")))

    write_profile(tmp_path / "a.pt", kernels)
    write_profile(tmp_path / "b.pt", replace(links, device=replace(links.device, name="another")))
    process = alone(tmp_path, "--merge", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    assert "differ in device" in finish(process) and process.returncode == 2


def test_measuring_again_keeps_the_old_file(measured: Path, tmp_path: Path) -> None:
    (tmp_path / "data.pt").write_bytes(measured.read_bytes())
    process = alone(tmp_path, "--budget", "0.01")
    finish(process)
    assert (tmp_path / "data.previous.pt").read_bytes() == measured.read_bytes()


def test_shapes_with_oom_are_noted_and_not_tried_again(tmp_path: Path, measured: Path) -> None:
    profile = read_profile(measured)
    meta = {"out_of_memory": [], "not_run": {}}
    recorder = Recorder(tmp_path / "data.pt", "here", profile.device, meta)
    item = Item.of("linear", {"m": 1, "n": 2, "k": 3, "layout": "TN", "dtype": "bf16"})
    recorder.add(item, None)
    recorder.write()
    kept = read_profile(tmp_path / "data.pt")
    assert rows(kept) == 0 and kept.meta["out_of_memory"] == [item.label]
    assert item.label in recorder.settled()


def test_uncertainty_of_the_median_of_a_measurement() -> None:
    sure, unsure = Measurement((1.0,) * 20), Measurement((1.0, 2.0, 1.0, 2.0, 1.5, 1.2))
    assert sure.uncertainty == 0 and sure.spread == 0 and unsure.uncertainty > 0.02
    assert unsure.spread == pytest.approx(0.5 / unsure.median)
    assert Measurement((1.0, 1.0)).uncertainty == np.inf


def test_calls_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # a clock that only the work moves: the first two calls (5 s and 2 s) are not counted, each other one takes 1 ms
    clock, calls = [0.0], []

    def work(i: int) -> None:
        calls.append(i)
        clock[0] += {0: 5.0, 1: 2.0}.get(i, 1e-3)

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    found = measure(work, torch.device("cpu"), 10.0)
    assert found.times == pytest.approx([1e-3] * len(found.times), rel=1e-9)
    assert calls == list(range(found.count + 2)) and found.count >= 5


def test_every_prefix_of_a_plan_covers_the_range() -> None:
    points = low_discrepancy(64, 3)
    assert ((points > 0) & (points < 1)).all()
    for prefix, parts in ((4, 4), (16, 16), (64, 64)):  # every part of every axis has a point
        assert all(len(np.unique((points[:prefix, axis] * parts).astype(int))) == parts for axis in range(3))
    assert sorted(spread_order(11)) == list(range(11)) and spread_order(11)[:3] == [0, 10, 5]
    assert spread_order(1) == [0]


def test_plans_hold_the_shapes_of_named_models_and_respect_the_limits() -> None:
    limits = Limits(64, 4096, 4096, 2**24, 2**24, 2**28, 0.5, 1e12)
    model = ModelDims(1024, 2816, 8, 2, 128, 32000, seq_len=2048)
    items = linear_items(limits, [model], ("bf16",))
    shapes = {tuple(item.number(c) for c in "mnk") + (item.columns["layout"],) for item in items}
    assert {(2048, 5632, 1024, "TN"), (2048, 1024, 5632, "NN"), (5632, 1024, 2048, "NT")} <= shapes
    assert all(2.0 * m * n * k <= 0.5e12 for m, n, k, _ in shapes) and len(items) == len(set(items))
    attention = attention_items(limits, [model], "bf16", ("torch_flash",))
    assert any(item.number("seq_q") == 2048 and item.number("kv_heads") == 2 for item in attention)


def test_groups_tile_the_world_and_full_ones_come_first() -> None:
    assert group_shapes(8, 4)[:2] == [(8, 4), (8, 1)]
    assert {inter for _, inter in group_shapes(8, 6)} == {1, 2, 4, 6}
    assert groups_of(2, 2, 4, 2) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    for intra, inter in group_shapes(6, 2):
        members = [rank for group in groups_of(intra, inter, 6, 2) for rank in group]
        assert sorted(members) == list(range(12))
    items = collective_items(3, 2, Limits(64, 64, 64, 64, 2**20, 1, 1, 1), "bf16")
    assert all(item.number("bytes") % 12 == 0 for item in items)
    assert not any(item.op == "p2p" for item in items)


def test_an_empty_table_is_accepted(tmp_path: Path, measured: Path) -> None:
    profile = replace(read_profile(measured), tables={"p2p": Table.from_columns("p2p", {})})
    assert rows_of(profile) == {}


def test_two_runs_do_not_write_into_one_folder(tmp_path: Path) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as a running measurement does
    try:
        process = alone(tmp_path, "--budget", "0.1")
        printed = finish(process)
    finally:
        os.close(handle)
    assert process.returncode == 2 and "another measurement is writing there" in printed
    assert not (tmp_path / "data.pt").exists()


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    process = alone(tmp_path, "--budget", "0.02", "--resume")
    printed = finish(process, 120)
    assert process.returncode == 0 and "nothing to resume: there is no" in printed
    assert (tmp_path / "data.pt").exists()


def test_a_killed_torchrun_is_named(tmp_path: Path) -> None:
    process = start(2, tmp_path, "--budget", "2")
    wait_for_rank(process, 1)
    wait_for(tmp_path / "data.pt")
    process.kill()
    printed = finish(process, 100)  # until the ranks have ended too
    assert "torchrun died" in printed and "--resume" in printed and "Traceback" not in printed
    assert rows(read_profile(tmp_path / "data.pt")) > 0
