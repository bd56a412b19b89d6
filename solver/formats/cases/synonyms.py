"""Other names of the keys, schedules, number formats and communication of a case's run and model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from profiler.errors import InputError, shown
from solver.spec.choices import CHOICES
from solver.spec.framework import Framework
from solver.spec.frameworks import framework_of
from solver.spec.pipeline_layout import chunk_layers
from solver.spec.run import SWITCH_TYPES
from solver.spec.strategy import Strategy

_LONGEST = 12  #: digits of a count

#: Letters and digits of a word -> this project's word. This project's own words match in any spelling; other words stay as
#: they are.
_WORDS: Mapping[str, Mapping[str, str]] = {
    "schedule": {"1f1binterleaved": "interleaved", "interleaved1f1b": "interleaved", "zbvzerobubble": "zb-v", "afab": "gpipe",
                 "zerobubble": "zb-h1", "zbh2": "zb-2p", "zerobubbleh2": "zb-2p"},
    "cp_comm": {"p2p": "ring", "alltoall": "a2a", "ulysses": "a2a", "a2ap2p": "a2a+ring"},
    "grad_dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"},
    "precision": {"bfloat16": "bf16", "bf16mixed": "bf16", "float16": "fp16", "half": "fp16", "fp16mixed": "fp16",
                  "16mixed": "fp16", "float8": "fp8", "fp8hybrid": "fp8", "fp8e4m3": "fp8", "fp8delayed": "fp8", "fp8cs": "fp8",
                  "fp8mx": "mxfp8", "float32": "fp32", "fp8blockwise": "fp8", "fp8sc": "fp8", "fp8tensorwise": "fp8",
                  "bf16amp": "bf16", "bf16fp32": "bf16", "fp16amp": "fp16", "mixedbf16": "bf16", "fp8blockscaling": "fp8",
                  "fp8currentscaling": "fp8", "fp8delayedscaling": "fp8", "float8tensorwise": "fp8", "float8blockwise": "fp8",
                  "float8rowwise": "fp8", "fp8rowwise": "fp8"},
    "recompute": {"": "none", "false": "none", "no": "none", "off": "none", "true": "full", "yes": "full", "uniform": "full",
                  "block": "full", "layer": "full", "fulluniform": "full", "fullblock": "full", "gradientcheckpointing": "full",
                  "coreattn": "selective", "op": "selective", "selectivecoreattn": "selective", "selectiveop": "selective",
                  "sac": "selective"},
    "attention": {**dict.fromkeys(("flashattention", "flashattention2", "flashattention3", "flashattn", "flashattn2",
                                   "flashattn3", "fa2", "fa3", "sdpa", "cudnn", "cudnnfused", "te", "transformerengine",
                                   "fused", "xformers"), "flash"),
                  "eager": "unfused", "math": "unfused", "naive": "unfused"},
    "moe_dispatcher": {"flex": "deepep"},
    "optimizer": {"adamw": "adam", "fusedadam": "adam", "fusedadamw": "adam", "adamwfused": "adam"},
}  # fmt: skip
#: Of a precision's word: how it scales its values.
_RECIPES = {"fp8blockwise": "blockwise", "fp8sc": "blockwise", "fp8tensorwise": "tensorwise", "fp8delayed": "delayed",
            "fp8cs": "tensorwise", "fp8blockscaling": "blockwise", "fp8currentscaling": "tensorwise", "fp8rowwise": "rowwise",
            "fp8delayedscaling": "delayed", "float8tensorwise": "tensorwise", "float8blockwise": "blockwise",
            "float8rowwise": "rowwise"}  # fmt: skip
_OTHER_KEYS = {
    "cp_comm_type": "cp_comm", "pipeline_schedule": "schedule", "dtype": "precision", "zero_stage": "zero",
    "tensor_parallel_size": "tp", "tensor_model_parallel_size": "tp", "pipeline_parallel_size": "pp",
    "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp", "expert_parallel_size": "ep",
    "expert_model_parallel_size": "ep", "data_parallel_size": "dp", "virtual_pipeline_model_parallel_size": "vpp",
    "seq_length": "seq_len", "sequence_length": "seq_len", "num_gpus": "world_size", "mbs": "micro_batch_size",
    "per_device_train_batch_size": "micro_batch_size", "gbs": "global_batch_size",
    "gradient_accumulation_steps": "num_micro_batches", "gradient_accumulation": "num_micro_batches",
    "tp_size": "tp", "pp_size": "pp", "cp_size": "cp", "ep_size": "ep", "dp_size": "dp", "vp_size": "vpp",
    "gradient_checkpointing": "recompute", "activation_checkpointing": "recompute", "torch_compile": "compile",
    "ulysses_size": "cp", "expert_tensor_parallel_size": "etp",
}  # fmt: skip
#: Words of other tools: (key, letters and digits of its value) -> keys of ours.
_OTHER_SETTINGS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("sharding_strategy", "fullshard"): {"zero": 3}, ("sharding_strategy", "shardgradop"): {"zero": 2},
    ("sharding_strategy", "noshard"): {"zero": 0},
    ("use_distributed_optimizer", "true"): {"zero": 1}, ("use_distributed_optimizer", "false"): {"zero": 0},
}  # fmt: skip
#: Model keys of other tools, which cases may state too.
_OTHER_MODEL_KEYS = {
    "num_layers": "num_hidden_layers", "n_layers": "num_hidden_layers", "n_layer": "num_hidden_layers",
    "num_heads": "num_attention_heads", "n_heads": "num_attention_heads", "n_head": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "n_kv_heads": "num_key_value_heads", "num_query_groups": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size", "d_model": "hidden_size", "kv_channels": "head_dim",
    "num_moe_experts": "num_experts", "moe_router_topk": "num_experts_per_tok", "moe_top_k": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size", "num_shared_experts": "n_shared_experts",
}  # fmt: skip
_FORCED = "forcedbalance"  #: a router that spreads tokens evenly whatever they say, as benchmarks have it
_SWITCHES = {"true": True, "false": False}
_OF_SWITCHES = frozenset(field.name for field in fields(Strategy) if field.type in SWITCH_TYPES)
_COUNTS = ("world_size", "seq_len", "tp", "pp", "cp", "ep", "etp", "dp", "vpp", "wp", "micro_batch_size", "num_micro_batches",
           "global_batch_size", "zero", "zero_shard_size")  # fmt: skip


def normalized_run(run: Mapping[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """Return ``run`` in this project's names; any interpretation beyond spelling is added to ``assumptions``."""
    run = _of_other_keys(run)
    named = _renamed(run, _OTHER_KEYS)
    ours = {key: _word(key, value) for key, value in named.items()}
    recipe = _RECIPES.get(spelling(str(named.get("precision", ""))))
    if recipe and "fp8_recipe" not in ours:
        ours["fp8_recipe"] = recipe
    framework = framework_of(str(ours.get("framework", "")))
    if ours.get("recompute") == "selective" and framework.recomputation.selective_is_full:
        ours["recompute"] = "full"
    ours = _routed(ours, framework, assumptions)
    stage = re.search(r"zero\W?([0-3])\b", str(ours.get("framework", "")).lower())
    if stage and "zero" not in ours:
        ours["zero"] = int(stage[1])
    if "pipeline_layout" in ours and "vpp" not in ours and isinstance(ours.get("pp"), int) and ours["pp"] > 0:
        ours["vpp"] = max(len(chunk_layers(str(ours["pipeline_layout"]))) // ours["pp"], 1)
    ours = _cut_in_half(ours, assumptions) if spelling(str(ours.get("schedule", ""))) == "dualpipe" else ours
    return ours


def _of_other_keys(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run whose settings in the words of other tools are ours, where it does not state ours too."""
    found = dict(run)
    for key, value in run.items():
        meant = _OTHER_SETTINGS.get((key, spelling(str(value))))
        if meant and not meant.keys() & run.keys():
            del found[key]
            found |= meant
    return found


def named_as_ours(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case's model with the names of keys that other tools have as ours, where it does not state ours too."""
    return _renamed(model, _OTHER_MODEL_KEYS)


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return ``values`` with the keys of ``names`` called so, where the name is not there already."""
    return {key if names.get(key, key) in values else names[key]: value for key, value in values.items()}


def _routed(run: dict[str, Any], framework: Framework, assumptions: list[str]) -> dict[str, Any]:
    """Return a run whose router is forced as its framework forces it, with what else is said of it named."""
    stated = run.get("moe_routing")
    if stated is None or stated in CHOICES["moe_routing"]:
        return run
    how = framework.can_run.routings[-1] if spelling(str(stated)) == _FORCED else None
    assumptions.append(f"moe_routing: {how} ({stated})" if how else f"not read: moe_routing={stated}")
    return {key: value for key, value in run.items() if key != "moe_routing"} | ({"moe_routing": how} if how else {})


def _cut_in_half(run: dict[str, Any], assumptions: list[str]) -> dict[str, Any]:
    """Return a run of DualPipe as the DualPipeV that takes the same time and memory.

    Stage s of pp and stage pp - 1 - s hold the same two parts of the model and run the same passes, one for each direction:
    they are replicas of one V-shaped stage of pp / 2 (deepseek-ai/DualPipe, README; its dualpipev.py is named DualPipe cut in
    half for this). Raises InputError for an odd number of stages.
    """
    pp = run.get("pp", 1)
    if not isinstance(pp, int) or isinstance(pp, bool) or pp < 2 or pp % 2:
        raise InputError(f"schedule dualpipe needs an even number of stages, not pp {shown(pp)}")
    halved: dict[str, Any] = {"schedule": "dualpipev", "pp": pp // 2, "vpp": 2}
    if run.get("ep", 1) != 1 and "moe_exchange_overlap" not in run:
        halved["moe_exchange_overlap"] = True  # what the schedule is made for: a forward pass beside another's backward pass
        assumptions.append("moe_exchange_overlap: true, which DualPipe is made for")
    halved |= {"dp": run["dp"] * 2} if isinstance(run.get("dp"), int) else {}
    halved |= {"num_micro_batches": run["num_micro_batches"] // 2} if isinstance(run.get("num_micro_batches"), int) else {}
    assumptions.append(f"schedule: dualpipev with pp {pp // 2} and twice the replicas, which DualPipe with pp {pp} is")
    return {**run, **halved}


def _word(key: str, value: Any) -> Any:
    if key in _OF_SWITCHES and isinstance(value, str | int):
        return _SWITCHES.get(str(value).lower(), bool(value) if value in (0, 1) else value)
    if key in _COUNTS and isinstance(value, str | float):
        text = str(value).lower().removeprefix("zero").strip("-_ ").removeprefix("stage").strip("-_ ").removesuffix(".0")
        return int(text) if text.isdecimal() and len(text) < _LONGEST else value
    if key not in _WORDS or not isinstance(value, str | bool):
        return value
    own = {spelling(choice): choice for choice in CHOICES[key]}
    return {**own, **_WORDS[key]}.get(spelling(str(value).removeprefix("torch.")), value)


def spelling(word: str) -> str:
    """Return a name's letters and digits, in which people agree."""
    return re.sub("[^a-z0-9]", "", word.lower())
