"""Zero-bubble schedules that their authors' program plans from measured times (zb-1p, zb-2p): orders, and a closed form.

Qi et al. 2023 (arXiv 2401.10241), section 3.1, and their code as read (megatron/core/pipeline_parallel/auto_schedule.py). A
stage may hold the activations of pp (1p) or 2 pp (2p) micro batches. An input gradient frees all but what the weight gradient
still needs (weight_share), so more weight gradients can be postponed than micro batches fit; they fill the draining pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from solver.schedule.kinds import BACKWARD, FORWARD, WEIGHT, is_schedule
from solver.spec.read_only import read_only

_EPSILON = 1e-9


def automatic_limit(schedule: Any, pp: Any) -> Any:
    """Return the micro batches whose activations a stage may hold; schedule: a name or codes."""
    return np.where(is_schedule(schedule, "zb-2p"), 2 * np.asarray(pp), pp)


def automatic_bubble(schedule: Any, micro_batches: Any, pp: Any, passes: Any, transfer: Any, weight_share: Any) -> np.ndarray:
    """Return the seconds that equal stages idle in a step, from a stage's first pass to its last; all arguments broadcast.

    passes: seconds of F, B (input gradient) and W, shape [3, ...]. transfer: seconds by which a message is late.

    The last stage's first backward pass ends (pp - 1)(F + B + 2 transfer) after the first stage has begun to wait for it, and
    by as much it is ahead of the first stage at the end. Without a bubble the first stage must fill the one with forward
    passes, and the last the other with weight gradients that it has postponed; both as far as memory allows. Under zb-1p the
    first stage fills none, and memory lets every stage postpone the weight gradients of the last micro batches only.
    Exact for zb-1p with more micro batches than stages and for zb-2p whose bubble is not small (a test compares with the plan).
    """
    m, n, (f, b, w) = np.asarray(micro_batches), np.asarray(pp) - 1, passes
    loop = n * (f + b + 2 * transfer)
    limit = automatic_limit(schedule, pp)
    within = loop - (np.minimum(m, pp) - 1) * np.minimum(w, f + 2 * transfer) + np.where(m > pp, n * 2 * transfer, 0.0)
    postponed = np.minimum(m - 1, np.floor((limit - 1) / np.maximum(weight_share, _EPSILON) + _EPSILON))
    beyond = np.maximum(loop - (np.minimum(m, limit) - 1) * f, loop - postponed * w)
    return np.maximum(np.where(is_schedule(schedule, "zb-2p"), beyond, within), 0.0)


def automatic_orders(
    schedule: str, micro_batches: int, passes: np.ndarray, transfer: float = 0.0, weight_share: float = 1.0
) -> list[np.ndarray]:
    """Return each stage's passes in order, as solver.schedule.op_orders.stage_order. passes: as above, shape [3, stages].

    Eight plans are made, of which the one whose longest stage is shortest counts, as its authors' program chooses.
    """
    seconds = tuple(map(tuple, np.asarray(passes, dtype=float).tolist()))
    return list(_planned(schedule, micro_batches, seconds, float(transfer), float(weight_share)))


@lru_cache(maxsize=256)
def _planned(
    schedule: str, micro_batches: int, seconds: tuple[tuple[float, ...], ...], transfer: float, weight_share: float
) -> tuple[np.ndarray, ...]:
    limit = float(automatic_limit(schedule, len(seconds[0])))
    plans = [
        _Plan(seconds, micro_batches, transfer, weight_share, limit).make(*choices)
        for choices in product((True, False), repeat=3)
    ]
    best = min(plans, key=lambda plan: plan.longest)
    return tuple(read_only(best.order(stage)) for stage in range(len(seconds[0])))


class _Plan:
    """A plan in the making: when each pass ends, and what each stage holds and has idled so far."""

    def __init__(
        self, seconds: Sequence[Sequence[float]], micro_batches: int, transfer: float, weight_share: float, limit: float
    ) -> None:
        self._seconds, self._m, self._late, self._limit = seconds, micro_batches, transfer, limit
        self._stages = stages = len(seconds[0])
        self._adds = (1.0, weight_share - 1.0, -weight_share)  # activations that a pass keeps or frees
        self._done = [[0] * stages for _ in range(3)]
        self._ends: list[list[list[float]]] = [[[] for _ in range(stages)] for _ in range(3)]
        self._clock, self._held, self._idle, self._first = ([0.0] * stages for _ in range(4))
        self._kinds: list[list[int]] = [[] for _ in range(stages)]

    @property
    def longest(self) -> float:
        """Seconds from a stage's first pass to its last, of the stage that takes longest."""
        return max(end - first for end, first in zip(self._clock, self._first, strict=True))

    def order(self, stage: int) -> np.ndarray:
        kinds = np.array(self._kinds[stage])
        number = np.zeros(len(kinds), dtype=np.int64)
        for kind in (FORWARD, BACKWARD, WEIGHT):
            number[kinds == kind] = np.arange(self._m)
        return np.column_stack([kinds, np.zeros_like(number), number])

    def make(self, waits_early: bool, backward_first: bool, fills_all: bool) -> _Plan:
        """Warm up, then one forward and one backward pass of every stage in turn, then the weight gradients that are left."""
        self._warm_up(waits_early)
        for micro_batch in range(1, self._m):
            for stage, runs in enumerate(self._forwards(backward_first)):
                if runs:
                    self._run_filled(FORWARD, stage, fills_all)
            for stage in range(self._stages - 1, -1, -1):
                last = stage == 0 and self._done[FORWARD][0] == self._m
                self._run_filled(BACKWARD, stage, fills_all, until=micro_batch if last else 0)
        for stage in range(self._stages):
            while self._done[WEIGHT][stage] < self._m:
                self._run(WEIGHT, stage)
        return self

    def _ready(self, kind: int, stage: int) -> float:
        """Return when the input of a stage's next pass of a kind has arrived."""
        source = {FORWARD: stage - 1, BACKWARD: stage + 1}.get(kind, -1)
        if not 0 <= source < self._stages:
            return 0.0
        return self._ends[kind][source][self._done[kind][stage]] + self._late

    def _run(self, kind: int, stage: int) -> None:
        start = max(self._clock[stage], self._ready(kind, stage))
        if self._kinds[stage]:
            self._idle[stage] += start - self._clock[stage]
        else:
            self._first[stage] = start
        self._clock[stage] = start + self._seconds[kind][stage]
        self._ends[kind][stage].append(self._clock[stage])
        self._done[kind][stage] += 1
        self._held[stage] += self._adds[kind]
        self._kinds[stage].append(kind)

    def _postponed(self, stage: int) -> int:
        return self._done[BACKWARD][stage] - self._done[WEIGHT][stage]

    def _run_filled(self, kind: int, stage: int, fills_all: bool, until: int = 0) -> None:
        """Run a pass after the weight gradients that memory asks for and those that fit into the wait for its input.

        A gap shorter than a weight gradient is filled too where the stage would else become the one that idles most, or
        fills_all. until: weight gradients that must have run before.
        """
        while self._postponed(stage) and self._held[stage] + self._adds[kind] > self._limit + _EPSILON:
            self._run(WEIGHT, stage)
        arrives, spent = self._ready(kind, stage), self._seconds[WEIGHT][stage]
        while self._postponed(stage) and self._clock[stage] + spent <= arrives + _EPSILON:
            self._run(WEIGHT, stage)
        gap = arrives - self._clock[stage]
        if self._postponed(stage) and gap > _EPSILON and (fills_all or gap > self._spare(stage) + _EPSILON):
            self._run(WEIGHT, stage)
        while self._done[WEIGHT][stage] < until:
            self._run(WEIGHT, stage)
        self._run(kind, stage)

    def _spare(self, stage: int) -> float:
        """Return the seconds that a stage may idle without idling more than any other."""
        return max(self._idle) - self._idle[stage]

    def _warm_up(self, waits_early: bool) -> None:
        """Run the forward passes before the first backward pass of each stage, and that one.

        waits_early: none that would delay it; otherwise one more rather than a wait.
        """
        stages, (forward, backward, _) = range(self._stages), self._seconds
        for stage in stages:
            self._run(FORWARD, stage)
        more, arrives = [0] * self._stages, self._clock[-1] + backward[-1]
        for stage in reversed(stages[:-1]):
            at, room = self._clock[stage], int(self._limit - self._held[stage] + _EPSILON)
            for _ in range(min(room, self._m - 1)):
                if at + forward[stage] * waits_early > arrives + self._late - (not waits_early) * _EPSILON:
                    break
                at, more[stage] = at + forward[stage], more[stage] + 1
            arrives = max(at, arrives + self._late) + backward[stage]
        for stage in stages[1:]:  # a stage runs fewer than the one before it, unless all have run
            while 0 < more[stage] >= more[stage - 1] and more[stage] + 1 < self._m:
                more[stage] -= 1
            more[stage] = min(more[stage], more[stage - 1])
        for stage in stages:
            for _ in range(more[stage]):
                self._run(FORWARD, stage)
        for stage in reversed(stages):
            self._run(BACKWARD, stage)

    def _forwards(self, backward_first: bool) -> list[bool]:
        """Return which stages run a forward pass next: none runs one whose next stage does not.

        backward_first: a stage that is two forward passes ahead skips one that would delay a backward pass.
        """
        done, runs = self._done[FORWARD], [count < self._m for count in self._done[FORWARD]]
        for stage in range(self._stages - 1) if backward_first else ():
            if runs[stage] and done[stage] >= done[stage + 1] + 2:
                runs[stage] = not self._would_delay(stage)
        for stage in range(self._stages - 2, -1, -1):
            runs[stage] = runs[stage] and runs[stage + 1]
        return runs

    def _would_delay(self, stage: int) -> bool:
        """Whether a forward pass would delay the backward pass that the next stage sends after its own next two passes."""
        (forward, backward, weight), now = self._seconds, self._clock[stage]
        arrives = self._clock[stage + 1] + forward[stage + 1] + backward[stage + 1] + self._late
        held, first = self._held[stage] + 1.0, 0
        while held > self._limit + _EPSILON and first < self._postponed(stage):
            held, first = held + self._adds[WEIGHT], first + 1
        if now < arrives and now + forward[stage] + first * weight[stage] <= arrives:
            return False
        return now >= arrives or arrives - now <= self._spare(stage)
