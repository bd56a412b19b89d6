"""The launch of transformers' causal language model example, which accelerate and DeepSpeed start: batch and recomputation.

Source: huggingface/transformers examples/pytorch/language-modeling/run_clm.py and TrainingArguments. Neither accelerate's YAML
nor an FSDP plugin holds the sequence, and only arguments of the program say it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profiler.errors import InputError, closest, printable, shown
from profiler.text_file import json_object
from solver.formats.file_run import Source, model_path
from solver.formats.launch.ranks import END
from solver.formats.launch.words import program_at, whole_argument
from solver.formats.syntax.known_keys import keys
from solver.spec.strategy import Strategy

PROGRAM = "run_clm.py"
#: Argument -> layout field.
BATCH = {
    "--per_device_train_batch_size": "micro_batch_size",
    "--gradient_accumulation_steps": "num_micro_batches",
    "--block_size": "seq_len",
}
#: Arguments by which other programs around the trainer state the tokens of a sequence.
_SEQUENCES = ("--model_max_length", "--max_seq_length", "--max_seq_len", "--max_length", "--cutoff_len")
#: Of TrainingArguments; the default block is the tokenizer's longest, or 1,024 tokens.
_DEFAULTS = {"micro_batch_size": 8, "num_micro_batches": 1}

#: Optimizers that are Adam with decoupled decay, whose step the framework's description has.
_ADAM = ("adamw_torch", "adamw_torch_fused", "adamw_hf")
_OFF = ("false", "no", "none")
_PRECISIONS = {"--bf16": "bf16", "--fp16": "fp16"}
_AGAIN = "--gradient_checkpointing"
#: By these LLaMA-Factory is known, which recomputes unless it is told not to (model_utils/checkpointing.py).
_LLAMA_FACTORYS, _NO_AGAIN = {"--finetuning_type", "--stage"}, "--disable_gradient_checkpointing"
_ACCELERATOR = "--accelerator_config"
#: Every micro batch's gradients are reduced. The trainer of transformers 4.46 to 5.1 does not heed it (pull request 43919).
_SYNC_EACH_BATCH = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
SYNC_RELEASES = "transformers 4.46 to 5.1 ignore sync_each_batch and keep whole gradients (--set defer_grad_sync=true)"
#: Arguments of TrainingArguments and run_clm.py that change neither time nor memory of a step (data, evaluation, logs,
#: checkpoints and numbers of the optimizer), and those that name files which are read themselves.
_NEUTRAL = keys(
    "accelerator_config adam_beta1 adam_beta2 adam_epsilon average_tokens_across_devices batch_eval_metrics bf16_full_eval "
    "cache_dir config_name data_seed dataloader_drop_last dataloader_num_workers dataloader_persistent_workers "
    "dataloader_pin_memory dataloader_prefetch_factor dataset_config_name dataset_name ddp_backend ddp_broadcast_buffers "
    "ddp_find_unused_parameters ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train dtype "
    "eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object "
    "evaluation_strategy fp16_backend fp16_full_eval fp16_opt_level gradient_checkpointing_kwargs greater_is_better "
    "group_by_length half_precision_backend hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy "
    "hub_token ignore_data_skip include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen "
    "include_tokens_per_second keep_linebreaks label_names learning_rate length_column_name load_best_model_at_end "
    "local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step logging_nan_inf_filter "
    "logging_steps logging_strategy low_cpu_mem_usage lr_scheduler_kwargs lr_scheduler_type max_eval_samples max_grad_norm "
    "max_steps max_train_samples metric_for_best_model model_name_or_path model_revision model_type num_train_epochs "
    "output_dir overwrite_cache overwrite_output_dir past_index per_device_eval_batch_size prediction_loss_only "
    "preprocessing_num_workers project push_to_hub push_to_hub_model_id push_to_hub_organization push_to_hub_token ray_scope "
    "remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name "
    "save_on_each_node save_only_model save_safetensors save_steps save_strategy save_total_limit seed skip_memory_metrics "
    "streaming token tokenizer_name torch_dtype trackio_space_id train_file trust_remote_code use_auth_token "
    "use_fast_tokenizer use_legacy_prediction_loop validation_file validation_split_percentage warmup_ratio warmup_steps "
    "weight_decay"
)
#: Of these what is read all the same, elsewhere.
_READ_ELSEWHERE = ("accelerator_config", "deepspeed", "dtype", "gradient_checkpointing_kwargs", "torch_dtype")
#: Arguments whose values need not be known, those of other programs' data too.
UNREAD = frozenset(
    f"--{name}"
    for name in (
        *(_NEUTRAL.keys() - set(_READ_ELSEWHERE)),
        *["data_path", "data_dir", "dataset", "dataset_dir", "eval_data_path", "image_folder", "train_data_path", "version"],
    )
)
#: The others, which do: a run that turns one on is not modelled.
_NOT_DESCRIBED = keys(
    "adafactor auto_find_batch_size config_overrides ddp_bucket_cap_mb fsdp fsdp_config fsdp_min_num_params "
    "fsdp_transformer_layer_cls_to_wrap full_determinism jit_mode_eval label_smoothing_factor liger_kernel_config "
    "mp_parameters neftune_noise_alpha no_cuda optim_args optim_target_modules parallelism_config per_gpu_eval_batch_size "
    "per_gpu_train_batch_size torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps torchdynamo "
    "tpu_metrics_debug tpu_num_cores use_cpu use_ipex use_liger_kernel use_mps_device"
)
_FLASH = ("auto", "true", "fa2", "flash_attn", "flash_attention_2", "sdpa")
#: Parts of arguments of other programs around the trainer that change what a step does, and values that change nothing.
_CHANGES: Mapping[str, Sequence[str]] = {
    "finetuning_type": ("full",),
    "train_type": ("full",),
    "sft_type": ("full",),
    "tuner_type": ("full",),
    "attn_implementation": _FLASH,
    "flash_attn": _FLASH,
    **dict.fromkeys(
        (
            "lora",
            "peft",
            "adapter",
            "freeze",
            "quantization",
            "quant_type",
            "quant_method",
            "sequence_parallel",
            "liger",
            "unsloth",
            "galore",
            "badam",
            "load_in_4bit",
            "load_in_8bit",
            "reward_model",
            "ref_model",
            "rlhf_type",
            "vision_tower",
            "mm_projector",
        ),
        (),
    ),
}
#: The same of whole arguments.
_CHANGE_ALONE: Mapping[str, Sequence[str]] = {"bits": ("16", "32"), "stage": ("pt", "sft")}
#: Words of a program's name that say that it does not train a causal language model on its own text alone.
_OTHER_OBJECTIVES = {
    "dpo",
    "orpo",
    "kto",
    "cpo",
    "ppo",
    "grpo",
    "gspo",
    "rloo",
    "rlhf",
    "reward",
    "rm",
    "distill",
    "distillation",
    "glue",
    "classification",
    "cls",
    "qa",
    "squad",
    "ner",
    "swag",
    "mlm",
    "plm",
    "translation",
    "summarization",
    "seq2seq",
    "t5",
    "whisper",
    "clip",
    "llava",
}
#: Arguments by which a program around the trainer is known.
_OWN = (*BATCH, _AGAIN, "--output_dir", *_SEQUENCES)
_LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "torch.distributed.run", "torch.distributed.launch")
#: Types of parameters that are no wider than those of mixed precision.
_HALF_TYPES = ("bfloat16", "float16")
NO_SEQUENCE = (
    "no --block_size: run_clm.py takes the tokenizer's longest, 1,024 where that exceeds the model's positions; state it"
)


def trainer_at(words: Sequence[str]) -> int | None:
    """Return the place of the program around transformers' trainer that a script launches: run_clm.py, or another Python file
    whose arguments are the trainer's; None for anything else.

    Of several files with such arguments it is the one that a launcher of ranks starts. Raises InputError where that leaves two.
    """
    if (known := program_at(words, PROGRAM)) is not None:
        return known
    found: dict[int, bool] = {}
    start = 0
    for end in [*(i for i, word in enumerate(words) if word == END), len(words)]:
        command, first = words[start:end], start
        start = end + 1
        own = next((i for i, word in enumerate(command) if word.partition("=")[0] in _OWN), 0)
        program = next((i for i in range(own - 1, -1, -1) if command[i].endswith(".py")), None)
        if program is not None:
            found[first + program] = any(word.rpartition("/")[2] in _LAUNCHERS for word in command[:program])
    launched = [at for at, by_launcher in found.items() if by_launcher] or list(found)
    if len({words[at] for at in launched}) > 1:
        names = " and ".join(dict.fromkeys(words[at] for at in launched))
        raise InputError(f"the script starts {printable(names)} with arguments of a trainer; leave in it the one that trains")
    return launched[0] if launched else None


def taken_to_train(program: str) -> tuple[str, ...]:
    """Return a note on a program that is not transformers' own."""
    if program.rpartition("/")[2] == PROGRAM:
        return ()
    return (
        f"{program} is taken to train all weights of a causal language model with transformers' trainer, whose arguments it is "
        "given, on full sequences: where it pads shorter ones or does not pack them, steps are shorter",
    )


