"""Pipelines to compare with the event simulation: closed forms of chunks that take given seconds, and layouts of a model."""

from __future__ import annotations

from typing import Any

import numpy as np
from toy import estimated, make_problem

from predictor.cost_model import CostModel
from solver.formats.config_file import load_run_config
from solver.schedule.closed_forms import PipelineColumns, StageWork, interleaved_seconds
from solver.spec.choices import SCHEDULES
from solver.step.solutions import Solutions

MODEL = load_run_config("configs/models/llama3_8b.json").model
LAYOUTS: dict[str, dict[str, Any]] = {
    "one stage": {"dp": 8, "num_micro_batches": 3},
    "1f1b": {"pp": 4, "dp": 2, "num_micro_batches": 12},
    "interleaved": {"pp": 4, "vpp": 2, "dp": 2, "num_micro_batches": 12, "schedule": "interleaved"},
    "gpipe": {"pp": 2, "dp": 4, "num_micro_batches": 6, "schedule": "gpipe"},
    "zb-h1": {"pp": 4, "dp": 2, "num_micro_batches": 12, "schedule": "zb-h1"},
    "zb-v": {"pp": 4, "vpp": 2, "dp": 2, "num_micro_batches": 12, "schedule": "zb-v"},
}


def solved(cost: CostModel, name: str) -> Solutions:
    problem = make_problem(MODEL, 8, cost, 4096, framework="generic", precision="bf16")
    return estimated(problem, [problem.layout(zero=1, zero_shard_size=2, **LAYOUTS[name])])


def interleaved_form(forward: np.ndarray, backward: np.ndarray, m: int, group: int = 0) -> float:
    """Return the closed form of interleaved stages, [pp, vpp], of which all but the last one's last chunk are equal in each."""
    pp, vpp = forward.shape
    passes = np.array([forward.sum(axis=1), backward.sum(axis=1), np.zeros(pp)])
    head_chunk = forward[-1, -1] + backward[-1, -1]
    columns = PipelineColumns(np.array([SCHEDULES.index("1f1b")]), np.array([float(m)]), np.array([pp]))
    later = passes.sum(axis=1)[:, None] - np.cumsum(passes, axis=1)
    work = StageWork(passes[..., None], later[..., None], passes.sum(axis=1)[:, None], np.arange(pp)[:, None])
    return float(interleaved_seconds(columns, np.array([vpp]), np.array([group or pp]), work, np.array([head_chunk]))[0])
