"""Files of frameworks that are known and not read, by what is in them, and what to give instead."""

from __future__ import annotations

import re
from collections.abc import Collection

#: Key of a YAML file -> (whose it is, the framework that estimates it).
_YAML = {
    "base_model": ("axolotl", "fsdp"),
    "step_scheduler": ("NeMo Automodel", "nemo-automodel"),
    "device_train_microbatch_size": ("llm-foundry", "llm-foundry"),
    "pipe-parallel-size": ("GPT-NeoX", "megatron-deepspeed"),
    "pipe_parallel_size": ("GPT-NeoX", "megatron-deepspeed"),
}
#: Module that a Python file imports -> what it is then, and what to give instead.
_PYTHON = {
    r"megatron\.bridge": (
        "a recipe of Megatron-Bridge",
        "give the run_config.yaml that it saves, a log that prints its configuration, or an override in YAML",
    ),
    r"nemo(?:\.collections|_run)": ("a recipe of NeMo 2", "of framework nemo-25"),
    r"torchtitan": ("a configuration of torchtitan in Python", "of framework torchtitan, or in the TOML of its release 0.2"),
}
_STATE = "state its model and layout in a JSON file (configs/README.md)"


def yaml_not_read(keys: Collection[str]) -> str:
    """Return a sentence on a YAML file with such keys, or "" where they are of no framework that is known here."""
    found = next((_YAML[key] for key in _YAML if key in keys), None)
    return f"a file of {found[0]}, which is not read; {_STATE} of framework {found[1]}" if found else ""


def python_not_read(text: str) -> str:
    """Return a sentence on a Python file that is a program of a framework, or ""."""
    for module, (what, instead) in _PYTHON.items():
        if re.search(rf"^\s*(?:from|import)\s+{module}\b", text, re.M):
            return f"{what} is a program, which is not run; {instead if instead.startswith('give') else f'{_STATE} {instead}'}"
    return ""
