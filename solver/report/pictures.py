"""Pictures of a search: Pareto-optimal layouts, time and memory of every stage, scaling with the number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from profiler.files import replacing
from profiler.units import GIB
from solver.report.describe import describe
from solver.report.explain import explain
from solver.report.memory_timeline import StageTimeline
from solver.report.timeline import StepTimeline
from solver.report.words import PART_NAMES
from solver.search.search import SearchResult
from solver.step.memory import MEMORY_PARTS
from solver.step.per_stage import memory_of_stages, time_of_stages
from solver.step.solutions import Solutions
from solver.step.time import TIME_PARTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def pareto_figure(result: SearchResult) -> Figure:
    """Plot tokens/GPU/s against memory of every Pareto-optimal layout, and label up to four of them."""
    optimal, problem = result.pareto, result.problem
    memory, tgs = optimal.memory.device / GIB, optimal.tgs
    figure, axes = canvas(1)
    axes.step(memory, tgs, where="post", color="tab:blue", alpha=0.5)
    axes.plot(memory, tgs, "o", color="tab:blue", ms=4, label=f"{len(optimal)} Pareto-optimal layouts")
    axes.axvline(problem.cluster.memory_bytes / GIB, color="tab:red", ls="--", label="memory per GPU")
    named = sorted({0, len(optimal) // 3, 2 * len(optimal) // 3, len(optimal) - 1})
    for index in named:  # the curve rises: above it to the left, and below it to the right, nothing is drawn
        right = memory[index] > (memory.min() + memory.max()) / 2
        axes.annotate(
            fill(describe(optimal, index), 45),
            (memory[index], tgs[index]),
            xytext=(-7, 5) if right else (7, -5),
            fontsize=7,
            textcoords="offset points",
            ha="right" if right else "left",
            va="bottom" if right else "top",
        )
    axes.set_xlabel("peak memory per GPU [GiB]")
    axes.set_ylabel("TGS [tokens per GPU per second]")
    axes.set_ylim(min(0.0, tgs.min() - 0.22 * tgs.max()), tgs.max() * 1.25)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.25 * tgs.max()])
    axes.set_title(
        f"{problem.model.name} on {problem.run.world_size} x {problem.cost.device.name}\n"
        f"Pareto-optimal among {result.feasible:,} feasible layouts: none is both faster and smaller",
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


def stages_figure(solutions: Solutions) -> Figure:
    """Draw the parts of the step time and of the peak memory of the first layout, stacked, one bar per pipeline stage."""
    problem = solutions.problem
    times, memory = time_of_stages(solutions, 0), memory_of_stages(solutions, 0)
    figure, (left, right) = canvas(2)
    names = [PART_NAMES[part] for part in TIME_PARTS]
    _stack(left, times, names, {"pipeline bubble": "0.85"})
    left.set_ylabel("time of a step [s]")
    outside = (memory.device - memory.allocated)[None]
    _stack(
        right,
        [*(memory.parts / GIB), *(outside / GIB)],
        [*(n.replace("_", " ") for n in MEMORY_PARTS), "allocator gaps, runtime"],
        {},
    )
    right.axhline(problem.cluster.memory_bytes / GIB, color="tab:red", ls="--", label="memory per GPU")
    right.set_ylim(top=max(right.get_ylim()[1], 1.05 * problem.cluster.memory_bytes / GIB))
    right.set_ylabel("peak memory per GPU [GiB]")
    for axes in (left, right):
        axes.set_xlabel("pipeline stage")
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    figure.suptitle(
        f"{problem.model.name} on {problem.run.world_size} x {problem.cost.device.name}\n{describe(solutions, 0)}",
        fontsize=10,
    )
    return figure


def memory_figure(step: StepTimeline, stages: Sequence[StageTimeline], limit: float) -> Figure:
    """Draw the allocated memory of every stage through a step, each with its peak; ``limit``: bytes of a GPU."""
    from matplotlib import colormaps

    figure, axes = canvas(1)
    few, most = len(stages) <= 8, max(len(stages) - 1, 1)
    for number, stage in enumerate(stages):
        colour = f"C{number}" if few else colormaps["turbo"](number / most)
        times, levels = stage.curve
        axes.step(
            [*times, step.end],
            [*levels / GIB, levels[-1] / GIB],
            where="post",
            lw=0.8,
            color=colour,
            label=stage.name if len(stages) <= 16 else None,
        )
        time, level = stage.peak
        axes.plot([time], [level / GIB], "v", ms=5, color=colour)
    fullest = max(stages, key=lambda stage: stage.peak[1])
    _, level = fullest.peak
    axes.axhline(limit / GIB, color="tab:red", ls="--", label="memory per GPU")
    axes.set_xlim(0, step.end)
    axes.set_ylim(0, max(limit, level) / GIB * 1.08)
    axes.set_xlabel("time [s]")
    axes.set_ylabel("allocated memory [GiB]")
    peak = f"the highest, {level / GIB:.1f} GiB, on {fullest.name}: {fullest.at_peak()}"
    axes.set_title(f"{step.title}\nmemory through one step; triangles: the peak of each stage\n{peak}", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=6, frameon=False)
    return figure


def scaling_figure(results: Sequence[SearchResult]) -> Figure:
    """Draw tokens/GPU/s of the best layout against the number of GPUs, with its 90% interval; each point names its layout."""
    worlds = [result.problem.run.world_size for result in results]
    tgs = [float(result.best.tgs[0]) for result in results]
    spread = [explain(result.best, 0) for result in results]
    figure, axes = canvas(1)
    low, high = ([rate * why.seconds / why.interval[end] for rate, why in zip(tgs, spread, strict=True)] for end in (1, 0))
    axes.fill_between(worlds, low, high, color="tab:blue", alpha=0.15, label="90% prediction interval")
    axes.plot(worlds, tgs, "o-", color="tab:blue", label="best layout")
    top = 1.15 * max(high)
    for world, rate, result in zip(worlds, tgs, results, strict=True):  # upright, below the curve or above where it is low
        below = rate > 0.4 * top
        name = fill(describe(result.best, 0), 34)
        axes.annotate(
            name,
            (world, 0.01 * top if below else 0.8 * top),
            rotation=90,
            fontsize=7,
            ha="center",
            va="bottom" if below else "top",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_ylim(0, top)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("TGS [tokens per GPU per second]")
    problem, tokens = results[0].problem, results[0].best.tokens[0]
    title = f"{problem.model.name} on {problem.cost.device.name}"
    axes.set_title(f"{title}: {tokens:,.0f} tokens per step at every number of GPUs", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    return figure


def canvas(panels: int) -> tuple[Figure, Any]:
    """Return an empty figure of no backend, so that scripts and notebooks keep theirs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 if panels == 1 else 11, 5.5), layout="constrained")
    return figure, figure.subplots(1, panels)


def _stack(axes: Axes, rows: Any, names: Sequence[str], colors: dict[str, str]) -> None:
    """Draw bars of ``rows`` [parts][stages] on top of one another; parts that are nowhere visible are left out.

    A part has its colour in every picture, so that the pictures of two layouts can be laid side by side.
    """
    from matplotlib import colormaps

    stages = range(1, len(rows[0]) + 1)
    total = sum(rows)
    bottom = 0.0 * total
    tab20 = colormaps["tab20"].colors  # type: ignore[attr-defined]
    palette = [*tab20[:14], *tab20[16:]]  # without its greys, which are the bubble's
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        if (row > 0.002 * total.max()).any():
            axes.bar(stages, row, 0.8, bottom=bottom, color=colors.get(name) or palette[number % len(palette)], label=name)
        bottom = bottom + row
    axes.set_xticks(stages if len(stages) <= 16 else list(stages)[:: len(stages) // 8])
    axes.set_ylim(0, float(total.max()) * 1.05)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the path's ending."""
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=130)
