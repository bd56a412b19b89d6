"""How a framework shards states over its ranks, and which layers it recomputes: of one layout, or of arrays of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from profiler.errors import first_broken
from solver.spec.can_run import CanRun
from solver.spec.framework import Framework
from solver.spec.recipes import delays_scales
from solver.spec.run import Run
from solver.spec.strategy import Strategy

#: Rules of Megatron-Core's transformer_config.py.
LAYERS_ALONE = "offload_layers needs pp 1, no recomputation and no CUDA graphs"
#: Modules whose recomputation keeps a quantised input, which Transformer Engine does not do where scales are delayed.
_QUANTISED_MODULES = {"layernorm", "moe_act"}


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


def partial_runs(can_run: CanRun, layers: int) -> bool:
    """Whether the framework recomputes ``layers`` of a stage's layers (-1: all)."""
    return layers < 0 or bool(can_run.recompute_shares)


def recompute_broken(framework: Framework, run: Run, level: str) -> str:
    """Return what of a run does not go together with a level of recomputation, or ""."""
    if level == "full" and run.cuda_graphs:
        return "CUDA graphs exclude recompute full"
    if level == "full" and run.offload_modules:
        return "offload_modules leaves nothing to full recomputation; give none or selective"
    if level != "none" and run.offload_layers:
        return LAYERS_ALONE
    return _modules_broken(framework, run) if level == "selective" else ""


def _modules_broken(framework: Framework, run: Run) -> str:
    """Return what of a run does not go together with the modules that it recomputes, or ""; rules of Megatron-Core's
    transformer_config.py."""
    modules = run.modules_recomputed
    delayed = framework.kernels.transformer_engine and delays_scales(run.precision, run.fp8_recipe)
    quantised = sorted(_QUANTISED_MODULES & set(modules))
    rules = (
        (not run.lora_rank, "adapters (lora_rank) are not modelled with recompute selective"),
        (not (delayed and quantised), f"recomputing {(*quantised, '')[0]} in fp8 needs another fp8_recipe than delayed"),
        (
            "core_attn" not in modules or "core_attn" not in run.modules_offloaded,
            "core_attn is recomputed, so nothing of it is kept on the host; leave it out of offload_modules",
        ),
        ("moe_act" not in modules or run.moe_grouped_gemm, "recomputing moe_act needs moe_grouped_gemm"),
        ("moe_act" not in modules or not run.moe_fused_experts, "moe_fused_experts leaves no moe_act to recompute"),
        (
            "shared_experts" not in modules or not run.moe_shared_expert_overlap,
            "shared_experts are not recomputed together with moe_shared_expert_overlap",
        ),
        ("moe" not in modules or "moe_router" not in run.modules_graphed, "CUDA graphs of moe_router exclude recomputing moe"),
    )
    return first_broken(rules)


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
