"""Estimates side by side: every part of the step and of the memory, which is faster, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from rich.table import Table

from profiler.units import GIB
from solver.report.describe import describe
from solver.report.explain import Explanation, explain
from solver.report.output import problem_dict, solution_dict
from solver.report.uncertainty import errors_of, normal_cdf, own_stds
from solver.report.words import PART_NAMES, between, probability, seconds, token_rate
from solver.step.memory import AT_RISK, MEMORY_PARTS, OUT_OF_MEMORY
from solver.step.per_stage import memory_of_stages, slowest_stage
from solver.step.solutions import Solutions

_SAME = 5e-4  #: smaller changes are printed as 0.0%
_LEAST_GIB = 0.05  #: smaller parts of the memory are not listed


@dataclass(frozen=True)
class Side:
    """What the user called it, the estimate of one layout, and the name of the profile whose kernels it rests on."""

    name: str
    solutions: Solutions
    kernels: str = ""

    @cached_property
    def why(self) -> Explanation:
        return explain(self.solutions, 0)

    @property
    def tgs(self) -> float:
        return float(self.solutions.tgs[0])

    def headline(self) -> str:
        """Return model, machine and layout in one line."""
        p = self.solutions.problem
        return (
            f"{p.model.name}, sequences of {p.run.seq_len}, {self.solutions.tokens[0]:,.0f} tokens a step, {p.run.precision}, "
            f"{p.run.framework}, {p.run.world_size} x {p.cost.device.name}, {describe(self.solutions, 0)}"
        )

    def tokens(self) -> str:
        """Return the tokens of a step."""
        return f"{self.solutions.tokens[0]:,.0f}"

    def slowest(self) -> str:
        """Return which pipeline stage is the slowest, of how many."""
        stages = int(self.solutions.layouts.strategy(0, self.solutions.problem.run).pp)
        return f"{slowest_stage(self.solutions, 0) + 1} of {stages}" if stages > 1 else ""

    def stages(self) -> str:
        """Return the memory of each pipeline stage."""
        sizes = memory_of_stages(self.solutions, 0).device / GIB
        return " ".join(f"{size:.1f}" for size in sizes) if len(sizes) > 1 else ""


def probability_faster(side: Side, other: Side) -> float:
    """Return the probability that ``side`` trains more tokens per GPU and second than ``other``.

    Both errors are log-normal. Of two layouts of one run, on one machine or on two estimated from the same kernels (a device
    and one that is derived from it), the smaller uncertainty of each kind of op is common, and what is of the system; what is
    not: LAYOUT_STD each, the rest of each kind, and that of a tensor group that spans nodes where only one of them has such. Of
    two models, frameworks or sets of kernels nothing is taken to be common.
    """
    if _run_of(side) != _run_of(other):
        std = math.hypot(side.why.relative_std, other.why.relative_std)
    else:
        std = math.hypot(*own_stds([errors_of(one.solutions, 0, one.why.kind_uncertainties()) for one in (side, other)]))
    return float(normal_cdf(float(np.log(side.tgs / other.tgs)) / std))


def _run_of(side: Side) -> tuple[Any, ...]:
    """Return what two estimates must share for some of their errors to be common: the run, and what its kernels rest on."""
    p = side.solutions.problem
    return side.kernels, p.model, p.run.framework, p.run.precision, p.run.seq_len


def verdicts(sides: Sequence[Side]) -> list[str]:
    """Return a sentence on every side but the first: how much faster or slower it is, and how sure that is; before them which
    sides cannot run for want of memory, after them which may not."""
    fits = [side.solutions.verdict(0) for side in sides]
    cannot, may_not = ([f"{n}" for n, verdict in enumerate(fits, 1) if verdict == word] for word in (OUT_OF_MEMORY, AT_RISK))
    first, lines = sides[0], []
    if len(cannot) == len(sides):
        lines.append(
            "None of these layouts fits in memory, so the times are hypothetical; foretrain search finds layouts that fit"
        )
    elif cannot:
        lines.append(f"Does not fit in memory, so its time is hypothetical: {', '.join(cannot)}")
    for number, side in enumerate(sides[1:], 2):
        change, sure = side.tgs / first.tgs - 1, probability_faster(side, first)
        if abs(change) < _SAME:
            lines.append(f"{number} is as fast as 1 per GPU")
            continue
        if change < 0:
            sure = 1 - sure
        word = "faster" if change >= 0 else "slower"
        uncertainty = "" if sure >= 0.9 else ", within the uncertainty"
        lines.append(
            f"{number} is {abs(change):.1%} {word} than 1 per GPU: {word} with {probability(sure)} probability{uncertainty}"
        )
    return lines + ([f"May not fit in memory: {', '.join(may_not)}"] if may_not else [])


def comparison_table(sides: Sequence[Side]) -> Table:
    """Return a table with a column for each side: results, parts of the step, parts of the memory."""
    table = Table(title="Side by side; parts of the step are those of the slowest stage", title_justify="left")
    table.add_column("")
    for number in range(1, len(sides) + 1):
        table.add_column(str(number), justify="right")
    rows: tuple[tuple[str, Callable[[Side], str]], ...] = (
        ("tokens/GPU/s", lambda side: token_rate(side.tgs)),
        ("relative to 1", lambda side: f"{side.tgs / sides[0].tgs - 1:+.1%}"),
        ("step", lambda side: seconds(side.why.seconds)),
        ("90% interval", lambda side: between(side.why.interval, side.why.seconds, "-")),
        ("MFU", lambda side: f"{side.solutions.mfu[0]:.1%}"),
    )
    if len({side.tokens() for side in sides}) > 1:
        table.add_row("tokens a step", *(side.tokens() for side in sides))
    for name, text in rows:
        table.add_row(name, *map(text, sides), end_section=name == "MFU")
    if any(side.slowest() for side in sides):
        table.add_row("slowest stage", *(side.slowest() for side in sides))
    parts = [side.why.by_part() for side in sides]
    used = [part for part in PART_NAMES if any(found[part] for found in parts)]
    for part in used:
        table.add_row(
            PART_NAMES[part], *(seconds(found[part]) if found[part] else "" for found in parts), end_section=part == used[-1]
        )
    for row, part in enumerate(MEMORY_PARTS):
        sizes = [float(side.solutions.memory.parts[row, 0]) / GIB for side in sides]
        if max(sizes) >= _LEAST_GIB:
            table.add_row(f"{part.replace('_', ' ')}, GiB", *(f"{size:.1f}" if size >= _LEAST_GIB else "" for size in sizes))
    memory = [side.solutions.memory for side in sides]
    table.add_row("peak memory, GiB", *(f"{found.device[0] / GIB:.1f}" for found in memory))
    table.add_row("  at most", *(f"{found.bound[0] / GIB:.1f}" for found in memory))
    if any(side.stages() for side in sides):
        table.add_row("  on each stage", *(side.stages() for side in sides))
    table.add_row("fits", *(side.solutions.verdict(0) for side in sides))
    return table


def comparison_dict(sides: Sequence[Side], profiles: Sequence[str]) -> dict[str, Any]:
    """Return the JSON content of a comparison; profiles: what each profile is, in words."""
    return {
        "sides": [
            {"name": side.name, "faster_than_first": probability_faster(side, sides[0]) if side is not sides[0] else None}
            | problem_dict(side.solutions, profile)
            | {"best": [solution_dict(side.solutions, 0, side.why)]}
            for side, profile in zip(sides, profiles, strict=True)
        ]
    }
