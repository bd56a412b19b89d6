"""How a search runs a pipeline of given stages: schedules, interleaved chunks, division of the layers, and micro batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from solver.search.divisions import Division, divisions, divisors
from solver.spec.choices import ONE_F_ONE_B, SCHEDULES, V_SHAPED
from solver.spec.rules.deferral import NO_DRAIN, deferral_runs
from solver.spec.rules.experts import overlap_runs, predicted_beside
from solver.spec.rules.schedules import chunks_broken, groups_fit, schedules_run, smallest_group, split_backward_broken
from solver.step.problem import Problem


class PipelineRun(NamedTuple):
    """How a pipeline of given stages runs one data-parallel rank's sequences. schedule: index into SCHEDULES."""

    micro_batch_size: int
    num_micro_batches: int
    schedule: int
    vpp: int
    micro_batch_group: int
    division: Division

    @property
    def columns(self) -> tuple[int, ...]:
        """The numbers in order, those of the division last."""
        *others, division = self
        return (*others, *division)


_Way = TypeVar("_Way")
_Rules = Sequence[tuple[Callable[[_Way], bool], str]]  #: whether a way is allowed, and what is wrong where none is


def pipelines(
    problem: Problem, pp: int, sequences: int, rejected: Counter[str], ends: tuple[int, int] = (0, 0)
) -> list[PipelineRun]:
    """Return the runs of ``pp`` stages that the framework offers; where there are none, why is counted in ``rejected``.

    ends: layers that the user states for the first and the last stage (0: none).
    """
    schedules, divided = _schedules(problem, pp, rejected), _divided(problem, pp, rejected, ends)
    if not schedules or not divided:
        return []
    can_run, group = problem.framework.can_run, problem.run.micro_batch_group
    found = _runs(divided, schedules, sequences, rejected, pp=pp, group=group, tries_others=can_run.micro_batch_groups)
    if can_run.unfilled_stages is None:
        return found
    least = pp - can_run.unfilled_stages
    filled = [run for run in found if run.num_micro_batches >= least or SCHEDULES[run.schedule] != "1f1b"]
    if few := len(found) - len(filled):
        rejected[f"fewer micro batches than 1F1B takes under {problem.framework.name}"] += few
    return filled


def _schedules(problem: Problem, pp: int, rejected: Counter[str]) -> Sequence[str]:
    """Return the names of the schedules that ``pp`` stages may run."""
    framework, run, can_run = problem.framework, problem.run, problem.framework.can_run
    found = schedules_run(framework, problem.model, run) if pp > 1 else ("1f1b",)
    if pp > 1 and len(found) < len(can_run.schedules) and (wrong := split_backward_broken(can_run, run)):
        rejected[f"{framework.name} does not split the backward pass with {wrong}"] += 1
    rules: _Rules[str] = (
        (
            lambda name: not problem.chunks or (name in can_run.laid_out and name not in V_SHAPED),
            f"{framework.name} runs a pipeline_layout by no schedule of a search",
        ),
        (lambda name: deferral_runs(run.defer_embedding_wgrad_compute, pp, name), NO_DRAIN),
        (lambda name: not run.micro_batch_group or name in ONE_F_ONE_B, "micro_batch_group needs a schedule that interleaves"),
    )
    return _obeying(found, rules, rejected)


def _divided(problem: Problem, pp: int, rejected: Counter[str], ends: tuple[int, int]) -> Sequence[tuple[int, Division]]:
    """Return (vpp, division of the layers) of all ways in which ``pp`` stages may hold chunks."""
    framework, run, can_run = problem.framework, problem.run, problem.framework.can_run
    found: Sequence[tuple[int, Division]] = divisions(can_run, problem.model.num_hidden_layers, pp, len(problem.chunks), *ends)
    further = predicted_beside(framework, problem.model)
    rules: _Rules[tuple[int, Division]] = (
        (lambda way: not run.micro_batch_group or way[0] > 1, "micro_batch_group needs interleaved stages"),
        (
            lambda way: overlap_runs(run.moe_exchange_overlap, pp, way[0], "none", further),
            "moe_exchange_overlap needs interleaved stages",
        ),
        (
            lambda way: way[0] == 1 or run.p2p_overlap or not can_run.overlaps_interleaving,
            f"{framework.name} interleaves stages only with p2p_overlap",
        ),
    )
    return _obeying(found, rules, rejected)


def _obeying(found: Sequence[_Way], rules: _Rules[_Way], rejected: Counter[str]) -> Sequence[_Way]:
    """Return those of ``found`` that obey all rules; the first one that none obeys is counted in ``rejected``."""
    for holds, why in rules:
        left = [way for way in found if holds(way)]
        if found and not left:
            rejected[why] += 1
        found = left
    return found


def _runs(
    divided: Sequence[tuple[int, Division]],
    schedules: Sequence[str],
    sequences: int,
    rejected: Counter[str],
    *,
    pp: int,
    group: int,
    tries_others: bool,
) -> list[PipelineRun]:
    """Return all of the stages' divisions and chunks, by each schedule and micro-batch size.

    group: the micro batches of a group that interleaves (0: pp). tries_others: whether others are where pp does not fit.
    """
    found: list[PipelineRun] = []
    plain = [SCHEDULES.index(name) for name in schedules if name not in ("interleaved", *V_SHAPED)]
    interleaved = [SCHEDULES.index("interleaved")] * ("interleaved" in schedules)
    v_shaped = [name for name in schedules if name in V_SHAPED]
    for size in divisors(sequences):
        count = sequences // int(size)
        fits = group if group or not tries_others else smallest_group(count, pp)
        in_groups = groups_fit(count, pp, fits) and (not fits or fits >= pp)
        for vpp, division in divided:
            ways = plain if vpp == 1 else interleaved * in_groups
            if vpp == 2 and not division.num_layers_in_first_pipeline_stage + division.num_layers_in_last_pipeline_stage:
                ways = ways + [SCHEDULES.index(name) for name in v_shaped if not chunks_broken(name, pp, vpp, count)]
            found += [PipelineRun(int(size), count, code, vpp, fits * (code in interleaved), division) for code in ways]
        if not in_groups and (chunked := sum(vpp > 1 for vpp, _ in divided)):
            rejected["interleaving needs micro batches in multiples of pp"] += chunked
    return found
