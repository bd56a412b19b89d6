"""Pipeline stages of torchtitan's files: split points of older releases, modules of every stage in later ones."""

from __future__ import annotations

import re
from typing import Any

from profiler.errors import InputError
from solver.formats.same_layout import interleaved
from solver.formats.syntax.section_reader import SectionReader
from solver.formats.torchtitan.keys import Release
from solver.spec.choices import V_SHAPED
from solver.spec.pipeline_layout import layout_text

_SEVERAL = ("interleaved", *V_SHAPED)  #: schedules of several chunks a rank


def stage_starts(layers: int, stages: int) -> list[int]:
    """Return the first layer of each stage but the first, where layers are divided evenly and middle stages take the rest."""
    share, rest = divmod(layers, stages)
    sizes = [share] * stages
    for stage in [*range(1, stages - 1), 0][:rest]:
        sizes[stage] += 1
    return [sum(sizes[:stage]) for stage in range(1, stages)]


def assigned(layers: int, stages: int, first: int, last: int) -> list[int]:
    """Return the layers of each stage; the ends count as ``first`` and ``last`` layers, and the first stages take the rest."""
    share, rest = divmod(layers + first + last, stages)
    sizes = [share + (stage < rest) for stage in range(stages)]
    return [sizes[0] - first, *sizes[1:-1], sizes[-1] - last]


def listed_stages(pipeline: SectionReader, release: Release, pp: int, layers: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the stages of a release that lists their modules, or assigns layers to them, embedding and head counted as some.

    Source: distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part.
    """
    schedule = _schedule(pipeline, release)
    listed = pipeline.get("module_fqns_per_model_part")
    ends = [pipeline.whole(f"pipeline_parallel_{end}_stage_less_layers", 1, least=0) for end in ("first", "last")]
    each = pipeline.whole("pipeline_parallel_layers_per_stage", 0, least=0)
    if pp == 1:
        return {"pp": 1, "vpp": 1, "schedule": "1f1b"}, ()
    if listed is not None:
        chunks = _listed(pipeline, listed, layers)
    else:
        number = -(-(layers + sum(ends)) // each) if each else pp * (2 if schedule in _SEVERAL else 1)
        chunks = assigned(layers, number, *ends)
    stated = _stated(pipeline, schedule, pp, len(chunks))
    if min(chunks) < 0:
        raise pipeline.wrong("pipeline_parallel_schedule", f"one of fewer than {len(chunks)} chunks for {layers} layers")
    for counted in ((0, 0), (1, 1), (1, 0), (0, 1)):
        if (layers + sum(counted)) % len(chunks) == 0 and chunks == assigned(layers, len(chunks), *counted):
            names = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
            return stated | {name: True for name, on in zip(names, counted, strict=True) if on}, ()
    if schedule in V_SHAPED:
        raise pipeline.wrong("pipeline_parallel_schedule", "another one, because unequal V-shaped stages are not modelled")
    return stated | {"pipeline_layout": layout_text(chunks)}, ()


def stages_at_points(pipeline: SectionReader, release: Release, pp: int, layers: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the stages; without split points torchtitan makes one a rank, or two under a schedule of several chunks."""
    schedule, points = _schedule(pipeline, release), pipeline.texts("pipeline_parallel_split_points")
    each = pipeline.whole("pipeline_parallel_layers_per_stage", 0, least=0)
    if pp == 1:
        return {"pp": 1, "vpp": 1, "schedule": "1f1b"}, ()
    chunks = len(points) + 1 if points else -(-layers // each) if each else pp * (2 if schedule in _SEVERAL else 1)
    stated = _stated(pipeline, schedule, pp, chunks)
    if points and points != [f"layers.{first}" for first in stage_starts(layers, chunks)]:
        even = ", ".join(f"layers.{first}" for first in stage_starts(layers, chunks))
        raise pipeline.wrong("pipeline_parallel_split_points", f"{even}, because other divisions are not modelled")
    return stated, () if points else ("vpp",)


def _stated(pipeline: SectionReader, schedule: str, pp: int, chunks: int) -> dict[str, Any]:
    """Return the keys of a layout with so many chunks. Raises InputError where the schedule has another number."""
    vpp = chunks // pp
    if chunks % pp:
        raise InputError(f"{pipeline.place}: the layers make {chunks} stages, no multiple of the pipeline's {pp} ranks")
    if (vpp > 1) != (schedule in _SEVERAL):
        raise pipeline.wrong("pipeline_parallel_schedule", f"one for {vpp} stages on each of {pp} ranks")
    return {"pp": pp, "vpp": vpp, "schedule": interleaved(schedule, vpp)}


def _listed(pipeline: SectionReader, listed: Any, layers: int) -> list[int]:
    """Return the layers of each listed stage. Raises InputError unless all modules are there in their order."""
    wanted = f"lists of tok_embeddings, layers.0 to layers.{layers - 1}, norm and output, in this order"
    if not isinstance(listed, list) or not all(isinstance(stage, list) for stage in listed):
        raise pipeline.wrong("module_fqns_per_model_part", wanted)
    every = [name for stage in listed for name in stage]
    if every != ["tok_embeddings", *(f"layers.{layer}" for layer in range(layers)), "norm", "output"]:
        raise pipeline.wrong("module_fqns_per_model_part", wanted)
    if "tok_embeddings" not in listed[0] or "norm" not in listed[-1]:
        raise pipeline.wrong("module_fqns_per_model_part", wanted)
    return [sum(name.startswith("layers.") for name in stage) for stage in listed]


def _schedule(pipeline: SectionReader, release: Release) -> str:
    spelt = {re.sub("[^a-z0-9]", "", theirs.lower()): ours for ours, theirs in release.schedules.items()}
    word = re.sub("[^a-z0-9]", "", pipeline.text("pipeline_parallel_schedule", "1F1B").lower())
    if word not in spelt:
        raise pipeline.wrong("pipeline_parallel_schedule", f"one of {', '.join(release.schedules.values())}")
    return spelt[word]
