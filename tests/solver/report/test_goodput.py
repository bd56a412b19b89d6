"""Goodput: against a simulation of failures, by hand, published anchors, laws, and the command."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import tiny

from profiler.errors import InputError
from solver.commands.console import main
from solver.options.interruptions import add_interruption_arguments, goodput_of
from solver.report.goodput import Checkpoints, Failures, checkpoints, goodput

PER_NODE = 8


def simulated(mean: float, restart: float, stall: float, beside: float, interval: float, work: float, seed: int) -> float:
    """Return the wall time that ``work`` takes, failure by failure: a checkpoint counts once it is written."""
    random = np.random.default_rng(seed)
    wall = done = saved = 0.0
    pending: list[tuple[float, float]] = []  # (when it is written, the work that it holds)
    failure = random.exponential(mean)
    while done < work:
        segment = interval + stall
        if wall + segment <= failure:
            wall, done = wall + segment, done + interval
            pending.append((wall + beside, done))
            continue
        wall = failure
        saved = max([saved, *(held for written, held in pending if written <= wall)])
        pending = []
        done = saved
        failure = wall + random.exponential(mean)
        while wall + restart > failure:  # a restart may fail too
            wall, failure = failure, failure + random.exponential(mean)
        wall += restart
    return wall


def waited(mean: float, repair: float, spares: int, work: float, seed: int) -> float:
    """Return the wall time that ``work`` takes where failures cost nothing but the wait for a node, once no spare is left."""
    random = np.random.default_rng(seed)
    wall = 0.0
    repaired: list[float] = []  # when each of the nodes in repair is back
    while work > 0:
        trained = min(random.exponential(mean), work)
        wall, work = wall + trained, work - trained
        repaired = [*(back for back in repaired if back > wall), wall + random.exponential(repair)]
        if len(repaired) > spares:
            wall = min(repaired)
    return wall


@pytest.mark.parametrize(
    ("mean", "restart", "stall", "beside", "interval"),
    [(10_000, 600, 60, 0, 1000), (3000, 600, 30, 0, 300), (10_000, 300, 2, 200, 700), (50_000, 1200, 300, 0, 5000)],
)
def test_share_and_its_uncertainty_are_those_of_a_simulation(
    mean: float, restart: float, stall: float, beside: float, interval: float
) -> None:
    failures = Failures(mtbf_gpu=mean / 3600 * 64, restart=restart)
    found = goodput(failures, 64, PER_NODE, Checkpoints(stall, stall + beside, interval))
    assert found.mtbf == pytest.approx(mean)
    work, days = 60 * mean, 60 * mean / found.share / 86_400
    walls = [simulated(mean, restart, stall, beside, interval, work, seed) for seed in range(300)]
    assert np.mean(walls) == pytest.approx(work / found.share, rel=0.01)
    # the standard deviation of 300 has an error of 1 / sqrt(600) = 4%; without the 200 s of writing it would be 22% too small
    assert found.days_std(days) == pytest.approx(np.std(walls) / 86_400, rel=0.1)


@pytest.mark.parametrize(("spares", "repair"), [(0, 500), (1, 1000), (1, 2000)])
def test_waits_for_nodes_are_those_of_a_simulation(spares: int, repair: float) -> None:
    """Losses of the work since the last checkpoint and of the restart are next to nothing."""
    mean = 10_000.0
    failures = Failures(mtbf_gpu=mean / 3600 * 64, restart=1e-6, spares=spares, repair=repair / 3600)
    found = goodput(failures, 64, PER_NODE, Checkpoints(1e-3, 1e-3, 1.0))
    work = 200 * mean
    walls = [waited(mean, repair, spares, work, seed) for seed in range(400)]
    days = work / found.share / 86_400
    assert found.share == pytest.approx(work / np.mean(walls), rel=0.003)
    # an error of 1 / sqrt(800) = 4%, and waits that come close together; the wait of one more spare would be off by 18%
    assert found.days_std(days) == pytest.approx(np.std(walls) / 86_400, rel=0.1)


def test_the_uncertainty_by_hand() -> None:
    """A failure loses half of 1000 s of training and a 200 s pause on average, spread evenly, 300 s of writing, and 400 s."""
    found = goodput(Failures(mtbf_gpu=100, restart=400), 10, PER_NODE, Checkpoints(200, 500, 1000))
    assert found.second_moment == pytest.approx((600 + 300 + 400) ** 2 + 1200**2 / 12)
    assert found.days_std(30) * 86_400 == pytest.approx(math.sqrt(30 * 86_400 / 36_000 * found.second_moment))
    # one node is in repair a tenth as long as between failures: 1 - B(1, .1) = 1 / 1.1, B(2, .1) = 0.05 / 11.05; waits are
    # exponential, of an hour or half of it, and per failure there are those that fill the blocked share
    for spares, blocked, wait in ((0, 0.1 / 1.1, 3600), (1, 0.005 / 1.105, 1800)):
        spared = goodput(Failures(100, restart=400, spares=spares, repair=1), 10, PER_NODE, Checkpoints(200, 500, 1000))
        waits = blocked / (1 - blocked) * 36_000 / wait * (2 * wait**2)
        assert spared.second_moment == pytest.approx(found.second_moment + waits)


@pytest.mark.parametrize(("zero", "each"), [(1, 2 + 4 + 8), (3, 4 + 8)])
def test_the_size_of_a_checkpoint_by_hand(zero: int, each: int) -> None:
    """Weights of 16 bits beside an fp32 master copy and two moments; under ZeRO-3 the shards are the master weights."""
    parser = argparse.ArgumentParser()
    add_interruption_arguments(parser)
    solutions = tiny("generic", 8, run={"precision": "bf16"}, dp=8, zero=zero, zero_shard_size=8)
    args = parser.parse_args(["--storage", "0.001", "--checkpoint_interval", "0.1"])
    weights = 2 * (36_864 + 2 * 64) + 64 + 2 * 256 * 64  # two layers with two norms each, the last norm, both embeddings
    assert goodput_of(args, solutions).share == pytest.approx(1 / (1 + weights * each / 1e6 / 6))


def test_the_interval_is_the_best_and_daly_s() -> None:
    failures, saved = Failures(mtbf_gpu=50_000, restart=600), Checkpoints(60, 60)
    found = goodput(failures, 4096, PER_NODE, saved)
    mean = 50_000 * 3600 / 4096
    daly = math.sqrt(2 * 60 * mean) * (1 + math.sqrt(60 / 2 / mean) / 3 + 60 / 2 / mean / 9) - 60  # his eq. 37
    assert found.interval == pytest.approx(daly, rel=0.01)
    for factor in (0.5, 0.8, 1.25, 2):
        other = goodput(failures, 4096, PER_NODE, Checkpoints(60, 60, factor * found.interval))
        assert other.share < found.share


def test_llama_3_s_effective_time() -> None:
    """419 unexpected interruptions in 54 days on 16,384 GPUs, more than 90% effective training time (arXiv 2407.21783, 3.3.4).

    405 B parameters; 2 TB/s of storage is their sustained throughput (3.3.1). What a restart took is not printed: below 15
    minutes the share is above 90%.
    """
    hours = 54 * 24 * 16_384 / 419
    assert hours == pytest.approx(50_700, rel=0.01)
    size = 405e9 * 14
    saved = checkpoints(size, 16_384, PER_NODE, storage=2e12)
    assert saved.stall == pytest.approx(2.8, rel=0.02)
    shares = [goodput(Failures(hours, restart=60 * minutes), 16_384, PER_NODE, saved).share for minutes in (5, 10, 15, 30)]
    assert shares[0] > shares[1] > shares[2] > 0.89 and shares[1] > 0.9 and shares[3] < 0.85


def test_erlang_s_formula_by_hand() -> None:
    """Nodes are in repair half as long as between failures: B(1, .5) = 1/3; B(2, .5) = 1/13."""
    mean = 7200.0
    assert Failures(repair=1.0).available(mean) == pytest.approx(2 / 3)
    assert Failures(repair=1.0, spares=1).available(mean) == pytest.approx(12 / 13)
    assert Failures(repair=0.0).available(mean) == 1.0


def test_rates_add() -> None:
    failures = Failures(mtbf_gpu=1000, mtbf_node=500, mtbf_link=2000)
    assert failures.mtbf(64, 8) == pytest.approx(3600 / (64 / 1000 + 8 / 500 + 64 / 2000))
    assert Failures().mtbf(64, 8) == math.inf


def test_who_writes_a_checkpoint() -> None:
    size = 1e12
    shared = checkpoints(size, 64, 8, storage=100e9, node=5e9)
    assert shared.stall == shared.write == pytest.approx(size / 40e9)  # eight nodes, below what storage takes
    assert checkpoints(size, 64, 8, storage=20e9, node=5e9).write == pytest.approx(size / 20e9)
    assert checkpoints(size, 64, 8, storage=100e9, node=5e9, one_writer=True).write == pytest.approx(size / 5e9)
    beside = checkpoints(size, 64, 8, storage=100e9, asynchronous=True, host_link=25e9)
    assert (beside.stall, beside.write) == pytest.approx((size / 64 / 25e9, size / 100e9))
    with pytest.raises(InputError, match="state host_link_gb_s in the cluster file"):
        checkpoints(size, 64, 8, storage=100e9, asynchronous=True)


@given(
    mtbf=st.floats(1e3, 1e6),
    restart=st.floats(10, 3600),
    write=st.floats(1, 600),
    gpus=st.sampled_from([8, 64, 1024, 8192]),
    spares=st.integers(0, 5),
    repair=st.floats(0, 48),
    pauses=st.floats(0, 0.2),
)
def test_laws(mtbf: float, restart: float, write: float, gpus: int, spares: int, repair: float, pauses: float) -> None:
    def share(**changed: float) -> float:
        v = {"mtbf": mtbf, "restart": restart, "write": write, "spares": spares, "repair": repair, "pauses": pauses, **changed}
        failures = Failures(v["mtbf"], restart=v["restart"], spares=int(v["spares"]), repair=v["repair"])
        try:
            found = goodput(failures, gpus, PER_NODE, Checkpoints(v["write"], v["write"]), v["pauses"])
        except InputError:
            return 0.0
        assert found.share + sum(found.parts.values()) == pytest.approx(1) and min(found.parts.values()) >= -1e-12
        assert 0 < found.share <= 1 and found.days_std(10) >= 0
        return found.share

    own, near = share(), 1 + 1e-6
    assert share(mtbf=2 * mtbf) * near >= own
    assert share(restart=2 * restart) <= own * near and share(write=2 * write) <= own * near
    assert share(spares=spares + 1) * near >= own and share(repair=repair + 1) <= own * near
    assert share(pauses=pauses + 0.1) <= own * near
    beside = goodput(Failures(), gpus, PER_NODE, Checkpoints(write, write, 3600.0), pauses)
    assert beside.share == pytest.approx(1 / (1 + pauses + write / 3600))


def test_a_job_that_hardly_trains_is_refused() -> None:
    with pytest.raises(InputError, match="8192 GPUs fail every 26.4 s: with a restart of 90 min and checkpoints of 60 s less"):
        goodput(Failures(mtbf_gpu=60, restart=5400), 8192, PER_NODE, Checkpoints(60, 60))


WORDS = ["plan", "--model_size", "llama3_8b", "--tokens", "1e13", "--min_gpus", "256", "--max_gpus", "512", "--days", "40"]
WORDS += ["--fix", "tp=2,cp=1"]


def test_the_command_counts_interruptions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, out = tmp_path / "plain.json", tmp_path / "out.json"
    more = ["--mtbf", "50700", "--storage", "20", "--restart", "15", "--evaluation", "60/1000", "--repair", "24"]
    more += ["--spares", "1"]
    assert main([*WORDS, "--json", str(plain)]) == main([*WORDS, *more, "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "(--mtbf counts them)" in shown and "interrupted every" in shown
    for before, after in zip(json.loads(plain.read_text())["plan"], json.loads(out.read_text())["plan"], strict=True):
        found = after["goodput"]
        assert before["goodput"] is None and found["share"] + sum(found["lost"].values()) == pytest.approx(1)
        assert after["days"] == pytest.approx(before["days"] / found["share"]) and 0.85 < found["share"] < 0.999
        assert found["seconds_between_failures"] == pytest.approx(50_700 * 3600 / after["world_size"])
        low, high = after["days_interval"]
        assert (high / low) >= before["days_interval"][1] / before["days_interval"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--mtbf 0", "--mtbf is 0.0; it must be a positive number"),
        ("--mtbf 1000", "give --storage, what it writes in GB/s, with --mtbf"),
        ("--restart 5", "--restart needs --mtbf or --mtbf_node or --mtbf_link"),
        ("--mtbf 1000 --storage 5 --spares 2", "--spares needs --repair"),
        ("--one_writer --storage 5", "--one_writer needs --node_storage"),
        (
            "--storage 5",
            "--storage needs --mtbf or --mtbf_node or --mtbf_link or --checkpoint_interval; give one",
        ),
        ("--evaluation 60", "--evaluation is 60; it must be SECONDS/STEPS, as in 60/1000"),
        ("--evaluation 60/0", "--evaluation is 60/0; it must be"),
        ("--spares -1", "--spares is -1"),
        ("--mtbf 1000 --storage 5 --async_checkpoints", "state host_link_gb_s in the cluster file"),
    ],
)
def test_wrong_options(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *options.split()]) == 2
    assert message in capsys.readouterr().err
