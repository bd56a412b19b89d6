"""How a framework shards states over its ranks, and which layers it recomputes: of one layout, or of arrays of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from solver.spec.can_run import CanRun
from solver.spec.framework import Framework
from solver.spec.rules.recomputation import partial_runs, recompute_broken
from solver.spec.run import Run
from solver.spec.strategy import Strategy


def shards_run(can_run: CanRun, shard: Any, cp: Any, replicas: Any) -> np.ndarray:
    """Whether the framework shards states over ``shard`` of ``replicas`` ranks (1: not at all)."""
    whole = np.asarray(shard) == 1
    if can_run.shards == "all":
        return whole | (np.asarray(shard) == replicas)
    return whole | (np.asarray(shard) % cp == 0) if can_run.shards == "context" else np.ones_like(whole)


def expert_shards_run(can_run: CanRun, shard: Any, replicas: Any, copies: Any) -> np.ndarray:
    """Whether ``copies`` of the experts divide into as many groups as ``replicas`` of all else, of ``shard`` ranks each.

    A ``shard`` of 1 leaves the states of both whole.
    """
    groups = np.maximum(np.asarray(replicas) // shard, 1)
    whole = (np.asarray(shard) == 1) | (not can_run.shards_experts_alike)
    return whole | (np.asarray(copies) % groups == 0)


def copies_broken(can_run: CanRun, run: Run) -> str:
    """Return what of a run needs ZeRO where there are several replicas, or ""."""
    if can_run.unsharded_gradients_as_model and run.grad_dtype != run.precision:
        return f"gradients in {run.grad_dtype} of a {run.precision} run"
    if can_run.changed_states_need_zero and run.optimizer_states != "fp32":
        return f"optimizer_states {run.optimizer_states}"
    offloads = can_run.changed_states_need_zero and run.optimizer_offload_fraction > 0
    return "an optimizer on the host" if offloads else ""


def copies_run(can_run: CanRun, run: Run, tp: Any, cp: Any, pp: Any, dp: Any, ep: Any) -> np.ndarray:
    """Whether the framework runs without ZeRO: copies of everything (but experts) on all data-parallel ranks."""
    single = np.asarray(dp * cp) == 1
    alone = np.asarray(tp * cp * pp * ep) == 1 if can_run.copies_alone else np.ones_like(single)
    return (single & casts_run(can_run, tp, cp, pp, dp)) | (alone & (not copies_broken(can_run, run)))


def casts_run(can_run: CanRun, tp: Any, cp: Any, pp: Any, dp: Any) -> np.ndarray:
    """Whether the framework computes in the 16 bits of a run where ``dp * cp`` ranks may shard its states."""
    return (np.asarray(dp * cp) > 1) | (np.asarray(tp * pp) == 1) | (not can_run.casts_by_shards)


def zero_runs(can_run: CanRun, zero: int, pp: Any) -> np.ndarray:
    """Whether the framework runs this ZeRO stage with ``pp`` pipeline stages."""
    return (zero in can_run.zero_stages) & ((np.asarray(pp) == 1) | (zero in can_run.zero_with_pipeline))


def isp_runs(zero: Any, is_isp: Any) -> np.ndarray:
    """Whether only one of ZeRO-3 and tp_mode isp shards the weights."""
    return (np.asarray(zero) < 3) | ~np.asarray(is_isp)


def state_rules(framework: Framework, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of how states are sharded and what is recomputed."""
    can, name, replicas = framework.can_run, framework.name, s.cp * s.dp
    wrong = recompute_broken(framework, s, s.recompute)
    return (
        (
            s.tp_mode == "isp" or not s.zero or bool(shards_run(can, s.zero_shard_size, s.cp, replicas)),
            f"{name} does not shard states over {s.zero_shard_size} of {replicas} ranks",
        ),
        (
            bool(casts_run(can, s.tp, s.cp, s.pp, s.dp)),
            f"{name} runs in fp32 where FSDP shards nothing (dp and cp 1) beside tp {s.tp}, pp {s.pp}: give it dp or cp ranks",
        ),
        (
            s.zero > 0 or bool(copies_run(can, s, s.tp, s.cp, s.pp, s.dp, s.ep)),
            f"{name} does not run ZeRO-0 with {copies_broken(can, s) or f'tp {s.tp}, cp {s.cp}, pp {s.pp} and ep {s.ep}'}",
        ),
        (bool(isp_runs(s.zero, s.tp_mode == "isp")), "ZeRO-3 and tp_mode isp would shard the same weights twice"),
        (
            not s.zero
            or s.tp_mode == "isp"
            or s.ep * s.etp == 1
            or bool(expert_shards_run(can, s.zero_shard_size, replicas, s.edp)),
            f"{name} shards over {s.zero_shard_size} of {replicas} ranks; {s.edp} copies of the experts do not divide alike",
        ),
        (
            s.recompute != "full" or partial_runs(can, s.recompute_layers),
            f"{name} recomputes all layers or none, not {s.recompute_layers} of a stage",
        ),
        (not wrong, wrong),
    )
