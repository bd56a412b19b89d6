"""Layout strings of pipelines, as Megatron-Core writes them: ``Et*2|(tt|)*5t|tmL``.

``|`` parts chunks, which go to the stages in turn; E embedding, t a layer, m multi-token prediction, L loss; ``x*n`` and
``(...)*n`` repeat. Source: megatron/core/transformer/pipeline_parallel_layer_layout.py, as read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from profiler.errors import InputError, shown


def chunk_layers(text: str) -> tuple[int, ...]:
    """Return the layers of every chunk of a layout string.

    Multi-token prediction is in the last chunk, with the loss, or in the one before it (see predicts_apart). Raises InputError
    for what is no layout, and where the embedding is not in the first chunk, or the loss not in the last one.
    """
    chunks = _expanded(text).split("|")
    if not re.fullmatch(r"Et*", chunks[0]) or not re.fullmatch(r"t*m*L", chunks[-1]) or len(chunks) < 2:
        raise InputError(
            f"pipeline_layout {shown(text)} must start with E in its first chunk and end with L in another, as in Et*3|t*4|t*3L"
        )
    before = re.fullmatch(r"t*m+", chunks[-2]) if "m" not in chunks[-1] and len(chunks) > 2 else None
    wrong = [chunk for chunk in chunks[1 : -2 if before else -1] if chunk.strip("t")]
    if wrong:
        raise InputError(f"pipeline_layout {shown(text)}: a chunk {shown(wrong[0])} is not modelled; inner chunks hold layers")
    return tuple(chunk.count("t") for chunk in chunks)


def predicted_layers(text: str) -> int:
    """Return the layers of multi-token prediction that a layout string holds."""
    return _expanded(text).count("m")


def with_predicted(text: str, layers: int) -> str:
    """Return a layout string that holds multi-token prediction: beside the loss where it is not stated."""
    return text if predicted_layers(text) else re.sub(r"L\s*$", "m" * layers + "L", text)


def _expanded(text: str) -> str:
    """Return a layout string with its repetitions written out."""
    expanded = re.sub(r"[\s,]", "", text)
    while match := re.search(r"\(([^()]*)\)\*(\d{1,3})", expanded):
        expanded = expanded.replace(match[0], match[1] * int(match[2]), 1)
        if len(expanded) > 100_000:
            raise InputError(f"pipeline_layout {shown(text)} repeats too often")
    return re.sub(r"([EtmL])\*(\d{1,4})", lambda found: found[1] * int(found[2]), expanded)


def layers_of_chunks(sizes: Sequence[int], pp: int, v_shaped: bool = False) -> list[np.ndarray]:
    """Return the numbers of the layers of every stage, in the order in which a micro batch passes them.

    sizes: layers of every chunk, which are consecutive. Stage s holds chunks s, s + pp, ...; under a V-shaped schedule
    (``v_shaped``) chunks s and 2 pp - 1 - s.
    """
    chunks = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    if v_shaped:
        return [np.concatenate([chunks[stage], chunks[2 * pp - 1 - stage]]) for stage in range(pp)]
    return [np.concatenate(chunks[stage::pp]) for stage in range(pp)]


def predicts_apart(text: str) -> bool:
    """Whether multi-token prediction stands in a chunk before the loss's, as in ``Et*3|(tt|)*29m|L`` of DeepSeek-V3."""
    return "m" in text and "m" not in text.rsplit("|", 1)[-1]


def layout_text(chunks: Sequence[int], predicts_further: int = 0) -> str:
    """Return the layout string of chunks of layers; predicts_further: multi-token prediction's layers, beside the loss."""
    held = [f"t*{count}" if count > 1 else "t" * count for count in chunks]
    held[0] = f"E{held[0]}"
    held[-1] += "m" * predicts_further + "L"
    parts = [(part, len(list(same))) for part, same in groupby(held[:-1])]
    return "".join(f"({part}|)*{times}" if times > 1 else f"{part}|" for part, times in parts) + held[-1]
