"""Interleaved stages of layers that do not divide among them: layout strings that hold as equal chunks as there are.

61 layers divide by no even number of stages, with embedding or loss counted as layers either, so that DeepSeek-V3 and Kimi-K2
are trained with layout strings, such as ``Et|(tt|)*30mL``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from profiler.errors import InputError
from solver.search.best_layout import Variant, variant_of
from solver.search.divisions import divisions
from solver.search.search import SearchResult, batch_sequences, search
from solver.spec.pipeline_layout import layout_text
from solver.step.problem import Problem
from solver.step.time import TIME_PARTS

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
    global_batch_sequences: int | None = None,
    top: int = 10,
    progress: Callable[[int, int], None] | None = None,
    *,
    global_batch_tokens: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    max_sizes: Mapping[str, int] | None = None,
    jobs: int = 1,
    stages: Collection[int] | None = None,
) -> tuple[list[Variant], SearchResult]:
    """Search every layout, and the layout strings of numbers of stages that interleave no equal chunks.

    Return the best layout of each string and of the search without any, the fastest first, and the search that found the
    fastest; no variants where no string applies. stages: numbers of stages that get strings; None: all. Other arguments, and
    errors, as of solver.search.search.search.
    """
    sequences = batch_sequences(problem, global_batch_sequences, global_batch_tokens)
    limits: dict[str, Any] = {"max_sizes": max_sizes or {}, "jobs": jobs}
    plain: SearchResult | None = None
    failed = None
    try:
        plain = search(problem, sequences, top, progress, fixed=fixed, **limits)
    except InputError as error:
        failed = error
    found = _strings(problem, sequences, top, plain, stages, fixed or {}, limits)
    if plain is None and not found:
        assert failed is not None
        raise failed
    if plain is not None and not found:
        return [], plain
    if plain is not None:
        found.append((variant_of(plain, pipeline_layout=problem.run.pipeline_layout), plain))
    found.sort(key=lambda one: one[0].seconds)
    return [variant for variant, _ in found], found[0][1]


def _strings(
    problem: Problem,
    sequences: int,
    top: int,
    plain: SearchResult | None,
    stages: Collection[int] | None,
    fixed: Mapping[str, Any],
    limits: Mapping[str, Any],
) -> list[tuple[Variant, SearchResult]]:
    """Return the searches of the layout strings that have a layout that fits, the most even of each number of stages first.

    Another number of chunks changes how long stages wait, and lets none hold fewer layers: where the most even one would lose
    without any waiting, the others of as many stages are left out.
    """
    found: list[tuple[Variant, SearchResult]] = []
    if problem.chunks or fixed.get("vpp", 2) == 1:
        return found
    best = float(plain.best.times.seconds[0]) if plain is not None else math.inf
    for pp in _stages(problem, fixed, limits["max_sizes"], plain):
        if stages is not None and pp not in stages:
            continue
        texts = layouts_of(problem, pp)
        for vpp in sorted(texts, key=lambda vpp: (_longest(problem, pp * vpp), -vpp)):
            if fixed.get("vpp", vpp) != vpp:
                continue
            laid_out = problem.with_run(pipeline_layout=texts[vpp])
            try:
                other = search(laid_out, sequences, top, fixed={**fixed, "pp": pp, "vpp": vpp}, **limits)
            except InputError:  # none of them fits
                continue
            found.append((variant_of(other, pipeline_layout=texts[vpp]), other))
            best = min(best, found[-1][0].seconds)
            if _without_waiting(other) > best:
                break
    return found


def _stages(problem: Problem, fixed: Mapping[str, Any], max_sizes: Mapping[str, int], plain: SearchResult | None) -> list[int]:
    """Return the numbers of stages that GPUs and limits allow, those of the best sizes of ``plain`` first."""
    world, layers = problem.run.world_size, problem.model.num_hidden_layers
    most = min(max_sizes.get("pp", world), world, layers + 2)
    allowed = [pp for pp in range(2, most + 1) if world % pp == 0 and fixed.get("pp", pp) == pp]
    if plain is None:
        return allowed
    sizes = plain.best_of_sizes.layouts
    first = dict.fromkeys(int(pp) for pp in sizes.splits.pp[sizes.row])
    return sorted(allowed, key=lambda pp: list(first).index(pp) if pp in first else len(first) + pp)


def _longest(problem: Problem, chunks: int) -> int:
    """Return how many layers stages hold more than there are if all chunks are as long as the longest."""
    total = problem.model.num_hidden_layers + 2 + problem.model.num_nextn_predict_layers
    return -(-total // chunks) * chunks - total


def _without_waiting(result: SearchResult) -> float:
    """Return the seconds of the fastest layout without bubble and messages of the pipeline."""
    parts = dict(zip(TIME_PARTS, result.best.times.parts[:, 0], strict=True))
    return float(result.best.times.seconds[0] - parts["bubble"] - parts["pp_transfer"])
