"""Peak memory of every layout, that of its fullest pipeline stage, and a lower bound of it that searches cut with."""

from __future__ import annotations

import numpy as np

from solver.schedule.stages import layers_in_flight
from solver.step.layer_table import PricedSplits
from solver.step.layouts import Layouts
from solver.step.memory import Memory
from solver.step.parameter_groups import shard_ranks, stages_of
from solver.step.stage_kinds import over_kinds
from solver.step.stage_memory import Sizes, StageMemory
from solver.step.states import absent_gradients, stage_state


def peak_memory(priced: PricedSplits, layouts: Layouts) -> Memory:
    """Return the peak bytes of each layout on its fullest stage.

    First stage: most micro batches in flight. Middle ones: perhaps more layers, or more with experts. Last: head and loss.
    priced: the splits of ``layouts``.
    """
    problem, row = priced.problem, layouts.row
    stages = stages_of(problem, layouts.splits)
    peak = StageMemory(priced, layouts, stages)
    fullest, at = peak.totals(*peak.sums(0), 0), np.zeros(len(layouts), dtype=np.int64)
    alike = not (problem.run.recompute_stage_layers or problem.framework.pipeline.keeps_messages)
    for stage in range(1, len(stages.index)):
        if stage > 1 and alike and (stages.counts[stage] <= stages.counts[0]).all():  # a micro batch less of no more layers
            continue
        sizes = peak.totals(*peak.sums(stage), stage)
        fuller = sizes.device > fullest.device
        bound = np.maximum(sizes.bound, fullest.bound)  # of any stage: one with less now may have more that comes and goes
        allocated, reserved, device = (np.where(fuller, *pair) for pair in zip(sizes[:3], fullest[:3], strict=True))
        fullest = Sizes(allocated, reserved, device, bound)
        at = np.where(fuller, stage, at)
    number, is_last = stages.index[at, row], stages.has_end[at, row]

    def assemble() -> np.ndarray:
        parts = peak.parts(0)
        for stage in np.unique(at[at > 0]):
            parts = np.where(at == stage, peak.parts(int(stage)), parts)
        return parts

    return Memory(*fullest, number, is_last & (number > 0), assemble)


def least_memory(priced: PricedSplits, layouts: Layouts) -> np.ndarray:
    """Return bytes that each layout does not go below: states, activations and the runtime's of its first stage; [layouts].

    Where a part of the layers is recomputed, as if all were. Of the only micro batch of a step there are the gradients, or
    instead of them the activations.
    """
    problem, table, key, splits = priced.problem, priced.table, priced.key, priced.splits
    stages, shares = stages_of(problem, splits), shard_ranks(problem, splits)
    state = stage_state(priced, shares, stages, 0, layouts.zero_stages)
    if problem.run.offload_layers or problem.run.offload_modules or problem.chunks:
        return state.held[layouts.zero, layouts.row]
    index, counts = stages.index[0], stages.counts[0]
    layers, short = counts.sum(axis=0), splits.account_for_embedding_in_pipeline_split
    group = splits.micro_batch_group
    flight = layers_in_flight(splits.schedule, splits.num_micro_batches, splits.pp, splits.vpp, layers, short, index, group)
    kept = over_kinds(counts[:, None], np.array([part.saved[:, key] for part in table.layers]))
    activations = flight / np.maximum(layers, 1) * kept
    shared = np.where(layouts.recomputes_groups, problem.run.recompute_group, 1)  # an input of so many layers
    saved = activations[layouts.recompute, layouts.row] / shared
    absent = absent_gradients(problem, splits, state)[layouts.zero, layouts.row]  # when the backward pass begins
    held = state.held[layouts.zero, layouts.row] + np.maximum(saved - absent, 0.0)
    return np.asarray(held + problem.framework.memory.runtime_bytes)
