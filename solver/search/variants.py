"""Axes that a search varies on demand: constants of the run, of which each combination is a search of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from profiler.errors import InputError, shown
from solver.search.best_layout import Variant, variant_of
from solver.search.hints import dispatchers_on
from solver.search.laid_out import search_with_strings
from solver.search.search import SearchResult
from solver.spec.choices import OFFLOAD_MODULES
from solver.spec.precision import QUANTISED, keeps_remainders
from solver.spec.rules.fp8_attention import fp8_attention_broken
from solver.spec.rules.offload import offload_broken
from solver.spec.rules.recomputation import modules_of
from solver.spec.rules.runs import check_run
from solver.spec.run import Run
from solver.step.problem import Problem

#: Shares of the moments, and of the layers, that a search offloads to the host.
OFFLOADED = (0.25, 0.5, 0.75, 1.0)
#: Over the best of a combination, up to which its number of stages is searched with strings in the combinations behind it.
_NEAR = 1.25
_NOT_OFFERED, _SHOWN = object(), 8  #: values of an axis that a message names


def _modules(problem: Problem) -> list[str]:
    """Return every set of modules of a layer that does not name a module and a part of it."""
    offered = problem.framework.can_run.recompute_modules
    there = [name for name in modules_of(problem.framework, problem.model) if name in offered]
    sets = [names for n in range(1, len(there) + 1) for names in combinations(there, n)]
    return ["+".join(names) for names in sets if "moe" not in names or not {"moe_act", "shared_experts"} & set(names)]


def _flag(offered: bool) -> list[bool]:
    return [False, True] if offered else [False]


def _offloaded(problem: Problem, what: str, values: Sequence[float | int], described: float) -> list[float | int]:
    offered = problem.framework.can_run.offloads
    alone = what in offered and not (what == "optimizer" and "gradients" in offered)  # which would have to go with it
    return [0, *values] if alone and described else [0]


def _offloaded_modules(problem: Problem) -> list[str]:
    """Return the choices of offload_modules: none, each module that the model has by itself, and all of them."""
    if "modules" not in problem.framework.can_run.offloads or not problem.cluster.host_link:
        return [""]
    there = [name for name in OFFLOAD_MODULES if not offload_broken(problem.model, problem.run.replace(offload_modules=name))]
    return ["", *there, "core_attn+attn_proj", "+".join([*there, "attn_proj"])]


#: Constant of the run -> the values of it that the framework runs and that concern the model.
CONSTANT_AXES: Mapping[str, Callable[[Problem], Sequence[Any]]] = {
    "cp_comm": lambda p: [how for how in p.framework.can_run.cp_comms if how != "a2a+ring"] or [p.run.cp_comm],
    "tp_comm_overlap": lambda p: _flag(p.framework.can_run.tp_comm_overlap),
    "recompute_modules": _modules,
    "moe_dispatcher": dispatchers_on,
    "defer_embedding_wgrad_compute": lambda p: _flag(
        p.framework.can_run.defers_head and p.framework.fuses_accumulation(p.run.gradient_accumulation_fusion)
    ),
    "optimizer": lambda p: p.framework.can_run.optimizers,
    "optimizer_states": lambda p: [
        states for states in p.framework.can_run.optimizer_states if states != "remainder" or keeps_remainders(p.run)
    ],
    "expandable_segments": lambda p: _flag(p.framework.memory.gaps(True) != p.framework.memory.gaps(False)),
    "cuda_graphs": lambda p: _flag(bool(p.framework.can_run.cuda_graph_modules)),
    "fp8_attention": lambda p: _flag(
        p.framework.can_run.fp8_attention
        and p.run.precision in QUANTISED
        and not fp8_attention_broken(p.model, p.run.replace(fp8_attention=True), p.cost.device)
    ),
    "overlap_grad_reduce": lambda p: [True, False],
    "overlap_param_gather": lambda p: [True, False],
    "delay_wgrad_compute": lambda p: _flag(p.framework.can_run.overlaps_exchange),
    "moe_exchange_overlap": lambda p: _flag(p.framework.can_run.overlaps_exchange),
    "optimizer_offload_fraction": lambda p: _offloaded(p, "optimizer", OFFLOADED, p.cluster.host_link * p.cluster.host_memory),
    "offload_layers": lambda p: _offloaded(
        p,
        "activations",
        [max(int(p.model.num_hidden_layers * share) - (share == 1), 1) for share in OFFLOADED],
        p.cluster.host_link,
    ),
    "offload_modules": _offloaded_modules,
}


def _parts(value: Any) -> frozenset[str]:
    """Return what a value joins by "+", in whatever order."""
    return frozenset(str(value).split("+"))


def _offered(problem: Problem, name: str, asked: Sequence[Any]) -> list[Any]:
    """Return the values of an axis: those that are asked for, or all. Raises InputError for one that does not run."""
    offered = {_parts(value): value for value in CONSTANT_AXES[name](problem)}
    found = [offered.get(_parts(value), _NOT_OFFERED) for value in asked] or list(offered.values())
    if _NOT_OFFERED in found:
        wrong, known = asked[found.index(_NOT_OFFERED)], ", ".join(str(value) for value in list(offered.values())[:_SHOWN])
        more = f" and {len(offered) - _SHOWN} more" if len(offered) > _SHOWN else ""
        raise InputError(f"--also {name}={shown(wrong)}: {problem.framework.name} runs {known}{more}, values apart by /")
    return found


def variants_of(problem: Problem, axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return all combinations of ``axes``, that of the run first; values by axis, () for all that the framework runs."""
    of_experts = [name for name in axes if name.startswith("moe_")]
    if of_experts and not problem.model.is_mixture_of_experts:
        raise InputError(f"--also {of_experts[0]} varies nothing: {problem.model.name} has no experts")
    values = {
        name: list(dict.fromkeys([getattr(problem.run, name), *_offered(problem, name, asked)])) for name, asked in axes.items()
    }
    if same := [name for name, asked in axes.items() if asked and len(values[name]) == 1]:
        raise InputError(f"--also {same[0]}={axes[same[0]][0]} varies nothing: it is what the run has")
    single = [name for name, offered in values.items() if len(offered) == 1]
    if single:
        needs = " where the cluster describes no host" * single[0].startswith(("offload", "optimizer_offload"))
        raise InputError(f"--also {single[0]} varies nothing: {problem.framework.name} runs only {values[single[0]][0]}{needs}")
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def search_variants(
    problem: Problem,
    sequences: int,
    axes: Mapping[str, Sequence[Any]],
    top: int = 10,
    progress: Callable[[int, int], None] | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    max_sizes: Mapping[str, int] | None = None,
    jobs: int = 1,
) -> tuple[list[Variant], SearchResult]:
    """Search every combination of ``axes`` (as variants_of). Return the best layout of each, the fastest first, and the search
    that found the fastest of all. Other arguments as in solver.search.search.search.

    Raises InputError where no combination has a layout that fits.
    """
    check_run(problem.framework, problem.model, problem.run)
    found: list[Variant] = []
    fastest: SearchResult | None = None
    combined = variants_of(problem, axes)
    stages: set[int] | None = None  # numbers of them with which strings of the first combinations are nearly as fast as any
    for number, constants in enumerate(combined):
        if progress:
            progress(number, len(combined))
        there = problem.with_run(**constants)
        also = dict(fixed or {})
        other = constants.get("recompute_modules", Run.recompute_modules) != problem.run.recompute_modules
        if other and also.setdefault("recompute", "selective") != "selective":  # nothing else depends on them
            continue
        try:
            laid_out, result = search_with_strings(
                there, sequences, top, fixed=also, max_sizes=max_sizes, jobs=jobs, stages=stages
            )
        except InputError as error:
            found.append(Variant(constants, None, str(error)))
            continue
        found += [replace(one, constants={**constants, **one.constants}) for one in laid_out or [variant_of(result)]]
        near = [one.best.layout.pp for one in laid_out if one.best and one.seconds < _NEAR * laid_out[0].seconds]
        stages = {*(stages or ()), *near} if near else stages
        if fastest is None or result.best.times.seconds[0] < fastest.best.times.seconds[0]:
            fastest = result
    if progress:
        progress(len(combined), len(combined))
    if fastest is None:
        raise InputError(found[0].reason)
    if any("pipeline_layout" in one.constants for one in found):  # then all say which string they have
        found = [replace(one, constants={"pipeline_layout": "", **one.constants}) for one in found]
        found = [replace(one, constants={k: one.constants[k] for k in (*axes, "pipeline_layout")}) for one in found]
    return sorted(found, key=lambda variant: variant.seconds), fastest
