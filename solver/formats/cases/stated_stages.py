"""Layers of pipeline stages that a published run states in words: "layers per stage 5 7 7 7"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from profiler.errors import InputError
from solver.spec.pipeline_layout import layout_text

_STATED = re.compile(r"layers per stage((?: \d+)+)")


def with_stages(run: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return ``run`` with the layout string of the stages that its ``settings`` state, where there are several.

    Counts that add up to two more than the model's ``layers`` include embedding and head, as DeepSpeed's pipeline does.
    Raises InputError where they add up to neither.
    """
    found = _STATED.search(str(run.get("settings", "")))
    if not found or "pipeline_layout" in run:
        return dict(run)
    counts = [int(word) for word in found[1].split()]
    if len(counts) < 2:
        return dict(run)
    if sum(counts) == layers + 2:
        counts[0], counts[-1] = counts[0] - 1, counts[-1] - 1
    if sum(counts) != layers or min(counts) < 0:
        raise InputError(f"settings {found[0]!r} do not add up to the model's {layers} layers")
    return {**run, "pipeline_layout": layout_text(counts)}
