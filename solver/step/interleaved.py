"""Seconds of interleaved stages: the longest path of one stage alone, or of all stages in step, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from solver.schedule.closed_forms import PipelineColumns, interleaved_seconds
from solver.schedule.warm_up import group_of
from solver.step.stage_seconds import PipelineStages, stage_work


def interleaved_pipeline_seconds(
    stages: PipelineStages, columns: PipelineColumns, everywhere: np.ndarray, at_ends: np.ndarray, chunks: Sequence[int]
) -> np.ndarray:
    """Return the seconds from the first forward to the last backward pass of a step: [layouts].

    everywhere, at_ends: as in stage_work. chunks: the layers of each, where they are stated; else those of a stage are equal.
    """
    splits, row = stages.terms.splits, stages.layouts.row
    vpp, group = splits.vpp[row], group_of(columns.pp, splits.micro_batch_group[row])
    work = stage_work(stages, everywhere, at_ends)
    if chunks:
        head_chunk = _each_layer(stages, chunks) * chunks[-1] + stages.ends.head
        in_step = _in_step(stages, columns, chunks, group)
        return interleaved_seconds(columns, vpp, group, work, head_chunk, in_step=in_step)
    last = np.argmax(work.number, axis=0), np.arange(len(row))
    held = np.maximum(stages.terms.stages.layers[:, row][last], 1.0)
    loss = splits.account_for_loss_in_pipeline_split[row]
    in_chunk = (held + loss) / vpp - loss
    head_chunk = (work.of_last.sum(axis=0) - stages.ends.head) * in_chunk / held + stages.ends.head
    return interleaved_seconds(columns, vpp, group, work, head_chunk, stages.ends.embedding)


def _each_layer(stages: PipelineStages, chunks: Sequence[int]) -> np.ndarray:
    """Return the seconds of a layer on average: [layouts]."""
    layers: np.ndarray = stages.filling - stages.ends.embedding - stages.ends.head - stages.sends.filling
    return layers / max(sum(chunks), 1)


def _in_step(stages: PipelineStages, columns: PipelineColumns, chunks: Sequence[int], group: np.ndarray) -> np.ndarray:
    """Return the seconds of all micro batches at the pace of the slowest stage in each chunk, as in_step_seconds: [layouts].

    A layer takes what it takes on average.
    """
    each, pp = _each_layer(stages, chunks), columns.pp
    period = np.zeros(len(pp))
    for size in np.unique(pp).tolist():  # the same chunks may be those of other stages
        in_chunk = each * np.reshape(chunks, (-1, size))[..., None]  # [chunks of a stage, stages, layouts]
        in_chunk[0, 0] += stages.ends.embedding
        in_chunk[-1, -1] += stages.ends.head
        period = np.where(pp == size, in_chunk.max(axis=1).sum(axis=0), period)
    m = columns.num_micro_batches
    return np.asarray(m * (period + stages.sends.between) - each * np.mean(chunks) * (np.ceil(m / group) - 1))
