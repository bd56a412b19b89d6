"""YAML experiments of AMD's Primus over Megatron-LM, as a model and a layout (primus_names says which keys)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError, shown
from solver.formats.file_run import FileRun, Source
from solver.formats.megatron.export import model_arguments
from solver.formats.megatron.flags import KNOWN, UNMODELLED
from solver.formats.megatron.python_names import FLAGS, INVERTED
from solver.formats.megatron.run import TEST_GPUS, run_of_arguments
from solver.formats.megatron.values import whole
from solver.formats.model_file import model_beside, shipped_model
from solver.formats.primus import names
from solver.formats.primus.rules import RULES
from solver.formats.rule import Arguments, broken
from solver.formats.syntax.literal_python import Section
from solver.spec.choices import V_SHAPED
from solver.spec.layer_kinds import has_experts
from solver.spec.model import ModelSpec
from solver.spec.pipeline_layout import chunk_layers, layers_of_chunks, layout_text
from solver.spec.strategy import Strategy

FRAMEWORK = "primus-2026"
_TRAINER = "pre_trainer"
_VARIABLE = re.compile(r"\$\{(\w+)(?::([^{}]*))?\}")
_SIZES = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")

Values = dict[str, Any]


def is_primus(sections: Section) -> bool:
    return isinstance(sections.get("modules"), Section)


def read_primus(sections: Section, source: Source) -> FileRun:
    """Return the run of an experiment; its model is one that ships, or stands beside it as config.json, or in its overrides.

    The number of GPUs is that of the script beside it, or that of a node, or the least that the groups divide. Raises
    InputError for keys and values that are not known or not modelled, by name.
    """
    trainer = sections["modules"].get(_TRAINER)
    if not isinstance(trainer, Section) or str(trainer.get("framework")) != "megatron":
        raise InputError(f"{source.path}: of Primus's experiments those with modules.{_TRAINER} of framework megatron are read")
    overrides = trainer.get("overrides")
    if overrides is not None and not isinstance(overrides, Section):
        raise InputError(f"{source.path}: overrides is {shown(overrides)}; it must be a mapping of arguments")
    notes: list[str] = []
    given = {key: _filled(value, source, notes) for key, value in (overrides or {}).items()}
    _refuse(given, source, overrides.lines if overrides is not None else {})
    stem = re.sub(r"\.ya?ml$", "", str(_filled(trainer.get("model", ""), source, notes)))
    values, model = _base(stem, given, source)
    flags = model_arguments(model, Strategy(world_size=1, seq_len=1)) if model else {}
    flags = {flag: value for flag, value in flags.items() if flag != "tokenizer-type" or "vocab_size" not in given}
    if model and model.has_latent_attention:
        # of the heads where multi_latent_attention is turned off: as wide as a value (deepseek_v3.yaml: 128)
        flags["kv-channels"] = model.v_head_dim
    flags, schedule = _with(flags, {**values, **given}), _schedule(given, source)
    if "vpp" in schedule:  # chunks of a V-shaped schedule obey no rule of interleaving; counts of layers are those of a chunk
        flags.pop("num-virtual-stages-per-pipeline-rank", None)
        if "recompute-num-layers" in flags and flags.get("recompute-method") == "block":
            flags["recompute-num-layers"] *= schedule["vpp"]
    if "num-experts" not in flags and "moe_token_dispatcher_type" not in given:  # of the base files, for models with experts
        flags.pop("moe-token-dispatcher-type", None)
    if source.vocab_size:
        flags.setdefault("vocab-size", source.vocab_size)
    world, assumed = _world(flags, source)
    read = run_of_arguments({f"--{flag}": value for flag, value in flags.items()}, world, source.path, assumed)
    layout = {**read.layout, "framework": FRAMEWORK, **schedule}
    if given.get("use_turbo_deepep"):
        layout["moe_dispatcher"] = "deepep"
    layout |= _recomputed(given, read.model, layout, source)
    left = [f"left out of the estimate: {what} ({key})" for key, what in names.LEFT_OUT.items() if given.get(key)]
    called = read.model if not model else read.model.replace(name=model.name)
    refusals = (*read.refusals, *broken(RULES, Arguments({**values, **given}, world)))
    return FileRun(called, layout, read.assumed, read.ignored, (*read.notes, *left, *dict.fromkeys(notes)), refusals)


def _world(flags: Mapping[str, Any], source: Source) -> tuple[int, tuple[str, ...]]:
    """Return the GPUs that the script beside an experiment starts, or else an assumed number of them."""
    script = source.beside(f"{source.path.stem}.sh") or ""
    stated = [re.search(rf"\b{name}=(\d{{1,7}})\b", script) for name in ("NNODES", "GPUS_PER_NODE")]
    if stated[0] and stated[1]:
        return int(stated[0][1]) * int(stated[1][1]), ()
    if source.world:
        return source.world, ()
    ranks = 1
    for flag in _SIZES:
        ranks *= whole(flags, flag, 1)
    return -(-TEST_GPUS // ranks) * ranks, ("world_size",)


def _filled(value: Any, source: Source, notes: list[str]) -> Any:
    """Return a value with the defaults of its variables, which are said: ${PRIMUS_TP:1} is 1."""
    if not isinstance(value, str):
        return value
    for name, default in _VARIABLE.findall(value):
        if name in source.variables:
            continue
        if not default:
            raise InputError(f"{source.path}: ${{{name}}} has no default; write its value, or give --env {name}=...")
        notes.append(f"${{{name}}} is taken as {default}, its default")
    filled = _VARIABLE.sub(lambda found: source.variables.get(found[1], found[2]), value)
    if filled == value:
        return value
    words = {"null": None, "true": True, "false": False}
    return words.get(filled, int(filled) if re.fullmatch(r"-?\d{1,9}", filled) else filled)


def _refuse(given: Mapping[str, Any], source: Source, lines: Mapping[str, int]) -> None:
    own = {*names.READ, *names.IDLE, *names.LEFT_OUT, *INVERTED}
    for key, value in given.items():
        line = f", line {lines[key]}" if key in lines else ""
        if key in names.UNMODELLED:
            if value:
                raise InputError(f"{source.path}{line}: {key}: {names.UNMODELLED[key]} is not modelled")
        elif key not in own and _flag(key) not in KNOWN | UNMODELLED.keys():
            raise InputError(f"{source.path}{line}: Primus's {key} is not known here; remove it if it changes nothing")


def _flag(key: str) -> str:
    return FLAGS.get(key, key.replace("_", "-"))


def _base(stem: str, given: Mapping[str, Any], source: Source) -> tuple[Values, ModelSpec | None]:
    """Return what the base files set, and the model that an experiment names."""
    known = names.MODELS.get(re.sub("[^a-z0-9]", "", stem.lower()))
    if stem == names.WITHOUT_MODEL or (not known and "hidden_size" in given):
        return dict(names.BASE), None
    model = shipped_model(known) if known else model_beside(source, f"its model {shown(stem)} is not among those known here")
    base = {
        key: value
        for key, value in names.BASE.items()
        if key not in ("swiglu", "add_bias_linear", "untie_embeddings_and_output_weights")
    }
    return {**base, **names.LLAMA_BASE, **(names.DEEPSEEK_BASE if model.has_latent_attention else {})}, model


def _with(flags: Mapping[str, Any], values: Mapping[str, Any]) -> Values:
    """Return Megatron's flags with those that values state by their Python names; false and null take a flag away."""
    found = dict(flags)
    for key, value in values.items():
        if key in INVERTED:
            flag, there = INVERTED[key], value is False
            value = True
        else:
            flag, there = _flag(key), value is not None and value is not False
        if key in names.READ or key in names.IDLE or key in names.LEFT_OUT or key in names.UNMODELLED:
            continue
        found.pop(flag, None)
        if there:
            found[flag] = value
    if found.get("recompute-granularity") == "full" and values.get("recompute_layer_ids") is not None:
        found |= {"recompute-method": "uniform", "recompute-num-layers": 1}  # _recomputed says which layers
    return found


