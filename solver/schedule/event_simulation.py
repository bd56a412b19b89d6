"""Simulation of one pipeline step, pass by pass: exact for the given times; tests the closed forms and produces traces."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from profiler.errors import InputError
from solver.schedule.automatic import automatic_orders
from solver.schedule.kinds import AUTOMATIC, BACKWARD, FORWARD, WEIGHT, WHOLE, part_of, splits_backward
from solver.schedule.op_orders import check_schedule, stage_order
from solver.spec.choices import V_SHAPED

KINDS = np.array(["F", "B", "W", "BW"])


@dataclass(frozen=True)
class Timeline:
    """All passes of a step; arrays of shape [passes], ordered by stage and time. Times are in seconds from the first forward.

    kind: "F", "B" or, where the schedule splits the backward pass (B is then its input gradient), "W", or "BW" where such a
    schedule runs a whole backward pass. A pass whose sender
    waits for its message (``blocking``) ends with the message. in_flight: [stages], most micro batches whose activations a
    stage holds at once, in units of the whole stage's activations (a chunk's are 1 / vpp); held from the forward to the end of
    the backward, or of the weight gradient if split.
    """

    stage: np.ndarray
    micro_batch: np.ndarray
    chunk: np.ndarray
    kind: np.ndarray
    start: np.ndarray
    end: np.ndarray
    in_flight: np.ndarray
    needs: np.ndarray  #: index of the pass whose result each pass needs, -1: none
    weight_share: float = 1.0  #: of a micro batch's activations, what is held until the weight gradient has run, if split

    @property
    def makespan(self) -> float:
        """Seconds from the first forward to the end of the last pass of any stage."""
        return float(self.end.max())

    @property
    def busy(self) -> np.ndarray:
        """Seconds that each stage is busy, shape [stages]."""
        return np.bincount(self.stage, self.end - self.start, len(self.in_flight))

    @property
    def idle(self) -> np.ndarray:
        """Seconds of the makespan that each stage waits, shape [stages]: its bubble."""
        return self.makespan - self.busy

    @property
    def span(self) -> np.ndarray:
        """Seconds from each stage's first pass to its last, shape [stages].

        Where stages need not wait for each other between steps (zero bubble with a postponed check of the gradient norm), the
        longest span is the time of a step.
        """
        first = np.flatnonzero(np.diff(self.stage, prepend=-1))
        last = np.append(first[1:], len(self.stage)) - 1
        return self.end[last] - self.start[first]

    def waits_for(self, at: int) -> int:
        """Return the index of the pass by which pass ``at`` could not start earlier; -1: it starts the step."""
        before = at - 1 if at and self.stage[at - 1] == self.stage[at] else -1
        needed = int(self.needs[at])
        if min(before, needed) < 0:
            return max(before, needed)
        return needed if self.end[needed] > self.end[before] else before


def simulate(
    schedule: str,
    forward: Any,
    backward: Any,
    micro_batches: int,
    vpp: int = 1,
    transfer: float = 0.0,
    weight_grad: Any = None,
    blocking: bool = True,
    weight_share: float = 1.0,
    group: int = 0,
) -> Timeline:
    """Run ``schedule`` on stages of unequal speed.

    forward, backward: seconds of one micro batch, shape [stages] (split evenly over the stage's chunks) or [stages, vpp].
    weight_grad: the part of ``backward`` that zero-bubble schedules run separately; same shapes, needed by those schedules
    only. transfer: seconds to send one chunk's activation or gradient to another stage. blocking: the sender waits for it, so
    that its pass is ``transfer`` longer (Megatron's default: between two passes it sends and receives in one batch, at the same
    time); otherwise it only delays the receiver. weight_share: of a micro batch's activations, what its weight gradient still
    needs when its input gradient is done; what automatic schedules (zb-1p, zb-2p) hold depends on it. group: as in stage_order.
    Raises InputError for invalid times or schedules.
    """
    stages = len(np.atleast_1d(forward))
    check_schedule(schedule, stages, micro_batches, vpp, group)
    times = _pass_seconds(schedule, forward, backward, weight_grad, vpp)
    if not (np.isfinite(transfer) and transfer >= 0):
        raise InputError(f"transfer is {transfer} seconds; it must be a number of at least 0")
    if schedule in AUTOMATIC:
        orders = automatic_orders(schedule, micro_batches, times[:WHOLE, :, 0], 0.0 if blocking else transfer, weight_share)
    else:
        orders = [stage_order(schedule, stage, stages, micro_batches, vpp, group) for stage in range(stages)]
        weight_share = 1.0
    return _timeline(schedule, orders, times, (micro_batches, vpp), transfer, blocking, weight_share)


def _timeline(
    schedule: str,
    orders: list[np.ndarray],
    times: np.ndarray,
    counts: tuple[int, int],
    transfer: float,
    blocking: bool,
    weight_share: float,
) -> Timeline:
    """Return when each pass of the stages' ``orders`` runs. counts: micro batches, and chunks of a stage."""
    (micro_batches, vpp), stages = counts, len(orders)
    stage = np.repeat(np.arange(stages), [len(order) for order in orders])
    kind, chunk, micro_batch = np.concatenate(orders).T
    # a pass is numbered by kind (of backward passes all the same), part of the model and micro batch
    parts, part = stages * vpp, part_of(schedule, stage, chunk, stages)
    backwards = (kind == BACKWARD) | (kind == WHOLE)
    number = (np.where(backwards, BACKWARD, kind) * parts + part) * micro_batches + micro_batch
    after, before = part < parts - 1, part > 0  # there is a part after and before this one, and not on the same stage
    if schedule in V_SHAPED:
        after, before = after & (part != stages - 1), before & (part != stages)
    sends = (stages > 1) & np.where(kind == FORWARD, after, backwards & before)
    receives = (stages > 1) & np.where(kind == FORWARD, before, backwards & after)
    seconds = times[kind, stage, chunk] + (transfer * sends if blocking else 0.0)
    lag = 0.0 * receives if blocking else transfer * receives
    needs = _needed(kind, part, number, parts, micro_batches)
    bounds = np.searchsorted(stage, np.arange(stages + 1))
    start = _start_times(schedule, bounds, number, needs, seconds, lag)
    where = np.full(1 + number.max(), -1)
    where[number] = np.arange(len(number))
    needed = np.where(needs >= 0, where[needs], -1)
    held = in_flight(schedule, orders, vpp, weight_share)
    return Timeline(stage, micro_batch, chunk, KINDS[kind], start, start + seconds, held, needed, weight_share)


def followed_by(line: Timeline, chunk: int, seconds: float, number: int) -> Timeline:
    """Return the timeline with ``number`` weight gradients of ``seconds`` each after the last pass of the last stage."""
    if not number or not seconds:
        return line
    stage = int(line.stage[-1])
    start = line.end[line.stage == stage].max() + seconds * np.arange(number)
    return replace(
        line,
        stage=np.append(line.stage, np.full(number, stage)),
        micro_batch=np.append(line.micro_batch, np.arange(number)),
        chunk=np.append(line.chunk, np.full(number, chunk)),
        kind=np.append(line.kind, np.full(number, "W")),
        start=np.append(line.start, start),
        end=np.append(line.end, start + seconds),
        needs=np.append(line.needs, np.full(number, -1)),
    )


def _pass_seconds(schedule: str, forward: Any, backward: Any, weight_grad: Any, vpp: int) -> np.ndarray:
    """Return the seconds of one pass by kind, stage and chunk: shape [4, stages, vpp]."""
    given = {"forward": forward, "backward": backward, "weight_grad": 0.0 * np.asarray(backward, dtype=float)}
    if splits_backward(schedule):
        if weight_grad is None:
            raise InputError(f"schedule {schedule} needs weight_grad, the part of backward that can be postponed")
        given["weight_grad"] = weight_grad
    out: list[np.ndarray] = []
    for name, values in given.items():
        array = np.asarray(values, dtype=float)
        if array.ndim == 1:
            array = np.repeat(array[:, None] / vpp, vpp, axis=1)
        if array.ndim != 2 or array.shape[1] != vpp or not array.size or array.shape != (out or [array])[0].shape:
            raise InputError(f"{name} has shape {np.shape(values)}; all times need the same: [stages] or [stages, vpp]")
        if not (np.isfinite(array).all() and (array >= 0).all()):
            raise InputError(f"{name} holds times that are negative or not finite")
        out.append(array)
    if (out[1] < out[2]).any():
        raise InputError("weight_grad is a part of backward and cannot be longer")
    return np.array([out[FORWARD], out[BACKWARD] - out[WEIGHT], out[WEIGHT], out[BACKWARD]])


def _needed(kind: np.ndarray, part: np.ndarray, number: np.ndarray, parts: int, micro_batches: int) -> np.ndarray:
    """Return the number of the pass whose result each pass needs (-1: none)."""
    before = np.where(part > 0, number - micro_batches, -1)
    after = np.where(part < parts - 1, number + micro_batches, number - parts * micro_batches)
    return np.select([kind == FORWARD, kind == WEIGHT], [before, number - parts * micro_batches], after)


def _start_times(
    schedule: str, bounds: np.ndarray, number: np.ndarray, needs: np.ndarray, seconds: np.ndarray, lag: np.ndarray
) -> np.ndarray:
    """Return when each pass starts: when its stage is free and its input has arrived.

    Stages run until they must wait; a stage that has made progress wakes its neighbours, so each pass is tried a constant
    number of times.
    """
    stages, numbers, wanted, spent, delay = len(bounds) - 1, *(a.tolist() for a in (number, needs, seconds, lag))
    end, start = [-1.0] * (1 + max(numbers)), [0.0] * len(numbers)
    at, stop, clock = bounds[:-1].tolist(), bounds[1:].tolist(), [0.0] * stages
    awake = list(range(stages - 1, -1, -1))
    while awake:
        s = awake.pop()
        first = i = at[s]
        now = clock[s]
        while i < stop[s]:
            if wanted[i] >= 0:
                sent = end[wanted[i]]
                if sent < 0:
                    break
                now = max(now, sent + delay[i])
            start[i] = now
            now += spent[i]
            end[numbers[i]] = now
            i += 1
        at[s], clock[s] = i, now
        if i > first and stages > 1:
            awake += [(s + 1) % stages, (s - 1) % stages]
    if at != stop:
        stuck = [s for s in range(stages) if at[s] < stop[s]]
        raise ValueError(f"schedule {schedule} cannot progress on stages {stuck}: its order of passes is a deadlock")
    return np.array(start)


def in_flight(schedule: str, orders: list[np.ndarray], vpp: int, weight_share: float = 1.0) -> np.ndarray:
    """Return the peak of held activations by stage. A stage runs one pass at a time, so only the order of passes matters.

    weight_share: what a weight gradient frees; its input gradient frees the rest.
    """
    adds = np.zeros(4)
    kept = weight_share if splits_backward(schedule) else 0.0  # by a backward pass
    adds[[FORWARD, BACKWARD, WEIGHT, WHOLE]] = 1.0, kept - 1.0, -kept, -1.0
    return np.array([np.cumsum(adds[order[:, 0]]).max() for order in orders]) / vpp
