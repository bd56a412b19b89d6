"""Interleaved stages of layers that do not divide among them: layout strings that hold as equal chunks as there are.

61 layers divide by no even number of stages, with embedding or loss counted as layers either, so that DeepSeek-V3 and Kimi-K2
are trained with layout strings, such as ``Et|(tt|)*30mL``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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


def search_laid_out(result: SearchResult, sequences: int, top: int = 10, jobs: int = 1) -> tuple[list[Variant], SearchResult]:
    """Search the layout strings of every number of stages among the best sizes of a search.

    Return the best layout of each, that of ``result`` among them, the fastest first, and the search that found the fastest;
    no variants where none of the strings applies.
    """
    problem, fixed = result.problem, dict(result.fixed)
    sizes = result.best_of_sizes
    stages = sorted({int(pp) for pp in sizes.layouts.splits.pp[sizes.layouts.row]})
    if problem.chunks or fixed.get("vpp", 2) == 1:
        return [], result
    tried = [(pp, vpp, text) for pp in stages for vpp, text in layouts_of(problem, pp).items() if fixed.get("vpp", vpp) == vpp]
    found, fastest = [Variant({"pipeline_layout": ""}, BestLayout.of(result), sure=surest(result))], result
    for pp, vpp, text in tried:
        laid_out = replace(problem, run=problem.run.replace(pipeline_layout=text))
        also: Mapping[str, Any] = {**fixed, "pp": pp, "vpp": vpp}
        try:
            other = search(laid_out, sequences, top, fixed=also, most=result.most, jobs=jobs)
        except InputError:  # none of them fits
            continue
        found.append(Variant({"pipeline_layout": text}, BestLayout.of(other), sure=surest(other)))
        if found[-1].seconds < float(fastest.best.times.seconds[0]):
            fastest = other
    if len(found) == 1:
        return [], result
    return sorted(found, key=lambda variant: variant.seconds), fastest