def check_objective(program: str, path: Path) -> None:
    """Raise InputError for a program whose name says that it trains something else than a causal language model."""
    words = re.split(r"[^a-z0-9]+", program.rpartition("/")[2].removesuffix(".py").lower())
    if others := _OTHER_OBJECTIVES.intersection(words):
        raise InputError(
            f"{path}: {printable(program)} does not train a causal language model alone, as its name says "
            f"({', '.join(sorted(others))}), and no other training is modelled"
        )


def trainer_precision(given: dict[str, Any], path: Path) -> str:
    """Return the precision that a trainer's arguments state, which is fp32 where they state none."""
    stated = [asked for name, asked in _PRECISIONS.items() if name in given and _on(given, name, path)]
    if len(stated) > 1:
        raise InputError(f"{path}: {' and '.join(_PRECISIONS)} exclude each other; write one")
    return stated[0] if stated else "fp32"


def trainer_fields(
    given: dict[str, Any], precision: str, path: Path, program: str = PROGRAM
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return (layout fields, arguments that are not read) of a trainer's arguments.

    precision: what the settings beside them say. program: the file that is launched; what another than run_clm.py reads beyond
    the trainer's arguments is not known, and not read. Raises InputError where arguments contradict the settings, and for
    another optimizer than Adam.
    """
    found: dict[str, Any] = dict(_DEFAULTS)
    found |= {field: whole_argument(given, name, path) for name, field in BATCH.items() if name in given}
    own = program.rpartition("/")[2] == PROGRAM
    check_objective(program, path)
    lengths = {name: given[name] for name in _SEQUENCES if name in given and not own}
    if len(set(lengths.values())) > 1:
        stated = " and ".join(f"{name} {shown(value)}" for name, value in lengths.items())
        raise InputError(f"{path}: {stated} are two lengths of a sequence; leave the one that {program} trains with")
    if longest := next(iter(lengths), ""):
        found.setdefault("seq_len", whole_argument(given, longest, path))
    for name, asked in _PRECISIONS.items():
        if name in given and _on(given, name, path) and asked != precision:
            raise InputError(f"{path}: {name} contradicts the settings, whose precision is {precision}; write the same in both")
    if not own and not _LLAMA_FACTORYS.isdisjoint(given) and _AGAIN not in given:
        off = _NO_AGAIN in given and _on(given, _NO_AGAIN, path)
        found |= {} if off else {"recompute": "full", "recompute_layers": -1}
    if _AGAIN in given:
        found |= {"recompute": "full" if _on(given, _AGAIN, path) else "none", "recompute_layers": -1}
    if (optimizer := given.get("--optim", _ADAM[0])) not in _ADAM:
        raise InputError(f"{path}: --optim {shown(optimizer)} is not modelled; {', '.join(_ADAM)} are")
    read = {*BATCH, *_PRECISIONS, _AGAIN, "--optim", *lengths, *([] if own else [_NO_AGAIN])}
    idle = {"--tf32"} if precision != "fp32" else set()
    for name in given:
        plain = name.lstrip("-")
        if name in read | idle or plain in _NEUTRAL or str(given[name]).lower() in _OFF:
            continue
        if plain in _NOT_DESCRIBED or name == "--tf32" or (not own and _changes(plain, str(given[name]).lower())):
            raise InputError(f"{path}: {name} of {program} is not modelled: without it the run is estimated")
        if own:
            known = [f"--{other}" for other in (*_NEUTRAL, *_NOT_DESCRIBED)]
            raise InputError(f"{path}: {PROGRAM} has no argument {name}{closest(name, [*known, *read])}")
    return found, tuple(name for name in given if name not in read)


def _changes(name: str, value: str) -> bool:
    """Whether an argument of a program around the trainer has it do something else in a step."""
    without = [values for part, values in _CHANGES.items() if part in name]
    without += [values for whole, values in _CHANGE_ALONE.items() if whole == name]
    return any(value not in values for values in without)


def json_argument(given: Mapping[str, Any], argument: str, source: Source) -> tuple[Mapping[str, Any], Path]:
    """Return the object of an argument that is JSON or names a file of it, and where it stands; an empty one where it is not
    given. Raises InputError where the file is not beside the script."""
    if argument not in given:
        return {}, source.path
    text, where = str(given[argument]), source.path
    if not text.lstrip().startswith("{"):
        where, beside = source.path.parent / text, source.beside(text)
        if beside is None:
            raise InputError(f"{source.path}: {argument} {text} is not there; put the file beside the script")
        text = beside
    return json_object(text, where), where


def syncs_each_batch(given: dict[str, Any], source: Source) -> bool:
    """Return whether a trainer's arguments have it reduce every micro batch's gradients. Raises InputError if unreadable."""
    plain, where = json_argument(given, _ACCELERATOR, source)
    stated = plain.get("gradient_accumulation_kwargs") or {}
    value = stated.get("sync_each_batch", False) if isinstance(stated, dict) else stated
    if not isinstance(value, bool):
        raise InputError(
            f"{where}: sync_each_batch of gradient_accumulation_kwargs is {shown(value)}; it must be true or false"
        )
    return value


def check_parameters(given: dict[str, Any], path: Path, under: str) -> None:
    """Raise InputError for parameters of 16 bits ``under`` what keeps them so, with gradients and Adam's states like them."""
    for name in ("--torch_dtype", "--dtype"):
        if str(given.get(name)) in _HALF_TYPES:
            raise InputError(f"{path}: {name} {given[name]} under {under} is not modelled: parameters of 32 bits are")


def _on(given: dict[str, Any], name: str, path: Path) -> bool:
    """Return a switch, which may stand alone or with a value."""
    value = str(given[name]).lower()
    if value not in ("true", "false"):
        raise InputError(f"{path}: {name} is {shown(given[name])}; it must be True or False")
    return value == "true"


def trainer_lines(run: Strategy, name: str, settings: str, *, syncs: bool = False) -> list[str]:
    """Return the lines of a script from the program on. settings: further arguments. syncs: every micro batch's gradients."""
    numbers = [f"  {argument} {getattr(run, field)} \\" for argument, field in BATCH.items()]
    data = "  --dataset_name DATASET --tokenizer_name TOKENIZER --do_train --output_dir output"
    settings += f" {_ACCELERATOR} {shlex.quote(json.dumps(_SYNC_EACH_BATCH))}" if syncs else ""
    model = shlex.quote(model_path(name).rsplit("/", 1)[0])
    return [f"  {PROGRAM} --config_name {model} {settings}".rstrip() + " \\", *numbers, data, ""]
