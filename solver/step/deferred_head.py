"""Weight gradients of the head that wait until the last stage has run its passes (``--defer-embedding-wgrad-compute``).

Source: Megatron-Core's pipeline_parallel/schedules.py and tensor_parallel/layers.py, as read.
"""

from __future__ import annotations

import numpy as np

from solver.spec.strategy import Strategy


def deferred_share(run: Strategy, micro_batches: np.ndarray) -> np.ndarray:
    """Return the share of the micro batches whose weight gradients of the head wait until the last stage has run its passes."""
    limit = run.wgrad_deferral_limit or np.inf
    share: np.ndarray = run.defer_embedding_wgrad_compute * np.minimum(limit, micro_batches) / micro_batches
    return share


def with_deferred(pipeline: np.ndarray, deferred: np.ndarray, drains: np.ndarray) -> np.ndarray:
    """Return the seconds of pipelines whose last stage ends with ``deferred`` seconds of the head's weight gradients.

    drains: from its last pass to the last pass of the first stage, during which it would wait. Exact where stages are equal
    but for the head.
    """
    longer: np.ndarray = np.maximum(pipeline, pipeline - drains + deferred)
    return longer
