"""Collectives that torch checks before they start: what it costs, and from what it is inferred."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toy import LINK, NETWORK, TINY, make_problem, part, tiny, toy_cost

from predictor.network.stated_busbw import PROBE_BYTES
from solver.layers.program import Op, message
from solver.report.explain import explain
from solver.spec.cluster import placement
from solver.step.collective_checks import CHECKS_INFERRED, check_seconds, with_checks
from solver.step.op_estimates import STREAMS, estimate_ops
from solver.step.problem import Problem

NEAR, FAR = 0.2e-3, 0.3e-3  #: seconds for a rank in the first node of a group, and in another


def collective(kind: str, ranks: int, stride: int = 1, name: str = "x", count: float = 1.0) -> Op:
    place = placement(np.array([ranks]), stride, 8)
    return Op(name, "data parallel", kind, "step", message(np.array([1e6]), place), "dp", count=count)


@pytest.mark.parametrize(
    ("kind", "ranks", "stride", "expected"),
    [
        ("all_gather", 2, 1, 2 * NEAR),
        ("all_reduce", 8, 1, 8 * NEAR),
        ("reduce_scatter", 16, 1, 8 * NEAR + 8 * FAR),
        ("all2all", 4, 8, NEAR + 3 * FAR),
        ("all_reduce", 1, 1, 0.0),
        ("p2p", 2, 1, 0.0),  # sends are not checked
    ],
)
def test_a_check_by_hand(kind: str, ranks: int, stride: int, expected: float) -> None:
    assert float(np.ravel(check_seconds(collective(kind, ranks, stride)))[0]) == pytest.approx(expected, rel=1e-12)


def test_buckets_are_larger_than_stated_by_half_a_tensor() -> None:
    # 30 buckets' worth of 15 equal tensors, each twice a bucket: a bucket of one and a half of what was meant, so 15; of many
    # small tensors 30. Others are checked as often as they run
    ops = [
        collective("all_reduce", 8, 1, "gradients.all_reduce", 30.0),
        collective("all_gather", 8, 1, "parameters.all_gather", 3.0),
    ]
    found = estimate_ops(ops, 1, toy_cost())
    assert np.ravel(with_checks(found, 15.0).checks) == pytest.approx([15 * 8 * NEAR, 3 * 8 * NEAR])
    assert np.ravel(with_checks(found).checks) == pytest.approx([30 * 8 * NEAR, 3 * 8 * NEAR])


@pytest.mark.parametrize("framework", ["nanotron", "megatron-core", "fsdp"])
def test_checks_cost_time_and_are_in_the_explanation(framework: str) -> None:
    zero = 3 if framework == "fsdp" else 1
    plain, checked = (
        tiny(framework, 16, run={"collective_checks": on}, zero=zero, zero_shard_size=16, num_micro_batches=2)
        for on in (None, True)
    )
    assert checked.times.seconds[0] > plain.times.seconds[0] + 2 * (8 * NEAR + 8 * FAR)
    why = explain(checked, 0)
    assert sum(line.seconds for line in why.lines) == pytest.approx(checked.times.seconds[0], rel=1e-9)


def test_the_host_checks_the_collectives_of_a_tensor_group() -> None:
    # tp 2 in a node: four collectives forward and six backward, whose checks of 0.4 ms outlast everything of a tiny layer
    found = tiny("nanotron", 2, run={"cuda_graphs": True, "collective_checks": True}, tp=2, tp_mode="msp", zero=0, dp=1)
    terms = found.terms
    assert [float(way[0].sum()) for way in (terms.layers.forward, terms.layers.backward)] == pytest.approx(
        [4 * 0.4e-3, 6 * 0.4e-3], rel=1e-9
    )
    assert terms.layers.forward[0, STREAMS.index("tp"), 0] < 1e-6 and part(found, "gradient_sync")[0] == 0


def stated(framework: str, world: int, late_inside: float, late: float, **run: Any) -> Problem:
    """Return a problem whose cluster states all-reduces that were late by these seconds."""
    plain = make_problem(TINY, world, toy_cost(), 4096, framework=framework, **run)
    bus = 2 * (np.array([8, world]) - 1) / np.array([8, world]) * PROBE_BYTES
    inside, everywhere = bus / (PROBE_BYTES * np.array([LINK, NETWORK]) + [late_inside, late])
    cluster = replace(plain.cluster, all_reduce_busbw=float(everywhere), all_reduce_busbw_in_node=float(inside))
    return replace(plain, cluster=cluster)


@pytest.mark.parametrize(
    ("framework", "late_inside", "late", "checked"),
    [
        ("nanotron", 1.6e-3, 4.0e-3, True),  # 8 near ranks; and 8 far ones
        ("nanotron", 0.9e-3, 2.1e-3, True),
        ("nanotron", 0.7e-3, 4.0e-3, False),  # less than half a check
        ("nanotron", 0.0, 1.0, False),  # a slow network
        ("nanotron", 1.6e-3, 0.0, False),
        ("megatron-core", 1.6e-3, 4.0e-3, False),  # whose scripts do not turn them on
    ],
)
def test_late_all_reduces_tell_that_they_are_checked(framework: str, late_inside: float, late: float, checked: bool) -> None:
    found = stated(framework, 16, late_inside, late)
    assert found.checks_collectives is checked
    assert (CHECKS_INFERRED in found.inferred_network) is checked


def test_a_job_on_more_gpus_keeps_what_its_all_reduces_told() -> None:
    # 2.1 ms is more than half a check of 16 ranks on two nodes (2 ms), and less than half of one of 64 on eight (9.2 ms)
    assert stated("nanotron", 16, 1.6e-3, 2.1e-3).for_world(64).checks_collectives
    assert not stated("nanotron", 16, 0.0, 1.0).for_world(64).checks_collectives
    assert not stated("nanotron", 16, 1.6e-3, 4e-3, collective_checks=False).for_world(64).checks_collectives


def test_what_a_run_states_comes_first() -> None:
    assert not stated("nanotron", 16, 1.6e-3, 4e-3, collective_checks=False).checks_collectives
    found = stated("megatron-core", 16, 0.0, 0.0, collective_checks=True)
    assert found.checks_collectives and CHECKS_INFERRED not in found.inferred_network
