"""Measured training runs ("cases", one JSON object per line) as models and layouts, with every assumption listed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from profiler.errors import InputError, shown
from profiler.profile.devices import device_named
from solver.formats.hugging_face import MARKS, model_of_config, unread_keys
from solver.formats.megatron_args import sections_of_megatron
from solver.formats.published_recipes import with_facts, with_recipe
from solver.formats.stated_stages import with_stages
from solver.formats.synonyms import normalized_run
from solver.formats.text_file import read_text
from solver.formats.unstated import alternatives
from solver.spec.bounds import NUMBERS, number, whole_number
from solver.spec.cluster import FIGURES
from solver.spec.framework import Framework
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec, check_model, model_from_keys, unknown_keys
from solver.spec.pipeline_layout import layout_text
from solver.spec.size_rules import check_sizes
from solver.spec.strategy import WAVES, Strategy

#: Vocabulary size where a source does not state it: GPT-2's, padded as Megatron does.
ASSUMED_VOCAB = 51200
#: Kinds of measured peak memory: the framework's counter, its allocator's, the whole device's.
MEMORY_KINDS = ("allocated", "reserved", "device")
#: Value of ``memory_of``: the peak of the job's last rank instead of the fullest one's.
LAST_RANK = "last rank"
MAX_BYTES = 1 << 28  #: limit of a file of cases
_OTHER_LAYERS = r"mamba|ssm|hybrid|encoder|linear_att|rwkv|recurrent"  #: keys of a model of other layers
_UNGATED = ("gelu", "gelu_new", "relu", "relu2", "squared_relu")  #: activations of MLPs without a gate
_LINE = "line"  #: begins the id of what is no case
_CASE_KEYS = ("id", "hardware", "model", "run", "measured")


@dataclass(frozen=True)
class Case:
    """One measured run; ``model`` and ``strategy`` are None where ``skipped`` states why the run cannot be expressed."""

    id: str
    hardware: str
    cluster: Mapping[str, Any]
    model: ModelSpec | None
    strategy: Strategy | None
    measured: Mapping[str, Any]
    assumptions: tuple[str, ...]
    skipped: str | None = None
    #: Layouts that the run may have had, ``strategy`` first, where it does not state all (solver.formats.unstated).
    alternatives: tuple[Strategy, ...] = ()

    @property
    def source(self) -> str:
        """The collection that the case belongs to: its id up to the first dash or colon."""
        return self.id.split(":")[0].split("-")[0]


def read_cases(path: Path) -> list[Case]:
    """Return all cases of a JSON-lines file, in order; a line that is no case is one that is skipped, named by its number.

    Raises InputError for a file that cannot be read or holds no case at all.
    """
    text = read_text(path, "a file of cases, JSON objects one a line", MAX_BYTES)
    cases = [_case_of_line(line, number) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if all(case.strategy is None and case.id.startswith(_LINE) for case in cases):
        reasons = f": {cases[0].id}: {cases[0].skipped}" if cases else ""
        raise InputError(f"{path}: holds no case; a case is a JSON object on a line{reasons}")
    return cases


def _case_of_line(line: str, number: int) -> Case:
    """Return the case of one line of a file; what cannot be read is skipped with the reason."""
    reason = ""
    try:
        plain = json.loads(line, object_pairs_hook=_distinct_keys)
        missing = [key for key in _CASE_KEYS if not isinstance(plain, dict) or key not in plain]
        if not missing:
            return case_of(plain)
        reason = f"a case needs {', '.join(_CASE_KEYS)}; {missing[0]} is missing"
    except json.JSONDecodeError as error:
        reason = f"not a JSON object: {error.msg} at column {error.colno}"
    except (InputError, RecursionError) as error:
        reason = str(error) or "nested too deeply"
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"a value of the wrong kind: {str(error)[:80]}"
    return Case(f"{_LINE} {number}", "", {}, None, None, {}, (), reason)


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of ``pairs``. Raises InputError for a key that stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        raise InputError(f"key {next(key for key in names if names.count(key) > 1)!r} stands twice in one object")
    return found


def case_of(plain: Mapping[str, Any]) -> Case:
    """Return one case; what the program cannot express becomes ``skipped``, what the source left out becomes an assumption.

    A null counts as an absent key. Raises InputError where a section is not an object.
    """
    name = str(plain["id"])
    sections = {key: _section(plain.get(key), name, key) for key in ("cluster", "model", "run", "measured")}
    assumptions: list[str] = []
    hardware = device_named(str(plain["hardware"]))
    if hardware != plain["hardware"]:
        assumptions.append(f"hardware: {hardware}")
    model, strategy, skipped = None, None, None
    others: tuple[Strategy, ...] = ()
    try:
        if "megatron_args" in plain:
            given = _section(plain["megatron_args"], name, "megatron_args")
            sections["model"], sections["run"] = sections_of_megatron(given, _count(sections["run"], "world_size"), assumptions)
        named = framework_of(str(sections["run"].get("framework", "")))
        model = _model(sections["model"], named, assumptions)
        if sections["run"].get("ep", 1) != 1 and not model.is_mixture_of_experts:
            raise InputError(f"run key ep is {sections['run']['ep']!r}, but the model has no experts")
        check_model(model, _count(sections["run"], "seq_len"), approximate=True)
        run = normalized_run(sections["run"], hardware, assumptions)
        run = with_stages(with_recipe(run, model, hardware, assumptions), model.num_hidden_layers)
        strategy = _strategy(run, model, assumptions)
        check_sizes(model, strategy)
        others = alternatives(run, model, framework_of(strategy.framework), strategy)
        _check_figures(sections["cluster"], sections["measured"])
    except InputError as error:
        skipped = str(error)
    unread = sorted(sections["cluster"].keys() - {*FIGURES, "gpus_per_node"})
    assumptions += [f"not read: cluster.{key}={sections['cluster'][key]}" for key in unread]
    if "inter_node_gbit_per_gpu" not in sections["cluster"]:
        assumptions.append("inter_node_gbit_per_gpu: the hardware's usual network")
    return Case(
        name,
        hardware,
        sections["cluster"],
        model,
        strategy,
        sections["measured"],
        tuple(assumptions),
        skipped,
        others,
    )


def _section(value: Any, case: str, key: str) -> dict[str, Any]:
    if value is None and key == "cluster":
        return {}
    if not isinstance(value, dict):
        raise InputError(f"case {case}: {key} is {value!r}; it must be an object")
    return {name: entry for name, entry in value.items() if entry is not None}


def _check_section(section: str, values: Mapping[str, Any]) -> None:
    try:
        for key in values.keys() & NUMBERS.keys():
            number(key, values[key])
        if "gpus_per_node" in values:
            whole_number("gpus_per_node", values["gpus_per_node"])
    except InputError as error:
        raise InputError(f"{section} key {error}") from None


def _check_figures(cluster: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Raise InputError for a figure that is not a positive number within its bounds, or an unknown kind of memory."""
    _check_section("cluster", cluster)
    _check_section("measured", measured)
    if measured.get("memory_kind", MEMORY_KINDS[0]) not in MEMORY_KINDS:
        raise InputError(f"memory_kind is {shown(measured['memory_kind'])}; it must be one of {', '.join(MEMORY_KINDS)}")
    if measured.get("memory_of", LAST_RANK) != LAST_RANK:
        raise InputError(f"memory_of is {shown(measured['memory_of'])}; it must be {LAST_RANK!r} or absent")


