"""Arguments of Megatron-LM as a run, and those of its functional tests, which stand in YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from profiler.errors import InputError
from solver.formats.cases.reading import case_of
from solver.formats.file_run import FileRun, Source
from solver.formats.hugging_face.untimed import untimed_of
from solver.formats.megatron.earlier import as_today
from solver.formats.megatron.flags import ARRANGEMENTS
from solver.formats.megatron.rules import RULES
from solver.formats.megatron.untimed import untimed_keys
from solver.formats.rule import Arguments, Rule, broken
from solver.formats.syntax.literal_python import Section
from solver.spec.strategy import Strategy

TEST_GPUS = 8  #: on which Megatron-LM runs its functional tests, of which the files do not say it
_TEST_KEYS = "MODEL_ARGS"


def run_of_arguments(
    flags: Mapping[str, Any],
    world: int,
    path: Path,
    assumed: tuple[str, ...] = (),
    rules: Sequence[Rule] = RULES,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> FileRun:
    """Return the run of flag (with its dashes) -> value or true; its layout has all fields of a Strategy.

    assumed: of them, those that the file leaves open. rules: which the arguments must obey. environment: variables that the
    launch sets. Flags that only arrange data, logs or checkpoints are ignored. Raises
    InputError for what solver.formats.megatron.arguments refuses.
    """
    ignored = tuple(sorted(flag for flag in flags if flag.lstrip("-") in ARRANGEMENTS))
    own = {flag: value for flag, value in flags.items() if flag not in ignored} | {"complete": True}
    case = case_of(
        {
            "id": path.stem,
            "hardware": "",
            "model": {},
            "measured": {},
            "run": {"world_size": world},
            "megatron_args": own | ({"world-size-assumed": True} if assumed else {}),
        }
    )
    if case.skipped or case.model is None or case.strategy is None:
        raise InputError(f"{path}: {case.skipped}")
    layout = {field.name: getattr(case.strategy, field.name) for field in fields(Strategy)}
    notes = tuple(line for line in case.assumptions if line.startswith(("left out", "ignored", "framework")))
    given = as_today({flag.lstrip("-"): value for flag, value in flags.items() if value is not False}, [])
    if case.model.has_latent_attention and "qk-layernorm" not in given:
        notes += ("latent attention is priced with the norms of its latents, which --qk-layernorm would switch on",)
    refusals = broken(rules, Arguments(given, case.strategy.world_size, environment))
    model = case.model.replace(name=path.stem, untimed=untimed_of(untimed_keys(given)))
    return FileRun(model, layout, assumed, ignored, notes, refusals)


def is_megatron_test(sections: Section) -> bool:
    return _TEST_KEYS in sections


def read_megatron_test(sections: Section, source: Source) -> FileRun:
    """Return the run of one of Megatron-LM's functional tests (tests/functional_tests/test_cases/gpt/*/model_config.yaml).

    Where nobody states the number of GPUs it is that of a node, or the least that the groups divide.
    """
    given = sections[_TEST_KEYS]
    if not isinstance(given, Section):
        raise InputError(f"{source.path}: {_TEST_KEYS} must be a mapping of arguments, as --num-layers: 12")
    wrong = [flag for flag in given if not flag.startswith("--")]
    if wrong:
        raise InputError(f"{source.path}, line {given.lines[wrong[0]]}: {_TEST_KEYS} has {wrong[0]!r}, which begins with no --")
    return run_of_arguments(given, source.world or TEST_GPUS, source.path, () if source.world else ("world_size",))
