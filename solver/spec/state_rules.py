"""How a framework shards states over its ranks, and which layers it recomputes: of one layout, or of arrays of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from solver.spec.framework import CanRun, Framework
from solver.spec.precision import QUANTISED
from solver.spec.strategy import Strategy

#: Modules whose recomputation keeps a quantised input, which Transformer Engine does not do where scales are delayed.
_QUANTISED_MODULES = {"layernorm", "moe_act"}


def shards_run(can_run: CanRun, shard: Any, cp: Any, replicas: Any) -> np.ndarray:
    """Whether the framework shards states over ``shard`` of ``replicas`` ranks (1: not at all)."""
    whole = np.asarray(shard) == 1
    if can_run.shards == "all":
        return whole | (np.asarray(shard) == replicas)
    return whole | (np.asarray(shard) % cp == 0) if can_run.shards == "context" else np.ones_like(whole)


def copies_run(can_run: CanRun, run: Strategy, tp: Any, cp: Any, pp: Any, dp: Any) -> np.ndarray:
    """Whether the framework runs without ZeRO: copies of everything on all data-parallel ranks."""
    single = np.asarray(dp * cp) == 1
    if can_run.copies_alone:
        return single | (np.asarray(tp * cp * pp) == 1)
    changed = run.optimizer_states != "fp32" or run.optimizer_offload_fraction > 0
    runs = not (can_run.unsharded_gradients_as_model and run.grad_dtype != run.precision)
    return single | (runs and not (can_run.changed_states_need_zero and changed))


def partial_runs(can_run: CanRun, layers: int) -> bool:
    """Whether the framework recomputes ``layers`` of a stage's layers (-1: all)."""
    return layers < 0 or bool(can_run.recompute_shares)


def recompute_broken(framework: Framework, run: Strategy, level: str) -> str:
    """Return what of a run does not go together with a level of recomputation, or ""."""
    if level == "full" and run.cuda_graphs:
        return "CUDA graphs exclude recompute full"
    delayed = run.precision in QUANTISED and run.precision == "fp8" and run.fp8_recipe == "delayed"
    found = _QUANTISED_MODULES & set(run.modules_recomputed)
    if level == "selective" and framework.memory.transformer_engine and delayed and found:
        return f"recomputing {sorted(found)[0]} in fp8 needs another fp8_recipe than delayed"
    return ""
