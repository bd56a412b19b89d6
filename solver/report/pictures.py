"""Plots of a search."""

from __future__ import annotations

from pathlib import Path

from profiler.files import replacing
from profiler.profile.profile import GIB
from solver.report.terminal import describe
from solver.search.search import SearchResult


def draw_pareto(result: SearchResult, path: Path) -> None:
    """Plot tokens/GPU/s against memory of every Pareto-optimal layout, and label up to four of them."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    optimal, problem = result.pareto, result.problem
    memory, tgs = optimal.memory.device / GIB, optimal.tgs
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    axes.step(memory, tgs, where="post", color="tab:blue", alpha=0.5)
    axes.plot(memory, tgs, "o", color="tab:blue", ms=4, label=f"{len(optimal)} Pareto-optimal layouts")
    axes.axvline(problem.cluster.memory_bytes / GIB, color="tab:red", ls="--", label="memory per GPU")
    named = sorted({0, len(optimal) // 3, 2 * len(optimal) // 3, len(optimal) - 1})
    for index in named:  # the curve rises: above it to the left, and below it to the right, nothing is drawn
        right = memory[index] > memory.max() / 2
        axes.annotate(
            describe(optimal, index), (memory[index], tgs[index]), xytext=(-7, 5) if right else (7, -5), fontsize=7,
            textcoords="offset points", ha="right" if right else "left", va="bottom" if right else "top",
        )  # fmt: skip
    axes.set_xlabel("peak memory per GPU [GiB]")
    axes.set_ylabel("TGS [tokens per GPU per second]")
    axes.set_ylim(0, tgs.max() * 1.08)
    axes.set_title(
        f"{problem.model.name} on {problem.run.world_size} x {problem.cost.device.name}\n"
        f"Pareto-optimal among {result.feasible:,} feasible layouts: none is both faster and smaller",
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:].lower(), dpi=130)
    plt.close(figure)
