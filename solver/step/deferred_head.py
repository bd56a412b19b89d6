"""Weight gradients of the head that wait until the last stage has run its passes (``--defer-embedding-wgrad-compute``).

Source: Megatron-Core's pipeline_parallel/schedules.py and tensor_parallel/layers.py, as read.
"""

from __future__ import annotations

import numpy as np

from solver.layers.program import LINEAR, VOCABULARY, WEIGHT_GRAD, Op, operands
from solver.spec.run import Run
from solver.step.layer_table import EstimatedProgram


def projection_seconds(head: EstimatedProgram) -> np.ndarray:
    """Return the seconds of a micro batch's weight gradient of the projection to the vocabulary: [keys]."""
    rows = zip(head.estimates.ops, head.exposed, strict=True)
    return sum((row for op, row in rows if _is_projection(op)), np.zeros(len(head.times.waits)))


def projection_operands(head: EstimatedProgram, element: float, split: np.ndarray | float = 1.0) -> np.ndarray:
    """Return the bytes of a micro batch that it reads, input of the projection and gradient of its output: [keys].

    split: ranks over which the input is split, to be all-gathered again.
    """
    sizes = (operands(op, split) * element for op in head.estimates.ops if _is_projection(op))
    return sum(sizes, np.zeros(len(head.times.waits)))


def _is_projection(op: Op) -> bool:
    return op.name == VOCABULARY and op.phase == WEIGHT_GRAD and op.kind == LINEAR


def deferred_share(run: Run, micro_batches: np.ndarray) -> np.ndarray:
    """Return the share of the micro batches whose weight gradients of the head wait until the last stage has run its passes."""
    limit = run.wgrad_deferral_limit or np.inf
    return run.defer_embedding_wgrad_compute * np.minimum(limit, micro_batches) / micro_batches


def with_deferred(pipeline: np.ndarray, deferred: np.ndarray, drains: np.ndarray) -> np.ndarray:
    """Return the seconds of pipelines whose last stage ends with ``deferred`` seconds of the head's weight gradients.

    drains: from its last pass to the last pass of the first stage, during which it would wait. Exact where stages are equal
    but for the head.
    """
    return np.maximum(pipeline, pipeline - drains + deferred)
