"""Interleaved stages of layers that do not divide among them: layout strings that hold as equal chunks as there are.

61 layers divide by no even number of stages, with embedding or loss counted as layers either, so that DeepSeek-V3 and Kimi-K2
are trained with layout strings, such as ``Et|(tt|)*30mL``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from profiler.errors import InputError
from solver.search.divisions import divisions
from solver.search.search import SearchResult, search
from solver.search.variants import BestLayout, Variant, surest
from solver.spec.pipeline_layout import layout_text
from solver.step.problem import Problem

#: Least share of a stage's longest chunks that all chunks hold on average.
_EVEN = 0.85
_MOST_CHUNKS = 16  #: of a stage


def even_chunks(layers: int, predicted: int, chunks: int) -> tuple[int, ...] | None:
    """Return the layers of each chunk, the embedding counted as one in the first chunk, the loss and each of ``predicted``
    further tokens in the last one; None where the longest chunks are far longer than the mean, or one would be empty."""
    total = layers + 2 + predicted
    longest = -(-total // chunks)
    sizes = [longest] * chunks
    sizes[0] -= 1
    sizes[-1] -= 1 + predicted
    if min(sizes[0], sizes[-1]) < 0 or total < _EVEN * longest * chunks:
        return None
    least = [0, *[1] * (chunks - 2), 0]  # a chunk without an end holds a layer
    spare = sum(sizes) - layers
    for place in [-1, 0, *range(chunks - 2, 0, -1)]:  # the ends do most beside their layers
        taken = min(spare, 1, sizes[place] - least[place])
        sizes[place] -= taken
        spare -= taken
    return tuple(sizes) if not spare else None


def layouts_of(problem: Problem, pp: int) -> dict[int, str]:
    """Return vpp -> layout string of ``pp`` stages, where the framework interleaves no equal chunks of them; otherwise {}."""
    model, can_run = problem.model, problem.framework.can_run
    if not (can_run.pipeline_layout and "interleaved" in can_run.schedules) or pp == 1:
        return {}
    if any(vpp > 1 for vpp, _ in divisions(can_run, model.num_hidden_layers, pp)):
        return {}
    found = {}
    for vpp in range(2, _MOST_CHUNKS + 1):
        predicted = model.num_nextn_predict_layers
        if chunks := even_chunks(model.num_hidden_layers, predicted, pp * vpp):
            found[vpp] = layout_text(chunks, predicted)
    return found


def search_with_strings(
    problem: Problem,
    sequences: int | None = None,
    top: int = 10,
    *,
    fixed: Mapping[str, Any] | None = None,
    jobs: int = 1,
    **options: Any,
) -> tuple[list[Variant], SearchResult]:
    """Search every layout, and the layout strings where layers do not divide. Return what ``search_laid_out`` does.

    Arguments, options and errors as of solver.search.search.search.
    """
    try:
        result = search(problem, sequences, top, fixed=fixed, jobs=jobs, **options)
    except InputError:
        if (fixed or {}).get("vpp", 1) == 1 or problem.chunks:
            raise
        found = _of_stated_chunks(problem, sequences, top, dict(fixed or {}), jobs, options)
        if not found:
            raise
        return [variant for variant, _ in found], found[0][1]
    return search_laid_out(result, top, jobs)


def search_laid_out(result: SearchResult, top: int = 10, jobs: int = 1) -> tuple[list[Variant], SearchResult]:
    """Search the layout strings of every number of stages among the best sizes of a search.

    Return the best layout of each, that of ``result`` among them, the fastest first, and the search that found the fastest;
    no variants where none of the strings applies.
    """
    if result.problem.chunks or result.fixed.get("vpp", 2) == 1:
        return [], result
    found = _strings(result, result.fixed, top, jobs)
    if not found:
        return [], result
    found.append((_variant(result), result))
    found.sort(key=lambda one: one[0].seconds)
    return [variant for variant, _ in found], found[0][1]


def _of_stated_chunks(
    problem: Problem, sequences: int | None, top: int, fixed: dict[str, Any], jobs: int, options: Mapping[str, Any]
) -> list[tuple[Variant, SearchResult]]:
    """Return the strings of the stated number of chunks, the fastest first, where equal ones do not run."""
    try:
        others = search(problem, sequences, 1, fixed={k: v for k, v in fixed.items() if k != "vpp"}, jobs=jobs, **options)
    except InputError:
        return []
    return sorted(_strings(others, fixed, top, jobs), key=lambda one: one[0].seconds)


def _strings(result: SearchResult, fixed: Mapping[str, Any], top: int, jobs: int) -> list[tuple[Variant, SearchResult]]:
    """Return the search of every layout string of the best sizes of ``result`` that has a layout that fits."""
    problem, sizes = result.problem, result.best_of_sizes
    sequences = result.best.layouts.strategy(0, problem.run).global_batch_sequences
    found = []
    for pp in sorted({int(pp) for pp in sizes.layouts.splits.pp[sizes.layouts.row]}):
        for vpp, text in layouts_of(problem, pp).items():
            if fixed.get("vpp", vpp) != vpp:
                continue
            laid_out = problem.with_run(pipeline_layout=text)
            with suppress(InputError):  # none of them fits
                other = search(
                    laid_out, sequences, top, max_sizes=result.max_sizes, jobs=jobs, fixed={**fixed, "pp": pp, "vpp": vpp}
                )
                found.append((_variant(other), other))
    return found


def _variant(result: SearchResult) -> Variant:
    return Variant({"pipeline_layout": result.problem.run.pipeline_layout}, BestLayout.of(result), sure=surest(result))
