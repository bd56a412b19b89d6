"""Arguments of Megatron-LM as a run, and those of its functional tests, which stand in YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from profiler.errors import InputError
from solver.formats.cases import case_of
from solver.formats.file_run import FileRun, Source
from solver.formats.literal_python import Section
from solver.spec.strategy import Strategy

#: Flags that only arrange data, logs, checkpoints and the schedule of the learning rate: files that are run hold them.
ARRANGEMENTS = (
    "adam-beta1", "adam-beta2", "adam-eps", "async-save", "auto-detect-ckpt-format", "ckpt-format", "clip-grad",
    "data-cache-path", "data-path", "dist-ckpt-optim-fully-reshardable", "dist-ckpt-strictness", "eval-interval",
    "eval-iters", "exit-duration-in-mins", "exit-interval", "init-method-std", "load", "log-interval",
    "log-memory-to-tensorboard", "log-num-zeros-in-grad", "log-params-norm", "log-progress", "log-throughput",
    "log-timers-to-tensorboard", "log-validation-ppl-to-tensorboard", "lr", "lr-decay-iters", "lr-decay-samples",
    "lr-decay-style", "lr-warmup-fraction", "lr-warmup-init", "lr-warmup-iters", "lr-warmup-samples", "manual-gc",
    "manual-gc-interval", "merge-file", "min-lr", "moe-aux-loss-coeff", "moe-z-loss-coeff", "no-ckpt-fully-parallel-save",
    "no-load-optim", "no-load-rng", "no-save-optim", "no-save-rng", "norm-epsilon", "num-workers",
    "override-opt_param-scheduler", "rotary-base", "rotary-percent", "save", "save-interval", "seed", "split",
    "tensorboard-dir", "tensorboard-log-interval", "timing-log-level", "timing-log-option",
    "tokenizer-hf-include-special-tokens", "tokenizer-model", "train-iters", "train-samples", "use-checkpoint-args",
    "use-persistent-ckpt-worker", "vocab-file", "wandb-exp-name", "wandb-project", "wandb-save-dir", "weight-decay",
)  # fmt: skip
TEST_GPUS = 8  #: on which Megatron-LM runs its functional tests, of which the files do not say it
_TEST_KEYS = "MODEL_ARGS"


def run_of_arguments(flags: Mapping[str, Any], world: int, path: Path, assumed: tuple[str, ...] = ()) -> FileRun:
    """Return the run of flag (with its dashes) -> value or true; its layout has all fields of a Strategy.

    assumed: of them, those that the file leaves open. Flags that only arrange data, logs or checkpoints are ignored. Raises
    InputError for what solver.formats.megatron_args refuses.
    """
    ignored = tuple(sorted(flag for flag in flags if flag.lstrip("-") in ARRANGEMENTS))
    own = {flag: value for flag, value in flags.items() if flag not in ignored} | {"complete": True}
    case = case_of({"id": path.stem, "hardware": "", "model": {}, "measured": {}, "run": {"world_size": world},
                    "megatron_args": own | ({"world-size-assumed": True} if assumed else {})})  # fmt: skip
    if case.skipped or case.model is None or case.strategy is None:
        raise InputError(f"{path}: {case.skipped}")
    layout = {field.name: getattr(case.strategy, field.name) for field in fields(Strategy)}
    return FileRun(case.model.replace(name=path.stem), layout, assumed, ignored)


def is_megatron_test(sections: Section) -> bool:
    return _TEST_KEYS in sections


def read_megatron_test(sections: Section, source: Source) -> FileRun:
    """Return the run of one of Megatron-LM's functional tests (tests/functional_tests/test_cases/gpt/*/model_config.yaml).

    The number of GPUs is that of a node, or the least that the groups divide.
    """
    given = sections[_TEST_KEYS]
    if not isinstance(given, Section):
        raise InputError(f"{source.path}: {_TEST_KEYS} must be a mapping of arguments, as --num-layers: 12")
    wrong = [flag for flag in given if not flag.startswith("--")]
    if wrong:
        raise InputError(f"{source.path}, line {given.lines[wrong[0]]}: {_TEST_KEYS} has {wrong[0]!r}, which begins with no --")
    return run_of_arguments(given, TEST_GPUS, source.path, ("world_size",))
