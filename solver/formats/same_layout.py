"""Whether a file that was written means the layout that it was written for.

What an export writes is read again before it is kept, so that no file can mean another layout than the one that was asked for:
a setting that the format has no place for is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from profiler.errors import InputError
from solver.spec.choices import ONE_F_ONE_B, V_SHAPED
from solver.spec.dropout import applies_dropout
from solver.spec.framework import Framework
from solver.spec.frameworks import GENERIC, framework_of
from solver.spec.idle import IN_ONE_RANK, idle_settings
from solver.spec.layer_kinds import has_experts
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import chunk_layers, layout_text
from solver.spec.strategy import CONSTANTS, Strategy, filled

#: Axes that divide a pipeline.
_PIPELINE = (
    "schedule",
    "vpp",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


def effective(model: ModelSpec, run: Strategy) -> Strategy:
    """Return the layout with its default in every field that changes nothing beside the others."""
    several, framework = run.replicas > 1, framework_of(run.framework)
    copies = several or run.dp * run.cp > 1  # under isp of embedding and head alone, perhaps
    shared = framework.shares_vocabulary(run.tp_mode == "isp")
    in_step = framework.data_parallel.gathers_in_step and run.zero < 3
    idle = (
        *((getattr(run, axis) == 1, names) for axis, names in IN_ONE_RANK.items() if axis not in ("tp", "ep")),
        (run.tp == run.wp == 1, IN_ONE_RANK["tp"]),
        (run.ep * run.etp == 1, IN_ONE_RANK["ep"]),
        (True, tuple(idle_settings(CONSTANTS, model, run.precision, framework))),
        (run.tp == run.wp == 1 and not shared, ("tp_mode",)),
        (run.tp_mode != "isp" or run.tp == run.wp == 1, ("overlap_weight_gather",)),
        (run.pp == 1, _PIPELINE),
        (run.vpp == 1 or run.schedule in V_SHAPED, ("p2p_overlap", "micro_batch_group")),
        (run.micro_batch_group == run.pp, ("micro_batch_group",)),
        (run.recompute != "full", ("recompute_layers", "recompute_stage_layers", "recompute_group")),
        (run.recompute != "selective", ("recompute_modules",)),
        (not run.cross_entropy_fusion, ("cross_entropy_fusion_impl",)),
        (not copies, ("overlap_grad_reduce", "overlap_param_gather")),
        (not (run.zero or shared) or run.optimizer == "muon" or in_step, ("overlap_param_gather",)),
    )
    changes: dict[str, Any] = {name: getattr(Strategy, name) for holds, names in idle if holds for name in names}
    changes["dropout"] = applies_dropout(model, run)
    if run.compile_loss == (run.compile and framework.kernels.compiled_loss):
        changes["compile_loss"] = None
    if run.gradient_accumulation_fusion is None and framework.data_parallel.fused_gradient_accumulation:
        changes["gradient_accumulation_fusion"] = True
    if not several or not run.zero:
        changes |= {"zero": 0, "zero_shard_size": 1}
    if run.pipeline_layout and "m" not in run.pipeline_layout:
        changes["pipeline_layout"] = layout_text(chunk_layers(run.pipeline_layout))
    if run.pp > 1 and run.schedule in ONE_F_ONE_B:
        changes["schedule"] = "interleaved" if run.vpp > 1 else "1f1b"
    stages = run.recomputed_of_stages
    count = stages[0] if len(set(stages)) == 1 else run.recompute_layers
    if run.recompute == "full" and max(count * run.pp, sum(stages)) >= model.num_hidden_layers:
        changes |= {"recompute_layers": -1, "recompute_stage_layers": ""}
    elif len(set(stages)) == 1:
        changes |= {"recompute_layers": count, "recompute_stage_layers": ""}
    return run.replace(**changes)


def stated_strategy(layout: Mapping[str, Any], world_size: int) -> Strategy:
    """Return the layout of a file, whose dp fills ``world_size`` ranks where the file does not state them.

    Raises InputError where the sizes do not multiply to the ranks.
    """
    framework = framework_of(str(layout["framework"]))
    values = filled({"world_size": world_size, **framework.flags, **framework.best_practice, **layout})
    shard = values.get("zero_shard_size", -1)
    whole = Strategy(**{**values, "zero_shard_size": max(shard, 1)})
    return whole.replace(zero_shard_size=whole.replicas) if shard < 1 and whole.zero else whole


def refuse_other(model: ModelSpec, asked: Strategy, read: Strategy, what: str) -> None:
    """Raise InputError with the first field in which ``read`` is not the layout that was asked for. what: the format."""
    wanted, got = effective(model, asked), effective(model, read)
    if _code(asked.framework) != _code(read.framework):
        raise InputError(f"the layout is {asked.framework}'s, and {what} is for {read.framework}")
    for field in fields(Strategy):
        mine, other = getattr(wanted, field.name), getattr(got, field.name)
        if mine != other and field.name != "framework":
            means = str(other).lower() if isinstance(other, bool) else other
            advice = (
                f"; --set {field.name}={means} asks for that" if field.name in CONSTANTS and means not in ("", None) else ""
            )
            raise InputError(f"{field.name} {mine}: {what} has no place for it (it would mean {other}){advice}")


def _code(name: str) -> Framework:
    """Return a release without its name, what is only a default, which files state, what it would also run, and what its
    Transformer Engine does."""
    found = framework_of(name)
    return replace(
        found,
        name="",
        released="",
        aliases=(),
        broad_aliases=(),
        flags={},
        best_practice={},
        can_run=GENERIC.can_run,
        kernels=replace(found.kernels, swizzled_casts=()),
    )


def refuse_other_model(asked: ModelSpec, read: ModelSpec, tp: int, what: str) -> None:
    """Raise InputError with the first field in which ``read`` is not the model that was asked for. what: the format."""
    wanted, got = _plain(asked, tp), _plain(read, tp)
    for field in fields(ModelSpec):
        mine, other = getattr(wanted, field.name), getattr(got, field.name)
        if mine != other:
            raise InputError(f"{asked.name}: {what} has no place for {field.name} {mine} (it would mean {other})")


def _plain(model: ModelSpec, tp: int) -> ModelSpec:
    """Return the model with what follows from other fields written out, and what changes nothing left out.

    The longest sequence of rotary positions only limits what may be asked for; the vocabulary is padded as Megatron does.
    """
    experts = tuple(int(has_experts(model, layer)) for layer in range(model.num_hidden_layers))
    by_layer = any(experts) and not model.one_block_layers
    changes: dict[str, Any] = {
        "name": "",
        "untimed": (),
        "first_k_dense_replace": 0,
        "moe_layer_freq": experts if by_layer else 1,
        "padded_vocab_size": model.padded_vocab(tp),
        "norm_bias": model.norm == "layernorm" and model.norm_bias,
        "max_position_embeddings": model.max_position_embeddings if model.position == "learned" else 0,
    }
    if model.has_latent_attention:
        changes |= {"num_key_value_heads": model.num_attention_heads, "head_dim": 1, "qk_norm": "none"}
    if all(experts):
        changes["intermediate_size"] = model.moe_intermediate_size
    return model.replace(**changes)


def interleaved(schedule: str, vpp: int) -> str:
    """Return the schedule's name in a layout of ``vpp`` chunks a stage."""
    return "interleaved" if vpp > 1 and schedule not in V_SHAPED else schedule
