"""The run of a case as a layout: its keys, then its framework's defaults, then Strategy's; each default is an assumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from profiler.errors import InputError, shown
from solver.spec.choices import V_SHAPED
from solver.spec.framework import Framework
from solver.spec.frameworks import first_with_experts, framework_of, unknown_release
from solver.spec.frameworks.megatron import GENERIC
from solver.spec.model import ModelSpec
from solver.spec.model_attention import attention_of
from solver.spec.pipeline_layout import layout_text
from solver.spec.strategy import Strategy, replicas

_KNOWN = frozenset(field.name for field in fields(Strategy))
#: Shards over every rank that holds the same parameters, which is also what is meant where nothing is stated.
_EVERY_RANK = ("zero_shard_size", -1)
#: Settings whose default is worth a line where a run does not state them.
_NAMED_DEFAULTS = ("recompute", "precision", "attention", "zero", "grad_dtype", "overlap_grad_reduce", "fused_norm")


def layout_of_case(run: Mapping[str, Any], model: ModelSpec, assumptions: list[str]) -> Strategy:
    """Return the layout of a case's run; append what it does not state to ``assumptions``.

    Raises InputError for a value that is none, or that contradicts another.
    """
    given = {key: value for key, value in run.items() if key in _KNOWN and (key, value) != _EVERY_RANK}
    stated = str(run.get("framework", "generic"))
    framework = first_with_experts(framework_of(stated)) if model.is_mixture_of_experts else framework_of(stated)
    if framework is not framework_of(stated):
        assumptions.append(f"framework {framework.name}: the first release of {framework.family} described with experts")
        stated = framework.name
    elif unknown_release(stated):
        assumptions.append(f"framework {shown(stated)}: priced as {framework.name}, no such release is described")
    if framework.name == GENERIC.name:
        assumptions.append(f"framework {run.get('framework', 'not given')}: Megatron-like defaults")
    precision = given.get("precision", framework.flags.get("precision", Strategy.precision))
    flags = framework.flags_of(precision, given.get("fp8_recipe"))
    values: dict[str, Any] = {**flags, **attention_of(framework, model), **given, "framework": stated}
    for key in ("world_size", "seq_len"):
        values[key] = count_of(values, key, 0)
    values |= _schedule(values, given) | _tensor_mode(values, run, framework)
    tp, cp, pp = (count_of(values, key) for key in ("tp", "cp", "pp"))
    if "dp" not in values and values["world_size"] % (tp * cp * pp):
        raise InputError(f"world_size {values['world_size']} is not a multiple of tp {tp} * cp {cp} * pp {pp}")
    values["dp"] = count_of(values, "dp", max(values["world_size"] // (tp * cp * pp), 1))
    values |= _micro_batches(values, run, given, framework, assumptions)
    sizes = ("tp", "pp", "cp", *(("ep",) if model.is_mixture_of_experts else ()))
    assumptions += [f"{key}: 1 (not stated)" for key in sizes if key not in given]
    values |= _sharding(values, given, framework, assumptions)
    values |= _expert_tensor(values, given, model, framework, assumptions)
    values |= _end_stages(values, given, model, framework, assumptions)
    assumptions += [
        f"{key}: {value} (default of {framework.name})"
        for key in _NAMED_DEFAULTS
        if key not in given and (value := values.get(key, getattr(Strategy, key, None))) is not None
    ]
    if "sequence_parallel" not in run and "tp_mode" not in run and tp > 1:
        split = "true" if values["tp_mode"] == "msp" else "false"
        assumptions.append(f"sequence_parallel: {split} (usual with {framework.name})")
    values = _assigned(values, model, pp * count_of(values, "vpp"), framework)
    if "pipeline_layout" in values and "pipeline_layout" not in given:
        assumptions.append(f"pipeline_layout: {values['pipeline_layout']} (layers assigned as evenly as possible)")
    strategy = Strategy(**values)
    assumptions += [f"left out of the estimate: {what}" for what in strategy.unmodelled]
    unread = sorted(set(run) - _KNOWN - {"sequence_parallel", "global_batch_size"})
    assumptions += [f"not read: {key}={run[key]}" for key in unread]
    return strategy


def count_of(values: Mapping[str, Any], key: str, default: int = 1) -> int:
    """Return a positive whole number of a run. Raises InputError for anything else."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
        raise InputError(f"run key {key} is {value!r}; it must be a positive whole number")
    return value


def _switch(run: Mapping[str, Any], key: str, default: bool) -> bool:
    value = run.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"run key {key} is {shown(value)}; it must be true or false")
    return value