def _model(config: dict[str, Any], framework: Framework, assumptions: list[str]) -> ModelSpec:
    if not config.get("vocab_size"):
        config = {**config, "vocab_size": framework.example_vocab or ASSUMED_VOCAB}
        assumptions.append(f"vocab_size: {config['vocab_size']}")
    foreign = bool(MARKS & set(config))
    unread = unread_keys(config) if foreign else unknown_keys(config, but_misspelt=True)
    other = [key for key in unread if re.search(_OTHER_LAYERS, key)]
    if other:
        raise InputError(f"model key {other[0]}: its layers are no transformer decoder's, which alone are described")
    assumptions += [f"not read: model.{key}={config[key]}" for key in unread]
    if not foreign and "gated_mlp" not in config and config.get("hidden_act") in _UNGATED:
        config = {**config, "gated_mlp": False}
    read = model_of_config if foreign else model_from_keys
    found = read({key: value for key, value in config.items() if key not in unread}, "model")
    stated = foreign or any("bias" in key for key in config)
    if framework.linear_bias and not (stated or found.gated_mlp or found.is_mixture_of_experts):
        found = found.replace(qkv_bias=True, output_bias=True, mlp_bias=True)
        assumptions.append("bias: of all linears")
    return with_facts(found, config, framework.family, assumptions)


def _count(values: Mapping[str, Any], key: str, default: int = 1) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
        raise InputError(f"run key {key} is {value!r}; it must be a positive whole number")
    return value


def _switch(run: Mapping[str, Any], key: str, default: bool) -> bool:
    value = run.get(key, default)
    if not isinstance(value, bool):
        raise InputError(f"run key {key} is {shown(value)}; it must be true or false")
    return value


def _must_count_ends(framework: Framework, layers: int, chunks: int, given: Mapping[str, Any]) -> bool:
    """Whether a run that states nothing about its stages can only have counted embedding and loss as layers."""
    can = framework.can_run
    silent = not any("pipeline_s" in key for key in given)
    offered = can.counts_embedding_and_loss and not can.uneven_stages
    return silent and offered and layers % chunks > 0 and (layers + 2) % chunks == 0


def _dealt(values: Mapping[str, Any], model: ModelSpec, chunks: int, framework: Framework) -> dict[str, Any]:
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


