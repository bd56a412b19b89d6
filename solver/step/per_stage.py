"""Time and memory of every pipeline stage of one layout, where the estimate itself needs the slowest and the fullest one."""

from __future__ import annotations

import numpy as np

from solver.spec.strategy import Recompute
from solver.step.memory import PeakMemory, StageContent
from solver.step.solutions import Solutions
from solver.step.time import PARTS


def layers_of_stages(solutions: Solutions, index: int) -> np.ndarray:
    """Return the layers of every stage of layout ``index``: int64 [pp].

    Where middle stages differ, the fuller ones are listed first; frameworks differ in which ones these are.
    """
    row = solutions.layouts.row[index]
    pp, stages = int(solutions.terms.splits.pp[row]), solutions.terms.stages
    first, most, last = (int(layers[row]) for layers in (stages.first, stages.middle, stages.last))
    if pp < 3:
        return np.array([first, last][:pp])
    middle = solutions.problem.model.num_hidden_layers - first - last
    full = middle - (most - 1) * (pp - 2)
    return np.array([first, *[most] * full, *[most - 1] * (pp - 2 - full), last])


def slowest_stage(solutions: Solutions, index: int) -> int:
    """Return the number (from 0) of the stage that layout ``index`` waits for."""
    return int(np.argmin(time_of_stages(solutions, index)[PARTS.index("bubble")]))


def time_of_stages(solutions: Solutions, index: int) -> np.ndarray:
    """Return the seconds of every part of the step on every stage: [parts, pp]; each column adds up to the step.

    Work is that of the stage's own layers; synchronisation and optimizer, which end the step together, are those of the slowest
    stage; what is left is bubble.
    """
    chosen = solutions.layouts.take(np.array([index]))
    slowest = solutions.times.parts[:, index]
    layers = layers_of_stages(solutions, index)
    if len(layers) == 1:
        return slowest[:, None]
    terms, row = solutions.terms, solutions.layouts.row[index]
    level, m = int(chosen.recompute[0]), float(chosen.splits.num_micro_batches[0])
    stage = np.arange(len(layers))
    embedding, head = (stage == 0) * 1.0, (stage == stage[-1]) * 1.0
    limit = int(chosen.recompute_layers[0])
    recomputed = layers * (level != Recompute.NONE) if limit < 0 else np.minimum(limit, layers)
    parts = np.repeat(slowest[:, None], len(layers), axis=1)
    layer = (terms.forward + terms.backward)[:, row]
    streams = layer[:, None] * layers + terms.embedding[:, row, None] * embedding + terms.head[:, row, None] * head
    again = recomputed * terms.recompute[level, row] + head * (limit != 0) * terms.head_recompute[level, row]
    for name, seconds in zip(("compute", "tp_exposed", "cp_exposed", "wp_exposed"), m * streams, strict=True):
        parts[PARTS.index(name)] = seconds
    parts[PARTS.index("recompute")] = m * again
    bubble = PARTS.index("bubble")
    parts[bubble] = 0.0
    parts[bubble] = solutions.times.seconds[index] - parts.sum(axis=0)
    return parts


def memory_of_stages(solutions: Solutions, index: int) -> np.ndarray:
    """Return the bytes of every part of the peak on every stage: [memory parts, pp]. solver.step.memory.totals adds them up."""
    one, layers = solutions.layouts.take(np.array([index])), layers_of_stages(solutions, index)
    key = solutions.terms.key[solutions.layouts.row[index : index + 1]]
    peak = PeakMemory(solutions.problem, solutions.table, key, one)
    split, last = one.splits, len(layers) - 1
    columns = []
    for stage, count in enumerate(layers.tolist()):
        at_first, at_last = np.array([float(stage == 0)]), np.array([float(stage == last)])
        short = split.account_for_embedding_in_pipeline_split * at_first
        if stage == last > 0:
            short = split.account_for_loss_in_pipeline_split * at_last
        columns.append(peak.parts(StageContent(stage, np.array([count]), at_first, at_last, short))[:, 0])
    return np.stack(columns, axis=1)
