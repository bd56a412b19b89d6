"""What no kernel explains, by what is not known of a run; and the wait for the slowest rank, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from toy import TINY, estimated, make_problem, part, tiny, toy_cost, toy_layout

from profiler.profile.profiles import find_profile
from solver.api import machine
from solver.report.explain import explain
from solver.report.other_settings import other_settings
from solver.report.uncertainty import network_std, system_std, uncertainties
from solver.spec.cluster import cluster_of
from solver.step.stragglers import SPEED_STD, straggler_share


def test_uncertainties_add_up_as_independent_ones() -> None:
    problem = make_problem(TINY, 32, toy_cost(), 32_768, framework="megatron-core", launch_blocking=True)
    layout = problem.layout(tp=16, tp_mode="msp", dp=2)
    assert dict(uncertainties(problem, layout)) == {
        "what megatron-core-0.12 does": 0.05,
        "sequences above 16,384 tokens": 0.15,
        "a tensor group that spans nodes": 0.35,
        "blocking launches": 0.10,
    }
    assert system_std(problem, layout) == pytest.approx(math.sqrt(0.05**2 + 0.15**2 + 0.35**2 + 0.10**2))


def test_uncertainty_grows_with_the_ranks() -> None:
    found = []
    for world in (8, 64, 512, 4096):  # half of what waiting for the slowest rank adds is uncertain
        why = explain(tiny("megatron-core", world), 0)
        waiting = [line for line in why.lines if line.kind == "stragglers"]
        assert [line.relative_std for line in waiting] == [0.5] * (world > 8)
        found.append(sum(line.seconds * line.relative_std for line in waiting) / why.seconds)
    # 0.020 (sqrt(2 log 4096) - sqrt(2 log 8)) = 0.0408 of the step without it, and half of that
    assert found == sorted(found) and found[0] == 0 and found[-1] == pytest.approx(0.0408 / 1.0408 / 2, rel=1e-3)


@pytest.mark.parametrize(("framework", "std"), [("megatron-core", 0.05), ("megatron-deepspeed", 0.09), ("no such one", 0.12)])
def test_a_framework_that_is_known_less_is_less_certain(framework: str, std: float) -> None:
    problem = make_problem(TINY, 8, toy_cost(), 64, framework=framework)
    assert dict(uncertainties(problem, problem.layout())) == {f"what {problem.framework.name} does": std}


def test_every_rank_waits_for_the_slowest() -> None:
    # sqrt(2 log 8) = 2.039, sqrt(2 log 2048) = 3.905
    assert straggler_share(2048, 8) == pytest.approx(SPEED_STD * (3.9050 - 2.0393), rel=1e-4)
    assert straggler_share(8, 8) == straggler_share(4, 8) == straggler_share(1, 1) == 0
    shares = [straggler_share(8 << k, 8) for k in range(12)]
    assert shares == sorted(shares) and shares[-1] < 0.07
    found = tiny("megatron-core", 64)
    alone = found.times.seconds[0] / (1 + straggler_share(64, 8))
    assert part(found, "stragglers")[0] == pytest.approx(found.times.seconds[0] - alone, rel=1e-9)
    assert alone < found.times.seconds[0]
    lines = {line.name: line.seconds for line in explain(found, 0).lines}
    assert lines["waiting for the slowest rank"] == pytest.approx(part(found, "stragglers")[0])


def test_a_network_that_nobody_stated_adds_what_slower_ones_would_cost() -> None:
    solutions = {}
    for name, world, usual in (("usual", 64, True), ("stated", 64, False), ("one node", 8, True)):
        cluster = replace(cluster_of(toy_cost().device), usual_network=usual, network_bandwidth=2e9)
        cost = toy_cost().with_network(cluster.network_bandwidth)
        solutions[name] = estimated(make_problem(TINY, world, cost, cluster=cluster), [toy_layout(world)])
    usual = solutions["usual"]
    seconds, (half, quarter) = float(usual.times.seconds[0]), usual.on_slower_networks[:, 0]
    for share, slower in ((1.0, seconds), (0.5, half), (0.25, quarter)):
        cost = usual.problem.cost.with_network(2e9 * share)
        again = estimated(replace(usual.problem, cost=cost), [toy_layout(64)])
        assert again.times.seconds[0] == pytest.approx(slower, rel=1e-12)
    assert seconds < half < quarter
    # times as likely as the usual one: exp(-log(slower) / 0.1); the mean square about the usual one
    off = np.log(np.array([half, quarter]) / seconds)
    likely = np.exp(-10 * off)
    added = math.sqrt((likely * off**2).sum() / (1 + likely.sum()))
    assert network_std(usual, 0) == pytest.approx(added, rel=1e-12) and added > 0.002
    with_it, without = (explain(solutions[name], 0).system_std for name in ("usual", "stated"))
    assert with_it == pytest.approx(math.hypot(without, added), rel=1e-12)
    assert all(network_std(solutions[name], 0) == 0.0 for name in ("stated", "one node"))
    words = "the network, which is not stated, has 0.5 of the usual bandwidth"
    said = {name: {each.text: each.seconds for each in other_settings(solutions[name], 0)} for name in ("usual", "stated")}
    assert said["usual"][words] == pytest.approx(half) and words not in said["stated"]


@pytest.mark.parametrize(
    ("keys", "usual"),
    [
        ({}, True),
        ({"gpus_per_node": 8}, True),
        ({"inter_node_gbit_per_gpu": 400}, False),
        ({"all_reduce_busbw_gb_s": 60}, False),
    ],
)
def test_which_networks_are_stated(keys: dict[str, float], usual: bool) -> None:
    assert machine(find_profile("h100_sxm")[0], keys, 64)[1].usual_network == usual
    own = replace(find_profile("h100_sxm")[0], name="data")  # a machine's own profile holds its own network
    assert not machine(own, keys, 64)[1].usual_network