def _strategy(run: Mapping[str, Any], model: ModelSpec, assumptions: list[str]) -> Strategy:
    """Return the case's layout: its keys, then the framework's defaults, then Strategy's; each default is an assumption."""
    known = {field.name for field in fields(Strategy)}
    given = {key: value for key, value in run.items() if key in known}
    framework = framework_of(str(run.get("framework", "generic")))
    if framework.name == "generic":
        assumptions.append(f"framework {run.get('framework', 'not given')}: Megatron-like defaults")
    flags = framework.flags_of(given.get("precision", framework.flags.get("precision", Strategy.precision)))
    values: dict[str, Any] = {**flags, **given, "framework": str(run.get("framework", "generic"))}
    for key in ("world_size", "seq_len"):
        values[key] = _count(values, key, 0)
    tp, cp, pp, vpp, size = (_count(values, key) for key in ("tp", "cp", "pp", "vpp", "micro_batch_size"))
    named = values.get("schedule", "1f1b")
    if named in WAVES and "vpp" not in given:
        vpp = values["vpp"] = 2  # one chunk on the way down the pipeline, one on the way back
    values["schedule"] = "interleaved" if vpp > 1 and named not in WAVES else named
    if "tp_mode" not in given:
        usual = framework.tensor_parallel.splits_sequence
        values["tp_mode"] = "msp" if _switch(run, "sequence_parallel", usual) and tp > 1 else "mtp"
    if isinstance(values.get("cross_entropy_fusion"), str):
        values["cross_entropy_fusion"] = values["cross_entropy_fusion"].lower() not in ("", "none", "false")
    dp = values["dp"] = _count(values, "dp", max(values["world_size"] // (tp * cp * pp), 1))
    if "global_batch_size" in run and "num_micro_batches" not in given:
        batch = _count(run, "global_batch_size")
        if batch % (dp * size):
            raise InputError(f"global_batch_size {batch} is not a multiple of dp {dp} * micro_batch_size {size}")
        each = batch // dp
        if framework.pipeline.micro_batches_as_stages and pp > 1 and "micro_batch_size" not in given and each % (pp * vpp) == 0:
            size = values["micro_batch_size"] = each // (pp * vpp)
            assumptions.append(f"micro_batch_size: {size}, so that there are as many micro batches as stages")
        values["num_micro_batches"] = batch // (dp * size)
    elif "global_batch_size" in run and run["global_batch_size"] != dp * size * _count(values, "num_micro_batches"):
        raise InputError(
            f"global_batch_size {run['global_batch_size']} is not dp {dp} * micro_batch_size {size} * num_micro_batches "
            f"{values['num_micro_batches']}"
        )
    elif "num_micro_batches" not in given:
        assumptions.append("num_micro_batches: 1, because no global_batch_size is stated")
    sizes = ("tp", "pp", "cp", *(("ep",) if model.is_mixture_of_experts else ()))
    assumptions += [f"{key}: 1 (not stated)" for key in sizes if key not in given]
    if pp > 1 and values.get("zero") == 3 and framework.pipeline.keeps_weights:
        values["zero"] = 2
        assumptions.append("zero: 2, because with a pipeline weights stay whole between micro batches")
    if "zero_shard_size" not in given:
        values["zero_shard_size"] = dp * cp if values.get("zero", 1) else 1
    ranks = tp * cp * dp
    follows = model.is_mixture_of_experts and "etp" not in given and framework.tensor_parallel.experts_follow and tp > 1
    if follows and ranks % (values.get("ep", 1) * tp) == 0:
        values["etp"] = tp
        assumptions.append(f"etp: {tp} (default of {framework.name}: tp)")
    if _must_count_ends(framework, model.num_hidden_layers, pp * vpp, given):
        values |= dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), True)
        assumptions.append("embedding and loss count as layers, or the stages would not divide")
    assumptions += [
        f"{key}: {values.get(key, getattr(Strategy, key, None))} (default of {framework.name})"
        for key in ("recompute", "precision", "attention", "zero", "grad_dtype", "overlap_grad_reduce", "fused_norm")
        if key not in given
    ]
    if "sequence_parallel" not in run and "tp_mode" not in run and tp > 1:
        split = "true" if values["tp_mode"] == "msp" else "false"
        assumptions.append(f"sequence_parallel: {split} (usual with {framework.name})")
    values = _dealt(values, model, pp * vpp, framework)
    if "pipeline_layout" in values and "pipeline_layout" not in given:
        assumptions.append(f"pipeline_layout: {values['pipeline_layout']} (layers dealt as evenly as possible)")
    strategy = Strategy(**values)
    assumptions += [f"left out of the estimate: {what}" for what in strategy.unmodelled]
    unread = sorted(set(run) - known - {"sequence_parallel", "global_batch_size"})
    assumptions += [f"not read: {key}={run[key]}" for key in unread]
    return strategy
