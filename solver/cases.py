"""Measured training runs ("cases", one JSON object a line) as problems and layouts, with every assumption listed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from solver.frameworks import framework_of
from solver.model import ModelSpec, model_from_config
from solver.strategy import Strategy

#: Vocabulary where a source does not print it: GPT-2's, padded as Megatron does.
ASSUMED_VOCAB = 51200
_SCHEDULES = {"1f1b-interleaved": "interleaved"}
_CASE_KEYS = ("id", "hardware", "model", "run", "measured")


@dataclass(frozen=True)
class Case:
    """One measured run: ``model`` and ``strategy`` are None where ``skipped`` says why it cannot be expressed."""

    id: str
    hardware: str
    cluster: Mapping[str, Any]
    model: ModelSpec | None
    strategy: Strategy | None
    measured: Mapping[str, Any]
    assumptions: tuple[str, ...]
    skipped: str | None = None

    @property
    def source(self) -> str:
        """The collection a case belongs to: its id up to the first dash or colon."""
        return self.id.split(":")[0].split("-")[0]


def read_cases(path: Path) -> list[Case]:
    """All cases of a JSON-lines file, in order. Raises InputError naming file and line of what is not a case."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot read the cases: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file; cases are JSON objects, one a line") from None
    cases = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            plain = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not a JSON object: {error.msg} at column {error.colno}") from None
        missing = [key for key in _CASE_KEYS if not isinstance(plain, dict) or key not in plain]
        if missing:
            raise InputError(f"{path}:{number}: a case needs {', '.join(_CASE_KEYS)}; {missing[0]} is missing")
        cases.append(case_of(plain))
    if not cases:
        raise InputError(f"{path}: holds no case; a case is a JSON object on a line")
    return cases


def case_of(plain: Mapping[str, Any]) -> Case:
    """One case; what the program cannot express becomes ``skipped``, what the source left out becomes an assumption."""
    assumptions: list[str] = []
    model, strategy, skipped = None, None, None
    try:
        model = _model(plain["model"], assumptions)
        skipped = _inexpressible(model, plain["run"])
        if not skipped:
            strategy = _strategy(plain["run"], model, assumptions)
    except InputError as error:
        skipped = str(error)
    cluster = plain.get("cluster") or {}
    if "inter_node_gbit_per_gpu" not in cluster:
        assumptions.append("inter_node_gbit_per_gpu: the hardware's usual network")
    return Case(
        str(plain["id"]),
        str(plain["hardware"]),
        cluster,
        model,
        strategy,
        plain["measured"],
        tuple(assumptions),
        skipped,
    )


def _model(config: Mapping[str, Any], assumptions: list[str]) -> ModelSpec:
    config = dict(config)
    if not config.get("vocab_size"):
        config["vocab_size"] = ASSUMED_VOCAB
        assumptions.append(f"vocab_size: {ASSUMED_VOCAB}")
    return model_from_config(config, "model")


def _inexpressible(model: ModelSpec, run: Mapping[str, Any]) -> str | None:
    if model.is_mixture_of_experts or int(run.get("ep") or 1) > 1:
        return "mixture-of-experts layers are not described yet"
    if model.has_latent_attention:
        return "latent attention is not described yet"
    return None


def _strategy(run: Mapping[str, Any], model: ModelSpec, assumptions: list[str]) -> Strategy:
    """The case's layout: its keys, then the framework's defaults, then Strategy's; each default is an assumption."""
    known = {field.name for field in fields(Strategy)}
    given = {key: value for key, value in run.items() if key in known and value is not None}
    framework = framework_of(str(run.get("framework", "generic")))
    if framework.name == "generic":
        assumptions.append(f"framework {run.get('framework', 'not given')}: Megatron-like defaults")
    values: dict[str, Any] = {**framework.defaults, **given, "framework": str(run.get("framework", "generic"))}
    values["schedule"] = _SCHEDULES.get(values.get("schedule", "1f1b"), values.get("schedule", "1f1b"))
    if int(values.get("vpp", 1)) > 1:
        values["schedule"] = "interleaved"
    if "tp_mode" not in given:
        values["tp_mode"] = "msp" if run.get("sequence_parallel") and values.get("tp", 1) > 1 else "mtp"
    if isinstance(values.get("cross_entropy_fusion"), str):
        values["cross_entropy_fusion"] = values["cross_entropy_fusion"] not in ("", "none", "false")
    batch = run.get("global_batch_size")
    size, dp = values.get("micro_batch_size", 1), values.get("dp")
    if dp is None:
        dp = values["world_size"] // (values.get("tp", 1) * values.get("cp", 1) * values.get("pp", 1))
        values["dp"] = max(dp, 1)
    if batch is not None and "num_micro_batches" not in given:
        if batch % (values["dp"] * size):
            raise InputError(f"global_batch_size {batch} is not a multiple of dp {values['dp']} * micro_batch_size {size}")
        values["num_micro_batches"] = batch // (values["dp"] * size)
    if "zero_shard_size" not in given:
        values["zero_shard_size"] = values["dp"] * values.get("cp", 1) if values.get("zero", 1) else 1
    layers, pp = model.num_hidden_layers, values.get("pp", 1)
    if pp > layers:
        raise InputError(f"pp {pp} is more than the model's {layers} layers")
    assumptions += [
        f"{key}: {values.get(key, getattr(Strategy, key, None))} (default of {framework.name})"
        for key in ("recompute", "precision", "attention", "zero", "grad_dtype", "overlap_grad_reduce", "fused_norm")
        if key not in given
    ]
    if "sequence_parallel" not in run and "tp_mode" not in run and values.get("tp", 1) > 1:
        assumptions.append("sequence_parallel: false")
    unread = sorted(set(run) - known - {"sequence_parallel", "global_batch_size", "ep", "etp"})
    assumptions += [f"not read: {key}={run[key]}" for key in unread]
    return Strategy(**values)
