"""How a search runs a pipeline of given stages: schedules, interleaved chunks, division of the layers, and micro batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from solver.search.divisions import Division, divisions, divisors
from solver.spec.choices import SCHEDULES, V_SHAPED
from solver.spec.deferral_rules import NO_DRAIN, deferral_runs
from solver.spec.expert_rules import overlap_runs, predicted_beside
from solver.spec.schedule_rules import schedules_run, split_backward_broken
from solver.spec.strategy import chunks_broken, groups_fit, smallest_group
from solver.step.problem import Problem


def pipelines(problem: Problem, pp: int, sequences: int, rejected: Counter[str]) -> list[tuple[int, ...]]:
    """Return (micro_batch_size, num_micro_batches, schedule, vpp, micro_batch_group, *Division) of ``pp`` stages that the
    framework runs."""
    framework, run, can_run = problem.framework, problem.run, problem.framework.can_run
    group, overlaps = run.micro_batch_group, run.moe_exchange_overlap
    schedules = schedules_run(framework, problem.model, run) if pp > 1 else ("1f1b",)
    if pp > 1 and len(schedules) < len(can_run.schedules) and (wrong := split_backward_broken(can_run, run)):
        rejected[f"{framework.name} does not split the backward pass with {wrong}"] += 1
    if problem.chunks:
        schedules = tuple(
            name for name in schedules if name in (*can_run.layout_schedules, "interleaved") and name not in V_SHAPED
        )
    schedules = tuple(name for name in schedules if deferral_runs(run.defer_embedding_wgrad_compute, pp, name))
    if not schedules:
        rejected[NO_DRAIN] += 1
        return []
    further = predicted_beside(framework, problem.model)
    divided = [
        way for way in divisions(can_run, problem.model.num_hidden_layers, pp, len(problem.chunks))
        if overlap_runs(overlaps, pp, way[0], "none", further) and (not group or way[0] > 1)
        and (way[0] == 1 or run.p2p_overlap or not can_run.overlaps_interleaving)
    ]  # fmt: skip
    schedules = tuple(name for name in schedules if not group or name in ("1f1b", "interleaved"))
    batches = _batches(divided, schedules, (pp, group, can_run.micro_batch_groups), sequences, rejected)
    if not batches:
        rejected[f"{'micro_batch_group' if group else 'moe_exchange_overlap'} needs interleaved stages"] += 1
    if can_run.unfilled_stages is None:
        return batches
    least = pp - can_run.unfilled_stages
    filled = [batch for batch in batches if batch[1] >= least or SCHEDULES[batch[2]] != "1f1b"]
    if few := len(batches) - len(filled):
        rejected[f"fewer micro batches than 1F1B takes under {framework.name}"] += few
    return filled


def _batches(
    divided: Sequence[tuple[int, Division]], schedules: Sequence[str], of: tuple[int, int, bool], sequences: int,
    rejected: Counter[str],
) -> list[tuple[int, ...]]:  # fmt: skip
    """Return (micro_batch_size, num_micro_batches, schedule, vpp, micro_batch_group, *Division) for one data-parallel rank's
    sequences.

    of: pp, the micro batches of a group that interleaves (0: pp), and whether other ones are tried where pp does not fit.
    """
    pp, stated, tries = of
    found: list[tuple[int, ...]] = []
    plain = [SCHEDULES.index(name) for name in schedules if name not in ("interleaved", *V_SHAPED)]
    interleaved = [SCHEDULES.index("interleaved")] * ("interleaved" in schedules)
    v_shaped = [name for name in schedules if name in V_SHAPED]
    for size in divisors(sequences):
        count = sequences // int(size)
        group = stated if stated or not tries else smallest_group(count, pp)
        in_groups = groups_fit(count, pp, group) and (not group or group >= pp)
        for vpp, division in divided:
            ways = plain if vpp == 1 else interleaved * in_groups
            if vpp == 2 and not division.num_layers_in_last_pipeline_stage:
                ways = ways + [SCHEDULES.index(name) for name in v_shaped if not chunks_broken(name, pp, vpp, count)]
            found += [(int(size), count, code, vpp, group * (code in interleaved), *division) for code in ways]
        if not in_groups and (chunked := sum(vpp > 1 for vpp, _ in divided)):
            rejected["interleaving needs micro batches in multiples of pp"] += chunked
    return found
