"""V-shaped schedules: orders as torch runs them, bubbles and memory as their papers have them, closed form and layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules
from toy import make_problem

from predictor.cost_model import CostModel
from profiler.errors import InputError
from solver.schedule.closed_forms import PipelineColumns, v_shaped_pipeline_seconds
from solver.schedule.critical_paths import v_shaped_in_flight, v_shaped_seconds
from solver.schedule.event_simulation import Timeline, simulate
from solver.schedule.kinds import BACKWARD, FORWARD, WEIGHT, WHOLE
from solver.schedule.stages import micro_batches_in_flight
from solver.schedule.v_shaped_orders import v_shaped_order
from solver.search.search import search
from solver.spec.choices import SCHEDULES, V_SHAPED
from solver.spec.feasibility import check_layout
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy
from solver.step.layouts import Layouts
from solver.step.memory import MEMORY_PARTS
from solver.step.per_stage import layers_of_stages, memory_of_stages, time_of_stages
from solver.step.solutions import Solutions, estimate_layouts
from solver.step.time import TIME_PARTS

LLAMA = ModelSpec(
    name="llama",
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    head_dim=128,
    vocab_size=32000,
)
_KINDS = {"FORWARD": FORWARD, "BACKWARD_INPUT": BACKWARD, "BACKWARD_WEIGHT": WEIGHT, "FULL_BACKWARD": WHOLE}


def _equal(schedule: str, pp: int, m: int, f: float = 1.0, b: float = 1.0, w: float = 1.0) -> Timeline:
    """Simulate equal stages of two chunks that take ``f``, ``b`` and ``w`` seconds each."""
    return simulate(schedule, [2 * f] * pp, [2 * (b + w)] * pp, m, 2, weight_grad=[2 * w] * pp)


def _actions(action: Any) -> Iterator[Any]:
    """Yield what torch runs one after the other in an action, if any."""
    if action is not None and action.sub_actions:
        for part in action.sub_actions:
            yield from _actions(part)
    elif action is not None:
        yield action


@pytest.mark.parametrize(("name", "torchs"), [("zb-v", "ScheduleZBVZeroBubble"), ("dualpipev", "ScheduleDualPipeV")])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (3, 7), (4, 8), (8, 21)])
def test_the_order_of_passes_is_torch_s(name: str, torchs: str, pp: int, m: int) -> None:
    theirs = object.__new__(getattr(schedules, torchs))  # its order needs no process group
    theirs.pp_group_size, theirs.num_stages, theirs._num_stages, theirs._n_microbatches = pp, 2 * pp, 2 * pp, m
    for rank in range(pp):
        theirs.rank = rank
        actions = [one for step in theirs._calculate_single_rank_operations(rank) for one in _actions(step)]
        expected = [(_KINDS[a.computation_type.name], int(a.stage_index != rank), a.microbatch_index) for a in actions]
        assert [tuple(row) for row in v_shaped_order(name, rank, pp, m).tolist()] == expected


@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 8), (8, 32), (16, 32)])
def test_bubbles_where_all_passes_are_equal(pp: int, m: int) -> None:
    bubble = {name: _equal(name, pp, m).span.max() - 6 * m for name in V_SHAPED}
    plain = 6 * (pp - 1)  # of 1F1B
    assert bubble["zb-v"] == 0  # arXiv 2401.10241 section 6
    assert all(plain / 3 < bubble[name] < 0.75 * plain for name in ("v-half", "v-min"))  # arXiv 2405.15362
    assert pp - 1 <= bubble["dualpipev"] < plain / 4


@pytest.mark.parametrize("pp", [2, 3, 4, 6, 8, 16, 32])
def test_memory_is_that_of_the_papers(pp: int) -> None:
    # in units of what a stage keeps of a micro batch; 1F1B holds pp on its first stage
    most = {name: v_shaped_in_flight(name, pp, 4 * pp).max() for name in V_SHAPED}
    assert most["zb-v"] == pp and most["dualpipev"] == pp + 0.5
    assert most["v-half"] <= pp / 2 + 1.5 and most["v-min"] <= pp / 3 + 1.5
    for name in V_SHAPED:
        assert micro_batches_in_flight(name, 4 * pp, pp, 2, np.arange(pp)) == pytest.approx(
            v_shaped_in_flight(name, pp, 4 * pp)
        )
        assert v_shaped_in_flight(name, pp, 50 * pp).max() == most[name], "the steady state holds no more"


@settings(max_examples=40, deadline=None)
@example("zb-v", 6, 17, 1.0, 1.0, 1.0, 1.0)  # what repeats is on no path: several are as long
@given(
    st.sampled_from(V_SHAPED),
    st.sampled_from([2, 3, 4, 6, 8]),
    st.integers(0, 40),
    st.floats(0.7, 3),
    st.floats(0.3, 1.2),
    st.floats(0.6, 1.1),
    st.floats(0.6, 6),
)
def test_closed_form_with_embedding_and_head(
    name: str, pp: int, more: int, b: float, w: float, first: float, last: float
) -> None:
    """The chunk with the embedding and the one with the head take ``first`` and ``last`` times what others do."""
    m = 2 * pp + more
    forward = np.ones((pp, 2))
    forward[0] = first, last
    line = simulate(name, forward, forward * (b + w), m, 2, weight_grad=forward * w)
    passes = np.multiply.outer([first, last, 1.0], [1.0, b, w])[..., None]
    columns = PipelineColumns(np.array([SCHEDULES.index(name)]), np.array([m]), np.array([pp]))
    for waits, exact in ((True, line.makespan), (False, line.span.max())):
        assert 0.94 * exact <= v_shaped_pipeline_seconds(columns, passes, waits)[0] <= exact * (1 + 1e-6)


@pytest.mark.parametrize("name", V_SHAPED)
def test_closed_form_stays_within_the_documented_error(name: str) -> None:
    rng, errors = np.random.default_rng(1), []
    for _ in range(40):
        pp, m = int(rng.choice([2, 4, 8])), 0
        m = int(rng.integers(2 * pp, 8 * pp))
        forward, b, w = np.ones((pp, 2)), rng.uniform(0.8, 1.8), rng.uniform(0.5, 1.0)
        forward[0] += rng.uniform(0, 0.1), rng.uniform(0, 4)
        passes = np.multiply.outer([*forward[0], 1.0], [1.0, b, w])[..., None]
        exact = simulate(name, forward, forward * (b + w), m, 2, weight_grad=forward * w).makespan
        errors.append(v_shaped_seconds(name, pp, m, passes, waits=True)[0] / exact - 1)
    assert abs(np.mean(errors)) < 0.001 and min(errors) > -0.006 and max(errors) < 1e-9


def strategy_of(found: Solutions) -> Strategy:
    return found.layouts.strategy(0, found.problem.run)


def test_the_first_stage_has_both_ends(h100_model: CostModel) -> None:
    problem = make_problem(LLAMA, 8, h100_model, framework="megatron-lm-zero-bubble")
    base = problem.layout(pp=4, dp=2, num_micro_batches=16, zero=0)
    wave = base.replace(vpp=2, schedule="zb-v", account_for_embedding_in_pipeline_split=False)
    found = estimate_layouts(problem, Layouts.of([base, wave]))
    layers = LLAMA.num_hidden_layers
    assert layers_of_stages(found, 1).tolist() == [layers // 4] * 4
    parts, memory = time_of_stages(found, 1), memory_of_stages(found, 1)
    compute = parts[TIME_PARTS.index("compute")]
    assert compute[0] > compute[1] == compute[2] == compute[3], "the first stage has the embedding and the head"
    np.testing.assert_allclose(parts.sum(axis=0), found.times.seconds[1], rtol=1e-12)
    assert memory.allocated.argmax() == 0
    held = memory_of_stages(found, 0).parts[kept := MEMORY_PARTS.index("activations")]
    np.testing.assert_allclose(memory.parts[kept][1] / held[0], 1.0, rtol=1e-9)  # as many micro batches as 1F1B's first stage


def test_what_cannot_run_is_refused(h100_model: CostModel) -> None:
    problem = make_problem(LLAMA, 8, h100_model, framework="torchtitan-2025-06")
    wave = problem.layout(pp=4, dp=2, num_micro_batches=16, zero=2, zero_shard_size=2, vpp=2, schedule="zb-v")
    check_layout(problem.model, problem.cluster, wave)
    for changes, sentence in (
        ({"vpp": 1}, "zb-v has two chunks a stage"),
        ({"num_micro_batches": 4}, "zb-v needs 7 micro batches"),
        ({"schedule": "v-min"}, "does not offer schedule v-min"),
        ({"compile": True}, "does not run torch.compile with schedule zb-v"),
        ({"num_layers_in_first_pipeline_stage": 4}, "divides the layers evenly under schedule zb-v"),
    ):
        with pytest.raises(InputError, match=sentence):
            check_layout(problem.model, problem.cluster, wave.replace(**changes))


def test_a_search_tries_them_where_the_framework_runs_them(h100_model: CostModel) -> None:
    alone = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    problem = make_problem(LLAMA, 8, h100_model, framework="megatron-lm-zero-bubble", **alone)
    best = {name: search(problem, 64, fixed={"schedule": name, "pp": 4}).best for name in ("1f1b", "zb-v", "v-half", "v-min")}
    assert all(strategy_of(found).schedule == name for name, found in best.items())
    every = search(problem, 64, fixed={"pp": 4}).best
    assert every.times.seconds[0] <= min(found.times.seconds[0] for found in best.values()) * (1 + 1e-12)
    assert {strategy_of(found).vpp for name, found in best.items() if name != "1f1b"} == {2}
