"""A measured job beside its prediction, and what other settings would change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from toy import LINK, NETWORK, estimated, make_problem, toy_cost

from predictor.cost_model import CostModel
from predictor.estimate import Z90
from predictor.network.stated_busbw import PROBE_BYTES
from profiler.errors import InputError
from solver.formats.logs.step_log import Collectives, Observation
from solver.report.explain import explain
from solver.report.health import as_measured, health
from solver.report.other_settings import LEAST, other_settings
from solver.report.words import seconds
from solver.spec.model import ModelSpec
from solver.step.solutions import Solutions, estimate_layouts

MODEL = ModelSpec(
    name="1B",
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    vocab_size=32000,
)


@pytest.fixture(scope="module")
def solutions() -> Solutions:
    problem = make_problem(MODEL, 16, toy_cost(), framework="megatron-core", grad_dtype="fp32")
    return estimated(problem, [problem.layout(dp=8, tp=2, tp_mode="msp", num_micro_batches=4)])


def texts(solutions: Solutions, observed: Observation) -> dict[str, str]:
    """Return the findings, text -> verdict."""
    return {finding.text: finding.verdict for finding in health(solutions, 0, observed)}


def test_a_step_as_predicted_is_one_finding(solutions: Solutions) -> None:
    why = explain(solutions, 0)
    ((text, verdict),) = texts(solutions, Observation(np.array([why.seconds * 1.01]))).items()
    assert verdict == "as predicted" and text.startswith("a step takes")


def test_first_steps_of_a_job_are_named_where_they_count(solutions: Solutions) -> None:
    why = explain(solutions, 0)
    found = texts(solutions, Observation(np.array([why.seconds]), warm_up=True))
    assert (
        found["its first steps count too, since it shows no 10 of them: they wait for compilation, data and communicators"]
        == "note"
    )


def test_a_log_whose_own_flops_are_of_another_job(solutions: Solutions) -> None:
    step = float(solutions.times.seconds[0])
    ours = float(solutions.flops_per_second[0])
    for factor, other in ((1.0, False), (1.7, False), (0.6, False), (15.0, True), (0.1, True)):
        found = texts(solutions, Observation(np.full(10, step), flops=factor * ours))
        assert any("may be the log of another job" in text for text in found) == other
    assert len(health(solutions, 0, Observation(np.full(10, step)))) == 1


def test_what_alone_would_explain_a_slow_step(solutions: Solutions) -> None:
    why = explain(solutions, 0)
    found = texts(solutions, Observation(np.array([2 * why.seconds])))
    assert next(iter(found.values())) == "worse"
    compute = why.by_part()["compute"]
    assert found[f"compute alone would explain it at {1 + why.seconds / compute:.2g} times its predicted time"] == "note"


def test_a_setting_that_would_explain_it(solutions: Solutions) -> None:
    slow = max(other_settings(solutions, 0), key=lambda setting: setting.seconds)
    found = texts(solutions, Observation(np.array([slow.seconds])))
    assert any(text.startswith(f"the measured step would match if {slow.text}: ") for text in found)
    assert texts(solutions, Observation(np.array([explain(solutions, 0).interval[0] / 2])))  # faster: nothing to explain


def test_other_settings_are_estimates_of_the_changed_run(solutions: Solutions) -> None:
    found = {setting.text: setting.seconds for setting in other_settings(solutions, 0)}
    now = solutions.times.seconds[0]
    assert all(abs(value / now - 1) >= LEAST for value in found.values())
    changed = solutions.layouts.strategy(0, solutions.problem.run).replace(recompute="full")
    again = estimated(solutions.problem, [changed]).times.seconds[0]
    assert found["all layers are recomputed"] == again > now
    offs = [abs(np.log(value / now)) for value in found.values()]
    assert offs == sorted(offs, reverse=True)


def test_a_network_that_is_a_tenth_of_what_it_should_be(solutions: Solutions) -> None:
    # the toy network takes a buffer times NETWORK seconds a byte: a bus bandwidth of 2 * 15 / 16 / NETWORK
    nominal = 2 * 15 / 16 / NETWORK
    slow, sound = (texts(solutions, Observation(np.empty(0), busbw=nominal * share)) for share in (0.1, 0.9))
    text, verdict = next(iter(slow.items()))
    assert verdict == "worse" and text.endswith("10 times slower") and "2 nodes of 8 GPUs" in text
    assert f"reaches {nominal / 10 / 1e9:.3g} GB/s" in text and f"{nominal / 1e9:.3g} are predicted" in text
    assert list(sound.values()) == ["as predicted", "note"]


def without_skew(cost: CostModel) -> CostModel:
    """Return a cost model whose ranks wait for none of their node."""
    return replace(cost, network=replace(cost.network, rank_skew=0.0))


def test_links_of_a_derived_device_are_as_uncertain_as_its_collectives(fitted: Callable[[str], CostModel]) -> None:
    cost = fitted("mi300x")
    estimate = cost.network.collective("all_reduce", np.array([float(PROBE_BYTES)]), 8, 1)
    problem = make_problem(MODEL, 8, without_skew(cost), framework="megatron-core", grad_dtype="fp32")
    found = estimated(problem, [problem.layout(dp=8, num_micro_batches=4)])
    within = math.exp(Z90 * float(estimate.relative_std[0]))
    assert within > 1.5, "no such device was measured"
    predicted = float(without_skew(cost).network.collective("all_reduce", float(PROBE_BYTES), 8, 1).seconds)
    for factor, verdict in ((0.95 * within, "as predicted"), (1.05 * within, "worse")):
        busbw = 2 * 7 / 8 * PROBE_BYTES / (predicted * factor)
        assert next(iter(texts(found, Observation(np.empty(0), busbw_in_node=busbw)).values())) == verdict


def test_the_step_on_links_as_measured(solutions: Solutions) -> None:
    why, busbw = explain(solutions, 0), 0.5 * 2 * 7 / 8 / LINK
    found = texts(solutions, Observation(np.array([why.seconds]), busbw_in_node=busbw))
    cost = solutions.problem.cost
    cost = replace(cost, network=cost.network.with_stated_busbw(16, 8, None, busbw))
    problem = make_problem(MODEL, 16, cost, framework="megatron-core", grad_dtype="fp32")
    slower = estimate_layouts(problem, solutions.layouts).times.seconds[0]
    assert slower > why.seconds
    note = f"on links as fast as measured a step is predicted to take {seconds(slower)}, "
    assert f"{note}more than the measured one: the links were slower when they were measured than while the job ran" in found
    for factor, agrees in (
        (1.0, "whose uncertainty covers the measured one"),
        (2.0, "less than the measured one: something else is slow too"),
    ):
        assert note + agrees in texts(solutions, Observation(np.array([slower * factor]), busbw_in_node=busbw))


def test_all_reduces_that_are_late_in_a_node_too(solutions: Solutions) -> None:
    # a check of 8 ranks takes 1.6 ms, of 16 on two nodes 4.0: late by that in both, or only between nodes
    taken = PROBE_BYTES * np.array([LINK, NETWORK])
    bus = 2 * np.array([7 / 8, 15 / 16]) * PROBE_BYTES
    for late, hinted in (((1.6e-3, 4.0e-3), True), ((0.0, 1.0), False), ((1.6e-3, 0.0), False)):
        inside, everywhere = bus / (taken + late)
        found = texts(solutions, Observation(np.empty(0), busbw=float(everywhere), busbw_in_node=float(inside)))
        assert any("TORCH_DISTRIBUTED_DEBUG" in text for text in found) is hinted


def test_checked_all_reduces_say_nothing_of_the_links() -> None:
    problem = make_problem(MODEL, 16, toy_cost(), framework="megatron-core", grad_dtype="fp32", collective_checks=True)
    checked = estimated(problem, [problem.layout(dp=8, tp=2, tp_mode="msp", num_micro_batches=4)])
    observed = Observation(np.empty(0), busbw=0.1 * 2 * 15 / 16 / NETWORK, busbw_in_node=0.5 * 2 * 7 / 8 / LINK)
    assert as_measured(problem, observed) is problem
    assert not any("links as fast as measured" in text for text in texts(checked, observed))


def test_an_all_reduce_that_no_link_carries_is_refused(solutions: Solutions) -> None:
    with pytest.raises(InputError, match="all_reduce_busbw_in_node_gb_s is 9999, more than the links of"):
        health(solutions, 0, Observation(np.empty(0), busbw_in_node=9999e9))


def test_collectives_of_small_messages_are_compared_by_time(solutions: Solutions) -> None:
    size = np.array([1024.0, 65536.0])
    measured = Collectives("all_gather", 8, 1, size, 3 * size * LINK)
    ((text, verdict),) = texts(solutions, Observation(np.empty(0), collectives=(measured,))).items()
    assert verdict == "worse" and text.endswith("3 times slower") and "are predicted" in text


def test_uneven_and_drifting_steps(solutions: Solutions) -> None:
    usual = explain(solutions, 0).seconds
    uneven = np.full(40, usual)
    uneven[::10] *= 1.5
    said = "4 of 40 steps take 1.5 times the median, and the mean is 5% above it"
    assert any(said in text for text in texts(solutions, Observation(uneven)))
    drifting = np.r_[np.full(20, usual), np.full(20, usual * 1.05)]
    assert any("is 5% slower than the first" in text for text in texts(solutions, Observation(drifting)))
    rising = texts(solutions, Observation(usual * np.linspace(0.8, 1.3, 55)))
    assert any("slower than the first" in text for text in rising) and not any("a rank that stalls" in text for text in rising)
    assert len(texts(solutions, Observation(np.full(40, usual)))) == 1


def test_memory(solutions: Solutions) -> None:
    reserved = float(solutions.memory.reserved[0])
    for factor, verdict in ((1.05, "as predicted"), (1.2, "worse"), (0.8, "better")):
        found = texts(solutions, Observation(np.empty(0), peak_memory=reserved * factor, memory_kind="reserved"))
        assert list(found.values()) == [verdict]


def test_memory_in_another_unit_is_refused(solutions: Solutions) -> None:
    mebibytes = Observation(np.array([]), peak_memory=70_000 * 2.0**30, memory_kind="device")
    with pytest.raises(InputError, match=r"a peak of 70,000.0 GiB was measured, but a GPU has 80.0: give it in GiB"):
        health(solutions, 0, mebibytes)


def test_a_step_that_no_gpu_could_take_is_refused(solutions: Solutions) -> None:
    # at its peak of 1e15 FLOP/s a GPU would take the share mfu of the predicted step
    least = float(solutions.mfu[0] * solutions.times.seconds[0])
    assert texts(solutions, Observation(np.array([least * 1.01])))
    with pytest.raises(InputError, match="would take 101% of the GPUs' peak FLOP/s: its batch, its GPUs or its seconds"):
        health(solutions, 0, Observation(np.array([least / 1.01])))
