"""Settings that a measured run does not state and that change much: the values that it may have had.

A run that was made fitted in memory, and published runs are tuned. So what the framework does by default stands where it fits;
where it does not, the fastest layout that fits is taken (solver.report.validate). Chunks of pipeline stages have no default.
The other layouts that fit widen the interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

from solver.spec.choices import V_SHAPED
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy, replicas


def alternatives(run: Mapping[str, Any], model: ModelSpec, framework: Framework, layout: Strategy) -> tuple[Strategy, ...]:
    """Return the layouts that a run may have had, the assumed one first: by recomputation, ZeRO stage and chunks of a stage.

    run: the keys that the run states. layout: with the framework's defaults where it states none.
    """
    levels = _others(_levels(model, framework, layout), (layout.recompute, -1)) if "recompute" not in run else []
    chunks = _others(_chunks(model, framework, layout), layout.vpp) if "vpp" not in run else []
    copies = int(replicas(layout.tp_mode == "isp", layout.tp, layout.cp, layout.dp, layout.wp))
    stages = [1] if "zero" not in run and layout.zero == 0 and copies > 1 and 1 in framework.can_run.zero_stages else []
    return tuple(
        layout.replace(recompute=level, recompute_layers=layers, vpp=vpp,
                       schedule="interleaved" if vpp > 1 and layout.schedule not in V_SHAPED else layout.schedule, zero=zero,
                       zero_shard_size=copies if zero != layout.zero else layout.zero_shard_size)
        for (level, layers), zero, vpp in product(
            [(layout.recompute, layout.recompute_layers), *levels], [layout.zero, *stages], [layout.vpp, *chunks]
        )
    )  # fmt: skip


def _others(values: list[Any], assumed: Any) -> list[Any]:
    return [value for value in values if value != assumed]


def _levels(model: ModelSpec, framework: Framework, layout: Strategy) -> list[tuple[str, int]]:
    """Levels of recomputation that differ, with the layers of a stage that are recomputed (-1: all).

    The core of fused attention keeps next to nothing that could be dropped. Of whole layers a quarter of a stage's, half,
    three quarters or all.
    """
    again = framework.recomputation
    differs = layout.attention == "unfused" or again.selective_by_op or again.selective_keeps_qkv
    levels = [(level, -1) for level in framework.can_run.recompute if level != "selective" or differs]
    quarters = sorted({model.num_hidden_layers * part // (4 * layout.pp) for part in (1, 2, 3)} - {0})
    return [*levels, *(("full", layers) for layers in quarters if "full" in framework.can_run.recompute)]


def _chunks(model: ModelSpec, framework: Framework, layout: Strategy) -> list[int]:
    """Chunks into which a stage can be interleaved: the divisors of its layers."""
    stated = layout.num_layers_in_first_pipeline_stage or layout.num_layers_in_last_pipeline_stage or layout.pipeline_layout
    counted = layout.account_for_embedding_in_pipeline_split + layout.account_for_loss_in_pipeline_split
    layers = model.num_hidden_layers + counted
    can = layout.pp > 1 and "interleaved" in framework.can_run.schedules and layout.schedule == "1f1b" and not stated
    if not can or layers % layout.pp or layout.num_micro_batches % layout.pp:
        return []
    each = layers // layout.pp
    return [vpp for vpp in range(1, each + 1) if each % vpp == 0]
