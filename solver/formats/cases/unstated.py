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
    levels = _levels(model, framework, layout) if "recompute" not in run else []
    chunks = _others(_chunks(model, framework, layout), layout.vpp) if "vpp" not in run else []
    copies = int(replicas(layout.tp_mode == "isp", layout.tp, layout.cp, layout.dp, layout.wp))
    stages = [1] if "zero" not in run and layout.zero == 0 and copies > 1 and 1 in framework.can_run.zero_stages else []
    return tuple(
        layout.replace(
            **level,
            vpp=vpp,
            schedule="interleaved" if vpp > 1 and layout.schedule not in V_SHAPED else layout.schedule,
            zero=zero,
            zero_shard_size=copies if zero != layout.zero else layout.zero_shard_size,
        )
        for level, zero, vpp in product([{}, *levels], [layout.zero, *stages], [layout.vpp, *chunks])
    )


def _others(values: list[Any], assumed: Any) -> list[Any]:
    return [value for value in values if value != assumed]


def _levels(model: ModelSpec, framework: Framework, layout: Strategy) -> list[dict[str, Any]]:
    """Return the fields of recomputation that differ from the layout's.

    The core of fused attention keeps next to nothing that could be dropped; of latent attention and experts the modules do
    that recipes recompute first. Of whole layers a quarter of a stage's, half, three quarters or all.
    """
    again, can = framework.recomputation, framework.can_run
    differs = layout.attention == "unfused" or again.selective_by_op or again.selective_keeps_qkv
    levels: list[dict[str, Any]] = [
        {"recompute": level, "recompute_layers": -1}
        for level in can.recompute
        if level != layout.recompute and (level != "selective" or differs)
    ]
    cheap = ["mla_up_proj"] * model.has_latent_attention + ["moe_act"] * model.is_mixture_of_experts
    several = (
        {"+".join(cheap[:number]) for number in range(1, len(cheap) + 1)} if set(cheap) <= set(can.recompute_modules) else ()
    )
    levels += [{"recompute": "selective", "recompute_modules": modules} for modules in sorted(several)]
    quarters = sorted({model.num_hidden_layers * part // (4 * layout.pp) for part in (1, 2, 3)} - {0})
    return [*levels, *({"recompute": "full", "recompute_layers": n} for n in quarters if "full" in can.recompute)]


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
