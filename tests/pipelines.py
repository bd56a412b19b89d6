"""Closed forms of pipelines whose chunks take given seconds, to compare with the event simulation."""

from __future__ import annotations

import numpy as np

from solver.schedule.closed_forms import PipelineColumns, StageWork, interleaved_seconds
from solver.spec.choices import SCHEDULES


def interleaved_form(forward: np.ndarray, backward: np.ndarray, m: int, group: int = 0) -> float:
    """Return the closed form of interleaved stages, [pp, vpp], of which all but the last one's last chunk are equal in each."""
    pp, vpp = forward.shape
    passes = np.array([forward.sum(axis=1), backward.sum(axis=1), np.zeros(pp)])
    head_chunk = forward[-1, -1] + backward[-1, -1]
    columns = PipelineColumns(np.array([SCHEDULES.index("1f1b")]), np.array([float(m)]), np.array([pp]))
    later = passes.sum(axis=1)[:, None] - np.cumsum(passes, axis=1)
    work = StageWork(passes[..., None], later[..., None], passes.sum(axis=1)[:, None], np.arange(pp)[:, None])
    return float(interleaved_seconds(columns, np.array([vpp]), np.array([group or pp]), work, np.array([head_chunk]))[0])
