"""Which schedules of a pipeline run: with their chunks and micro batches, and with the other constants of a run."""

from __future__ import annotations

from solver.spec.can_run import CanRun
from solver.spec.choices import ONE_F_ONE_B, SPLIT_BACKWARD, V_SHAPED
from solver.spec.division import tensor_overlap_runs
from solver.spec.framework import Framework
from solver.spec.model import ModelSpec
from solver.spec.rules.overlaps import overlap_rules
from solver.spec.run import Run
from solver.spec.strategy import Strategy


def split_backward_broken(can_run: CanRun, run: Run, zero: int = 0) -> str:
    """Return what of a run with a ZeRO stage (0: with any) keeps the framework from splitting the backward pass, or ""."""
    if run.compile and not can_run.compiles_split_backward:
        return "torch.compile"
    if run.overlap_grad_reduce and not can_run.overlaps_split_backward:
        return "overlap_grad_reduce"
    if run.overlap_param_gather and zero and not can_run.overlaps_split_backward:
        return "overlap_param_gather"
    return ""


def schedule_broken(framework: Framework, model: ModelSpec, run: Run, schedule: str, zero: int = 0) -> str:
    """Return why a schedule that the framework offers does not run with the rest and a ZeRO stage (0: with any), or ""."""
    can = framework.can_run
    if schedule not in SPLIT_BACKWARD or schedule not in can.schedules:
        return ""
    if wrong := split_backward_broken(can, run, zero):
        return f"{framework.name} does not run {wrong} with schedule {schedule}, which splits the backward pass"
    tied = model.tie_word_embeddings and not can.splits_backward_tied
    return f"{framework.name} does not run schedule {schedule} with tied embeddings" if tied else ""


def schedules_run(framework: Framework, model: ModelSpec, run: Run) -> tuple[str, ...]:
    """Return the schedules that the framework runs with the constants of ``run``."""
    return tuple(name for name in framework.can_run.schedules if not schedule_broken(framework, model, run, name))


def groups_fit(micro_batches: int, pp: int, group: int) -> bool:
    """Whether interleaving assigns the micro batches in groups of ``group`` (0: pp): there is a whole one, and the last one is
    whole or at least pp (asserted in Megatron-Core's schedules.py)."""
    rest = micro_batches % (group or pp)
    return (group or pp) <= micro_batches and (rest == 0 or (group > pp and rest >= pp))


def smallest_group(micro_batches: int, pp: int) -> int:
    """Return the fewest micro batches above pp that groups_fit as a group; 0 where pp itself does, or none does."""
    fits = (group for group in range(pp + 1, micro_batches + 1) if groups_fit(micro_batches, pp, group))
    return 0 if groups_fit(micro_batches, pp, 0) else next(fits, 0)


def chunks_broken(schedule: str, pp: int, vpp: int, micro_batches: int, group: int = 0) -> str:
    """Return what is wrong with the chunks and micro batches of a schedule, or "". group: as groups_fit."""
    if schedule in V_SHAPED and (vpp != 2 or pp == 1):
        return f"schedule {schedule} has two chunks a stage of several: give it vpp 2 and pp above 1, not vpp {vpp}, pp {pp}"
    if micro_batches < (fewest := {"zb-v": 2 * pp - 1, "dualpipev": 2 * pp}.get(schedule, 1)):
        return f"schedule {schedule} needs {fewest} micro batches or more with pp {pp}, not {micro_batches}"
    if vpp == 1 or schedule in V_SHAPED:
        return ""
    if schedule not in ONE_F_ONE_B:
        return f"vpp {vpp} interleaves 1F1B, and schedule {schedule} has one chunk a stage: leave one out"
    if group and group < pp:
        return f"micro_batch_group {group} is less than pp {pp}, so that stages would wait for each other's chunks"
    if not groups_fit(micro_batches, pp, group):
        whole = f"groups of {group} and a last one of at least pp {pp}" if group else f"multiples of pp {pp}"
        return f"interleaving needs micro batches in {whole}, not {micro_batches}"
    return ""


def schedule_rules(framework: Framework, s: Strategy) -> tuple[tuple[bool, str], ...]:
    """Return (holds, what is broken) of the order of a pipeline's passes and of what overlaps with them."""
    can, name = framework.can_run, framework.name
    least = s.pp - can.unfilled_stages if can.unfilled_stages is not None and s.vpp == 1 and s.schedule == "1f1b" else 0
    return (
        (
            s.vpp == 1 or s.schedule in V_SHAPED or s.p2p_overlap or not can.overlaps_interleaving,
            f"{name} interleaves stages only with p2p_overlap",
        ),
        (
            s.num_micro_batches >= least,
            f"{name} needs {least} micro batches or more with pp {s.pp}, not {s.num_micro_batches}",
        ),
        (
            tensor_overlap_runs(framework, s, s.tp_mode, s.tp),
            f"{name} overlaps tensor parallelism (tp_comm_overlap) only with tp_mode msp: give it, or tp_comm_overlap false",
        ),
        *overlap_rules(framework, s, s.tp > 1, s.zero > 0),
        (
            not s.micro_batch_group or (s.vpp > 1 and s.schedule in ONE_F_ONE_B),
            f"micro_batch_group {s.micro_batch_group} changes nothing without interleaved stages (vpp above 1)",
        ),
        (s.pp == 1 or s.schedule in (*can.schedules, "interleaved"), f"{name} does not offer schedule {s.schedule}"),
    )
