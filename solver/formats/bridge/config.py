"""Megatron-Bridge's YAML files as a model and a layout: Megatron-LM's arguments under other names (bridge_names)."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

from solver.formats.bridge.complete import completed, is_complete
from solver.formats.bridge.names import (
    BACKENDS,
    DEFAULTS,
    DESCRIBED,
    INVERTED,
    KNOWN,
    LEFT_OUT_KEYS,
    MOMENTS,
    NAMED_ALIKE,
    OVERLAPS,
    RECIPES,
    SWITCHES,
    VALUES,
)
from solver.formats.bridge.recipe import over_recipe
from solver.formats.bridge.rules import RULES
from solver.formats.file_run import FileRun, Source
from solver.formats.megatron.export import model_arguments
from solver.formats.megatron.flags import SHARDING
from solver.formats.megatron.given import with_what_they_need
from solver.formats.megatron.rules import CORE
from solver.formats.megatron.run import TEST_GPUS, run_of_arguments
from solver.formats.model_file import model_beside
from solver.formats.rule import Arguments, broken, flattened
from solver.formats.syntax.known_keys import check_described, check_keys, unread_keys
from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader
from solver.spec.model import ModelSpec
from solver.spec.strategy import Strategy

FRAMEWORK = "megatron-bridge-26.06"
_KEY_OF_A_MODEL = "hidden_size"  #: a file without it changes a recipe
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

Flags = dict[str, Any]


def is_bridge(sections: Section) -> bool:
    return "model" in sections and "train" in sections


def read_bridge(sections: Section, source: Source) -> FileRun:
    """Return the run of a file; the model may stand beside it as config.json, as the recipe that the file changes has it.

    Raises InputError for keys and values that are not known or not modelled.
    """
    where, complete = str(source.path), is_complete(sections)
    sections, unknown = completed(sections, where) if complete else (sections, ())
    check_keys(sections, KNOWN, "", where)
    sections = _with_dist(sections, where)
    beside: ModelSpec | None = None
    taken: tuple[str, ...] = ()
    stated = SectionReader(sections, "", where, set()).section("model")
    if _KEY_OF_A_MODEL not in stated:  # it changes a recipe
        beside = model_beside(source, f"it states no model (model.{_KEY_OF_A_MODEL})")
        sections, taken = over_recipe(sections, beside.is_mixture_of_experts, where)
    file = SectionReader(sections, "", where, set())
    check_described(file, DESCRIBED)
    flags = _arguments(file, complete)
    if beside is not None:
        flags = _over_model(beside, file.section("model"), flags)
    ranks = math.prod(file.section("model").whole(key, 1) for key in _SIZES)
    dp = file.section("comm_overlap").whole("data_parallel_size", 0, least=0)
    world = dp * ranks or source.world
    assumed = () if world else ("world_size",)
    world = world or -(-TEST_GPUS // ranks) * ranks
    read = run_of_arguments({f"--{name}": value for name, value in flags.items()}, world, source.path, assumed, CORE)
    layout = {**read.layout, **_layout(file)}
    notes = (*read.notes, *taken, *_left_out(file), *_overruled(file))
    ignored = unknown if complete else tuple(unread_keys(sections, KNOWN, "", file.read))
    refusals = (*read.refusals, *broken(RULES, Arguments(flattened(sections), read.layout["world_size"])))
    return FileRun(read.model, layout, assumed, ignored, notes, refusals)


def _with_dist(sections: Section, where: str) -> Section:
    """Return the sections with Megatron-FSDP in ddp where dist says so (Bridge's training/config.py takes either)."""
    if SectionReader(sections, "", where, set()).section("dist").flag("use_megatron_fsdp", False):
        sections = deepcopy(sections)
        sections["ddp"] = sections.get("ddp") or Section()
        sections["ddp"]["use_megatron_fsdp"] = True
    return sections


def _arguments(file: SectionReader, complete: bool) -> Flags:
    """Return the arguments that a file states; a complete one has the defaults of what it does not turn on too."""
    model = file.section("model")
    flags = _model(model) | _moe(model) | _precision(file)
    if "comm_overlap" in file:
        flags = {flag: value for flag, value in flags.items() if flag not in OVERLAPS}
    flags |= _training(file)
    data = file.section("dataset")
    length = data.get("seq_length", data.get("sequence_length")) if complete else None
    if length:  # that of the samples; the model may take longer ones
        flags["seq-length"] = length
    # the layers are not among the flags where cpu_offloading is off, which no flag says
    offloads = {"cpu-offloading": True} if "cpu-offloading-num-layers" in flags else {}
    said = with_what_they_need(flags | offloads) if complete else flags
    return {flag: value for flag, value in said.items() if flag in flags}


def _over_model(beside: ModelSpec, model: SectionReader, stated: Flags) -> Flags:
    """Return the arguments of a recipe's model with those that a file states; a stated vocabulary is not that of the null
    tokenizer."""
    ranks, length = model.whole(_SIZES[0], 1), model.whole("seq_length")
    recipe = model_arguments(beside, Strategy(world_size=ranks, tp=ranks, seq_len=length))
    without = {"tokenizer-type"} if "vocab-size" in stated else set()
    return {flag: value for flag, value in recipe.items() if flag not in without} | stated


def _left_out(file: SectionReader) -> list[str]:
    """Return in words what is stated and left out of the estimate: kernels that are not fused, and buckets of another size."""
    found = []
    for dotted, (usual, what) in LEFT_OUT_KEYS.items():
        section, key = dotted.split(".")
        value = file.section(section).get(key)
        if value not in usual:
            found.append(f"left out of the estimate: {what} ({dotted} {value})")
    return found


def _layout(file: SectionReader) -> dict[str, Any]:
    """Return what no argument of Megatron-LM says, or says otherwise."""
    model, overlap, ddp = file.section("model"), file.section("comm_overlap"), file.section("ddp")
    sharded = ddp.flag("use_megatron_fsdp", False)
    stage = SHARDING[ddp.choice("data_parallel_sharding_strategy", SHARDING, "no_shard")]
    return {
        "framework": FRAMEWORK,
        **({"zero": stage} if sharded else {}),
        "tp_comm_overlap": overlap.flag("tp_comm_overlap", model.flag("tp_comm_overlap", False)),
        "p2p_overlap": overlap.flag("overlap_p2p_comm", model.flag("overlap_p2p_comm", True)),
        "moe_shared_expert_overlap": model.flag("moe_shared_expert_overlap", False),
        "moe_fused_experts": model.flag("use_transformer_engine_op_fuser", False),
        "fp8_attention": _has_fp8_attention(file),
        **({} if model.flag("apply_rope_fusion", True) else {"rope_fusion": False}),
        **({"moe_router_fp32": False} if model.get("moe_router_dtype", "fp32") is None else {}),
        **_amax_reduction(file),
    }


def _model(model: SectionReader) -> Flags:
    """Return the arguments that the section model states."""
    flags: Flags = {flag: model.get(key, DEFAULTS.get(key)) for flag, key in VALUES.items()}
    flags |= {flag: model.flag(key, DEFAULTS.get(key, False)) for flag, key in SWITCHES.items()}
    flags |= {flag: not model.flag(key, True) for flag, key in INVERTED.items()}
    flags |= {flag: model.get(key) for flag, key in NAMED_ALIKE.items() if key in model}
    flags |= _activation(model, bool(flags["swiglu"]))
    flags["pipeline-model-parallel-layout"] = _layout_text(model)
    flags["attention-backend"] = _backend(model)
    if _KEY_OF_A_MODEL in model and flags["ffn-hidden-size"] is None:  # transformer_config.py, gated or not
        flags["ffn-hidden-size"] = 4 * model.whole(_KEY_OF_A_MODEL)
    if flags["num-query-groups"] not in (None, flags["num-attention-heads"]):
        flags["group-query-attention"] = True
    hybrid = model.flag("is_hybrid_model", False)
    if hybrid and _KEY_OF_A_MODEL in model and model.get("hybrid_override_pattern") is None:
        raise model.wrong("hybrid_override_pattern", "stated, one letter a layer, because is_hybrid_model is true")
    if not model.flag("should_pad_vocab", _KEY_OF_A_MODEL not in model):
        flags["make-vocab-size-divisible-by"] = 1
    if flags["vocab-size"] is None and _KEY_OF_A_MODEL in model:
        raise model.wrong("vocab_size", "stated, because the tokenizer is not read")
    if not model.flag("cpu_offloading", False):
        flags.pop("cpu-offloading-num-layers")
    modules = model.texts("recompute_modules")
    if modules:
        flags["recompute-modules"] = " ".join(modules)
    if flags["fine-grained-activation-offloading"]:
        flags["offload-modules"] = " ".join(model.texts("offload_modules"))
    sizes = model.get("hierarchical_context_parallel_sizes")
    if sizes:
        flags["hierarchical-context-parallel-sizes"] = " ".join(map(str, sizes)) if isinstance(sizes, list) else str(sizes)
    return {flag: value for flag, value in flags.items() if value is not None and value is not False}


def _activation(model: SectionReader, gated: bool) -> Flags:
    """Return the flag of the function that ``activation_func`` names, where it is neither SiLU nor GELU."""
    given = model.get("activation_func")
    name = str(given.get("_target_") if isinstance(given, Section) else given).rsplit(".", 1)[-1]
    if name == "quick_gelu" and gated:
        return {"swiglu": False, "quick-geglu": True}
    return {"squared-relu": True} if name in ("squared_relu", "relu2") else {}


#: Modules of a list of chunks -> letters of a layout (pipeline_parallel_layer_layout.py).
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _layout_text(model: SectionReader) -> Any:
    """Return the layout of the pipeline as Megatron-LM's argument has it, of a list of chunks, each a list of modules, too."""
    given = model.get("pipeline_model_parallel_layout")
    if not isinstance(given, list):
        return given
    if not all(isinstance(chunk, list) and set(map(str, chunk)) <= _LETTERS.keys() for chunk in given):
        raise model.wrong("pipeline_model_parallel_layout", f"a text, or lists of {', '.join(_LETTERS)}")
    return "|".join("".join(_LETTERS[name] for name in chunk) for chunk in given)


def _backend(model: SectionReader) -> Any:
    """Return the attention backend, which stands as a text or as a member of an enumeration, by its name or its number."""
    given = model.get("attention_backend")
    if not isinstance(given, Section):
        return given
    numbers = {str([number]): name for name, number in BACKENDS.items()}
    name = given.get("_name_") or numbers.get(str(given.get("_args_")))
    if not isinstance(name, str) or name not in BACKENDS:
        raise model.wrong("attention_backend", f"one of {', '.join(BACKENDS)}")
    return name


def _moe(model: SectionReader) -> Flags:
    freq = model.get("moe_layer_freq")
    deep = model.flag("moe_enable_deepep", False) and "moe_flex_dispatcher_backend" not in model
    return ({} if freq is None else {"moe-layer-freq": freq}) | ({"moe-flex-dispatcher-backend": "deepep"} if deep else {})


def _has_fp8_attention(file: SectionReader) -> bool:
    """Return whether attention multiplies in 8 bits, which no named recipe of mixed precision says."""
    if isinstance(file.get("mixed_precision", ""), str):
        return False
    mixed = file.section("mixed_precision")
    if mixed.flag("fp8_multi_head_attention", False):
        raise mixed.wrong("fp8_multi_head_attention", "false: attention's inputs and outputs in fp8 are not modelled")
    return mixed.flag("fp8_dot_product_attention", False)


def _amax_reduction(file: SectionReader) -> dict[str, str]:
    """Return over which ranks delayed scaling finds largest values, where it is used and the file says so."""
    alone = file.section("model").flag("tp_only_amax_red", False)
    return {"fp8_amax_reduction": "tensor"} if alone and _precision(file).get("fp8-recipe") == "delayed" else {}


def _precision(file: SectionReader) -> Flags:
    """Return the arguments of mixed precision, a named recipe or a section; it decides over what ddp says of gradients."""
    given: Any = file.get("mixed_precision", "bf16_mixed")
    if isinstance(given, str):
        name = given.replace("-", "_")
        if name not in RECIPES:
            raise file.wrong("mixed_precision", f"a section, or one of {', '.join(RECIPES)}")
        stated = Section()
        stated.update(RECIPES[name])
        mixed = SectionReader(stated, f"mixed_precision ({name})", file.place, set())
    else:
        mixed = file.section("mixed_precision")
    if not mixed.flag("fp8_wgrad", True):
        raise mixed.wrong("fp8_wgrad", "true: weight gradients of an fp8 run in 16 bits are not modelled")
    wide = mixed.flag("grad_reduce_in_fp32", True)
    if "mixed_precision" not in file:
        wide = file.section("ddp").flag("grad_reduce_in_fp32", True)
    if mixed.flag("bf16", False) and mixed.flag("fp16", False):
        raise mixed.wrong("fp16", "false beside bf16")
    flags: Flags = {
        "bf16": mixed.flag("bf16", False),
        "fp16": mixed.flag("fp16", False),
        "grad-reduce-in-bf16": not wide,
        "accumulate-allreduce-grads-in-fp32": wide,
    }
    if mixed.get("fp8"):
        flags |= {
            "fp8-format": mixed.text("fp8", ""),
            "fp8-recipe": mixed.text("fp8_recipe", "tensorwise"),
            "fp8-param-gather": mixed.flag("fp8_param_gather", mixed.flag("fp8_param", False)),
        }
    elif mixed.get("fp4"):
        flags |= {"fp4-format": mixed.text("fp4", ""), "fp4-recipe": mixed.text("fp4_recipe", "nvfp4")}
    if (mixed.get("fp8") or mixed.get("fp4")) and mixed.flag("first_last_layers_bf16", False):
        flags["first-last-layers-bf16"] = True
        for end in ("start", "end"):
            flags[f"num-layers-at-{end}-in-bf16"] = mixed.whole(f"num_layers_at_{end}_in_bf16", 0, least=0)
    ends = ("num-layers-at-start-in-bf16", "num-layers-at-end-in-bf16")
    return {flag: value for flag, value in flags.items() if value or flag in ends}


_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")


def _overruled(file: SectionReader) -> tuple[str, ...]:
    """Return a note on switches of ddp that comm_overlap sets anew (comm_overlap.py, _get_optimizer_overlap_cfgs)."""
    if "comm_overlap" not in file:
        return ()
    ddp, overlap = file.section("ddp"), file.section("comm_overlap")
    idle = [key for key in _OVERLAPS if key in ddp and not ddp.flag(key, False) and key not in overlap]
    return tuple(f"ddp.{key} false has no effect: comm_overlap turns it on, unless its own {key} is false" for key in idle)


def _training(file: SectionReader) -> Flags:
    train, ddp, optimizer, overlap = (file.section(name) for name in ("train", "ddp", "optimizer", "comm_overlap"))
    beside = "comm_overlap" in file  # which turns both on where ranks are data-parallel
    sharded = ddp.flag("use_megatron_fsdp", False)
    flags: Flags = {
        "micro-batch-size": train.whole("micro_batch_size"),
        "global-batch-size": train.whole("global_batch_size"),
        "use-distributed-optimizer": ddp.flag("use_distributed_optimizer", False)
        or optimizer.flag("use_distributed_optimizer", False)
        or sharded,
        "num-distributed-optimizer-instances": ddp.whole("num_distributed_optimizer_instances", 1),
        **{key.replace("_", "-"): overlap.flag(key, ddp.flag(key, False) or beside) for key in _OVERLAPS},
        "overlap-moe-expert-parallel-comm": overlap.flag("overlap_moe_expert_parallel_comm", False),
        "delay-wgrad-compute": overlap.flag("delay_wgrad_compute", False),
        "defer-embedding-wgrad-compute": overlap.flag("defer_embedding_wgrad_compute", False),
        "wgrad-deferral-limit": overlap.whole("wgrad_deferral_limit", 0, least=0),
        "optimizer-cpu-offload": optimizer.flag("optimizer_cpu_offload", False),
        "use-precision-aware-optimizer": optimizer.flag("use_precision_aware_optimizer", False),
    }
    if flags["optimizer-cpu-offload"]:
        flags["optimizer-offload-fraction"] = optimizer.number("optimizer_offload_fraction", 1.0)
    for kind in ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype", "main_grads_dtype"):
        if kind in optimizer:
            flags[kind.replace("_", "-")] = _dtype(optimizer, kind)
    return {flag: value for flag, value in flags.items() if value}


def _dtype(optimizer: SectionReader, key: str) -> str:
    """Return a type of torch, which stands as a text or as a target that is not called."""
    value = optimizer.get(key)
    word = str(value.get("_target_") if isinstance(value, Section) else value)
    if word not in MOMENTS:
        raise optimizer.wrong(key, f"one of {', '.join(MOMENTS)}")
    return MOMENTS[word]
