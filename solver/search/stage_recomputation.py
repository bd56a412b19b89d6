"""The fewest layers that each stage of a pipeline must recompute for what it holds to fit in memory.

Recomputation only lengthens a stage, so that for given layers of the stages these are the fastest numbers. Stages differ: the
first has most micro batches in flight and the embedding, the last one micro batch, and the head.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from solver.spec.choices import Recompute
from solver.step.layer_table import LayerTable
from solver.step.layouts import Layouts
from solver.step.parameter_groups import stages_of
from solver.step.problem import Problem
from solver.step.stage_memory import StageMemory


def fewest_recomputed(problem: Problem, one: Layouts, table: LayerTable) -> tuple[int, ...]:
    """Return the fewest layers that each stage of a single layout recomputes so that it fits; of one that never does, all.

    problem: its run states the layers of the chunks, if they are not assigned evenly.
    """
    plain = problem.with_run(recompute_stage_layers="")
    stages = stages_of(plain, one.splits, every=True)
    layers = stages.layers[:, 0].astype(np.int64)
    number = np.arange(layers.max() + 1)
    tried = replace(
        one,
        row=np.zeros_like(number),
        zero=np.repeat(one.zero, len(number)),
        recompute=np.where(number > 0, int(Recompute.FULL), int(Recompute.NONE)),
        recompute_layers=number,
    )
    peak = StageMemory(table.priced(plain, one.splits), tried, stages)
    device = np.array([peak.totals(*peak.sums(stage), stage)[2] for stage in range(len(layers))])  # [stages, number]
    fits = device <= problem.cluster.memory_bytes
    fewest = np.where(fits.any(axis=1), np.argmax(fits, axis=1), layers)
    return tuple(np.minimum(fewest, layers).tolist())
