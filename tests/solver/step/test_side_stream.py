"""Collectives and copies overlapped with compute: overlapped and exposed time, and rank skew of a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import DEVICE, LINK, NETWORK, TINY, make_problem, toy_cost

from predictor.cost_model import CostModel
from predictor.network.overlap import ON_HOPPER, Contention
from predictor.network.rank_skew import rank_skew_seconds
from profiler.profile.profile import Profile, Table
from profiler.profile.profiles import find_profile
from solver.step.ddp_buckets import bucket_sizes, ddp_buckets
from solver.step.layouts import Layouts
from solver.step.message_counts import buckets
from solver.step.side_stream import SideStreamWork

#: Medians of SimuMax's constants for 8 B200 over NCCL's tests on the same GPUs: 7 us on 2 ranks, 18 on 4 and 53 on 8.
PER_RANK = 7e-6


def side(communication: float, contention: float, kernels: float) -> SideStreamWork:
    return SideStreamWork(*(np.array([x]) for x in (communication, contention, kernels)))


def test_copies_are_never_overlapped_and_contention_counts_for_overlapped_time() -> None:
    work = side(4.0, 0.4, 2.0)
    assert work.exposed[0] == 6.0
    assert work.overlapped_with(np.array([10.0]))[0] == pytest.approx(2.0 + 0.4, rel=1e-12)
    assert work.overlapped_with(np.array([1.0]))[0] == pytest.approx(2.0 + 3.0 + 0.1, rel=1e-12)
    # a quarter stays exposed, however much compute there is
    assert work.overlapped_with(np.array([10.0]), exposed_share=0.25)[0] == pytest.approx(2.0 + 1.0 + 0.3, rel=1e-12)
    assert (work + side(1.0, 0.1, 0.5)).exposed[0] == 7.5


seconds = st.floats(0.0, 10.0)


@given(seconds, st.floats(0.0, 1.0), seconds, seconds, seconds)
def test_more_compute_never_exposes_more(
    communication: float, rate: float, kernels: float, compute: float, more: float
) -> None:
    work = side(communication, communication * rate, kernels)
    less, longer = (work.overlapped_with(np.array([c]))[0] for c in (compute, compute + more))
    assert kernels - 1e-12 <= longer <= less + 1e-12 <= work.exposed[0] + 2e-12


def test_contention_on_a_slow_network_is_that_inside_a_node() -> None:
    # contention is 0.1 s per second of a collective inside a node, where a byte takes half as long as between nodes
    cost = toy_cost()
    inside = cost.network.contention_seconds("all_reduce", 1e6, 1, 1e6 * LINK)
    between = cost.network.contention_seconds("all_reduce", 1e6, 4, 1e6 * NETWORK)
    assert inside == between == pytest.approx(0.1 * 1e6 * LINK, rel=1e-12)


def test_on_hopper_a_second_between_nodes_costs_what_was_measured() -> None:
    cost = toy_cost(contention=ON_HOPPER)
    assert cost.network.contention_seconds("all_reduce", 1e6, np.array([1, 4]), 2.0) == pytest.approx([0.3, 0.25], rel=1e-12)


@given(st.floats(1e3, 1e10), st.integers(2, 512), st.floats(1.5, 50.0))
def test_contention_does_not_reward_a_slower_network(size: float, nodes: int, slower: float) -> None:
    fast = toy_cost()
    slow = fast.with_network(DEVICE.network_bandwidth / slower)
    delays = [
        c.network.contention_seconds("all_gather", size, nodes, c.network.collective("all_gather", size, 8, nodes).seconds)
        for c in (fast, slow)
    ]
    assert delays[1] >= delays[0] * (1 - 1e-12)


@given(st.floats(1e3, 1e10), st.floats(1.0, 3.0), st.floats(0.0, 1.0), st.floats(1.01, 5.0))
def test_a_slower_network_is_never_faster(size: float, contention: float, share: float, slower: float) -> None:
    # on a CPU a collective may delay the compute that it overlaps with by more than its own time
    fast = toy_cost(contention=Contention(contention))
    compute = np.array([share * fast.network.collective("all_reduce", size, 8, 4).seconds])
    times = []
    for cost in (fast, fast.with_network(DEVICE.network_bandwidth / slower)):
        exposed = np.array([cost.network.collective("all_reduce", size, 8, 4).seconds])
        delay = cost.network.contention_seconds("all_reduce", size, 4, exposed)
        times.append(SideStreamWork(exposed, delay, np.zeros(1)).overlapped_with(compute)[0])
    assert times[1] >= times[0] * (1 - 1e-12)


def test_nodes_of_one_accelerator_have_contention_too() -> None:
    cost = toy_cost(device=replace(DEVICE, gpus_per_node=1))
    assert cost.network.contention_seconds("all_reduce", 1e6, 2, 1.0) == pytest.approx(0.1, rel=1e-12)


def test_gradients_are_reduced_in_the_buckets_of_the_framework() -> None:
    elements = np.array([400e6, 1e6])

    def of(framework: str, elements: np.ndarray, world: int = 8, **constants: object) -> np.ndarray:
        problem = make_problem(TINY, world, toy_cost(), framework=framework, **constants)
        splits = Layouts.of([problem.layout()] * len(elements)).splits
        return buckets(problem, splits, elements, elements)

    # Megatron-Core: buckets of 40 million elements, or a million per data-parallel rank, of experts too; one without overlap
    np.testing.assert_allclose(of("megatron-core", elements), [10, 1])
    np.testing.assert_allclose(of("megatron-core", elements, 128), [3.125, 1])
    np.testing.assert_allclose(of("megatron-core", elements, overlap_grad_reduce=False), [1, 1])
    np.testing.assert_allclose(of("internevo", elements * 10), [4e9 / 2**29, 1])
    np.testing.assert_allclose(of("internevo", elements * 10, overlap_grad_reduce=False), [4e9 / 2**29, 1])
    np.testing.assert_allclose(of("aleph alpha", elements * 10), [8, 1])


def test_buckets_of_torchs_ddp_are_of_whole_tensors() -> None:
    # in reverse order; the first holds at least 1 MiB of 16 bits, each further one at least 25 MiB
    mebi = 2**19
    assert bucket_sizes([5 * mebi, 30 * mebi, 10 * mebi, 20 * mebi, 2 * mebi, 3]) == [
        2 * mebi + 3,
        30 * mebi,
        30 * mebi,
        5 * mebi,
    ]
    model = TINY.replace(
        hidden_size=1024, intermediate_size=4096, num_attention_heads=16, num_key_value_heads=16, head_dim=64, vocab_size=4096
    )
    problem = make_problem(model, 8, toy_cost(), framework="nanotron")
    splits = Layouts.of([problem.layout(tp=tp, pp=pp, dp=8 // tp // pp) for tp, pp in ((1, 1), (2, 1), (1, 2))]).splits
    # MiB of two layers: 0, 6, 2, 0, 16 and 8 each; table and head 8. From the end: 8; 8, 16 and 2; 6, 8 and 16; 2, 6 and 8
    assert ddp_buckets(model, problem.framework.kernels, splits).tolist() == [4, 3, 2]


def test_rank_skew_of_a_step(h100_model: CostModel) -> None:
    without_skew = h100_model.network.collectives.predict("all_gather", 2**20, 8, 1, h100_model.network.bandwidth).seconds
    assert h100_model.network.collective("all_gather", 2**20, 8, 1).seconds == pytest.approx(
        without_skew + 7 * PER_RANK, rel=1e-12
    )
    # a single rank has no skew; broadcasts and point-to-point sends are queued ahead
    assert h100_model.network.collective("all_gather", 2**20, 1, 1).seconds == 0
    for op in ("broadcast", "p2p"):
        without_skew = h100_model.network.collectives.predict(op, 2**20, 2, 1, h100_model.network.bandwidth).seconds
        assert h100_model.network.collective(op, 2**20, 2, 1).seconds == pytest.approx(without_skew, rel=1e-12)


def test_rank_skew_is_the_difference_of_two_tables_of_one_gpu(fitted: Callable[[str], CostModel]) -> None:
    tests, training = fitted("b200_sxm").network.collectives, find_profile("b200_sxm")[0].meta["laws"]["intra_node"]
    for ranks in (2, 4, 8):
        size = 2.0 ** np.arange(20, 27)
        differences = []
        for op in ("all_reduce", "all_gather", "reduce_scatter"):
            fit = training[op][ranks]
            step = fit["latency"] + size * fit["traffic"] / fit["bandwidth"]
            differences.append(step - tests.predict(op, size, ranks, 1).seconds)
        assert np.median(differences) / (ranks - 1) == pytest.approx(PER_RANK, rel=0.2)


@pytest.mark.parametrize(("source", "expected"), [("ai-dynamo/aiconfigurator:x", PER_RANK), ("measured here", 0.0)])
def test_only_loops_of_tests_lack_rank_skew(source: str, expected: float) -> None:
    columns = {"intra": [2], "inter": [1], "bytes": [1024], "seconds": [1e-5], "source": [source]}
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all2all"):
        assert rank_skew_seconds(Profile("toy", DEVICE, {op: Table.from_columns(op, columns)}, {})) == expected
    assert rank_skew_seconds(Profile("toy", DEVICE, {}, {})) == 0.0
