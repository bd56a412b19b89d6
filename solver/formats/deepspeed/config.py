"""DeepSpeed's JSON, with the script that launches it, as a model and a layout; deepspeed_names has the sources.

NAME.json holds batch, precision and ZeRO. NAME.sh beside it is Megatron-DeepSpeed's, which states model and parallel sizes, or
launches transformers' run_clm.py, whose model is the config.json beside it; without a script only data parallelism is meant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profiler.errors import InputError
from profiler.text_file import json_object
from solver.formats.deepspeed.megatron import run_of_megatron_deepspeed
from solver.formats.deepspeed.names import (
    AUTO,
    BUCKET,
    DESCRIBED,
    FRAMEWORK,
    GRADIENTS,
    KNOWN,
    LEAST_BUCKET,
    PATHS_AND_COUNTS,
    PRECISIONS,
    STAGE_3,
    STAGE_3_FIELDS,
    TRAINERS,
)
from solver.formats.deepspeed.rules import RULES
from solver.formats.file_run import FileRun, Source, script_beside
from solver.formats.launch.ranks import ranks_of_launch
from solver.formats.launch.trainer_script import (
    NO_SEQUENCE,
    UNREAD,
    check_parameters,
    taken_to_train,
    trainer_at,
    trainer_fields,
    trainer_precision,
)
from solver.formats.launch.trainer_script import PROGRAM as TRAINER
from solver.formats.launch.words import (
    arguments,
    environment,
    launched_settings,
    of_environment,
    program_at,
    script_notes,
    script_words,
)
from solver.formats.megatron.flags import ARRANGEMENTS
from solver.formats.megatron.script import PROGRAM
from solver.formats.model_file import model_beside
from solver.formats.rule import Arguments, broken, flattened
from solver.formats.syntax.known_keys import open_sections, unread_keys
from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader
from solver.spec.frameworks import framework_of

_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_BATCH = {"micro_batch_size": "train_micro_batch_size_per_gpu", "num_micro_batches": "gradient_accumulation_steps"}
_NO_MODEL = "DeepSpeed's settings hold no model"
#: Models of transformers are not divided.
_TRANSFORMERS = {"tp": 1, "pp": 1}
#: Arguments of Megatron-DeepSpeed whose values need not be known.
_UNREAD = tuple(f"--{name}" for name in (*ARRANGEMENTS, *PATHS_AND_COUNTS))
_SETTINGS = ("--deepspeed_config", "--deepspeed")
#: Of ZeRO-3: key, least and most value with which whole layers are gathered ahead, and what other values mean.
_THRESHOLDS = (
    ("stage3_param_persistence_threshold", 0.0, 1e6, "matrices that stay gathered"),
    ("stage3_max_live_parameters", 1e8, math.inf, "layers that are gathered only when they are needed"),
    ("stage3_prefetch_bucket_size", 1e6, math.inf, "layers that are gathered only when they are needed"),
)


def is_deepspeed(plain: Mapping[str, Any]) -> bool:
    return any(mark in plain for mark in _MARKS)


def read_deepspeed(source: Source) -> FileRun:
    """Return the run of a JSON file. Raises InputError for keys and values that are not known or not modelled."""
    where, sections = str(source.path), _settings(source)
    file = open_sections(sections, KNOWN, DESCRIBED, where)
    script = script_beside(source)
    words = script_words(script) if script else ()
    settings = _zero(file) | _precision(file, _trainers(words, script))
    if "--cpu-optimizer" in words and "optimizer_offload_fraction" not in settings:
        zero = file.section("zero_optimization")
        raise zero.wrong("offload_optimizer", "{'device': 'cpu'} beside --cpu-optimizer of its script")
    launched = _launched(words, script, source, settings["precision"]) if script else None
    stated: Mapping[str, Any] = launched.layout if launched else _TRANSFORMERS | _ranks(file)
    settings, told = _sharded_by_pipelines(file, settings, stated)
    if settings["zero"]:
        settings["zero_shard_size"] = stated.get("dp", -1)
    model = launched.model if launched else model_beside(source, _NO_MODEL)
    framework = FRAMEWORK if program_at(words, PROGRAM) is not None else TRAINERS
    layout = {**framework_of(framework).flags, **stated, **settings, **_batch(file, stated)}
    assumed = tuple(key for key in ("micro_batch_size", "num_micro_batches", "seq_len", "world_size") if key not in layout)
    told += _buckets(file, framework, settings)
    ignored = (*unread_keys(sections, KNOWN, "", file.read), *(launched.ignored if launched else ()))
    world = int(stated.get("world_size", 0))
    refusals = broken(
        RULES,
        Arguments(
            flattened(sections) | _megatrons(words, script),
            world,
            environment(script, _program(words, script)) if script else {},
        ),
    )
    layout |= {"framework": framework}
    notes, per_node = (launched.notes, launched.gpus_per_node) if launched else ((), 0)
    return FileRun(model, layout, assumed, ignored, (*_timers(file), *told, *notes), refusals, per_node)


def _sharded_by_pipelines(
    file: SectionReader, settings: dict[str, Any], stated: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings, and a line, where a pipeline in bf16 without ZeRO shards its states all the same.

    Its optimizer is then BF16_Optimizer, which keeps fp32 weights and moments of a rank's part only, and in which gradients are
    added in fp32 unless the file says otherwise (deepspeed/runtime/engine.py of 2022 and 2023, get_data_types and
    _do_optimizer_sanity_check).
    """
    if settings["zero"] or settings["precision"] != "bf16" or stated.get("pp", 1) == 1:
        return settings, ()
    wide = {"grad_dtype": "fp32"} if file.section("data_types").get("grad_accum_dtype", AUTO) == AUTO else {}
    line = "zero_optimization.stage 0 with a pipeline in bf16 is estimated as ZeRO-1, as DeepSpeed's BF16_Optimizer shards"
    return {**settings, "zero": 1, **wide}, (line + (", with gradients added in fp32" if wide else ""),)


