"""Where a layout's step time and memory go, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from profiler.units import GIB
from solver.report.describe import describe
from solver.report.explain import Explanation, explain
from solver.report.other_settings import OtherSetting, other_settings
from solver.report.words import PART_NAMES, seconds
from solver.step.memory import MEMORY_PARTS
from solver.step.per_stage import memory_of_stages, slowest_stage
from solver.step.solutions import Solutions

#: Other settings that are named below a breakdown.
_SETTINGS = 3


def breakdown(solutions: Solutions, index: int) -> Group:
    """Return how step time and memory are divided, and how much of the time is measured, interpolated or extrapolated."""
    why = explain(solutions, index)
    pp = int(solutions.layouts.splits.pp[solutions.layouts.row[index]])
    where = f", on stage {slowest_stage(solutions, index) + 1} of {pp}, the slowest" if pp > 1 else ""
    table = Table(title=f"Why: {describe(solutions, index)}{where}", title_justify="left")
    table.add_column("part of the step")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    for part, value in why.by_part().items():
        if value:
            table.add_row(PART_NAMES[part], seconds(value), f"{value / why.seconds:.1%}")
        if part == "recompute":
            for module, spent in sorted(why.by_module().items(), key=lambda item: -item[1]):
                table.add_row(
                    f"  compute and recomputation of {module.replace('_', ' ')}",
                    seconds(spent),
                    f"{spent / why.seconds:.1%}",
                    style="dim",
                )
    return Group(table, _basis(why), _other_settings_text(other_settings(solutions, index)), _memory(solutions, index))


def _other_settings_text(settings: Sequence[OtherSetting]) -> Text:
    if not settings:
        return Text("no other setting of the run would change the step by 2% or more")
    listed = "; ".join(f"{seconds(setting.seconds)} if {setting.text}" for setting in settings[:_SETTINGS])
    return Text(f"the step would take {listed}")


def _basis(why: Explanation) -> Text:
    shares = ", ".join(f"{share:.0%} {basis}" for basis, share in why.by_basis().items() if share >= 0.005)
    return Text(f"share of the time: {shares}; relative standard deviation of the step {why.relative_std:.1%}")


def _memory(solutions: Solutions, index: int) -> Text:
    memory = solutions.memory
    parts = sorted(zip(MEMORY_PARTS, memory.parts[:, index], strict=True), key=lambda item: -item[1])
    listed = ", ".join(f"{name.replace('_', ' ')} {size / GIB:.1f}" for name, size in parts if size >= 0.05 * GIB)
    number = int(memory.stage[index])
    middle = f"stage {number + 1} of {int(solutions.layouts.splits.pp[solutions.layouts.row[index]])}"
    where = "the last pipeline stage" if memory.on_last_stage[index] else middle if number else "the first pipeline stage"
    stages = memory_of_stages(solutions, index).device / GIB
    every = f"\nGiB on each stage: {' '.join(f'{size:.1f}' for size in stages)}" if len(stages) > 1 else ""
    return Text(
        f"memory peaks on {where} (GiB): {listed}; allocated {memory.allocated[index] / GIB:.1f}, "
        f"reserved {memory.reserved[index] / GIB:.1f}, with CUDA context and NCCL {memory.device[index] / GIB:.1f}" + every
    )