def _schedule(given: Mapping[str, Any], source: Source) -> Values:
    """Return the schedule of a zero-bubble patch, with the two chunks a stage that a V-shaped one has."""
    if not given.get("patch_zero_bubble"):
        return {}
    v_shaped, memory = bool(given.get("zero_bubble_v_schedule")), str(given.get("zero_bubble_v_schedule_mem_setup", "half"))
    found = [name for name, (_, v, setup) in names.ZERO_BUBBLE.items() if v == v_shaped and (not v or setup == memory)]
    if not found:
        raise InputError(f"{source.path}: zero_bubble_v_schedule_mem_setup is {shown(memory)}; it must be half, min or zb")
    return {"schedule": found[0], **({"vpp": 2} if v_shaped else {})}


def _recomputed(given: Mapping[str, Any], model: ModelSpec, layout: Mapping[str, Any], source: Source) -> Values:
    """Return how many layers each stage recomputes where recompute_layer_ids lists them, numbered through the model."""
    ids = given.get("recompute_layer_ids")
    if ids is None:
        return {}
    apart = isinstance(ids, str) and re.fullmatch(r"\s*\d{1,5}(\s*,\s*\d{1,5})*\s*", ids)
    listed = [int(word) for word in ids.split(",")] if apart else ids
    layers, pp, vpp = model.num_hidden_layers, layout["pp"], layout["vpp"]
    good = isinstance(listed, list) and listed and all(type(one) is int and 0 <= one < layers for one in listed)
    if not good or layout["recompute"] != "full" or given.get("recompute_method"):
        raise InputError(
            f"{source.path}: recompute_layer_ids is {str(ids):.60}; it must be a list of layers from 0 to {layers - 1}, with "
            "recompute_granularity full and no recompute_method"
        )
    if pp == 1:
        return {"recompute_layers": len(set(listed))}
    text = layout["pipeline_layout"]
    if not text and layers % (pp * vpp):
        raise InputError(f"{source.path}: recompute_layer_ids beside stages of unlike size need pipeline_model_parallel_layout")
    chunks = chunk_layers(text) if text else (layers // (pp * vpp),) * (pp * vpp)
    alike = len({has_experts(model, layer) for layer in range(layers)}) == 1
    counts = []
    for stage, held in enumerate(layers_of_chunks(chunks, pp, layout["schedule"] in V_SHAPED)):
        again = [layer in listed for layer in held]
        if not alike and not all(again[: sum(again)]):
            raise InputError(
                f"{source.path}: recompute_layer_ids leaves out layers before others of stage {stage + 1}; where layers "
                "differ, the first ones of each stage are described"
            )
        counts.append(sum(again))
    laid_out = text or layout_text(chunks, model.num_nextn_predict_layers)
    return {"pipeline_layout": laid_out, "recompute_layers": -1, "recompute_stage_layers": "+".join(map(str, counts))}