def _schedule(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schedule by its number of chunks; a V-shaped one has two, one on the way down the pipeline, one back."""
    named, vpp = values.get("schedule", "1f1b"), count_of(values, "vpp")
    if named in V_SHAPED:
        return {"schedule": named, **({} if "vpp" in given else {"vpp": 2})}
    return {"schedule": "interleaved" if vpp > 1 else named}


def _tensor_mode(values: Mapping[str, Any], run: Mapping[str, Any], framework: Framework) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "tp_mode" not in run:
        usual = framework.tensor_parallel.splits_sequence
        splits = _switch(run, "sequence_parallel", usual) and count_of(values, "tp") > 1
        found["tp_mode"] = "msp" if splits else "mtp"
    if isinstance(values.get("cross_entropy_fusion"), str):
        found["cross_entropy_fusion"] = values["cross_entropy_fusion"].lower() not in ("", "none", "false")
    return found


def _micro_batches(
    values: Mapping[str, Any], run: Mapping[str, Any], given: Mapping[str, Any], framework: Framework, assumptions: list[str]
) -> dict[str, int]:
    """Return size and number of micro batches by the global batch. Raises InputError where they contradict each other."""
    dp, pp, vpp, size = (count_of(values, key) for key in ("dp", "pp", "vpp", "micro_batch_size"))
    if "global_batch_size" not in run:
        if "num_micro_batches" not in given:
            assumptions.append("num_micro_batches: 1, because no global_batch_size is stated")
        return {}
    if "num_micro_batches" in given:
        if run["global_batch_size"] != dp * size * count_of(values, "num_micro_batches"):
            raise InputError(
                f"global_batch_size {run['global_batch_size']} is not dp {dp} * micro_batch_size {size} * num_micro_batches "
                f"{values['num_micro_batches']}"
            )
        return {}
    batch = count_of(run, "global_batch_size")
    if batch % (dp * size):
        raise InputError(f"global_batch_size {batch} is not a multiple of dp {dp} * micro_batch_size {size}")
    each, found = batch // dp, {}
    if framework.pipeline.micro_batches_as_stages and pp > 1 and "micro_batch_size" not in given and each % (pp * vpp) == 0:
        size = found["micro_batch_size"] = each // (pp * vpp)
        assumptions.append(f"micro_batch_size: {size}, so that there are as many micro batches as stages")
    return {**found, "num_micro_batches": batch // (dp * size)}


def _sharding(
    values: Mapping[str, Any], given: Mapping[str, Any], framework: Framework, assumptions: list[str]
) -> dict[str, int]:
    found: dict[str, int] = {}
    if count_of(values, "pp") > 1 and values.get("zero") == 3 and framework.pipeline.keeps_weights:
        found["zero"] = 2
        assumptions.append("zero: 2, because with a pipeline weights stay whole between micro batches")
    if "zero_shard_size" not in given:
        sizes = (count_of(values, key) for key in ("tp", "cp", "dp", "wp"))
        copies = int(replicas(values.get("tp_mode") == "isp", *sizes))
        found["zero_shard_size"] = copies if values.get("zero", 1) else 1
    return found


def _expert_tensor(
    values: Mapping[str, Any], given: Mapping[str, Any], model: ModelSpec, framework: Framework, assumptions: list[str]
) -> dict[str, int]:
    """Return etp as the framework has it where it is not stated: tp, if the groups of experts then fill the ranks."""
    tp, cp, dp = (count_of(values, key) for key in ("tp", "cp", "dp"))
    follows = model.is_mixture_of_experts and "etp" not in given and framework.tensor_parallel.experts_follow
    if tp == 1 or not follows or tp * cp * dp % (values.get("ep", 1) * tp):
        return {}
    assumptions.append(f"etp: {tp} (default of {framework.name}: tp)")
    return {"etp": tp}


def _end_stages(
    values: Mapping[str, Any], given: Mapping[str, Any], model: ModelSpec, framework: Framework, assumptions: list[str]
) -> dict[str, bool]:
    """Return that embedding and loss count as layers, where a run that says nothing of its stages can have had no others."""
    can, layers = framework.can_run, model.num_hidden_layers
    chunks = count_of(values, "pp") * count_of(values, "vpp")
    silent = not any("pipeline_s" in key for key in given)
    offered = (can.counts_embedding_and_loss and not can.uneven_stages) or framework.name == GENERIC.name
    if not (silent and offered and layers % chunks and (layers + 2) % chunks == 0):
        return {}
    assumptions.append("embedding and loss count as layers, or the stages would not divide")
    return dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True)


def _assigned(values: Mapping[str, Any], model: ModelSpec, chunks: int, framework: Framework) -> dict[str, Any]:
    """Return ``values`` with a layout string where ``chunks`` equal ones would not hold all layers and nothing says what does.

    What is left over goes to the chunks after the first, one each, and not to the last, which has the head. Raises InputError
    where the framework takes no layout string.
    """
    layers = model.num_hidden_layers
    stated = any(key.startswith("num_layers_in_") for key in values) or values.get("pipeline_layout")
    counted = sum(bool(values.get(f"account_for_{end}_in_pipeline_split")) for end in ("embedding", "loss"))
    if stated or values.get("vpp", 1) == 1 or (layers + counted) % chunks == 0:
        return dict(values)
    if counted or not framework.can_run.pipeline_layout or layers < chunks:
        raise InputError(f"{layers} layers{f' and {counted} ends' * (counted > 0)} do not divide into {chunks} equal chunks")
    share, rest = divmod(layers, chunks)
    more = range(rest) if rest == chunks - 1 else range(1, rest + 1)
    sizes = [share + (number in more) for number in range(chunks)]
    return {**values, "pipeline_layout": layout_text(sizes, model.num_nextn_predict_layers)}
