"""Closed forms against the event simulation: stages of any speed, few micro batches and many, by hand and at random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import interleaved_form

from solver.schedule.closed_forms import (
    PipelineColumns,
    StageWork,
    fixed_order_seconds,
    in_step_seconds,
)
from solver.schedule.event_simulation import simulate
from solver.schedule.stages import stage_layers
from solver.spec.choices import SCHEDULES

many = settings(max_examples=150, deadline=None)
seconds = st.tuples(*[st.floats(0.3, 3.0)] * 3)
Kinds = tuple[tuple[float, float, float], ...]


def form(schedule: str, m: int, passes: np.ndarray) -> float:
    """Return the closed form of stages whose F, B and W take ``passes``, [3, stages]; of the middle ones the first stands for
    those that are no slower."""
    pp = passes.shape[1]
    both = passes.sum(axis=0)
    chosen = [0, pp - 1] + [i for i in range(1, pp - 1) if i == 1 or both[i] > both[1:i].max()]
    later = np.array([passes[:, i + 1 :].sum(axis=1) for i in chosen]).T
    work = StageWork(passes[:, chosen, None], later[..., None], passes.sum(axis=1)[:, None], np.array(chosen)[:, None])
    columns = PipelineColumns(np.array([SCHEDULES.index(schedule)]), np.array([float(m)]), np.array([pp]))
    return float(fixed_order_seconds(columns, work)[0])


def exact(schedule: str, m: int, passes: np.ndarray) -> float:
    forward, inputs, weights = passes
    return simulate(schedule, forward, inputs + weights, m, weight_grad=weights).makespan


def three_kinds(pp: int, *kinds: tuple[float, float, float]) -> np.ndarray:
    """Return the passes of a first, equal middle and a last stage."""
    first, middle, last = kinds
    return np.array([first, *[middle] * (pp - 2), last]).T


@pytest.mark.parametrize(
    ("schedule", "m", "first", "last", "by_hand"),
    [
        # two stages, two micro batches: F0 F1 | B0 B1 on the first, F0 B0 F1 B1 on the last, which is slower: 1 + 2 (3 + 6) + 2
        ("1f1b", 2, (1, 2, 0), (3, 6, 0), 21),
        # the first is slower: the last one's passes run beside its two forwards and two backwards
        ("1f1b", 2, (3, 6, 0), (1, 2, 0), 18),
        # unless they outlast one of them: 3 + 1 + 4 + 6 + 6
        ("1f1b", 2, (3, 6, 0), (1, 4, 0), 20),
        # slow forwards on the one, slow backwards on the other: 3 + 3 + 1 + 5 + 5 + 2
        ("gpipe", 2, (3, 2, 0), (1, 5, 0), 19),
        # 1 + 3 + 3, then the input and the weight gradient on the first, 1 + 1, beside the last one's weight gradient, 3
        ("zb-h1", 1, (1, 1, 1), (3, 3, 3), 10),
    ],
)
def test_two_stages_by_hand(
    schedule: str, m: int, first: tuple[int, int, int], last: tuple[int, int, int], by_hand: float
) -> None:
    passes = np.array([first, last], dtype=float).T
    assert exact(schedule, m, passes) == by_hand == form(schedule, m, passes)


def test_a_slow_last_stage_under_zero_bubble() -> None:
    # all but the last of eight stages take 1 for each pass; the last 7 for F, 7 for B and 7 for W
    passes = three_kinds(8, (1, 1, 1), (1, 1, 1), (7, 7, 7))
    for m in (1, 2, 8, 20):
        assert form("zb-h1", m, passes) == exact("zb-h1", m, passes) >= m * 21


@many
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(2, 9), st.integers(1, 24), seconds)
def test_equal_stages_are_exact(schedule: str, pp: int, m: int, each: tuple[float, float, float]) -> None:
    f, b, w = each
    passes = three_kinds(pp, *[(f, b, min(w, b))] * 3)
    assert form(schedule, m, passes) == pytest.approx(exact(schedule, m, passes), rel=1e-9)


@many
@given(st.integers(2, 9), st.integers(1, 24), st.tuples(*[seconds] * 3))
def test_gpipe_is_exact(pp: int, m: int, kinds: Kinds) -> None:
    passes = three_kinds(pp, *kinds)
    assert form("gpipe", m, passes) == pytest.approx(exact("gpipe", m, passes), rel=1e-9)


@many
@given(st.integers(2, 9), st.integers(1, 24), st.tuples(*[st.floats(0.5, 2.0)] * 2), st.tuples(*[st.floats(0.7, 2.0)] * 2))
def test_1f1b_is_exact_where_the_last_stage_is_no_faster_than_one_pass_of_another(
    pp: int, m: int, speed: tuple[float, float], backward: tuple[float, float]
) -> None:
    slowest = max(speed[0], 1.0) * max(1.0, *backward)  # of single passes of the first and the middle stages
    middle, first = (1.0, backward[0], 0.0), (speed[0], speed[0] * backward[1], 0.0)
    last = (slowest / 2, slowest / 2 + speed[1], 0.0)
    passes = three_kinds(pp, first, middle, last)
    later_are_no_faster = all(passes[:, i + 1 :].sum() >= (pp - 1 - i) * passes[:, i].max() for i in range(pp))
    found, simulated = form("1f1b", m, passes), exact("1f1b", m, passes)
    assert found <= simulated * (1 + 1e-9)
    if later_are_no_faster and m >= pp:
        assert found == pytest.approx(simulated, rel=1e-9)


@many
@given(st.sampled_from(["1f1b", "zb-h1"]), st.integers(2, 9), st.integers(1, 24), st.tuples(*[seconds] * 3))
def test_closed_forms_are_never_too_long(schedule: str, pp: int, m: int, kinds: Kinds) -> None:
    passes = three_kinds(pp, *kinds)
    found, simulated = form(schedule, m, passes), exact(schedule, m, passes)
    assert 0.7 * simulated <= found <= simulated * (1 + 1e-9)
    assert found >= m * passes.sum(axis=0).max() * (1 - 1e-9)


@many
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(2, 6), st.integers(1, 12), st.integers(0, 2), st.data())
def test_more_work_is_never_faster(schedule: str, pp: int, m: int, kind: int, data: st.DataObject) -> None:
    kinds = [data.draw(seconds) for _ in range(3)]
    longer = [tuple(2 * s for s in each) if i == kind else each for i, each in enumerate(kinds)]
    assert form(schedule, m, three_kinds(pp, *longer)) >= form(schedule, m, three_kinds(pp, *kinds)) * (1 - 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.integers(1, 6), st.integers(2, 4))
def test_interleaving_of_equal_stages_is_exact(pp: int, groups: int, vpp: int) -> None:
    forward, backward = np.full((pp, vpp), 1.3), np.full((pp, vpp), 2.9)
    by_hand = (groups * pp * vpp + pp - 1) * 4.2
    assert interleaved_form(forward, backward, groups * pp) == pytest.approx(by_hand)
    assert simulate("interleaved", forward, backward, groups * pp, vpp).makespan == pytest.approx(by_hand)


@pytest.mark.parametrize("groups", [1, 2, 4, 8])
def test_a_head_on_one_chunk_slows_all_stages(groups: int) -> None:
    """Last stages of other layers, whose last chunk holds the head: the sum over chunks alone would be up to 26% too fast."""
    rng, alone, found = np.random.default_rng(groups), [], []
    for _ in range(150):
        pp, vpp = int(rng.choice([2, 3, 4, 8])), int(rng.choice([2, 3, 4, 6]))
        forward = np.ones((pp, vpp))
        forward[-1], forward[-1, -1] = rng.uniform(0.3, 1.2), rng.uniform(0.0, 1.2) + rng.uniform(0, 2)
        forward[0] *= rng.uniform(0.6, 1.2)
        backward = forward * rng.uniform(1.2, 2.8)
        both, m = (forward + backward).sum(axis=1), groups * pp
        exact_ = simulate("interleaved", forward, backward, m, vpp).makespan
        alone.append((m * both.max() + (both.sum() - both.max()) / vpp) / exact_ - 1)
        found.append(interleaved_form(forward, backward, m) / exact_ - 1)
    assert np.abs(found).mean() < 0.005 and min(found) > -0.06 and max(found) < 0.045
    assert np.abs(alone).mean() > 0.03 and min(alone) < -0.17


def test_stages_in_step_by_hand() -> None:
    # others: two chunks of 3 (1 + 2); the last stage: a chunk of 2 and one of 4 + 3 of head. Two groups of 8 micro batches in
    # step: 7 + 3 each, less one pass of 3 between the groups; where the last chunk is the fast one less one in each group
    assert in_step_seconds(16, 2, 8, 3.0, 7.0, 2.0, 3.0) == 16 * (7 + 3) - 3
    assert in_step_seconds(16, 2, 8, 3.0, 2.0, 4.0, 3.0) == 16 * (3 + 4) - 2 * 3
    assert in_step_seconds(16, 2, 8, 3.0, np.array([3.0, 7.0]), np.array([3.0, 5.0]), 3.0).tolist() == [0.0, 0.0]


def _random_pipeline(rng: np.random.Generator, schedule: str) -> tuple[int, int, int, np.ndarray, np.ndarray]:
    """Draw (pp, vpp, micro batches, forward, backward) of equal layers with an embedding and a head of up to three layers."""
    pp, vpp = int(rng.choice([2, 4, 8, 16])), int(rng.choice([2, 4])) if schedule == "interleaved" else 1
    layers = pp * vpp * int(rng.integers(1, 5)) + (int(rng.integers(0, pp)) if vpp == 1 else 0)
    stages = stage_layers(layers, np.array([pp]))
    count = np.full(pp, int(stages.middle[0]))
    count[0], count[-1] = int(stages.first[0]), int(stages.last[0])
    for stage in range(1, count.sum() - layers + 1):  # middle stages with fewer layers come before those with more
        count[stage] -= 1
    m = int(rng.choice([1, 2, 4, 8, 16])) * (pp if vpp > 1 else 1)
    share = np.repeat(count[:, None], vpp, axis=1) / vpp
    forward, backward = share.copy(), share * rng.uniform(1.8, 3.0)
    embedding, head = rng.uniform(0, 0.1), rng.uniform(0.05, 3.0)
    forward[0, 0], backward[0, 0] = forward[0, 0] + embedding, backward[0, 0] + 2 * embedding
    forward[-1, -1], backward[-1, -1] = forward[-1, -1] + head / 3, backward[-1, -1] + 2 * head / 3
    return pp, vpp, m, forward, backward


@pytest.mark.parametrize(
    ("schedule", "mean", "low", "high"), [("1f1b", 0.001, -0.02, 0.01), ("interleaved", 0.003, -0.02, 0.01)]
)
def test_closed_forms_of_uneven_stages_stay_within_the_documented_error(
    schedule: str, mean: float, low: float, high: float
) -> None:
    rng, errors = np.random.default_rng(0), []
    for _ in range(300):
        pp, vpp, m, forward, backward = _random_pipeline(rng, schedule)
        one = (forward, backward) if vpp > 1 else (forward[:, 0], backward[:, 0])
        busy = (forward + backward).sum(axis=1)
        passes = np.array([forward[:, 0], backward[:, 0], 0 * busy])
        found = interleaved_form(forward, backward, m) if vpp > 1 else form(schedule, m, passes)
        errors.append(found / simulate(schedule, *one, m, vpp).makespan - 1)
    assert np.abs(errors).mean() < mean and min(errors) > low and max(errors) < high
