"""Hugging Face accelerate's YAML for FSDP and DDP as a layout; the batch is the launch script's, the model a config.json.

Sources: huggingface/accelerate src/accelerate/utils/dataclasses.py (FullyShardedDataParallelPlugin, TorchDynamoPlugin),
utils/fsdp_utils.py, examples/config_yaml_templates and examples/torch_native_parallelism/configs. FSDP2 computes and reduces in
the type of mixed precision, as FSDP1 does; DDP computes in it and reduces in fp32. accelerate and transformers' trainer keep
gradients whole until a step's last micro batch (accelerator.py, no_sync; trainer.py) unless they are told to reduce each; those
of FSDP2 since accelerate 1.11.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from profiler.errors import printable
from solver.formats.accelerate.deepspeed import SETTINGS, read_deepspeed_settings
from solver.formats.accelerate.launch import launched_sections, without_script
from solver.formats.accelerate.rules import RULES
from solver.formats.file_run import FileRun, Source, script_beside
from solver.formats.launch.trainer_script import (
    NO_SEQUENCE,
    SYNC_RELEASES,
    UNREAD,
    check_parameters,
    syncs_each_batch,
    taken_to_train,
    trainer_at,
    trainer_fields,
)
from solver.formats.launch.words import arguments, one_command, script_notes, script_words, settings_after
from solver.formats.model_file import model_beside
from solver.formats.rule import Arguments, broken, flattened
from solver.formats.syntax.known_keys import Described, Known, keys, open_sections, unread_keys
from solver.formats.syntax.literal_python import Section
from solver.formats.syntax.section_reader import SectionReader
from solver.spec.frameworks import framework_of

FSDP1, FSDP2, DDP = "fsdp", "fsdp2", "pytorch-ddp"
#: fsdp_sharding_strategy -> (ZeRO stage, whether it is of a node's ranks alone); FSDP1 may state its number, from 1.
STRATEGIES = {
    "FULL_SHARD": (3, False),
    "SHARD_GRAD_OP": (2, False),
    "NO_SHARD": (0, False),
    "HYBRID_SHARD": (3, True),
    "HYBRID_SHARD_ZERO2": (2, True),
}
_TWICE = "fsdp_activation_checkpointing excludes --gradient_checkpointing (transformers' trainer.py)"
DTYPES = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}

KNOWN: Known = keys(
    "command_file commands compute_environment debug distributed_type downcast_bf16 enable_cpu_affinity gpu_ids machine_rank "
    "main_process_ip main_process_port main_training_function megatron_lm_config mixed_precision num_machines num_processes "
    "rdzv_backend same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_zone use_cpu dynamo_backend",
    deepspeed_config=SETTINGS,
    dynamo_config=keys("dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph dynamo_use_regional_compilation"),
    fsdp_config=keys(
        "fsdp_activation_checkpointing fsdp_auto_wrap_policy fsdp_backward_prefetch fsdp_backward_prefetch_policy "
        "fsdp_cpu_ram_efficient_loading fsdp_forward_prefetch fsdp_min_num_params fsdp_offload_params "
        "fsdp_reshard_after_forward fsdp_sharding_strategy fsdp_state_dict_type fsdp_sync_module_states "
        "fsdp_transformer_layer_cls_to_wrap fsdp_use_orig_params fsdp_version"
    ),
    parallelism_config=keys(
        "parallelism_config_dp_replicate_size parallelism_config_dp_shard_size parallelism_config_tp_size "
        "parallelism_config_cp_size parallelism_config_cp_comm_strategy"
    ),
)
_ONE = (1,)
DESCRIBED: Described = {
    "use_cpu": ((False,), "training on the host"),
    "dynamo_backend": (("NO", "no", None), "compilation as releases before 0.16 state it"),
    "fsdp_config.fsdp_offload_params": ((False,), "parameters on the host"),
    "fsdp_config.fsdp_auto_wrap_policy": (("TRANSFORMER_BASED_WRAP",), "another unit of FSDP than a layer"),
    "fsdp_config.fsdp_backward_prefetch": (("BACKWARD_PRE",), "another order of all-gathers"),
    "fsdp_config.fsdp_backward_prefetch_policy": (("BACKWARD_PRE",), "another order of all-gathers"),
    "parallelism_config.parallelism_config_tp_size": (_ONE, "tensor parallelism of accelerate"),
    "parallelism_config.parallelism_config_cp_size": (_ONE, "context parallelism of accelerate"),
    "dynamo_config.dynamo_use_regional_compilation": ((False,), "compilation of parts"),
}


def is_accelerate(sections: Section) -> bool:
    return "distributed_type" in sections


def read_accelerate(sections: Section, source: Source, told: Collection[str] = ()) -> FileRun:
    """Return the run of a file: where NAME.sh beside NAME.yaml launches it, with that script's batch and sequence.

    told: arguments of the program that the sections were made of.
    Raises InputError for keys and values that are not known or not modelled, and without a config.json beside it.
    """
    where = str(source.path)
    sections, overruled = launched_sections(sections, source)
    file = open_sections(sections, KNOWN, DESCRIBED, where)
    world, machines = file.whole("num_processes"), file.whole("num_machines", 1)
    if world % machines:
        raise file.wrong("num_processes", f"a multiple of num_machines {machines}")
    if file.get("distributed_type") == "DEEPSPEED":
        run = _with_deepspeed(sections, file, source, world)
        return replace(run, notes=(*overruled, *run.notes))
    kind = file.choice("distributed_type", ("FSDP", "MULTI_GPU", "DEEPSPEED", "NO"), "FSDP")
    if kind == "NO" and world > 1:  # commands/launch.py starts ranks for MULTI_GPU and FSDP only
        raise file.wrong("num_processes", "1 beside distributed_type NO, which starts one process; MULTI_GPU starts several")
    sharded, dtype = kind == "FSDP", DTYPES[file.choice("mixed_precision", DTYPES, "no")]
    shards = _sharding(file, world, machines) if sharded else {"framework": DDP, "zero": 0, "zero_shard_size": 1}
    again = file.section("fsdp_config").flag("fsdp_activation_checkpointing", False)
    flags = framework_of(str(shards["framework"])).flags
    layout: dict[str, Any] = {
        **flags,
        "world_size": world,
        "dp": world,
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "precision": dtype,
        "grad_dtype": dtype if sharded else "fp32",
        "recompute": "full" if again else "none",
        "recompute_layers": -1,
        "compile": file.section("dynamo_config").text("dynamo_backend", "NO").upper() == "INDUCTOR",
        **shards,
    }
    batch, unread, notes, syncs = _launched(sections, source, dtype, sharded, told)
    notes += (NO_SEQUENCE,) if batch and "seq_len" not in batch else ()
    if sharded and shards["zero"] and batch.get("num_micro_batches") != 1:
        notes += (SYNC_RELEASES,) if syncs else ()
        layout |= {} if syncs else {"defer_grad_sync": True}
    model = model_beside(source, "accelerate's settings hold no model")
    ignored = (*unread_keys(sections, KNOWN, "", file.read), *unread)
    stated = {"micro_batch_size", "num_micro_batches", "seq_len"}
    refusals = broken(RULES, Arguments(flattened(sections), world))
    if sharded and again and batch.pop("recompute", "none") == "full":  # a trainer that is told not to leaves it to accelerate
        refusals += (_TWICE,)
        batch.pop("recompute_layers", None)
    assumed, per_node = tuple(sorted(stated - batch.keys())), world // machines if machines > 1 else 0
    return FileRun(model, layout | batch, assumed, ignored, (*overruled, *notes), refusals, per_node)


def _with_deepspeed(sections: Section, file: SectionReader, source: Source, world: int) -> FileRun:
    """Return the run of settings of DeepSpeed, where a script starts a program that is not read, without that."""
    script = script_beside(source)
    words = script_words(script) if script else []
    if script is None or trainer_at(words) is not None:
        return read_deepspeed_settings(sections, file, KNOWN, source, world)
    run = read_deepspeed_settings(sections, file, KNOWN, replace(source, beside=without_script(source)), world)
    return replace(run, notes=(*_not_read(words), *run.notes))


def _sharding(file: SectionReader, world: int, machines: int) -> dict[str, Any]:
    """Return framework, ZeRO stage and the ranks of a shard; in stage 2 weights stay gathered until the backward pass."""
    fsdp, sizes = file.section("fsdp_config"), file.section("parallelism_config")
    version = fsdp.whole("fsdp_version", 1)
    if version not in (1, 2):
        raise fsdp.wrong("fsdp_version", "1 or 2")
    if version == 1:
        number = fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")
        named = dict(enumerate(STRATEGIES, 1))
        word = named.get(number, str(number)) if isinstance(number, int) else str(number).lstrip("_")
        if word not in STRATEGIES:
            raise fsdp.wrong("fsdp_sharding_strategy", f"one of {', '.join(STRATEGIES)}")
        zero, of_node = STRATEGIES[word]
        shard = 1 if not zero else world // machines if of_node else world
        return {"framework": FSDP1, "zero": zero, "zero_shard_size": shard}
    replicate = sizes.whole("parallelism_config_dp_replicate_size", 1)
    shard = sizes.whole("parallelism_config_dp_shard_size", world // replicate)
    if replicate * shard != world:
        raise sizes.wrong("parallelism_config_dp_shard_size", f"such that it and dp_replicate_size make {world} processes")
    again = fsdp.flag("fsdp_reshard_after_forward", True)
    return {"framework": FSDP2, "zero": 3 if again else 2, "zero_shard_size": shard}


def _launched(
    sections: Section, source: Source, precision: str, sharded: bool, told: Collection[str]
) -> tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], bool]:
    """Return what the script of the same name states, where there is one, its arguments that are not read, notes, and whether
    it reduces every micro batch's gradients.

    Raises InputError where it gives accelerate another value than the settings, which it would take instead.
    """
    script = script_beside(source)
    words = script_words(script) if script else []
    at = trainer_at(words)
    if script is None:
        return {}, (), (), False
    if at is None:
        return {}, (), _not_read(words), False
    given = {name: value for name, value in arguments(words[at + 1 :], script.path, UNREAD).items() if name not in told}
    if not sharded or precision == "fp32":
        check_parameters(given, script.path, "mixed_precision no" if sharded else "DDP")
    batch, unread = trainer_fields(given, precision, script.path, words[at])
    notes = (*taken_to_train(words[at]), *script_notes(script, at))
    return batch, unread, notes, syncs_each_batch(given, script)


def _not_read(words: Sequence[str]) -> tuple[str, ...]:
    """Return a note on a program that accelerate launches and whose arguments are none of transformers' trainer."""
    start = next((i + 1 for i, word in enumerate(words) if word == "launch"), len(words))
    command = one_command(words[start:])
    program = next((i for i, word in enumerate(command) if word.endswith(".py")), None)
    if program is None:
        return ()
    what = printable(" ".join(command[program:]), 120)
    return (f"not read: {what}, whose batch, sequence, adapters and quantisation are not known here",)


def settings_of_script(source: Source) -> Source:
    """Return the YAML that a script with ``accelerate launch`` names. Raises InputError where it names none that is there."""
    return settings_after(source, "--config_file", "accelerate's settings, --config_file NAME.yaml")
