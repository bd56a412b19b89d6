"""The head's weight gradients after the passes of the last stage: seconds and bytes by hand, the event simulation, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import TINY, all_layouts, make_problem, toy_cost

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.report.explain import explain
from solver.report.timeline import step_timeline
from solver.schedule.event_simulation import simulate
from solver.search.search import search
from solver.spec.feasibility import check_layout
from solver.step.deferred_head import with_deferred
from solver.step.layouts import Layouts
from solver.step.memory import MEMORY_PARTS
from solver.step.per_stage import memory_of_stages, time_of_stages
from solver.step.problem import Problem
from solver.step.solutions import Solutions, estimate_layouts

WIDE = TINY.replace(vocab_size=4096, num_hidden_layers=4)  # the head takes as long as many layers


@pytest.fixture(autouse=True)
def prompt_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages cost nothing beyond their transfer: the toy's passes are far shorter than what a host takes to go on."""
    monkeypatch.setattr("solver.step.host.RESTART_LAUNCHES", 0)


def problem(**constants: Any) -> Problem:
    return make_problem(WIDE, 4, toy_cost(), 512, framework="megatron-core", p2p_overlap=False, cuda_graphs=True, **constants)


def estimated(m: int = 8, pp: int = 4, **constants: Any) -> Solutions:
    one = problem(**constants)
    return estimate_layouts(one, Layouts.of([one.layout(pp=pp, dp=4 // pp, num_micro_batches=m)]))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 12), st.floats(0.1, 3), st.floats(0, 4), st.floats(0, 2))
def test_the_closed_form_is_that_of_the_event_simulation(
    stages: int, m: int, backward: float, head: float, deferred: float
) -> None:
    # equal stages; the last also has a head, of which ``deferred`` a micro batch waits
    forward, back = np.ones(stages), np.full(stages, backward)
    forward[-1] += head
    line = simulate("1f1b", forward, back, m)
    last = line.end[line.stage == stages - 1].max()
    drains = backward * (stages - 1)
    assert last == pytest.approx(line.makespan - drains)
    exact = max(line.makespan, last + m * deferred)
    found = with_deferred(np.array([line.makespan]), np.array([m * deferred]), np.array([drains]))
    assert found[0] == pytest.approx(exact)


def test_seconds_and_bytes_by_hand() -> None:
    at_once, later = estimated(), estimated(defer_embedding_wgrad_compute=True)
    grad = float(at_once.terms.ends.head_weight_grad[0])
    assert grad == pytest.approx(2 * 512 * 64 * 4096 * 1e-15)  # a GEMM of 512 tokens
    before, after = float(at_once.times.seconds[0]), float(later.times.seconds[0])
    # the last stage, which all wait for, is faster by a gradient in each of 8 micro batches; then it computes them all, and
    # the backward passes of three stages run meanwhile
    layer = at_once.table.layer.times
    drains = 3 * float(layer.backward.sum(axis=0)[0])
    stragglers = before / (before - float(at_once.times.after[-1, 0]))
    assert before - after == pytest.approx(stragglers * min(8 * grad, drains), rel=1e-6) and after < before
    # inputs (64 values) and gradients of outputs (4096) of 512 tokens, 2 bytes each, of 8 micro batches
    loss = MEMORY_PARTS.index("loss")
    more = memory_of_stages(later, 0).parts[:, -1] - memory_of_stages(at_once, 0).parts[:, -1]
    assert more.sum() == pytest.approx(8 * 512 * (64 + 4096) * 2) and more[loss] == more.sum()
    few = estimated(defer_embedding_wgrad_compute=True, wgrad_deferral_limit=2)
    assert before > float(few.times.seconds[0]) > after
    assert memory_of_stages(few, 0).parts[loss, -1] - memory_of_stages(at_once, 0).parts[loss, -1] == pytest.approx(
        2 * 512 * (64 + 4096) * 2
    )
    for found in (later, few):
        np.testing.assert_allclose(found.times.parts.sum(axis=0), found.times.seconds, rtol=1e-12)
        np.testing.assert_allclose(time_of_stages(found, 0).sum(axis=0), found.times.seconds[0], rtol=1e-12)
        assert (time_of_stages(found, 0) >= -1e-15).all()


def test_the_step_is_explained_and_drawn() -> None:
    for constants in ({}, {"wgrad_deferral_limit": 3}):
        found = estimated(defer_embedding_wgrad_compute=True, **constants)
        lines = explain(found, 0).lines
        assert sum(line.seconds for line in lines) == pytest.approx(float(found.times.seconds[0]), rel=1e-9)
        drawn = step_timeline(found, 0)
        waiting = (drawn.line.kind == "W").sum()
        assert waiting == constants.get("wgrad_deferral_limit", 8)
        assert drawn.seconds == pytest.approx(drawn.predicted, rel=0.02)
        last = drawn.line.stage == 3
        assert (np.diff(drawn.line.start[last]) > 0).all() and drawn.line.kind[last][-1] == "W"


def test_what_hides_gradients_is_the_drain_of_the_other_stages(h100_model: CostModel) -> None:
    # two dense layers on the first stage; two with experts on the last, whose own backward passes hide nothing
    model = TINY.replace(
        hidden_size=1024,
        num_hidden_layers=4,
        vocab_size=128_000,
        first_k_dense_replace=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
    )
    at_once, later = (
        make_problem(
            model,
            2,
            h100_model,
            4096,
            framework="megatron-core",
            p2p_overlap=False,
            cuda_graphs=True,
            defer_embedding_wgrad_compute=defers,
        )
        for defers in (False, True)
    )
    layout = Layouts.of([at_once.layout(pp=2, dp=1, num_micro_batches=8)])
    before, after = (estimate_layouts(one, layout) for one in (at_once, later))
    dense = 2 * float(before.table.layers[0].times.backward.sum(axis=0)[0])
    grad = float(before.terms.ends.projection_weight_grad[0])
    assert 8 * grad > dense
    saved = float(before.times.seconds[0] - after.times.seconds[0])
    stragglers = float(before.times.seconds[0] / (before.times.seconds[0] - before.times.after[-1, 0]))
    assert saved == pytest.approx(stragglers * dense, rel=1e-6)
    assert (after.times.parts >= -1e-12 * after.times.seconds).all()


def test_it_never_costs_time_and_never_saves_memory() -> None:
    one, other = problem(), problem(defer_embedding_wgrad_compute=True)
    layouts = all_layouts(other, 16)
    assert (layouts.splits.pp > 1).all()
    plain, deferred = estimate_layouts(one, layouts), estimate_layouts(other, layouts)
    assert (deferred.times.seconds <= plain.times.seconds * (1 + 1e-12)).all()
    assert (deferred.memory.allocated >= plain.memory.allocated).all()
    found = search(other, 16)
    fits = deferred.memory.device <= other.cluster.memory_bytes
    assert found.best.times.seconds[0] == pytest.approx(deferred.times.seconds[fits].min(), rel=1e-12)


@pytest.mark.parametrize(
    ("constants", "layout", "reason"),
    [
        ({}, {"pp": 1, "dp": 4}, "fills a pipeline of schedule 1f1b"),
        ({"gradient_accumulation_fusion": False}, {"pp": 4, "dp": 1}, "needs gradient_accumulation_fusion"),
        ({"framework": "deepspeed"}, {"pp": 4, "dp": 1}, "does not offer defer_embedding_wgrad_compute"),
    ],
)
def test_refused(constants: dict[str, Any], layout: dict[str, int], reason: str) -> None:
    one = make_problem(
        WIDE, 4, toy_cost(), 512, **{"framework": "megatron-core", "defer_embedding_wgrad_compute": True, **constants}
    )
    with pytest.raises(InputError, match=reason):
        check_layout(WIDE, one.cluster, one.layout(**layout))


def test_behind_interleaved_stages_one_chunk_of_each_drains() -> None:
    # two stages of two chunks of a layer: from the last stage's last pass to the first stage's it takes a chunk's backward pass
    run = {"framework": "megatron-core", "p2p_overlap": False, "cuda_graphs": True}
    seconds = {}
    for later in (False, True):
        one = make_problem(WIDE, 2, toy_cost(), 512, **run, defer_embedding_wgrad_compute=later)
        seconds[later] = estimate_layouts(one, Layouts.of([one.layout(pp=2, vpp=2, dp=1, num_micro_batches=8)]))
    before, after = (float(found.times.seconds[0] - found.times.after[-1, 0]) for found in seconds.values())
    drains = float(seconds[False].table.layer.times.backward.sum(axis=0)[0])
    assert drains < 8 * float(seconds[False].terms.ends.head_weight_grad[0])
    assert before - after == pytest.approx(drains, rel=1e-9)
