"""One step of a layout pass by pass: the event simulation of its stages, as a Chrome (Perfetto) trace or a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.errors import InputError
from solver.report.describe import describe
from solver.schedule.event_simulation import Timeline, followed_by, simulate
from solver.schedule.kinds import AUTOMATIC, part_of, splits_backward
from solver.spec.choices import SCHEDULES, V_SHAPED
from solver.step.deferred_head import deferred_share
from solver.step.op_estimates import STREAMS
from solver.step.per_stage import chunks_of, time_of_stages
from solver.step.pipeline import weight_share
from solver.step.solutions import Solutions
from solver.step.terms import overlapping_sends
from solver.step.time import TIME_PARTS

MAX_PASSES = 200_000
#: Parts of a step before the first pass, and after the last one.
_BEFORE, _AFTER = ("parameter_gather",), ("gradient_accumulation", "gradient_sync", "optimizer", "stragglers")
#: Parts that belong to the passes of a stage.
_OF_PASSES = tuple(part for part in TIME_PARTS if part not in (*_BEFORE, *_AFTER, "bubble", "pp_transfer"))
#: Parts that are drawn among the collectives of data parallelism.
_DATA_PARALLEL = ("parameter_gather", "gradient_sync")
_THREADS = {
    "compute": "passes",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "wp": "weights, exposed",
    "ep": "experts' exchange, exposed",
    "send": "sends between stages",
    "data parallel": "data parallel, exposed",
}
WORDS = {"F": "forward", "B": "backward", "W": "weight gradient", "BW": "whole backward"}


@dataclass(frozen=True)
class StepTimeline:
    """One step, pass by pass, on every pipeline stage.

    line: the passes. critical: bool [passes], those on the path that ends last. send: seconds at the end of a pass in which
    its stage sends; beside: seconds after a pass in which it sends while the next one runs; exposed: seconds of a pass that
    wait for collectives, by stream; before, after: (part, seconds) around the passes; predicted: the estimate's seconds of the
    step.
    """

    title: str
    line: Timeline
    splits: bool  #: weight gradients are passes of their own; a last stage that drains the pipeline may run some elsewhere too
    critical: np.ndarray
    send: np.ndarray
    before: tuple[tuple[str, float], ...]
    after: tuple[tuple[str, float], ...]
    predicted: float
    exposed: Mapping[str, np.ndarray]
    beside: np.ndarray
    waits: bool = True  #: stages wait for each other at the end of a step

    @property
    def seconds(self) -> float:
        """Seconds of the step as simulated; the estimate's closed form differs by what fills and drains unequal stages.

        Where stages do not wait for each other the next step begins on each as it ends, so its longest stage counts.
        """
        late = 0.0 if self.waits else self.line.makespan - float(self.line.span.max())
        return self.end - late

    @property
    def first_pass(self) -> float:
        """Seconds from the begin of the step to its first pass."""
        return sum(seconds for _, seconds in self.before)

    @property
    def end(self) -> float:
        """Seconds from the begin of the step on its first stage to its end on the last one."""
        return self.line.makespan + sum(seconds for _, seconds in (*self.before, *self.after))


def step_timeline(solutions: Solutions, index: int) -> StepTimeline:
    """Simulate layout ``index``. Raises InputError for a step of more passes than a viewer can show."""
    one = solutions.layouts.one(index).splits
    pp, vpp, m = int(one.pp[0]), int(one.vpp[0]), int(one.num_micro_batches[0])
    schedule = SCHEDULES[int(one.schedule[0])]
    passes = pp * vpp * m * (3 if splits_backward(schedule) else 2)
    if passes > MAX_PASSES:
        raise InputError(f"a step of {passes:,} passes is too long to draw, {MAX_PASSES:,} at most; fix fewer micro batches")
    (forward, backward, weight), streams = _chunk_seconds(solutions, index, pp, vpp, schedule)
    row = int(solutions.layouts.row[index])
    overlapped = schedule in AUTOMATIC or bool(overlapping_sends(solutions.problem, one)[0])
    sends = 1.0 if overlapped else solutions.problem.framework.pipeline.blocking_sends / 2
    send = float(solutions.terms.send_recv[row]) * sends
    share = float(weight_share(solutions.terms, solutions.layouts, solutions.times.slowest)[index])
    group = int(solutions.layouts.splits.micro_batch_group[row])
    line = simulate(schedule, forward, backward, m, vpp, send if pp > 1 else 0.0, weight, not overlapped, share, group)
    line = followed_by(line, vpp - 1, float(solutions.terms.ends.projection_weight_grad[row]), _deferred(solutions, index))
    part = part_of(schedule, line.stage, line.chunk, pp)
    ends = np.where(line.kind == "F", part == pp * vpp - 1, (line.kind == "W") | (part == 0))
    turn = (part == pp - 1) & (line.kind == "F") | (part == pp) & np.isin(line.kind, ("B", "BW"))
    quiet = ends | (turn & splits_backward(schedule) & (vpp == 2))
    parts = dict(zip(TIME_PARTS, solutions.times.parts[:, index].tolist(), strict=True))
    before, after = (tuple((name, parts[name]) for name in names if parts[name] > 0) for names in (_BEFORE, _AFTER))
    title = f"{solutions.problem.model.name}, {describe(solutions, index)}"
    way = np.where(line.kind == "F", 0, 1)
    exposed = {name: np.where(line.kind == "W", 0.0, seconds[way, line.stage, line.chunk]) for name, seconds in streams.items()}
    return StepTimeline(
        title=title,
        line=line,
        splits=bool(splits_backward(schedule)),
        critical=_critical(line),
        send=np.where(quiet | (pp == 1) | overlapped, 0.0, send),
        before=before,
        after=after,
        predicted=float(solutions.times.seconds[index]),
        exposed={name: seconds for name, seconds in exposed.items() if seconds.any()},
        beside=np.where(quiet | (pp == 1) | (not overlapped), 0.0, send),
        waits=solutions.problem.waits_for_norm or schedule not in (*AUTOMATIC, *V_SHAPED),
    )


def _deferred(solutions: Solutions, index: int) -> int:
    """Return the micro batches whose weight gradients of the head wait until the last stage has run its passes."""
    m = solutions.layouts.one(index).splits.num_micro_batches
    return round(float((deferred_share(solutions.problem.run, m) * m)[0]))


def _chunk_seconds(
    solutions: Solutions, index: int, pp: int, vpp: int, schedule: str
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], dict[str, np.ndarray]]:
    """Return the seconds of a micro batch's forward, backward and weight-gradient pass of every chunk, [pp, vpp] each, and what
    of the first two waits for collectives, by stream: [2, pp, vpp].

    A stage's passes take together what the estimate says of the stage; its chunks share that by their layers and ends.
    """
    terms, row = solutions.terms, int(solutions.layouts.row[index])
    key, of_layer = int(terms.key[row]), solutions.problem.kinds.of_layer
    both = np.array([terms.layers.forward[:, :, row], terms.layers.backward[:, :, row]])  # [2, kinds, streams]
    forward, backward = both.sum(axis=2)
    weight = terms.layers.weight_grad[:, row]
    times, waits = np.zeros((3, pp, vpp)), np.zeros((2, both.shape[2], pp, vpp))
    first = 0
    for number, layers in enumerate(chunks_of(solutions, index)):
        kinds = of_layer[first : first + layers]
        first += layers
        for stage in range(pp):
            for chunk in range(vpp):
                if int(part_of(schedule, np.array(stage), np.array(chunk), pp)) == number:
                    times[:, stage, chunk] = forward[kinds].sum(), backward[kinds].sum(), weight[kinds].sum()
                    waits[:, :, stage, chunk] = both[:, kinds].sum(axis=1)
    for end, number in ((solutions.table.embedding, 0), (solutions.table.head, pp * vpp - 1)):
        stage, chunk = next(
            (s, c) for s in range(pp) for c in range(vpp) if int(part_of(schedule, np.array(s), np.array(c), pp)) == number
        )
        ways = end.times.forward[:, key].sum(), end.times.backward[:, key].sum(), end.times.weight_grad[key]
        times[:, stage, chunk] += ways
    micro_batches = float(terms.splits.num_micro_batches[row])
    chosen = [TIME_PARTS.index(name) for name in _OF_PASSES]
    whole = time_of_stages(solutions, index)[chosen].sum(axis=0) / micro_batches
    deferred = _deferred(solutions, index) / micro_batches * float(terms.ends.projection_weight_grad[row])
    whole[-1], times[1, -1, -1] = whole[-1] - deferred, times[1, -1, -1] - deferred
    extra = np.maximum(whole - times[:2].sum(axis=(0, 2)), 0.0)[:, None] / vpp  # recomputation and what else waits in backward
    times[1] += extra
    streams = {name: waits[:, STREAMS.index(name)] for name in STREAMS[1:]}
    return (times[0], times[1], np.minimum(times[2], times[1])), streams


def _critical(line: Timeline) -> np.ndarray:
    """Return which passes are on the path that ends last."""
    on = np.zeros(len(line.end), dtype=bool)
    at = int(np.argmax(line.end))
    while at >= 0:
        on[at] = True
        at = line.waits_for(at)
    return on


def chrome_trace(step: StepTimeline) -> dict[str, Any]:
    """Return the step in Chrome's trace format (also Perfetto's), times in microseconds: a process for each stage, with a
    thread for its passes, one for each stream of collectives that they wait for, for sends and for data parallelism.

    What a pass waits for is drawn at its end, all at once; what is hidden under compute is not drawn.
    """
    line, threads = step.line, ["compute", *step.exposed, "send", "data parallel"]
    stages = range(len(line.in_flight))
    events = [_named("process_name", stage, 0, f"stage {stage + 1}") for stage in stages]
    events += [_named("thread_name", stage, thread, _THREADS[name]) for stage in stages for thread, name in enumerate(threads)]
    begin = step.first_pass
    for i in range(len(line.end)):
        events += _events_of(step, i, begin, threads)
    for clock, parts in ((0.0, step.before), (begin + line.makespan, step.after)):
        for name, seconds in parts:
            thread = threads.index("data parallel") if name in _DATA_PARALLEL else 0
            events += [_event(name, "step", stage, thread, clock, seconds) for stage in stages]
            clock += seconds
    about = {"layout": step.title, "simulated_step_s": step.seconds, "predicted_step_s": step.predicted}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _events_of(step: StepTimeline, i: int, begin: float, threads: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events of pass ``i``: itself, what it waits for at its end, and what it sends."""
    line = step.line
    kind, stage, start = str(line.kind[i]), int(line.stage[i]), float(line.start[i]) + begin
    busy, end = float(line.end[i] - line.start[i] - step.send[i]), float(line.end[i]) + begin
    number = f"{kind} {int(line.micro_batch[i])}"
    arguments = {"micro batch": int(line.micro_batch[i]), "chunk": int(line.chunk[i]), "critical": bool(step.critical[i])}
    event = _event(number, WORDS[kind], stage, 0, start, busy) | {"args": arguments}
    events = [event | ({"cname": "terrible"} if step.critical[i] else {})]
    waiting = start + busy
    for name, seconds in ((name, float(of_passes[i])) for name, of_passes in step.exposed.items()):
        if seconds > 0:
            waiting -= seconds
            events.append(_event(f"{name} {number}", "exposed", stage, threads.index(name), waiting, seconds))
    for at, seconds in ((start + busy, float(step.send[i])), (end, float(step.beside[i]))):
        if seconds:
            events.append(_event(f"send {number}", "send", stage, threads.index("send"), at, seconds))
    return events


def _named(what: str, stage: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": stage, "tid": thread, "args": {"name": name}}


def _event(name: str, category: str, stage: int, thread: int, start: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "pid": stage, "tid": thread, "ts": start * 1e6, "dur": seconds * 1e6}
