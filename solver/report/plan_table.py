"""A plan in words, as a table and as JSON rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from predictor.estimate import Z90
from profiler.units import GIB
from solver.report.describe import describe
from solver.report.goodput import Goodput
from solver.report.output import layout_dict
from solver.report.plan import Training, cheapest, efficient, fewest
from solver.report.terminal import surely_fitting
from solver.report.uncertainty import normal_cdf
from solver.report.words import gibibytes, probability, rounded, seconds, token_rate
from solver.step.memory import FITS


def answer(found: Sequence[Training], days: float | None, budget: float | None) -> str:
    """Return the training that was asked for, in a sentence.

    On one machine with a deadline only: the fewest GPUs that meet it. Otherwise the cheapest that meets deadline and budget, or
    with a budget only the fastest; with neither the cheapest.
    """
    if days is not None and budget is None and len({one.machine for one in found}) == 1:
        return _fewest_gpus(found, days)
    chosen = cheapest(found, days, budget)
    asked = [f"{days:g} days" if days is not None else "", f"a budget of {budget:,.0f}" if budget is not None else ""]
    limits = " and ".join(filter(None, asked))
    if chosen is None:
        near = min(found, key=lambda one: one.days[1] if days is not None else one.cost)
        word = "Fastest" if days is not None else "Cheapest"
        return f"Nothing within {limits}. {word}: {_in_words(near)}."
    kind = "Fastest" if days is None and budget is not None else "Cheapest"
    return f"{kind}{f' within {limits}' if limits else ''}: {_in_words(chosen)}.{_how_sure(found, chosen, days, budget)}"


def _how_sure(found: Sequence[Training], chosen: Training, days: float | None, budget: float | None) -> str:
    """Return how probable it is that a training meets the deadline, and which is the cheapest that almost surely does."""
    if days is None:
        return ""
    sentence = f" It meets {days:g} days with {probability(_meets(chosen, days))} probability"
    sure = cheapest([one for one in found if one.days[2] <= days], days, budget)
    if sure is None or sure is chosen:
        return f"{sentence}."
    return f"{sentence}; the cheapest of those that do with 95%: {_in_words(sure)}."


def _meets(one: Training, days: float) -> float:
    """Return how probable it is that a training takes no more than ``days``."""
    low, middle, high = one.days
    return float(normal_cdf(math.log(days / middle) / (math.log(high / low) / (2 * Z90))))


def _in_words(one: Training) -> str:
    low, middle, high = one.days
    on = f" x {one.machine.name}" if one.machine.name else " GPUs"
    paid = f"{one.gpu_hours:,.0f} GPU-hours" if one.money is None else f"a price of {one.money:,.0f}"
    spread = f"{rounded(middle)} days ({rounded(low)} to {rounded(high)} with 90% probability)"
    return f"{one.world_size}{on}, {spread}, {paid}{_at_risk(one)}"


def _at_risk(one: Training) -> str:
    """Return what is to be said of a layout that may not fit, and which one surely does."""
    best = one.result.best
    if best.verdict(0) == FITS:
        return ""
    memory = f"{best.memory.device[0] / GIB:.1f} GiB, at most {best.memory.bound[0] / GIB:.1f}"
    limit = best.problem.cluster.memory_bytes / GIB
    return f". Its memory is {best.verdict(0)}: {memory}, of {limit:.1f}. {surely_fitting(one.result).removesuffix('.')}"


def _fewest_gpus(found: Sequence[Training], days: float) -> str:
    enough = fewest(found, days)
    if enough is None:
        best = min(found, key=lambda one: one.days[1])
        return f"{days:g} days are not met by any of these: {best.world_size} GPUs take {rounded(best.days[1])} days."
    sure = next((one for one in found if one.days[2] <= days), None)
    more = f"; {sure.world_size} to be 95% sure" if sure and sure is not enough else ""
    low, middle, high = enough.days
    spread = f"{rounded(middle)} days ({rounded(low)} to {rounded(high)} with 90% probability)"
    met = f"meet {days:g} days with {probability(_meets(enough, days))} probability"
    return f"{enough.world_size} GPUs, the fewest of those tried, {met}: {spread}{more}{_at_risk(enough)}."


def plan_table(found: Sequence[Training]) -> Table:
    """Return a row for each training; those on named machines have the name instead of all that interrupts them, and * marks
    the Pareto front. Sequences of a step are a column where they differ."""
    table, named = Table(), any(one.machine.name for one in found)
    pauses = ("trains",) if named else ("trains", "interrupted every", "checkpoint every")
    priced, powered = any(one.money is not None for one in found), any(one.energy_mwh is not None for one in found)
    batches = [one.result.best.layouts.strategy(0, one.result.problem.run).global_batch_sequences for one in found]
    several_batches = len(set(batches)) > 1
    for name in (
        *(["", "machine"] if named else []),
        "GPUs",
        "days",
        "90% interval",
        *(pauses if found[0].goodput else []),
        "GPU-hours",
        *(["money"] if priced else []),
        *(["MWh"] if powered else []),
        *(["sequences"] if several_batches else []),
        "TGS",
        "GiB",
    ):
        table.add_column(name, justify="left" if name == "machine" else "right", no_wrap=True)
    table.add_column("layout")
    front = efficient(found)
    for one, sequences in zip(found, batches, strict=True):
        low, middle, high = one.days
        table.add_row(
            *(["*" if one in front else "", one.machine.name] if named else []),
            f"{one.world_size:,}",
            rounded(middle),
            f"{rounded(low)} - {rounded(high)}",
            *_interruptions(one.goodput)[: len(pauses)],
            f"{one.gpu_hours:,.0f}",
            *([_number(one.money)] if priced else []),
            *([_number(one.energy_mwh)] if powered else []),
            *([f"{sequences:,}"] if several_batches else []),
            token_rate(one.result.best.tgs[0]),
            gibibytes(one.result.best.memory.device[0], one.result.best.verdict(0) == FITS),
            describe(one.result.best, 0),
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _interruptions(found: Goodput | None) -> list[str]:
    if found is None:
        return []
    return [
        f"{found.share:.1%} of it",
        *(seconds(time) if math.isfinite(time) else "never" for time in (found.mtbf, found.interval)),
    ]


def plan_rows(found: Sequence[Training]) -> list[dict[str, Any]]:
    """Return the trainings for JSON."""
    front = efficient(found)
    return [{**_row(one), "efficient": one in front} for one in found]


def _row(one: Training) -> dict[str, Any]:
    return {
        "machine": one.machine.name or None,
        "kernels": one.result.best.problem.cost.origin,
        "world_size": one.world_size,
        "days": one.days[1],
        "days_interval": [one.days[0], one.days[2]],
        "gpu_hours": one.gpu_hours,
        "money": one.money,
        "energy_mwh": one.energy_mwh,
        "tgs": float(one.result.best.tgs[0]),
        "layout": layout_dict(one.result.best, 0),
        "verdict": one.result.best.verdict(0),
        "peak_memory_bytes": float(one.result.best.memory.device[0]),
        "memory_bound_bytes": float(one.result.best.memory.bound[0]),
        "goodput": None
        if one.goodput is None
        else {
            "share": one.goodput.share,
            "lost": one.goodput.parts,
            "seconds_between_failures": one.goodput.mtbf if math.isfinite(one.goodput.mtbf) else None,
            "checkpoint_interval_s": one.goodput.interval if math.isfinite(one.goodput.interval) else None,
        },
    }
