"""Memory of every stage through one step: what each pass of the pipeline allocates and frees, and where the peak is.

The parts are those of the estimate (solver.step.memory): what stays all the step; the activations of the micro batches whose
forward pass began and whose backward pass (of a schedule that splits it: weight gradient) has not ended, the estimate's peak
divided evenly among the chunks in flight then; and during a backward pass the buffers of the layer, or of the loss, that is
at work. Allocated bytes, as the framework's counter shows them, without the allocator's gaps and the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler.units import GIB
from solver.report.timeline import WORDS, StepTimeline, step_timeline
from solver.step.memory import MEMORY_PARTS
from solver.step.per_stage import memory_of_passes
from solver.step.solutions import Solutions

#: Parts that stay through the step; the others come and go with passes.
_STAYING = tuple(part for part in MEMORY_PARTS if part not in ("activations", "backward_buffers", "loss"))
_BUFFERS = ("backward_buffers", "loss")
#: Beginnings of the names of blocks.
_HELD, _POSTPONED = "activations", "operands"


@dataclass(frozen=True)
class Block:
    """Bytes that are allocated at ``start`` and freed at ``end`` [s], and what they are."""

    words: str
    start: float
    end: float
    size: float


@dataclass(frozen=True)
class StageTimeline:
    """A stage's memory: what stays (bytes by part), and the blocks that come and go."""

    stage: int
    staying: dict[str, float]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return f"stage {self.stage + 1}"

    @property
    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (times [s], allocated bytes from each time on); what is freed at a moment is freed first."""
        times = np.array([time for block in self.blocks for time in (block.start, block.end)])
        changes = np.array([size for block in self.blocks for size in (block.size, -block.size)])
        order = np.lexsort((changes, times))
        times, levels = times[order], sum(self.staying.values()) + np.cumsum(changes[order])
        last = np.append(np.diff(times) > 0, True)  # of several changes at one time
        return np.concatenate([[0.0], times[last]]), np.concatenate([[sum(self.staying.values())], levels[last]])

    @property
    def peak(self) -> tuple[float, float]:
        """Return (the time of the peak [s], its bytes)."""
        times, levels = self.curve
        at = int(np.argmax(levels))
        return float(times[at]), float(levels[at])

    def at_peak(self) -> str:
        """Return what runs at the peak, in words."""
        time, _ = self.peak
        there = [block.words for block in self.blocks if block.start <= time < block.end]
        held, postponed = (sum(words.startswith(name) for words in there) for name in (_HELD, _POSTPONED))
        words = [
            f"{held} forward pass{'es' * (held != 1)} with activations held",
            *([f"operands of {postponed} weight gradients"] if postponed > held else []),
        ]
        running = [name for name in there if not name.startswith((_HELD, _POSTPONED))]
        return ", ".join([*words, *running[:1]])


def memory_through_step(solutions: Solutions) -> tuple[StepTimeline, list[StageTimeline]]:
    """Return the step of the first layout and the memory of every stage. Raises InputError for a step of too many passes."""
    step = step_timeline(solutions, 0)
    parts, update = memory_of_passes(solutions, 0)
    named = dict(zip(MEMORY_PARTS, parts, strict=True))
    begin = step.end - sum(seconds for part, seconds in step.after if part in ("optimizer", "stragglers"))
    optimizer = begin, begin + dict(step.after).get("optimizer", 0.0)
    stages = []
    for stage in range(len(step.line.in_flight)):
        staying = {part: float(named[part][stage]) for part in _STAYING if named[part][stage]}
        buffers = sum(float(named[part][stage]) for part in _BUFFERS)
        what = "loss" if named["loss"][stage] else "backward buffers"
        activations = float(named["activations"][stage])
        blocks = [*_blocks(step, stage, activations, what, buffers)]
        if update[stage]:
            blocks.append(Block("the optimizer's step", *optimizer, float(update[stage])))
        stages.append(StageTimeline(stage, staying, tuple(blocks)))
    return step, stages


def _blocks(step: StepTimeline, stage: int, activations: float, what: str, buffers: float) -> Iterator[Block]:
    line, begin = step.line, step.first_pass
    mine = np.flatnonzero(line.stage == stage)
    chunks = int(line.chunk[mine].max()) + 1
    each = activations / (float(line.in_flight[stage]) * chunks)
    later = min(line.weight_share, 1.0) if step.splits else 0.0

    def ends(*kinds: str) -> dict[tuple[int, int], float]:
        return {(int(line.micro_batch[i]), int(line.chunk[i])): float(line.end[i]) for i in mine if line.kind[i] in kinds}

    done, all_done = ends("B", "BW"), ends("W", "BW")
    for i in mine:
        number, chunk = int(line.micro_batch[i]), int(line.chunk[i])
        name = f"micro batch {number}" + (f", chunk {chunk}" if chunks > 1 else "")
        start, end = begin + float(line.start[i]), begin + float(line.end[i])
        if line.kind[i] == "F":
            if later < 1.0:
                yield Block(f"{_HELD} of {name}", start, begin + done[number, chunk], each * (1.0 - later))
            if later > 0.0:
                words = f"{_HELD} of {name}" if later == 1.0 else f"{_POSTPONED} of {name}'s weight gradients"
                yield Block(words, start, begin + all_done[number, chunk], each * later)
        elif buffers and line.kind[i] in ("B", "BW"):
            yield Block(f"{what} of {name} ({WORDS[str(line.kind[i])]})", start, end, buffers)


def peak_words(stages: list[StageTimeline]) -> str:
    """Return which stage allocates most, when, and what it holds then."""
    fullest = max(stages, key=lambda stage: stage.peak[1])
    time, level = fullest.peak
    return f"{fullest.name} allocates most, {level / GIB:.1f} GiB at {time:.3g} s: {fullest.at_peak()}"


def snapshot(step: StepTimeline, stages: list[StageTimeline]) -> dict[str, Any]:
    """Return the step as torch.cuda.memory._snapshot() would record it, a device for each stage.

    Source of the format: torch/cuda/memory.py (_snapshot) and torch/cuda/_memory_viz.py of torch 2.13: device_traces hold
    alloc, free_requested and free_completed events with addr, size, stream, frames and time_us.
    """
    traces = []
    for stage in stages:
        events: list[tuple[float, int, dict[str, Any]]] = []
        address = 1 << 40
        staying = [Block(part.replace("_", " "), 0.0, np.inf, size) for part, size in stage.staying.items()]
        for block in (*staying, *stage.blocks):
            size = round(block.size)
            common = {
                "addr": address,
                "size": size,
                "stream": 0,
                "frames": [{"filename": stage.name, "line": 0, "name": block.words}],
            }
            address += size + 512
            events.append((block.start, 1, {"action": "alloc", **common}))
            if np.isfinite(block.end):
                events += [(block.end, 0, {"action": f"free_{what}", **common}) for what in ("requested", "completed")]
        events.sort(key=lambda event: event[:2])
        traces.append([{**event, "time_us": round(1e6 * time)} for time, _, event in events])
    return {"segments": [], "device_traces": traces, "allocator_settings": {}, "layout": step.title}