def _timers(file: SectionReader) -> tuple[str, ...]:
    """Return a line on what waits for the device to time it (DeepSpeed's utils/timer.py and utils/comms_logging.py)."""
    on = [name for name in ("comms_logger", "flops_profiler") if file.get(name, {}).get("enabled")]
    on += ["wall_clock_breakdown"] * bool(file.get("wall_clock_breakdown", False))
    return (f"left out, although it may change times: {', '.join(on)}",) if on else ()


def _buckets(file: SectionReader, framework: str, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line on buckets of gradients of another size than is estimated; without ZeRO there are none of a stated size.

    Raises InputError for so small ones that their number would count.
    """
    zero = file.section("zero_optimization")
    if not settings["zero"] or zero.get("reduce_bucket_size") == AUTO:
        return ()
    size = zero.get("reduce_bucket_size", BUCKET)
    if isinstance(size, bool) or not isinstance(size, int | float) or size < LEAST_BUCKET:
        raise zero.wrong("reduce_bucket_size", f"at least {LEAST_BUCKET}, because what small buckets take is not modelled")
    if framework == FRAMEWORK and size == BUCKET:
        return ()
    taken = f"of DeepSpeed's {BUCKET:,}" if framework == FRAMEWORK else "as transformers' trainer fills in for auto"
    gib = size * (4 if settings["precision"] == "fp32" else 2) / 2**30
    return (f"left out of the estimate: buckets of {size:,.0f} parameters, {gib:.2g} GiB each; buckets {taken} are taken",)


def settings_of_script(source: Source) -> Source:
    """Return the JSON that a script names. Raises InputError where it names none that is there."""
    words = script_words(source)
    pairs = [word.split("=", 1) for word in words if "=" in word] + [list(pair) for pair in zip(words, words[1:], strict=False)]
    name = next((value for key, value in pairs if key in _SETTINGS and value.endswith(".json")), "")
    return launched_settings(source, name, "DeepSpeed's settings, --deepspeed_config NAME.json")


def _settings(source: Source) -> Section:
    """Return the sections of a JSON file, with the fields of ZeRO-3 under the names that they usually have."""
    sections = Section.of(json_object(source.text, source.path))
    zero = sections.get("zero_optimization")
    if isinstance(zero, Section):
        for field in STAGE_3_FIELDS:
            if field in zero:
                zero.setdefault(f"{STAGE_3}{field}", zero.pop(field))
    return sections


def _zero(file: SectionReader) -> dict[str, Any]:
    zero = file.section("zero_optimization")
    stage = zero.whole("stage", 0, least=0)
    if stage > 3:
        raise zero.wrong("stage", "0, 1, 2 or 3")
    if stage == 3:
        _check_prefetching(zero)
    overlaps = None if zero.get("overlap_comm", AUTO) in (AUTO, None) else zero.flag("overlap_comm", False)
    gathers_ahead = {"overlap_param_gather": True}  # whatever it says (partitioned_param_coordinator.py); of ZeRO-3 alone
    return {"zero": stage, "zero_shard_size": 1, "overlap_grad_reduce": overlaps, **gathers_ahead, **_offload(zero, stage)}


def _check_prefetching(zero: SectionReader) -> None:
    """Raise InputError for thresholds under which weights stay gathered, or are gathered only when they are needed."""
    for key, least, most, effect in _THRESHOLDS:
        value = zero.get(key, AUTO)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value != AUTO and not (number and least <= value <= most):
            wanted = f"at most {most:g}" if most < math.inf else f"at least {least:g}"
            raise zero.wrong(key, f"{wanted}, because {effect} are not modelled")


def _offload(zero: SectionReader, stage: int) -> dict[str, Any]:
    """Return what of the optimizer is on the host; gradients are where it is."""
    host = zero.section("offload_optimizer")
    if host.choice("device", ("cpu", "none"), "none") == "none":
        return {}
    share = host.number("ratio", 1.0)
    if stage < 2:
        raise zero.wrong("stage", "2 or 3 beside offload_optimizer, which is not modelled otherwise")
    if not 0 < share <= 1 or (share < 1 and stage == 2):
        raise host.wrong("ratio", "1 with stage 2, and between 0 and 1 with stage 3")
    if stage == 2 and zero.flag("round_robin_gradients", False):
        raise zero.wrong("round_robin_gradients", "false beside offload_optimizer, where what it saves is not modelled")
    return {"optimizer_offload_fraction": share, "offload_gradients": True}


def _precision(file: SectionReader, trained: str | None) -> dict[str, str]:
    """Return the formats of weights and gradients. trained: precision that a trainer's script states, which fills in "auto"."""
    on = [name for name in PRECISIONS if _enabled(file.section(name), name, trained)]
    if len(on) > 1:
        raise file.section(PRECISIONS[1]).wrong("enabled", "False beside bf16")
    precision = on[0] if on else "fp32"
    stated = file.section("data_types").choice("grad_accum_dtype", (*GRADIENTS, AUTO), AUTO)
    return {"precision": precision, "grad_dtype": precision if stated == AUTO else stated}


def _enabled(section: SectionReader, name: str, trained: str | None) -> bool:
    if section.get("enabled") != AUTO:
        return section.flag("enabled", False)
    if trained is None:
        raise section.wrong(
            "enabled", f"true or false, because no script of {TRAINER} beside it says what the trainer fills in"
        )
    return trained == name


def _trainers(words: Sequence[str], script: Source | None) -> str | None:
    """Return the precision of transformers' trainer that a script launches; None where it launches none."""
    at = trainer_at(words)
    return (
        trainer_precision(arguments(words[at + 1 :], script.path, UNREAD), script.path) if script and at is not None else None
    )


def _batch(file: SectionReader, launched: Mapping[str, Any]) -> dict[str, int]:
    """Return the micro batches, of which DeepSpeed derives any from the others: whole = micro batch * steps * dp."""
    found = {field: file.whole(key) for field, key in _BATCH.items() if file.get(key, AUTO) != AUTO}
    dp = launched.get("dp")
    if dp and file.get("train_batch_size", AUTO) != AUTO:
        whole = file.whole("train_batch_size")
        if len(found) == 1:
            (field,) = (field for field in _BATCH if field not in found)
            found[field] = max(whole // (dp * next(iter(found.values()))), 1)
        if len(found) == 2 and whole != dp * found["micro_batch_size"] * found["num_micro_batches"]:
            raise file.wrong("train_batch_size", f"the micro batch times the steps of accumulation times {dp} ranks")
    for field in _BATCH:
        if field in found and launched.get(field, found[field]) != found[field]:
            raise file.wrong(_BATCH[field], f"{launched[field]}, as its script has it, or by default")
    return found


def _megatrons(words: Sequence[str], script: Source | None) -> dict[str, Any]:
    """Return the arguments of Megatron-DeepSpeed that its script states."""
    at = program_at(words, PROGRAM)
    return arguments(words[at + 1 :], script.path, _UNREAD) if script and at is not None else {}


def _ranks(file: SectionReader) -> dict[str, int]:
    """Return the ranks of settings without a script: the whole batch over micro batch and steps, where it is stated."""
    if file.get("train_batch_size", AUTO) == AUTO:
        return {}
    each = [file.whole(key) for key in _BATCH.values() if file.get(key, AUTO) != AUTO]
    whole = file.whole("train_batch_size")
    if len(each) < len(_BATCH):
        raise file.wrong(
            "train_batch_size", f"beside {' and '.join(_BATCH.values())}, or beside the script that says the ranks"
        )
    if whole % math.prod(each):
        raise file.wrong("train_batch_size", f"a multiple of {' times '.join(_BATCH.values())}, {math.prod(each)}")
    return dict.fromkeys(("world_size", "dp"), whole // math.prod(each))


def _program(words: Sequence[str], script: Source) -> int:
    """Return the place of what a script launches. Raises InputError where that is neither of the two that are known."""
    at = program_at(words, PROGRAM)
    found = trainer_at(words) if at is None else at
    if found is None:
        raise InputError(
            f"{script.path}: neither {PROGRAM} of Megatron-DeepSpeed nor {TRAINER} of transformers in it, nor another program "
            "with arguments of its trainer"
        )
    return found


def _launched(words: Sequence[str], script: Source, source: Source, precision: str) -> FileRun:
    """Return what the script of the same name states: of Megatron-DeepSpeed a run, of a trainer its batch and its ranks."""
    path, at = script.path, _program(words, script)
    unread = _UNREAD if program_at(words, PROGRAM) is not None else UNREAD
    launch, given = ranks_of_launch(words[:at], script, environment(script, at)), arguments(words[at + 1 :], path, unread)
    world, (settings, left_out) = launch.world_size, of_environment(script, at)
    if program_at(words, PROGRAM) is None:
        if precision == "fp32":
            check_parameters(given, path, "DeepSpeed without bf16 or fp16")
        fields, ignored = trainer_fields(given, precision, path, words[at])
        sizes = {"world_size": world, "dp": world, **_TRANSFORMERS}
        unsaid: tuple[str, ...] = () if "seq_len" in fields else (NO_SEQUENCE,)
        notes = (*unsaid, *taken_to_train(words[at]))
        run = FileRun(model_beside(source, _NO_MODEL), sizes | fields, ignored=ignored, notes=notes)
    else:
        run = run_of_megatron_deepspeed(given, world, source)
    layout, notes = {**run.layout, **settings}, (*run.notes, *script_notes(script, at), *left_out)
    return replace(run, layout=layout, notes=notes, gpus_per_node=launch.gpus_per_node)
