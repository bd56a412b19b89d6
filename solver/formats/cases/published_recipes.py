"""Settings that a framework's own performance recipes have, for runs that state their layout and not much else.

Runs that NVIDIA publishes of NeMo, Megatron-Bridge and NeMo Automodel state model, accelerator, precision, release and layout;
the rest stands in the recipes of that release (configs/recipes, with their sources).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from predictor.network.expert_exchange import DISPATCHERS
from profiler.profile.devices import FOLDER as DEVICES
from profiler.profile.devices import read_datasheet
from solver.formats.cases.synonyms import spelling
from solver.formats.model_file import CONFIGS, shipped_model, shipped_models
from solver.spec.frameworks import framework_of
from solver.spec.model import ModelSpec

#: What tells models apart.
_SHAPE = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts", "moe_intermediate_size")
#: What a preset may know of a model of its name and shape that a run has not stated.
_FACTS = (
    "mlp_bias",
    "attention_sinks",
    "clamped_gate",
    "scaled_rope",
    "attention_gate",
    "shared_expert_gate",
    "layer_types",
    "one_block_layers",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_state_dim",
    "mamba_num_groups",
    "mamba_conv_kernel_dim",
    "mamba_chunk_size",
    "gated_mlp",
    "norm",
    "position",
    "qk_norm",
)
#: Keys that say the same as a fact in other words.
_IMPLIED = {"mlp_bias": ("bias",), "gated_mlp": ("hidden_act",), "layer_types": ("sliding_window", "sliding_window_every")}
#: The same for runs of one family: Megatron-Bridge's recipes train DeepSeek-V3 with its prediction of one more token.
_FACTS_OF: Mapping[str, tuple[str, ...]] = {"megatron-bridge": ("num_nextn_predict_layers",)}


@dataclass(frozen=True)
class Recipe:
    """settings: by field of Strategy. layout: the keys by which a run is recognised. releases: of the family; empty: any.
    not_modelled: what else it turns on. layers: of the model with fewer layers that it trains; 0: of the model itself."""

    family: str
    model: str
    devices: tuple[str, ...]
    precision: str
    releases: tuple[str, ...]
    layout: Mapping[str, int]
    settings: Mapping[str, Any]
    not_modelled: tuple[str, ...]
    source: str
    layers: int = 0


@cache
def _files() -> tuple[Mapping[str, Any], ...]:
    return tuple(json.loads(path.read_text(encoding="utf-8")) for path in sorted((CONFIGS / "recipes").glob("*.json")))


@cache
def recipes() -> tuple[Recipe, ...]:
    """Return all recipes of configs/recipes."""
    found = []
    for plain in _files():
        for row in plain["recipes"]:
            sequences = {key: tuple(row[key]) for key in ("devices", "releases", "not_modelled")}
            found.append(Recipe(plain["family"], **row | sequences))
    return tuple(found)


def with_fine_tuning(run: Mapping[str, Any], model: ModelSpec, assumptions: list[str]) -> dict[str, Any]:
    """Return ``run`` with what its family's recipes for fine-tuning set, where the model's name says that it is fine-tuned."""
    if "sft" not in re.findall("[a-z]+", model.name.lower()):
        return dict(run)
    family = framework_of(str(run.get("framework", ""))).family
    found: Mapping[str, Any] = next((plain.get("fine_tuning", {}) for plain in _files() if plain["family"] == family), {})
    settings = {key: value for key, value in found.get("settings", {}).items() if key not in run}
    assumptions += [f"{key}: {value} ({found['why']})" for key, value in settings.items()]
    return {**run, **settings}


def recipe_of(run: Mapping[str, Any], model: ModelSpec, hardware: str) -> Recipe | None:
    """Return the recipe of a run's release, model, accelerator and precision whose layout is the run's; None if there is none.

    Of several that of the same number of GPUs, else the first: more GPUs only repeat it. But a recipe that trains adapters is
    told from training a whole model by its number of GPUs.
    """
    name = str(run.get("framework", ""))
    family, release = framework_of(name).family, re.search(r"\d+(\.\d+)+", name)
    found = [
        recipe
        for recipe in recipes()
        if recipe.family == family
        and (not recipe.releases or (release and release[0] in recipe.releases))
        and hardware in recipe.devices
        and recipe.precision == run.get("precision", "bf16")
        and all(run.get(key, 1) == value for key, value in recipe.layout.items() if key != "world_size" and _states(run, key))
        and is_preset(model, recipe.model, recipe.layers)
        and (not recipe.settings.get("lora_rank") or recipe.layout["world_size"] == run.get("world_size"))
    ]
    return min(found, key=lambda recipe: recipe.layout["world_size"] != run.get("world_size"), default=None)


def with_recipe(run: Mapping[str, Any], model: ModelSpec, hardware: str, assumptions: list[str]) -> dict[str, Any]:
    """Return ``run`` with the settings of its recipe that it does not state; each is an assumption."""
    recipe = recipe_of(run, model, hardware)
    if recipe is None:
        return dict(run)
    settings = {key: value for key, value in recipe.settings.items() if key not in run}
    settings |= {key: recipe.layout[key] for key in ("vpp", "ep") if not _states(run, key)}
    if recipe.layout["tp"] > 1 and not {"sequence_parallel", "tp_mode"} & set(run):
        settings["tp_mode"] = "msp"  # models and recipes turn sequence parallelism on with tensor parallelism
    if "offload_layers" in settings and not read_datasheet(DEVICES / f"{hardware}.json").device.host_link:
        del settings["offload_layers"]
    of = f"{recipe.family}'s performance recipe for {recipe.model}"
    assumptions += [f"{key}: {value} ({of})" for key, value in settings.items()]
    assumptions += [f"not modelled: {what} ({of})" for what in recipe.not_modelled]
    return {**run, **settings}


def is_preset(model: ModelSpec, preset: str, layers: int = 0) -> bool:
    """Whether ``model`` has the shape of a shipped model, or of one with so many of its layers."""
    known = _preset(preset)
    wanted = {key: getattr(known, key) for key in _SHAPE} | ({"num_hidden_layers": layers} if layers else {})
    return all(getattr(model, key) == value for key, value in wanted.items())


def with_facts(model: ModelSpec, stated: Mapping[str, Any], family: str, assumptions: list[str]) -> ModelSpec:
    """Return ``model`` with what the shipped model of its name and shape knows beyond the keys that were ``stated``."""
    name = next((name for name in shipped_models() if spelling(name) == spelling(model.name)), None)
    if name is None or not is_preset(model, name):
        return model
    known = _preset(name)
    asked = [
        key
        for key in (*_FACTS, *_FACTS_OF.get(family, ()))
        if key not in stated and not any(other in stated for other in _IMPLIED.get(key, ()))
    ]
    facts = {key: getattr(known, key) for key in asked if getattr(known, key) != getattr(model, key)}
    if facts:
        assumptions.append(f"model: {', '.join(facts)}, as {name} has them")
    return model.replace(**facts)


def _states(run: Mapping[str, Any], key: str) -> bool:
    """Whether a run states this part of its layout: an ep of 1 is none beside kernels that send tokens between ranks."""
    if key == "ep" and run.get("ep", 1) == 1 and run.get("moe_dispatcher") in DISPATCHERS:
        return False
    return key not in ("vpp", "ep") or key in run


@cache
def _preset(name: str) -> ModelSpec:
    return shipped_model(name)
