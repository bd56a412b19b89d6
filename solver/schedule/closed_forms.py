"""Closed forms for the seconds from the first forward to the last backward pass of a step, by schedule.

Stages may differ in speed. Where the forms are exact, and by how much they err elsewhere, is measured against the event
simulation in tests/solver/schedule/test_closed_forms.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from solver.schedule.automatic import automatic_bubble
from solver.schedule.critical_paths import v_shaped_seconds
from solver.schedule.kinds import BACKWARD, FORWARD, WEIGHT, is_schedule
from solver.spec.choices import SCHEDULES


class PipelineColumns(NamedTuple):
    """Schedule (codes), micro batches and stages of layouts: arrays of shape [layouts]."""

    schedule: np.ndarray
    num_micro_batches: np.ndarray
    pp: np.ndarray

    def take(self, chosen: np.ndarray) -> PipelineColumns:
        return PipelineColumns(*(column[chosen] for column in self))


class StageWork(NamedTuple):
    """Seconds of one micro batch's forward pass, input gradients and weight gradients, sends included.

    Stages are those that can be the slowest: first, last, and of equal middle ones the first. A schedule that does not split
    its backward passes has all of them in the input gradients.
    """

    each: np.ndarray  #: [3, stages, layouts]
    later: np.ndarray  #: [3, stages, layouts] on all stages after that one
    total: np.ndarray  #: [3, layouts] on all stages
    number: np.ndarray  #: [stages, layouts] of the stage, from 0

    @property
    def of_last(self) -> np.ndarray:
        """The passes of the last stage: [3, layouts]."""
        return np.take_along_axis(self.each, np.argmax(self.number, axis=0)[None, None], axis=1)[:, 0]

    def take(self, chosen: np.ndarray) -> StageWork:
        return StageWork(*(array[..., chosen] for array in self))


def fixed_order_seconds(columns: PipelineColumns, work: StageWork) -> np.ndarray:
    """Return the seconds of a step under gpipe, 1f1b or zb-h1 with stages of any speed: [layouts]."""
    found = _one_forward_one_backward(columns, work)
    for name, form in (("gpipe", _all_forwards_first), ("zb-h1", _late_weight_gradients)):
        of = np.flatnonzero(is_schedule(columns.schedule, name))
        if len(of):
            found[of] = form(columns.take(of), work.take(of))
    return found


def _all_forwards_first(columns: PipelineColumns, work: StageWork) -> np.ndarray:
    """GPipe: the slowest forward pass and the slowest backward pass, which need not be of one stage. Exact."""
    forward, backward = work.each[FORWARD], work.each[BACKWARD] + work.each[WEIGHT]
    repeated = forward.max(axis=0) + backward.max(axis=0)
    return work.total.sum(axis=0) + (columns.num_micro_batches - 1) * repeated


def _one_forward_one_backward(columns: PipelineColumns, work: StageWork) -> np.ndarray:
    """1F1B: the longest path on which micro batches wait for each other on one stage only.

    That stage is n forward passes ahead of the n stages after it, and a path on it skips these: the first micro batch goes down
    to the last stage and back, as does the last one, and between them the stage works without a pause. So stages after it that
    are faster shorten the step. Where they are faster than n of its forward or backward passes, these count instead. Exact for
    equal middle stages as long as the last stage is no faster than one pass of the slowest; never too long for these.
    """
    m, total = columns.num_micro_batches, work.total.sum(axis=0)
    each, later, number, real = _both_ends_of_the_middle(columns, work)
    forward, backward, after, n = each[FORWARD], each[BACKWARD] + each[WEIGHT], later.sum(axis=0), columns.pp - 1 - number
    real = real.sum(axis=0)
    skipped = np.maximum(n * forward - real, 0.0) + np.maximum(n * backward - real, 0.0)
    looping = total + after + (m - n - 1) * (forward + backward) + skipped
    one_way = np.maximum(forward, backward)
    alone = (m - 1) * (forward + backward) - np.maximum(after, 0.0)  # shorter middle stages may leave less than nothing
    return np.where(m > n, looping, total + np.maximum((m - 1) * one_way, alone)).max(axis=0)


def _late_weight_gradients(columns: PipelineColumns, work: StageWork) -> np.ndarray:
    """ZB-H1 (Qi et al. 2023, arXiv 2401.10241): as 1F1B, but stage i runs its weight gradients i micro batches late.

    Equal stages: the bubble is (pp - 1)(F + B - W) (table 2, where B is the input gradient). A path climbs with the last micro
    batch's input gradients to some stage, which then has min(i + 1, m) weight gradients left. Never too long for equal middle
    stages.
    """
    m, (each, later, number, real) = columns.num_micro_batches, _both_ends_of_the_middle(columns, work)
    (f, b, w), n = each, columns.pp - 1 - number
    ahead = work.total[:WEIGHT, None] - each[:WEIGHT] - later[:WEIGHT]  # forward passes and input gradients of earlier stages
    after, skipped = later[:WEIGHT].sum(axis=0), np.maximum(n * f - real[:WEIGHT].sum(axis=0), 0.0)
    steady = np.maximum(m - columns.pp, 0) * w  # weight gradients that the stage runs before its last forward pass
    rest = np.maximum(m - 1 - number, 0) * w - steady  # and after that, before its last input gradient
    looping = ahead[FORWARD] + f + after + skipped + (m - n - 1) * (f + b) + steady + np.maximum(after + b, (n + 1) * b + rest)
    filled = ahead[FORWARD] + m * f
    one_way = np.maximum(filled + after + b, np.maximum(ahead[FORWARD] + f + after, filled) + m * b + rest)
    reached = np.where(m > n, looping, one_way) + ahead[BACKWARD]
    left = np.minimum(number + 1, m) * w - ahead[BACKWARD]
    ends = [np.where(number <= at, left, -np.inf).max(axis=0) for at in number]
    return (reached + np.array(ends)).max(axis=0)


def _both_ends_of_the_middle(columns: PipelineColumns, work: StageWork) -> tuple[np.ndarray, ...]:
    """Return ``each``, ``later`` and ``number`` of the stages, and again with the middle ones as if next to the last one.

    A middle stage stands for as many equal ones as there are after it. What shorter ones lack is taken from the last stage's
    ``later``; a fourth array has that of the last stage as it is.
    """
    last = columns.pp - 1
    further = np.where((work.number > 0) & (work.number < last), last - 1 - work.number, 0)
    short = work.later - further * work.each
    of_last = work.of_last[:, None]
    return (
        np.concatenate([work.each, work.each], axis=1),
        np.concatenate([work.later, np.where(further > 0, np.minimum(short, of_last), work.later)], axis=1),
        np.concatenate([work.number, work.number + further]),
        np.concatenate([work.later, np.where(further > 0, of_last, work.later)], axis=1),
    )


def interleaved_seconds(
    columns: PipelineColumns,
    vpp: np.ndarray,
    group: np.ndarray,
    work: StageWork,
    head_chunk: np.ndarray,
    embedding: np.ndarray | float = 0.0,
    in_step: np.ndarray | None = None,
) -> np.ndarray:
    """Return the same for interleaved stages: [layouts].

    group: micro batches that run through a chunk before the next. head_chunk: seconds of the last stage's last chunk.
    embedding: of the first stage's first chunk, what others do not have. in_step: what in_step_seconds returns for all stages,
    where their chunks are of any number of layers; else those of a stage are equal, but for embedding and head.

    A path on one stage begins after the first chunks of those before it, and may go down to the last stage and back with the
    first micro batch's last chunk, with the last one's, or both. The stage runs 2 n passes meanwhile, which such a path skips,
    n stages ahead of the last. Paths that change stages: in_step_seconds. Derived from the order of passes (Narayanan et al.
    2021, arXiv 2104.04473; Megatron-Core's schedules.py). Exact for equal chunks; where the last stage's last chunk differs
    within 6% of the event simulation, 0.5% on average (tests/solver/schedule/test_closed_forms.py).
    """
    m, last = columns.num_micro_batches, columns.pp - 1
    each, later, number = _with_one_before_the_last(columns, work)
    both, after, n = each.sum(axis=0), later.sum(axis=0), last - number
    total, of_last = work.total.sum(axis=0), work.of_last.sum(axis=0)
    ahead = (total - both - after) / vpp
    down = np.where(n > 0, (after - of_last) / vpp + head_chunk, 0.0)
    most = np.maximum(m * vpp - (vpp - 1) * group - 1, 0)  # forwards after the first micro batch's, backwards before the last's
    skipped = np.minimum(2 * n, most)
    first, second = down - skipped * each[FORWARD] / vpp, down - skipped * (each[BACKWARD] + each[WEIGHT]) / vpp
    twice = np.where(2 * n < most, first + second, 0.0)
    loops = np.maximum(np.maximum(first, second), np.maximum(twice, 0.0))
    alone = (m * both + ahead + loops).max(axis=0)
    if in_step is None:
        one, other = (both - embedding * (number == 0)) / vpp, (of_last - head_chunk) / np.maximum(vpp - 1, 1)
        of_stages = in_step_seconds(m, vpp, group, one, head_chunk, other, _crossing(number, n, one, other))
        in_step = np.where(n > 0, of_stages, 0.0).max(axis=0)
    return np.maximum(alone, np.where(in_step > 0, in_step + (total - of_last) / vpp, 0.0))


def _crossing(number: np.ndarray, n: np.ndarray, one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the seconds that a path gains where it changes from the last stage to another one and back: [stages, layouts].

    one: of a chunk on that stage, n before the last; other: of the last one's chunks. The path skips the passes that the stage
    runs meanwhile, two for each stage between them, and has one of each of those: either of the n stages after it, or of those
    before it, which are next to the last stage's previous chunk.
    """
    middle = one[-1]
    return np.minimum((2 * n - 1) * one - (n - 1) * middle, 2 * (number + 1) * one - number * middle - other)


def _with_one_before_the_last(columns: PipelineColumns, work: StageWork) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ``each``, ``later`` and ``number`` of the stages and of an average middle one before the last."""
    of_last, middle = work.of_last, np.maximum(columns.pp - 2, 1)
    average = np.where(columns.pp > 2, (work.total - work.each[:, 0] - of_last) / middle, of_last)
    behind = np.where(columns.pp > 2, of_last, 0.0)
    number = np.where(columns.pp > 2, columns.pp - 2, columns.pp - 1)
    return (
        np.concatenate([work.each, average[:, None]], axis=1),
        np.concatenate([work.later, behind[:, None]], axis=1),
        np.concatenate([work.number, number[None]]),
    )


def in_step_seconds(micro_batches: Any, vpp: Any, group: Any, one: Any, head_chunk: Any, other: Any, crossing: Any) -> Any:
    """Return the seconds of all micro batches on interleaved stages in step, without filling; arguments broadcast.

    group, head_chunk: as in interleaved_seconds. one, other: forward plus backward of a chunk on a stage whose chunks are
    equal, and of the last stage's other chunks. crossing: what a path gains that changes to the last stage and back.

    0 where one of the two is the slower in all chunks. All stages run the same chunk at about the same time, so that each
    passes at the pace of the stage that is slowest in it: a head that one chunk of the last stage holds slows the others down
    though their layers are as many in sum. Paths change stages between two groups where the last chunk is the slow one, else
    in each.
    """
    crossings = np.ceil(micro_batches / group) - (head_chunk > one)
    in_step = micro_batches * (np.maximum(head_chunk, one) + (vpp - 1) * np.maximum(one, other)) - crossings * crossing
    return np.where((head_chunk > one) != (other > one), in_step, 0.0)


def automatic_pipeline_seconds(
    columns: PipelineColumns,
    total: np.ndarray,
    slowest: np.ndarray,
    passes: np.ndarray,
    transfer: np.ndarray,
    weight_share: np.ndarray,
    waits: bool,
) -> np.ndarray:
    """Return the same for layouts of automatic schedules (zb-1p, zb-2p): arrays of shape [layouts].

    passes: seconds of F, B and W on the slowest stage, [3, layouts]. transfer: seconds by which a message is late. waits: the
    stages wait for each other at the end of a step, so the last one's later begin counts.

    The bubble is automatic_bubble's where stages are equal. Of unequal ones the faster wait for the slowest anyway; how much
    of the bubble falls into that lies between nothing, so that the bubble is the others' on average, and all, so that stages
    as fast as the average need no more time; the middle is taken (within 2% on average, a test compares with the simulation).
    """
    schedule, m, pp = columns
    share = automatic_bubble(schedule, m, pp, passes, transfer, weight_share) / slowest
    others = (total - slowest) / np.maximum(pp - 1, 1)
    apart = m * slowest + share * others
    hidden = np.maximum(m * slowest, total / pp * (m + share))
    seconds = (apart + hidden) / 2
    if waits:
        seconds = np.maximum(seconds, m * slowest + (pp - 1) * (passes[FORWARD] * others / slowest + transfer))
    return seconds


def v_shaped_pipeline_seconds(columns: PipelineColumns, passes: np.ndarray, waits: bool) -> np.ndarray:
    """Return the same for layouts of V-shaped schedules: arrays of shape [layouts].

    passes: as in v_shaped_seconds, whose critical paths are the longest at some ratios of them, and a little too short between.
    """
    out = np.zeros(len(columns.pp))
    of_layout = np.stack([columns.schedule, columns.pp, columns.num_micro_batches.astype(np.int64)], axis=1)
    rows, group = np.unique(of_layout, axis=0, return_inverse=True)
    for i, (code, stages, count) in enumerate(rows.tolist()):
        of = np.flatnonzero(group.ravel() == i)
        out[of] = v_shaped_seconds(SCHEDULES[code], stages, count, passes[..., of], waits)
    return out
