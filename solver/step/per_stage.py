"""Time and memory of every pipeline stage of one layout; an estimate keeps only the slowest and the fullest stage."""

from __future__ import annotations

import numpy as np

from solver.step.layouts import Layouts
from solver.step.memory import MEMORY_PARTS, Memory
from solver.step.op_estimates import STREAMS
from solver.step.parameter_groups import stage_sizes, stages_of
from solver.step.solutions import Solutions
from solver.step.stage_kinds import StageKinds, chunk_sizes
from solver.step.stage_memory import StageMemory
from solver.step.stage_seconds import end_recomputed, recomputed_limit, sends_of
from solver.step.time import TIME_PARTS


def layers_of_stages(solutions: Solutions, index: int) -> np.ndarray:
    """Return the layers of every stage of layout ``index``: int64 [pp].

    Where middle stages differ, the fuller ones are listed first; frameworks differ in which ones these are.
    """
    return _stages(solutions, index)[1].layers[:, 0].astype(np.int64)


def chunks_of(solutions: Solutions, index: int) -> tuple[int, ...]:
    """Return the layers of every chunk of layout ``index``, in the order in which a micro batch passes them."""
    problem, s = solutions.problem, solutions.layouts.one(index).splits
    pp, vpp, embedding, loss, v_shaped = (
        int(column[0])
        for column in (s.pp, s.vpp, s.account_for_embedding_in_pipeline_split, s.account_for_loss_in_pipeline_split, s.v_shaped)
    )
    stages = stage_sizes(problem, s)
    counts = int(stages.first[0]), int(stages.middle[0]), int(stages.last[0])
    layers, last = problem.model.num_hidden_layers, stages.fuller_last
    return problem.chunks or chunk_sizes(layers, pp, vpp, counts, embedding, loss, v_shaped=bool(v_shaped), fuller_last=last)


def slowest_stage(solutions: Solutions, index: int) -> int:
    """Return the number (from 0) of the stage that layout ``index`` waits for."""
    return int(np.argmin(time_of_stages(solutions, index)[TIME_PARTS.index("bubble")]))


def time_of_stages(solutions: Solutions, index: int) -> np.ndarray:
    """Return the seconds of every part of the step on every stage: [parts, pp]; each column adds up to the step.

    Work is that of the stage's own layers, and messages those that it waits for (the first stage's as in the estimate, where it
    stands for middle ones); synchronisation and optimizer, which end the step together, are those of the slowest stage; what is
    left is bubble.
    """
    slowest = solutions.times.parts[:, index]
    chosen, stages = _stages(solutions, index)
    pp = len(stages.index)
    if pp == 1:
        return slowest[:, None]
    terms, row, one = solutions.terms, solutions.layouts.row[index], np.zeros(1, dtype=np.int64)
    level, m = int(chosen.recompute[0]), float(chosen.splits.num_micro_batches[0])
    counts = stages.counts[:, :, 0]
    recomputed = stages.recomputed(recomputed_limit(solutions.problem, chosen), one)[0][:, :, 0]
    embedding, head = stages.has_embedding[:, 0], stages.has_head[:, 0]
    parts = np.repeat(slowest[:, None], pp, axis=1)
    layer = (terms.layers.forward + terms.layers.backward)[:, :, row]
    streams = (counts @ layer).T + terms.ends.embedding[:, row, None] * embedding + terms.ends.head[:, row, None] * head
    ends = head * end_recomputed(solutions.problem, chosen) * terms.ends.head_recompute[level, row]
    again = recomputed @ terms.layers.recompute[:, level, row] + ends
    streams[STREAMS.index("ep")] -= counts @ solutions.times.hidden[:, index]
    names = ("compute", *(f"{stream}_exposed" for stream in STREAMS[1:]))
    for name, seconds in zip(names, m * streams, strict=True):
        parts[TIME_PARTS.index(name)] = seconds
    parts[TIME_PARTS.index("recompute")] = m * again
    sends = sends_of(solutions.problem, terms, solutions.layouts.at(np.array([index])))
    parts[TIME_PARTS.index("pp_transfer")] = m * np.where((head > 0) | (pp == 2), sends.at_end, sends.between)
    bubble = TIME_PARTS.index("bubble")
    parts[bubble] = 0.0
    parts[bubble] = solutions.times.seconds[index] - parts.sum(axis=0)
    return parts


def memory_of_stages(solutions: Solutions, index: int) -> Memory:
    """Return the memory of every stage of layout ``index``: arrays over stages, parts [memory parts, pp]."""
    peak = _peak_of_stages(solutions, index)
    number = range(peak.stages)
    totals = zip(*(peak.totals(*peak.sums(stage), stage) for stage in number), strict=True)
    allocated, reserved, device, bound = (np.concatenate(each) for each in totals)
    stage = np.array(number)
    last = (stage > 0) & (stage == len(number) - 1)
    parts = np.concatenate([peak.parts(stage) for stage in number], axis=1)
    return Memory(allocated, reserved, device, bound, stage, last, lambda: parts)


def memory_of_passes(solutions: Solutions, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of every stage at the peak of its passes, [memory parts, pp], and what the optimizer's step needs beyond
    what of them stays, [pp]."""
    peak = _peak_of_stages(solutions, index)
    parts, absent, update = (np.array(each) for each in zip(*map(peak.parts_of_passes, range(peak.stages)), strict=True))
    gathered = parts[:, MEMORY_PARTS.index("gather_buffers"), 0]
    return parts[..., 0].T, np.maximum((absent + update)[:, 0] - gathered, 0.0) * (update[:, 0] > 0)


def _peak_of_stages(solutions: Solutions, index: int) -> StageMemory:
    one, stages = _stages(solutions, index)
    return StageMemory(solutions.priced.take(solutions.layouts.row[index : index + 1]), one, stages)


def _stages(solutions: Solutions, index: int) -> tuple[Layouts, StageKinds]:
    """Return layout ``index`` alone, and what all its stages hold."""
    one = solutions.layouts.one(index)
    return one, stages_of(solutions.problem, one.splits, every=True)
