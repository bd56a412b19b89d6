"""The event simulation against pipelines computed by hand and invariants of all schedules; closed forms against it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pipelines import interleaved_form

from profiler.errors import InputError
from solver.schedule import event_simulation
from solver.schedule.event_simulation import Timeline, simulate
from solver.schedule.kinds import AUTOMATIC, BACKWARD, FORWARD, WEIGHT, part_of
from solver.schedule.op_orders import stage_order
from solver.schedule.stages import layers_in_flight, micro_batches_in_flight, stage_layers
from solver.spec.choices import SCHEDULES, SPLIT_BACKWARD, V_SHAPED


def _words(line: Timeline, stage: int) -> str:
    """Return the passes of a stage with their times, as "F0[0-1] ..."."""
    rows = np.flatnonzero(line.stage == stage)
    return " ".join(f"{line.kind[i]}{line.micro_batch[i]}[{line.start[i]:g}-{line.end[i]:g}]" for i in rows)


def _run(schedule: str, stages: int, m: int, vpp: int = 1, f: float = 1.0, b: float = 2.0, w: float = 0.0) -> Timeline:
    """Simulate equal stages of ``f`` seconds forward and ``b`` + ``w`` seconds backward."""
    return simulate(schedule, np.full(stages, f), np.full(stages, b + w), m, vpp, weight_grad=np.full(stages, w))


def test_1f1b_by_hand() -> None:
    # stage 0: F 1, B 2; stage 1: F 2, B 4. Stage 1 runs F0 from 1 to 3 and B0 to 7, then F1 to 9 and B1 to 13;
    # stage 0 runs F1 while it waits, B0 from 7 to 9, B1 from 13 to 15.
    line = simulate("1f1b", [1, 2], [2, 4], 2)
    assert _words(line, 0) == "F0[0-1] F1[1-2] B0[7-9] B1[13-15]"
    assert _words(line, 1) == "F0[1-3] B0[3-7] F1[7-9] B1[9-13]"
    assert line.makespan == 15
    assert line.busy.tolist() == [6, 12] and line.idle.tolist() == [9, 3]
    assert line.in_flight.tolist() == [2, 1]


def test_gpipe_by_hand() -> None:
    # the same stages: forward ends on stage 1 at 1 + 2 + 2 = 5, its backward passes at 9 and 13, the last one of stage 0 at 15
    line = simulate("gpipe", [1, 2], [2, 4], 2)
    assert _words(line, 0) == "F0[0-1] F1[1-2] B0[9-11] B1[13-15]"
    assert _words(line, 1) == "F0[1-3] F1[3-5] B0[5-9] B1[9-13]"
    assert line.in_flight.tolist() == [2, 2]


def test_zero_bubble_by_hand() -> None:
    # F 1, B 1, W 1 on two stages: stage 1 delays W0 by one micro batch, so stage 0 gets its gradients one second earlier
    line = _run("zb-h1", 2, 2, b=1.0, w=1.0)
    assert _words(line, 0) == "F0[0-1] F1[1-2] B0[3-4] W0[4-5] B1[5-6] W1[6-7]"
    assert _words(line, 1) == "F0[1-2] B0[2-3] F1[3-4] B1[4-5] W0[5-6] W1[6-7]"


def test_interleaved_by_hand() -> None:
    # two stages of two chunks, F 1, B 1 per chunk: stage 0 runs F of chunk 0, then of chunk 1, all in its warm-up
    line = simulate("interleaved", np.ones((2, 2)), np.ones((2, 2)), 2, 2)
    assert _words(line, 0) == "F0[0-1] F1[1-2] F0[2-3] F1[3-4] B0[5-6] B1[7-8] B0[8-9] B1[9-10]"
    assert _words(line, 1) == "F0[1-2] F1[2-3] F0[3-4] B0[4-5] F1[5-6] B1[6-7] B0[7-8] B1[8-9]"
    assert line.chunk[line.stage == 0].tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert line.in_flight.tolist() == [2.0, 1.5]


def test_send_recv_by_hand() -> None:
    # one micro batch, two stages, F 1, B 2, message 0.5: the message adds to the path in both directions
    for blocking in (True, False):
        assert simulate("1f1b", [1, 1], [2, 2], 1, transfer=0.5, blocking=blocking).makespan == 7.0
    # two micro batches: only a blocking send delays the next pass of the sender
    assert _words(simulate("1f1b", [1, 1], [2, 2], 2, transfer=0.5), 0) == "F0[0-1.5] F1[1.5-3] B0[5-7] B1[8.5-10.5]"
    late = simulate("1f1b", [1, 1], [2, 2], 2, transfer=0.5, blocking=False)
    assert _words(late, 0) == "F0[0-1] F1[1-2] B0[5-7] B1[8-10]"
    assert simulate("1f1b", [1.0], [2.0], 3, transfer=9.0).makespan == 9.0  # one stage sends nothing
    for blocking in (True, False):
        assert simulate("interleaved", [2.0], [4.0], 3, 2, transfer=9.0, blocking=blocking).makespan == 18.0


Pipeline = tuple[str, np.ndarray, np.ndarray, np.ndarray, int, int]
times = st.lists(st.floats(0.1, 10), min_size=1, max_size=6)
few = settings(max_examples=60, deadline=None)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    schedule = draw(st.sampled_from(SCHEDULES))
    wave = schedule in V_SHAPED
    stages = draw(st.integers(2 if wave else 1, 5))
    vpp = draw(st.integers(1, 3)) if schedule == "interleaved" else 1 + wave
    m = draw(st.integers(1, 4)) * stages if schedule == "interleaved" and vpp > 1 else draw(st.integers(1, 12))
    m += 2 * stages if wave else 0
    size = stages * vpp

    def grid(low: float, high: float) -> np.ndarray:
        return np.array(draw(st.lists(st.floats(low, high), min_size=size, max_size=size))).reshape(stages, vpp)

    f, b, share = grid(0.1, 10), grid(0.1, 10), grid(0, 1)
    return schedule, f, b, b * share, m, vpp


@few
@given(pipelines(), st.floats(0, 1), st.booleans())
def test_invariants_of_every_schedule(pipeline: Pipeline, transfer: float, blocking: bool) -> None:
    schedule, f, b, w, m, vpp = pipeline
    line = simulate(schedule, f, b, m, vpp, transfer, w, blocking)
    sums = (f + b).sum(axis=1)
    assert line.makespan >= line.busy.max() - 1e-9
    assert line.busy.min() >= 0 and (line.busy >= m * sums - 1e-9).all()
    assert line.makespan >= (f + b - (w if schedule in SPLIT_BACKWARD else 0)).sum() - 1e-9  # the path of one micro batch
    same = np.diff(line.stage) == 0
    assert (line.start[1:][same] >= line.end[:-1][same] - 1e-12).all()  # a stage runs one pass at a time
    counts = {kind: sum(kind in ran for ran in line.kind.tolist()) for kind in "FBW"}
    assert counts == {"F": f.size * m, "B": f.size * m, "W": f.size * m * (schedule in SPLIT_BACKWARD)}
    if schedule in AUTOMATIC:  # plans are searched for, so more or slower passes may happen to have a better one
        return
    more = simulate(schedule, f, b, m + (len(f) if vpp > 1 else 1), vpp, transfer, w, blocking)
    assert more.makespan >= line.makespan - 1e-9  # more work never ends earlier
    slower = simulate(schedule, f, b * 1.1, m, vpp, transfer, w * 1.1, blocking)
    assert line.makespan - 1e-9 <= slower.makespan <= 1.1 * line.makespan + 1e-9


@few
@given(pipelines())
def test_passes_start_after_the_passes_they_need(pipeline: Pipeline) -> None:
    schedule, f, b, w, m, vpp = pipeline
    line = simulate(schedule, f, b, m, vpp, 0.0, w)
    part = part_of(schedule, line.stage, line.chunk, len(f))
    kinds = ["B" if kind == "BW" else kind for kind in line.kind.tolist()]
    passes = list(zip(kinds, part.tolist(), line.micro_batch.tolist(), strict=True))
    end = dict(zip(passes, line.end, strict=True))
    for (kind, p, i), start in zip(passes, line.start, strict=True):
        backward = ("B", p + 1, i) if p < f.size - 1 else ("F", p, i)
        needs = {"F": ("F", p - 1, i), "B": backward, "W": ("B", p, i)}[kind]
        assert start >= (0.0 if kind == "F" and p == 0 else end[needs] - 1e-12)


@few
@given(times, st.floats(0.1, 10), st.floats(0.1, 10), st.integers(1, 30))
def test_unequal_stages_where_the_closed_form_is_exact(f: list[float], ratio: float, b: float, m: int) -> None:
    forward, backward = np.array(f), np.array(f) * ratio
    forward[-1], backward[-1] = forward.max(), backward.max() + b  # the last stage is the slowest
    slowest = forward[-1] + backward[-1]
    expected = (forward + backward).sum() + (m - 1) * slowest
    assert simulate("1f1b", forward, backward, m).makespan == pytest.approx(expected, rel=1e-9)


@few
@given(st.integers(1, 8), st.integers(1, 24), st.floats(0.1, 5), st.floats(0.1, 5))
def test_equal_stages_wait_for_filling_and_draining(pp: int, m: int, f: float, b: float) -> None:
    for schedule in ("gpipe", "1f1b"):
        line = _run(schedule, pp, m, f=f, b=b)
        assert line.idle == pytest.approx(np.full(pp, (pp - 1) * (f + b)), rel=1e-9)


@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_zero_bubble_has_the_bubble_of_its_paper(pp: int, m: int) -> None:
    # Qi et al. 2023: ZB-H1 (pp - 1)(F + B - W)
    assert _run("zb-h1", pp, m, b=1.1, w=0.9).makespan - m * 3.0 == pytest.approx((pp - 1) * (1.0 + 1.1 - 0.9))


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 24])
def test_activations_in_flight(pp: int, m: int) -> None:
    later = np.arange(pp)
    assert _run("1f1b", pp, m).in_flight == pytest.approx(np.minimum(pp - later, m))
    assert _run("gpipe", pp, m).in_flight == pytest.approx(np.full(pp, m))
    assert _run("zb-h1", pp, m).in_flight == pytest.approx(np.full(pp, min(pp, m)))
    for schedule, vpp in (("1f1b", 1), ("gpipe", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4)):
        if vpp == 1 or m % pp == 0:
            formula = micro_batches_in_flight(schedule, m, pp, vpp, later)
            assert _run(schedule, pp, m, vpp).in_flight == pytest.approx(formula)


def test_interleaved_order_is_that_of_megatron() -> None:
    # pp 2, vpp 2, m 4, stage 1: warm-up of 2 chunks, groups of two micro batches, backward from the last chunk
    order = stage_order("interleaved", 1, 2, 4, 2)
    forwards = [(int(c), int(i)) for k, c, i in order if k == FORWARD]
    backwards = [(int(c), int(i)) for k, c, i in order if k == BACKWARD]
    assert forwards == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert backwards == [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (1, 3), (0, 2), (0, 3)]
    assert "".join("FBW"[k] for k, _, _ in order) == "FFFBFBFBFBFBFBBB"
    assert WEIGHT not in order[:, 0]


def test_one_chunk_interleaved_is_1f1b() -> None:
    assert (stage_order("interleaved", 1, 4, 6) == stage_order("1f1b", 1, 4, 6)).all()


def test_largest_pipeline_is_quick() -> None:
    start = time.process_time()
    line = _run("interleaved", 16, 256, 4)
    assert time.process_time() - start < 1.0
    assert len(line.start) == 16 * 256 * 4 * 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"schedule": "2f2b"}, "schedule is '2f2b'"),
        ({"schedule": "interleaved", "vpp": 2, "micro_batches": 3}, "in multiples of pp 2, not 3"),
        ({"vpp": 3, "schedule": "gpipe"}, "one chunk a stage"),
        ({"schedule": "zb-v"}, "two chunks a stage"),
        ({"schedule": "dualpipev", "vpp": 2, "micro_batches": 3}, "needs 4 micro batches"),
        ({"micro_batches": 0}, "needs a stage, chunk and micro batch"),
        ({"schedule": "zb-h1"}, "needs weight_grad"),
        ({"schedule": "zb-h1", "weight_grad": [3, 3]}, "part of backward"),
        ({"forward": [1, 2, 3]}, "backward has shape"),
        ({"forward": [[1, 1, 1], [1, 1, 1]]}, "forward has shape"),
        ({"forward": [1, -1]}, "forward holds times"),
        ({"forward": [1, np.nan]}, "forward holds times"),
        ({"transfer": -1.0}, "transfer is -1.0 seconds"),
    ],
)
def test_bad_input_is_reported(arguments: dict[str, Any], sentence: str) -> None:
    given_: dict[str, Any] = {"schedule": "1f1b", "forward": [1, 1], "backward": [2, 2], "micro_batches": 4} | arguments
    with pytest.raises(InputError, match=sentence):
        simulate(**given_)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "m"),
    [(126, 8, 8, 16), (126, 8, 8, 8), (126, 8, 2, 16), (30, 8, 4, 32), (94, 8, 4, 16), (14, 2, 4, 6)],
)
def test_interleaving_with_embedding_and_loss_counted_as_layers(layers: int, pp: int, vpp: int, m: int) -> None:
    size = (layers + 2) // (pp * vpp)  # layers of a chunk; the first chunk of the model and its last one hold one less
    chunks = np.full((pp, vpp), float(size))
    chunks[0, 0], chunks[-1, -1] = size - 1 + 0.2, size - 1 + 1.1
    form = interleaved_form(chunks, 2 * chunks, m)
    assert form == pytest.approx(simulate("interleaved", chunks, 2 * chunks, m, vpp).makespan, rel=0.015)
    stages = stage_layers(layers, pp, 0, 0, 1, 1)
    for stage, held_layers in ((0, stages.first), (pp - 1, stages.last)):
        order = stage_order("interleaved", stage, pp, m, vpp)
        layers_of = np.full(vpp, size)
        layers_of[-1 if stage else 0] -= 1
        held = np.cumsum(np.where(order[:, 0] == FORWARD, layers_of[order[:, 1]], -layers_of[order[:, 1]])).max()
        assert layers_in_flight("interleaved", m, pp, vpp, held_layers, 1, stage) == held


def test_an_order_that_cannot_run_is_reported_as_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards_first(*order: Any) -> np.ndarray:
        return stage_order(*order)[::-1]

    monkeypatch.setattr(event_simulation, "stage_order", backwards_first)
    with pytest.raises(ValueError, match=r"schedule 1f1b cannot progress on stages \[0, 1\]"):
        simulate("1f1b", [1, 1], [2, 2], 2)


def postponed(layers: Any, m: int, layer: tuple[int, int, int]) -> tuple[float, float, float]:
    """Return the seconds of 1f1b and of zb-h1 on stages of ``layers``, and the longest weight gradients of a stage."""
    forward, inputs, weights = np.outer(layer, layers).astype(float)
    plain = simulate("1f1b", forward, inputs + weights, m)
    zero_bubble = simulate("zb-h1", forward, inputs + weights, m, weight_grad=weights)
    assert zero_bubble.makespan >= m * float(np.max(forward + inputs + weights)) * (1 - 1e-12)
    return plain.makespan, zero_bubble.makespan, float(np.max(weights))


@given(st.integers(1, 6), st.integers(1, 12), st.tuples(*[st.integers(1, 9)] * 3))
def test_postponing_weight_gradients_never_makes_a_step_longer(pp: int, m: int, layer: tuple[int, int, int]) -> None:
    plain, late, _ = postponed([1] * pp, m, layer)
    assert late <= plain * (1 + 1e-12)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 12), st.tuples(*[st.integers(1, 9)] * 3))
@example(layers=[1, 6, 3, 1], m=3, layer=(2, 1, 1))  # 77 seconds, 76 without
def test_unequal_stages_lose_no_more_than_one_pass_by_it(layers: list[int], m: int, layer: tuple[int, int, int]) -> None:
    plain, late, weights = postponed(layers, m, layer)
    assert late <= plain + weights


def test_a_fixed_order_may_lose_where_stages_differ_in_kind() -> None:
    """The fourth of five stages waits for the last one's input gradients (4 of 5), then has its weight gradients left."""
    forward, inputs, weights = np.ones(5), np.array([1.0, 1, 1, 1, 4]), np.array([1.0, 1, 1, 4, 1])
    plain, late = (
        simulate(name, forward, inputs + weights, 4, weight_grad=w) for name, w in (("1f1b", None), ("zb-h1", weights))
    )
    assert plain.makespan == 39.0  # 4 forwards, 4 * 6 of the last stage, 5 of the fourth, 3 * 2 of the others
    assert late.makespan == 41.0  # 4 forwards, 4 * 5 of the last stage, the fourth's input gradient, 4 * 4 of its weights
