"""Values of NeMo's files that OmegaConf makes of others: ${.key}, ${model.key} and ${multiply:a,b}.

Source: NVIDIA/NeMo-Framework-Launcher launcher_scripts/conf/training/gpt3/175b.yaml (commit 056a90e), as read.
"""

from __future__ import annotations

import math
import re

from solver.formats.syntax.literal_python import Section

_OF_MODEL = re.compile(r"\$\{(?:\.|(?:training\.)?model\.)(\w+)\}")
_PRODUCT = re.compile(r"\$\{multiply:\s*(\d{1,9})\s*,\s*(\d{1,9})\s*\}")
_DEEP = 8  #: keys that refer to others that refer to others


def resolve(model: Section) -> None:
    """Put whole numbers in the place of texts that refer to the section's own numbers; other texts stay."""
    for _ in range(_DEEP):
        for key, value in model.items():
            if isinstance(value, str) and "${" in value:
                filled = _filled(value, model)
                model[key] = int(filled) if filled.isdecimal() and len(filled) < 10 else value


def _filled(text: str, model: Section) -> str:
    """Return a text with the section's whole numbers and products put in."""

    def number(found: re.Match[str]) -> str:
        value = model.get(found[1])
        return str(value) if type(value) is int and value >= 0 else found[0]

    return _PRODUCT.sub(lambda found: str(math.prod(map(int, found.groups()))), _OF_MODEL.sub(number, text))
